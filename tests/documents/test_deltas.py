"""Parts of deltas: references, packs, encoded blocks, groups; and pins."""

import copy
import dataclasses
import itertools
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfmt import limits
from ckptfmt.box import Box
from ckptfmt.digest import digest_bytes
from ckptfmt.documents.canonical import dump_document
from ckptfmt.documents.extents import PredictionGroup, delta_features
from ckptfmt.documents.manifest import (
    FIELDS,
    FieldSummary,
    Manifest,
    Reference,
    pack_name,
    parse_register,
    pins_path,
)
from ckptfmt.documents.msgpk import dump_msgpack, dump_packed_document
from ckptfmt.documents.packed import dump_packed, dump_strings, fold, parse_packed, unfold
from ckptfmt.documents.part import PACK_HEADER, Part, PartFile
from ckptfmt.documents.run import Pins
from ckptfmt.dtypes import DTYPES
from ckptfmt.errors import CkptError, Code, FormatError
from ckptfmt.features import (
    DELTAS,
    ENCODINGS,
    GROUP_KINDS,
    NEEDS_BASE,
    OF_ANY_PROFILE,
    PLAIN,
    READER_FEATURES,
)
from ckptfmt.layout.merge import PartFileEntry, add_stored, merge_deltas, merge_parts, summarise
from tests.builders import (
    ATTEMPT,
    code_of,
    edit_strings,
    error_of,
    origin,
    parse_json,
    parse_signed,
    unpacked,
)
from tests.part_rows import RowBox, RowExtent, RowTensor, contents_of, holdings_of, rows_of

PATH = f"parts/{ATTEMPT}-00000.msgpack"
BLOCK = 4096
REFERENCES = tuple(
    Reference(name=f"step-0000000{step}-l0001", digest=f"blake3:{step}" + "a" * 63)
    for step in (1, 2, 3)
)
ENCODED = tuple(name for name in ENCODINGS if name not in PLAIN)


