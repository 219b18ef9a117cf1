"""Loads into another layout: every byte of weights and optimizer (S0), the order of samples (S1).

Another layout sums in another order, so the last bits of the continued run differ. The loaded state
doesn't differ.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ckptfmt_conformance.trajectories.data import order_of
from ckptfmt_conformance.trajectories.gang_world import world
from ckptfmt_conformance.trajectories.job import TrainingJob
from ckptfmt_conformance.trajectories.ledger import Comparison, Facts, facts_of
from ckptfmt_conformance.trajectories.protocol import FAIL, PASS, Cell, CellResult, Checkpointing

__all__ = ["play_layouts"]


def play_layouts(
    cell: Cell, checkpointing: Checkpointing, directory: Path, rank: int
) -> CellResult:
    """Run a cell with a save in one layout and a load into another."""
    before, after = cell.worlds
    said: str | None = None
    if rank < before:
        with world(rank, before, directory / "meeting-0", wrapped=True):
            _save(cell, checkpointing, directory)
    if rank < after:
        with world(rank, after, directory / "meeting-1", wrapped=True):
            said = _load(cell, checkpointing, directory)
    return CellResult(status=FAIL if said else PASS, divergence=said)


def _save(cell: Cell, checkpointing: Checkpointing, directory: Path) -> None:
    job = TrainingJob(cell.recipe, seed=1)
    while job.position < cell.cuts[0]:
        job.advance()
    facts = _whole_facts(job)
    if job.rank == 0:
        torch.save(facts, directory / "expected.pt")
    checkpointing.save(str(directory / "cut-0"), _state_of(job), job.position[0])


def _load(cell: Cell, checkpointing: Checkpointing, directory: Path) -> str | None:
    job = TrainingJob(cell.target or cell.recipe, seed=1001)
    checkpointing.load(str(directory / "cut-0"), _state_of(job))
    return _compare_samples(job) if cell.claim == "S1" else _compare_bytes(job, cell, directory)


def _state_of(job: TrainingJob) -> dict[str, object]:
    """Return the state without the accumulation window.

    The window is empty here, and its form depends on the layout.
    """
    return {name: value for name, value in job.state().items() if name != "window"}


def _whole_facts(job: TrainingJob) -> Facts:
    """Return weights, optimizer and counters as whole tensors.

    Every process calls this function.
    """
    facts = facts_of("progress", job.progress.state_dict()) | facts_of(
        "cursor", job.cursor.state_dict()
    )
    names = {id(parameter): name for name, parameter in job.core.named_parameters()}
    facts |= facts_of("scheduler", job.scheduler.state_dict())
    for name, parameter in job.core.named_parameters():
        facts |= facts_of(f"parameter/{name}", _whole(parameter))
    for group in job.optimizer.param_groups:
        for parameter in group["params"]:
            for key, value in job.optimizer.state.get(parameter, {}).items():
                facts |= facts_of(f"moment/{key}/{names[id(parameter)]}", _whole(value))
    return facts


def _whole(value: Any) -> Any:
    return value.detach().full_tensor() if hasattr(value, "full_tensor") else value


def _compare_bytes(job: TrainingJob, cell: Cell, directory: Path) -> str | None:
    expected = torch.load(directory / "expected.pt", weights_only=True)
    comparison = Comparison({cell.cuts[0]: expected})
    facts = _whole_facts(job)
    if job.position != cell.cuts[0]:
        return (
            f"step {job.position[0]} came back, should be {cell.cuts[0][0]}: most likely not"
            " restored: the counters"
        )
    comparison.look(cell.cuts[0], facts, loads=1, at_load=True)
    return comparison.explain()


def _compare_samples(job: TrainingJob) -> str | None:
    """Take three steps, and compare the samples of all processes with the order of the data."""
    begin: int = job.cursor.consumed
    taken: list[int] = []
    for _ in range(3):
        job.advance()
        of_all: list[Any] = [None] * job.world_size
        dist.all_gather_object(of_all, job.samples)
        taken += [sample for own in of_all[: job.replicas] for sample in own]
    count = job.cursor.samples
    seed = job.cursor.seed
    due = [
        order_of(count, seed, at // count)[at % count] for at in range(begin, begin + len(taken))
    ]
    wrong = [
        number
        for number, (ours, theirs) in enumerate(zip(due, taken, strict=True))
        if ours != theirs
    ]
    if not begin or wrong:
        return (
            f"after {begin} samples came {taken[:8]}, should be {due[:8]}; most likely not"
            " restored: the data cursor"
        )
    return None
