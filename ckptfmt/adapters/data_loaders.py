"""Other libraries' data loaders in a checkpoint: kept as they are, for the number of workers that saved them.

    from ckptfmt.adapters.data_loaders import ConsumedSamples, ForeignLoader

    state = State(..., data=PerWorker(ForeignLoader(stateful_dataloader, lib="torchdata")))
    state = State(..., data=ConsumedSamples(args))  # Megatron's consumed_train_samples

A `ckptfmt.Sampler` goes on at any number of workers. These don't: a load at another number is refused
(LOADER_NOT_ELASTIC), or, with ``allow=("loader",)``, reported and lowers the claim. Then a loader of each worker stays
as it is, and a count of the whole run is loaded, since it means the same on any number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, Protocol

from ckptfmt.adapters import torch_side
from ckptfmt.adapters.load_plan import LoadPlan
from ckptfmt.data.sampler import Sampler
from ckptfmt.data.workers import distributed_worker
from ckptfmt.documents.cursor import Foreign, Per, dump_foreign, is_foreign, parse_foreign
from ckptfmt.errors import Code, err
from ckptfmt.state import FirstWorker, PerWorker, State

#: The member of topology that says that a launch took no batch of its samplers, and the claim that falls with it.
UNREAD_SAMPLERS: Final = "unread_samplers"
UNREAD: Final = (
    "no batch was taken of a Sampler in State, neither by iterating nor by indices(): what was trained isn't its order"
)


def find_samplers(state: State) -> Iterator[Sampler]:
    """Yield the samplers of a state."""
    return _samplers_in((state.data, state.extra))


def has_unread_samplers(state: State) -> bool:
    """Tell whether steps are done, and a sampler was never asked for a batch of them."""
    return any(sampler.is_unread for sampler in find_samplers(state))


def _samplers_in(value: object) -> Iterator[Sampler]:
    if isinstance(value, Sampler):
        yield value
    elif isinstance(value, PerWorker | FirstWorker):
        yield from _samplers_in(value.value)
    elif isinstance(value, Mapping):
        yield from _samplers_in(tuple(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _samplers_in(item)


class _Stateful(Protocol):
    """A loader that says where it stands."""

    def state_dict(self) -> Any:  # noqa: ANN401 - the library's own
        """Return the position."""

    def load_state_dict(self, state_dict: Any, /) -> Any:  # noqa: ANN401 - the library's own
        """Go to a position."""


class _Adapter:
    """What both adapters know: whose the position is, for how many workers, and which one was loaded."""

    def __init__(self, lib: str, version: str, worker_count: int | None) -> None:
        self._lib = lib
        self._version = version
        self._worker_count = worker_count
        self._loaded: dict[str, Any] | None = None

    @property
    def worker_count(self) -> int:
        """How many workers there are."""
        return distributed_worker()[1] if self._worker_count is None else self._worker_count

    def _tree(self, per: Per, state: object) -> dict[str, Any]:
        return dump_foreign(
            Foreign(lib=self._lib, version=self._version, per=per, worker_count=self.worker_count, state=state)
        )


class ForeignLoader(_Adapter):
    """Another library's loader, such as torchdata's StatefulDataLoader, as the field `data` of one worker.

    Iterate over this, not over the loader, and save between a step and the next batch: what the loader has handed out
    then is what was consumed. Whether it counts what it fetched ahead is the library's affair. A load asks the loader
    for its iterator, since making one draws random numbers, and the RNG streams are put back last; a loader that draws
    later, with its first batch, goes on with other numbers than it would have.

    Args:
        loader: has ``state_dict`` and ``load_state_dict``, and is iterable.
        lib: whose it is; a state of another one is refused.
        version: the library's, for those who read the checkpoint.
        worker_count: how many workers there are; left out, as for `ckptfmt.Sampler`.
    """

    def __init__(self, loader: _Stateful, *, lib: str, version: str = "", worker_count: int | None = None) -> None:
        super().__init__(lib, version, worker_count)
        self._loader: Any = loader
        #: Of the loader, from the position that was loaded last; None once it was handed out.
        self._begun: Iterator[Any] | None = None

    @property
    def loader(self) -> Any:  # noqa: ANN401 - the library's own
        """The other library's loader."""
        return self._loader

    def __iter__(self) -> Iterator[Any]:
        """Yield the loader's batches, from where it stands."""
        batches, self._begun = iter(self._loader) if self._begun is None else self._begun, None
        return self._batches(batches)

    def _batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self._loaded = None
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state, and for how many workers it holds. Spec: REQ-CUR-022."""
        if self._loaded is not None:  # asking some loaders starts their processes
            return self._loaded
        return self._tree("worker", self._loader.state_dict())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go to a position.

        Raises: FormatError(CURSOR_FORM); StateError(CONFIG_IDENTITY) for another library's;
            StateError(LOADER_NOT_ELASTIC).
        Spec: REQ-CUR-022, REQ-CUR-023.
        """
        foreign = _parse(state_dict, self._lib)
        if foreign.worker_count != self.worker_count:
            raise err(
                Code.LOADER_NOT_ELASTIC, _detail(foreign, self.worker_count), where="loader", requirement="REQ-CUR-023"
            )
        self._loader.load_state_dict(foreign.state)
        self._loaded = dict(state_dict)
        self._begun = iter(self._loader)
        settle(self._loader, foreign.state)


