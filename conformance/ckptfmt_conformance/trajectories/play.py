"""Runs of a cell: uninterrupted, interrupted, and compared at every position."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import random
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ckptfmt_conformance.elastic.tree import place
from ckptfmt_conformance.protocol import Unsupported
from ckptfmt_conformance.trajectories.controls import CONTROLS
from ckptfmt_conformance.trajectories.elastic_job import ElasticJob
from ckptfmt_conformance.trajectories.foreign import ForeignJob, is_foreign, play_foreign_refusal
from ckptfmt_conformance.trajectories.gang_world import DEADLINE_S, world
from ckptfmt_conformance.trajectories.job import Runnable, TrainingJob, seed_streams
from ckptfmt_conformance.trajectories.layouts import play_layouts
from ckptfmt_conformance.trajectories.ledger import Comparison, Facts, Position
from ckptfmt_conformance.trajectories.loaded import (
    find_data_vacuity,
    find_idle_loader,
    run_uninterrupted,
)
from ckptfmt_conformance.trajectories.loaded_job import LoadedElasticJob, LoadedJob, make_loaded
from ckptfmt_conformance.trajectories.protocol import (
    ERROR,
    FAIL,
    PASS,
    UNSUPPORTED,
    Cell,
    CellResult,
    Checkpointing,
)
from ckptfmt_conformance.trajectories.recipes import STEPS, Recipe
from ckptfmt_conformance.trajectories.refusal import play_refusal
from ckptfmt_conformance.trajectories.vacuity import find_vacuity

__all__ = ["RED_WITHIN", "make_job", "own_streams", "play", "reference_of"]

#: The number of steps within which a control must change weights or loss.
RED_WITHIN = 4


def make_job(recipe: Recipe, seed: int) -> Runnable:
    """Return a job before its first step."""
    return ElasticJob(recipe, seed) if recipe.layout == "elastic" else TrainingJob(recipe, seed)


def reference_of(recipe: Recipe) -> dict[Position, Facts]:
    """Return all state of the uninterrupted run at each position, for this process's rank.

    For the reference trainer, the run is that of a single process.
    """
    return _reference(recipe, place())


@functools.lru_cache(maxsize=8)
def _reference(recipe: Recipe, at: tuple[int, int]) -> dict[Position, Facts]:
    del at  # a part of the key
    return _run_through(make_job(recipe, seed=1))


def _run_through(job: Runnable) -> dict[Position, Facts]:
    """Return all state at each position of a new job."""
    reference = {job.position: job.facts()}
    while job.position < (STEPS, 0):
        job.advance()
        reference[job.position] = job.facts()
    return reference


@functools.lru_cache(maxsize=8)
def shared_reference(recipe: Recipe, rank: int, directory: Path) -> Mapping[Position, Facts]:
    """Return the reference trainer's uninterrupted run on one process.

    The first process computes the run for all processes.
    """
    name = hashlib.sha256(repr(recipe).encode()).hexdigest()[:16]
    path = directory / f"reference-{name}.pt"
    if rank == 0 and not path.exists():
        _hand_out(reference_of(recipe), path)
    reference: Mapping[Position, Facts] = _take_over(path)
    return reference


def _hand_out(found: object, path: Path) -> None:
    torch.save(found, path.with_suffix(".new"))
    path.with_suffix(".new").rename(path)


def _take_over(path: Path) -> Any:
    """Return the value that the first process writes to a file, when the file exists."""
    end_s = time.monotonic() + DEADLINE_S
    while not path.exists():
        if time.monotonic() > end_s:
            raise TimeoutError("the first process didn't finish the uninterrupted run")
        time.sleep(0.005)
    return torch.load(path, weights_only=True)


@contextlib.contextmanager
def own_streams() -> Iterator[None]:
    """Compute deterministically on one thread; restore the program's streams and settings."""
    # Restored below.
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    threads = torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic)
        torch.set_num_threads(threads)
        random.setstate(before[0])
        np.random.set_state(before[1])  # noqa: NPY002
        torch.set_rng_state(before[2])


def play(
    cell: Cell, checkpointing: Checkpointing, directory: Path, rank: int | None = None
) -> CellResult:
    """Run a cell.

    Args:
        directory: an empty directory for checkpoints, the same on all processes.
        rank: the rank of this process, if the cell needs several processes. Every process calls
            this function.
    """
    begin_s = time.monotonic()
    legs = _Legs(cell, checkpointing, directory)
    try:
        with own_streams():
            if rank is None:
                result = legs.run_same_world()
            elif cell.target is not None:
                result = _player_of(cell)(cell, checkpointing, directory, rank)
            elif cell.worlds:
                result = legs.run_worlds(rank)
            elif rank < cell.processes:
                with world(rank, cell.processes, directory / "meeting", wrapped=True):
                    result = legs.run_same_world()
            else:
                result = CellResult(status=PASS)
    except Unsupported as answer:
        result = CellResult(status=UNSUPPORTED, divergence=answer.feature)
    except Exception as error:  # noqa: BLE001 - any exception is an error of this cell
        line = (str(error).splitlines() or [""])[0][:300]
        result = CellResult(status=ERROR, divergence=f"{type(error).__name__}: {line}")
    seconds = time.monotonic() - begin_s
    return CellResult(status=result.status, divergence=result.divergence, seconds=seconds)


