"""Save the positions of other libraries' data loaders, for a fixed number of workers.

    from ckptfmt.adapters.data_loaders import ConsumedSamples, ForeignLoader

    state = State(..., data=PerWorker(ForeignLoader(stateful_dataloader, lib="torchdata")))
    state = State(..., data=ConsumedSamples(args))  # Megatron's consumed_train_samples

A `ckptfmt.Sampler` can resume on any number of workers. These loaders can't: a load on another
number is refused (LOADER_NOT_ELASTIC). With ``allow=("loader",)`` the load proceeds, is reported
and has a lower claim. In that case a per-worker loader keeps its live position, and a count of the
whole run is loaded, since the count is valid on any number of workers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Final, Protocol

from ckptfmt.adapters import torch_side
from ckptfmt.adapters.load_plan import LoadPlan
from ckptfmt.adapters.streamed_data import finish_load, load_position
from ckptfmt.data.cursor import Foreign, Per, dump_foreign, is_foreign, parse_foreign
from ckptfmt.data.sampler import Sampler
from ckptfmt.data.tickets import Share
from ckptfmt.data.workers import distributed_worker
from ckptfmt.errors import Code, err
from ckptfmt.group import Group, attempt
from ckptfmt.state import FirstWorker, PerWorker, State

#: The remedy for a loader with differences from the saved loader.
_OTHER_LOADER: Final = (
    "Make the loader as it was; or begin its data anew: Checkpointer(...,"
    " loading=Loading(override=['data:*']))."
)


def find_samplers(state: State) -> Iterator[Sampler]:
    """Yield the samplers of a state."""
    return (value for value in _values_in((state.data, state.extra)) if isinstance(value, Sampler))


def find_loaders(state: State) -> list[Any]:
    """Return the positions of the DataLoaders of a state, which are followed from now on.

    Raises: StateError(STATE_UNSUPPORTED, ARGUMENT) for an unsuitable loader.
    """
    return find_readers(state)[1]


def find_readers(state: State) -> tuple[list[Sampler], list[Any]]:
    """Return the results of `find_samplers` and `find_loaders`, from one walk of the state.

    Raises: as `find_loaders`.
    """
    samplers: list[Sampler] = []
    found: list[Any] = []
    for value in _values_in((state.data, state.extra)):
        if isinstance(value, Sampler):
            samplers.append(value)
        elif _has_batch_sampler(value):
            found.append(value)
    side: Any = torch_side() if found else None
    if side is None:
        return samplers, []
    loaders = [side.follow_loader(one, where="data") for one in found if side.is_loader(one)]
    return samplers, loaders


def has_unread_samplers(state: State) -> bool:
    """Return whether steps were made without a batch from a sampler or loader of the state."""
    samplers, loaders = find_readers(state)
    return any(one.is_unread for one in (*samplers, *loaders))


def _has_batch_sampler(value: Any) -> bool:
    """Return whether a value has a batch sampler of torch: no other value can be followed."""
    return hasattr(value, "batch_sampler") and not isinstance(value.batch_sampler, Sampler)


def merged_shares(group: Group, state: State) -> contextlib.AbstractContextManager[None]:
    """Let samplers of several issuing workers return the cursor of all workers in the context.

    Every process of the group enters the context at the same save.

    Raises: LayoutError(WRITERS_DIVERGED); StateError(ARGUMENT, PEER_FAILED). Spec: REQ-PIP-003.
    """
    samplers = [sampler for sampler in find_samplers(state) if sampler.is_shared]
    if not samplers or group.writer_count == 1:
        return contextlib.nullcontext()
    return _merging(group, samplers)


@contextlib.contextmanager
def _merging(group: Group, samplers: list[Sampler]) -> Iterator[None]:
    shares, error = attempt(lambda: [sampler.share().as_json() for sampler in samplers])
    told = group.raise_together(error, value=shares)
    if any(type(theirs) is not list or len(theirs) != len(samplers) for theirs in told):
        raise err(
            Code.WRITERS_DIVERGED,
            "a Sampler with pipeline=True isn't in the State of each process",
            where="State",
            remedy="Give the sampler in every State; or issue on one process only, with"
            " worker=(0, 1) and State(data=FirstWorker(sampler)).",
        )
    with contextlib.ExitStack() as stack:
        for number, sampler in enumerate(samplers):
            theirs = [Share.from_json(shares[number]) for shares in told]
            stack.enter_context(sampler.merging(theirs))
        yield


def refuse_shares(state: State) -> None:
    """Raise if the samples of a state were issued by several workers, which a save must merge.

    Raises: StateError(ARGUMENT).
    """
    if any(sampler.is_shared for sampler in find_samplers(state)):
        raise err(
            Code.ARGUMENT,
            "several workers issue samples of a Sampler, and a SaveAttempt has no exchange to merge"
            " their shares",
            where="State",
            remedy="Save with ckptfmt.save or a Checkpointer; or issue on one process only, with"
            " worker=(0, 1).",
        )


def _values_in(value: object) -> Iterator[Any]:
    """Yield the values in nested containers, in order; each container is entered once.

    The capture of a state refuses a container that contains itself.
    """
    entered: dict[int, object] = {}
    waiting = [value]
    while waiting:
        found = waiting.pop()
        if isinstance(found, PerWorker | FirstWorker):
            waiting.append(found.value)
        elif not isinstance(found, Mapping | list | tuple):
            yield found
        elif id(found) not in entered:
            entered[id(found)] = found
            items = found.values() if isinstance(found, Mapping) else found
            waiting += reversed([*items])


class _Stateful(Protocol):
    """A loader that can return its position."""

    def state_dict(self) -> Any:
        """Return the position."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Move to a position."""


