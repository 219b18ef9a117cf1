"""Tensors, blocks and shards; spec/core/50-tensors.md and spec/writing/52-shards.md."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

from blake3 import blake3

from conformance.generate.bases import flip
from conformance.generate.cases import FileMap, Page
from conformance.generate.model import Checkpoint, Edit, build
from conformance.generate.parts import shard_header
from conformance.generate.plans import DTYPES, Plan, Tensor
from conformance.generate.wire import Packed

__all__ = ["page"]

SHARD = "weights-0123456789abcdef-00000.safetensors"
OTHERS = "other tools trust the header, and must see the same tensors"


def pair(**members: Any) -> Plan:
    """Return two tensors of float32: three elements, and two by three."""
    return Plan(
        tensors=[Tensor(name="bias", shape=(3,)), Tensor(name="weight", shape=(2, 3))], **members
    )


def page() -> Page:
    """Return the cases of shards."""
    made = Page("shards")
    _valid(made)
    _valid_headers(made)
    _lengths(made)
    _texts(made)
    _entries(made)
    _mismatches(made)
    _files(made)
    _bits(made)
    return made


def put_header(c: Checkpoint, header: bytes, name: str = SHARD) -> None:
    """Replace the header of a shard, and update the shard's part."""
    table = c.part["files"]
    row = table["name"].index(name)
    content = c.files[name][table["header_nbytes"][row] :]
    c.files[name] = header + content
    table["nbytes"][row] = len(header) + len(content)
    table["header_nbytes"][row] = len(header)
    digests = table["header_digest"]
    table["header_digest"] = (
        digests[: 32 * row] + blake3(header).digest() + digests[32 * row + 32 :]
    )


def header(change: Callable[[dict[str, Any]], object]) -> Edit:
    """Return an edit of the header as a JSON object."""

    def edit(c: Checkpoint) -> None:
        entries = json.loads(c.files[SHARD][8 : c.part["files"]["header_nbytes"][0]])
        metadata = entries.pop("__metadata__")
        change(entries)
        put_header(c, shard_header(entries, metadata=metadata))

    return edit


def text(change: Callable[[bytes], bytes], *, pad: bytes = b" ") -> Edit:
    """Return an edit of the JSON text of the header, followed by new padding."""

    def edit(c: Checkpoint) -> None:
        changed = change(c.files[SHARD][8 : c.part["files"]["header_nbytes"][0]].rstrip(b" "))
        changed += pad * (-(8 + len(changed)) % 64)
        put_header(c, len(changed).to_bytes(8, "little") + changed)

    return edit


def _valid(made: Page) -> None:
    made.accept(
        "pair",
        pair(),
        (
            "SHD-001 SHD-004 SHD-005 SHD-006 SHD-007 SHD-008 SHD-010 SHD-011 TEN-001 TEN-002"
            " PRT-008"
            " OPN-011"
        ),
        "two tensors in one shard",
        why="it is what the invalid shards differ from",
    )
    tensors = [Tensor(name=name, dtype=name, shape=(2,)) for name in DTYPES]
    made.accept(
        "dtypes",
        Plan(tensors=tensors),
        "TEN-002 TEN-003 TEN-004 TEN-007 SHD-002 SHD-006 OPN-007",
        "two elements of each dtype; those that safetensors lacks in a file of their own",
        why="a reader returns the bytes that were saved, of whatever dtype",
    )
    mixed = Plan(
        tensors=[
            Tensor(name=f"{number}", dtype=dtype, shape=(3,))
            for number, dtype in enumerate(("int8", "float64", "bfloat16", "float32", "bool"))
        ]
        + [Tensor(name="buffer", dtype="int8", shape=(2,), storage=1)]
    )
    mixed.tensors[4].content = b"\1\0\1"
    made.accept(
        "widths",
        mixed,
        "SHD-002 SHD-003 TEN-002 TEN-007",
        "elements of one, two, four and eight bytes, wider first",
        why="places follow from the extents, not from the order of names",
    )
    bits = bytes.fromhex("0000c07f0100a0ff0000008001000000")
    made.accept(
        "bits",
        Plan(tensors=[Tensor(name="w", shape=(4,), content=bits)]),
        "OPN-007 TEN-002",
        "two NaN with payloads, -0.0 and a denormal",
        why="bits are kept, whatever they mean",
        bug="WRONG_BYTES",
    )


