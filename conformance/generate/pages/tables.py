"""Msgpack documents; spec/core/10-documents.md, second half. Most cases use the index."""

from __future__ import annotations

import zlib
from typing import Any

from blake3 import blake3

from conformance.generate.bases import alter, set_at, small
from conformance.generate.cases import Page
from conformance.generate.deflate import deflate_literals, deflate_run, deflate_stored
from conformance.generate.model import Checkpoint
from conformance.generate.plans import Leaf, Plan, Tensor
from conformance.generate.wire import Raw, packed

__all__ = ["page"]


def page() -> Page:
    """Return the cases of msgpack documents."""
    made = Page("tables")
    _valid(made)
    _values(made)
    _documents(made)
    _streams(made)
    _costs(made)
    _columns(made)
    return made


def _valid(made: Page) -> None:
    made.accept(
        "small",
        small(),
        "DOC-020 DOC-021 DOC-022 DOC-023 DOC-024 DOC-025 DOC-026 DOC-027 DOC-031",
        "one writer; every document in a zlib stream of fixed codes, with matches",
        why="it is what the invalid documents differ from",
    )
    for slug, says, stream in (
        ("stored", "the index in one stored block", lambda c: deflate_stored(zlib.decompress(c))),
        ("literals", "the index under fixed Huffman codes, without any match",
         lambda c: deflate_literals(zlib.decompress(c))),
        ("many-blocks", "the index in stored blocks of 100 bytes",
         lambda c: deflate_stored(zlib.decompress(c), piece_nbytes=100)),
        ("small-window", "a zlib stream of a window of 1024 bytes", lambda c: b"\x28\x15" + c[2:]),
    ):  # fmt: skip
        made.accept(
            slug,
            small(),
            "DOC-027 DOC-028",
            says,
            edit=alter("index", stream=stream),
            why="writers choose how they compress, and every zlib stream has to be read",
        )
    wide = Plan(
        tensors=[
            Tensor(name="0", dtype="uint8", shape=(0, 2**48)),
            Tensor(name="1", dtype="uint8", shape=(0, 70000)),
            Tensor(name="2", dtype="uint8", shape=(300,)),
        ]
    )
    made.accept(
        "widths",
        wide,
        "DOC-024 LIM-002",
        "extents of 2^48 and 70000 in one column, so that it has eight planes",
        why="planes are found by width and count, and a reader of one width reads another column",
    )
    names = Plan(
        tensors=[
            Tensor(name=name, dtype="int8", shape=(1,))
            for name in ("", "é", "漢字", "a\nb", "x" * 300)
        ]
    )
    made.accept(
        "names",
        names,
        "DOC-026 LIM-002",
        "names of no, two, six and 300 bytes, and one with a line feed",
        why="lengths count bytes, and a reader that counts characters cuts the names elsewhere",
    )


def _values(made: Page) -> None:
    why = "outside of the profile, readers build different values, or run code"
    for slug, clause, error, says, content in (
        ("float", "DOC-020", "MSGPACK_TYPE", "a float", b"\xcb\x3f\xf0" + bytes(6)),
        ("timestamp", "DOC-020", "MSGPACK_TYPE", "a timestamp, an extension of type -1",
         b"\xd6\xff" + bytes(4)),
        ("extension", "DOC-020", "MSGPACK_TYPE", "an extension of type 5", b"\xc7\x02\x05ab"),
        ("integer-key", "DOC-020", "MSGPACK_TYPE", "a map with an integer as key", b"\x81\x01\xc0"),
        ("bytes-key", "DOC-020", "MSGPACK_TYPE", "a map with a byte string as key",
         b"\x81\xc4\x01a\xc0"),
        ("duplicate-key", "DOC-020", "DOC_DUPLICATE_KEY", "a map with one key twice",
         b"\x82\xa1a\xc0\xa1a\xc0"),
        ("not-utf-8", "DOC-020", "DOC_ENCODING", "a string that isn't UTF-8", b"\xa1\xff"),
        ("c1", "DOC-021", "MSGPACK_SYNTAX", "the byte C1, which begins nothing", b"\xc1"),
        ("claims-4g-array", "DOC-023", "MSGPACK_SYNTAX", "an array of 2^32 - 1 entries",
         b"\xdd" + b"\xff" * 4),
        ("wide-integer", "DOC-022", "DOC_NOT_CANONICAL", "7 in two bytes", b"\xcc\x07"),
        ("signed-integer", "DOC-022", "DOC_NOT_CANONICAL", "200 in a signed form", b"\xd1\x00\xc8"),
        ("depth-33", "DOC-023 LIM-001", "DOC_DEPTH", "33 containers in each other",
         b"\x91" * 32 + b"\xc0"),
        ("depth-4000", "DOC-023 LIM-001", "DOC_DEPTH", "4001 containers in each other",
         b"\x91" * 4000 + b"\xc0"),
        ("containers", "DOC-031 LIM-001", "LIMIT_EXCEEDED", "1001 empty arrays",
         b"\xdc\x03\xe9" + b"\x90" * 1001),
    ):  # fmt: skip
        bug = (
            "CRASH"
            if slug.startswith("depth")
            else "RESOURCE"
            if slug.startswith(("claims", "cont"))
            else "AMBIGUITY"
        )
        made.reject(
            slug,
            "small",
            set_at("index", "saved_unix_s", value=Raw(content)),
            clause,
            error,
            f"in the index, as saved_unix_s, {says}",
            why=why,
            bug=bug,
        )