class PassiveLoader:
    """An adapter for a loader; the loader's generators are saved as RNG streams."""

    @property
    def loader(self) -> Any:
        """The other library's loader."""
        raise NotImplementedError


class EpochLoader(PassiveLoader):
    """The position of a loader with epochs, such as torch's DataLoader."""

    def compare(self, saved: Foreign) -> list[str]:
        """Return the differences from the saved loader; any difference forbids a load."""
        raise NotImplementedError

    def find_doubts(self, saved: Foreign) -> list[str]:
        """Return the reasons why a load of the position claims no T1."""
        raise NotImplementedError


class _Adapter:
    """The common part of both adapters: library, version, number of workers, loaded position."""

    def __init__(self, lib: str, version: str, worker_count: int | None) -> None:
        self._lib = lib
        self._version = version
        self._worker_count = worker_count
        self._loaded: dict[str, Any] | None = None

    @property
    def worker_count(self) -> int:
        """The number of workers."""
        return distributed_worker()[1] if self._worker_count is None else self._worker_count

    def _tree(self, per: Per, state: object) -> dict[str, Any]:
        return dump_foreign(
            Foreign(
                lib=self._lib,
                version=self._version,
                per=per,
                worker_count=self.worker_count,
                state=state,
            )
        )


class ForeignLoader(_Adapter, PassiveLoader):
    """Another library's loader, such as torchdata's StatefulDataLoader, as a worker's field `data`.

    Iterate over this object, not over the loader, and save between a step and the next batch. The
    batches that the loader has returned by then count as consumed. Whether prefetched batches count
    is up to the library.

    A load creates the loader's iterator, because the creation draws random numbers and the RNG
    streams are restored afterwards. A loader that draws random numbers later, with its first batch,
    doesn't repeat the original numbers.

    Args:
        loader: an iterable object with ``state_dict`` and ``load_state_dict``.
        lib: the library's name. A state of another library is refused.
        version: the library's version, for information in the checkpoint.
        worker_count: the number of workers. Default: as for `ckptfmt.Sampler`.
    """

    def __init__(
        self, loader: _Stateful, *, lib: str, version: str = "", worker_count: int | None = None
    ) -> None:
        super().__init__(lib, version, worker_count)
        self._loader: Any = loader
        #: The loader's iterator from the last loaded position; None once `__iter__` has used it.
        self._begun: Iterator[Any] | None = None

    @property
    def loader(self) -> Any:
        """The other library's loader."""
        return self._loader

    def __iter__(self) -> Iterator[Any]:
        """Yield the loader's batches, from the current position."""
        batches = iter(self._loader) if self._begun is None else self._begun
        self._begun = None
        return self._batches(batches)

    def _batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self._loaded = None
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state and its number of workers. Spec: REQ-CUR-022."""
        if self._loaded is not None:  # state_dict() of some loaders starts their worker processes
            return self._loaded
        return self._tree("worker", self._loader.state_dict())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Move to a position.

        Raises: FormatError(CURSOR_FORM); StateError(CONFIG_IDENTITY) for another library's state;
            StateError(LOADER_NOT_ELASTIC).
        Spec: REQ-CUR-022, REQ-CUR-023.
        """
        foreign = _parse(state_dict, self._lib)
        if foreign.worker_count != self.worker_count:
            raise err(
                Code.LOADER_NOT_ELASTIC,
                _detail(foreign, self.worker_count),
                where="loader",
                requirement="REQ-CUR-023",
            )
        load_position(self._loader, foreign.state)
        self._loaded = dict(state_dict)
        self._begun = iter(self._loader)
        settle(self._loader, foreign.state)
        finish_load(self._loader, foreign.state)


