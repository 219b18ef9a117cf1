"""The interface of an implementation, `Checkpointing`, and the result of a cell, `CellResult`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Final, Protocol, runtime_checkable

from ckptfmt_conformance.trajectories.ledger import Position
from ckptfmt_conformance.trajectories.plans import DataPlan
from ckptfmt_conformance.trajectories.recipes import Recipe

__all__ = [
    "ERROR",
    "FAIL",
    "PASS",
    "PHASES",
    "SKIPPED",
    "UNSUPPORTED",
    "AsyncCheckpointing",
    "AsyncRun",
    "AsyncSave",
    "Cell",
    "CellResult",
    "Checkpointing",
    "ForeignLoading",
    "Kill",
    "Loading",
    "PerRank",
    "Sampler",
    "Sampling",
]

PASS: Final = "PASS"
FAIL: Final = "FAIL"
UNSUPPORTED: Final = "UNSUPPORTED"
SKIPPED: Final = "SKIPPED"
ERROR: Final = "ERROR"

#: The phases of an asynchronous save. STAGING: the state is being copied. STAGED: the copy is
#: complete, and survives the trainer. WRITTEN: all files are written. COMMITTED: a new process
#: resumes from the save, even if all processes die. DONE: older checkpoints are released too.
PHASES: Final = ("STAGING", "STAGED", "WRITTEN", "COMMITTED", "DONE")


@dataclasses.dataclass(slots=True, eq=False)
class PerRank:
    """A value that differs between processes: a load must restore each process's own value."""

    value: object


class Checkpointing(Protocol):
    """An implementation under test; an object of a class that other processes can import.

    `state` maps names to live objects: ``weights``, a module; ``optimizer``; ``data``, the data
    cursor, or a foreign loader; ``config``, a plain tree for information only; ``rng``, a mapping
    of the program's own ``torch.Generator``; and all further objects by their own names. All except
    ``config`` and ``rng`` are objects with ``state_dict`` and ``load_state_dict``, or such an
    object in a `PerRank`. The streams of Python's `random`, of numpy and of torch belong to a
    process's state too: they aren't in the mapping, and must be restored.

    In a cell of several processes, torch.distributed is initialised, and every process calls the
    methods.
    """

    def save(self, path: str, state: Mapping[str, object], step: int) -> None:
        """Save, and return as soon as a `load` by any process would find the checkpoint."""

    def load(self, path: str, state: Mapping[str, object]) -> None:
        """Load into the live objects.

        They may have been made from another seed, and have done no step.
        """


class AsyncSave(Protocol):
    """An asynchronous save."""

    def phase(self) -> str:
        """Return the reached phase of `PHASES`, without waiting. Raises: the save's error."""


class AsyncRun(Protocol):
    """A run continued by one trainer.

    Attributes:
        step: the number of finished training steps in the resumed checkpoint; 0 without a
            checkpoint.
    """

    step: int

    def save(self, step: int) -> AsyncSave:
        """Start a save of the current state.

        The training continues as soon as the method returns.
        """

    def close(self) -> None:
        """Wait until no work for any save is left."""


@runtime_checkable
class AsyncCheckpointing(Protocol):
    """The interface of asynchronous saves. Without it, their cells are UNSUPPORTED.

    Attributes:
        phases: the phases of `PHASES` that the saves report, in order. The report of ``STAGED`` is
            a promise: the save survives a later kill of the trainer. The report of ``COMMITTED``
            promises the same for a kill of the trainer and all processes that it started.
    """

    phases: tuple[str, ...]

    def open_run(self, path: str, state: Mapping[str, object], *, delta: bool) -> AsyncRun:
        """Resume from the newest committed checkpoint, if any: load it into the live objects.

        Saves of a killed process may still be in progress at the call. The call waits for promised
        saves. A continued run keeps its newest two checkpoints.

        Args:
            path: the run's directory, which may not exist yet.
            state: the state, as for `Checkpointing`.
            delta: whether every second save holds only changed blocks.

        Raises: Unsupported for an unsupported `delta`.
        """


