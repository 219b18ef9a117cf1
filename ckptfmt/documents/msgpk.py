"""msgpack documents: a strict profile, canonical, compressed, under a digest. Spec: REQ-DOC-020 to REQ-DOC-030.

Everything is counted before anything is built: ten megabytes of empty arrays would become hundreds of megabytes of
Python objects otherwise.
"""

from __future__ import annotations

import dataclasses
import re
import zlib
from typing import Any, Final

import msgpack

from ckptfmt import limits
from ckptfmt.digest import digest_bytes
from ckptfmt.errors import CkptError, Code, err

# What a first byte says: bytes of value behind it, children (-1: no container), bytes of a length behind it, and
# how many children each of that length is (0: it counts bytes).
_Form = tuple[int, int, int, int]
_LENGTHS: Final[dict[int, _Form]] = {
    **dict.fromkeys((0xC0, 0xC2, 0xC3), (0, -1, 0, 0)),  # nil, false, true
    **{0xC4 + i: (0, -1, 1 << i, 0) for i in range(3)},  # byte strings
    **{0xCC + i: (1 << i, -1, 0, 0) for i in range(4)},  # integers, unsigned
    **{0xD0 + i: (1 << i, -1, 0, 0) for i in range(4)},  # and signed
    **{0xD9 + i: (0, -1, 1 << i, 0) for i in range(3)},  # strings
    **{0xDC + i: (0, -1, 2 << i, 1) for i in range(2)},  # arrays
    **{0xDE + i: (0, -1, 2 << i, 2) for i in range(2)},  # maps
}


def _form_of(first: int) -> _Form | None:
    if first < 0x80 or first >= 0xE0:
        return 0, -1, 0, 0
    if first < 0xA0:
        return 0, (first & 0x0F) * (1 if first >= 0x90 else 2), 0, 0
    return (first & 0x1F, -1, 0, 0) if first < 0xC0 else _LENGTHS.get(first)


#: Values without anything behind their first byte, so that many are found at once: integers, nil, booleans.
_ONE_BYTE_VALUES: Final = re.compile(rb"[\x00-\x7f\xc0\xc2\xc3\xe0-\xff]+")
_FORMS: Final = tuple(map(_form_of, range(256)))
_ENVELOPE_KEYS: Final = {"digest", "nbytes", "signed"}
#: How hard zlib tries. Columns gain little from more, and the index is compressed while all writers wait for it.
_ZLIB_LEVEL: Final = 4
#: What is tried, level and strategy: Huffman codes alone take an eighth of the content at least, no compression all.
_COMPRESSIONS: Final = ((_ZLIB_LEVEL, zlib.Z_DEFAULT_STRATEGY), (_ZLIB_LEVEL, zlib.Z_HUFFMAN_ONLY), (0, 0))


def dump_msgpack(value: object) -> bytes:
    """Return the canonical msgpack of `value`: shortest forms, maps sorted by the UTF-8 bytes of their keys.

    >>> dump_msgpack({"b": 1, "a": [None, b"x"]}).hex()
    '82a16192c0c40178a16201'
    """
    packed: bytes = msgpack.packb(_sort_maps(value), use_bin_type=True)
    return packed


def dump_mapless(value: object) -> bytes:
    """Return the canonical msgpack of a value without maps, or with sorted ones: there is nothing to sort in it.

    >>> dump_mapless(["d", "lr", None]).hex()
    '93a164a26c72c0'
    """
    packed: bytes = msgpack.packb(value, use_bin_type=True)
    return packed


def _sort_maps(value: object) -> object:
    if isinstance(value, dict):
        return {key: _sort_maps(value[key]) for key in sorted(value, key=lambda key: key.encode())}
    if isinstance(value, list) and any(isinstance(item, list | dict) for item in value):
        return [_sort_maps(item) for item in value]
    return value


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """What the objects of a document cost whoever reads it, which what is stored has to be worth.

    Attributes:
        rows: of its tables together.
        extents: of its tensors, boxes and shardings together.
        tree_nbytes: of its trees together.
    """

    rows: int = 0
    extents: int = 0
    tree_nbytes: int = 0

    @classmethod
    def most(cls, stored_nbytes: int) -> Weight:
        """Return what a document may have of which so many bytes are stored. Spec: REQ-DOC-029, REQ-DOC-030."""
        return cls(
            rows=stored_nbytes // limits.ROW_NBYTES,
            extents=stored_nbytes * limits.EXTENT_RATIO,
            tree_nbytes=max(limits.TREES_NBYTES, stored_nbytes * limits.TREES_RATIO),
        )

    def fits(self, most: Weight) -> bool:
        """Tell whether none of it is more than in `most`."""
        return self.rows <= most.rows and self.extents <= most.extents and self.tree_nbytes <= most.tree_nbytes