class Builder:
    """A part of a delta, made block by block: packs and shards are laid out as their blocks come."""

    def __init__(self, references=REFERENCES):
        self.references = references
        self.tensors: list[RowTensor] = []
        self.groups: list[tuple[PredictionGroup, tuple[tuple[str, str], ...]]] = []
        self.nbytes: dict[str, int] = {}  # of each file, what it holds behind its header

    def add(self, field, name, dtype, shape, *runs, **members):
        """Add a tensor, its one box in runs of blocks: ``(block_count, encoding, members of the extent)``."""
        nbytes = Box.whole(shape).element_count * DTYPES[dtype].nbytes
        extents, block = [], 0
        for count, encoding, own in runs:
            extents.append(
                self._extent(
                    field, name, nbytes, block=block, count=count, encoding=encoding, own=own
                )
            )
            block += count
        digests = b"".join(
            digest_bytes(f"{name} {number}".encode()) for number in range(-(-nbytes // BLOCK))
        )
        held = RowBox(box=Box.whole(shape), replica=False, digests=digests, extents=tuple(extents))
        whole = {
            "scope": "global",
            "global_shape": shape,
            "storage": "persistent",
            "aliases": (),
            **members,
        }
        self.tensors.append(RowTensor(field=field, name=name, dtype=dtype, boxes=(held,), **whole))

    def _extent(self, field, name, nbytes, *, block, count, encoding, own):
        own = dict(own)
        stem = own.pop("file", field)
        stored = own.pop("stored_nbytes", (7,) * count if encoding not in PLAIN else ())
        file, begin = None, 0
        if encoding != "same":
            file, begin = stem, self.nbytes.get(stem, 0)
            content = min(nbytes, (block + count) * BLOCK) - block * BLOCK
            self.nbytes[stem] = begin + (content if encoding == "raw" else sum(stored))
        digests = b"".join(
            digest_bytes(f"{name} {block + at} stored".encode()) for at in range(len(stored))
        )
        where = {
            "file": file,
            "byte_begin": begin,
            "key": name,
            "stored_nbytes": stored,
            "stored_digests": digests,
        }
        return RowExtent(block_begin=block, block_count=count, encoding=encoding, **where, **own)

    def group(self, kind, *members, rule=b"rule", reference=None):
        """Add a group of boxes: of tensors, by field and name."""
        self.groups.append(
            (PredictionGroup(kind=kind, rule=rule, reference=reference, boxes=()), members)
        )

    def part(self, **members):
        """Return the part: files and tensors in their order, extents at their places."""
        files = sorted(
            (_file(stem, nbytes) for stem, nbytes in self.nbytes.items()),
            key=lambda file: file.name,
        )
        numbers = {file.name.partition("-")[0]: number for number, file in enumerate(files)}
        tensors = sorted(self.tensors, key=lambda tensor: (FIELDS.index(tensor.field), tensor.name))
        rows = [(tensor.field, tensor.name) for tensor in tensors]
        groups = [
            dataclasses.replace(group, boxes=tuple(map(rows.index, members)))
            for group, members in self.groups
        ]
        own = {
            "origin": origin(),
            "writer": 0,
            "saved_unix_s": 7,
            "files": tuple(files),
            "holdings": holdings_of([_placed(tensor, numbers, files) for tensor in tensors]),
            "streams": (),
            "leaves": (),
            "absent": {"rng": "no generator"},
            "references": self.references,
            "groups": tuple(sorted(groups, key=lambda group: group.boxes)),
        }
        return Part(**{**own, **members})


def _file(stem, nbytes):
    if stem.startswith("shard"):
        name = f"{stem}-{ATTEMPT}-00000.safetensors"
        return PartFile(
            name=name,
            kind="safetensors",
            nbytes=128 + nbytes,
            header_nbytes=128,
            header_digest=b"h" * 32,
        )
    return PartFile(
        name=pack_name(stem, ATTEMPT, 0),
        kind="pack",
        nbytes=64 + nbytes,
        header_nbytes=64,
        header_digest=digest_bytes(PACK_HEADER),
    )


def _placed(tensor, numbers, files):
    """Return a tensor whose extents have the number of their file, and where they begin in it."""
    (held,) = tensor.boxes
    extents = []
    for extent in held.extents:
        own = {}
        if extent.file is not None:
            file = numbers[extent.file]
            own = {"file": file, "byte_begin": files[file].header_nbytes + extent.byte_begin}
        extents.append(dataclasses.replace(extent, **own))
    return dataclasses.replace(tensor, boxes=(dataclasses.replace(held, extents=tuple(extents)),))


def make_part(**members):
    """Return a part with something of everything."""
    builder = Builder()
    base = {"reference": 0}
    builder.add(
        "weights",
        "a",
        "float32",
        (3000,),
        (1, "same", {"reference": 2}),
        (1, "raw", {}),
        (1, "sparse", base),
    )
    builder.add("weights", "b", "bfloat16", (2, 500), (1, "xor", {"predicted": True}))
    builder.add("weights", "c", "int8", (5,), (1, "raw", {"file": "shard"}))
    builder.add("weights", "e", "int8", (0, 3), (0, "same", base))
    builder.add("weights", "m", "float32", (1000,), (1, "sparse", {"predicted": True}))
    builder.add("optimizer", "exp_avg", "float32", (1000,), (1, "gradient", {"predicted": True}))
    builder.add(
        "optimizer", "exp_avg_sq", "float32", (1000,), (1, "difference", {"predicted": True})
    )
    builder.add("optimizer", "master", "float32", (1000,), (1, "classes", {"reference": 1}))
    builder.add("optimizer", "step", "float32", (), (1, "planes", {"stored_nbytes": (3,)}))
    names = (("optimizer", "exp_avg"), ("optimizer", "exp_avg_sq"), ("weights", "m"))
    builder.group("adam", *names, rule=b"adam's rule", reference=1)
    builder.group("cast", ("optimizer", "master"), ("weights", "b"))
    return builder.part(**members)


PART = make_part()
CONTENT = PART.dump()[0]
SIGNED = parse_signed(CONTENT)


def parse(signed):
    return Part.parse(dump_packed_document(signed)[0], where=PATH)[0]


def one_block(encoding="raw", *, tensors=(("weights", "w"),), references=REFERENCES, **own):
    """Return a builder with one small block of each tensor, all stored alike."""
    builder = Builder(references)
    for field, name in tensors:
        builder.add(field, name, "float32", (100,), (1, encoding, own))
    return builder


# --- round trips ----------------------------------------------------------------------------------


def test_a_part_of_a_delta_comes_back():
    """REQ-DEL-001 to REQ-DEL-006, REQ-DEL-009, REQ-DEL-012: all that it says, row by row."""
    part, digest = Part.parse(CONTENT, where=PATH)
    assert contents_of(part) == contents_of(PART)
    assert part.dump() == (CONTENT, digest)
    assert part.references == REFERENCES
    assert part.features == sorted({"adam", "cast", "deltas", *ENCODED})
    extents = rows_of(part.holdings)[0].boxes[0].extents
    assert [(extent.encoding, extent.file is None, extent.reference) for extent in extents] == [
        ("same", True, 2), ("raw", False, None), ("sparse", False, 0)
    ]  # fmt: skip
    assert extents[2].stored_nbytes == (7,)
    assert extents[2].stored_digests == digest_bytes(b"a 2 stored")


def test_a_full_part_has_nothing_of_a_delta():
    """REQ-DEL-001, REQ-MAN-005, REQ-VER-007: no member, no column, no feature more than it needs."""
    signed = parse_signed(one_block(references=(), file="shard").part().dump()[0])
    assert signed["features"] == {"reader": [], "writer": []}
    assert (signed["references"], signed["encodings"]) == ([], ["raw"])
    assert not {"stored", "groups"} & signed.keys()
    assert not {"reference", "predicted"} & signed["extents"].keys()
    assert SIGNED.keys() - signed.keys() == {"stored", "groups"}
    assert SIGNED["extents"].keys() - signed["extents"].keys() == {"reference", "predicted"}


@pytest.mark.parametrize(
    ("builder", "features"),
    [
        (one_block("planes", references=()), ["deltas", "planes"]),
        (one_block("same", reference=0), ["deltas"]),
        (one_block("raw"), ["deltas"]),
        (one_block("raw", file="shard"), ["deltas"]),
        (one_block("classes", reference=1), ["classes", "deltas"]),
    ],
)
def test_features_follow_from_what_a_part_has(builder, features):
    """REQ-DEL-001, REQ-ENC-002, REQ-VER-007: references alone are a reason, and so is an encoding without any."""
    part = builder.part()
    assert part.features == features
    assert contents_of(Part.parse(part.dump()[0], where=PATH)[0]) == contents_of(part)


def test_the_registries_are_those_of_the_features():
    """REQ-DEL-001, REQ-DEL-003."""
    assert {DELTAS, *OF_ANY_PROFILE, *ENCODED, *GROUP_KINDS} == READER_FEATURES
    assert {"raw", "same"} == PLAIN
    assert set(ENCODINGS) - NEEDS_BASE == {"raw", "planes"}
    assert delta_features(["raw"], [], []) == []
    assert delta_features(["same"], [], []) == delta_features(["raw"], [], REFERENCES) == ["deltas"]


def test_rows_are_in_the_order_of_bytes_and_blocks_of_no_file_come_last():
    """REQ-DEL-004, REQ-IDX-003."""
    columns = {key: unpacked(value) for key, value in SIGNED["extents"].items() if key != "key"}
    assert columns["file"] == sorted(columns["file"])
    nowhere = [row for row, file in enumerate(columns["file"]) if file == len(PART.files)]
    same = SIGNED["encodings"].index("same")
    assert nowhere == [row for row, encoding in enumerate(columns["encoding"]) if encoding == same]
    assert set(columns["gap_nbytes"]) == {0}


def test_one_block_may_have_several_extents_of_one_box_and_kind():
    """REQ-PRT-006: runs needn't be as long as they can be."""
    builder = Builder()
    builder.add(
        "weights",
        "w",
        "float32",
        (3000,),
        *[(1, "same", {"reference": number}) for number in (0, 0, 1)],
    )
    part = builder.part()
    assert contents_of(Part.parse(part.dump()[0], where=PATH)[0]) == contents_of(part)


# --- refusals -------------------------------------------------------------------------------------


def column(table, key, edit):
    """Return an edit of a packed column, as a list."""

    def change(signed):
        values = unpacked(signed[table][key])
        result = edit(values)
        signed[table][key] = dump_packed(values if result is None else result)

    return change


def entry(table, key, row, value):
    """Return an edit of one entry of a packed column."""

    def change(values):
        values[row] = value

    return column(table, key, change)


def texts(table, key, edit):
    """Return an edit of a column of strings, as a list."""
    return lambda signed: edit_strings(signed[table], key, edit)


def member(*path, to):
    """Return an edit of a member; `to` may be a function of what is there."""

    def change(signed):
        *steps, last = path
        at = signed
        for step in steps:
            at = at[step]
        at[last] = to(at[last]) if callable(to) else to

    return change


def row_of(name, encoding):
    """Return the number of the extent of a tensor with an encoding."""
    tensor = next(number for number, one in enumerate(rows_of(PART.holdings)) if one.name == name)
    boxes = np.cumsum(unfold(parse_packed(SIGNED["extents"]["box"], "")) + 1) - 1
    kind = SIGNED["encodings"].index(encoding)
    rows = zip(boxes, unpacked(SIGNED["extents"]["encoding"]), strict=True)
    return next(number for number, row in enumerate(rows) if row == (tensor, kind))


def name_of_kind(kind):
    return next(number for number, file in enumerate(PART.files) if file.kind == kind)


def edits(*all_of_them):
    return lambda signed: [edit(signed) for edit in all_of_them]


LONG = [
    {"name": f"step-{number:08d}-l0001", "digest": number.to_bytes(32, "big")}
    for number in range(33)
]
EDITS = {
    # references
    "references missing": (lambda signed: signed.pop("references"), Code.DOC_SCHEMA, "REQ-DOC-011"),
    "references null": (member("references", to=None), Code.COLUMN_FORM, "REQ-LIM-001"),
    "33 references": (member("references", to=LONG), Code.COLUMN_FORM, "REQ-LIM-001"),
    "a reference that is a name": (
        member("references", 0, to="step-00000001-l0001"),
        Code.COLUMN_FORM,
        "REQ-IDX-002",
    ),
    "a reference without a digest": (
        member("references", 0, to=lambda one: {"name": one["name"]}),
        Code.COLUMN_FORM,
        "REQ-IDX-002",
    ),
    "a reference with a member more": (
        member("references", 0, to=lambda one: {**one, "step": 1}),
        Code.COLUMN_FORM,
        "REQ-IDX-002",
    ),
    "a digest of 31 bytes": (
        member("references", 0, "digest", to=bytes(31)),
        Code.COLUMN_FORM,
        "REQ-IDX-002",
    ),
    "a digest as text": (
        member("references", 0, "digest", to=REFERENCES[0].digest),
        Code.COLUMN_FORM,
        "REQ-IDX-002",
    ),
    "a name that is bytes": (
        member("references", 0, "name", to=b"step"),
        Code.COLUMN_FORM,
        "REQ-IDX-002",
    ),
    **{
        f"a reference named {name!r}": (
            member("references", 0, "name", to=name),
            Code.UNSAFE_PATH,
            "REQ-DEL-002",
        )
        for name in (
            "",
            ".",
            "..",
            "../step-00000001-l0001",
            "step-00000001-l0001/",
            "/step-00000001-l0001",
            "latest",
            "step-1-l1",
            "step-000000001-l0001",
            "step-00000001-l0001\n",
        )
    },
    "references backwards": (
        member("references", to=lambda rows: rows[::-1]),
        Code.COLUMN_ORDER,
        "REQ-DEL-002",
    ),
    "one digest twice": (
        member("references", 1, "digest", to=SIGNED["references"][0]["digest"]),
        Code.COLUMN_ORDER,
        "REQ-DEL-002",
    ),
    "a reference less": (
        member("references", to=lambda rows: rows[:2]),
        Code.COLUMN_FORM,
        "REQ-IDX-002",
    ),
    # features and encodings
    "a feature less": (
        member("features", "reader", to=lambda names: [name for name in names if name != "adam"]),
        Code.DOC_SCHEMA,
        "REQ-DEL-001",
    ),
    "without the feature of all": (
        member("features", "reader", to=lambda names: [name for name in names if name != "deltas"]),
        Code.DOC_SCHEMA,
        "REQ-DEL-001",
    ),
    "a feature more": (
        member("features", "reader", to=lambda names: [*names, "sgd"]),
        Code.DOC_SCHEMA,
        "REQ-DEL-001",
    ),
    "features unsorted": (
        member("features", "reader", to=lambda names: names[::-1]),
        Code.DOC_SCHEMA,
        "REQ-DEL-001",
    ),
    "no features": (member("features", "reader", to=[]), Code.DOC_SCHEMA, "REQ-DOC-011"),
    "a feature of later": (
        member("features", "reader", to=lambda names: [*names, "wavelets"]),
        Code.FEATURE_UNSUPPORTED,
        "REQ-DOC-010",
    ),
    "no list of encodings": (member("encodings", to="raw"), Code.COLUMN_FORM, "REQ-IDX-002"),
    "an encoding of later": (
        member("encodings", to=lambda names: [*names, "wavelets"]),
        Code.COLUMN_FORM,
        "REQ-DEL-003",
    ),
    "an encoding that is no text": (member("encodings", 0, to=1), Code.COLUMN_FORM, "REQ-IDX-002"),
    "encodings backwards": (
        member("encodings", to=lambda names: names[::-1]),
        Code.COLUMN_ORDER,
        "REQ-IDX-003",
    ),
    "an encoding twice": (member("encodings", 1, to="raw"), Code.COLUMN_ORDER, "REQ-IDX-003"),
    "an encoding that doesn't occur": (
        entry("extents", "encoding", row_of("step", "planes"), 0),
        Code.COLUMN_FORM,
        "REQ-IDX-002",
    ),
    "an encoding that isn't listed": (
        entry("extents", "encoding", 0, len(ENCODINGS)),
        Code.COLUMN_FORM,
        "REQ-IDX-002",
    ),
    # files
    "a pack under a shard's name": (
        texts("files", "kind", lambda kinds: ["pack"] * len(kinds)),
        Code.COLUMN_FORM,
        "REQ-PRT-003",
    ),
    "a shard under a pack's name": (
        texts("files", "kind", lambda kinds: ["safetensors"] * len(kinds)),
        Code.COLUMN_FORM,
        "REQ-PRT-003",
    ),
    "a kind of later": (
        texts("files", "kind", lambda kinds: ["zip", *kinds[1:]]),
        Code.COLUMN_FORM,
        "REQ-PRT-003",
    ),
    "a pack of another writer": (
        texts("files", "name", lambda names: [names[0].replace("-00000.", "-00001."), *names[1:]]),
        Code.UNSAFE_PATH,
        "REQ-CKP-001",
    ),
    "a pack elsewhere": (
        texts("files", "name", lambda names: ["../" + names[0], *names[1:]]),
        Code.UNSAFE_PATH,
        "REQ-CKP-001",
    ),
    "a pack's header is longer": (
        entry("files", "header_nbytes", name_of_kind("pack"), 65),
        Code.COLUMN_FORM,
        "REQ-DEL-012",
    ),
    "a pack's header is another": (
        member("files", "header_digest", to=lambda digests: bytes(32) + digests[32:]),
        Code.COLUMN_FORM,
        "REQ-DEL-012",
    ),
    "a pack a byte longer": (
        column("files", "nbytes", lambda values: [values[0] + 1, *values[1:]]),
        Code.FILE_COVERAGE,
        "REQ-PRT-007",
    ),
    # extents
    "same in a file": (
        edits(
            entry("extents", "file", row_of("e", "same"), 2),
            entry("extents", "file", row_of("a", "same"), 2),
        ),
        Code.COLUMN_FORM,
        "REQ-DEL-004",
    ),
    "encoded in no file": (
        entry("extents", "file", row_of("m", "sparse"), 3),
        Code.COLUMN_FORM,
        "REQ-DEL-004",
    ),
    "a file beyond none": (entry("extents", "file", -1, 4), Code.COLUMN_FORM, "REQ-IDX-002"),
    "a gap before what is in no file": (
        entry("extents", "gap_nbytes", row_of("a", "same"), 1),
        Code.FILE_COVERAGE,
        "REQ-PRT-007",
    ),
    "a reference of raw": (
        entry("extents", "reference", row_of("a", "raw"), 1),
        Code.COLUMN_FORM,
        "REQ-DEL-006",
    ),
    "a reference of planes": (
        entry("extents", "reference", row_of("step", "planes"), 1),
        Code.COLUMN_FORM,
        "REQ-DEL-006",
    ),
    "same of nothing": (
        entry("extents", "reference", row_of("a", "same"), 0),
        Code.COLUMN_FORM,
        "REQ-DEL-006",
    ),
    "sparse without a base": (
        entry("extents", "reference", row_of("a", "sparse"), 0),
        Code.COLUMN_FORM,
        "REQ-DEL-006",
    ),
    "predicted, and a base": (
        entry("extents", "reference", row_of("m", "sparse"), 1),
        Code.COLUMN_FORM,
        "REQ-DEL-006",
    ),
    "a reference that isn't there": (
        entry("extents", "reference", row_of("a", "sparse"), 4),
        Code.COLUMN_FORM,
        "REQ-IDX-002",
    ),
    "raw is predicted": (
        entry("extents", "predicted", row_of("a", "raw"), 1),
        Code.COLUMN_FORM,
        "REQ-DEL-006",
    ),
    "planes are predicted": (
        entry("extents", "predicted", row_of("step", "planes"), 1),
        Code.COLUMN_FORM,
        "REQ-DEL-006",
    ),
    "same is predicted": (
        edits(
            entry("extents", "predicted", row_of("a", "same"), 1),
            entry("extents", "reference", row_of("a", "same"), 0),
        ),
        Code.COLUMN_FORM,
        "REQ-DEL-006",
    ),
    "predicted without a group": (
        edits(
            entry("extents", "predicted", row_of("a", "sparse"), 1),
            entry("extents", "reference", row_of("a", "sparse"), 0),
        ),
        Code.COLUMN_FORM,
        "REQ-DEL-006",
    ),
    "predicted twice": (
        entry("extents", "predicted", row_of("m", "sparse"), 2),
        Code.COLUMN_FORM,
        "REQ-IDX-002",
    ),
    "a block twice": (
        entry("extents", "block_begin", row_of("a", "sparse"), 1),
        Code.EXTENT_COVERAGE,
        "REQ-PRT-006",
    ),
    "no column predicted": (
        lambda signed: signed["extents"].pop("predicted"),
        Code.DOC_SCHEMA,
        "REQ-DOC-011",
    ),
    # stored
    "no table stored": (lambda signed: signed.pop("stored"), Code.DOC_SCHEMA, "REQ-DOC-011"),
    "a stored block less": (
        column("stored", "nbytes", lambda values: values[:-1]),
        Code.COLUMN_FORM,
        "REQ-IDX-002",
    ),
    "a stored block more": (
        column("stored", "nbytes", lambda values: [*values, 1]),
        Code.COLUMN_FORM,
        "REQ-IDX-002",
    ),
    "a stored digest less": (
        member("stored", "digest", to=lambda d: d[:-32]),
        Code.COLUMN_FORM,
        "REQ-IDX-002",
    ),
    "stored digests as text": (member("stored", "digest", to="x"), Code.COLUMN_FORM, "REQ-IDX-002"),
    "stored in as many bytes": (
        column("stored", "nbytes", lambda values: [4 if value == 3 else value for value in values]),
        Code.COLUMN_FORM,
        "REQ-DEL-005",
    ),
    "stored beyond all bounds": (
        entry("stored", "nbytes", 0, 1 << 62),
        Code.COLUMN_FORM,
        "REQ-IDX-002",
    ),
    "stored in a byte more": (entry("stored", "nbytes", 0, 8), Code.FILE_COVERAGE, "REQ-PRT-007"),
    # groups
    "no table of groups": (lambda signed: signed.pop("groups"), Code.DOC_SCHEMA, "REQ-DOC-011"),
    "a group of later": (
        texts("groups", "kind", lambda kinds: ["lion", *kinds[1:]]),
        Code.COLUMN_FORM,
        "REQ-DEL-009",
    ),
    "another kind": (
        texts("groups", "kind", lambda kinds: ["sgd", *kinds[1:]]),
        Code.DOC_SCHEMA,
        "REQ-DEL-001",
    ),
    "a rule less": (
        member("groups", "rule", to=lambda rules: rules[:1]),
        Code.COLUMN_FORM,
        "REQ-IDX-002",
    ),
    "a rule as text": (member("groups", "rule", 0, to="x"), Code.COLUMN_FORM, "REQ-IDX-002"),
    "a group's reference isn't there": (
        entry("groups", "reference", 0, 4),
        Code.COLUMN_FORM,
        "REQ-IDX-002",
    ),
    "members without a group": (
        column("groups", "box", lambda values: [*values, 0]),
        Code.COLUMN_FORM,
        "REQ-IDX-002",
    ),
    "a member of no box": (entry("groups", "box", -1, 2 * 99), Code.COLUMN_FORM, "REQ-IDX-002"),
    "a member before the first box": (
        entry("groups", "box", 0, 2 * 99 - 1),
        Code.COLUMN_FORM,
        "REQ-IDX-002",
    ),
    "more members than boxes": (
        entry("groups", "member_count", 0, limits.BOXES),
        Code.COLUMN_FORM,
        "REQ-IDX-002",
    ),
    "a group of one": (
        lambda signed: signed.update(groups=groups_table(("adam", [0]), ("cast", [1, 2]))),
        Code.COLUMN_FORM,
        "REQ-DEL-009",
    ),
    "a group of none": (
        lambda signed: signed.update(groups=groups_table(("adam", []), ("cast", [7, 1]))),
        Code.COLUMN_FORM,
        "REQ-DEL-009",
    ),
    "a box in two groups": (
        lambda signed: signed.update(groups=groups_table(("adam", [5, 6, 4]), ("cast", [7, 4]))),
        Code.COLUMN_FORM,
        "REQ-DEL-009",
    ),
    "a box twice in one": (
        lambda signed: signed.update(groups=groups_table(("adam", [5, 6, 4, 5]), ("cast", [7, 1]))),
        Code.COLUMN_FORM,
        "REQ-DEL-009",
    ),
    "other numbers of elements": (
        lambda signed: signed.update(groups=groups_table(("adam", [5, 6, 4]), ("cast", [0, 1]))),
        Code.COLUMN_FORM,
        "REQ-DEL-009",
    ),
    "groups out of order": (
        lambda signed: signed.update(groups=groups_table(("cast", [7, 1]), ("adam", [5, 6, 4]))),
        Code.COLUMN_ORDER,
        "REQ-IDX-003",
    ),
    "no group at all": (
        lambda signed: signed.update(groups=groups_table()),
        Code.COLUMN_FORM,
        "REQ-DEL-006",
    ),
}


def groups_table(*groups):
    """Return the table of groups, of kinds and numbers of boxes."""
    members = [box for _, boxes in groups for box in boxes]
    steps = [box - before for before, box in itertools.pairwise([0, *members])]
    return {
        "kind": dump_strings([kind for kind, _ in groups]),
        "rule": [b"" for _ in groups],
        "reference": dump_packed([int(kind != "cast") for kind, _ in groups]),
        "member_count": dump_packed([len(boxes) for _, boxes in groups]),
        "box": dump_packed(fold(np.array(steps, np.int64))),
    }


@pytest.mark.parametrize(("edit", "code", "requirement"), EDITS.values(), ids=EDITS)
def test_wrong_parts_of_deltas_are_refused(edit, code, requirement):
    """REQ-DEL-001 to REQ-DEL-006, REQ-DEL-009, REQ-DEL-010, REQ-DEL-012; under a valid digest each."""
    signed = copy.deepcopy(SIGNED)
    edit(signed)
    assert signed != SIGNED
    error = error_of(lambda: parse(signed))
    assert isinstance(error, FormatError) or error.code == Code.FEATURE_UNSUPPORTED
    assert error.where.startswith(PATH)
    assert (error.code, error.requirement) == (code, requirement)


def test_the_groups_of_the_edits_are_those_of_the_part():
    """So that an edit of them shows what it says, and nothing else."""
    signed = copy.deepcopy(SIGNED)
    signed["groups"] = {
        **groups_table(("adam", [5, 6, 4]), ("cast", [7, 1])),
        "rule": signed["groups"]["rule"],
    }
    assert {**signed["groups"], "reference": None} == {**SIGNED["groups"], "reference": None}


@pytest.mark.parametrize("table", ["extents", "stored", "groups", "files"])
def test_no_column_of_a_delta_may_be_missing_or_null(table):
    """REQ-IDX-002."""
    for key in SIGNED[table]:
        signed = copy.deepcopy(SIGNED)
        del signed[table][key]
        assert code_of(lambda signed=signed: parse(signed)) == Code.DOC_SCHEMA
        signed[table][key] = None
        assert code_of(lambda signed=signed: parse(signed)) in {Code.COLUMN_FORM, Code.PACKED_FORM}


@pytest.mark.parametrize("key", ["stored", "groups"])
def test_a_full_part_with_a_member_of_a_delta_is_refused(key):
    """REQ-DEL-001: the features come first, and say which members there are."""
    full = parse_signed(one_block(references=(), file="shard").part().dump()[0])
    assert code_of(lambda: parse({**full, key: SIGNED[key]})) == Code.DOC_SCHEMA
    error = error_of(lambda: parse({**full, "references": SIGNED["references"]}))
    assert (error.code, error.requirement) == (Code.PROFILE_MISMATCH, "REQ-MAN-005")


def test_encoded_blocks_are_in_packs():
    """REQ-DEL-004: no header of a shard could say them."""
    part = one_block("planes", references=(), file="shard").part()
    error = error_of(lambda: Part.parse(part.dump()[0], where=PATH))
    assert (error.code, error.requirement) == (Code.COLUMN_FORM, "REQ-DEL-004")


@pytest.mark.parametrize("nbytes", [399, 400, 401])
def test_an_encoded_block_is_stored_in_fewer_bytes_than_it_has(nbytes):
    """REQ-DEL-005: the last block of a box is a short one."""
    part = one_block("planes", references=(), stored_nbytes=(nbytes,)).part()
    assert code_of(lambda: Part.parse(part.dump()[0], where=PATH)) == (
        "ok" if nbytes < 400 else Code.COLUMN_FORM
    )


def test_blocks_of_no_file_have_an_order():
    """REQ-IDX-003: nothing else says which of them is first."""
    part = one_block("same", tensors=(("weights", "v"), ("weights", "w")), reference=0).part()
    signed = parse_signed(part.dump()[0])
    assert unpacked(signed["extents"]["box"]) == [0, 0]
    signed["extents"]["box"] = dump_packed([2, 3])  # 1, then 0
    error = error_of(lambda: parse(signed))
    assert (error.code, error.requirement) == (Code.COLUMN_ORDER, "REQ-IDX-003")


@pytest.mark.parametrize("count", [0, 1, 32])
def test_so_many_references_may_be(count):
    """REQ-DEL-002, REQ-LIM-002."""
    references = tuple(
        Reference(name=f"step-{number:08d}-l0001", digest=f"blake3:{number:064x}")
        for number in range(count)
    )
    part = one_block("planes", references=references).part()
    assert Part.parse(part.dump()[0], where=PATH)[0].references == references


def grouped(kind, encodings, *, predicted, reference=0, stored=(True, True)):
    """Return a part with one group of two boxes, and what each of them is stored as."""
    builder = Builder()
    for name, encoding, of_group, is_stored in zip("vw", encodings, predicted, stored, strict=True):
        own = (
            {"predicted": True} if of_group else {"reference": 0} if encoding in NEEDS_BASE else {}
        )
        builder.add(
            "weights", name, "float32", (100,), *([(1, encoding, own)] if is_stored else [])
        )
    builder.group(kind, ("weights", "v"), ("weights", "w"), reference=reference)
    return builder.part()


@pytest.mark.parametrize(
    "part",
    [
        grouped("sgd", ["gradient", "sparse"], predicted=[True, True]),
        grouped("adam", ["xor", "raw"], predicted=[False, False]),
        grouped("adam", ["planes", "same"], predicted=[False, False]),
        grouped("cast", ["sparse", "difference"], predicted=[False, True], reference=None),
        grouped("cast", ["raw", "sparse"], predicted=[False, True], reference=None),
    ],
)
def test_members_of_a_group_may_be_stored_in_any_way(part):
    """REQ-DEL-006, REQ-DEL-009, REQ-DEL-010: as predicted, or as if there were no group."""
    assert contents_of(Part.parse(part.dump()[0], where=PATH)[0]) == contents_of(part)


@pytest.mark.parametrize(
    ("part", "requirement"),
    [
        (one_block("gradient", reference=0).part(), "REQ-DEL-006"),
        (
            grouped("cast", ["sparse", "sparse"], predicted=[True, True], reference=None),
            "REQ-DEL-006",
        ),
        (
            grouped("adam", ["gradient", "sparse"], predicted=[True, True], reference=None),
            "REQ-DEL-010",
        ),
        (grouped("cast", ["raw", "sparse"], predicted=[False, True], reference=0), "REQ-DEL-010"),
        (
            grouped(
                "cast",
                ["raw", "sparse"],
                predicted=[False, True],
                reference=None,
                stored=[False, True],
            ),
            "REQ-DEL-009",
        ),
    ],
    ids=[
        "gradient of a base",
        "first of cast",
        "adam of nothing",
        "cast of a base",
        "not stored",
    ],
)
def test_groups_that_cannot_be_decoded_are_refused(part, requirement):
    """REQ-DEL-006, REQ-DEL-009, REQ-DEL-010: before a decoder meets them."""
    error = error_of(lambda: Part.parse(part.dump()[0], where=PATH))
    assert (error.code, error.requirement) == (Code.COLUMN_FORM, requirement)


def test_a_gap_where_there_are_no_files_is_refused():
    """REQ-PRT-007."""
    signed = parse_signed(one_block("same", reference=0).part().dump()[0])
    signed["extents"]["gap_nbytes"] = dump_packed([5])
    error = error_of(lambda: parse(signed))
    assert (error.code, error.requirement) == (Code.FILE_COVERAGE, "REQ-PRT-007")


def test_a_part_that_stores_nothing_may_have_references():
    """REQ-DEL-003: a writer of replicas that another one writes pins the base as well."""
    builder = Builder()
    builder.add("weights", "w", "float32", (100,))
    part = builder.part()
    assert contents_of(Part.parse(part.dump()[0], where=PATH)[0]) == contents_of(part)


def test_a_full_manifest_has_no_features():
    """REQ-MAN-005."""
    manifest = Manifest(
        origin=origin(),
        saved_unix_s=7,
        fields=dict.fromkeys(FIELDS, FieldSummary()),
        index_nbytes=1,
        index_digest="blake3:" + "0" * 64,
    )
    signed = parse_json(manifest.dump())
    signed["features"]["reader"] = ["planes"]
    error = error_of(lambda: parse_register(dump_document(signed)))
    assert (error.code, error.requirement) == (Code.PROFILE_MISMATCH, "REQ-MAN-005")


# --- what any part and any byte does --------------------------------------------------------------


@st.composite
def parts(draw):
    """Parts of deltas: any tensors, in any runs of blocks, in any encodings."""
    builder = Builder(REFERENCES[: draw(st.integers(0, 3))])
    has_base = bool(builder.references)
    kinds = [
        name for name in ENCODINGS if name != "gradient" and (has_base or name not in NEEDS_BASE)
    ]
    for number in range(draw(st.integers(1, 4))):
        dtype = draw(st.sampled_from(["int8", "bfloat16", "float32", "complex128"]))
        nbytes = draw(st.integers(0, 3 * BLOCK // 16)) * 16
        runs: list[tuple[int, str, dict[str, Any]]] = []
        left = -(-nbytes // BLOCK)
        while left or not runs:
            count = draw(st.integers(min(left, 1), left))
            encoding = draw(
                st.sampled_from(kinds if nbytes else sorted({"raw", "same"} & set(kinds)))
            )
            own: dict[str, Any] = {}
            if encoding in NEEDS_BASE:
                own["reference"] = draw(st.integers(0, len(builder.references) - 1))
            if encoding not in PLAIN:
                own["stored_nbytes"] = tuple(draw(st.integers(0, 15)) for _ in range(count))
            if encoding == "raw":
                own["file"] = draw(st.sampled_from(["weights", "optimizer"]))
            runs.append((count, encoding, own))
            left -= count
        builder.add("weights", f"t{number}", dtype, (nbytes // DTYPES[dtype].nbytes,), *runs)
    for kind in draw(st.lists(st.sampled_from(GROUP_KINDS), max_size=2)):
        add_group(builder, kind, draw)
    return builder.part()


def add_group(builder, kind, draw):
    """Add boxes of as many elements, and the group of them."""
    if not builder.references:
        return
    count = draw(st.integers(1, 3000))
    members: list[tuple[str, str]] = []
    for _ in range(draw(st.integers(2, 4))):
        name = f"g{len(builder.tensors)}"
        blocks = -(-count * 4 // BLOCK)
        own = {"predicted": True} if members else {"reference": 0}
        builder.add(
            "weights",
            name,
            "float32",
            (count,),
            (blocks, "sparse", {**own, "stored_nbytes": (3,) * blocks}),
        )
        members.append(("weights", name))
    reference = None if kind == "cast" else draw(st.integers(0, len(builder.references) - 1))
    builder.group(kind, *members, rule=draw(st.binary(max_size=9)), reference=reference)


@given(parts())
def test_any_part_is_dumped_as_it_was_parsed(part):
    """REQ-DEL-001 to REQ-DEL-006, REQ-DOC-022: one form for each content."""
    if not part.features:
        return  # raw in packs, and nothing else: not a delta
    content, digest = part.dump()
    parsed, found = Part.parse(content, where=PATH)
    assert (contents_of(parsed), found) == (contents_of(part), digest)
    assert parsed.dump() == (content, digest)
    assert dataclasses.replace(parsed, holdings=holdings_of(rows_of(parsed.holdings))).dump() == (
        content,
        digest,
    )


SMALL = one_block(
    "sparse", tensors=(("optimizer", "master"),), references=REFERENCES[:2], reference=1
)
SMALL.add("optimizer", "low", "bfloat16", (100,), (1, "sparse", {"predicted": True}))
SMALL.add("optimizer", "s", "int8", (3,), (1, "same", {"reference": 0}))
SMALL.group("cast", ("optimizer", "master"), ("optimizer", "low"))


@pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("bit", range(8))
def test_no_changed_byte_says_the_same(bit, stride):
    """REQ-DOC-022, REQ-IDX-002: under a valid digest, a changed byte is refused or says something else.

    A later minor version says the same by its other members (REQ-VER-011).
    """
    part = SMALL.part()
    content = dump_msgpack(parse_signed(part.dump()[0]))
    accepted = 0
    minor = content.index(b"1.0", content.index(b"format_version")) + 2
    for at in range(bit % stride, len(content), stride):
        if at == minor:
            continue
        changed = bytearray(content)
        changed[at] ^= 1 << bit
        try:
            parsed, _ = Part.parse(seal(bytes(changed)), where=PATH)
        except CkptError:
            continue
        assert contents_of(parsed) != contents_of(part), f"byte {at}"
        accepted += 1
    assert accepted > 200 // stride  # digests, for one


def seal(content):
    """Return the document of a content that needn't be one."""
    import zlib  # noqa: PLC0415

    stored = zlib.compress(content, 1)
    return dump_msgpack({"digest": digest_bytes(stored), "nbytes": len(content), "signed": stored})


# --- what a committer makes of parts --------------------------------------------------------------


def merged(*parts):
    entries = [
        PartFileEntry(part=part, digest=part.dump()[1], nbytes=len(part.dump()[0]))
        for part in parts
    ]
    features, references = merge_deltas(parts)
    fields = add_stored(summarise(merge_parts(entries)), parts)
    return features, references, fields


def of_writer(part, writer, **members):
    made = origin(writer_count=2)
    files = tuple(
        dataclasses.replace(file, name=file.name.replace("-00000.", f"-{writer:05d}."))
        for file in part.files
    )
    return dataclasses.replace(part, origin=made, writer=writer, files=files, **members)


def test_a_manifest_has_what_any_part_has():
    """REQ-DEL-001, REQ-DEL-021: of two parts of one delta, one may be full."""
    one = of_writer(
        one_block(
            "xor", tensors=(("weights", "v"),), references=REFERENCES[:2], reference=0
        ).part(),
        0,
    )
    other = of_writer(
        one_block("planes", tensors=(("weights", "w"),), references=REFERENCES[1:]).part(), 1
    )
    full = of_writer(
        one_block("raw", tensors=(("weights", "w"),), references=(), file="shard").part(), 1
    )
    assert merged(one, other)[:2] == (("deltas", "planes", "xor"), REFERENCES)
    assert merged(one, full)[:2] == (("deltas", "xor"), REFERENCES[:2])
    assert merge_deltas([full]) == ((), ())


def test_a_manifest_says_what_its_own_files_hold():
    """REQ-MAN-006: raw, encoded and nothing; of all parts, by field, headers apart."""
    fields = merged(PART)[2]
    assert {name: fields[name].stored_nbytes for name in ("weights", "optimizer")} == {
        "weights": 4096 + 7 + 7 + 5 + 7, "optimizer": 7 + 7 + 7 + 3
    }  # fmt: skip
    stored = sum(file.nbytes - file.header_nbytes for file in PART.files)
    assert stored == sum(fields[name].stored_nbytes or 0 for name in fields)
    assert fields["rng"] == FieldSummary(reason="no generator")


def test_more_references_than_a_manifest_lists_are_refused():
    """REQ-DEL-021, REQ-LIM-001."""
    many = [
        [
            Reference(name=f"step-{number:08d}-l0001", digest=f"blake3:{number:064x}")
            for number in numbers
        ]
        for numbers in (range(20), range(13, 33))
    ]
    made = [one_block("planes", references=tuple(references)).part() for references in many]
    error = error_of(lambda: merge_deltas(made))
    assert (error.code, error.requirement) == (Code.LIMIT_EXCEEDED, "REQ-LIM-001")
    assert (
        len(merge_deltas([made[0], one_block("raw", references=tuple(many[1][:19])).part()])[1])
        == 32
    )


def test_one_checkpoint_has_one_name():
    """REQ-DEL-002: two parts that call it otherwise weren't written for one run."""
    other = dataclasses.replace(REFERENCES[0], name="step-00000009-l0001")
    made = [
        one_block("planes", references=(reference,)).part() for reference in (REFERENCES[0], other)
    ]
    error = error_of(lambda: merge_deltas(made))
    assert (error.code, error.requirement) == (Code.REFERENCE_CLOSURE, "REQ-DEL-002")


def test_the_manifest_of_a_delta_comes_back():
    """REQ-MAN-005, REQ-DEL-001, REQ-DEL-002."""
    features, references, fields = merged(PART)
    fields = {field: fields.get(field, FieldSummary()) for field in FIELDS}
    manifest = Manifest(
        origin=origin(),
        saved_unix_s=7,
        fields=fields,
        index_nbytes=1,
        index_digest="blake3:" + "0" * 64,
        features=features,
        references=references,
    )
    content = manifest.dump()
    parsed = parse_register(content)
    assert isinstance(parsed, Manifest)
    assert parsed == dataclasses.replace(manifest, digest=json.loads(content)["digest"])
    assert parsed.dump() == content
    assert (parsed.profile, parsed.references) == ("delta", REFERENCES)
    assert (
        parsed.stored_nbytes
        == sum(field.stored_nbytes or 0 for field in fields.values())
        < parsed.nbytes
    )


# --- pins -----------------------------------------------------------------------------------------

PINS = Pins(attempt=ATTEMPT, writer=3, references=REFERENCES)


def test_pins_come_back():
    """REQ-CMT-035, REQ-CKP-001."""
    path = pins_path(ATTEMPT, 3)
    assert path == f"parts/{ATTEMPT}-00003.pins.json"
    assert Pins.parse(PINS.dump(), where=path) == PINS
    none = dataclasses.replace(PINS, references=())
    assert Pins.parse(none.dump(), where=path) == none


PIN_EDITS = {
    "no references": (lambda signed: signed.pop("references"), Code.DOC_SCHEMA, "REQ-CMT-035"),
    "a member more": (lambda signed: signed.update(step=3), Code.DOC_SCHEMA, "REQ-CMT-035"),
    "another type": (lambda signed: signed.update(type="failure"), Code.DOC_SCHEMA, "REQ-DOC-011"),
    "an attempt in upper case": (
        lambda signed: signed.update(attempt="A" * 16),
        Code.DOC_SCHEMA,
        "REQ-CKP-001",
    ),
    "a writer below 0": (lambda signed: signed.update(writer=-1), Code.DOC_SCHEMA, "REQ-DOC-005"),
    "33 references": (
        lambda signed: signed.update(references=signed["references"][:1] * 33),
        Code.DOC_SCHEMA,
        "REQ-LIM-001",
    ),
    "a reference that is a digest": (
        lambda signed: signed.update(references=[REFERENCES[0].digest]),
        Code.DOC_SCHEMA,
        "REQ-DEL-002",
    ),
    "a name of another form": (
        lambda signed: signed["references"][0].update(name="step-000000001-l0001"),
        Code.UNSAFE_PATH,
        "REQ-DEL-002",
    ),
    "references backwards": (
        lambda signed: signed["references"].reverse(),
        Code.COLUMN_ORDER,
        "REQ-DEL-002",
    ),
    "a reader feature": (
        lambda signed: signed["features"]["reader"].append("deltas"),
        Code.FEATURE_UNSUPPORTED,
        "REQ-DOC-010",
    ),
    "another writer": (lambda signed: signed.update(writer=4), Code.DOC_MISMATCH, "REQ-CMT-037"),
    "another attempt": (
        lambda signed: signed.update(attempt="f" * 16),
        Code.DOC_MISMATCH,
        "REQ-CMT-037",
    ),
}


@pytest.mark.parametrize(("edit", "code", "requirement"), PIN_EDITS.values(), ids=PIN_EDITS)
def test_wrong_pins_are_refused(edit, code, requirement):
    """REQ-CMT-035, REQ-CMT-037, REQ-DEL-002, REQ-VER-007: pins need no feature, and know none."""
    signed = parse_json(PINS.dump())
    edit(signed)
    error = error_of(lambda: Pins.parse(dump_document(signed), where=pins_path(ATTEMPT, 3)))
    assert (error.code, error.requirement) == (code, requirement)
