"""Cells that check a refusal: a run can't be continued with another number of logical workers.

The continued run would take other samples in a step and sum on another tree. It would be another
run without any visible fault.
"""

from __future__ import annotations

from pathlib import Path

from ckptfmt_conformance.protocol import Unsupported
from ckptfmt_conformance.trajectories.elastic_job import ElasticJob
from ckptfmt_conformance.trajectories.gang_world import world
from ckptfmt_conformance.trajectories.protocol import FAIL, PASS, Cell, CellResult, Checkpointing

__all__ = ["play_refusal"]


def play_refusal(
    cell: Cell, checkpointing: Checkpointing, directory: Path, rank: int
) -> CellResult:
    """Run a cell whose checkpoint must load into a job of the same plan only."""
    before, after = cell.worlds
    path = str(directory / "cut-0")
    said: str | None = None
    if rank < before:
        with world(rank, before, directory / "meeting-0"):
            job = ElasticJob(cell.recipe, seed=1)
            while job.position < cell.cuts[0]:
                job.advance()
            checkpointing.save(path, job.state(), job.position[0])
    if rank < after:
        with world(rank, after, directory / "meeting-1"):
            said = _load_both(cell, checkpointing, path)
    return CellResult(status=FAIL if said else PASS, divergence=said)


def _load_both(cell: Cell, checkpointing: Checkpointing, path: str) -> str | None:
    """Load into a job of the same plan and into a job of another plan. Return the fault, if any."""
    assert cell.target is not None
    same = ElasticJob(cell.recipe, seed=1001)
    other = ElasticJob(cell.target, seed=1002)
    checkpointing.load(path, same.state())
    if same.position != cell.cuts[0]:
        return (
            f"step {same.position[0]} came back, should be {cell.cuts[0][0]}: most likely not"
            " restored: the trainer"
        )
    try:
        checkpointing.load(path, other.state())
    except Unsupported:
        raise
    except Exception:  # noqa: BLE001 - any exception after the trainer's counts as a refusal
        return None
    return (
        f"a run of {cell.recipe.workers} logical workers was loaded into one of"
        f" {cell.target.workers}"
    )
