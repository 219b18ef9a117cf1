"""Parts: their tables, boxes, extents and the tiling of their files."""

import copy
import dataclasses
import time
import tracemalloc

import numpy as np
import pytest

from ckptfmt import limits
from ckptfmt.box import Box
from ckptfmt.documents.canonical import parse_document
from ckptfmt.documents.manifest import part_path
from ckptfmt.documents.msgpk import dump_packed_document
from ckptfmt.documents.packed import dump_packed, dump_strings
from ckptfmt.documents.part import Part, PartFile, dump_failure
from ckptfmt.documents.tables import TensorTable
from ckptfmt.errors import Code, FormatError, IntegrityError, err
from ckptfmt.store.memory import MemoryStore
from ckptfmt.write.writer import write_part
from tests.builders import (
    code_of,
    edit_strings,
    error_of,
    origin,
    parse_signed,
    small_files,
    snapshot,
    stream,
    tensor,
    unpacked,
)
from tests.part_rows import RowBox, RowExtent, RowTensor, contents_of, holdings_of, rows_of

PATH = "parts/0123456789abcdef-00001.msgpack"
CONTENT = small_files()[PATH]
SIGNED = parse_signed(CONTENT)


def parse(signed):
    return Part.parse(dump_packed_document(signed)[0], where=PATH)[0]


def test_a_part_comes_back():
    """REQ-DOC-022, REQ-DOC-025."""
    part, digest = Part.parse(CONTENT, where=PATH)
    assert part.dump() == (CONTENT, digest)
    assert len(part.files) == 4
    assert {tensor.storage for tensor in rows_of(part.holdings)} == {"persistent", "non-persistent"}
    assert part.absent.keys() == {"topology", "provenance"}


def set_in(path, value):
    """Return an edit that replaces the member at `path`, or deletes it if `value` is ..."""

    def edit(signed):
        at = signed
        for key in path[:-1]:
            at = at[key]
        if value is ...:
            del at[path[-1]]
        else:
            at[path[-1]] = value(at[path[-1]]) if callable(value) else value

    return edit


def column(table, key, edit):
    """Return an edit of a packed column, as a list."""

    def changed(packed):
        values = unpacked(packed)
        result = edit(values)
        return dump_packed(values if result is None else result)

    return set_in((table, key), changed)


def text(table, key, edit):
    """Return an edit of a column of strings, as a list; a value that isn't called replaces the first of them."""

    def change(strings):
        if not callable(edit):
            strings[0] = edit
            return None
        return edit(strings)

    return lambda signed: edit_strings(signed[table], key, change)


def entry(table, key, row, value):
    """Return an edit of one entry of a packed column."""

    def edit(values):
        values[row] = value

    return column(table, key, edit)


def swap(values):
    values[0], values[1] = values[1], values[0]


