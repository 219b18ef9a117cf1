"""One step of an optimizer in a fixed order of IEEE operations: the gradient, then the new state.

Only numpy's + - * / and square root are used, each correctly rounded, in the specification's order.
Overflow and NaN are normal here: they make a prediction useless, and raise no error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ckptfmt.codecs.rule import COPY, FIRST_MOMENT, LOW, Rule
from ckptfmt.errors import Code, err

#: Numbers of binary32, and intermediate results of binary64.
Floats: TypeAlias = NDArray[np.float32]
Doubles: TypeAlias = NDArray[np.float64]

_QUIET_NAN: Final = {"bfloat16": 0x7FC0, "float16": 0x7E00}
_HALF: Final = np.uint32(0x7FFF)
_ONE: Final = np.uint32(1)
_UPPER: Final = np.uint32(16)


def check_float_environment() -> None:
    """Check that this thread's arithmetic keeps denormals and rounds to nearest, ties to even.

    A library may flush denormals to zero in its thread and in threads started from there. Numpy
    then does the same.

    Raises: StateError(FLOAT_ENVIRONMENT).
    Spec: REQ-PRE-003.
    """
    for factor, values, addend, products, sums in _PROBES:
        # Bits are compared, since a comparison of floats may itself treat a denormal as zero.
        product = np.multiply(values, factor)
        if (product.view(products.dtype) != products).any():
            detail = "denormal numbers are flushed to zero in this thread"
        elif ((product + addend).view(sums.dtype) != sums).any():
            detail = "this thread flushes denormal numbers to zero, or doesn't round to nearest"
        else:
            continue
        raise err(Code.FLOAT_ENVIRONMENT, detail, requirement="REQ-PRE-003")


def _probe(
    digits: int, least: int, words: type[np.unsignedinteger[Any]], floats: str
) -> tuple[NDArray[Any], ...]:
    """Return a factor, values, addends, and the expected bits of the products and of the sums.

    The inputs are given as bits, since this thread's arithmetic is under test. The probes: half of
    the least normal number, plus the same half, is that number. 1 plus half a digit is a tie, and
    rounds to 1. 1 plus three quarters of a digit rounds up.
    """
    width = np.dtype(words).itemsize * 8
    bias = (1 << (width - digits - 2)) - 1
    one = bias << digits
    sign = 1 << (width - 1)
    half = (bias - digits - 1) << digits
    three_quarters = (bias - digits - 1) << digits | 1 << (digits - 1)
    rows = [
        # value, addend, product with 1/2, sum of product and addend
        (least, least >> 1, least >> 1, least),
        (one + (1 << digits), half, one, one),
        (one + (1 << digits), three_quarters, one, one + 1),
        (sign | one + (1 << digits), sign | half, sign | one, sign | one),
        (sign | one + (1 << digits), sign | three_quarters, sign | one, sign | one + 1),
    ]
    values, addend, products, sums = (
        np.array(column * 4, words) for column in zip(*rows, strict=True)
    )
    factor = np.array([bias - 1 << digits], words).view(floats)
    return factor, values.view(floats), addend.view(floats), products, sums


_PROBES: Final = (_probe(23, 1 << 23, np.uint32, "<f4"), _probe(52, 1 << 52, np.uint64, "<f8"))


def bits_of(values: Floats) -> NDArray[np.uint32]:
    """Return the bits of binary32 numbers."""
    return values.view(np.uint32)


def multiply_add(
    factor: Any, values: NDArray[Any], addend: NDArray[Any], *, separate: bool
) -> Floats:
    """Return factor * values + addend in binary32, rounded once, or twice if `separate`.

    Args:
        factor: scalar or array.
        values: array.
        addend: array, possibly an unrounded one of binary64.
        separate: whether to round the product to binary32 first.

    Spec: REQ-PRE-002.
    """
    if separate:
        return np.asarray(factor * values + addend, np.float32)
    exact: Doubles = values.astype(np.float64)
    exact *= factor
    exact += addend
    return exact.astype(np.float32)


def round_low(values: Floats, precision: str) -> NDArray[np.uint16]:
    """Return the bits of numbers rounded to ``bfloat16`` or ``float16``, to nearest, ties to even.

    Spec: REQ-PRE-004.
    """
    if precision == "float16":
        low = values.astype(np.float16).view(np.uint16)
    else:
        bits = bits_of(values)
        rounded = bits >> _UPPER
        rounded &= _ONE
        rounded += _HALF
        rounded += bits
        rounded >>= _UPPER
        low = rounded.astype(np.uint16)
    unordered = np.isnan(values)
    if unordered.any():
        # The payload of a NaN depends on the machine, and rounding a NaN may give infinity.
        low[unordered] = _QUIET_NAN[precision]
    return low


def from_low(low: NDArray[np.uint16], precision: str) -> Floats:
    """Return numbers of `precision`, given as bits, in binary32; exact."""
    if precision == "float16":
        return low.view(np.float16).astype(np.float32)
    wide = low.astype(np.uint32)
    wide <<= _UPPER
    return wide.view(np.float32)


def without_nan(predicted: Floats, base: Floats) -> Floats:
    """Return `predicted` with each NaN replaced by the bits of `base`. May change `predicted`.

    Spec: REQ-PRE-005.
    """
    unordered = np.isnan(predicted)
    if unordered.any():
        bits_of(predicted)[unordered] = bits_of(base)[unordered]
    return predicted


#: Contents by role: binary32 numbers, or the bits of a copy.
Arrays: TypeAlias = Mapping[str, NDArray[Any]]


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """The arithmetic of a rule.

    Attributes:
        rule: rule to compute with.
    """

    rule: Rule

    def predict(self, role: str, bases: Arrays, news: Arrays) -> NDArray[Any]:
        """Return the prediction for a role, from all bases and the news of earlier roles.

        Spec: REQ-PRE-009 to REQ-PRE-012, REQ-PRE-017.
        """
        rule = self.rule
        with np.errstate(all="ignore"):
            if role == COPY or (rule.kind, role) == ("cast", "weight"):
                return round_low(news["master" if rule.kind == "cast" else "weight"], rule.copy)
            if role == FIRST_MOMENT[rule.kind]:
                found = self.moment(bases, np.zeros_like(bases[role]))
            elif role == "exp_avg_sq":
                found = self._second_moment(bases[role], self.gradient(bases, news))
            elif role == "max_exp_avg_sq":
                # Not numpy's maximum, which returns either of two zeros.
                found = np.where(news["exp_avg_sq"] > bases[role], news["exp_avg_sq"], bases[role])
            elif rule.kind == "adam":
                found = self._adam_weight(bases, news)
            else:
                found = self._sgd_weight(bases, news)
            return without_nan(found, bases[role])

    def moment(self, bases: Arrays, gradient: Floats) -> Floats:
        """Return the first moment after a step along `gradient`, which includes weight decay.

        Spec: REQ-PRE-011.
        """
        rule = self.rule
        base = bases[FIRST_MOMENT[rule.kind]]
        with np.errstate(all="ignore"):
            gain = self._scalar(rule.gain)
            if rule.moment == "sum":
                decayed = self._scalar(rule.decay) * base
                found = self._multiply_add(gain, gradient, decayed)
            elif abs(float(gain)) < 0.5:
                found = self._multiply_add(gain, gradient - base, base)
            else:
                found = self._multiply_add(gain - gain.dtype.type(1), gradient - base, gradient)
        return found

    def gradient(self, bases: Arrays, news: Arrays) -> Floats:
        """Return the gradient behind the first moments, including weight decay.

        The result depends on the new first moment, its base, the rule, and, for a rule with l2, the
        base of the weight.

        Spec: REQ-PRE-009, REQ-PRE-010.
        """
        if self.rule.gradient in LOW:
            return self.whole_gradient(bases, self.low_gradient(bases, news))
        return self.estimate(bases, news)

    def low_gradient(self, bases: Arrays, news: Arrays) -> NDArray[np.uint16]:
        """Return the gradient before weight decay and clipping, as bits of its own precision.

        Spec: REQ-PRE-010.
        """
        rule = self.rule
        found = self.estimate(bases, news)
        with np.errstate(all="ignore"):
            if rule.l2:
                found -= np.float32(rule.l2) * bases["weight"]
            if rule.clip != 1:
                found /= np.float32(rule.clip)
            return round_low(found, rule.gradient)

    def whole_gradient(self, bases: Arrays, low: NDArray[np.uint16]) -> Floats:
        """Return the gradient that entered the first moment: clipped, and with weight decay.

        Spec: REQ-PRE-010.
        """
        rule = self.rule
        found = from_low(low, rule.gradient)
        with np.errstate(all="ignore"):
            if rule.clip != 1:
                found *= np.float32(rule.clip)
            if rule.l2:
                found = self._multiply_add(np.float32(rule.l2), bases["weight"], found)
        return found

    def estimate(self, bases: Arrays, news: Arrays) -> Floats:
        """Return the gradient computed from old and new first moment, in binary32.

        Spec: REQ-PRE-009.
        """
        rule = self.rule
        role = FIRST_MOMENT[rule.kind]
        base = bases[role]
        with np.errstate(all="ignore"):
            gain = np.float32(rule.gain)
            if rule.moment == "lerp":
                found: Floats = news[role] - base
                found /= gain
                found += base
            else:
                found = news[role] - np.float32(rule.decay) * base
                found /= gain
            return found

    def _second_moment(self, base: Floats, gradient: Floats) -> Floats:
        gain = self._scalar(self.rule.square_gain)
        decayed = self._scalar(self.rule.square_decay) * base
        if self.rule.square == "gain_first":
            return self._multiply_add(gain * gradient, gradient, decayed)
        wide: NDArray[Any] = gradient.astype(gain.dtype, copy=False)
        return self._multiply_add(gain, wide * wide, decayed)

    def _adam_weight(self, bases: Arrays, news: Arrays) -> Floats:
        rule = self.rule
        weight = bases["weight"]
        if rule.shrink != 1:
            weight = np.asarray(self._scalar(rule.shrink) * weight, np.float32)
        root: Floats = np.sqrt(news["max_exp_avg_sq" if rule.amsgrad else "exp_avg_sq"])
        root /= np.float32(rule.bias)
        root += np.float32(rule.eps)
        step_size = np.float32(rule.step_size)
        if rule.update == "product":
            return np.asarray(weight - step_size * news["exp_avg"] / root, np.float32)
        return self._multiply_add(-step_size, news["exp_avg"] / root, weight)

    def _sgd_weight(self, bases: Arrays, news: Arrays) -> Floats:
        rule = self.rule
        along = news["momentum_buffer"]
        if rule.nesterov:
            along = self._multiply_add(np.float32(rule.decay), along, self.gradient(bases, news))
        return self._multiply_add(-np.float32(rule.step_size), along, bases["weight"])

    def _scalar(self, value: float) -> np.float32 | np.float64:
        return np.float64(value) if self.rule.arithmetic == "double" else np.float32(value)

    def _multiply_add(self, factor: Any, values: Any, addend: Any) -> Floats:
        return multiply_add(factor, values, addend, separate=self.rule.arithmetic == "separate")
