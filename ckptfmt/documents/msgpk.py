"""msgpack documents: a strict, canonical profile, compressed, under a digest.

All values are counted before any object is built: otherwise ten megabytes of empty arrays would
become hundreds of megabytes of Python objects.

Spec: REQ-DOC-020 to REQ-DOC-031.
"""

from __future__ import annotations

import dataclasses
import re
import zlib
from collections.abc import Callable
from typing import Any, Final

import msgpack

from ckptfmt import limits
from ckptfmt.digest import digest_bytes
from ckptfmt.errors import CkptError, Code, err

#: Returns the canonical msgpack of a value whose maps, if any, are sorted.
dump_mapless: Final[Callable[[object], bytes]] = msgpack.packb
# The meaning of a first byte: number of value bytes that follow, number of children (-1: no
# container), size of a length field that follows, number of children per unit of this length
# (0: the length counts bytes), and the least length, or the least magnitude of an integer, that
# has no shorter form.
_Form = tuple[int, int, int, int, int]
_UNSIGNED_LEAST: Final = (1 << 7, 1 << 8, 1 << 16, 1 << 32)
_SIGNED_LEAST: Final = ((1 << 5) + 1, (1 << 7) + 1, (1 << 15) + 1, (1 << 31) + 1)
_LENGTHS: Final[dict[int, _Form]] = {
    **dict.fromkeys((0xC0, 0xC2, 0xC3), (0, -1, 0, 0, 0)),  # nil, false, true
    # Byte strings, unsigned and signed integers, strings.
    **{0xC4 + i: (0, -1, 1 << i, 0, least) for i, least in enumerate((0, 1 << 8, 1 << 16))},
    **{0xCC + i: (1 << i, -1, 0, 0, least) for i, least in enumerate(_UNSIGNED_LEAST)},
    **{0xD0 + i: (1 << i, -1, 0, 0, least) for i, least in enumerate(_SIGNED_LEAST)},
    **{0xD9 + i: (0, -1, 1 << i, 0, least) for i, least in enumerate((32, 1 << 8, 1 << 16))},
    **{0xDC + i: (0, -1, 2 << i, 1, least) for i, least in enumerate((16, 1 << 16))},  # arrays
    **{0xDE + i: (0, -1, 2 << i, 2, least) for i, least in enumerate((16, 1 << 16))},  # maps
}
#: The first bytes of signed integers, whose shortest forms are for negative numbers.
_SIGNED: Final = frozenset(range(0xD0, 0xD4))


def _form_of(first: int) -> _Form | None:
    if first < 0x80 or first >= 0xE0:
        return 0, -1, 0, 0, 0
    if first < 0xA0:
        return 0, (first & 0x0F) * (1 if first >= 0x90 else 2), 0, 0, 0
    return (first & 0x1F, -1, 0, 0, 0) if first < 0xC0 else _LENGTHS.get(first)


#: One-byte values (integers, nil, booleans), of which the pattern finds many at once.
_ONE_BYTE_VALUES: Final = re.compile(rb"[\x00-\x7f\xc0\xc2\xc3\xe0-\xff]+")
_FORMS: Final = tuple(map(_form_of, range(256)))
_ENVELOPE_KEYS: Final = {"digest", "nbytes", "signed"}
#: The zlib level. A higher level gains little for columns, and all writers wait while the index is
#: compressed.
_ZLIB_LEVEL: Final = 4
#: Tried compressions, as level and strategy. Huffman codes alone keep an eighth of the size at
#: least, level 0 all.
_COMPRESSIONS: Final = (
    (_ZLIB_LEVEL, zlib.Z_DEFAULT_STRATEGY),
    (_ZLIB_LEVEL, zlib.Z_HUFFMAN_ONLY),
    (0, 0),
)


def dump_msgpack(value: object) -> bytes:
    """Return the canonical msgpack of a value: shortest forms, maps sorted by UTF-8 keys.

    >>> dump_msgpack({"b": 1, "a": [None, b"x"]}).hex()
    '82a16192c0c40178a16201'
    """
    return dump_mapless(_sort_maps(value))


