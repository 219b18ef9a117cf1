"""Deflate streams by hand (RFC 1951, 3.2.6): equal bytes from every version of every library."""

from __future__ import annotations

import bisect
import struct
import zlib

__all__ = ["deflate", "deflate_literals", "deflate_run", "deflate_stored"]

#: The base and the extra bits of each length code from 257 up, and of each distance code from 0 up.
_LENGTHS = [(length, 0) for length in range(3, 11)] + [
    (base + (step << extra), extra)
    for extra, base in ((1, 11), (2, 19), (3, 35), (4, 67), (5, 131))
    for step in range(4)
]
_DISTANCES = [(distance, 0) for distance in range(1, 5)] + [
    ((1 << extra + 1) + (step << extra) + 1, extra) for extra in range(1, 14) for step in range(2)
]
_LONGEST = 257


class _Bits:
    """A stream of bits, packed from the lowest bit of each byte up."""

    def __init__(self) -> None:
        self.value = self.count = 0
        self.out = bytearray()

    def add(self, value: int, count: int) -> None:
        """Add a number, the lowest bit first."""
        self.value |= value << self.count
        self.count += count
        while self.count >= 8:
            self.out.append(self.value & 0xFF)
            self.value >>= 8
            self.count -= 8

    def code(self, value: int, count: int) -> None:
        """Add a Huffman code, the highest bit first."""
        self.add(int(f"{value:0{count}b}"[::-1], 2), count)

    def literal(self, byte: int) -> None:
        """Add one byte under the fixed codes."""
        if byte < 144:
            self.code(0x30 + byte, 8)
        else:
            self.code(0x190 + byte - 144, 9)

    def match(self, length: int, distance: int) -> None:
        """Add a match under the fixed codes."""
        row = bisect.bisect_right(_LENGTHS, (length, 9)) - 1
        code = 257 + row
        self.code(code - 256, 7) if code < 280 else self.code(0xC0 + code - 280, 8)
        self.add(length - _LENGTHS[row][0], _LENGTHS[row][1])
        row = bisect.bisect_right(_DISTANCES, (distance, 99)) - 1
        self.code(row, 5)
        self.add(distance - _DISTANCES[row][0], _DISTANCES[row][1])

    def end(self) -> bytes:
        """Return the stream with the end code."""
        self.code(0, 7)
        self.add(0, -self.count % 8)
        return bytes(self.out)


def _zlib_stream(bits: _Bits, content: bytes) -> bytes:
    return b"\x78\x01" + bits.end() + struct.pack(">I", zlib.adler32(content))


def deflate_stored(content: bytes, *, piece_nbytes: int = 65535) -> bytes:
    """Return a zlib stream of stored blocks with `content` (RFC 1951, 3.2.4)."""
    pieces = [content[at : at + piece_nbytes] for at in range(0, len(content), piece_nbytes)] or [
        b""
    ]
    out = bytearray(b"\x78\x01")
    for number, piece in enumerate(pieces):
        out += (
            struct.pack("<BHH", number == len(pieces) - 1, len(piece), len(piece) ^ 0xFFFF) + piece
        )
    return bytes(out) + struct.pack(">I", zlib.adler32(content))


def deflate_literals(content: bytes) -> bytes:
    """Return a zlib stream of one block of fixed codes, without any match."""
    bits = _Bits()
    bits.add(0b011, 3)
    for byte in content:
        bits.literal(byte)
    return _zlib_stream(bits, content)


def deflate(content: bytes, *, longest: int = _LONGEST) -> bytes:
    """Return a zlib stream of one block of fixed codes with the latest matches of 3 bytes or more.

    Args:
        longest: the maximum length of a match in bytes; a smaller length compresses less.
    """
    bits = _Bits()
    bits.add(0b011, 3)
    seen: dict[bytes, int] = {}
    at = 0
    while at < len(content):
        before = seen.get(content[at : at + 3], -1)
        length = 0
        while before >= 0 and at + length < len(content) and length < longest:
            if content[before + length] != content[at + length]:
                break
            length += 1
        is_match = length >= 3 and at - before <= 32768
        if is_match:
            bits.match(length, at - before)
        else:
            bits.literal(content[at])
        for _ in range(length if is_match else 1):
            seen[content[at : at + 3]] = at
            at += 1
    return _zlib_stream(bits, content)


def deflate_run(byte: int, nbytes: int, *, head: bytes = b"") -> bytes:
    """Return a zlib stream of `head` followed by copies of one byte, `nbytes` bytes in all."""
    bits = _Bits()
    bits.add(0b011, 3)
    for one in (*head, byte):
        bits.literal(one)
    matches, rest = divmod(nbytes - len(head) - 1, 258)
    for _ in range(matches):
        bits.code(0xC5, 8)
        bits.code(0, 5)
    for _ in range(rest):
        bits.literal(byte)
    return _zlib_stream(bits, head + bytes([byte]) * (nbytes - len(head)))
