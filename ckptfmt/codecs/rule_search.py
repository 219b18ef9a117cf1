"""The search for the rule that led from old to new state.

Options give the numbers; samples of the state show the arithmetic and the gradient's precision.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ckptfmt.codecs.optimizer_steps import (
    Doubles,
    Floats,
    Step,
    bits_of,
    check_float_environment,
    round_low,
)
from ckptfmt.codecs.rule import COPY, FIRST_MOMENT, LOW, Rule, list_templates, roles
from ckptfmt.errors import Code, err

#: Number of significant binary digits of each precision.
DIGITS: Final = {"bfloat16": 8, "float16": 11}

#: Numbers of values that suggest factors, and of values that a factor must fit in a first test.
_REFERENCES: Final = 6
_WITNESSES: Final = 48
#: Least share of values that a factor must fit.
_FITTING: Final = 0.9
#: Number of neighbours in binary32 that are returned with a factor.
_NEIGHBOURS: Final = 6


def factor_candidates(values: Doubles, tolerance: Doubles, digits: int) -> list[float]:
    """Return factors in [1, 2), of binary32, that may lead from short numbers to `values`.

    Such a factor is, for example, the loss scale of 16-bit gradients. Two products of one factor
    with numbers of few digits determine the factor up to a ratio of small integers; a few dozen
    products leave a single factor. The factor is found up to a power of two, which matters only for
    precisions with a narrow range.

    Args:
        values: nonzero, finite products, with the most precise first.
        tolerance: largest relative error of each product.
        digits: number of significant binary digits before the multiplication.
    """
    if values.size <= _REFERENCES:
        return []
    mantissas = np.frexp(np.abs(values))[0] * 2
    steps = np.arange(1 << (digits - 1), 1 << digits, dtype=np.float64) / (1 << (digits - 1))
    factors = (mantissas[:_REFERENCES, None] / steps).ravel()
    factors = np.concatenate(([1.0], np.where(factors < 1, factors * 2, factors)))
    slack = np.concatenate(([0.0], np.repeat(tolerance[:_REFERENCES], steps.size)))
    few = slice(_REFERENCES, _REFERENCES + _WITNESSES)
    fits = _fits(mantissas[few], tolerance[few] + slack[:, None], factors[:, None], digits).mean(
        axis=1
    )
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
    """Return mantissas divided by the factor, in units of the last digit."""
    quotient = mantissas / factor
    return np.asarray(np.where(quotient < 1, quotient * 2, quotient) * (1 << (digits - 1)))


def _fits(
    mantissas: Doubles, tolerance: Doubles, factor: Doubles | float, digits: int
) -> NDArray[np.bool_]:
    steps = _whole_steps(mantissas, factor, digits)
    return np.asarray(np.abs(steps - np.rint(steps)) <= steps * tolerance)


def _refined(mantissas: Doubles, tolerance: Doubles, factor: float, digits: int) -> list[float]:
    """Return the few binary32 numbers that fit all mantissas like `factor`, the likeliest first."""
    steps = _whole_steps(mantissas, factor, digits)
    each = factor * steps / np.rint(steps)
    middle = np.float32((np.max(each * (1 - tolerance)) + np.min(each * (1 + tolerance))) / 2)
    found = [middle]
    above = below = middle
    for _ in range(_NEIGHBOURS // 2):
        above = np.nextafter(above, np.float32(4))
        below = np.nextafter(below, np.float32(0))
        found += [above, below]
    return [float(number) for number in found]


#: Base and new content of a member.
Sample: TypeAlias = tuple[memoryview, memoryview]

#: Most elements in a sample, and most elements from which a factor is computed.
_ELEMENTS: Final = 1 << 15
_KNOWN: Final = 1 << 11
_FEWEST: Final = 64
#: Least share of first moments that a low-precision gradient must reproduce bit by bit.
_EXACT: Final = 0.95
#: Least share of a copy that rounding must reproduce.
_COPIED: Final = 0.9
#: Largest cost of the predictions, as a share of the cost of the bases.
_WORTH: Final = 0.5
#: Largest uncertainty of a gradient, in steps of its precision.
_CERTAIN: Final = 1 / 16
#: Relative rounding error of a gradient by a multiplication.
_ROUNDED: Final = 2.0**-24
#: Relative distance of factors that share one scale.
_NEAR: Final = 2.0**-16
#: Exponents of two by which float16 gradients may have been scaled.
_SCALES: Final = range(-40, 25)
#: Possible forms and arithmetics of the first moment.
_MOMENTS: Final = {
    "adam": (
        ("lerp", "fused"),
        ("lerp", "separate"),
        ("sum", "fused"),
        ("sum", "separate"),
        ("sum", "double"),
    ),
    "sgd": (("sum", "fused"), ("sum", "separate")),
}


@dataclasses.dataclass(frozen=True, slots=True)
class _State:
    """Samples of a group as arrays, with the same elements of each member."""

    bases: dict[str, NDArray[Any]]
    news: dict[str, NDArray[Any]]

    def at(self, where: NDArray[np.intp]) -> _State:
        return _State(
            {role: content[where] for role, content in self.bases.items()},
            {role: content[where] for role, content in self.news.items()},
        )


def find_rule(
    kind: str,
    options: Mapping[str, object],
    samples: Mapping[str, Sample],
    *,
    base_options: Mapping[str, object] | None = None,
    hint: Rule | None = None,
) -> Rule | None:
    """Return the rule by which one step led from bases to news, or None if no rule fits.

    Args:
        kind: ``adam``, ``sgd`` or ``cast``.
        options: options of the parameter's group in the new checkpoint; for ``adam`` with the
            number of steps as ``step``.
        samples: base and new content of each role, with the same elements.
        base_options: options in the base: a scheduler may have changed them between step and save.
        hint: rule of another group at the same step; its gradient's precision and factor are tried
            first.

    Raises: StateError(ARGUMENT, FLOAT_ENVIRONMENT).
    """
    check_float_environment()
    state = _state_of(kind, samples)
    if kind == "cast":
        copy = _copy_of(state, "master", "weight")
        return Rule(kind="cast", copy=copy) if copy else None
    best: tuple[float, Rule] | None = None
    templates = list_templates(kind, options, base_options or options)
    for template in templates:
        if not set(roles(template)) <= samples.keys():
            raise err(Code.ARGUMENT, f"a sample of {roles(template)} is needed")
    for moments in dict.fromkeys(map(_without_update, templates)):
        for rule in _with_gradient(moments, state, hint):
            for template in templates:
                if _without_update(template) == moments:
                    found = _with_update(rule, template, state)
                    best = min((best, found), key=lambda each: each[0]) if best else found
    if best is None or best[0] > _WORTH * _cost_of_bases(best[1], state):
        return None
    copy = _copy_of(state, "weight", COPY) if COPY in samples else ""
    return dataclasses.replace(best[1], copy=copy)


# --- samples --------------------------------------------------------------------------------------


def _state_of(kind: str, samples: Mapping[str, Sample]) -> _State:
    low = "weight" if kind == "cast" else COPY
    arrays = [
        {
            role: np.frombuffer(pair[side], np.uint16 if role == low else np.float32)
            for role, pair in samples.items()
        }
        for side in (0, 1)
    ]
    counts = {content.size for contents in arrays for content in contents.values()}
    if len(counts) != 1:
        raise err(Code.ARGUMENT, f"samples have {sorted(counts)} elements")
    count = counts.pop()
    state = _State(*arrays)
    if count <= _ELEMENTS:
        return state
    return state.at(np.linspace(0, count - 1, _ELEMENTS).astype(np.intp))


def _copy_of(state: _State, master: str, copy: str) -> str:
    """Return the precision of a rounded copy; an empty string if `copy` is no such copy."""
    with np.errstate(all="ignore"):
        shares = {
            low: float(np.mean(round_low(state.news[master], low) == state.news[copy]))
            for low in LOW
        }
    best = max(shares, key=lambda low: shares[low])
    return best if shares[best] >= _COPIED else ""


# --- the cost of a rule ---------------------------------------------------------------------------


def _cost(predicted: Floats, new: Floats) -> float:
    """Return about how many bits an element's difference takes."""
    steps = np.abs(_ordered(predicted) - _ordered(new))
    return float(np.mean(np.log2(1 + steps.astype(np.float64))))