_NO_WEIGHT: Final = Weight()


def dump_packed_document(signed: dict[str, Any], weight: Weight = _NO_WEIGHT) -> tuple[bytes, bytes]:
    """Return the file of a msgpack document and the digest that its envelope holds.

    Spec: REQ-DOC-025, REQ-DOC-027 to REQ-DOC-030.
    """
    content = dump_msgpack(signed)
    stored = _deflate(content, weight)
    digest = digest_bytes(stored)
    return dump_msgpack({"digest": digest, "nbytes": len(content), "signed": stored}), digest


def _deflate(content: bytes, weight: Weight) -> bytes:
    """Return a zlib stream of a content that a reader takes: one that is very regular is compressed less."""
    stored = b""
    for level, strategy in _COMPRESSIONS:
        stream = zlib.compressobj(level, strategy=strategy)
        stored = stream.compress(content) + stream.flush()
        if len(content) <= most_inflated_nbytes(len(stored)) and weight.fits(Weight.most(len(stored))):
            break
    return stored


def most_inflated_nbytes(stored_nbytes: int) -> int:
    """Return how many bytes a `signed` of so many may inflate to. Spec: REQ-DOC-028."""
    most = max(limits.INFLATED_NBYTES, limits.INFLATED_RATIO * stored_nbytes)
    return min(most, limits.MSGPACK_NBYTES)


def open_packed_document(content: bytes, *, where: str, digest: bytes | None = None) -> tuple[bytes, bytes, int]:
    """Return what is signed, inflated and not yet parsed, the digest that names the document, and the stored size.

    Args:
        where: name of the file, for messages.
        digest: the digest that another document gives for this one, where one does.

    Raises: FormatError(DOC_SCHEMA, DOC_COMPRESSION, LIMIT_EXCEEDED and those of msgpack); IntegrityError(DOC_DIGEST).
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
            Code.DOC_DIGEST, f"its contents have the digest {actual.hex()}", where=where, requirement="REQ-DOC-025"
        )
    stored = envelope["signed"]
    return _inflate(stored, envelope["nbytes"], where), actual, len(stored)


def parse_packed_document(
    content: bytes, *, where: str, digest: bytes | None = None
) -> tuple[dict[str, Any], bytes, int]:
    """Return what a msgpack document's digest covers, that digest, and how many bytes are stored of it.

    Args:
        where: name of the file, for messages.
        digest: the digest that another document gives for this one, where one does.

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
        raise err(Code.DOC_SCHEMA, "what is signed isn't a map", where=where, requirement="REQ-DOC-025")
    return signed, actual, stored_nbytes


def _inflate(stored: bytes, nbytes: int, where: str) -> bytes:
    """Return the `nbytes` bytes of a zlib stream, which has no more and nothing behind it."""
    if nbytes > most_inflated_nbytes(len(stored)):
        raise err(
            Code.LIMIT_EXCEEDED,
            f"{nbytes} bytes out of {len(stored)}",
            where=where,
            requirement="REQ-DOC-028",
        )
    stream = zlib.decompressobj()
    try:
        # One byte more than there may be: 0 would be no limit, and a stream needs room to show that it ends.
        inflated = stream.decompress(stored, nbytes + 1)
    except zlib.error as error:
        raise err(Code.DOC_COMPRESSION, f"no zlib stream: {error}", where=where, requirement="REQ-DOC-027") from None
    if len(inflated) != nbytes or not stream.eof or stream.unused_data:
        raise err(
            Code.DOC_COMPRESSION,
            f"the zlib stream isn't one of {nbytes} bytes with nothing behind it",
            where=where,
            requirement="REQ-DOC-027",
        )
    return inflated