def _player_of(cell: Cell) -> Callable[[Cell, Checkpointing, Path, int], CellResult]:
    """Return the function that plays a cell with another target recipe."""
    if is_foreign(cell.recipe):
        return play_foreign_refusal
    return play_refusal if cell.recipe.layout == "elastic" else play_layouts


class _Legs:
    """The legs of a cell: from the begin to the first cut, between cuts, and to the end."""

    def __init__(self, cell: Cell, checkpointing: Checkpointing, directory: Path) -> None:
        self._cell = cell
        self._checkpointing = checkpointing
        self._directory = directory
        self._control = CONTROLS[cell.control] if cell.control else None
        self._comparison: Comparison | None = None
        self._vacuous: str | None = None
        self._wrong: str | None = None

    def run_same_world(self) -> CellResult:
        """Run all legs in the current process group."""
        self._prepare(self._reference())
        for number in range(0 if self._wrong else len(self._cell.cuts) + 1):
            self._run_leg(number)
        return self._judge()

    def run_worlds(self, rank: int) -> CellResult:
        """Run each leg in a new process group, if this process is a member."""
        if rank >= max(self._cell.worlds):
            return CellResult(status=PASS)
        self._prepare(self._shared_reference(rank))
        for number, world_size in enumerate(self._cell.worlds):
            if rank < world_size and not self._wrong:
                with world(rank, world_size, self._directory / f"meeting-{number}"):
                    self._run_leg(number)
        return self._judge()

    def _reference(self) -> Mapping[Position, Facts]:
        """Return the uninterrupted run, and store its own fault, if any."""
        recipe = self._cell.recipe
        if is_foreign(recipe):
            return _run_through(self._make(0))
        if recipe.data:
            reference, self._wrong = run_uninterrupted(recipe, self._checkpointing)
            return reference
        return reference_of(recipe)

    def _shared_reference(self, rank: int) -> Mapping[Position, Facts]:
        if not self._cell.recipe.data:
            return shared_reference(self._cell.recipe, rank, self._directory.parent)
        # not shared with other cells, since the run depends on the implementation
        path = self._directory / "reference.pt"
        if rank == 0:
            found = self._reference()
            _hand_out((found, self._wrong), path)
        reference: Mapping[Position, Facts]
        reference, self._wrong = _take_over(path)
        return reference

    def _prepare(self, reference: Mapping[Position, Facts]) -> None:
        self._comparison = Comparison(reference)
        self._vacuous = find_vacuity(self._cell, reference)
        if self._cell.recipe.data and not is_foreign(self._cell.recipe):
            self._vacuous = self._vacuous or find_data_vacuity(self._cell)

    def _make(self, number: int) -> Runnable:
        """Return the job of a leg, before its first step."""
        recipe = self._cell.recipe
        seed = 1 if number == 0 else 1000 + number
        processes = self._cell.loaders[number] if self._cell.loaders else 0
        if is_foreign(recipe):
            return ForeignJob(recipe, seed, self._checkpointing, processes)
        if recipe.data:
            return make_loaded(recipe, seed, self._checkpointing, processes)
        return make_job(recipe, seed)

    def _run_leg(self, number: int) -> None:
        comparison = self._comparison
        cuts = self._cell.cuts
        assert comparison is not None
        job = self._make(number)
        if number:
            self._restore(job, number)
        comparison.look(job.position, job.facts(), loads=number, at_load=number > 0)
        end = cuts[number] if number < len(cuts) else (STEPS, 0)
        while job.position < end:
            job.advance()
            comparison.look(job.position, job.facts(), loads=number, at_load=False)
        if number < len(cuts):
            if isinstance(job, LoadedJob | LoadedElasticJob):
                processes = self._cell.loaders[number] if self._cell.loaders else 0
                self._vacuous = self._vacuous or find_idle_loader(job.reading.ahead, processes)
            self._checkpointing.save(
                str(self._directory / f"cut-{number}"), job.state(), job.position[0]
            )
            comparison.look(job.position, job.facts(), loads=number, at_load=number > 0)

    def _restore(self, job: Runnable, number: int) -> None:
        """Load into a job made from another seed, while the process's streams have other states."""
        seed_streams(2000 + number)
        comparison = self._comparison
        assert comparison is not None
        if comparison.has_same_weights(self._cell.cuts[number - 1], job.facts()):
            self._vacuous = "the job to load into has the weights already"
        undo = self._control.before(job) if self._control else None
        self._checkpointing.load(str(self._directory / f"cut-{number - 1}"), job.state())
        if undo is not None:
            undo()

    def _judge(self) -> CellResult:
        comparison = self._comparison
        assert comparison is not None
        first = comparison.first
        said = first.explain() if first else None
        if self._vacuous or self._wrong:
            return CellResult(
                status=FAIL, divergence=self._wrong or f"the cell proves nothing: {self._vacuous}"
            )
        if self._control is None:
            return CellResult(status=FAIL if said else PASS, divergence=comparison.explain())
        if said is None:
            return CellResult(
                status=FAIL, divergence="stayed green: the suite doesn't see what was taken away"
            )
        if self._control.named not in said:
            return CellResult(
                status=FAIL, divergence=f"red, but not for {self._control.named}: {said}"
            )
        learnt = comparison.learnt_at
        last = self._control.cut[0] + RED_WITHIN
        if self._control.learns and (learnt is None or learnt[0] > last):
            return CellResult(
                status=FAIL,
                divergence=f"what is learnt stays the same for {RED_WITHIN} steps: {said}",
            )
        return CellResult(status=PASS, divergence=said)
