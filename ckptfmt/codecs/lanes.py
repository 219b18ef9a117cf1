"""Lanes: a block as unsigned integers, their byte planes, and the steps from a base in three forms.

A plane has the bytes of one significance of all lanes. Steps are stored as planes, as the set of
changed lanes with signs and sets of lanes that moved further, or class by class: lanes change alike
if their bases have similar exponents.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ckptfmt.codecs.strings import (
    BlockBytes,
    Bytes,
    Places,
    dump_low_bits,
    dump_set,
    dump_string,
    pack_bits,
    take_low_bits,
    take_set,
)
from ckptfmt.dtypes import DTYPES

#: Number of lanes processed at once: intermediate results stay in the processor's cache.
_PIECE: Final = 1 << 15

#: Unsigned integers of a lane's width.
Words = NDArray[Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Lane:
    """The lanes into which a block of a dtype is divided.

    Attributes:
        nbytes: width of a lane in bytes: 1, 2, 4 or 8.
        signed_magnitude: whether the top bit is a sign and the rest a magnitude, as in floats.
    """

    nbytes: int
    signed_magnitude: bool

    @property
    def words(self) -> np.dtype[Any]:
        """The unsigned integer type of this width, little-endian."""
        return np.dtype(f"<u{self.nbytes}")


def _lane_of(name: str, nbytes: int) -> Lane:
    if name.startswith("complex"):
        return Lane(nbytes // 2, signed_magnitude=True)
    if name.startswith(("float", "bfloat")) and name not in {"float8_e8m0fnu", "float4_e2m1fn_x2"}:
        return Lane(nbytes, signed_magnitude=True)
    return Lane(nbytes, signed_magnitude=False)


#: The lane of each dtype.
LANES: Final[dict[str, Lane]] = {
    entry.name: _lane_of(entry.name, entry.nbytes) for entry in DTYPES.values()
}


def _ordered(words: Words, lane: Lane) -> NDArray[Any]:
    """Return signed integers in the order of the lanes' values. The function is its own inverse."""
    signed = words.view(np.dtype(f"<i{lane.nbytes}"))
    if not lane.signed_magnitude:
        return signed
    bits = 8 * lane.nbytes - 1
    mask = signed >> bits
    mask &= (1 << bits) - 1
    mask ^= signed
    return mask


def steps_between(content: Words, base: Words, lane: Lane) -> Words:
    """Return the zigzag-coded steps from base to content, modulo 2^bits.

    A step is 0 for no change, 1 for one down, 2 for one up, 3 for two down, and so on.
    """
    steps = np.empty_like(content)
    for piece in _pieces(content.size):
        step = _ordered(content[piece], lane) - _ordered(base[piece], lane)
        folded = step >> (8 * lane.nbytes - 1)
        step <<= 1
        step ^= folded
        steps[piece] = step.view(lane.words)
    return steps


def apply_steps(steps: Words, base: Words, lane: Lane) -> Words:
    """Return the content that `steps_between` turned into these steps."""
    signed = np.dtype(f"<i{lane.nbytes}")
    content = np.empty_like(steps)
    for piece in _pieces(steps.size):
        step = (steps[piece] >> 1).view(signed)
        step ^= -(steps[piece] & 1).view(signed)
        step += _ordered(base[piece], lane)
        content[piece] = _ordered(step.view(lane.words), lane).view(lane.words)
    return content


def _pieces(count: int) -> Iterator[slice]:
    for begin in range(0, count, _PIECE):
        yield slice(begin, begin + _PIECE)


#: First byte of a plane stored as a set of places and the bytes there.
_SCATTERED: Final = 3
_MOSTLY_ZERO: Final = 0.4
_SAMPLE_NBYTES: Final = 1 << 15
#: Least gain of a set over a string, as a share of the bytes beside the plane: coding a set takes
#: several times as long.
_WORTH: Final = 0.02


def dump_planes(words: Words, plane_count: int | None = None) -> bytes:
    """Return the planes of `words`, the lowest bytes first.

    The planes from `plane_count` on must be zero, and are left out.
    """
    out: list[bytes] = []
    for index in range(words.itemsize if plane_count is None else plane_count):
        # Shifting and narrowing takes half as long as copying every fourth byte.
        plane = (words >> words.dtype.type(8 * index)).astype(np.uint8)
        out.append(dump_plane(plane, beside_nbytes=sum(map(len, out))))
    return b"".join(out)


def take_planes(source: BlockBytes, out: Words, plane_count: int | None = None) -> None:
    """Decode planes into `out`."""
    count = out.itemsize if plane_count is None else plane_count
    planes = [take_plane(source, out.size) for _ in range(count)]
    out[:] = planes.pop() if planes else 0
    while planes:
        out <<= out.dtype.type(8)
        out |= planes.pop()