EDITS = {
    # the document
    "another type": (set_in(("type",), "index"), Code.DOC_SCHEMA, "REQ-DOC-011"),
    "a type that is no text": (set_in(("type",), None), Code.DOC_SCHEMA, "REQ-DOC-011"),
    "another version": (
        set_in(("format_version",), "0.2"),
        Code.VERSION_UNSUPPORTED,
        "REQ-DOC-010",
    ),
    "no version": (set_in(("format_version",), ...), Code.DOC_SCHEMA, "REQ-DOC-011"),
    "a feature of deltas": (
        set_in(("features", "reader"), ["deltas"]),
        Code.DOC_SCHEMA,
        "REQ-DOC-011",
    ),
    "an unknown feature": (
        set_in(("features", "reader"), ["packs"]),
        Code.FEATURE_UNSUPPORTED,
        "REQ-DOC-010",
    ),
    "features: a member more": (set_in(("features", "x"), []), Code.DOC_SCHEMA, "REQ-VER-008"),
    "features: a wrong writer feature": (
        set_in(("features", "writer"), [7]),
        Code.DOC_SCHEMA,
        "REQ-VER-008",
    ),
    "a member more": (set_in(("extra",), 1), Code.DOC_SCHEMA, "REQ-DOC-011"),
    "references": (set_in(("references",), ["blake3:"]), Code.PROFILE_MISMATCH, "REQ-MAN-005"),
    "references false": (set_in(("references",), False), Code.PROFILE_MISMATCH, "REQ-MAN-005"),  # noqa: FBT003
    "another encoding": (
        set_in(("encodings",), ["raw", "zstd"]),
        Code.PROFILE_MISMATCH,
        "REQ-MAN-005",
    ),
    # the origin; REQ-PRT-001
    "writer beyond the count": (set_in(("writer",), 2), Code.DOC_SCHEMA, "REQ-DOC-011"),
    "writer true": (set_in(("writer",), True), Code.DOC_SCHEMA, "REQ-DOC-011"),  # noqa: FBT003
    "writer negative": (set_in(("writer",), -1), Code.DOC_SCHEMA, "REQ-DOC-011"),
    "step true": (set_in(("step",), True), Code.DOC_SCHEMA, "REQ-DOC-011"),  # noqa: FBT003
    "step as text": (set_in(("step",), "3"), Code.DOC_SCHEMA, "REQ-DOC-011"),
    "step over 2^53-1": (set_in(("step",), 2**53), Code.DOC_SCHEMA, "REQ-DOC-011"),
    "no writers": (set_in(("writer_count",), 0), Code.DOC_SCHEMA, "REQ-DOC-011"),
    "34 too many writers": (set_in(("writer_count",), 10**6 + 1), Code.DOC_SCHEMA, "REQ-DOC-011"),
    "block below the least": (set_in(("block_nbytes",), 2048), Code.DOC_SCHEMA, "REQ-DOC-011"),
    "block no power of two": (set_in(("block_nbytes",), 4097), Code.DOC_SCHEMA, "REQ-DOC-011"),
    "block zero": (set_in(("block_nbytes",), 0), Code.DOC_SCHEMA, "REQ-DOC-011"),
    "nonce in upper case": (set_in(("nonce",), "A" * 32), Code.DOC_SCHEMA, "REQ-DOC-011"),
    "nonce with a line feed": (set_in(("nonce",), "a" * 32 + "\n"), Code.DOC_SCHEMA, "REQ-DOC-011"),
    "attempt in Arabic digits": (
        set_in(("attempt",), "\u0660" * 16),
        Code.DOC_SCHEMA,
        "REQ-DOC-011",
    ),
    "run id of another type": (set_in(("run_id",), 0), Code.DOC_SCHEMA, "REQ-DOC-011"),
    "launch of another type": (set_in(("launch",), "1"), Code.DOC_SCHEMA, "REQ-DOC-011"),
    "clock of another type": (set_in(("saved_unix_s",), None), Code.DOC_SCHEMA, "REQ-DOC-011"),
    # scopes and dtypes
    "scope with a zero before it": (
        set_in(("scopes",), ["global", "lw/01"]),
        Code.SCOPE_FORM,
        "REQ-IDX-006",
    ),
    "scope with a line feed": (
        set_in(("scopes",), ["global", "lw/1\n"]),
        Code.SCOPE_FORM,
        "REQ-IDX-006",
    ),
    "scope in Arabic digits": (
        set_in(("scopes",), ["global", "lw/\u0661"]),
        Code.SCOPE_FORM,
        "REQ-IDX-006",
    ),
    "scope of 10^9": (
        set_in(("scopes",), ["global", "lw/1000000000"]),
        Code.SCOPE_FORM,
        "REQ-IDX-006",
    ),
    "another word": (set_in(("scopes",), ["global", "rank/1"]), Code.SCOPE_FORM, "REQ-IDX-006"),
    "scopes out of order": (
        set_in(("scopes",), ["lw/1", "global"]),
        Code.COLUMN_ORDER,
        "REQ-IDX-003",
    ),
    "scope twice": (set_in(("scopes",), ["global", "global"]), Code.COLUMN_ORDER, "REQ-IDX-003"),
    "unknown dtype": (set_in(("dtypes", 0), "complex129"), Code.COLUMN_FORM, "REQ-IDX-002"),
    "dtypes out of order": (
        set_in(("dtypes",), lambda names: names[::-1]),
        Code.COLUMN_ORDER,
        "REQ-IDX-003",
    ),
    # files
    **{
        f"file name {name!r}": (text("files", "name", name), Code.UNSAFE_PATH, "REQ-CKP-001")
        for name in (
            "../x",
            "a/../../x",
            "/etc/passwd",
            "C:\\x",
            "\\\\host\\x",
            "file:x",
            "s3://bucket/x",
            ".",
            "",
            "a//b",
            "./a",
            "CON",
            "optimizer-0123456789abcdef-00001.safetensors.",
            "optimizer-0123456789abcdef-00001.safetensors ",
            "optimizer-0123456789abcdef-00001.safetensors\0",
            "optimizer-0123456789abcdef-00001.safetensors\n",
            "optimizer-0123456789abcdef-00000.safetensors",
            "optimizer-0123456789abcdee-00001.safetensors",
            "Optimizer-0123456789abcdef-00001.safetensors",
            "optimizer-0123456789ABCDEF-00001.safetensors",
            "optimizer-0123456789abcdef-000001.safetensors",
            "optimizer-0123456789abcdef-1.safetensors",
            "a" * 42 + "-0123456789abcdef-00001.safetensors",
            "manifest.json",
            "-0123456789abcdef-00001.safetensors",
            "opt/x-0123456789abcdef-00001.safetensors",
        )
    },
    "file name in another alphabet": (
        text(
            "files",
            "name",
            lambda names: [*names[:-1], "w\u0435ights-0123456789abcdef-00001.safetensors"],
        ),
        Code.UNSAFE_PATH,
        "REQ-CKP-001",
    ),
    "43 file twice": (
        text("files", "name", lambda names: [names[0], names[0], *names[2:]]),
        Code.COLUMN_ORDER,
        "REQ-IDX-003",
    ),
    "files out of order": (
        text("files", "name", lambda names: names[::-1]),
        Code.COLUMN_ORDER,
        "REQ-IDX-003",
    ),
    "unknown kind": (text("files", "kind", "pickle"), Code.COLUMN_FORM, "REQ-PRT-003"),
    "a kind that only deltas have": (
        text("files", "kind", "pack"),
        Code.COLUMN_FORM,
        "REQ-PRT-003",
    ),
    "kind missing": (
        text("files", "kind", lambda kinds: kinds[:1]),
        Code.COLUMN_FORM,
        "REQ-IDX-002",
    ),
    "files: a column more": (set_in(("files", "x"), 1), Code.DOC_SCHEMA, "REQ-DOC-011"),
    "files: a digest short": (
        set_in(("files", "header_digest"), lambda d: d[:-1]),
        Code.COLUMN_FORM,
        "REQ-IDX-002",
    ),
    "file a byte longer": (
        column("files", "nbytes", lambda v: [v[0] + 1, *v[1:]]),
        Code.FILE_COVERAGE,
        "REQ-PRT-007",
    ),
    "file a byte shorter": (
        column("files", "nbytes", lambda v: [v[0] - 1, *v[1:]]),
        Code.FILE_COVERAGE,
        "REQ-PRT-007",
    ),
    "header a byte longer": (
        column("files", "header_nbytes", lambda v: [v[0] + 1, *v[1:]]),
        Code.FILE_COVERAGE,
        "REQ-PRT-007",
    ),
    "header over its limit": (
        entry("files", "header_nbytes", 0, (16 << 20) + 9),
        Code.COLUMN_FORM,
        "REQ-IDX-002",
    ),
    # tensors
    "a tensor less": (
        text("tensors", "name", lambda names: names[:-1]),
        Code.COLUMN_FORM,
        "REQ-IDX-002",
    ),
    "tensor twice": (
        column("tensors", "scope", lambda v: [*v[:-1], v[-2]]),
        Code.COLUMN_ORDER,
        "REQ-IDX-003",
    ),
    "unknown field": (entry("tensors", "field", 0, 7), Code.COLUMN_FORM, "REQ-IDX-002"),
    "unknown scope": (entry("tensors", "scope", 0, 2), Code.COLUMN_FORM, "REQ-IDX-002"),
    "unknown dtype number": (entry("tensors", "dtype", 0, 9), Code.COLUMN_FORM, "REQ-IDX-002"),
    "unknown storage": (entry("tensors", "storage", 0, 2), Code.COLUMN_FORM, "REQ-IDX-002"),
    "75 rank 33": (entry("tensors", "ndim", 0, 33), Code.COLUMN_FORM, "REQ-IDX-002"),
    "rank without extents": (entry("tensors", "ndim", 0, 2), Code.COLUMN_FORM, "REQ-IDX-002"),
    "an extent over 2^48": (
        entry("tensors", "global_shape", 0, 2**48 + 1),
        Code.COLUMN_FORM,
        "REQ-IDX-002",
    ),
    "name of another type": (set_in(("tensors", "name", 1), 1), Code.COLUMN_FORM, "REQ-IDX-002"),
    "name too long": (text("tensors", "name", "x" * 4097), Code.LIMIT_EXCEEDED, "REQ-LIM-001"),
    "tensors isn't a table": (set_in(("tensors",), []), Code.DOC_SCHEMA, "REQ-DOC-011"),
    "packed with width true": (
        set_in(("tensors", "ndim", 0), True),  # noqa: FBT003
        Code.PACKED_FORM,
        "REQ-DOC-024",
    ),
    "96 more boxes than allowed": (
        entry("tensors", "box_count", 0, limits.BOXES),
        Code.LIMIT_EXCEEDED,
        "REQ-LIM-001",
    ),
    "a box too many": (entry("tensors", "box_count", 0, 2), Code.COLUMN_FORM, "REQ-IDX-002"),
    # aliases
    "alias of no tensor": (entry("aliases", "tensor", 0, 99), Code.COLUMN_FORM, "REQ-IDX-002"),
    "alias without a name": (
        text("aliases", "name", lambda _: []),
        Code.COLUMN_FORM,
        "REQ-IDX-002",
    ),
    "alias twice": (
        lambda signed: signed.update(
            aliases={"tensor": dump_packed([3, 3]), "name": dump_strings(["head", "head"])}
        ),
        Code.COLUMN_ORDER,
        "REQ-IDX-003",
    ),
    # boxes
    "88 box out of bounds": (entry("boxes", "begin", 0, 1), Code.BOX_BOUNDS, "REQ-PRT-004"),
    "88 box longer than its tensor": (
        entry("boxes", "cut_shape", 0, 5),
        Code.BOX_BOUNDS,
        "REQ-PRT-004",
    ),
    "88 a whole extent as one that is cut": (
        entry("boxes", "cut_shape", 0, 4),
        Code.COLUMN_FORM,
        "REQ-PRT-013",
    ),
    "92 a number too few": (
        column("boxes", "cut_shape", lambda v: v[:-1]),
        Code.COLUMN_FORM,
        "REQ-IDX-002",
    ),
    "92 a number too many": (
        column("boxes", "begin", lambda v: [*v, 0]),
        Code.COLUMN_FORM,
        "REQ-IDX-002",
    ),
    "replica 2": (entry("boxes", "replica", 0, 2), Code.COLUMN_FORM, "REQ-IDX-002"),
    "a digest less": (set_in(("digests",), lambda d: d[:-32]), Code.COLUMN_FORM, "REQ-IDX-002"),
    "digests as text": (set_in(("digests",), "x"), Code.COLUMN_FORM, "REQ-IDX-002"),
    "no digest of a written box": (
        lambda signed: (
            entry("boxes", "digest_count", 0, 0)(signed),
            set_in(("digests",), lambda d: d[32:])(signed),
        ),
        Code.EXTENT_COVERAGE,
        "REQ-PRT-005",
    ),
    "two digests of one block": (
        lambda signed: (
            entry("boxes", "digest_count", 0, 2)(signed),
            set_in(("digests",), lambda d: d + d[:32])(signed),
        ),
        Code.EXTENT_COVERAGE,
        "REQ-PRT-005",
    ),
    # extents
    "extent of no box": (entry("extents", "box", -1, 99), Code.COLUMN_FORM, "REQ-IDX-002"),
    "extent of a box before the first": (
        entry("extents", "box", 0, 3),
        Code.COLUMN_FORM,
        "REQ-IDX-002",
    ),
    "93 extent in no file": (entry("extents", "file", 0, 4), Code.COLUMN_FORM, "REQ-IDX-002"),
    "unknown encoding": (entry("extents", "encoding", 0, 1), Code.COLUMN_FORM, "REQ-IDX-002"),
    "extents out of order": (
        column("extents", "file", lambda v: v[::-1]),
        Code.COLUMN_ORDER,
        "REQ-IDX-003",
    ),
    "extent twice": (
        column("extents", "box", lambda v: [v[0], 1, v[2] - 2, *v[3:]]),
        Code.EXTENT_COVERAGE,
        "REQ-PRT-006",
    ),
    "extent behind the first block": (
        entry("extents", "block_begin", 0, 1),
        Code.EXTENT_COVERAGE,
        "REQ-PRT-006",
    ),
    "extent of a block too many": (
        entry("extents", "block_count", 0, 2),
        Code.EXTENT_COVERAGE,
        "REQ-PRT-006",
    ),
    "extent of no block": (
        entry("extents", "block_count", 0, 0),
        Code.EXTENT_COVERAGE,
        "REQ-PRT-006",
    ),
    "a gap before an extent": (
        entry("extents", "gap_nbytes", 0, 1),
        Code.FILE_COVERAGE,
        "REQ-PRT-007",
    ),
    "a gap beyond all bounds": (
        column("extents", "gap_nbytes", lambda v: [2**60] * len(v)),
        Code.FILE_COVERAGE,
        "REQ-PRT-007",
    ),
    "extent in another file": (entry("extents", "file", 2, 0), Code.FILE_COVERAGE, "REQ-PRT-007"),
    "a file without its last extent": (
        lambda signed: [
            edit(signed)
            for edit in (
                *(
                    column("extents", key, lambda v: v[:-1])
                    for key in (
                        "box",
                        "block_begin",
                        "block_count",
                        "file",
                        "gap_nbytes",
                        "encoding",
                    )
                ),
                text("extents", "key", lambda keys: keys[:-1]),
            )
        ],
        Code.FILE_COVERAGE,
        "REQ-PRT-007",
    ),
    "key of another type": (set_in(("extents", "key", 1), b"x"), Code.COLUMN_FORM, "REQ-IDX-002"),
    "a key that is its tensor's name": (
        text("extents", "key", "exp_avg"),
        Code.COLUMN_FORM,
        "REQ-PRT-012",
    ),
    # streams and leaves
    "stream without a state": (set_in(("streams", "state"), []), Code.COLUMN_FORM, "REQ-IDX-002"),
    "stream state as text": (set_in(("streams", "state"), ["x"]), Code.COLUMN_FORM, "REQ-IDX-002"),
    "stream kind as bytes": (set_in(("streams", "kind", 1), b"x"), Code.COLUMN_FORM, "REQ-IDX-002"),
    "leaf of no field": (entry("leaves", "field", 0, 7), Code.COLUMN_FORM, "REQ-IDX-002"),
    "leaves out of order": (column("leaves", "field", swap), Code.COLUMN_ORDER, "REQ-IDX-003"),
    "leaf value as a map": (set_in(("leaves", "value", 0), {}), Code.COLUMN_FORM, "REQ-IDX-002"),
    # absent
    "absent: unknown field": (
        set_in(("absent",), {"weight": "x"}),
        Code.MANIFEST_FIELDS,
        "REQ-MAN-003",
    ),
    "absent: no reason": (set_in(("absent",), {"data": ""}), Code.MANIFEST_FIELDS, "REQ-MAN-003"),
    "absent: a reason too long": (
        set_in(("absent",), {"data": "x" * 1001}),
        Code.MANIFEST_FIELDS,
        "REQ-MAN-003",
    ),
    "absent: a line feed": (
        set_in(("absent",), {"data": "a\nb"}),
        Code.MANIFEST_FIELDS,
        "REQ-MAN-003",
    ),
    "absent: a bidi character": (
        set_in(("absent",), {"data": "a\u202eb"}),
        Code.MANIFEST_FIELDS,
        "REQ-MAN-003",
    ),
    "absent: not normalised": (
        set_in(("absent",), {"data": "e\u0301"}),
        Code.MANIFEST_FIELDS,
        "REQ-MAN-003",
    ),
    "absent: a number": (set_in(("absent",), {"data": 1}), Code.MANIFEST_FIELDS, "REQ-MAN-003"),
    "absent: a list": (set_in(("absent",), []), Code.MANIFEST_FIELDS, "REQ-MAN-003"),
}


