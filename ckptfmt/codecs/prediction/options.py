"""An optimizer's options, as a checkpoint has them, into the numbers that its arithmetic uses."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

import numpy as np

from ckptfmt.codecs.prediction.rule import Rule
from ckptfmt.documents.tree import InlineArray

_FLOATS = {"float16": np.float16, "float32": np.float32, "float64": np.float64}


def list_templates(kind: str, options: Mapping[str, object], base_options: Mapping[str, object]) -> list[Rule]:
    """Return rules with all numbers that the options may mean, and with the defaults for the rest.

    A scheduler changes options before a step or after it, so those of the base count too. Without a number that the
    kind needs there are none, nor where more than one step lies between base and new state.
    """
    steps = number_of(options.get("step")), number_of(base_options.get("step"))
    if kind == "adam" and (steps[0] is None or steps[0] < 1 or steps[1] not in (None, steps[0], steps[0] - 1)):
        return []
    make = _adam if kind == "adam" else _sgd
    both = [options] if dict(options) == dict(base_options) else [options, base_options]
    found: dict[Rule, None] = {}
    # The betas of one and the rate of the other: schedulers step at one place, some change both.
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
    numbers = [number_of(value) for value in (*betas, *map(options.get, ("lr", "eps", "weight_decay", "step")))]
    if None in numbers:
        return
    beta1, beta2, rate, eps, weight_decay, step = (float(number) for number in numbers if number is not None)
    try:
        corrections = 1 - beta1**step, 1 - beta2**step
        step_size, bias = rate / corrections[0], corrections[1] ** 0.5
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
    numbers = [number_of(options.get(name, 0.0)) for name in ("lr", "momentum", "dampening", "weight_decay")]
    if None in numbers:
        return
    rate, momentum, dampening, weight_decay = (float(number) for number in numbers if number is not None)
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
    """Return a number of a checkpoint's tree, also one that was kept as an array of one element."""
    if isinstance(value, InlineArray) and value.dtype in _FLOATS:
        elements = np.frombuffer(value.content, _FLOATS[value.dtype])
        return float(elements[0]) if elements.size == 1 else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
