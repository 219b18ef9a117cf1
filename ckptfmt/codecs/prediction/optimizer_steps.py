"""One step of an optimizer, as a fixed order of IEEE operations: the gradient from the moments, all else from it.

Only + - * / and square roots of numpy, each correctly rounded, in the order that the specification gives. Overflow
and NaN are ordinary here: a prediction may be useless, never an error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ckptfmt.codecs.prediction.floats import Floats, from_low, multiply_add, round_low, without_nan
from ckptfmt.codecs.prediction.rule import COPY, FIRST_MOMENT, LOW, Rule

#: Contents by role: binary32, or the bits of a copy.
Arrays: TypeAlias = Mapping[str, NDArray[Any]]


def needed_bases(rule: Rule, role: str) -> frozenset[str]:
    """Return the roles whose bases the block of a role is decoded from, whatever encoding it has.

    >>> sorted(needed_bases(Rule(kind="adam"), "exp_avg_sq")), sorted(needed_bases(Rule(kind="adam"), "weight"))
    (['exp_avg', 'exp_avg_sq'], ['weight'])
    """
    if rule.kind == "cast" or role == COPY:
        return frozenset()
    first = FIRST_MOMENT[rule.kind]
    gradient = frozenset({first, "weight"} if rule.l2 else {first})
    if role in (first, "exp_avg_sq") or rule.nesterov:
        return gradient | {role}
    return frozenset({role})


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """The arithmetic of a rule.

    Attributes:
        rule: the rule.
    """

    rule: Rule

    def predict(self, role: str, bases: Arrays, news: Arrays) -> NDArray[Any]:
        """Return the prediction for a role, from bases of all roles and news of the earlier ones.

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
                # Not numpy's maximum: of two zeros it returns either.
                found = np.where(news["exp_avg_sq"] > bases[role], news["exp_avg_sq"], bases[role])
            elif rule.kind == "adam":
                found = self._adam_weight(bases, news)
            else:
                found = self._sgd_weight(bases, news)
            return without_nan(found, bases[role])

    def moment(self, bases: Arrays, gradient: Floats) -> Floats:
        """Return the first moment after a step along `gradient`, which has weight decay in it already.

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
        """Return the gradient that the first moments show, with weight decay in it.

        A function of the new first moment, its base, the rule, and the base of the weight where the rule has l2.

        Spec: REQ-PRE-009, REQ-PRE-010.
        """
        if self.rule.gradient in LOW:
            return self.whole_gradient(bases, self.low_gradient(bases, news))
        return self.estimate(bases, news)

    def low_gradient(self, bases: Arrays, news: Arrays) -> NDArray[np.uint16]:
        """Return the gradient as it was before weight decay and clipping, as bits of its own precision.

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
        """Return the gradient that went into the first moment: clipped, and with weight decay.

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
        """Return the gradient that the first moments show, in binary32.

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

    def _multiply_add(self, factor: Any, values: Any, addend: Any) -> Floats:  # noqa: ANN401 - array or scalar
        return multiply_add(factor, values, addend, separate=self.rule.arithmetic == "separate")