@pytest.mark.parametrize(("edit", "code", "requirement"), EDITS.values(), ids=EDITS)
def test_wrong_parts_are_refused(edit, code, requirement):
    """Rows 37 to 43, 75, 88, 92, 93 and 96; under a valid digest each."""
    signed = copy.deepcopy(SIGNED)
    edit(signed)
    error = error_of(lambda: parse(signed))
    assert isinstance(error, FormatError) or error.code in (
        Code.VERSION_UNSUPPORTED,
        Code.FEATURE_UNSUPPORTED,
        Code.BOX_BOUNDS,
    )
    assert error.where.startswith(PATH)
    assert (error.code, error.requirement) == (code, requirement)


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


def test_extents_without_bytes_have_an_order():
    """REQ-IDX-003: they all begin where the next one does, so that nothing else says which is first."""
    boxes = [Box((0,), (0,)), Box((0,), (0,))]
    extents = [
        RowExtent(block_begin=0, block_count=0, file=0, byte_begin=64, key=key) for key in "ab"
    ]
    tensors = tuple(
        RowTensor(
            field="weights",
            name=name,
            scope="global",
            dtype="int8",
            global_shape=(0,),
            storage="persistent",
            aliases=(),
            boxes=(RowBox(box=box, replica=False, digests=b"", extents=(extent,)),),
        )
        for name, box, extent in zip("xy", boxes, extents, strict=True)
    )
    file = PartFile(
        name="weights-0123456789abcdef-00000.safetensors",
        kind="safetensors",
        nbytes=64,
        header_nbytes=64,
        header_digest=bytes(32),
    )
    part = Part(
        origin=origin(),
        writer=0,
        saved_unix_s=0,
        files=(file,),
        holdings=holdings_of(tensors),
        streams=(),
        leaves=(),
        absent={},
    )
    signed = parse_signed(part.dump()[0])
    assert contents_of(Part.parse(part.dump()[0], where=PATH)[0]) == contents_of(part)
    assert unpacked(signed["extents"]["box"]) == [0, 0]
    signed["extents"]["box"] = dump_packed([2, 3])  # 1, then 0
    error = error_of(lambda: parse(signed))
    assert (error.code, error.requirement) == (Code.COLUMN_ORDER, "REQ-IDX-003")