class Sampler(Protocol):
    """The format's own order of samples as a `batch_sampler` for torch's DataLoader.

    Spec: spec/context/64-cursor.md.
    """

    def __iter__(self) -> Iterator[list[Any]]:
        """Yield this worker's samples of each unfinished step, without end, ahead of the training.

        A sample is a number. With several sources, a sample is a pair of the source's name and a
        number.
        """

    def weights(self, step: int) -> list[int]:
        """Return the weight, 0 or 1, of each of a step's samples."""

    def advance(self, steps: int = 1) -> None:
        """Count `steps` more finished training steps, whose samples are then consumed."""

    def skip(
        self,
        *,
        samples: tuple[int, ...] | None = None,
        shard: tuple[str, int, int] | None = None,
        positions: tuple[int, int] | None = None,
        policy: Any = "hole",
        source: str | None = None,
        from_pos: int | None = None,
    ) -> None:
        """Add a skip from an unconsumed position on. Iterators are made anew afterwards.

        See `plans.Skip` for the arguments.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the data cursor in the specification's form, the same on every worker."""

    def load_state_dict(self, state_dict: Mapping[str, Any], /) -> None:
        """Go to a cursor, and take over its skips."""


@runtime_checkable
class Sampling(Protocol):
    """The interface of the format's order of samples. Without it, those cells are UNSUPPORTED."""

    def sampler(self, plan: DataPlan, worker: tuple[int, int]) -> Sampler:
        """Return a sampler of a plan, without the plan's skips, for a worker.

        With a mixture, the seed applies to the order and to the blocks.

        Args:
            worker: the worker's number, and the number of workers.
        """


class Loading(Protocol):
    """A loader, or a set of numbers, with its own form of position in the data."""

    def state_dict(self) -> Any:
        """Return the position."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Go to a saved position."""


@runtime_checkable
class ForeignLoading(Protocol):
    """The interface of other libraries' positions. Without it, those cells are UNSUPPORTED.

    Each position is valid for one number of workers only.

    Attributes:
        refusals: the exceptions by which `load` refuses. Any other exception is a crash.
    """

    refusals: tuple[type[Exception], ...]

    def foreign_loader(self, loader: Loading) -> Any:
        """Return the value of the field ``data`` for this worker's own loader.

        Iterate over the result.
        """

    def consumed_samples(self, holder: object, name: str) -> Loading:
        """Return the value of the field ``data`` for a count of the whole run.

        Args:
            holder, name: an object, and the name of its attribute with the count.
        """


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """The moment and the extent of a trainer's kill by SIGKILL.

    Attributes:
        phase: the phase of the save at the kill; None for a kill before the save.
        midway: whether the kill is in the middle of the phase instead of at its begin.
        together: whether all processes started by the trainer are killed too.
        delta: whether the save holds only changed blocks.
    """

    phase: str | None
    midway: bool = False
    together: bool = False
    delta: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A case: the training, the interruptions, and the claim.

    Attributes:
        id: the cell's name, such as ``t1/plain/mlp/sgd/boundary``.
        tier: ``T-0`` for any machine at every commit; ``T-N`` for a negative control, which must
            turn red.
        claim: ``T1``, ``T2``, ``S0`` or ``S1``.
        features: the features that an implementation needs.
        cuts: the positions of interruptions: the run is saved, discarded, made anew and loaded.
        worlds: for T2, the number of processes before the first cut, between the cuts, and after
            the last.
        target: for S0 and S1, the recipe of the load, in another layout; for T2, the recipe that
            must refuse the load.
        loaders: for a run with a DataLoader, the number of worker processes on each leg; empty for
            none.
        kill: the kill that interrupts a run with asynchronous saves; None if the trainer interrupts
            itself.
        control: the negative control applied after the load, ``<item>/<how>``.
        description: the description, in one line.
    """

    id: str
    tier: str = "T-0"
    claim: str = "T1"
    features: tuple[str, ...] = ()
    recipe: Recipe
    cuts: tuple[Position, ...]
    worlds: tuple[int, ...] = ()
    target: Recipe | None = None
    loaders: tuple[int, ...] = ()
    kill: Kill | None = None
    control: str | None = None
    description: str = ""

    @property
    def processes(self) -> int:
        """The largest number of simultaneous processes; 0 if the calling process is enough."""
        if self.kill:
            return 1  # a new process, to be killed
        if self.worlds:
            return max(self.worlds)
        return 0 if self.recipe.layout == "plain" else self.recipe.world_size or 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CellResult:
    """The result of a cell.

    Attributes:
        status: ``PASS``, ``FAIL``, ``UNSUPPORTED``, ``SKIPPED`` or ``ERROR``. A negative control
            passes by turning red.
        divergence: the first divergence or another fault, in a sentence; for a control, the
            divergence that revealed the damage; for a killed trainer, the resumed step. More lines
            list the differences by tensor and step.
        seconds: the duration, in seconds.
    """

    status: str
    divergence: str | None = None
    seconds: float = 0.0