def _ordered(values: Floats) -> NDArray[np.int64]:
    bits = bits_of(values).view(np.int32).astype(np.int64)
    return np.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


def _cost_of_bases(rule: Rule, state: _State) -> float:
    later = [role for role in roles(rule) if role not in {COPY, FIRST_MOMENT[rule.kind]}]
    return sum(_cost(state.bases[role], state.news[role]) for role in later)


def _cost_of(rule: Rule, state: _State, *among: str) -> float:
    step = Step(rule)
    return sum(
        _cost(step.predict(role, state.bases, state.news), state.news[role]) for role in among
    )


def _exactness(rule: Rule, state: _State) -> float:
    """Return the share of first moments that the low-precision gradient reproduces bit by bit."""
    step = Step(rule)
    whole = step.whole_gradient(state.bases, step.low_gradient(state.bases, state.news))
    new = state.news[FIRST_MOMENT[rule.kind]]
    return float(np.mean(bits_of(step.moment(state.bases, whole)) == bits_of(new)))


# --- the search -----------------------------------------------------------------------------------


def _without_update(rule: Rule) -> Rule:
    return dataclasses.replace(rule, shrink=1.0, step_size=0.0, bias=1.0, eps=0.0)


def _with_update(rule: Rule, template: Rule, state: _State) -> tuple[float, Rule]:
    """Return cost and rule of the better form of the weight's update, with a template's numbers."""
    found = []
    for update in ("product", "quotient") if rule.kind == "adam" else ("product",):
        moved = dataclasses.replace(
            rule,
            update=update,
            shrink=template.shrink,
            step_size=template.step_size,
            bias=template.bias,
            eps=template.eps,
        )
        later = [role for role in roles(moved) if role not in {COPY, FIRST_MOMENT[rule.kind]}]
        found.append((_cost_of(moved, state, *later), moved))
    return min(found, key=lambda each: each[0])