def parse_msgpack(content: bytes, *, where: str, limit_items: int, limit_containers: int | None = None) -> Any:  # noqa: ANN401 - any value of the profile
    """Return the one value of `content`, after every length, count and depth has been checked.

    Raises: FormatError(MSGPACK_SYNTAX, MSGPACK_TYPE, DOC_DEPTH, LIMIT_EXCEEDED, DOC_DUPLICATE_KEY, DOC_NOT_CANONICAL).
    """
    check_msgpack(content, where=where, limit_items=limit_items, limit_containers=limit_containers)

    def check_pairs(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
        if not all(isinstance(key, str) for key, _ in pairs):
            raise err(Code.MSGPACK_TYPE, "a map key isn't a string", where=where, requirement="REQ-DOC-020")
        members = dict(pairs)
        if len(members) != len(pairs):
            raise err(Code.DOC_DUPLICATE_KEY, "a map has one key twice", where=where, requirement="REQ-DOC-020")
        if list(members) != sorted(members):  # by code points, which is by UTF-8 bytes
            raise err(Code.DOC_NOT_CANONICAL, "the keys of a map aren't sorted", where=where, requirement="REQ-DOC-022")
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
        raise err(Code.DOC_ENCODING, "a string isn't UTF-8", where=where, requirement="REQ-DOC-020") from None
    if dump_mapless(value) != content:  # and maps stay in the order in which they are
        raise err(Code.DOC_NOT_CANONICAL, "not in canonical form", where=where, requirement="REQ-DOC-022")
    return value


def check_msgpack(content: bytes, *, where: str, limit_items: int, limit_containers: int | None = None) -> None:
    """Walk the values of `content` without building any. Spec: REQ-DOC-020, REQ-DOC-021, REQ-DOC-023."""
    at = items = containers = 0
    left, open_counts = 1, list[int]()  # how many values the innermost container still has, and those around it
    while left or open_counts:
        if not left:
            left = open_counts.pop()
            continue
        if (run := _ONE_BYTE_VALUES.match(content, at, at + left)) is not None:
            items += run.end() - at
            left -= run.end() - at
            at = run.end()
            if items > limit_items:
                raise _too_many(limit_items, "values", where)
            continue
        left -= 1
        items += 1
        if items > limit_items:
            raise _too_many(limit_items, "values", where)
        at, children = _step(content, at, where)
        if children < 0:
            continue
        # Each value still to come takes a byte at least: a greater count is a lie.
        if children > len(content) - at:
            raise err(
                Code.MSGPACK_SYNTAX, "a container is longer than the file", where=where, requirement="REQ-DOC-023"
            )
        containers += 1
        if limit_containers is not None and containers > limit_containers:
            raise _too_many(limit_containers, "arrays and maps", where)
        open_counts.append(left)
        left = children
        if len(open_counts) > limits.MSGPACK_DEPTH:
            raise err(
                Code.DOC_DEPTH, f"nests deeper than {limits.MSGPACK_DEPTH}", where=where, requirement="REQ-DOC-023"
            )
    if at != len(content):
        raise err(
            Code.MSGPACK_SYNTAX, f"{len(content) - at} bytes after the value", where=where, requirement="REQ-DOC-021"
        )


def _too_many(most: int, what: str, where: str) -> CkptError:
    return err(Code.LIMIT_EXCEEDED, f"more than {most} {what}", where=where, requirement="REQ-DOC-023")


def _step(content: bytes, at: int, where: str) -> tuple[int, int]:
    """Return where the value at `at` ends (a container: its first child), and its number of children; -1 for none."""
    if at >= len(content):
        raise err(Code.MSGPACK_SYNTAX, "ends within a value", where=where, requirement="REQ-DOC-021")
    form = _FORMS[content[at]]
    if form is None:
        raise _unknown_form(content[at], where)
    skipped, children, width, factor = form
    at += 1 + skipped
    if width:
        length = int.from_bytes(content[at : at + width], "big")
        at += width
        if factor:
            children = factor * length
        else:
            at += length
    if at > len(content):
        raise err(Code.MSGPACK_SYNTAX, "ends within a value", where=where, requirement="REQ-DOC-021")
    return at, children


def _unknown_form(first: int, where: str) -> CkptError:
    if first == 0xC1:
        return err(Code.MSGPACK_SYNTAX, "byte 0xc1", where=where, requirement="REQ-DOC-021")
    detail = f"type byte 0x{first:02x} (float or extension)"
    return err(Code.MSGPACK_TYPE, detail, where=where, requirement="REQ-DOC-020")
