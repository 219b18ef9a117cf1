"""Which gradient is stored for a first moment: one that gives it back bit by bit, with as few bits as possible.

A decoder knows nothing of this: it takes whatever gradient is stored.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ckptfmt.arithmetic.prediction.floats import Floats, bits_of
from ckptfmt.arithmetic.prediction.rule import FIRST_MOMENT, LOW, Rule
from ckptfmt.arithmetic.prediction.steps import Arrays, Step

__all__ = ["choose_gradient"]

_MANTISSA_BITS: Final = 23
_EXPONENT: Final = np.uint32(0x7F800000)
_HALF_WAY: Final = np.uint32(0x00400000)
#: Attempts at those that the coarsest gradients don't lead to: less coarse ones, and two estimates as they are.
_ATTEMPTS: Final = 3


def choose_gradient(step: Step, bases: Arrays, news: Arrays) -> tuple[NDArray[Any], Floats]:
    """Return what to store as gradient, as bits or as binary32, and the first moment that follows from it.

    A moment is coarser than the gradient behind it, so that many gradients lead to one moment: of those, one whose
    last bits are zeros is stored.
    """
    if step.rule.gradient in LOW:
        low = step.low_gradient(bases, news)
        return low, step.moment(bases, step.whole_gradient(bases, low))
    role = FIRST_MOMENT[step.rule.kind]
    base, new = bases[role], news[role]
    spare = _spare_bits(step.rule.gain)
    with np.errstate(all="ignore"):
        estimate = _estimate(step.rule, base, new)
        found = _coarse(estimate, new, spare + 1)
        moment = step.moment(bases, found)
        left = np.flatnonzero(bits_of(moment) != bits_of(new))
        for attempt in range(_ATTEMPTS):
            if not left.size:
                break
            some, goal = base[left], new[left]
            if attempt == 0:
                tried = _coarse(estimate[left], goal, spare)
            else:
                tried = _estimate(step.rule, some, goal, rounded_once=attempt > 1)
            result = step.moment({role: some}, tried)
            found[left], moment[left] = tried, result
            left = left[bits_of(result) != bits_of(goal)]
    return found, moment


def _spare_bits(gain: float) -> int:
    """Return by how many bits a gradient as large as the moment may be coarser than the moment."""
    return min(_MANTISSA_BITS, math.floor(-math.log2(abs(gain)))) if 0 < abs(gain) < 1 else 0


def _estimate(rule: Rule, base: Floats, new: Floats, *, rounded_once: bool = False) -> Floats:
    """Return the gradient that the moments show, closer than a decoder needs it."""
    change = new.astype(np.float64)
    if rule.moment == "lerp":
        change -= base
    elif rule.arithmetic == "double":
        change -= np.float64(rule.decay) * base
    else:
        change -= np.float32(rule.decay) * base
    change *= 1 / np.float64(rule.gain if rule.arithmetic == "double" else np.float32(rule.gain))
    if rule.moment == "lerp" and rounded_once:
        change += base
    found: Floats = change.astype(np.float32)
    if rule.moment == "lerp" and not rounded_once:
        found += base
    return found


def _coarse(values: Floats, moment: Floats, spare: int) -> Floats:
    """Return numbers rounded to 2^`spare` times the last digit of the moments.

    A large number is added and taken away again, so that only the digits above stay.
    """
    bits = bits_of(moment) & _EXPONENT
    bits += np.uint32(spare << _MANTISSA_BITS)
    bits |= _HALF_WAY
    large = bits.view(np.float32)
    found = values + large
    found -= large
    return found