def test_nothing_is_listed_that_does_not_occur():
    """REQ-IDX-007."""
    for key, more in (("scopes", "lw/7"), ("dtypes", "uint64")):
        signed = copy.deepcopy(SIGNED)
        signed[key] = sorted([*signed[key], more])
        error = error_of(lambda signed=signed: parse(signed))
        assert (error.code, error.requirement) == (Code.COLUMN_ORDER, "REQ-IDX-007")


def test_rows_are_those_that_were_dumped():
    """REQ-IDX-002: columns and back, box by box."""
    part, _ = Part.parse(CONTENT, where=PATH)
    again = dataclasses.replace(part, holdings=holdings_of(rows_of(part.holdings)))
    assert contents_of(again) == contents_of(part)
    assert again.dump()[0] == CONTENT


def test_a_box_that_leaves_its_tensor_cannot_be_dumped():
    """REQ-PRT-004: there is no form for it."""
    part, _ = Part.parse(CONTENT, where=PATH)
    for box in (Box((1,), (3,)), Box((-1,), (3,)), Box((0,), (4,))):
        first = rows_of(part.holdings)[0]
        wrong = dataclasses.replace(first, boxes=(dataclasses.replace(first.boxes[0], box=box),))
        changed = dataclasses.replace(
            part, holdings=holdings_of((wrong, *rows_of(part.holdings)[1:]))
        )
        assert error_of(changed.dump).code == Code.BOX_BOUNDS