def _sort_maps(value: object) -> object:
    if isinstance(value, dict):
        return {key: _sort_maps(value[key]) for key in sorted(value, key=lambda key: key.encode())}
    if isinstance(value, list) and any(isinstance(item, list | dict) for item in value):
        return [_sort_maps(item) for item in value]
    return value


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """The cost of a document's objects for a reader, limited by the document's stored size.

    Attributes:
        rows: number of rows of all tables.
        extents: number of extents of all tensors, boxes and shardings.
        tree_nbytes: size of all trees in bytes.
    """

    rows: int = 0
    extents: int = 0
    tree_nbytes: int = 0

    @classmethod
    def most(cls, stored_nbytes: int) -> Weight:
        """Return the largest weight of a document with a given stored size.

        Spec: REQ-DOC-029, REQ-DOC-030.
        """
        return cls(
            rows=stored_nbytes // limits.ROW_NBYTES,
            extents=stored_nbytes * limits.EXTENT_RATIO,
            tree_nbytes=max(limits.TREES_NBYTES, stored_nbytes * limits.TREES_RATIO),
        )

    def fits(self, most: Weight) -> bool:
        """Return whether no member exceeds the same member of `most`."""
        return (
            self.rows <= most.rows
            and self.extents <= most.extents
            and self.tree_nbytes <= most.tree_nbytes
        )


_NO_WEIGHT: Final = Weight()


def dump_packed_document(
    signed: dict[str, Any], weight: Weight = _NO_WEIGHT
) -> tuple[bytes, bytes]:
    """Return the file of a msgpack document and the digest in its envelope.

    Spec: REQ-DOC-025, REQ-DOC-027 to REQ-DOC-030.
    """
    content = dump_msgpack(signed)
    stored = _deflate(content, weight)
    digest = digest_bytes(stored)
    return dump_msgpack({"digest": digest, "nbytes": len(content), "signed": stored}), digest


def _deflate(content: bytes, weight: Weight) -> bytes:
    """Return a zlib stream within a reader's limits: very regular content is compressed less."""
    stored = b""
    for level, strategy in _COMPRESSIONS:
        stream = zlib.compressobj(level, strategy=strategy)
        stored = stream.compress(content) + stream.flush()
        if len(content) <= most_inflated_nbytes(len(stored)) and weight.fits(
            Weight.most(len(stored))
        ):
            break
    return stored


def most_inflated_nbytes(stored_nbytes: int) -> int:
    """Return the largest inflated size of a `signed` of a given stored size. Spec: REQ-DOC-028."""
    most = max(limits.INFLATED_NBYTES, limits.INFLATED_RATIO * stored_nbytes)
    return min(most, limits.MSGPACK_NBYTES)


def open_packed_document(
    content: bytes, *, where: str, digest: bytes | None = None
) -> tuple[bytes, bytes, int]:
    """Return the inflated, unparsed content, the digest in the envelope, and the stored size.

    Args:
        where: name of the file, for messages.
        digest: the digest of this document from another document, if there is one.

    Raises: FormatError(DOC_SCHEMA, DOC_COMPRESSION, LIMIT_EXCEEDED and the codes of msgpack);
        IntegrityError(DOC_DIGEST).
    Spec: REQ-DOC-025, REQ-DOC-027, REQ-DOC-028.
    """
    envelope = parse_msgpack(content, where=where, limit_items=16)
    if (
        not isinstance(envelope, dict)
        or set(envelope) != _ENVELOPE_KEYS
        or not isinstance(envelope["digest"], bytes)
        or not isinstance(envelope["signed"], bytes)
        or type(envelope["nbytes"]) is not int
        or envelope["nbytes"] < 0
    ):
        raise err(
            Code.DOC_SCHEMA, "a document has the members digest, nbytes and signed", where=where,
            requirement="REQ-DOC-025",
        )  # fmt: skip
    actual = digest_bytes(envelope["signed"])
    if actual != envelope["digest"] or (digest is not None and actual != digest):
        raise err(
            Code.DOC_DIGEST,
            f"its contents have the digest {actual.hex()}",
            where=where,
            requirement="REQ-DOC-025",
        )
    stored = envelope["signed"]
    return _inflate(stored, envelope["nbytes"], where), actual, len(stored)