def _documents(made: Page) -> None:
    why = "a document is one whole value, and nothing rides behind it"
    for slug, document, says, change in (
        ("truncated", "index", "the index without its last byte", lambda c: c[:-1]),
        ("trailing-byte", "index", "a nil behind the index", lambda c: c + b"\xc0"),
        ("empty-part", "part/0", "a part of no bytes", lambda _: b""),
    ):
        made.reject(
            slug, "small", alter(document, outer=change), "DOC-021", "MSGPACK_SYNTAX", says, why=why
        )
    why = "each byte of a document is covered by its digest, and the digest comes before all else"
    for slug, says, members in (
        ("envelope-of-two", "no nbytes in the envelope", lambda m: _without(m, "nbytes")),
        ("envelope-of-four", "a fourth member in the envelope", lambda m: m | {"twin": None}),
        ("envelope-text-digest", "the digest as text", lambda m: m | {"digest": m["digest"].hex()}),
        ("envelope-array", "an array instead of the envelope", lambda _: []),
    ):
        made.reject(
            slug,
            "small",
            alter("index", envelope=members),
            "DOC-025",
            "DOC_SCHEMA",
            f"in the index, {says}",
            why=why,
            bug="AMBIGUITY",
        )
    made.reject(
        "signed-array",
        "small",
        alter("index", inner=lambda _: b"\x90"),
        "DOC-025",
        "DOC_SCHEMA",
        "the index signs an array, not a map",
        why=why,
        bug="CRASH",
    )
    made.reject(
        "digest-in-envelope",
        "small",
        alter("part/0", envelope=lambda m: m | {"digest": bytes(32)}),
        "DOC-025",
        "DOC_DIGEST",
        "the digest in the envelope of the part is all zeros",
        why=why,
    )


def _without(members: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in members.items() if name != key}


def _streams(made: Page) -> None:
    why = "what is inflated has to be exactly what was signed"
    for slug, says, stream in (
        ("stream-cut", "the zlib stream without its last byte", lambda c: c[:-1]),
        ("stream-and-more", "a byte behind the zlib stream", lambda c: c + b"\0"),
        (
            "stream-checksum",
            "another checksum at the end of the zlib stream",
            lambda c: c[:-1] + bytes([c[-1] ^ 1]),
        ),
        (
            "stream-dictionary",
            "a zlib stream with a preset dictionary",
            lambda c: b"\x78\x20" + bytes(4) + c[2:],
        ),
    ):
        made.reject(
            slug,
            "small",
            alter("index", stream=stream),
            "DOC-027",
            "DOC_COMPRESSION",
            f"in the index, {says}",
            why=why,
        )
    for slug, by in (("nbytes-less", -1), ("nbytes-more", 1)):
        made.reject(
            slug,
            "small",
            alter("index", envelope=lambda m, by=by: m | {"nbytes": m["nbytes"] + by}),
            "DOC-027",
            "DOC_COMPRESSION",
            f"in the index, nbytes is {'one more' if by > 0 else 'one less'} than there are",
            why=why,
        )
    why = "a few kilobytes inflate to as much as somebody likes"
    made.reject(
        "nbytes-beyond",
        "small",
        alter("index", envelope=lambda m: m | {"nbytes": 2**16 + 1}),
        "DOC-028 LIM-001",
        "LIMIT_EXCEEDED",
        "the index says that it inflates to 64 KiB and a byte, of a few hundred bytes",
        why=why,
        bug="RESOURCE",
    )
    made.reject(
        "bomb",
        "small",
        alter("index", stream=lambda _: deflate_run(0, 2_000_000)),
        "DOC-027 DOC-028",
        "DOC_COMPRESSION",
        "the stream of the index inflates to two million zeros, nbytes says less",
        why=why,
        bug="RESOURCE",
    )
    made.reject(
        "bomb-of-arrays",
        "small",
        alter(
            "index",
            stream=lambda _: deflate_run(0x90, 60_000, head=b"\xdd\x00\x00\xea\x5b"),
            envelope=lambda m: m | {"nbytes": 60_000},
        ),
        "DOC-031 DOC-025",
        "LIMIT_EXCEEDED",
        "the index is an array of almost 60000 empty arrays",
        why=why,
        bug="RESOURCE",
    )