def test_equal_tables_are_parsed_once():
    """Parts of one attempt share what they say of tensors, and nothing else."""
    contents = {
        path: content for path, content in small_files().items() if path.startswith("parts/")
    }
    known: dict[bytes, TensorTable] = {}
    first, second = (Part.parse(CONTENT, where=PATH, known=known)[0] for _ in range(2))
    assert first.holdings.table is second.holdings.table
    assert len(known) == 1
    for path, content in contents.items():
        one, other = (Part.parse(content, where=path, known=of) for of in (known, None))
        assert (contents_of(one[0]), one[1]) == (contents_of(other[0]), other[1])
    assert len(known) == 2  # the scopes of writer 0 are others


def test_only_a_declared_replica_of_another_writer_has_no_digests():
    """REQ-PRT-005: digests are how a replica that nobody vouches for is shown to be one."""
    made = origin()
    box = Box((0,), (4,))
    for replica, digests in (
        (True, b""),
        (True, bytes(32)),
        (False, bytes(32)),
        (False, b""),
        (True, bytes(64)),
    ):
        held = RowBox(box=box, replica=replica, digests=digests, extents=())
        tensor = RowTensor(
            field="weights",
            name="w",
            scope="global",
            dtype="int8",
            global_shape=(4,),
            storage="persistent",
            aliases=(),
            boxes=(held,),
        )
        part = Part(
            origin=made,
            writer=0,
            saved_unix_s=0,
            files=(),
            holdings=holdings_of((tensor,)),
            streams=(),
            leaves=(),
            absent={},
        )
        code = code_of(lambda part=part: Part.parse(part.dump()[0], where=PATH))
        right = len(digests) == 32 or (replica and not digests)
        assert code == ("ok" if right else Code.EXTENT_COVERAGE)


