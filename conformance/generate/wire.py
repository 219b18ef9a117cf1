"""Bytes of the format (spec/core/10-documents.md): canonical JSON, msgpack, columns, zlib, digests.

Streams are written by hand: what a compressor makes of the same bytes differs between versions of
it, and vectors must not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from blake3 import blake3

from conformance.generate.deflate import deflate

__all__ = [
    "FORMAT_VERSION",
    "Bend",
    "Folded",
    "Packed",
    "Raw",
    "Strings",
    "canonical",
    "canonical_string",
    "digest_text",
    "json_document",
    "msgpack",
    "packed",
    "same",
    "table_document",
]

FORMAT_VERSION = "1.0"

Change = Callable[[bytes], bytes]


class Packed(list[int]):
    """A column of integers that aren't negative."""


class Folded(list[int]):
    """A column of integers of both signs."""


class Strings(list[str]):
    """A column of strings."""


class Raw(bytes):
    """Msgpack bytes written unchanged, whatever their content."""


def same(content: bytes) -> bytes:
    """Return `content`: the identity as a change."""
    return content


def digest_text(content: bytes) -> str:
    """Return the BLAKE3-256 of `content` in the form of JSON documents."""
    return "blake3:" + blake3(content).hexdigest()


def canonical_string(text: str) -> str:
    """Return a JSON string in the canonical form: only quote and backslash are escaped."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def canonical(value: object) -> str:
    """Return the canonical JSON text of a value; spec/core/10-documents.md, "JSON documents"."""
    if isinstance(value, dict):
        return (
            "{"
            + ",".join(f"{canonical_string(key)}:{canonical(value[key])}" for key in sorted(value))
            + "}"
        )
    if isinstance(value, list):
        return "[" + ",".join(map(canonical, value)) + "]"
    if isinstance(value, str):
        return canonical_string(value)
    return (
        {None: "null", True: "true", False: "false"}[value]
        if value is None or value is True or value is False
        else str(value)
    )


@dataclass(slots=True)
class Bend:
    """Changes of a document's bytes before writing; all enclosing documents are signed again.

    Attributes:
        inner: the change of the signed content: the JSON text of `signed`, or the msgpack bytes
            before compression.
        stream: the change of the compressed bytes of a msgpack document.
        envelope: the change of the members of the envelope of a msgpack document.
        outer: the change of the whole file.
    """

    inner: Change = same
    stream: Change = same
    envelope: Callable[[dict[str, Any]], Any] = field(default=lambda members: members)
    outer: Change = same


def json_document(signed: dict[str, Any], bend: Bend | None = None) -> tuple[bytes, str]:
    """Return the file of a JSON document, and its digest as text."""
    bend = bend or Bend()
    text = bend.inner(canonical(signed).encode("utf-8", "surrogatepass"))
    digest = digest_text(text)
    return bend.outer(b'{"digest":"%b","signed":%b}' % (digest.encode(), text)), digest


def table_document(signed: object, bend: Bend | None = None) -> tuple[bytes, bytes]:
    """Return the file of a msgpack document, and its digest."""
    bend = bend or Bend()
    content = bend.inner(msgpack(signed))
    stream = bend.stream(deflate(content))
    digest = blake3(stream).digest()
    members = bend.envelope({"digest": digest, "nbytes": len(content), "signed": stream})
    return bend.outer(msgpack(members)), digest


def packed(values: Iterable[int], width: int = 0) -> list[Any]:
    """Return a packed array; `width` replaces the smallest possible width."""
    values = list(values)
    most = max(values, default=0)
    width = width or next(width for width in (1, 2, 4, 8) if most < 1 << 8 * width)
    return [
        width,
        b"".join(bytes(value >> 8 * plane & 0xFF for value in values) for plane in range(width)),
    ]


def _strings(values: list[str]) -> list[Any]:
    return [packed(len(value.encode()) for value in values), "".join(values)]


def msgpack(value: object) -> bytes:  # noqa: PLR0911 - one answer for each form
    """Return the canonical msgpack of a value, with packed columns."""
    match value:
        case Raw():
            return bytes(value)
        case Packed():
            return msgpack(packed(value))
        case Folded():
            return msgpack(packed(2 * step if step >= 0 else -2 * step - 1 for step in value))
        case Strings():
            return msgpack(_strings(value))
        case None | False | True:
            return {None: b"\xc0", False: b"\xc2", True: b"\xc3"}[value]
        case int():
            return _integer(value)
        case str():
            content = value.encode("utf-8", "surrogatepass")
            return _head(len(content), (0xA0, 32), (0xD9, 0xDA, 0xDB)) + content
        case bytes():
            return _head(len(value), None, (0xC4, 0xC5, 0xC6)) + value
        case list():
            return _head(len(value), (0x90, 16), (None, 0xDC, 0xDD)) + b"".join(map(msgpack, value))
        case dict():
            rows = sorted(value.items(), key=lambda row: row[0].encode())
            return _head(len(value), (0x80, 16), (None, 0xDE, 0xDF)) + b"".join(
                msgpack(k) + msgpack(v) for k, v in rows
            )
    raise TypeError(f"no form for {type(value).__name__}")


def _head(count: int, small: tuple[int, int] | None, codes: tuple[int | None, int, int]) -> bytes:
    """Return the shortest msgpack head for a value of `count` bytes or entries."""
    if small and count < small[1]:
        return bytes([small[0] + count])
    for code, width in zip(codes, (1, 2, 4), strict=True):
        if code is not None and count < 1 << 8 * width:
            return bytes([code]) + count.to_bytes(width, "big")
    raise ValueError(f"{count} is too many")


def _integer(value: int) -> bytes:
    if -32 <= value < 128:
        return bytes([value & 0xFF])
    code, signed = (0xCC, False) if value > 0 else (0xD0, True)
    for number in range(4):
        width = 1 << number
        if (value < 1 << 8 * width) if value > 0 else (value >= -(1 << 8 * width - 1)):
            return bytes([code + number]) + value.to_bytes(width, "big", signed=signed)
    raise ValueError(f"{value} has no form")
