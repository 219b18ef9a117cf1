"""Lanes: a block's bytes as unsigned integers, and the order-preserving integers of which differences are taken."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

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
