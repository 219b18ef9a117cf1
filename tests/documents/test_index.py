"""The index: its tables; what it says of tilings and parts is checked by who opens it."""

import copy

import pytest

from ckptfmt.documents.index import Index
from ckptfmt.documents.msgpk import dump_packed_document
from ckptfmt.documents.packed import dump_packed
from ckptfmt.errors import Code, UnsupportedError
from tests.builders import code_of, error_of, parse_signed, small_files, unpacked
from tests.documents.test_part import column, entry, set_in, swap

PATH = "index-0123456789abcdef.msgpack"
CONTENT = small_files()[PATH]
SIGNED = parse_signed(CONTENT)


def parse(signed):
    return Index.parse(dump_packed_document(signed)[0], where=PATH)


def test_an_index_comes_back():
    """REQ-DOC-022, REQ-IDX-009: equal shardings once, in the order of their first use."""
    index = Index.parse(CONTENT, where=PATH)
    assert index.dump()[0] == CONTENT
    assert len({tensor.sharding for tensor in index.tensors}) == len(
        unpacked(SIGNED["shardings"]["ndim"])
    )
    first_uses = list(dict.fromkeys(unpacked(SIGNED["tensors"]["sharding"])))
    assert first_uses == sorted(first_uses)


EDITS = {
    "another type": (set_in(("type",), "part"), Code.DOC_SCHEMA, "REQ-DOC-011"),
    "another version": (
        set_in(("format_version",), "0.2"),
        Code.VERSION_UNSUPPORTED,
        "REQ-DOC-010",
    ),
    "an unknown feature": (
        set_in(("features", "reader"), ["packs"]),
        Code.FEATURE_UNSUPPORTED,
        "REQ-DOC-010",
    ),
    "a member more": (set_in(("extra",), None), Code.DOC_SCHEMA, "REQ-DOC-011"),
    "95 a part less": (
        column("parts", "nbytes", lambda v: v[:-1]),
        Code.COLUMN_FORM,
        "REQ-IDX-002",
    ),
    "95 a part more": (
        column("parts", "nbytes", lambda v: [*v, 1]),
        Code.COLUMN_FORM,
        "REQ-IDX-002",
    ),
    "a digest short": (
        set_in(("parts", "digest"), lambda d: d[:-1]),
        Code.COLUMN_FORM,
        "REQ-IDX-002",
    ),
    "a part over 4 GiB": (
        entry("parts", "nbytes", 0, (4 << 30) + 1),
        Code.COLUMN_FORM,
        "REQ-IDX-002",
    ),
    "93 unknown part of a box": (entry("shardings", "part", 0, 2), Code.COLUMN_FORM, "REQ-IDX-002"),
    "93 unknown part of a leaf": (entry("leaves", "part", 0, 2), Code.COLUMN_FORM, "REQ-IDX-002"),
    "93 unknown part of a stream": (
        entry("streams", "part", 0, 2),
        Code.COLUMN_FORM,
        "REQ-IDX-002",
    ),
    "unknown sharding": (entry("tensors", "sharding", 0, 99), Code.COLUMN_FORM, "REQ-IDX-002"),
    "92 sharding of another rank": (
        entry("tensors", "sharding", -1, 3),
        Code.COLUMN_FORM,
        "REQ-IDX-002",
    ),
    "sharding of 33 dimensions": (
        entry("shardings", "ndim", 0, 33),
        Code.COLUMN_FORM,
        "REQ-IDX-002",
    ),
    "unknown form of sharding": (entry("shardings", "form", 0, 2), Code.COLUMN_FORM, "REQ-IDX-002"),
    "96 more boxes than allowed": (
        entry("shardings", "box_count", 0, 10_000_000),
        Code.LIMIT_EXCEEDED,
        "REQ-LIM-001",
    ),
    "a box too many": (entry("shardings", "box_count", 0, 2), Code.COLUMN_FORM, "REQ-IDX-002"),
    "a box too many, of some part": (
        lambda signed: (
            entry("shardings", "box_count", 0, 2)(signed),
            column("shardings", "part", lambda v: [*v, 0])(signed),
        ),
        Code.COLUMN_FORM,
        "REQ-IDX-002",
    ),
    "grid of more intervals than boxes": (
        entry("shardings", "grid_shape", 0, 2),
        Code.COLUMN_FORM,
        "REQ-IDX-002",
    ),
    "grid of a dimension without intervals": (
        entry("shardings", "grid_shape", 0, 0),
        Code.COLUMN_FORM,
        "REQ-IDX-002",
    ),
    "grid with an empty interval": (
        entry("shardings", "extent", 0, 0),
        Code.COLUMN_FORM,
        "REQ-IDX-002",
    ),
    "an interval too few": (
        column("shardings", "extent", lambda v: v[:-1]),
        Code.COLUMN_FORM,
        "REQ-IDX-002",
    ),
    "an interval longer than any dimension": (
        entry("shardings", "extent", 0, 2**48 + 1),
        Code.COLUMN_FORM,
        "REQ-IDX-002",
    ),
    "intervals longer than any dimension": (
        column("shardings", "extent", lambda v: [2**48] * len(v)),
        Code.COLUMN_FORM,
        "REQ-IDX-002",
    ),
    "scope out of form": (set_in(("scopes", 1), "lw/00"), Code.SCOPE_FORM, "REQ-IDX-006"),
    "scopes out of order": (
        set_in(("scopes",), lambda s: s[::-1]),
        Code.COLUMN_ORDER,
        "REQ-IDX-003",
    ),
    "unknown dtype": (set_in(("dtypes", 0), "complex129"), Code.COLUMN_FORM, "REQ-IDX-002"),
    "tensors out of order": (
        column("tensors", "field", lambda v: v[::-1]),
        Code.COLUMN_ORDER,
        "REQ-IDX-003",
    ),
    "tensor twice": (
        column("tensors", "scope", lambda v: [*v[:-1], v[-2]]),
        Code.COLUMN_ORDER,
        "REQ-IDX-003",
    ),
    "leaves out of order": (column("leaves", "field", swap), Code.COLUMN_ORDER, "REQ-IDX-003"),
    "streams out of order": (column("streams", "scope", swap), Code.COLUMN_ORDER, "REQ-IDX-003"),
    "alias of no tensor": (entry("aliases", "tensor", 0, 99), Code.COLUMN_FORM, "REQ-IDX-002"),
    "absent: unknown field": (
        set_in(("absent", "weight"), "x"),
        Code.MANIFEST_FIELDS,
        "REQ-MAN-003",
    ),
    "absent: no reason": (set_in(("absent", "topology"), ""), Code.MANIFEST_FIELDS, "REQ-MAN-003"),
    "too many elements": (
        lambda signed: signed["tensors"].update(
            global_shape=dump_packed([2**48] * len(unpacked(signed["tensors"]["global_shape"])))
        ),
        Code.COLUMN_FORM,
        "REQ-IDX-002",
    ),
}


