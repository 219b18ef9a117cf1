"""Cells with a loader: comparison of the uninterrupted run with the oracle, and coverage checks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ckptfmt_conformance.trajectories.feed import PREFETCH, READ_AHEAD
from ckptfmt_conformance.trajectories.ledger import Facts, Position
from ckptfmt_conformance.trajectories.loaded_job import Seen, make_loaded, plan_for
from ckptfmt_conformance.trajectories.oracle import Drawn, ledger_of, steps_of
from ckptfmt_conformance.trajectories.protocol import Cell, Checkpointing
from ckptfmt_conformance.trajectories.recipes import STEPS, Recipe

__all__ = ["find_data_vacuity", "find_idle_loader", "run_uninterrupted"]


def run_uninterrupted(
    recipe: Recipe, checkpointing: Checkpointing
) -> tuple[dict[Position, Facts], str | None]:
    """Return the state at each position of the uninterrupted run, and its divergence, if any.

    The divergence is the first difference from the oracle. The run has no worker processes, so
    cells with worker processes are compared with a run without any.
    """
    plan = plan_for(recipe)
    due = steps_of(plan, STEPS)
    job = make_loaded(recipe, 1, checkpointing, 0)
    reference = {job.position: job.facts()}
    wrong: str | None = None
    for step in range(STEPS):
        job.advance()
        reference[job.position] = job.facts()
        wrong = wrong or _find_wrong(
            job.seen, job.reading.state_dict(), due[: step + 1], plan.batch
        )
    return reference, wrong


def _find_wrong(
    seen: Seen, cursor: Mapping[str, Any], due: list[list[Drawn]], batch: int
) -> str | None:
    """Return the fault of the last step: samples and weights, the position, or the ledger."""
    done = len(due)
    ledger = cursor["ledger"]
    expected = [
        (drawn.source, drawn.sample, drawn.weight) for drawn in due[-1] if drawn.weight is not None
    ]
    if seen != expected:
        at = next(
            (i for i, pair in enumerate(zip(seen, expected, strict=False)) if pair[0] != pair[1]),
            len(expected),
        )
        return (
            f"step {done} of the uninterrupted run has {seen[at : at + 3]} from its sample {at}"
            " on, "
            f"should have {expected[at : at + 3]}: source, number, weight"
        )
    if (cursor["commit"]["step"], cursor["commit"]["global_pos"]) != (done, done * batch):
        return (
            f"after {done} steps of {batch} the cursor of the uninterrupted run says"
            f" {cursor['commit']}"
        )
    if (ledger["count"], ledger["set_digest"]) != ledger_of(due):
        return (
            f"after {done} steps the ledger of the uninterrupted run isn't that of what it"
            f" consumed: {ledger}"
        )
    return None


def find_data_vacuity(cell: Cell) -> str | None:
    """Return the part of a plan without effect after the first interruption; None for none."""
    plan = plan_for(cell.recipe)
    due = steps_of(plan, STEPS)
    begin = cell.cuts[0][0]
    simpler = {
        "the skips change": dataclasses.replace(plan, skips=()),
        "the later stages change": dataclasses.replace(plan, stages=plan.stages[:1]),
        "the tail changes": dataclasses.replace(plan, tail="carry"),
    }
    for name, other in simpler.items():
        if other != plan and steps_of(other, STEPS)[begin:] == due[begin:]:
            return f"{name} nothing after the interruption"
    firsts: dict[str, set[int]] = {}
    for drawn in (drawn for step in due[max(begin - 1, 0) :] for drawn in step):
        firsts.setdefault(drawn.source, set()).add(drawn.epoch)
    if all(len(epochs) == 1 for epochs in firsts.values()):
        return "no source begins anew at the interruption or after it"
    return None


def find_idle_loader(ahead: int, processes: int) -> str | None:
    """Return a message if a loader hasn't prefetched as many batches as allowed; None otherwise."""
    full = processes * PREFETCH + READ_AHEAD
    return (
        None
        if ahead >= full
        else f"{ahead} batches are fetched ahead at the interruption, should be {full}"
    )