def _valid_headers(made: Page) -> None:
    """Add headers of other forms."""
    for slug, says, edit in (
        (
            "without-metadata",
            "no __metadata__ in the header",
            text(lambda t: t.replace(b'"__metadata__":{"format":"pt"},', b"")),
        ),
        (
            "other-metadata",
            "__metadata__ of other strings",
            text(lambda t: t.replace(b'"pt"', '"ü","":"\\u0000"'.encode())),
        ),
        (
            "other-order",
            "the box that comes last stands first in the header",
            header(lambda e: e.update(bias=e.pop("bias"))),
        ),
        (
            "more-padding",
            "128 bytes of padding more than there have to be",
            text(lambda t: t + b" " * 128),
        ),
        (
            "escapes",
            "a key with an escape that isn't needed",
            text(lambda t: t.replace(b'"bias"', b'"b\\u0069as"')),
        ),
    ):
        made.accept(
            slug,
            pair(),
            "SHD-004 SHD-006 SHD-009",
            says,
            edit=edit,
            why="the header is JSON, not the canonical form",
        )
    made.accept(
        "empty",
        Plan(tensors=[Tensor(name="e", shape=(0, 2)), Tensor(name="f", dtype="int8", shape=(0,))]),
        "SHD-008 SHD-007",
        "a shard of two boxes without elements, and no data",
        why="a box of no bytes is a box",
    )


def _reject(  # noqa: PLR0917 - a row of a table of cases
    made: Page, slug: str, edit: Edit, clauses: str, error: str, says: str, *, why: str = OTHERS,
    bug: str = "AMBIGUITY",
    phase: str = "validate", of: str = "pair",
) -> None:  # fmt: skip
    made.reject(slug, of, edit, clauses, error, says, why=why, bug=bug, phase=phase)


def _with_length(value: int) -> Edit:
    def edit(c: Checkpoint) -> None:
        old = c.files[SHARD][: c.part["files"]["header_nbytes"][0]]
        put_header(c, value.to_bytes(8, "little") + old[8:])

    return edit


def _lengths(made: Page) -> None:
    why = (
        "a length that isn't that of the header makes another file of it, or an allocation that"
        " nothing bounds"
    )
    for slug, says, edit in (
        ("length-0", "a length of 0", _with_length(0)),
        ("length-beyond-the-file", "a length beyond the file", _with_length(1000)),
        ("length-2-63", "a length of 2^63", _with_length(2**63)),
        ("length-2-64", "a length of 2^64 - 1", _with_length(2**64 - 1)),
        ("unaligned", "data that begins at byte 193", _pad_by_one),
    ):
        _reject(
            made,
            slug,
            edit,
            "SHD-001",
            "SHARD_HEADER_NBYTES",
            f"the header has {says}",
            why=why,
            bug="RESOURCE",
        )
    for nbytes in (0, 7, 8):
        _reject(
            made,
            f"file-of-{nbytes}-bytes",
            _with_header(bytes(nbytes)),
            "SHD-001",
            "SHARD_HEADER_NBYTES",
            f"the shard has {nbytes} bytes, and its part says so",
            why=why,
            bug="CRASH",
            of="empty",
        )

    def large(c: Checkpoint) -> None:
        c.part["files"]["header_nbytes"] = Packed([2**24 + 64])
        c.part["files"]["nbytes"] = Packed([2**24 + 64 + 36])

    _reject(
        made,
        "header-beyond-16-mib",
        large,
        "SHD-001 LIM-001",
        "COLUMN_FORM LIMIT_EXCEEDED SHARD_HEADER_NBYTES",
        "the part gives the header more than 16 MiB",
        why=why,
        bug="RESOURCE",
        phase="open",
    )


def _with_header(content: bytes) -> Edit:
    return lambda c: put_header(c, content)


def _with_magic(magic: bytes) -> Edit:
    return lambda c: put_header(c, magic + c.files[SHARD][8:192])


def _with_metadata(new: bytes, content: bytes) -> bytes:
    return content.replace(b'{"format":"pt"}', new)


def _pad_by_one(c: Checkpoint) -> None:
    old = c.files[SHARD][8:192] + b" "
    put_header(c, len(old).to_bytes(8, "little") + old)


