"""Planes: the bytes of words by significance, each plane a string, or a set of the places that aren't zero."""

from __future__ import annotations

from typing import Final

import numpy as np

from ckptfmt.codecs.encodings.lanes import Words
from ckptfmt.codecs.encodings.sets import dump_set, take_set
from ckptfmt.codecs.encodings.strings import Bytes, Source, dump_string

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
