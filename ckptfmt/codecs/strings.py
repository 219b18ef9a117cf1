"""Numbers, strings and sets of places in the stored bytes of a block.

A string is raw, one repeated byte, or a zstd frame. A set is stored as the gaps between its places:
the low bits of the gaps unchanged, and the high parts in unary, close to the entropy.

A reader knows the size of a string before reading it, so that decompression is always bounded.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import zstandard
from numpy.typing import NDArray

from ckptfmt.errors import CkptError, Code, err

Bytes = NDArray[np.uint8]

#: First byte of a string that isn't empty.
RAW: Final = 0
FILL: Final = 1
FRAME: Final = 2

_MAGIC: Final = b"\x28\xb5\x2f\xfd"
#: Least window of a frame that isn't a single segment, in bytes.
_WINDOW_NBYTES: Final = 1024
#: Below this size in bytes a frame is longer than its content.
_FRAME_NBYTES: Final = 24
# The input is noise with an uneven histogram. With few, long matches zstd's entropy coder gets all
# of the input: two and a half times as fast as level 1, and a few per cent smaller.
_PARAMETERS: Final = zstandard.ZstdCompressionParameters(
    compression_level=1,
    strategy=zstandard.STRATEGY_FAST,
    min_match=7,
    hash_log=10,
    target_length=0,
)


def dump_number(value: int) -> bytes:
    """Return a number in groups of seven bits, the lowest first.

    The top bit is set in all bytes except the last.

    >>> dump_number(300).hex()
    'ac02'
    """
    out = bytearray()
    while value > 0x7F:
        out.append((value & 0x7F) | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def dump_string(content: Bytes) -> bytes:
    """Return bytes as the shortest of the three kinds of strings; no bytes for an empty string."""
    if not content.size:
        return b""
    if (
        content.size > 1
        and content[0] == content[-1] == content[content.size // 2]
        and (content == content[0]).all()
    ):
        return bytes((FILL, content[0]))
    if content.size >= _FRAME_NBYTES:
        frame = zstandard.ZstdCompressor(compression_params=_PARAMETERS).compress(content.data)
        head = dump_number(len(frame))
        if len(head) + len(frame) < content.size:
            return b"".join((bytes((FRAME,)), head, frame))
    return b"".join((bytes((RAW,)), content.data))


def pack_bits(bits: NDArray[Any]) -> Bytes:
    """Return a bit for each boolean or integer: 1 if nonzero; eight to a byte, the lowest first."""
    # Wider integers take numpy seven times as long.
    narrow = bits if bits.itemsize == 1 else bits.astype(np.uint8)
    return np.packbits(narrow, bitorder="little")


class BlockBytes:
    """A reader of a block's stored bytes, which checks each size before a read or an allocation.

    Args:
        stored: stored bytes of the block.
        where: name of the block in errors.
    """

    __slots__ = ("_at", "_stored", "where")

    def __init__(self, stored: memoryview, where: str) -> None:
        self._stored = stored
        self._at = 0
        self.where = where

    def refuse(self, detail: str, requirement: str) -> CkptError:
        """Return the error for malformed bytes."""
        return err(Code.ENCODED_FORM, detail, where=self.where, requirement=requirement)

    def take(self, nbytes: int) -> Bytes:
        """Return the next `nbytes` bytes."""
        left = self._stored.nbytes - self._at
        if nbytes > left:
            raise self.refuse(f"{nbytes} bytes expected, {left} left", "REQ-ENC-006")
        found = np.frombuffer(self._stored, np.uint8, nbytes, self._at)
        self._at += nbytes
        return found

    def take_byte(self) -> int:
        """Return the next byte."""
        return int(self.take(1)[0])

    def take_number(self, most: int) -> int:
        """Return the next number, which must not exceed `most`."""
        value = shift = 0
        while True:
            byte = self.take_byte()
            value |= (byte & 0x7F) << shift
            if value > most:
                raise self.refuse(f"a number is above {most}", "REQ-ENC-007")
            if byte < 0x80:
                if not byte and shift:
                    raise self.refuse("a number isn't in its shortest form", "REQ-ENC-007")
                return value
            shift += 7
            if shift > most.bit_length():
                raise self.refuse(f"a number is above {most}", "REQ-ENC-007")

    def take_string(self, nbytes: int) -> Bytes:
        """Return a string of `nbytes` bytes."""
        if not nbytes:
            return np.empty(0, np.uint8)
        return self.take_string_of(self.take_byte(), nbytes)

    def take_string_of(self, kind: int, nbytes: int) -> Bytes:
        """Return the rest of a string, after the first byte."""
        if kind == RAW:
            return self.take(nbytes)
        if kind == FILL:
            return np.full(nbytes, self.take_byte(), np.uint8)
        if kind == FRAME:
            return self._take_frame(nbytes)
        raise self.refuse(f"a string is of kind {kind}", "REQ-ENC-008")

    def take_bits(self, count: int) -> NDArray[np.bool_]:
        """Return a string of bits, as booleans."""
        return self.unpack(self.take_string((count + 7) // 8), count)

    def unpack(self, packed: Bytes, count: int) -> NDArray[np.bool_]:
        """Return packed bits as booleans."""
        if count % 8 and packed[-1] >> count % 8:
            raise self.refuse("bits behind the last one aren't zero", "REQ-ENC-010")
        return np.unpackbits(packed, count=count, bitorder="little").view(np.bool_)

    def check_end(self) -> None:
        """Check that all bytes have been read."""
        if left := self._stored.nbytes - self._at:
            raise self.refuse(f"{left} bytes are left over", "REQ-ENC-006")

    def _take_frame(self, nbytes: int) -> Bytes:
        frame = self.take(self.take_number(nbytes)).data
        try:
            said = zstandard.get_frame_parameters(frame)
        except zstandard.ZstdError:
            raise self.refuse("a string isn't a zstd frame", "REQ-ENC-009") from None
        # The library allocates the size that a frame states, beyond any limit: check the size
        # first.
        if bytes(frame[:4]) != _MAGIC or said.content_size != nbytes or said.dict_id:
            raise self.refuse(
                f"a frame isn't one of {nbytes} bytes without a dictionary", "REQ-ENC-009"
            )
        if said.window_size > max(nbytes, _WINDOW_NBYTES):
            raise self.refuse(
                f"a frame asks for a window of {said.window_size} bytes", "REQ-ENC-009"
            )
        try:
            content = zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise self.refuse(f"a frame is damaged: {error}", "REQ-ENC-009") from None
        if len(content) != nbytes:
            raise self.refuse(
                f"a frame holds {len(content)} bytes instead of {nbytes}", "REQ-ENC-009"
            )
        return np.frombuffer(content, np.uint8)


#: Ascending places.
Places = NDArray[np.intp]


def dump_set(places: Places, count: int) -> bytes:
    """Return the stored form of ascending places below `count`.

    >>> dump_set(np.array([9]), 16).hex()
    '020202000401'
    """
    size = places.size
    outside = 2 * size > count
    if outside and size == count:
        return dump_number(1)
    if outside:
        rest = np.ones(count, np.bool_)
        rest[places] = False
        places = np.flatnonzero(rest)
        size = count - size
    head = dump_number(2 * size + outside)
    if not size:
        return head
    unary_count = int(places[-1]) + 1
    gaps = places.copy()
    gaps[1:] -= places[:-1] + 1
    low_bits = _choose_low_bits(gaps)
    ends = places
    if low_bits:
        ends = gaps >> low_bits
        ends += 1
        np.cumsum(ends, out=ends)
        ends -= 1
        unary_count = int(ends[-1]) + 1
    unary = np.zeros(unary_count, np.bool_)
    unary[ends] = True
    return b"".join(
        (
            head,
            bytes((low_bits,)),
            dump_number(unary_count - size),
            dump_string(pack_bits(unary)),
            dump_low_bits(gaps, low_bits),
        )
    )


def take_set(source: BlockBytes, count: int) -> Places:
    """Return the places of a set, out of `count` places."""
    head = source.take_number(2 * count + 1)
    size = head >> 1
    outside = head & 1
    if 2 * size + outside > count:
        raise source.refuse("a set isn't said by the smaller of its halves", "REQ-ENC-011")
    if not size:
        return np.arange(count if outside else 0)
    low_bits = source.take_byte()
    if low_bits >= count.bit_length():
        raise source.refuse(f"{low_bits} low bits of places below {count}", "REQ-ENC-011")
    zeros = source.take_number(count >> low_bits)
    places = np.flatnonzero(source.take_bits(size + zeros))
    if places.size != size or places[-1] != size + zeros - 1:
        raise source.refuse("high parts don't fit their number", "REQ-ENC-011")
    if low_bits:
        places[1:] -= places[:-1] + 1
        places <<= low_bits
        places |= take_low_bits(source, low_bits, size, np.dtype("<u4"))
        places += 1
        np.cumsum(places, out=places)
        places -= 1
    if places[-1] >= count:
        raise source.refuse("a place is behind the last one", "REQ-ENC-011")
    if not outside:
        return places
    inside = np.ones(count, np.bool_)
    inside[places] = False
    return np.flatnonzero(inside)


def dump_low_bits(words: NDArray[Any], low_bits: int) -> bytes:
    """Return the low bits of unsigned integers: whole bytes, then single bits, as planes.

    The lowest plane comes first.
    """
    whole, rest = divmod(low_bits, 8)
    out = [
        (words >> words.dtype.type(8 * index)).astype(np.uint8).tobytes() for index in range(whole)
    ]
    if rest:
        top = (words >> words.dtype.type(8 * whole)).astype(np.uint8)
        planes = np.empty((rest, words.size), np.bool_)
        for bit in range(rest):
            np.not_equal(top & np.uint8(1 << bit), 0, out=planes[bit])
        out.append(pack_bits(planes.reshape(-1)).tobytes())
    return b"".join(out)


def take_low_bits(
    source: BlockBytes, low_bits: int, count: int, words: np.dtype[Any]
) -> NDArray[Any]:
    """Return `count` unsigned integers of `low_bits` bits each."""
    whole, rest = divmod(low_bits, 8)
    found = np.zeros(count, words)
    lanes = found.view(np.uint8).reshape(count, words.itemsize)
    for index in range(whole):
        lanes[:, index] = source.take(count)
    if rest and count:
        planes = (
            source.unpack(source.take((rest * count + 7) // 8), rest * count)
            .view(np.uint8)
            .reshape(rest, count)
        )
        top = planes[rest - 1].copy()
        for bit in range(rest - 2, -1, -1):
            top <<= 1
            top |= planes[bit]
        lanes[:, whole] = top
    return found


def _choose_low_bits(gaps: Places) -> int:
    """Return how many low bits of the gaps are noise: the best split for unary high parts."""
    sample = gaps[:: max(1, gaps.size // 4096)]
    if np.count_nonzero(sample) < sample.size // 4:
        return 0  # runs, which unary and zstd store best
    mean = float(sample.mean())
    guess = math.ceil(math.log2(mean * math.log(2))) if mean > 1 else 0
    costs = {
        bits: int((sample >> bits).sum()) + sample.size * bits
        for bits in range(max(0, guess - 1), guess + 2)
    }
    return min(costs, key=lambda bits: costs[bits])