def _texts(made: Page) -> None:
    why = "other padding and other JSON make files that one parser reads and the next does not"
    for slug, says, edit in (
        ("leading-space", "a space before the brace", text(lambda t: b" " + t)),
        ("padding-nul", "padding of NUL", text(lambda t: t, pad=b"\0")),
        ("padding-tab", "padding of tabs", text(lambda t: t, pad=b"\t")),
        ("two-objects", "a second object behind the first", text(lambda t: t + b"{}")),
        ("array", "an array and no object", text(lambda t: b"[" + t + b"]")),
        ("minus-zero", "an offset of -0", text(lambda t: t.replace(b"[0,12]", b"[-0,12]"))),
        (
            "digits-21",
            "an offset of 21 digits",
            text(lambda t: t.replace(b"[0,12]", b"[0," + b"1" * 21 + b"]")),
        ),
        ("fraction", "an offset of 0.0", text(lambda t: t.replace(b"[0,12]", b"[0.0,12]"))),
        ("not-utf-8", "a key that isn't UTF-8", text(lambda t: t.replace(b"bias", b"b\xffas"))),
        (
            "surrogate",
            "a key with half a surrogate",
            text(lambda t: t.replace(b"bias", b"\\ud800")),
        ),
        ("nested", "arrays inside of a shape", text(lambda t: t.replace(b"[3]", b"[[[3]]]"))),
        (
            "depth-2000",
            "2000 arrays in each other",
            text(lambda t: t[:-1] + b',"a":' + b"[" * 2000 + b"]" * 2000 + b"}"),
        ),
    ):
        _reject(
            made,
            slug,
            edit,
            "SHD-004",
            "SHARD_HEADER_SYNTAX",
            f"the header has {says}",
            why=why,
            bug="CRASH" if slug.startswith("depth") else "AMBIGUITY",
        )
    why = "parsers differ in which of the two they take"
    for slug, says, edit in (
        (
            "duplicate-key",
            "one box twice",
            text(lambda t: t[:-1] + b',"bias":{"dtype":"F32","shape":[3],"data_offsets":[0,12]}}'),
        ),
        (
            "duplicate-member",
            "shape twice in one box",
            text(lambda t: t.replace(b'"shape":[3]', b'"shape":[3],"shape":[3]')),
        ),
        (
            "duplicate-metadata",
            "__metadata__ twice",
            text(lambda t: b'{"__metadata__":{},' + t[1:]),
        ),
        (
            "duplicate-in-metadata",
            "format twice in __metadata__",
            text(lambda t: t.replace(b'{"format"', b'{"format":"np","format"')),
        ),
    ):
        _reject(made, slug, edit, "SHD-005", "DOC_DUPLICATE_KEY", f"the header has {says}", why=why)


