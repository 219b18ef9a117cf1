"""Checks of a cell's coverage, without which a green result would mean little."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

import torch

from ckptfmt_conformance.trajectories.ledger import Facts, Position, differ
from ckptfmt_conformance.trajectories.protocol import Cell
from ckptfmt_conformance.trajectories.recipes import STEPS, Recipe

__all__ = ["find_vacuity"]


def find_vacuity(cell: Cell, reference: Mapping[Position, Facts]) -> str | None:
    """Return the part that a cell fails to exercise; None if the cell exercises all.

    Args:
        reference: the facts of the uninterrupted run.
    """
    recipe = cell.recipe
    last = (STEPS, 0)
    begin = cell.cuts[0]
    if not begin < last:
        return "it's interrupted after its last step"
    for name, check in _CHECKS.items():
        if not check(recipe, reference, begin):
            return name
    return None


def _moves(
    reference: Mapping[Position, Facts], begin: Position, prefix: str, ending: str = ""
) -> bool:
    """Return whether any fact of a kind changes between an interruption and the end."""
    first = reference[begin]
    last = reference[STEPS, 0]
    names = [name for name in last if name.startswith(prefix) and name.endswith(ending)]
    return any(differ(first.get(name), last[name]) for name in names)


def _always(reference: Mapping[Position, Facts], prefix: str) -> bool:
    """Return whether a kind of fact changes with each step."""
    steps = [reference[step, 0] for step in range(STEPS + 1)]
    for before, after in itertools.pairwise(steps):
        names = [name for name in after if name.startswith(prefix)]
        if not names or not any(differ(before.get(name), after[name]) for name in names):
            return False
    return True


def _check_streams(recipe: Recipe, reference: Mapping[Position, Facts], begin: Position) -> bool:
    del begin
    elastic = recipe.layout == "elastic"
    return elastic or all(
        _always(reference, f"rng/{name}") for name in ("python", "numpy", "torch", "augment")
    )


def _check_rate(recipe: Recipe, reference: Mapping[Position, Facts], begin: Position) -> bool:
    del recipe
    return _moves(reference, begin, "group/0/lr")


def _check_epochs(recipe: Recipe, reference: Mapping[Position, Facts], begin: Position) -> bool:
    del begin
    last = reference[STEPS, 0]
    # Runs with a loader have a separate check.
    return recipe.layout == "elastic" or bool(recipe.data) or last["cursor/epoch"] == "2"


def _check_buffers(recipe: Recipe, reference: Mapping[Position, Facts], begin: Position) -> bool:
    kind = {
        "mlp": "running_mean",
        "cnn": "running_var",
        "cnn-bare": "running_var",
        "moe": ".bias",
    }.get(recipe.model)
    return kind is None or _moves(reference, begin, "buffer/", kind)


def _check_scaler(recipe: Recipe, reference: Mapping[Position, Facts], begin: Position) -> bool:
    del begin
    if recipe.precision != "fp16":
        return True
    name = "trainer/scale/scale" if recipe.layout == "elastic" else "scaler/scale"
    scales = [float.fromhex(str(reference[step, 0][name])) for step in range(STEPS + 1)]
    changes = [after - before for before, after in itertools.pairwise(scales)]
    return min(changes) < 0 < max(changes) and reference[STEPS, 0]["progress/skipped"] != "0"


def _check_moments(recipe: Recipe, reference: Mapping[Position, Facts], begin: Position) -> bool:
    del recipe
    return _moves(reference, begin, "moment/")


def _check_finite(recipe: Recipe, reference: Mapping[Position, Facts], begin: Position) -> bool:
    del recipe, begin
    facts = reference[STEPS, 0].items()
    weights = [
        fact
        for name, fact in facts
        if name.startswith("parameter/") and isinstance(fact, torch.Tensor)
    ]
    return bool(weights) and all(bool(torch.isfinite(weight).all()) for weight in weights)


def _check_averages(recipe: Recipe, reference: Mapping[Position, Facts], begin: Position) -> bool:
    return not recipe.averaged or _moves(reference, begin, "ema/")


_CHECKS: dict[str, Callable[[Recipe, Mapping[Position, Facts], Position], bool]] = {
    "a random-number stream isn't drawn from in every step": _check_streams,
    "the learning rate is constant after the interruption": _check_rate,
    "the data isn't gone through twice": _check_epochs,
    "the buffers don't move": _check_buffers,
    "the loss scale doesn't both shrink and grow": _check_scaler,
    "the optimizer's state doesn't move": _check_moments,
    "the averages don't move": _check_averages,
    "the weights aren't finite in the end": _check_finite,
}