def test_damage_is_called_damage():
    """REQ-DOC-025, REQ-OPN-003."""
    error = error_of(lambda: Part.parse(CONTENT, where=PATH, digest=bytes(32)))
    assert (error.code, type(error), error.where) == (Code.DOC_DIGEST, IntegrityError, PATH)


def test_boxes_that_cost_no_bytes_are_not_built():
    """Row 96: a scalar's boxes have no numbers, so that a small file could claim ten million of them."""
    signed = copy.deepcopy(SIGNED)
    scalar = next(i for i, rank in enumerate(unpacked(signed["tensors"]["ndim"])) if rank == 0)
    entry("tensors", "box_count", scalar, limits.BOXES - 100)(signed)
    content, _ = dump_packed_document(signed)
    assert len(content) < 2000
    begin = time.process_time()
    tracemalloc.start()
    assert code_of(lambda: Part.parse(content, where=PATH)) == Code.LIMIT_EXCEEDED
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()
    assert time.process_time() - begin < 20


def test_a_failure_record_holds_whatever_the_error_says():
    """REQ-CMT-004: the message is hostile text, and any length."""
    for detail in ("plain", "\u202e\0\n\ud800", "x" * 5000, "é"):
        error = err(Code.NO_SPACE, detail)
        record, _ = parse_document(dump_failure(origin(), 3, error), where="x", types=("failure",))
        assert (record["code"], record["writer"], record["attempt"]) == (
            "NO_SPACE",
            3,
            origin().attempt,
        )
        assert len(record["detail"]) <= 1000