def _entries(made: Page) -> None:
    for slug, clauses, error, says, change in (
        ("member-unknown", "SHD-006", "SHARD_HEADER_SCHEMA", "a member strides",
         lambda e: e["bias"].update(strides=[1])),
        ("extent-true", "SHD-011 SHD-007", "SHARD_SHAPE", "an extent of true",
         lambda e: e["bias"].update(shape=[3, True])),
        ("shape-null", "SHD-011 SHD-007", "SHARD_SHAPE", "a shape of null",
         lambda e: e["bias"].update(shape=None)),
        ("tag-null", "SHD-011 SHD-006", "SHARD_DTYPE", "the tag null",
         lambda e: e["bias"].update(dtype=None)),
        ("offset-false", "SHD-011 SHD-006", "SHARD_HEADER_SCHEMA", "the offsets false and 12",
         lambda e: e["bias"].update(data_offsets=[False, 12])),
        ("box-null", "SHD-011 SHD-006", "SHARD_HEADER_SCHEMA", "null for a box",
         lambda e: e.update(bias=None)),
        ("one-offset", "SHD-006", "SHARD_HEADER_SCHEMA", "one offset",
         lambda e: e["bias"].update(data_offsets=[0])),
        ("offsets-reversed", "SHD-006 SHD-008", "SHARD_HEADER_SCHEMA SHARD_OFFSETS",
         "offsets in the wrong order", lambda e: e["bias"].update(data_offsets=[12, 0])),
        ("tag-lower-case", "SHD-006", "SHARD_DTYPE", "the tag f32",
         lambda e: e["bias"].update(dtype="f32")),
        ("negative-extent", "SHD-007", "SHARD_SHAPE", "an extent of -3",
         lambda e: e["bias"].update(shape=[-3])),
        ("large-extent", "SHD-007 LIM-001", "SHARD_SHAPE", "an extent of 2^48 + 1",
         lambda e: e["bias"].update(shape=[2**48 + 1])),
        ("extent-2-64", "SHD-007 LIM-001", "SHARD_SHAPE", "an extent of 2^64 - 1",
         lambda e: e["bias"].update(shape=[2**64 - 1])),
        ("product-wraps", "SHD-007 LIM-001", "SHARD_SHAPE", ("extents whose product wraps to 4 in"
        " 64 bits"),
         lambda e: e["bias"].update(shape=[4194305, 4194305, 211106198978564])),
        ("zero-and-large", "SHD-007 LIM-001", "SHARD_SHAPE", "extents 0, 2^48 and 2^48",
         lambda e: e["bias"].update(shape=[0, 2**48, 2**48])),
        ("rank-33", "SHD-007 LIM-001", "SHARD_SHAPE", "33 dimensions",
         lambda e: e["bias"].update(shape=[1] * 32 + [3])),
        ("size", "SHD-008", "SHARD_OFFSETS", "a shape of four elements in twelve bytes",
         lambda e: e["bias"].update(shape=[4])),
        ("overlap", "SHD-008", "SHARD_OFFSETS", "two boxes that overlap",
         lambda e: e["weight"].update(data_offsets=[8, 32])),
        ("hole", "SHD-008", "SHARD_OFFSETS", "a hole of four bytes",
         lambda e: e["weight"].update(data_offsets=[16, 36], shape=[5])),
        ("begins-late", "SHD-008", "SHARD_OFFSETS", "a first box that begins at byte 4",
         lambda e: e["bias"].update(data_offsets=[4, 12], shape=[2])),
        ("tail", "SHD-008", "SHARD_OFFSETS", "24 bytes behind the last box",
         lambda e: e.pop("weight")),
        ("offset-beyond", "SHD-008", "SHARD_OFFSETS", "a box that ends outside of the file",
         lambda e: e["weight"].update(data_offsets=[12, 60], shape=[12])),
    ):  # fmt: skip
        bug = "RESOURCE" if "LIM" in clauses else "AMBIGUITY"
        _reject(made, slug, header(change), clauses, error, f"the header has {says}", bug=bug)
    for slug, says, new in (
        ("metadata-null", "null", b"null"),
    ):  # fmt: skip
        _reject(
            made,
            slug,
            text(functools.partial(_with_metadata, new)),
            "SHD-006",
            "SHARD_HEADER_SCHEMA",
            f"the header has __metadata__ with {says}",
        )


def _mismatches(made: Page) -> None:
    for slug, clauses, says, change in (
        ("other-key", "SHD-010 SHD-009", "another key", lambda e: e.update(biaS=e.pop("bias"))),
        ("other-tag", "SHD-010", "another tag of the same width",
         lambda e: e["bias"].update(dtype="I32")),
        ("other-shape", "SHD-010", "another shape of as many elements",
         lambda e: e["weight"].update(shape=[3, 2])),
        ("exchanged", "SHD-010", "the two keys exchanged",
         lambda e: (e.update(weight=e["bias"], bias=e["weight"]))),
        ("one-more", "SHD-010", "a third box, without elements",
         lambda e: e.update(third={"dtype": "F32", "shape": [0], "data_offsets": [36, 36]})),
    ):  # fmt: skip
        _reject(
            made,
            f"mismatch-{slug}",
            header(change),
            clauses,
            "SHARD_MISMATCH",
            f"the header has {says}",
            bug="WRONG_BYTES",
        )

    def opaque(c: Checkpoint) -> None:
        name = next(name for name in c.files if "_opaque" in name)
        table = c.part["files"]
        entries = json.loads(c.files[name][8 : table["header_nbytes"][table["name"].index(name)]])
        entries["complex128"] |= {"dtype": "F64", "shape": [4]}
        entries.pop("__metadata__")
        put_header(c, shard_header(entries), name)

    _reject(
        made,
        "opaque-with-a-tag",
        opaque,
        "TEN-004 SHD-010",
        "SHARD_MISMATCH",
        "complex128 stands in the header as F64",
        of="dtypes",
    )


