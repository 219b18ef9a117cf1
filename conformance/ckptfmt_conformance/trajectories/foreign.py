"""Foreign loaders, which restore their own position only with the number of workers at the save.

The loaders here stand for those of libraries: `StatefulLoader` for torchdata's StatefulDataLoader,
a count of consumed samples for the count in Megatron's arguments.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch

from ckptfmt_conformance.protocol import Unsupported
from ckptfmt_conformance.trajectories.data import make_batch, order_of
from ckptfmt_conformance.trajectories.feed import Loader
from ckptfmt_conformance.trajectories.gang_world import world
from ckptfmt_conformance.trajectories.job import MICROBATCH, TrainingJob
from ckptfmt_conformance.trajectories.ledger import Facts, facts_of
from ckptfmt_conformance.trajectories.protocol import (
    FAIL,
    PASS,
    Cell,
    CellResult,
    Checkpointing,
    ForeignLoading,
    PerRank,
)
from ckptfmt_conformance.trajectories.recipes import Recipe

__all__ = [
    "COUNT",
    "FEATURE",
    "LOADER",
    "ForeignJob",
    "StatefulLoader",
    "is_foreign",
    "play_foreign_refusal",
]

#: The feature that an implementation needs for foreign loaders.
FEATURE: Final = "foreign-loaders"
#: Values of `Recipe.data`: a loader of each worker, or a count of the whole run.
LOADER = "foreign-loader"
COUNT = "foreign-count"
#: The number of samples in a worker's epoch; the last batch is a short batch.
SAMPLES: Final = 22
_NAME: Final = "consumed_train_samples"


def is_foreign(recipe: Recipe) -> bool:
    """Return whether a recipe reads from a foreign loader."""
    return recipe.data in (LOADER, COUNT)


class _Numbers:
    """A data set whose samples are their numbers."""

    def __getitem__(self, number: int) -> int:
        """Return the number."""
        return number


class _Batches:
    """Batches of an epoch from a given batch on, shuffled by a generator."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self.began = generator.get_state()
        self.first = 0

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the batches of an epoch."""
        self.began = self.generator.get_state()
        order = torch.randperm(SAMPLES, generator=self.generator)
        for begin in range(self.first * MICROBATCH, SAMPLES, MICROBATCH):
            yield order[begin : begin + MICROBATCH].tolist()


class StatefulLoader:
    """A DataLoader with its own position: the generator at the epoch's start, and a batch count.

    Args:
        seed: the seed of this worker's own order.
        processes: the number of worker processes. As in torchdata, a position is valid only for the
            same number.
    """

    def __init__(self, seed: int, processes: int) -> None:
        self._batches = _Batches(torch.Generator().manual_seed(seed))
        self._loader = Loader(_Numbers(), self._batches, processes, list)
        self._processes = processes
        self._handed = 0

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the remaining batches of an epoch."""
        for batch in self._loader:
            self._handed += 1
            yield batch
        self._handed = self._batches.first = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""
        return {
            "began": self._batches.began,
            "handed_out": self._handed,
            "num_workers": self._processes,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position.

        Raises: ValueError for a position of another number of worker processes.
        """
        if state["num_workers"] != self._processes:
            raise ValueError(
                f"a position of {state['num_workers']} worker processes, and there are"
                f" {self._processes}"
            )
        self._batches.generator.set_state(torch.as_tensor(state["began"]))
        self._handed = self._batches.first = state["handed_out"]


class ForeignJob(TrainingJob):
    """A job that reads from a foreign loader, or in an order derived from a count."""

    def __init__(
        self, recipe: Recipe, seed: int, checkpointing: Checkpointing, processes: int
    ) -> None:
        super().__init__(recipe, seed)
        if not isinstance(checkpointing, ForeignLoading):
            raise Unsupported(FEATURE)
        self.arguments = types.SimpleNamespace(**{_NAME: 0})
        if recipe.data == COUNT:
            self.loader: Any = checkpointing.consumed_samples(self.arguments, _NAME)
        else:
            # A resumed job makes the loader with another seed, because the load has to restore its
            # order too.
            self.loader = checkpointing.foreign_loader(
                StatefulLoader(100 * seed + self.rank, processes)
            )
        self._batches: Iterator[list[int]] | None = None

    def advance(self) -> None:
        """Do a step."""
        self.samples = self._take_count() if self.recipe.data == COUNT else self.take_batch()
        loss = self._loss(*make_batch(self.recipe.model, self.samples, self.augment))
        self.loss = float(loss.item())
        loss.backward()  # type: ignore[no-untyped-call]
        self._finish()

    def _take_count(self) -> list[int]:
        begin = getattr(self.arguments, _NAME)
        setattr(self.arguments, _NAME, begin + self.step_samples)
        first = begin + self.rank * MICROBATCH
        places = (divmod(at, SAMPLES) for at in range(first, first + MICROBATCH))
        return [order_of(SAMPLES, 7, epoch)[at] for epoch, at in places]

    def take_batch(self) -> list[int]:
        """Return the loader's next batch."""
        while True:
            if self._batches is None:
                self._batches = iter(self.loader)
            for batch in self._batches:
                return batch
            self._batches = None

    def state(self) -> dict[str, object]:
        """Return the state for the checkpointing. A loader's order belongs to its worker."""
        return super().state() | {
            "data": self.loader if self.recipe.data == COUNT else PerRank(self.loader)
        }

    def facts(self) -> Facts:
        """Return all state, with the loader's state instead of the suite's own cursor."""
        facts = {
            name: fact for name, fact in super().facts().items() if not name.startswith("cursor/")
        }
        return facts | facts_of("cursor", self.loader.state_dict())


def play_foreign_refusal(
    cell: Cell, checkpointing: Checkpointing, directory: Path, rank: int
) -> CellResult:
    """Run a cell with loads by the same number of workers, and by another, which must refuse."""
    assert cell.target is not None
    before, after = cell.worlds
    path = str(directory / "cut-0")
    said: list[str | None] = []
    for number, (size, recipe) in enumerate(
        [(before, cell.recipe), (before, cell.recipe), (after, cell.target)]
    ):
        if rank < size:
            with world(rank, size, directory / f"meeting-{number}", wrapped=True):
                job = ForeignJob(recipe, 1 if number == 0 else 1000 + number, checkpointing, 0)
                if number == 0:
                    _save(job, cell, checkpointing, path)
                elif number == 1:
                    said.append(_load_same(job, cell, checkpointing, path))
                else:
                    said.append(_load_other(job, checkpointing, path))
    wrong = next((one for one in said if one), None)
    return CellResult(status=FAIL if wrong else PASS, divergence=wrong)


def _state_of(job: ForeignJob, *, whole: bool = True) -> dict[str, object]:
    """Return the state without the accumulation window.

    The window depends on the number of processes too.

    Args:
        whole: whether to include the loader's position.
    """
    left_out = ("window",) if whole else ("window", "data")
    return {name: value for name, value in job.state().items() if name not in left_out}


def _save(job: ForeignJob, cell: Cell, checkpointing: Checkpointing, path: str) -> None:
    while job.position < cell.cuts[0]:
        job.advance()
    checkpointing.save(path, _state_of(job), job.position[0])


def _load_same(job: ForeignJob, cell: Cell, checkpointing: Checkpointing, path: str) -> str | None:
    checkpointing.load(path, _state_of(job))
    if job.position == cell.cuts[0]:
        return None
    return (
        f"step {job.position[0]} came back, should be {cell.cuts[0][0]}: most likely not"
        " restored: the counters"
    )


def _load_other(job: ForeignJob, checkpointing: Checkpointing, path: str) -> str | None:
    # Without the loader, the load succeeds. So only the loader causes the refusal.
    checkpointing.load(path, _state_of(job, whole=False))
    assert isinstance(checkpointing, ForeignLoading)  # the constructor of the job has checked this
    try:
        checkpointing.load(path, _state_of(ForeignJob(job.recipe, 1003, checkpointing, 0)))
    except checkpointing.refusals:  # any other exception is a crash
        return None
    return f"the loader's position was loaded by {job.world_size} workers, which didn't save it"