class ConsumedSamples(_Adapter):
    """Counts of consumed samples over the whole run, kept as attributes of an object, as Megatron's arguments are.

    The order is the trainer's own, a function of the count; a loader that is made after the load starts there.

    Args:
        holder: has the attributes.
        names: of the attributes.
        lib: whose they are; a state of another one is refused.
        version: the library's, for those who read the checkpoint.
        worker_count: how many workers there are; left out, as for `ckptfmt.Sampler`.

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
        """Return the counts, and by how many workers they were saved. Spec: REQ-CUR-022."""
        counts = {name: getattr(self._holder, name) for name in self._names}
        # What was loaded is given back once, to be compared. From then on it is this number of workers that counts.
        loaded, self._loaded = self._loaded, None
        if loaded is not None and loaded["state"] == counts:
            return loaded
        return self._tree("run", counts)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set the counts; whether the number of workers may be another, the load has decided.

        Raises: FormatError(CURSOR_FORM); StateError(CONFIG_IDENTITY) for another library's, or other names.
        """
        counts = _parse(state_dict, self._lib).state
        if not isinstance(counts, dict) or counts.keys() != set(self._names):
            raise err(Code.CONFIG_IDENTITY, f"the saved counts aren't called {self._names}", where="loader/state")
        for name in self._names:
            setattr(self._holder, name, counts[name])
        self._loaded = dict(state_dict)


def settle(loader: Any, loaded: object) -> bool:  # noqa: ANN401 - anything
    """Correct what torchdata's loader of an iterable dataset counts after a load; return whether it is such a loader.

    The loader reaches its position by taking as many batches as were taken before, and counts them once more: a state
    that is saved later in the epoch would lie too far ahead.

    Args:
        loader: the loader, whose iterator is made.
        loaded: the state_dict that was loaded.

    Raises: StateError(READ_BACK) where the loader doesn't stand at the loaded position then.
    """
    side: Any = torch_side()
    is_of_torchdata = type(loader).__module__.partition(".")[0] == "torchdata"
    if not is_of_torchdata or side is None or not side.is_iterable_dataset(getattr(loader, "dataset", None)):
        return False
    iterator: Any = getattr(loader, "_iterator", None)
    wanted = _batches_taken(loaded)
    excess = (_batches_taken(loader.state_dict()) or 0) - (wanted or 0)
    if excess > 0 and hasattr(iterator, "_num_yielded"):
        iterator._num_yielded -= excess  # noqa: SLF001 - no public way leads to it
        snapshot = getattr(iterator, "_snapshot", None)
        if isinstance(snapshot, dict):
            snapshot[_SNAPSHOT_STEP] -= excess
    if wanted is None or _batches_taken(loader.state_dict()) != wanted:
        raise err(Code.READ_BACK, "its count of batches isn't the loaded one", where="loader")
    return True


#: Names in the state_dict of torchdata's loader.
_SNAPSHOT_STEP: Final = "_snapshot_step"


def _batches_taken(state: Any) -> int | None:  # noqa: ANN401 - of torchdata
    """Return how many batches of the epoch were taken, as torchdata's loader says it."""
    if not isinstance(state, Mapping):
        return None
    if isinstance(snapshot := state.get("_snapshot"), Mapping):  # of worker processes
        return int(snapshot[_SNAPSHOT_STEP]) + int(state["_steps_since_snapshot"])
    return state.get("_num_yielded")


def may_load(plan: LoadPlan, saved: object, live: object, where: str) -> bool:
    """Tell whether a saved value can be put back on this number of workers; if not, it is a problem of the plan.

    Args:
        live: what it would be put back into. An adapter knows how many workers there are; of anything else, each writer
            is one.

    Spec: REQ-CUR-023.
    """
    if not is_foreign(saved):
        return True
    foreign = parse_foreign(saved, where=where)
    count = live.worker_count if isinstance(live, _Adapter) else plan.worker_count
    if foreign.worker_count == count:
        return True
    is_allowed = plan.problem(Code.LOADER_NOT_ELASTIC, where, _detail(foreign, count))
    return is_allowed and foreign.per == "run"


def _detail(foreign: Foreign, count: int) -> str:
    return f"the position of {foreign.lib} holds for {foreign.worker_count} workers, and {count} workers load it"


def _parse(state_dict: Mapping[str, Any], lib: str) -> Foreign:
    foreign = parse_foreign(dict(state_dict))
    if foreign.lib != lib:
        raise err(Code.CONFIG_IDENTITY, f"the saved position is of {foreign.lib!r}, not of {lib!r}", where="loader/lib")
    return foreign
