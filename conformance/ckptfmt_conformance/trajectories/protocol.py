"""What a cell needs of an implementation: `Checkpointing`; and what it says in the end: `CellResult`."""

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

#: How far a save is that goes on beside the training: the state is being copied; it is copied, and survives the
#: trainer; all of it is written; it is what a new process resumes from, whatever dies; older ones were let go as well.
PHASES: Final = ("STAGING", "STAGED", "WRITTEN", "COMMITTED", "DONE")


@dataclasses.dataclass(slots=True, eq=False)
class PerRank:
    """A value that differs between the processes: each must get its own back."""

    value: object


class Checkpointing(Protocol):
    """An implementation under test; an object of a class that other processes can import.

    `state` maps names to live objects: ``weights``, a module; ``optimizer``; ``data``, the data cursor, or a foreign
    loader; ``config``, a plain tree, which is only for information; ``rng``, a mapping of the program's own
    ``torch.Generator``; and everything else by its own name. All but these are objects with ``state_dict`` and
    ``load_state_dict``, or such an object in a `PerRank`. The streams of Python's `random`, of numpy and of torch
    belong to a process's state, too: they aren't in the mapping, and have to come back.

    In a cell of several processes, torch.distributed is initialised and all of them call it.
    """

    def save(self, path: str, state: Mapping[str, object], step: int) -> None:
        """Save, and return when a `load` by any process would find it."""

    def load(self, path: str, state: Mapping[str, object]) -> None:
        """Load into the live objects, which may have been made of another seed, and have done no step."""


class AsyncSave(Protocol):
    """A save that goes on beside the training."""

    def phase(self) -> str:
        """Return which of `PHASES` it has reached, without waiting. Raises: what it failed with."""


class AsyncRun(Protocol):
    """A run that one trainer goes on with.

    Attributes:
        step: training steps done by what was resumed from; 0 where there was nothing.
    """

    step: int

    def save(self, step: int) -> AsyncSave:
        """Begin a save of the state as it is now; the training goes on as soon as this returns."""

    def close(self) -> None:
        """Wait until nothing is done for any save any more."""


@runtime_checkable
class AsyncCheckpointing(Protocol):
    """What an implementation has besides that saves beside the training. Without it, those cells are UNSUPPORTED.

    Attributes:
        phases: those of `PHASES` that its saves tell, in that order. To tell ``STAGED`` is a promise: a trainer that is
            killed from then on loses nothing of that save. To tell ``COMMITTED`` is one as well: nor if everything is
            killed that it started.
    """

    phases: tuple[str, ...]

    def open_run(self, path: str, state: Mapping[str, object], *, delta: bool) -> AsyncRun:
        """Resume from the newest that is committed, if there is any: load it into the live objects.

        Saves of a process that was killed may still go on as this is called: what they had promised is waited for. Of
        a run that is gone on with the newest two checkpoints stay.

        Args:
            path: of the run, a directory that may not be there yet.
            state: as for `Checkpointing`.
            delta: whether every other save is to hold only what changed.

        Raises: Unsupported for a `delta` that there isn't.
        """


class Sampler(Protocol):
    """The format's own order of samples, spec/60-context.md, as a `batch_sampler` for torch's DataLoader."""

    def __iter__(self) -> Iterator[list[Any]]:
        """Yield this worker's samples of each step that isn't done, without end; ahead of the training, that is.

        They are numbers; with several sources, pairs of the source's name and a number.
        """

    def weights(self, step: int) -> list[int]:
        """Return the weight, 0 or 1, of each of a step's samples."""

    def advance(self, steps: int = 1) -> None:
        """Take note that the training has done so many more steps: these are consumed."""

    def skip(
        self,
        *,
        samples: tuple[int, ...] | None = None,
        shard: tuple[str, int, int] | None = None,
        positions: tuple[int, int] | None = None,
        policy: Any = "hole",  # noqa: ANN401 - one of three words
        source: str | None = None,
        from_pos: int | None = None,
    ) -> None:
        """Leave something out from a position on that no step has consumed; iterators are made anew after it.

        See `plans.Skip` for what it is.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the data cursor as the specification has it, the same on every worker."""

    def load_state_dict(self, state_dict: Mapping[str, Any], /) -> None:
        """Go to where a cursor stands; its skips are those of the cursor."""


@runtime_checkable
class Sampling(Protocol):
    """What an implementation has besides that has the format's order. Without it, those cells are UNSUPPORTED."""

    def sampler(self, plan: DataPlan, worker: tuple[int, int]) -> Sampler:
        """Return a sampler of a plan, without its skips, for a worker: its number, and how many there are.

        With a mixture, the seed is that of the order and of the blocks.
        """


class Loading(Protocol):
    """A loader, or some numbers, that say where they stand in the data by means of their own."""

    def state_dict(self) -> Any:  # noqa: ANN401 - its own
        """Return the position."""

    def load_state_dict(self, state_dict: Any, /) -> Any:  # noqa: ANN401 - its own
        """Go to a position."""


@runtime_checkable
class ForeignLoading(Protocol):
    """What an implementation has besides that saves other libraries' positions, each for one number of workers only.

    Attributes:
        refusals: what `load` raises where it refuses something; whatever else it raises is a crash.
    """

    refusals: tuple[type[Exception], ...]

    def foreign_loader(self, loader: Loading) -> Any:  # noqa: ANN401 - a Loading that can be iterated over
        """Return what stands in the field ``data`` for a loader of this worker alone; it is iterated over instead."""

    def consumed_samples(self, holder: object, name: str) -> Loading:
        """Return what stands in the field ``data`` for a count of the whole run, an attribute of an object."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """When a trainer is killed by SIGKILL, and with whom.

    Attributes:
        phase: that a save has reached then; None for before it's begun.
        midway: whether it's in the middle of that phase rather than at its beginning.
        together: whether all processes that the trainer started are killed with it.
        delta: whether that save holds only what changed.
    """

    phase: str | None
    midway: bool = False
    together: bool = False
    delta: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One case: what is trained, where it is interrupted, and what is claimed of it.

    Attributes:
        id: such as ``t1/plain/mlp/sgd/boundary``.
        tier: ``T-0``: on any machine, at every commit; ``T-N``: a negative control, which must turn red.
        claim: ``T1``, ``T2``, ``S0`` or ``S1``.
        features: what an implementation has to be able to.
        cuts: where the run is interrupted: saved, thrown away, made anew and loaded.
        worlds: for T2, the number of processes before the first cut, between the cuts, and after the last.
        target: for S0 and S1, what is loaded into, in another layout; for T2, what must refuse to be loaded into.
        loaders: of a run that reads by a DataLoader, its worker processes on each leg; left out, there are none.
        kill: how the run is interrupted that saves beside the training, where it isn't by the trainer itself.
        control: the negative control that is applied after the load, ``<item>/<how>``.
        description: in one line.
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
        """The most processes at a time; 0 where the calling process is enough."""
        if self.kill:
            return 1  # of its own, to be killed
        if self.worlds:
            return max(self.worlds)
        return 0 if self.recipe.layout == "plain" else self.recipe.world_size or 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CellResult:
    """How a cell went.

    Attributes:
        status: ``PASS``, ``FAIL``, ``UNSUPPORTED``, ``SKIPPED`` or ``ERROR``. A negative control passes by turning red.
        divergence: the first divergence, or what else was wrong, in a sentence; of a control, how it was found out;
            of a trainer that was killed, what was resumed from. More lines say by tensor and step what differs.
        seconds: how long it took.
    """

    status: str
    divergence: str | None = None
    seconds: float = 0.0
