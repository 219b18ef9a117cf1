"""Packed arrays and columns: one form for each list of integers."""

import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfmt import limits
from ckptfmt.documents.packed import Columns, dump_packed, dump_strings, fold, parse_packed, unfold
from ckptfmt.errors import Code
from tests.builders import code_of, error_of


def planes(values, width):
    return bytes(value >> 8 * plane & 0xFF for plane in range(width) for value in values)


@given(st.lists(st.integers(0, 300) | st.integers(0, (1 << 63) - 1)))
def test_integers_come_back(values):
    """REQ-DOC-024."""
    width, content = dump_packed(values)
    assert list(parse_packed([width, content], "x")) == values
    assert width == next(w for w in (1, 2, 4, 8) if max(values, default=0) < 1 << 8 * w)
    assert content == planes(values, width)


@pytest.mark.parametrize("greatest", [0, 255, 256, 65535, 65536, 2**32 - 1, 2**32, 2**63 - 1])
def test_every_other_width_is_refused(greatest):
    """REQ-DOC-024: the width is the smallest."""
    right: Any
    right, _ = dump_packed([1, greatest])
    for width in (1, 2, 4, 8):
        if width > right:
            content = planes([1, greatest], width)
            assert (
                code_of(lambda width=width, content=content: parse_packed([width, content], "x"))
                == Code.PACKED_FORM
            )


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
    assert made.packed("a", count=2, below=5).tolist() == [0, 4]
    assert made.packed("none", count=0, below=0).tolist() == []
    assert code_of(lambda: made.packed("a", below=4)) == Code.COLUMN_FORM
    assert code_of(lambda: made.packed("a", below=0)) == Code.COLUMN_FORM
    assert code_of(lambda: made.packed("a", count=1)) == Code.COLUMN_FORM
    assert code_of(lambda: made.packed("a", count=3)) == Code.COLUMN_FORM
    assert error_of(lambda: made.packed("a", count=3)).where == "x#/a"


@given(st.lists(st.text(st.characters(codec="utf-8"), max_size=5)))
def test_strings_come_back(values):
    """REQ-DOC-026."""
    found = columns(a=dump_strings(values)).strings("a", count=len(values))
    assert found.tolist() == values == list(found)
    assert len(found) == len(values)
    assert found[1:] == values[1:]
    assert [found[row] for row in found.rows_with_text()] == [value for value in values if value]
    assert found.take(np.arange(len(values))[::-1]).tolist() == values[::-1]


STRINGS: dict[str, Any] = {
    "nil": None,
    "text alone": "ab",
    "an array of strings": ["a", "b"],
    "three entries": [*dump_strings(["a", "b"]), 1],
    "bytes for text": [dump_packed([1, 1]), b"ab"],
    "a text too long": [dump_packed([1, 1]), "abc"],
    "a text too short": [dump_packed([1, 1]), "a"],
    "one string too few": dump_strings(["a"]),
    "one string too many": dump_strings(["a", "b", ""]),
    "a cut within a character": [dump_packed([1, 1]), "é"],
    "a cut within a long one": [dump_packed([3, 1]), "\U0001f600"],
}


@pytest.mark.parametrize("value", STRINGS.values(), ids=STRINGS)
def test_other_columns_of_strings_are_refused(value):
    """REQ-DOC-026, REQ-IDX-002."""
    assert code_of(lambda: columns(a=value).strings("a", count=2)) in {
        Code.COLUMN_FORM,
        Code.PACKED_FORM,
    }


@pytest.mark.parametrize("value", [None, "ab", ["a", 1], ["a", None], {"a": 1}, [b"a"]])
def test_texts_are_lists_of_strings(value):
    """REQ-IDX-002."""
    assert columns(a=["b", "a"]).texts("a") == ["b", "a"]
    assert code_of(lambda: columns(a=value).texts("a")) == Code.COLUMN_FORM


def test_names_have_a_limit():
    """REQ-LIM-001: in bytes."""
    assert columns(a=dump_strings(["é" * 2048])).strings("a").tolist() == [
        "é" * (limits.NAME_NBYTES // 2)
    ]
    assert (
        code_of(lambda: columns(a=dump_strings(["é" * 2048 + "x"])).strings("a"))
        == Code.LIMIT_EXCEEDED
    )


@given(st.lists(st.integers(-(1 << 62), (1 << 62) - 1)))
def test_signs_come_back(values):
    """REQ-DOC-024: folded, integers of both signs are non-negative."""
    folded = fold(np.array(values, np.int64))
    assert folded.tolist() == [2 * value if value >= 0 else -2 * value - 1 for value in values]
    assert unfold(folded).tolist() == values


def test_a_wrong_count_costs_nothing():
    """REQ-LIM-001: a column that is compressed to little is refused before it is made eight times larger."""
    content = bytes(32 << 20)
    tracemalloc.start()
    assert code_of(lambda: columns(a=[1, content]).packed("a", count=3)) == Code.COLUMN_FORM
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


@pytest.mark.parametrize("value", [None, b"ab", [b"a"], [b"a", "b"], [b"a", None]])
def test_blobs_are_lists_of_byte_strings(value):
    """REQ-IDX-002."""
    assert code_of(lambda: columns(a=value).blobs("a", count=2)) == Code.COLUMN_FORM


@pytest.mark.parametrize(
    "value", [None, "ab" * 32, b"", b"a" * 63, b"a" * 65, [b"a" * 32, b"b" * 32]]
)
def test_columns_of_digests_have_exactly_their_bytes(value):
    """REQ-IDX-002."""
    assert columns(a=b"ab" * 32).digests("a", count=2) == b"ab" * 32
    assert code_of(lambda: columns(a=value).digests("a", count=2)) == Code.COLUMN_FORM


@pytest.mark.parametrize("rows", [[1, 1], [2, 1], [1, 2, 2], ["b", "a"], [(1, b"b"), (1, b"a")]])
def test_rows_increase_strictly(rows):
    """REQ-IDX-003."""
    columns(a=1).check_increasing("a", sorted(set(rows)))
    assert code_of(lambda: columns(a=1).check_increasing("a", rows)) == Code.COLUMN_ORDER