@pytest.mark.parametrize(("edit", "code", "requirement"), EDITS.values(), ids=EDITS)
def test_wrong_indices_are_refused(edit, code, requirement):
    """Rows 92, 93, 95 and 96; under a valid digest each."""
    signed = copy.deepcopy(SIGNED)
    edit(signed)
    error = error_of(lambda: parse(signed))
    assert error.where.startswith(PATH)
    assert (error.code, error.requirement) == (code, requirement)
    assert isinstance(error, UnsupportedError) == ("UNSUPPORTED" in error.code)


@pytest.mark.parametrize("key", SIGNED)
def test_no_member_may_be_missing(key):
    """REQ-DOC-011."""
    assert code_of(lambda: parse({k: v for k, v in SIGNED.items() if k != key})) == Code.DOC_SCHEMA


@pytest.mark.parametrize(
    ("table", "key"), [(t, k) for t, v in SIGNED.items() if isinstance(v, dict) for k in v]
)
def test_no_column_may_be_missing_or_null(table, key):
    """REQ-IDX-002."""
    for value in (..., None):
        signed = copy.deepcopy(SIGNED)
        set_in((table, key), value)(signed)
        code = code_of(lambda signed=signed: parse(signed))
        if table != "absent" or value is None:
            assert code in {
                Code.DOC_SCHEMA,
                Code.COLUMN_FORM,
                Code.PACKED_FORM,
                Code.MANIFEST_FIELDS,
            }


def test_nothing_is_listed_that_does_not_occur():
    """REQ-IDX-007, REQ-IDX-009."""
    unused = copy.deepcopy(SIGNED)
    unused["scopes"].append("lw/7")
    error = error_of(lambda: parse(unused))
    assert (error.code, error.requirement) == (Code.COLUMN_ORDER, "REQ-IDX-007")
    other = copy.deepcopy(SIGNED)
    numbers = unpacked(other["tensors"]["sharding"])
    other["tensors"]["sharding"] = dump_packed([number or 7 for number in numbers])
    error = error_of(lambda: parse(other))
    assert (error.code, error.requirement) == (Code.COLUMN_ORDER, "REQ-IDX-009")
