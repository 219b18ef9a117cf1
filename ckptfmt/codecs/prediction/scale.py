"""The factor that gradients of 16 bits were multiplied by, found from what they became.

Numbers of few digits times one factor: any two of them know the factor but for a ratio of small integers, and a few
dozen leave one. It is found up to a power of two, which only matters where the precision has a narrow range.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from ckptfmt.codecs.prediction.floats import Doubles

#: Significant binary digits of each precision.
DIGITS: Final = {"bfloat16": 8, "float16": 11}

#: Numbers that say which factors there may be, and how many others a factor has to fit at first.
_REFERENCES: Final = 6
_WITNESSES: Final = 48
#: Share of the numbers that have to fit.
_FITTING: Final = 0.9
#: Most factors that are returned: neighbours in binary32.
_NEIGHBOURS: Final = 6


def factor_candidates(values: Doubles, tolerance: Doubles, digits: int) -> list[float]:
    """Return factors in [1, 2), of binary32, that may have made `values` from numbers of `digits` binary digits.

    Args:
        values: nonzero and finite, those that are known best in front.
        tolerance: by how much each may be off, relative to it.
        digits: significant binary digits before the factor.
    """
    if values.size <= _REFERENCES:
        return []
    mantissas = np.frexp(np.abs(values))[0] * 2
    steps = np.arange(1 << (digits - 1), 1 << digits, dtype=np.float64) / (1 << (digits - 1))
    factors = (mantissas[:_REFERENCES, None] / steps).ravel()
    factors = np.concatenate(([1.0], np.where(factors < 1, factors * 2, factors)))
    slack = np.concatenate(([0.0], np.repeat(tolerance[:_REFERENCES], steps.size)))
    few = slice(_REFERENCES, _REFERENCES + _WITNESSES)
    fits = _fits(mantissas[few], tolerance[few] + slack[:, None], factors[:, None], digits).mean(axis=1)
    found: list[float] = []
    for index in np.argsort(-fits, kind="stable")[:_REFERENCES]:
        if fits[index] < _FITTING:
            break
        within = _fits(mantissas, tolerance + slack[index], factors[index], digits)
        if within.mean() >= _FITTING:
            if index == 0:
                found.append(1.0)
            found += _refined(mantissas[within], tolerance[within], float(factors[index]), digits)
    return list(dict.fromkeys(found))


def _whole_steps(mantissas: Doubles, factor: Doubles | float, digits: int) -> Doubles:
    """Return mantissas without the factor, in units of the last digit."""
    quotient = mantissas / factor
    return np.asarray(np.where(quotient < 1, quotient * 2, quotient) * (1 << (digits - 1)))


def _fits(mantissas: Doubles, tolerance: Doubles, factor: Doubles | float, digits: int) -> NDArray[np.bool_]:
    steps = _whole_steps(mantissas, factor, digits)
    return np.asarray(np.abs(steps - np.rint(steps)) <= steps * tolerance)


def _refined(mantissas: Doubles, tolerance: Doubles, factor: float, digits: int) -> list[float]:
    """Return the few numbers of binary32 that fit all mantissas as well as `factor` does, the likeliest first."""
    steps = _whole_steps(mantissas, factor, digits)
    each = factor * steps / np.rint(steps)
    middle = np.float32((np.max(each * (1 - tolerance)) + np.min(each * (1 + tolerance))) / 2)
    found = [middle]
    above = below = middle
    for _ in range(_NEIGHBOURS // 2):
        above, below = np.nextafter(above, np.float32(4)), np.nextafter(below, np.float32(0))
        found += [above, below]
    return [float(number) for number in found]