def parse_packed_document(
    content: bytes, *, where: str, digest: bytes | None = None
) -> tuple[dict[str, Any], bytes, int]:
    """Return the members under a msgpack document's digest, the digest, and the stored size.

    Args:
        where: name of the file, for messages.
        digest: the digest of this document from another document, if there is one.

    Raises: FormatError; IntegrityError(DOC_DIGEST).
    Spec: REQ-DOC-020 to REQ-DOC-028.
    """
    inflated, actual, stored_nbytes = open_packed_document(content, where=where, digest=digest)
    signed = parse_msgpack(
        inflated,
        where=where,
        limit_items=min(limits.MSGPACK_ITEMS, limits.FREE_ITEMS + Weight.most(stored_nbytes).rows),
        limit_containers=limits.MSGPACK_CONTAINERS,
    )
    if not isinstance(signed, dict):
        raise err(
            Code.DOC_SCHEMA,
            "the signed content isn't a map",
            where=where,
            requirement="REQ-DOC-025",
        )
    return signed, actual, stored_nbytes


def _inflate(stored: bytes, nbytes: int, where: str) -> bytes:
    """Return the `nbytes` bytes of a zlib stream.

    Raise if the stream is longer or followed by other bytes.
    """
    if nbytes > most_inflated_nbytes(len(stored)):
        raise err(
            Code.LIMIT_EXCEEDED,
            f"{nbytes} bytes out of {len(stored)}",
            where=where,
            requirement="REQ-DOC-028",
        )
    stream = zlib.decompressobj()
    try:
        # The limit is one byte larger than the content: 0 would mean no limit, and zlib needs room
        # to find the stream's end.
        inflated = stream.decompress(stored, nbytes + 1)
    except zlib.error as error:
        raise err(
            Code.DOC_COMPRESSION, f"no zlib stream: {error}", where=where, requirement="REQ-DOC-027"
        ) from None
    if len(inflated) != nbytes or not stream.eof or stream.unused_data:
        raise err(
            Code.DOC_COMPRESSION,
            f"the zlib stream doesn't hold exactly {nbytes} bytes, or bytes follow the stream",
            where=where,
            requirement="REQ-DOC-027",
        )
    return inflated