class ConsumedSamples(_Adapter):
    """Counts of consumed samples over the whole run, stored as attributes of an object.

    Megatron's arguments are such an object. The trainer derives the order of the data from the
    count. A loader that is created after the load starts at the loaded count.

    Args:
        holder: the object with the attributes.
        names: the attributes' names.
        lib: the library's name. A state of another library is refused.
        version: the library's version, for information in the checkpoint.
        worker_count: the number of workers. Default: as for `ckptfmt.Sampler`.

    >>> import types
    >>> args = types.SimpleNamespace(consumed_train_samples=640)
    >>> ConsumedSamples(args, worker_count=8).state_dict()["state"]
    {'consumed_train_samples': 640}
    """

    def __init__(
        self,
        holder: object,
        *,
        names: tuple[str, ...] = ("consumed_train_samples",),
        lib: str = "megatron",
        version: str = "",
        worker_count: int | None = None,
    ) -> None:
        super().__init__(lib, version, worker_count)
        self._holder = holder
        self._names = names

    def state_dict(self) -> dict[str, Any]:
        """Return the counts, and the number of workers that save them. Spec: REQ-CUR-022."""
        counts = {name: getattr(self._holder, name) for name in self._names}
        # The first call after a load returns the loaded state, for comparison. Later calls use the
        # current number of workers.
        loaded = self._loaded
        self._loaded = None
        if loaded is not None and loaded["state"] == counts:
            return loaded
        return self._tree("run", counts)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set the counts.

        The number of workers isn't checked here: the load has already decided whether another
        number is allowed.

        Raises: FormatError(CURSOR_FORM); StateError(CONFIG_IDENTITY) for another library or other
            names.
        """
        counts = _parse(state_dict, self._lib).state
        if not isinstance(counts, dict) or counts.keys() != set(self._names):
            raise err(
                Code.CONFIG_IDENTITY,
                f"the saved counts aren't called {self._names}",
                where="loader/state",
            )
        for name in self._names:
            setattr(self._holder, name, counts[name])
        self._loaded = dict(state_dict)


def settle(loader: Any, loaded: object) -> bool:
    """Correct the batch count of torchdata's loader of an iterable dataset after a load.

    The loader reaches a position by taking as many batches as before, and counts these batches
    twice. A state saved later in the epoch would be too far ahead.

    Args:
        loader: the loader, with its iterator already created.
        loaded: the state_dict that was loaded.

    Returns: whether the loader is of this kind.
    Raises: StateError(READ_BACK) if the corrected loader isn't at the loaded position.
    """
    side: Any = torch_side()
    is_of_torchdata = type(loader).__module__.partition(".")[0] == "torchdata"
    if (
        not is_of_torchdata
        or side is None
        or not side.is_iterable_dataset(getattr(loader, "dataset", None))
    ):
        return False
    iterator: Any = getattr(loader, "_iterator", None)
    wanted = _batches_taken(loaded)
    excess = (_batches_taken(loader.state_dict()) or 0) - (wanted or 0)
    if excess > 0 and hasattr(iterator, "_num_yielded"):
        iterator._num_yielded -= excess  # noqa: SLF001
        snapshot = getattr(iterator, "_snapshot", None)
        if isinstance(snapshot, dict):
            snapshot[_SNAPSHOT_STEP] -= excess
    if wanted is None or _batches_taken(loader.state_dict()) != wanted:
        raise err(
            Code.READ_BACK,
            "the loader's count of batches differs from the loaded count",
            where="loader",
        )
    return True


#: Names in the state_dict of torchdata's loader.
_SNAPSHOT_STEP: Final = "_snapshot_step"


def _batches_taken(state: Any) -> int | None:
    """Return the number of batches taken in the epoch, from the state of torchdata's loader."""
    if not isinstance(state, Mapping):
        return None
    if isinstance(snapshot := state.get("_snapshot"), Mapping):  # with worker processes
        return int(snapshot[_SNAPSHOT_STEP]) + int(state["_steps_since_snapshot"])
    return state.get("_num_yielded")


def may_load(plan: LoadPlan, saved: object, live: object, where: str) -> bool:
    """Return whether a saved value can be restored on this number of workers.

    If not, the plan gets a problem.

    Args:
        plan: the load plan.
        saved: the saved value.
        live: the destination. An adapter knows the number of workers; for any other object the
            number is that of the writers.
        where: the value's place, for messages.

    Spec: REQ-CUR-023.
    """
    if not is_foreign(saved):
        if isinstance(live, EpochLoader):
            detail = "the saved position isn't that of a DataLoader"
            plan.problem(Code.CONFIG_IDENTITY, where, detail, remedy=_OTHER_LOADER)
            return False
        return True
    foreign = parse_foreign(saved, where=where)
    count = live.worker_count if isinstance(live, _Adapter) else plan.worker_count
    if foreign.worker_count == count:
        if not isinstance(live, EpochLoader):
            return True
        differences = live.compare(foreign)
        for difference in differences:
            plan.problem(Code.CONFIG_IDENTITY, where, difference, remedy=_OTHER_LOADER)
        doubts = [] if differences else live.find_doubts(foreign)
        plan.downgrades += [f"{where}: {doubt}" for doubt in doubts]
        plan.reorders |= bool(doubts)
        return not differences
    is_allowed = plan.problem(Code.LOADER_NOT_ELASTIC, where, _detail(foreign, count))
    return is_allowed and foreign.per == "run"


def _detail(foreign: Foreign, count: int) -> str:
    return (
        f"the position of {foreign.lib} holds for {foreign.worker_count} workers, and {count}"
        " workers load it"
    )


def _parse(state_dict: Mapping[str, Any], lib: str) -> Foreign:
    foreign = parse_foreign(dict(state_dict))
    if foreign.lib != lib:
        raise err(
            Code.CONFIG_IDENTITY,
            f"the saved position is of {foreign.lib!r}, not of {lib!r}",
            where="loader/lib",
        )
    return foreign
