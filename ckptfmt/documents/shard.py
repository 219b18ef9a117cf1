"""The header of a shard, a strict profile of safetensors. Spec: REQ-SHD-001 to REQ-SHD-010.

Any safetensors reader opens a shard, but not every safetensors file is a shard.
"""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any, Final, NoReturn

from ckptfmt import limits
from ckptfmt.documents.canonical import nests_deeper
from ckptfmt.dtypes import DTYPES
from ckptfmt.errors import Code, err

_PREFIX_NBYTES: Final = 8
#: Nesting depth: header, box, shape.
_DEPTH: Final = 3
#: Smaller boxes are placed together, before larger boxes of the same element size.
_SMALL_NBYTES: Final = 1 << 20
_METADATA_KEY: Final = "__metadata__"
_METADATA: Final = {"format": "pt"}
_ENTRY_KEYS: Final = {"dtype", "shape", "data_offsets"}
_ELEMENT_NBYTES: Final = {
    dtype.safetensors: dtype.nbytes for dtype in DTYPES.values() if dtype.safetensors
}
#: Includes F4, a safetensors dtype for exported files only; shards have no F4.
_ELEMENT_NBITS: Final = {**{tag: 8 * nbytes for tag, nbytes in _ELEMENT_NBYTES.items()}, "F4": 4}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ShardEntry:
    """One box in a shard.

    Attributes:
        key: the box's key in the header; any string, never parsed.
        tag: the dtype's name in safetensors.
        shape: the box's shape, in elements.
        byte_begin: first byte, from the start of the file.
        byte_end: first byte after the box.
    """

    key: str
    tag: str
    shape: tuple[int, ...]
    byte_begin: int
    byte_end: int


