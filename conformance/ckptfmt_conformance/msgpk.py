"""The msgpack profile of the format, for the suite's own reader.

Each value has exactly one form.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Final

__all__ = ["dump", "parse"]

_DEPTH: Final = 64
#: First byte of a sized value: the width of the length in bytes, and the type.
_SIZED: Final = {
    0xC4: (1, bytes), 0xC5: (2, bytes), 0xC6: (4, bytes), 0xD9: (1, str), 0xDA: (2, str),
    0xDB: (4, str), 0xDC: (2, list), 0xDD: (4, list), 0xDE: (2, dict), 0xDF: (4, dict),
}  # fmt: skip
_NUMBERS: Final = {
    0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q", 0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q",
}  # fmt: skip
_CONSTANTS: Final = {0xC0: None, 0xC2: False, 0xC3: True}


def parse(content: bytes) -> Any:
    r"""Return the value of some msgpack bytes.

    Raises: ValueError unless the bytes are exactly one value in canonical form.

    >>> parse(b"\x82\xa1a\x92\xc0\xc4\x01x\xa1b\x01")
    {'a': [None, b'x'], 'b': 1}
    """
    value, end = _parse(content, 0, 0)
    if end != len(content):
        raise ValueError("bytes behind the value")
    if b"".join(_pieces(value)) != content:
        raise ValueError("a value that isn't in its one form")
    return value


def dump(value: object) -> bytes:
    r"""Return the canonical form of a value.

    >>> dump([-1, "x", 2**63])
    b'\x93\xff\xa1x\xcf\x80\x00\x00\x00\x00\x00\x00\x00'
    """
    return b"".join(_pieces(value))


def _parse(content: bytes, at: int, depth: int) -> tuple[Any, int]:
    if depth > _DEPTH:
        raise ValueError("nested too deeply")
    first = _take(content, at, 1)[0]
    at += 1
    if first < 0x80 or first >= 0xE0:
        return (first if first < 0x80 else first - 256), at
    if first in _CONSTANTS:
        return _CONSTANTS[first], at
    if first in _NUMBERS:
        width = struct.calcsize(_NUMBERS[first])
        return struct.unpack(_NUMBERS[first], _take(content, at, width))[0], at + width
    if first < 0xC0:
        kind: type = dict if first < 0x90 else list if first < 0xA0 else str
        count = first & (0x1F if kind is str else 0x0F)
    elif first in _SIZED:
        width, kind = _SIZED[first]
        count = int.from_bytes(_take(content, at, width), "big")
        at += width
    else:
        raise ValueError(f"a value of type {first:#x}")
    if kind in (bytes, str):
        raw = _take(content, at, count)
        return (raw if kind is bytes else raw.decode()), at + count
    return _parse_items(content, at, depth, kind, count)


def _parse_items(content: bytes, at: int, depth: int, kind: type, count: int) -> tuple[Any, int]:
    if count > len(content) - at:
        raise ValueError("a length that leaves the bytes")
    items = []
    for _ in range(count * (2 if kind is dict else 1)):
        item, at = _parse(content, at, depth + 1)
        items.append(item)
    if kind is list:
        return items, at
    if not all(isinstance(key, str) for key in items[::2]) or len(set(items[::2])) != count:
        raise ValueError("a map whose keys aren't strings, or aren't unique")
    return dict(zip(items[::2], items[1::2], strict=True)), at


def _take(content: bytes, at: int, count: int) -> bytes:
    if count > len(content) - at:
        raise ValueError("a value that leaves the bytes")
    return content[at : at + count]


def _pieces(value: object) -> Iterator[bytes]:
    if value is None or value is False or value is True:
        yield {None: b"\xc0", False: b"\xc2", True: b"\xc3"}[value]
    elif isinstance(value, int):
        yield _number(value)
    elif isinstance(value, bytes):
        yield _length(len(value), 0, 0, (0xC4, 0xC5, 0xC6)) + value
    elif isinstance(value, str):
        raw = value.encode()
        yield _length(len(raw), 0xA0, 32, (0xD9, 0xDA, 0xDB)) + raw
    elif isinstance(value, list):
        yield _length(len(value), 0x90, 16, (None, 0xDC, 0xDD))
        for item in value:
            yield from _pieces(item)
    elif isinstance(value, dict):
        yield _length(len(value), 0x80, 16, (None, 0xDE, 0xDF))
        for key in sorted(value, key=str.encode):
            yield from _pieces(key)
            yield from _pieces(value[key])
    else:
        raise TypeError(f"{type(value).__name__} has no form")


def _number(value: int) -> bytes:
    if -32 <= value < 128:
        return struct.pack("b", value)
    codes = (0xCC, 0xCD, 0xCE, 0xCF) if value >= 0 else (0xD0, 0xD1, 0xD2, 0xD3)
    for code in codes:
        try:
            return bytes([code]) + struct.pack(_NUMBERS[code], value)
        except struct.error:
            continue
    raise ValueError(f"{value} has no form")


def _length(count: int, fixed: int, fixed_limit: int, codes: tuple[int | None, int, int]) -> bytes:
    if count < fixed_limit:
        return bytes([fixed + count])
    if codes[0] is not None and count < 1 << 8:
        return bytes([codes[0], count])
    is_short = count < 1 << 16
    return struct.pack(">BH" if is_short else ">BI", codes[1] if is_short else codes[2], count)
