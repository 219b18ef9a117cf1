"""msgpack documents: a strict profile, canonical, under a digest. Spec: REQ-DOC-020 to REQ-DOC-023.

Everything is counted before anything is built: ten megabytes of empty arrays would become hundreds of megabytes of
Python objects otherwise.
"""

from __future__ import annotations

from typing import Any, Final

import msgpack

from ckptfmt import limits
from ckptfmt.digest import digest_bytes
from ckptfmt.errors import Code, err

__all__ = [
    "check_msgpack",
    "dump_mapless",
    "dump_msgpack",
    "dump_packed_document",
    "parse_msgpack",
    "parse_packed_document",
]

# First byte -> how many bytes follow that are the value, or that say how long it is.
_FIXED_NBYTES: Final = {
    0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8,
}  # fmt: skip
_STRING_LENGTH_NBYTES: Final = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
_ARRAY_LENGTH_NBYTES: Final = {0xDC: 2, 0xDD: 4}
_MAP_LENGTH_NBYTES: Final = {0xDE: 2, 0xDF: 4}
_ENVELOPE_KEYS: Final = {"digest", "signed"}


def dump_msgpack(value: object) -> bytes:
    """Return the canonical msgpack of `value`: shortest forms, maps sorted by the UTF-8 bytes of their keys.

    >>> dump_msgpack({"b": 1, "a": [None, b"x"]}).hex()
    '82a16192c0c40178a16201'
    """
    packed: bytes = msgpack.packb(_sort_maps(value), use_bin_type=True)
    return packed


def dump_mapless(value: object) -> bytes:
    """Return the canonical msgpack of a value without maps: there is nothing to sort in it.

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


def dump_packed_document(signed: dict[str, Any]) -> tuple[bytes, bytes]:
    """Return the file of a msgpack document and the digest that its envelope holds. Spec: REQ-DOC-025."""
    content = dump_msgpack(signed)
    digest = digest_bytes(content)
    return dump_msgpack({"digest": digest, "signed": content}), digest


def parse_packed_document(content: bytes, *, where: str, digest: bytes | None = None) -> tuple[dict[str, Any], bytes]:
    """Return what a msgpack document's digest covers, and that digest.

    Args:
        where: name of the file, for messages.
        digest: the digest that another document gives for this one, where one does.

    Raises: FormatError; IntegrityError(DOC_DIGEST).
    Spec: REQ-DOC-020 to REQ-DOC-025.
    """
    envelope = parse_msgpack(content, where=where, limit_items=8)
    if (
        not isinstance(envelope, dict)
        or set(envelope) != _ENVELOPE_KEYS
        or not all(isinstance(member, bytes) for member in envelope.values())
    ):
        raise err(
            Code.DOC_SCHEMA, "a document has the members digest and signed", where=where, requirement="REQ-DOC-025"
        )
    actual = digest_bytes(envelope["signed"])
    if actual != envelope["digest"] or (digest is not None and actual != digest):
        raise err(
            Code.DOC_DIGEST, f"its contents have the digest {actual.hex()}", where=where, requirement="REQ-DOC-025"
        )
    signed = parse_msgpack(
        envelope["signed"],
        where=where,
        limit_items=limits.MSGPACK_ITEMS,
        limit_containers=limits.MSGPACK_CONTAINERS,
    )
    if not isinstance(signed, dict):
        raise err(Code.DOC_SCHEMA, "what is signed isn't a map", where=where, requirement="REQ-DOC-025")
    return signed, actual


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
    if dump_msgpack(value) != content:
        raise err(Code.DOC_NOT_CANONICAL, "not in canonical form", where=where, requirement="REQ-DOC-022")
    return value


def check_msgpack(content: bytes, *, where: str, limit_items: int, limit_containers: int | None = None) -> None:
    """Walk the values of `content` without building any. Spec: REQ-DOC-020, REQ-DOC-021, REQ-DOC-023."""
    at = items = containers = 0
    open_counts = [1]
    while open_counts:
        if open_counts[-1] == 0:
            open_counts.pop()
            continue
        open_counts[-1] -= 1
        items += 1
        if items > limit_items:
            raise err(Code.LIMIT_EXCEEDED, f"more than {limit_items} values", where=where, requirement="REQ-DOC-023")
        at, children = _step(content, at, where)
        # Each value still to come takes a byte at least: a greater count is a lie.
        if children > len(content) - at:
            raise err(
                Code.MSGPACK_SYNTAX, "a container is longer than the file", where=where, requirement="REQ-DOC-023"
            )
        if children >= 0:
            containers += 1
            if limit_containers is not None and containers > limit_containers:
                raise err(
                    Code.LIMIT_EXCEEDED,
                    f"more than {limit_containers} arrays and maps",
                    where=where,
                    requirement="REQ-DOC-023",
                )
            open_counts.append(children)
            if len(open_counts) - 1 > limits.MSGPACK_DEPTH:
                raise err(
                    Code.DOC_DEPTH, f"nests deeper than {limits.MSGPACK_DEPTH}", where=where, requirement="REQ-DOC-023"
                )
    if at != len(content):
        raise err(
            Code.MSGPACK_SYNTAX, f"{len(content) - at} bytes after the value", where=where, requirement="REQ-DOC-021"
        )


def _step(content: bytes, at: int, where: str) -> tuple[int, int]:
    """Return where the value at `at` ends (a container: its first child), and its number of children; -1 for none."""
    if at >= len(content):
        raise err(Code.MSGPACK_SYNTAX, "ends within a value", where=where, requirement="REQ-DOC-021")
    first = content[at]
    at += 1
    children = -1
    if first < 0x80 or first >= 0xE0:
        pass
    elif first < 0x90:
        children = 2 * (first & 0x0F)
    elif first < 0xA0:
        children = first & 0x0F
    elif first < 0xC0:
        at += first & 0x1F
    elif first in _FIXED_NBYTES:
        at += _FIXED_NBYTES[first]
    elif first in _STRING_LENGTH_NBYTES:
        width = _STRING_LENGTH_NBYTES[first]
        at += width + int.from_bytes(content[at : at + width], "big")
    elif first in _ARRAY_LENGTH_NBYTES:
        width = _ARRAY_LENGTH_NBYTES[first]
        children, at = int.from_bytes(content[at : at + width], "big"), at + width
    elif first in _MAP_LENGTH_NBYTES:
        width = _MAP_LENGTH_NBYTES[first]
        children, at = 2 * int.from_bytes(content[at : at + width], "big"), at + width
    elif first == 0xC1:
        raise err(Code.MSGPACK_SYNTAX, "byte 0xc1", where=where, requirement="REQ-DOC-021")
    else:
        raise err(
            Code.MSGPACK_TYPE, f"type byte 0x{first:02x} (float or extension)", where=where, requirement="REQ-DOC-020"
        )
    if at > len(content):
        raise err(Code.MSGPACK_SYNTAX, "ends within a value", where=where, requirement="REQ-DOC-021")
    return at, children