def part_of(writer, *, stream_scope, tensor_scope):
    store = MemoryStore()
    held = snapshot(
        tensor("w", np.ones(3, np.float32), scope=tensor_scope),
        streams=[stream("python", 1, scope=stream_scope)],
    )
    of = origin(writer_count=2)
    write_part(store, held, of, writer=writer)
    path = part_path(of.attempt, writer)
    return store.read(path, limit_nbytes=1 << 20), path


def test_writers_with_streams_of_their_own_share_a_table():
    """A commit of 4,096 writers took minutes and gigabytes: each part's table was an object of its own."""
    known: dict[bytes, TensorTable] = {}
    one, two = (
        Part.parse(content, where=path, known=known)[0].holdings.table
        for content, path in (
            part_of(writer, stream_scope=f"lw/{writer}", tensor_scope="global") for writer in (0, 1)
        )
    )
    assert one is two
    assert one.keys == (("weights", "w", "global"),)


def test_tables_of_tensors_of_different_workers_are_never_shared():
    known: dict[bytes, TensorTable] = {}
    tables = [
        Part.parse(content, where=path, known=known)[0].holdings.table
        for content, path in (
            part_of(writer, stream_scope=f"lw/{writer}", tensor_scope=f"lw/{writer}")
            for writer in (0, 1)
        )
    ]
    assert [table.keys for table in tables] == [
        (("weights", "w", "lw/0"),), (("weights", "w", "lw/1"),)
    ]  # fmt: skip
