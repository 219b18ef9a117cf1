"""Lanes and planes: a block's bytes as unsigned integers, and the bytes of these by significance."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ckptfmt.codecs.encodings.sets import dump_set, take_set
from ckptfmt.codecs.encodings.strings import Bytes, Source, dump_string
from ckptfmt.dtypes import DTYPES

#: Lanes at a time: what is computed on the way stays in the processor's cache.
_PIECE: Final = 1 << 15

#: Unsigned integers of one lane's width.
Words = NDArray[Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Lane:
    """What a block of a dtype is cut into.

    Attributes:
        nbytes: width of a lane in bytes: 1, 2, 4 or 8.
        signed_magnitude: the top bit is a sign and the others a magnitude, as in floats.
    """

    nbytes: int
    signed_magnitude: bool

    @property
    def words(self) -> np.dtype[Any]:
        """The unsigned integers of this width, little-endian."""
        return np.dtype(f"<u{self.nbytes}")


def _lane_of(name: str, nbytes: int) -> Lane:
    if name.startswith("complex"):
        return Lane(nbytes // 2, signed_magnitude=True)
    if name.startswith(("float", "bfloat")) and name not in {"float8_e8m0fnu", "float4_e2m1fn_x2"}:
        return Lane(nbytes, signed_magnitude=True)
    return Lane(nbytes, signed_magnitude=False)


#: The lane of each dtype.
LANES: Final[dict[str, Lane]] = {entry.name: _lane_of(entry.name, entry.nbytes) for entry in DTYPES.values()}


def _ordered(words: Words, lane: Lane) -> NDArray[Any]:
    """Return signed integers in the order of the values that the lanes stand for. It is its own inverse."""
    signed = words.view(np.dtype(f"<i{lane.nbytes}"))
    if not lane.signed_magnitude:
        return signed
    bits = 8 * lane.nbytes - 1
    mask = signed >> bits
    mask &= (1 << bits) - 1
    mask ^= signed
    return mask


def steps_between(content: Words, base: Words, lane: Lane) -> Words:
    """Return the zigzagged steps from base to content: 0 for none, 1 for one down, 2 for one up, modulo 2^bits."""
    steps = np.empty_like(content)
    for piece in _pieces(content.size):
        step = _ordered(content[piece], lane) - _ordered(base[piece], lane)
        folded = step >> (8 * lane.nbytes - 1)
        step <<= 1
        step ^= folded
        steps[piece] = step.view(lane.words)
    return steps


def apply_steps(steps: Words, base: Words, lane: Lane) -> Words:
    """Return the content that `steps_between` was given."""
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


#: The first byte of a plane that is a set of places, and the bytes there.
_SCATTERED: Final = 3
_MOSTLY_ZERO: Final = 0.4
_SAMPLE_NBYTES: Final = 1 << 15
#: Share of what is stored beside a plane that a set has to save: it takes several times as long as a string.
_WORTH: Final = 0.02


def dump_planes(words: Words, plane_count: int | None = None) -> bytes:
    """Return the planes of `words`, the lowest bytes first; those above `plane_count` are known to be zero."""
    out: list[bytes] = []
    for index in range(words.itemsize if plane_count is None else plane_count):
        # Shifted and narrowed: that takes half as long as copying every fourth byte.
        plane = (words >> words.dtype.type(8 * index)).astype(np.uint8)
        out.append(dump_plane(plane, beside_nbytes=sum(map(len, out))))
    return b"".join(out)


def take_planes(source: Source, out: Words, plane_count: int | None = None) -> None:
    """Fill `out` from its planes."""
    count = out.itemsize if plane_count is None else plane_count
    planes = [take_plane(source, out.size) for _ in range(count)]
    out[:] = planes.pop() if planes else 0
    while planes:
        out <<= out.dtype.type(8)
        out |= planes.pop()


def dump_plane(plane: Bytes, *, beside_nbytes: int = 0) -> bytes:
    """Return bytes as a string, or as the set of places that aren't zero and a string of what is there.

    Args:
        plane: the bytes.
        beside_nbytes: how many are stored beside it: where a set would save little of them, a string is as good.
    """
    size = int(np.count_nonzero(plane != 0))
    if not 0 < size < _MOSTLY_ZERO * plane.size:
        return dump_string(plane)
    if plane.size <= 4 * _SAMPLE_NBYTES:
        return min(_dump_scattered(plane), dump_string(plane), key=len)
    # Where most bytes are zero, zstd's coder has too long a bit for each, unless there are runs.
    sample = plane[(plane.size - _SAMPLE_NBYTES) // 2 :][:_SAMPLE_NBYTES]
    saved_nbytes = (len(dump_string(sample)) - len(_dump_scattered(sample))) * plane.size / _SAMPLE_NBYTES
    return _dump_scattered(plane) if saved_nbytes > _WORTH * beside_nbytes else dump_string(plane)


def _dump_scattered(plane: Bytes) -> bytes:
    places = np.flatnonzero(plane != 0)
    return b"".join((bytes((_SCATTERED,)), dump_set(places, plane.size), dump_string(plane[places])))


def take_plane(source: Source, count: int) -> Bytes:
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