def _costs(made: Page) -> None:
    """Add documents around the limit of inflated bytes per stored byte."""
    why = (
        "what costs a bit of a stream must not cost hundreds of bytes, and microseconds, of"
        " memory and time"
    )
    deep = Plan(tensors=[Tensor(name=f"{n:03d}", dtype="int8", shape=(1,) * 32) for n in range(90)])
    # A third of each kind: incompressible bytes, and zeros.
    loud = b"".join(blake3(number.to_bytes(2, "big")).digest() for number in range(300))
    tree = Plan(
        tensors=[Tensor(name="w", shape=(2,))],
        leaves=[Leaf(field="config", value=loud + bytes(3 * len(loud) + 40_000))],
    )
    for slug, plan, document, clause, says in (
        ("extents", deep, "index", "DOC-029", "90 tensors of 32 dimensions, 2880 extents"),
        ("trees", tree, "part/0", "DOC-030", "a leaf of 78 KB, most of them zeros"),
    ):
        made.accept(
            f"{slug}-stored",
            plan,
            f"{clause} LIM-002",
            f"{says}, in streams that don't compress",
            edit=_uncompressed,
            why="what is regular may be stored in a stream that compresses less",
        )
        made.reject(
            f"{slug}-compressed",
            f"{slug}-stored",
            alter(document, stream=bytes),
            clause,
            "LIMIT_EXCEEDED",
            f"{says}, in {'an index' if document == 'index' else 'a part'} of few bytes",
            why=why,
            bug="RESOURCE",
        )
    none = [packed([0] * 3000), ""]
    made.reject(
        "rows-compressed",
        "small",
        set_at("index", "aliases", value={"tensor": packed([0] * 3000), "name": none}),
        "DOC-029 LIM-001",
        "LIMIT_EXCEEDED",
        "the index has 3000 aliases, all without a name",
        why=why,
        bug="RESOURCE",
    )


def _uncompressed(made: Checkpoint) -> None:
    for document in ("index", "part/0"):
        made.bend(document, stream=lambda c: deflate_stored(zlib.decompress(c)))


def _columns(made: Page) -> None:
    why = "a column has one form, so that a flipped bit is never another valid one"
    for slug, says, value in (
        ("packed-too-wide", "two planes where one does", packed([0], 2)),
        ("packed-width-3", "a width of 3", [3, bytes(3)]),
        ("packed-odd", "two planes of one and a half bytes", [2, b"\0\1\1"]),
        ("packed-top-bit", "an integer of 2^63", [8, bytes(7) + b"\x80"]),
    ):
        made.reject(
            slug,
            "small",
            set_at("index", "tensors", "field", value=value),
            "DOC-024",
            "PACKED_FORM",
            f"the column field of tensors in the index has {says}",
            why=why,
            bug="AMBIGUITY",
        )
    for slug, says, value in (
        ("strings-short", "lengths that leave a rest", [[1, b"\1"], "wx"]),
        ("strings-long", "lengths beyond the text", [[1, b"\2"], "w"]),
        ("strings-inside", "a length that cuts a character", [[1, b"\1\1"], "é"]),
    ):
        made.reject(
            slug,
            "small",
            set_at("index", "tensors", "name", value=value),
            "DOC-026 IDX-002",
            "COLUMN_FORM",
            f"the column name of tensors in the index has {says}",
            why=why,
            bug="AMBIGUITY",
        )