def _files(made: Page) -> None:
    why = "what isn't there, or isn't whole, isn't returned as if it were"

    def edit(
        slug: str, clauses: str, error: str, says: str, after: Callable[[FileMap], object]
    ) -> None:
        made.reject(slug, "pair", None, clauses, error, says, why=why, phase="read", after=after)

    def put(content: Callable[[bytes], bytes]) -> Callable[[FileMap], object]:
        return lambda files: files.update({SHARD: content(files[SHARD])})

    edit(
        "missing",
        "CKP-004",
        "FILE_MISSING",
        "the shard isn't there",
        lambda files: files.pop(SHARD),
    )
    edit(
        "a-byte-short",
        "CKP-003 OPN-011",
        "FILE_NBYTES",
        "the shard is a byte shorter",
        put(lambda c: c[:-1]),
    )
    edit(
        "a-byte-long",
        "CKP-003 OPN-011",
        "FILE_NBYTES",
        "the shard is a byte longer",
        put(lambda c: c + b"\0"),
    )
    edit(
        "zero-tail",
        "TEN-006 OPN-006",
        "BLOCK_DIGEST",
        "the last 20 bytes are zero",
        put(lambda c: c[:-20] + bytes(20)),
    )
    edit(
        "all-zero",
        "PRT-008 OPN-011",
        "HEADER_DIGEST",
        "all of its bytes are zero",
        put(lambda c: bytes(len(c))),
    )
    edit(
        "a-folder",
        "CKP-002",
        "UNSAFE_FILE",
        "a folder of the shard's name in its place",
        lambda files: (files.pop(SHARD), files.update({f"{SHARD}/x": b""})),
    )
    for slug, says, magic in (
        ("zip", "a ZIP archive", b"PK\x03\x04\x14\0\0\0"),
        ("pickle", "a pickle", b"\x80\x04\x95\x1a\0\0\0\0"),
    ):  # fmt: skip
        _reject(
            made,
            f"other-format-{slug}",
            _with_magic(magic),
            "SHD-001 SHD-004",
            "SHARD_HEADER_NBYTES SHARD_HEADER_SYNTAX",
            f"the shard begins like {says}, and its part says so",
            why="a file of another format is another format, whatever it is called",
            bug="ESCAPE",
        )


def _bits(made: Page) -> None:
    why = "one bit of any byte of any file has to be seen"
    for slug, clauses, error, says, phase, path, at in (
        ("header", "PRT-008 OPN-011", "HEADER_DIGEST", "the JSON text of a shard", "read", SHARD,
         20),
        ("padding", "PRT-008 OPN-011", "HEADER_DIGEST", "the padding of a shard's header", "read",
         SHARD, 191),
        ("first-byte", "TEN-006 OPN-006", "BLOCK_DIGEST", "the first byte of a block", "read",
         SHARD, 192),
        ("last-byte", "TEN-006 OPN-006", "BLOCK_DIGEST", "the last byte of a block", "read", SHARD,
         -1),
        ("index", "OPN-003 DOC-025", "DOC_DIGEST", "what the index signs", "open",
         "index-0123456789abcdef.msgpack", 200),
        ("part", "OPN-003 DOC-025", "DOC_DIGEST", "what a part signs", "open",
         "parts/0123456789abcdef-00000.msgpack", 200),
        ("manifest", "DOC-009", "DOC_DIGEST", "a digit of the manifest", "open", "manifest.json",
         40),
    ):  # fmt: skip
        made.reject(
            f"bit-in-{slug}",
            "pair",
            None,
            clauses,
            error,
            f"one bit is another in {says}",
            why=why,
            phase=phase,
            after=flip(path, at),
        )
    other = build(pair(step=4)).seal()
    moved = Plan(
        tensors=[
            Tensor(name="bias", shape=(3,), content=bytes(12)),
            Tensor(name="weight", shape=(2, 3)),
        ]
    )
    later = build(moved).seal()[SHARD]
    made.reject(
        "of-another-step",
        "pair",
        None,
        "TEN-006 OPN-006",
        "BLOCK_DIGEST",
        "the shard is that of another step",
        why="a write that went to the wrong place leaves a whole file",
        phase="read",
        bug="WRONG_BYTES",
        after=lambda files: files.update({SHARD: later}),
    )
    made.reject(
        "manifest-of-another-step",
        "pair",
        None,
        "OPN-003 IDX-001",
        "DOC_DIGEST FILE_NBYTES DOC_MISMATCH",
        "the register is that of another step",
        why="documents of two saves are no checkpoint",
        after=lambda files: files.update({"manifest.json": other["manifest.json"]}),
    )
