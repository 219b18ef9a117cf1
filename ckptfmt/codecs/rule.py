"""The rules of prediction: the arithmetic and the numbers of one optimizer step. Spec: page 56."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np

from ckptfmt import limits
from ckptfmt.documents.tree import InlineArray, dump_tree, parse_tree
from ckptfmt.errors import CkptError, Code, err

#: Precisions with 16 bits.
LOW: Final = ("bfloat16", "float16")
#: Precisions of the gradient.
GRADIENTS: Final = ("float32", *LOW)
#: The role that is predicted from the gradient alone, by kind.
FIRST_MOMENT: Final = {"adam": "exp_avg", "sgd": "momentum_buffer"}
#: The role of a rounded copy of the weight.
COPY: Final = "copy"
#: Longest dump of a rule in bytes; a rule has some 20 short values.
RULE_NBYTES: Final = 4096

#: Allowed values of each member with words, by kind.
_WORDS: Final[dict[str, dict[str, tuple[str, ...]]]] = {
    "adam": {
        "gradient": GRADIENTS,
        "arithmetic": ("separate", "fused", "double"),
        "moment": ("lerp", "sum"),
        "square": ("gain_first", "gain_last"),
        "update": ("product", "quotient"),
        "copy": ("", *LOW),
    },
    "sgd": {"gradient": GRADIENTS, "arithmetic": ("separate", "fused"), "copy": ("", *LOW)},
    "cast": {"copy": LOW},
}
_FLAGS: Final = {"adam": ("amsgrad",), "sgd": ("nesterov",), "cast": ()}
_SCALARS: Final = {
    "adam": (
        "clip", "l2", "decay", "gain", "square_decay", "square_gain", "shrink", "step_size", "bias",
        "eps",
    ),
    "sgd": ("clip", "l2", "decay", "gain", "step_size"),
    "cast": (),
}  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The rule by which a decoder computes a group's new state from the base and the gradient.

    A member that a kind doesn't have keeps its default, and isn't stored.

    Attributes:
        kind: ``adam``, ``sgd`` or ``cast``.
        gradient: precision of the gradient before clipping.
        arithmetic: ``separate`` rounds after each operation; ``fused`` doesn't round a product
            before the sum; ``double`` computes the moments in binary64 and rounds at the end.
        moment: form of the first moment's update: ``lerp``, or ``sum`` of both shares.
        square: place of the gain: at the first factor of the gradient's square, or at the square.
        update: place of the step size: at the first moment before the division, or at the quotient.
        copy: precision of the weight's rounded copy in the group; empty without a copy.
        amsgrad: whether a maximum of the second moment is kept and used for the weight.
        nesterov: whether the weight moves along both gradient and momentum.
        clip: factor of the gradient, by clipping or by a loss scale.
        l2: factor of the weight in the gradient; 0 without such a term.
        decay, gain: factors of the old first moment and of the gradient in the new first moment.
        square_decay, square_gain: the same for the second moment.
        shrink: factor of the weight, by decoupled weight decay.
        step_size: learning rate, divided by the first moment's bias correction if there is one.
        bias: square root of the second moment's bias correction.
        eps: addend of the second moment's square root.
    """

    kind: str
    gradient: str = "float32"
    arithmetic: str = "fused"
    moment: str = "sum"
    square: str = "gain_first"
    update: str = "product"
    copy: str = ""
    amsgrad: bool = False
    nesterov: bool = False
    clip: float = 1.0
    l2: float = 0.0
    decay: float = 0.0
    gain: float = 1.0
    square_decay: float = 0.0
    square_gain: float = 1.0
    shrink: float = 1.0
    step_size: float = 0.0
    bias: float = 1.0
    eps: float = 0.0

    def dump(self) -> bytes:
        """Return the bytes of the rule, a tree.

        Spec: REQ-PRE-006.
        """
        members = ("kind", *_WORDS[self.kind], *_FLAGS[self.kind], *_SCALARS[self.kind])
        return dump_tree({name: getattr(self, name) for name in members}, where="rule")

    @classmethod
    def parse(cls, content: bytes, where: str) -> Rule:
        """Return the rule that `content` holds.

        Raises: FormatError(ENCODED_FORM).
        Spec: REQ-PRE-006, REQ-PRE-007, REQ-PRE-008.
        """
        if len(content) > RULE_NBYTES:
            raise _refuse(f"a rule of {len(content)} bytes", where, "REQ-PRE-006")
        try:
            members = parse_tree(content, where=where)
        except CkptError as error:
            raise _refuse(f"a rule isn't a tree: {error.detail}", where, "REQ-PRE-006") from error
        _check(members, where)
        rule = cls(**members)
        if rule.dump() != content:
            raise _refuse("a rule's members aren't in their order", where, "REQ-PRE-006")
        return rule


def roles(rule: Rule) -> tuple[str, ...]:
    """Return the roles of a group's members, in decoding order.

    Spec: REQ-PRE-001.

    >>> roles(Rule(kind="adam", amsgrad=True))
    ('exp_avg', 'exp_avg_sq', 'max_exp_avg_sq', 'weight')
    """
    if rule.kind == "cast":
        return ("master", "weight")
    last = (COPY,) if rule.copy else ()
    if rule.kind == "sgd":
        return ("momentum_buffer", "weight", *last)
    return (
        "exp_avg",
        "exp_avg_sq",
        *(("max_exp_avg_sq",) if rule.amsgrad else ()),
        "weight",
        *last,
    )