def dump_plane(plane: Bytes, *, beside_nbytes: int = 0) -> bytes:
    """Return bytes as a string, or as the set of nonzero places with a string of their bytes.

    Args:
        plane: bytes of the plane.
        beside_nbytes: number of bytes stored beside the plane. A set must save a small share of
            this number.
    """
    size = int(np.count_nonzero(plane != 0))
    if not 0 < size < _MOSTLY_ZERO * plane.size:
        return dump_string(plane)
    if plane.size <= 4 * _SAMPLE_NBYTES:
        return min(_dump_scattered(plane), dump_string(plane), key=len)
    # If most bytes are zero, zstd spends at least a bit on each, unless there are runs.
    sample = plane[(plane.size - _SAMPLE_NBYTES) // 2 :][:_SAMPLE_NBYTES]
    saved_nbytes = (
        (len(dump_string(sample)) - len(_dump_scattered(sample))) * plane.size / _SAMPLE_NBYTES
    )
    return _dump_scattered(plane) if saved_nbytes > _WORTH * beside_nbytes else dump_string(plane)


def _dump_scattered(plane: Bytes) -> bytes:
    places = np.flatnonzero(plane != 0)
    return b"".join(
        (bytes((_SCATTERED,)), dump_set(places, plane.size), dump_string(plane[places]))
    )


def take_plane(source: BlockBytes, count: int) -> Bytes:
    """Return a plane of `count` bytes."""
    if not count:
        return source.take(0)
    kind = source.take_byte()
    if kind != _SCATTERED:
        return source.take_string_of(kind, count)
    places = take_set(source, count)
    found = np.zeros(count, np.uint8)
    found[places] = source.take_string(places.size)
    return found


_LEVELS: Final = 15
#: Below this number of steps, sets are shorter than a frame with its histogram.
_FEW: Final = 512


def dump_changes(places: Places, count: int, steps: Words) -> bytes:
    """Return the stored form of the changed lanes and their steps.

    Args:
        places: places of the changed lanes, ascending.
        count: number of all lanes.
        steps: zigzag-coded steps of the changed lanes, all nonzero.
    """
    out = [dump_set(places, count)]
    if not steps.size:
        return out[0]
    steps = steps - 1
    out.append(dump_plane(pack_bits(steps & 1)))
    heights = steps >> 1
    sets: list[bytes] = []
    while heights.size and len(sets) < _LEVELS:
        if heights.size > _FEW and np.count_nonzero(heights) > heights.size // 2:
            break
        above = np.flatnonzero(heights != 0)
        sets.append(dump_set(above, heights.size))
        heights = heights[above] - 1
    out.append(bytes((len(sets),)))
    out += sets
    if heights.size:
        out.append(dump_planes(heights))
    return b"".join(out)


def take_changes(source: BlockBytes, count: int, words: np.dtype[Any]) -> tuple[Places, Words]:
    """Return the places of the changed lanes among `count` lanes, and the steps there."""
    places = take_set(source, count)
    steps = np.zeros(places.size, words)
    if not places.size:
        return places, steps
    signs = source.unpack(take_plane(source, (places.size + 7) // 8), places.size)
    levels = source.take_byte()
    if levels > _LEVELS:
        raise source.refuse(f"{levels} levels", "REQ-ENC-018")
    half = words.type(1 << (8 * words.itemsize - 1))
    if not levels:
        take_planes(source, steps)
    reached = places[:0]
    for level in range(levels):
        if level and not reached.size:
            raise source.refuse("a level above an empty one", "REQ-ENC-018")
        reached = (
            reached[take_set(source, reached.size)] if level else take_set(source, places.size)
        )
        steps[reached] += 1
    if reached.size:
        more = np.empty(reached.size, words)
        take_planes(source, more)
        if more.max() >= half:
            raise source.refuse("a step is too far", "REQ-ENC-018")
        steps[reached] += more
    if steps.max() >= half:
        raise source.refuse("a step is too far", "REQ-ENC-018")
    steps <<= 1
    steps |= signs
    steps += 1
    if not steps.all():
        raise source.refuse("a step is too far", "REQ-ENC-018")
    return places, steps


#: First byte of steps in the form of `dump_changes`.
_CHANGES: Final = 0xFF
#: If nine of ten steps are below this, most are 0 or close to 0.
_NEAR: Final = 6
#: Number of a long step's high bits for the entropy coder; the bits below are noise.
_TOLD_BITS: Final = 8
_SAMPLE_COUNT: Final = 1024


def dump_steps(steps: Words) -> bytes:
    """Return the stored form of zigzag-coded steps; at least one step is needed."""
    sample = np.sort(steps[:: max(1, steps.size // _SAMPLE_COUNT)])
    typical = int(sample[sample.size * 9 // 10])
    if typical < _NEAR:
        places = np.flatnonzero(steps != 0)
        return bytes((_CHANGES,)) + dump_changes(places, steps.size, steps[places])
    low_bits = max(0, typical.bit_length() - _TOLD_BITS)
    word = steps.dtype.type
    out = [bytes((low_bits,))]
    if low_bits:
        out.append(dump_plane(pack_bits(steps & word(1))))
        out.append(dump_low_bits(steps >> word(1), low_bits - 1))
        steps = steps >> word(low_bits)
    out.append(dump_planes(steps, (8 * steps.itemsize - low_bits + 7) // 8))
    return b"".join(out)


def take_steps(source: BlockBytes, out: Words) -> None:
    """Decode steps into `out`."""
    low_bits = source.take_byte()
    if low_bits == _CHANGES:
        places, steps = take_changes(source, out.size, out.dtype)
        out[:] = 0
        out[places] = steps
        return
    bits = 8 * out.itemsize
    if low_bits >= bits:
        raise source.refuse(f"{low_bits} low bits of {bits}", "REQ-ENC-023")
    if not low_bits:
        take_planes(source, out)
        return
    word = out.dtype.type
    signs = source.unpack(take_plane(source, (out.size + 7) // 8), out.size)
    low = take_low_bits(source, low_bits - 1, out.size, out.dtype)
    take_planes(source, out, (bits - low_bits + 7) // 8)
    if low_bits % 8 and (out >> word(bits - low_bits)).any():
        raise source.refuse("high parts are too large", "REQ-ENC-023")
    out <<= word(low_bits - 1)
    out |= low
    out <<= word(1)
    out |= signs


#: Number of lanes sorted at once: the lanes and their order stay in a processor's cache.
_PART: Final = 1 << 16
_CLASSES: Final = 32
#: Least size of a class. A smaller class joins its neighbour, since its header would cost the gain.
_LEAST: Final = 1024
_LEAST_PART: Final = 64


def dump_classes(content: Words, base: Words, lane: Lane) -> bytes:
    """Return the zigzag-coded steps from base to content, class by class."""
    sorted_parts = []
    counts = np.zeros((0, 256), np.intp)
    for begin in range(0, base.size, _PART):
        order, part_counts = _sort(base[begin : begin + _PART], lane)
        steps = steps_between(content[begin : begin + _PART], base[begin : begin + _PART], lane)
        sorted_parts.append(steps[order])
        counts = np.vstack((counts, part_counts))
    cuts = _choose_cuts(counts.sum(axis=0))
    classes = (
        np.concatenate([part[span] for part, span in zip(sorted_parts, spans, strict=True)])
        for spans in _spans(counts, cuts)
    )
    return b"".join((bytes((len(cuts), *cuts)), *map(dump_steps, classes)))


def take_classes(source: BlockBytes, out: Words, base: Words, lane: Lane) -> None:
    """Decode the steps, and apply them to the base, into `out`."""
    cut_count = source.take_byte()
    cuts = source.take(cut_count).tolist()
    if cut_count >= _CLASSES or any(a >= b for a, b in itertools.pairwise((0, *cuts))):
        raise source.refuse("cuts between classes don't increase, or are too many", "REQ-ENC-020")
    begins = range(0, base.size, _PART)
    sorts = [_sort(base[begin : begin + _PART], lane) for begin in begins]
    counts = np.array([part_counts for _, part_counts in sorts]).reshape(-1, 256)
    sorted_parts = [np.empty(order.size, lane.words) for order, _ in sorts]
    for spans in _spans(counts, cuts):
        steps = np.empty(sum(span.stop - span.start for span in spans), lane.words)
        take_steps(source, steps)
        begin = 0
        for part, span in zip(sorted_parts, spans, strict=True):
            end = begin + span.stop - span.start
            part[span] = steps[begin:end]
            begin = end
    for begin, part, (order, _) in zip(begins, sorted_parts, sorts, strict=True):
        steps = np.empty_like(part)
        steps[order] = part
        out[begin : begin + _PART] = apply_steps(steps, base[begin : begin + _PART], lane)


def _sort(base: Words, lane: Lane) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the order of the lanes by key, stable, and the number of lanes with each key."""
    keys = _keys(base, lane)
    order = np.argsort(keys, kind="stable")
    return order, np.diff(np.searchsorted(keys[order], np.arange(257)))


def _spans(counts: NDArray[np.intp], cuts: list[int]) -> Iterator[list[slice]]:
    """Yield the spans of each class in the sorted parts; a class without lanes is left out."""
    ends = np.concatenate(
        (np.zeros((counts.shape[0], 1), np.intp), np.cumsum(counts, axis=1)), axis=1
    )
    for low, high in itertools.pairwise((0, *cuts, 256)):
        spans = [slice(begin, end) for begin, end in ends[:, [low, high]].tolist()]
        if any(span.start < span.stop for span in spans):
            yield spans


def _keys(base: Words, lane: Lane) -> Bytes:
    """Return the eight bits below each lane's top bit; one-byte lanes get a low zero bit."""
    if lane.nbytes == 1:
        return (base << 1).astype(np.uint8)
    return (base >> (8 * lane.nbytes - 9)).astype(np.uint8)


def _choose_cuts(counts: NDArray[np.intp]) -> list[int]:
    least = max(_LEAST, int(counts.sum()) // _LEAST_PART)
    cuts: list[int] = []
    size = 0
    # From the highest exponents, which have the most lanes and the smallest changes.
    for key in range(255, 0, -1):
        size += int(counts[key])
        if size >= least and len(cuts) < _CLASSES - 1:
            cuts.insert(0, key)
            size = 0
    if cuts and size + counts[0] < least:
        del cuts[0]
    return cuts