def plan_shard(boxes: list[tuple[str, str, tuple[int, ...]]]) -> tuple[bytes, list[ShardEntry]]:
    """Return the header of a shard, and the entries of some boxes in the given order.

    Args:
        boxes: (key, safetensors tag, shape) of each box. Boxes with wider elements are placed
            first, so that each box is aligned to its element size. Among equal widths, small boxes
            come before large boxes. Otherwise boxes keep their order.

    Units: bytes from the start of the file.
    Spec: REQ-SHD-002, REQ-SHD-003.
    """
    sizes = [math.prod(shape) * _ELEMENT_NBITS[tag] // 8 for _, tag, shape in boxes]
    order = sorted(
        range(len(boxes)),
        key=lambda index: (-_ELEMENT_NBITS[boxes[index][1]], sizes[index] >= _SMALL_NBYTES),
    )
    begin = 0
    header: dict[str, Any] = {_METADATA_KEY: _METADATA}
    spans: dict[int, tuple[int, int]] = {}
    for index in order:
        key, tag, shape = boxes[index]
        end = begin + sizes[index]
        header[key] = {"dtype": tag, "shape": list(shape), "data_offsets": [begin, end]}
        spans[index] = (begin, end)
        begin = end
    content = dump_shard_header(header)
    entries = [
        ShardEntry(
            key=key,
            tag=tag,
            shape=shape,
            byte_begin=len(content) + spans[index][0],
            byte_end=len(content) + spans[index][1],
        )
        for index, (key, tag, shape) in enumerate(boxes)
    ]
    return content, entries


def dump_shard_header(header: dict[str, Any]) -> bytes:
    """Return length, JSON and padding of a header."""
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    padding = -(_PREFIX_NBYTES + len(text)) % limits.SHARD_ALIGN_NBYTES
    if len(text) + padding > limits.SHARD_HEADER_NBYTES:
        raise err(
            Code.LIMIT_EXCEEDED,
            f"a shard header of {len(text)} bytes: too many tensors for one file",
            requirement="REQ-SHD-001",
        )
    return (len(text) + padding).to_bytes(_PREFIX_NBYTES, "little") + text + b" " * padding


def parse_shard_header(content: bytes, *, file_nbytes: int, where: str) -> dict[str, ShardEntry]:
    """Return the boxes of a shard by key.

    Args:
        content: the file's first bytes, including the header; bytes after the header are ignored.
        file_nbytes: actual size of the file.
        where: name of the file, for messages.

    Raises: FormatError(SHARD_HEADER_NBYTES, SHARD_HEADER_SYNTAX, SHARD_HEADER_SCHEMA, SHARD_DTYPE,
        SHARD_SHAPE, SHARD_OFFSETS, DOC_DUPLICATE_KEY).
    Spec: REQ-SHD-001 to REQ-SHD-008.
    """
    text = _header_text(content, file_nbytes, where)
    header = _parse_header(text, where)
    header_nbytes = _PREFIX_NBYTES + len(text)
    metadata = header.pop(_METADATA_KEY, {})
    if not isinstance(metadata, dict) or not all(
        isinstance(member, str) for member in metadata.values()
    ):
        raise _schema_error(_METADATA_KEY, "isn't a map of strings", where)
    entries = {key: _parse_entry(key, value, header_nbytes, where) for key, value in header.items()}
    at = header_nbytes
    for entry in sorted(entries.values(), key=lambda entry: (entry.byte_begin, entry.byte_end)):
        if entry.byte_begin != at:
            raise err(
                Code.SHARD_OFFSETS,
                f"{entry.key[:64]!r} begins at byte {entry.byte_begin} where {at} is expected",
                where=where,
                requirement="REQ-SHD-008",
            )
        at = entry.byte_end
    if at != file_nbytes:
        raise err(
            Code.SHARD_OFFSETS,
            f"the tensors end at byte {at}, the file at {file_nbytes}",
            where=where,
            requirement="REQ-SHD-008",
        )
    return entries


def _header_text(content: bytes, file_nbytes: int, where: str) -> bytes:
    def refuse(detail: str) -> NoReturn:
        raise err(
            Code.SHARD_HEADER_NBYTES, detail, where=f"{where}[0:8]", requirement="REQ-SHD-001"
        )

    if len(content) < _PREFIX_NBYTES:
        refuse(f"a file of {len(content)} bytes has no header length")
    text_nbytes = int.from_bytes(content[:_PREFIX_NBYTES], "little")
    if text_nbytes > limits.SHARD_HEADER_NBYTES:
        refuse(f"a header of {text_nbytes} bytes; {limits.SHARD_HEADER_NBYTES} are allowed")
    if text_nbytes == 0 or _PREFIX_NBYTES + text_nbytes > min(file_nbytes, len(content)):
        refuse(f"a header of {text_nbytes} bytes in a file of {file_nbytes}")
    if (_PREFIX_NBYTES + text_nbytes) % limits.SHARD_ALIGN_NBYTES:
        refuse(
            f"the data begins at byte {_PREFIX_NBYTES + text_nbytes}, no multiple of"
            f" {limits.SHARD_ALIGN_NBYTES}"
        )
    return content[_PREFIX_NBYTES : _PREFIX_NBYTES + text_nbytes]


def _parse_header(text: bytes, where: str) -> dict[str, Any]:
    def syntax_error(detail: str) -> NoReturn:
        raise err(Code.SHARD_HEADER_SYNTAX, detail, where=where, requirement="REQ-SHD-004")

    def check_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        members = dict(pairs)
        if len(members) != len(pairs):
            raise err(
                Code.DOC_DUPLICATE_KEY,
                "the header has one key twice",
                where=where,
                requirement="REQ-SHD-005",
            )
        return members

    def parse_integer(digits: str) -> int:
        if len(digits) > 20 or digits == "-0":
            syntax_error(f"{digits[:32]} isn't an allowed number")
        return int(digits)

    if not text.startswith(b"{"):
        syntax_error("doesn't begin with {")
    if nests_deeper(text, _DEPTH):
        syntax_error("nests too deeply")
    try:
        header = json.loads(
            text.decode("utf-8").rstrip(" "),
            object_pairs_hook=check_pairs,
            parse_float=lambda number: syntax_error(f"{number[:32]} isn't an integer"),
            parse_constant=lambda number: syntax_error(f"{number} isn't a number"),
            parse_int=parse_integer,
        )
        # JSON escapes can contain lone surrogates, which aren't Unicode text.
        json.dumps([*header, header.get(_METADATA_KEY)], ensure_ascii=False).encode()
    except (UnicodeError, json.JSONDecodeError) as error:
        raise err(
            Code.SHARD_HEADER_SYNTAX, str(error)[:200], where=where, requirement="REQ-SHD-004"
        ) from None
    if not text.rstrip(b" ").endswith(b"}"):
        syntax_error("padded with something other than spaces")
    return dict(header)


def _parse_entry(key: str, value: object, header_nbytes: int, where: str) -> ShardEntry:
    if not isinstance(value, dict) or set(value) != _ENTRY_KEYS:
        raise _schema_error(key, "hasn't exactly dtype, shape and data_offsets", where)
    tag = value["dtype"]
    shape = value["shape"]
    offsets = value["data_offsets"]
    if not isinstance(tag, str) or tag not in _ELEMENT_NBYTES:
        raise err(
            Code.SHARD_DTYPE,
            f"{key[:64]!r} has the dtype {str(tag)[:32]!r}",
            where=where,
            requirement="REQ-SHD-006",
        )
    if (
        not isinstance(shape, list)
        or len(shape) > limits.NDIM
        or not all(type(extent) is int and 0 <= extent <= limits.DIM for extent in shape)
    ):
        raise err(
            Code.SHARD_SHAPE,
            f"{key[:64]!r} has a shape out of range",
            where=where,
            requirement="REQ-SHD-007",
        )
    if math.prod(extent for extent in shape if extent) > limits.ELEMENTS:
        raise err(
            Code.SHARD_SHAPE,
            f"{key[:64]!r} has too many elements",
            where=where,
            requirement="REQ-SHD-007",
        )
    match offsets:
        case [int() as begin, int() as end] if (
            type(begin) is int and type(end) is int and 0 <= begin <= end
        ):
            pass
        case _:
            raise _schema_error(key, "has data_offsets that aren't [begin, end]", where)
    nbytes = math.prod(shape) * _ELEMENT_NBYTES[tag]
    if end - begin != nbytes:
        raise err(
            Code.SHARD_OFFSETS,
            f"{key[:64]!r} spans {end - begin} bytes where its shape needs {nbytes}",
            where=where,
            requirement="REQ-SHD-008",
        )
    return ShardEntry(
        key=key,
        tag=tag,
        shape=tuple(shape),
        byte_begin=header_nbytes + begin,
        byte_end=header_nbytes + end,
    )


def _schema_error(key: str, detail: str, where: str) -> Exception:
    return err(
        Code.SHARD_HEADER_SCHEMA, f"{key[:64]!r} {detail}", where=where, requirement="REQ-SHD-006"
    )