def role_dtype(rule: Rule, role: str) -> str:
    """Return the dtype of the member with a role."""
    return rule.copy if role == COPY or (rule.kind, role) == ("cast", "weight") else "float32"


def _check(members: Any, where: str) -> None:
    if (
        type(members) is not dict
        or type(members.get("kind")) is not str
        or members["kind"] not in _WORDS
    ):
        raise _refuse("a rule isn't a dict with a known kind", where, "REQ-PRE-006")
    kind = members["kind"]
    expected = {"kind", *_WORDS[kind], *_FLAGS[kind], *_SCALARS[kind]}
    if set(members) != expected:
        raise _refuse(
            f"members {sorted(map(str, set(members) ^ expected))} are missing or unknown",
            where,
            "REQ-PRE-006",
        )
    for name, values in _WORDS[kind].items():
        if members[name] not in values:
            raise _refuse(f"{name} isn't one of {values}", where, "REQ-PRE-007")
    for name in _FLAGS[kind]:
        if type(members[name]) is not bool:
            raise _refuse(f"{name} isn't true or false", where, "REQ-PRE-006")
    for name in _SCALARS[kind]:
        if type(members[name]) is not float or not math.isfinite(members[name]):
            raise _refuse(f"{name} isn't a finite float", where, "REQ-PRE-008")


def _refuse(detail: str, where: str, requirement: str) -> CkptError:
    return err(
        Code.ENCODED_FORM, detail[: limits.NAME_NBYTES], where=where, requirement=requirement
    )


_FLOATS = {"float16": np.float16, "float32": np.float32, "float64": np.float64}


def list_templates(
    kind: str, options: Mapping[str, object], base_options: Mapping[str, object]
) -> list[Rule]:
    """Return rules with all plausible readings of the options, and defaults for the rest.

    A scheduler changes options before or after a step, so that the base's options count too. There
    are no rules if a required number is missing, or if base and new state are more than one step
    apart.
    """
    steps = number_of(options.get("step")), number_of(base_options.get("step"))
    if kind == "adam" and (
        steps[0] is None or steps[0] < 1 or steps[1] not in (None, steps[0], steps[0] - 1)
    ):
        return []
    make = _adam if kind == "adam" else _sgd
    both = [options] if dict(options) == dict(base_options) else [options, base_options]
    found: dict[Rule, None] = {}
    # Any combination of betas and rate, since some schedulers change both, before or after a step.
    for moments, rates in itertools.product(both, both):
        found.update(
            dict.fromkeys(
                make(
                    {
                        **options,
                        **_some(rates, "lr", "weight_decay"),
                        **_some(moments, "betas", "momentum", "dampening"),
                    }
                )
            )
        )
    return list(found)


def _some(options: Mapping[str, object], *names: str) -> dict[str, object]:
    return {name: options[name] for name in names if name in options}


def _adam(options: Mapping[str, object]) -> Iterator[Rule]:
    betas = options.get("betas")
    if not isinstance(betas, list | tuple) or len(betas) != 2:
        return
    numbers = [
        number_of(value)
        for value in (*betas, *map(options.get, ("lr", "eps", "weight_decay", "step")))
    ]
    if None in numbers:
        return
    beta1, beta2, rate, eps, weight_decay, step = (
        float(number) for number in numbers if number is not None
    )
    try:
        corrections = 1 - beta1**step, 1 - beta2**step
        step_size = rate / corrections[0]
        bias = corrections[1] ** 0.5
    except (OverflowError, ZeroDivisionError):
        return
    if isinstance(bias, complex):
        return
    decoupled = options.get("decoupled_weight_decay")
    for apart in (True, False) if decoupled is None and weight_decay else (decoupled is not False,):
        yield Rule(
            kind="adam",
            amsgrad=options.get("amsgrad") is True,
            l2=0.0 if apart else weight_decay,
            decay=beta1,
            gain=1 - beta1,
            square_decay=beta2,
            square_gain=1 - beta2,
            shrink=1 - rate * weight_decay if apart else 1.0,
            step_size=step_size,
            bias=bias,
            eps=eps,
        )


def _sgd(options: Mapping[str, object]) -> Iterator[Rule]:
    numbers = [
        number_of(options.get(name, 0.0))
        for name in ("lr", "momentum", "dampening", "weight_decay")
    ]
    if None in numbers:
        return
    rate, momentum, dampening, weight_decay = (
        float(number) for number in numbers if number is not None
    )
    if not momentum:
        return
    yield Rule(
        kind="sgd",
        nesterov=options.get("nesterov") is True,
        l2=weight_decay,
        decay=momentum,
        gain=1 - dampening,
        step_size=rate,
    )


def number_of(value: object) -> float | None:
    """Return a number from a checkpoint's tree, or from an array of one element; None otherwise."""
    if isinstance(value, InlineArray) and value.dtype in _FLOATS:
        elements = np.frombuffer(value.content, _FLOATS[value.dtype])
        return float(elements[0]) if elements.size == 1 else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
