"""Packed arrays and columns: one form for each list of integers."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfmt import limits
from ckptfmt.documents.packed import Columns, dump_packed, parse_packed
from ckptfmt.errors import Code
from tests.builders import code_of, error_of


@given(st.lists(st.integers(0, 300) | st.integers(0, (1 << 63) - 1)))
def test_integers_come_back(values):
    """REQ-DOC-024."""
    width, content = dump_packed(values)
    assert list(parse_packed([width, content], "x")) == values
    assert width == next(w for w in (1, 2, 4, 8) if max(values, default=0) < 1 << 8 * w)
    assert content == b"".join(value.to_bytes(width, "little") for value in values)


@pytest.mark.parametrize("greatest", [0, 255, 256, 65535, 65536, 2**32 - 1, 2**32, 2**63 - 1])
def test_every_other_width_is_refused(greatest):
    """REQ-DOC-024: the width is the smallest."""
    right: Any
    right, _ = dump_packed([1, greatest])
    for width in (1, 2, 4, 8):
        if width > right:
            content = b"".join(value.to_bytes(width, "little") for value in (1, greatest))
            assert code_of(lambda width=width, content=content: parse_packed([width, content], "x")) == Code.PACKED_FORM


REFUSED: dict[str, Any] = {
    "nil": None,
    "nothing": [],
    "a map": {"width": 1},
    "bytes alone": b"\1\2",
    "text": "x",
    "no bytes": [1],
    "three entries": [1, b"", b""],
    "width 3": [3, b"\1\2\3"],
    "width 0": [0, b""],
    "width -1": [-1, b""],
    "width 16": [16, bytes(16)],
    "width true": [True, b"\1"],
    "width as text": ["1", b"\1"],
    "text for bytes": [1, "ab"],
    "half an entry": [2, b"\1\2\3"],
    "no entries, width 2": [2, b""],
    "2^63": [8, bytes(7) + b"\x80"],
    "2^64-1 among others": [8, bytes(8) + b"\xff" * 8],
    "2^63 among others of 8 bytes": [8, bytes(6) + b"\1\0" + bytes(7) + b"\x80"],
}


@pytest.mark.parametrize("value", REFUSED.values(), ids=REFUSED)
def test_other_forms_are_refused(value):
    error = error_of(lambda: parse_packed(value, "x#/y"))
    assert (error.code, error.where, error.requirement) == (Code.PACKED_FORM, "x#/y", "REQ-DOC-024")


def columns(**members):
    return Columns(members, tuple(members), "x")


def test_columns_have_exactly_their_keys():
    """REQ-IDX-002, REQ-DOC-011."""
    wrong: list[Any] = [None, [], {"a": 1}, {"a": 1, "b": 1, "c": 1}]
    for value in wrong:
        assert error_of(lambda value=value: Columns(value, ("a", "b"), "x")).code == Code.DOC_SCHEMA


def test_entries_are_within_their_range():
    """REQ-IDX-002."""
    made = columns(a=dump_packed([0, 4]), none=dump_packed([]))
    assert made.packed("a", count=2, below=5) == [0, 4]
    assert made.packed("none", count=0, below=0) == []
    assert code_of(lambda: made.packed("a", below=4)) == Code.COLUMN_FORM
    assert code_of(lambda: made.packed("a", below=0)) == Code.COLUMN_FORM
    assert code_of(lambda: made.packed("a", count=1)) == Code.COLUMN_FORM
    assert code_of(lambda: made.packed("a", count=3)) == Code.COLUMN_FORM
    assert error_of(lambda: made.packed("a", count=3)).where == "x#/a"


@pytest.mark.parametrize("value", [None, "ab", ["a", 1], ["a", None], {"a": 1}, [b"a"], ["a"] * 3])
def test_strings_are_lists_of_strings(value):
    """REQ-IDX-002."""
    assert code_of(lambda: columns(a=value).strings("a", count=2)) == Code.COLUMN_FORM


def test_names_have_a_limit():
    """REQ-LIM-001: in bytes."""
    assert columns(a=["é" * 2048]).strings("a") == ["é" * (limits.NAME_NBYTES // 2)]
    assert code_of(lambda: columns(a=["é" * 2048 + "x"]).strings("a")) == Code.LIMIT_EXCEEDED


@pytest.mark.parametrize("value", [None, b"ab", [b"a"], [b"a", "b"], [b"a", None]])
def test_blobs_are_lists_of_byte_strings(value):
    """REQ-IDX-002."""
    assert code_of(lambda: columns(a=value).blobs("a", count=2)) == Code.COLUMN_FORM


@pytest.mark.parametrize("value", [None, "abcd", b"", b"abc", b"abcde", [b"ab", b"cd"]])
def test_fixed_columns_have_exactly_their_bytes(value):
    """REQ-IDX-002."""
    assert columns(a=b"abcd").fixed("a", count=2, nbytes=2) == [b"ab", b"cd"]
    assert code_of(lambda: columns(a=value).fixed("a", count=2, nbytes=2)) == Code.COLUMN_FORM


@pytest.mark.parametrize("rows", [[1, 1], [2, 1], [1, 2, 2], ["b", "a"], [(1, b"b"), (1, b"a")]])
def test_rows_increase_strictly(rows):
    """REQ-IDX-003."""
    columns(a=1).check_increasing("a", sorted(set(rows)))
    assert code_of(lambda: columns(a=1).check_increasing("a", rows)) == Code.COLUMN_ORDER