def _with_gradient(template: Rule, state: _State, hint: Rule | None) -> Iterable[Rule]:
    """Return the rules with the best gradient and moments.

    Where only the weight can distinguish rules, all of them are returned.
    """
    forms = _MOMENTS[template.kind]
    if hint is not None and hint.kind == template.kind:
        forms = ((hint.moment, hint.arithmetic),)
    rules = [
        dataclasses.replace(template, moment=moment, arithmetic=arithmetic)
        for moment, arithmetic in forms
    ]
    low = _low_rules(rules, state, hint)
    # A rule with a binary32 gradient has weight decay in the gradient.
    found = low or [dataclasses.replace(rule, l2=0.0) for rule in rules]
    if template.kind == "sgd":
        return found
    squares = [
        dataclasses.replace(rule, square=square)
        for rule in found
        for square in ("gain_first", "gain_last")
    ]
    return (min(squares, key=lambda rule: _cost_of(rule, state, "exp_avg_sq")),)


def _low_rules(rules: list[Rule], state: _State, hint: Rule | None) -> list[Rule]:
    """Return the rules with a 16-bit gradient that reproduces the first moments; or no rules."""
    if hint is not None and hint.kind == rules[0].kind:
        if hint.gradient not in LOW:
            return []
        hinted = [
            dataclasses.replace(rule, gradient=hint.gradient, clip=hint.clip) for rule in rules
        ]
        if found := [rule for rule in hinted if _exactness(rule, state) >= _EXACT]:
            return found
    for low in LOW:
        found = []
        for moment in dict.fromkeys(rule.moment for rule in rules):
            alike = [
                dataclasses.replace(rule, gradient=low) for rule in rules if rule.moment == moment
            ]
            found += _clipped(alike, state)
        if found:
            return found
    return []


def _clipped(rules: list[Rule], state: _State) -> list[Rule]:
    """Return the rules that reproduce the first moments, each with its best factor."""
    low = rules[0].gradient
    values, tolerance, known = _known_gradients(rules[0], state, DIGITS[low])
    if known.size < _FEWEST:
        return []
    best = slice(0, _KNOWN)
    found: dict[str, tuple[float, Rule]] = {}
    few = state.at(known[best])
    last = 0.0
    scale = 1.0
    for factor in factor_candidates(values[best], tolerance[best], DIGITS[low]):
        if low == "float16" and abs(factor - last) > _NEAR:
            last = factor
            scale = _scale_of(values / factor, tolerance)
        for rule in rules:
            clipped = dataclasses.replace(rule, clip=factor * scale)
            exact = _exactness(clipped, few)
            if exact >= _EXACT and exact > found.get(rule.arithmetic, (0.0,))[0]:
                found[rule.arithmetic] = exact, clipped
    return [rule for _, rule in found.values()]


def _known_gradients(
    rule: Rule, state: _State, digits: int
) -> tuple[Doubles, Doubles, NDArray[np.intp]]:
    """Return gradients before weight decay, their relative errors and their places.

    The gradients with the smallest errors come first.
    """
    role = FIRST_MOMENT[rule.kind]
    base = state.bases[role].astype(np.float64)
    new = state.news[role].astype(np.float64)
    with np.errstate(all="ignore"):
        gain = float(np.float32(rule.gain))
        decay = float(np.float32(rule.decay))
        lerp = rule.moment == "lerp"
        gradient = (new - base) / gain + base if lerp else (new - decay * base) / gain
        off = np.spacing(np.abs(state.news[role])).astype(np.float64) / abs(gain)
        off += 2 * np.spacing(np.abs(gradient).astype(np.float32))
        if not lerp:
            off += np.spacing(np.abs(decay * base).astype(np.float32)) / abs(gain)
        if rule.l2:
            gradient = gradient - float(np.float32(rule.l2)) * state.bases["weight"]
        tolerance = off / np.abs(gradient) + _ROUNDED
        sure = np.isfinite(gradient) & (gradient != 0) & (tolerance < _CERTAIN / (1 << digits))
    where = np.flatnonzero(sure)
    # Sorted by octaves only: the most precise gradients share a mantissa, which fits many factors.
    where = where[np.argsort(np.frexp(tolerance[where])[1], kind="stable")]
    return gradient[where], tolerance[where], where


def _scale_of(values: Doubles, tolerance: Doubles) -> float:
    """Return the power of two with which float16 holds the values best: the middle of the best."""
    every = slice(None, None, max(1, values.size // _KNOWN))
    values = values[every]
    tolerance = tolerance[every]
    shares = []
    with np.errstate(all="ignore"):
        for scale in _SCALES:
            held = np.ldexp(values, -scale)
            off = np.abs(held.astype(np.float16).astype(np.float64) - held)
            shares.append(float(np.mean(off <= np.abs(held) * tolerance)))
    good = [
        scale for scale, share in zip(_SCALES, shares, strict=True) if share >= max(shares) - 1e-3
    ]
    return float(2.0 ** good[len(good) // 2])
