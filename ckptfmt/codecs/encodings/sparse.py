"""Sparse steps: the set of what changed, signs, and sets of those that went one further."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from ckptfmt.codecs.encodings.planes import Words, dump_plane, dump_planes, take_plane, take_planes
from ckptfmt.codecs.encodings.sets import Places, dump_set, take_set
from ckptfmt.codecs.encodings.strings import Source, pack_bits

_LEVELS: Final = 15
#: Fewer than these are worth no frame: a set costs them less than its histogram.
_FEW: Final = 512


def dump_changes(places: Places, count: int, steps: Words) -> bytes:
    """Return which lanes changed, and their steps.

    Args:
        places: of the lanes that changed.
        count: how many lanes there are.
        steps: of those that changed, zigzagged; none is 0.
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


def take_changes(source: Source, count: int, words: np.dtype[Any]) -> tuple[Places, Words]:
    """Return the places of what changed among `count` lanes, and the steps there."""
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
        reached = reached[take_set(source, reached.size)] if level else take_set(source, places.size)
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
