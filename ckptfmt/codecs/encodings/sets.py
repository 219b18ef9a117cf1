"""Sets of places: the gaps between them, their low bits as they are and their high parts in unary, near the entropy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckptfmt.codecs.encodings.strings import Source, dump_number, dump_string, pack_bits

#: Increasing places.
Places = NDArray[np.intp]


def dump_set(places: Places, count: int) -> bytes:
    """Return the set of some places below `count`, which increase.

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
        places, size = np.flatnonzero(rest), count - size
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


def take_set(source: Source, count: int) -> Places:
    """Return the places of a set of some of `count`."""
    head = source.take_number(2 * count + 1)
    size, outside = head >> 1, head & 1
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
    """Return the low bits of unsigned integers: whole bytes in planes, the lowest first, then single bits likewise."""
    whole, rest = divmod(low_bits, 8)
    out = [(words >> words.dtype.type(8 * index)).astype(np.uint8).tobytes() for index in range(whole)]
    if rest:
        top = (words >> words.dtype.type(8 * whole)).astype(np.uint8)
        planes = np.empty((rest, words.size), np.bool_)
        for bit in range(rest):
            np.not_equal(top & np.uint8(1 << bit), 0, out=planes[bit])
        out.append(pack_bits(planes.reshape(-1)).tobytes())
    return b"".join(out)


def take_low_bits(source: Source, low_bits: int, count: int, words: np.dtype[Any]) -> NDArray[Any]:
    """Return unsigned integers of so many bits."""
    whole, rest = divmod(low_bits, 8)
    found = np.zeros(count, words)
    lanes = found.view(np.uint8).reshape(count, words.itemsize)
    for index in range(whole):
        lanes[:, index] = source.take(count)
    if rest and count:
        planes = source.unpack(source.take((rest * count + 7) // 8), rest * count).view(np.uint8).reshape(rest, count)
        top = planes[rest - 1].copy()
        for bit in range(rest - 2, -1, -1):
            top <<= 1
            top |= planes[bit]
        lanes[:, whole] = top
    return found


def _choose_low_bits(gaps: Places) -> int:
    """Return how many bits of a gap are noise: the rest is at its shortest in unary then."""
    sample = gaps[:: max(1, gaps.size // 4096)]
    if np.count_nonzero(sample) < sample.size // 4:
        return 0  # runs: unary and zstd say them best
    mean = float(sample.mean())
    guess = math.ceil(math.log2(mean * math.log(2))) if mean > 1 else 0
    costs = {bits: int((sample >> bits).sum()) + sample.size * bits for bits in range(max(0, guess - 1), guess + 2)}
    return min(costs, key=lambda bits: costs[bits])