def parse_msgpack(
    content: bytes, *, where: str, limit_items: int, limit_containers: int | None = None
) -> Any:
    """Return the single value of `content`, after checks of all lengths, counts and depths.

    Raises: FormatError(MSGPACK_SYNTAX, MSGPACK_TYPE, DOC_DEPTH, LIMIT_EXCEEDED, DOC_DUPLICATE_KEY,
        DOC_NOT_CANONICAL).
    """
    _, is_shortest = _walk(
        content, where=where, limit_items=limit_items, limit_containers=limit_containers
    )

    def check_pairs(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
        if not all(isinstance(key, str) for key, _ in pairs):
            raise err(
                Code.MSGPACK_TYPE,
                "a map key isn't a string",
                where=where,
                requirement="REQ-DOC-020",
            )
        members = dict(pairs)
        if len(members) != len(pairs):
            raise err(
                Code.DOC_DUPLICATE_KEY,
                "a map has one key twice",
                where=where,
                requirement="REQ-DOC-020",
            )
        if list(members) != sorted(members):  # code points have the order of UTF-8 bytes
            raise err(
                Code.DOC_NOT_CANONICAL,
                "the keys of a map aren't sorted",
                where=where,
                requirement="REQ-DOC-022",
            )
        return members

    try:
        value = msgpack.unpackb(
            content,
            raw=False,
            strict_map_key=False,
            object_pairs_hook=check_pairs,
            max_str_len=len(content),
            max_bin_len=len(content),
            max_array_len=len(content),
            max_map_len=len(content),
        )
    except UnicodeDecodeError:
        raise err(
            Code.DOC_ENCODING, "a string isn't UTF-8", where=where, requirement="REQ-DOC-020"
        ) from None
    if not is_shortest:
        raise err(
            Code.DOC_NOT_CANONICAL, "not in canonical form", where=where, requirement="REQ-DOC-022"
        )
    return value


def count_items(
    content: bytes, *, where: str, limit_items: int, limit_containers: int | None = None
) -> int:
    """Return the number of values of `content`, checked without building objects.

    Raises: FormatError(MSGPACK_SYNTAX, MSGPACK_TYPE, DOC_DEPTH, LIMIT_EXCEEDED).
    Spec: REQ-DOC-020, REQ-DOC-021, REQ-DOC-023, REQ-DOC-031.
    """
    items, _ = _walk(
        content, where=where, limit_items=limit_items, limit_containers=limit_containers
    )
    return items


def _walk(
    content: bytes, *, where: str, limit_items: int, limit_containers: int | None
) -> tuple[int, bool]:
    """Return the number of values, and whether each has the shortest form.

    Raises: as `count_items`.
    """
    at = items = containers = 0
    is_shortest = True
    is_table = limit_containers is not None
    # Values left in the innermost container, and in those around it.
    left = 1
    open_counts = list[int]()
    while left or open_counts:
        if not left:
            left = open_counts.pop()
            continue
        if (run := _ONE_BYTE_VALUES.match(content, at, at + left)) is not None:
            items += run.end() - at
            left -= run.end() - at
            at = run.end()
            if items > limit_items:
                raise _too_many(limit_items, "values", where, is_table=is_table)
            continue
        left -= 1
        items += 1
        if items > limit_items:
            raise _too_many(limit_items, "values", where, is_table=is_table)
        at, children, is_short = _step(content, at, where)
        is_shortest &= is_short
        if children < 0:
            continue
        # Each remaining value takes at least one byte, so a greater count is wrong.
        if children > len(content) - at:
            raise err(
                Code.MSGPACK_SYNTAX,
                "a container is longer than the file",
                where=where,
                requirement="REQ-DOC-023",
            )
        containers += 1
        if limit_containers is not None and containers > limit_containers:
            raise _too_many(limit_containers, "arrays and maps", where, is_table=True)
        open_counts.append(left)
        left = children
        if len(open_counts) > limits.MSGPACK_DEPTH:
            raise err(
                Code.DOC_DEPTH,
                f"nests deeper than {limits.MSGPACK_DEPTH}",
                where=where,
                requirement="REQ-DOC-023",
            )
    if at != len(content):
        raise err(
            Code.MSGPACK_SYNTAX,
            f"{len(content) - at} bytes after the value",
            where=where,
            requirement="REQ-DOC-021",
        )
    return items, is_shortest


def _too_many(most: int, what: str, where: str, *, is_table: bool) -> CkptError:
    """Return the error of too many values: `is_table` in an index or part, else in a tree."""
    clause = "REQ-DOC-031" if is_table else "REQ-DOC-023"
    return err(Code.LIMIT_EXCEEDED, f"more than {most} {what}", where=where, requirement=clause)


def _step(content: bytes, at: int, where: str) -> tuple[int, int, bool]:
    """Return end and number of children of the value at `at`, and whether its form is the shortest.

    The end of a container is the begin of its first child. A value that isn't a container has -1
    children.
    """
    if at >= len(content):
        raise err(
            Code.MSGPACK_SYNTAX, "ends within a value", where=where, requirement="REQ-DOC-021"
        )
    first = content[at]
    form = _FORMS[first]
    if form is None:
        raise _unknown_form(first, where)
    skipped, children, width, factor, least = form
    at += 1 + skipped
    size = least
    if width:
        size = int.from_bytes(content[at : at + width], "big")
        at += width
        if factor:
            children = factor * size
        else:
            at += size
    elif least:
        integer = int.from_bytes(content[at - skipped : at], "big", signed=first in _SIGNED)
        size = -integer if first in _SIGNED else integer
    if at > len(content):
        raise err(
            Code.MSGPACK_SYNTAX, "ends within a value", where=where, requirement="REQ-DOC-021"
        )
    return at, children, size >= least


def _unknown_form(first: int, where: str) -> CkptError:
    if first == 0xC1:
        return err(Code.MSGPACK_SYNTAX, "byte 0xc1", where=where, requirement="REQ-DOC-021")
    detail = f"type byte 0x{first:02x} (float or extension)"
    return err(Code.MSGPACK_TYPE, detail, where=where, requirement="REQ-DOC-020")
