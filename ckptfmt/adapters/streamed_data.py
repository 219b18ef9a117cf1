"""Loaders and data sets that save their position themselves, as their libraries define it.

A position is loaded before the first iterator is made. Neither `state_dict` nor `iter` is called
before: some loaders make their iterator for both, and keep the iterator after a load.

`datasets` keeps a loaded position for all later iterations with the same number of the epoch, and
doesn't load this number. `load_position` corrects both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from ckptfmt.adapters import torch_side
from ckptfmt.errors import Code, err

#: The attribute for the declaration of an iterable data set: equal samples in each iteration.
EXACT: Final = "ckptfmt_exact"
#: Members of topology for a position that its library can't restore, each with the reason for a
#: lower claim.
BUFFER: Final = "shuffle_buffer"
UNSEEDED: Final = "unseeded_order"
UNDECLARED: Final = "undeclared_order"
EARLY: Final = "early_epoch"
LOSSES: Final = {
    BUFFER: (
        "the data set has a shuffle buffer, which isn't in its state_dict: a resume within an epoch"
        " loses the samples in the buffer"
    ),
    UNSEEDED: (
        "the data set is shuffled without a seed: a resume within an epoch reads other samples"
    ),
    UNDECLARED: (
        "the iterable data set has no state_dict: a resume within an epoch reads its first samples"
        " again, and these are the same only if each iteration gives the same samples"
    ),
    EARLY: (
        "a resume from the end of an epoch begins the next epoch when torchdata.nodes loads the"
        " position, before the loop calls set_epoch() of the data set"
    ),
}
#: The name of the report on each loss.
_NAMES: Final = {
    BUFFER: "SHUFFLE_BUFFER_LOST",
    UNSEEDED: "SHUFFLE_UNSEEDED",
    UNDECLARED: "ORDER_UNDECLARED",
    EARLY: "EPOCH_BEGUN_EARLY",
}
#: The remedy for each loss.
_REMEDIES: Final = {
    BUFFER: (
        "shuffle with buffer_size=1, which orders the shards only; or give a plain DataLoader of"
        " the data set, State(data=loader): a resume then reads the epoch's first samples again"
    ),
    UNSEEDED: "give shuffle(seed=...)",
    UNDECLARED: f"declare this by dataset.{EXACT} = True",
    EARLY: "give a StatefulDataLoader of the data set",
}
#: Libraries whose loaders may return another state after a load than the loaded state.
_KNOWN: Final = ("datasets", "torchdata")
#: The entropy that numpy draws for a generator without a seed has more bits than a seed.
_SEED_LIMIT: Final = 1 << 64
_BUFFERED: Final = "BufferShuffledExamplesIterable"
_PREPARE: Final = "_prepare_ex_iterable_for_iteration"


def _library(value: object) -> str:
    return type(value).__module__.partition(".")[0]


def is_streamed(dataset: object) -> bool:
    """Return whether a value is an IterableDataset of the library datasets."""
    return _library(dataset) == "datasets" and hasattr(dataset, "_ex_iterable")


def is_repeatable(dataset: object) -> bool:
    """Return whether each iteration over an iterable data set gives the same samples.

    The data set or its class declares this, or the library datasets made it. The samples may depend
    on the number of the epoch.
    """
    return getattr(dataset, EXACT, False) is True or is_streamed(dataset)


def is_loader(value: object) -> bool:
    """Return whether a value of the field data is iterable, and of no class of ckptfmt."""
    return hasattr(type(value), "__iter__") and _library(value) != "ckptfmt"


def is_of_known_library(value: object) -> bool:
    """Return whether a loader may return another state after a load than the loaded state.

    At the end of an epoch, for example, the loader may begin the next epoch.
    """
    return _library(value) in _KNOWN


# --- losses ---------------------------------------------------------------------------------------


def find_losses(values: Iterable[Any]) -> list[str]:
    """Return the `LOSSES` that apply to the objects of the field data.

    Args:
        values: the objects. Of an adapter, the loader in its attribute `loader` counts.
    """
    found: dict[str, None] = {}
    for value in values:
        loader = getattr(value, "loader", value)
        for dataset in _datasets_of(loader):
            if is_streamed(dataset):
                is_counted = not hasattr(loader, "state_dict")  # a plain DataLoader
                found |= dict.fromkeys(_losses_of_streamed(dataset, is_counted=is_counted))
                found |= {EARLY: None} if _is_of_nodes(loader) else {}
            elif _library(loader) == "torchdata" and _is_counted(loader, dataset):
                found[UNDECLARED] = None
    return list(found)


def _datasets_of(loader: Any) -> list[Any]:
    """Return the data sets of a loader, or of the nodes in a loader of torchdata's nodes."""
    if not _is_of_nodes(loader):
        return [getattr(loader, "dataset", loader)]
    found = []
    waiting = [loader]
    seen = set()
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        for name, part in vars(node).items():
            inner = part.values() if isinstance(part, dict) else [part]
            waiting += filter(_is_of_nodes, inner)
            if name == "iterable":
                found.append(part)
    return found


def _is_of_nodes(value: object) -> bool:
    return type(value).__module__.startswith("torchdata.nodes.")


def list_losses(values: Iterable[Any]) -> list[str]:
    """Return a report for each loss: its name, the reason and a remedy."""
    return [
        f"{_NAMES[loss]}: {LOSSES[loss]}. A resume claims no T1; {_REMEDIES[loss]}"
        for loss in find_losses(values)
    ]


def _losses_of_streamed(dataset: Any, *, is_counted: bool) -> Iterator[str]:
    waiting = [dataset._ex_iterable]  # noqa: SLF001 - datasets has no public name
    while waiting:
        part = waiting.pop()
        waiting += getattr(part, "ex_iterables", ())
        waiting += [part.ex_iterable] if hasattr(part, "ex_iterable") else []
        is_buffer = type(part).__name__ == _BUFFERED
        if is_buffer and not is_counted and part.buffer_size > 1:
            yield BUFFER
        bits = getattr(getattr(part, "generator", None), "bit_generator", None)
        entropy = getattr(getattr(bits, "seed_seq", None), "entropy", None)
        if isinstance(entropy, int) and entropy >= _SEED_LIMIT:
            yield UNSEEDED


def _is_counted(loader: Any, dataset: Any) -> bool:
    """Return whether a loader of torchdata reaches a position by taking as many batches again."""
    side: Any = torch_side()
    if (
        side is None
        or not side.is_iterable_dataset(dataset)
        or hasattr(dataset, "state_dict")
        or is_repeatable(dataset)
    ):
        return False
    if _is_of_nodes(loader):
        return True
    state = loader.state_dict()
    snapshots = state.get("_snapshot", {}).get("_worker_snapshots", {"": state})
    return all(_has_no_position(snapshot) for snapshot in snapshots.values())


def _has_no_position(state: Mapping[str, Any]) -> bool:
    fetcher = state.get("fetcher_state") or {}
    return state.get("dataset_state") is None and fetcher.get("dataset_iter_state") is None


# --- loads ----------------------------------------------------------------------------------------


def load_position(loader: Any, state: Any) -> None:
    """Load a position into a loader, or into a data set that is iterated over itself.

    The loader's iterator is made later.

    Raises: what the library raises.
    """
    streamed = list(filter(is_streamed, _datasets_of(loader)))
    for dataset in streamed:
        _Resumed.of(dataset).begin(_find_epoch(state) if len(streamed) == 1 else None)
    if hasattr(loader, "_iter_for_state_dict"):  # torchdata.nodes keeps an iterator made before
        loader._iter_for_state_dict = False  # noqa: SLF001
        loader._it = None  # noqa: SLF001
    loader.load_state_dict(state)


def finish_load(loader: Any, state: Any) -> None:
    """Let the next iterator begin an epoch, if the loaded position is at the end of an epoch.

    Call this function after the loader's iterator was made.
    """
    dataset = getattr(loader, "dataset", loader)
    begun = getattr(loader, "_it", None)
    if begun is not None and getattr(begun, "_cached_item", begun) is None:
        # torchdata.nodes has begun the next epoch, and would return the end of the last forever.
        begun._cached_state_dict = None  # noqa: SLF001
    is_over = isinstance(state, Mapping) and state.get("_iterator_finished", False)
    if is_over and is_streamed(dataset):
        _Resumed.of(dataset).forget()


def _find_epoch(state: Any) -> int | None:
    """Return the number of the epoch in a state of the library datasets, at any depth."""
    if not isinstance(state, Mapping):
        return None
    if "examples_iterable" in state and isinstance(state.get("epoch"), int):
        return int(state["epoch"])
    found = map(_find_epoch, state.values())
    return next((epoch for epoch in found if epoch is not None), None)


class _Resumed:
    """The replacements of three methods of a data set of the library datasets after a load.

    The replacements are attributes of the data set, and reach its worker processes.

    Attributes:
        dataset: the data set.
        epoch: the number of the loaded epoch.
        is_used: whether an iteration has begun at the loaded position.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.epoch = 0
        self.is_used = True
        self._type = type(dataset)

    @classmethod
    def of(cls, dataset: Any) -> _Resumed:
        """Return the replacements of a data set, made by the first call."""
        owner = getattr(vars(dataset).get("load_state_dict"), "__self__", None)
        if isinstance(owner, cls):
            return owner
        resumed = cls(dataset)
        dataset.load_state_dict = resumed.load_state_dict
        dataset.set_epoch = resumed.set_epoch
        setattr(dataset, _PREPARE, resumed.prepare)
        return resumed

    def begin(self, epoch: int | None) -> None:
        """Set the number of the epoch before a load."""
        if epoch is not None:
            self.epoch = epoch
            self._type.set_epoch(self.dataset, epoch)

    def load_state_dict(self, state: Any) -> None:
        """Move the data set to a position, which the next iteration begins at."""
        self.begin(_find_epoch(state))
        self._type.load_state_dict(self.dataset, state)
        self.is_used = False
        self.dataset._state_dict = state  # noqa: SLF001 - the answer of state_dict()

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the epoch. Raises: StateError(CONFIG_IDENTITY) for an earlier one."""
        if epoch < self.epoch:
            raise err(
                Code.CONFIG_IDENTITY,
                f"set_epoch({epoch}) after a resume within epoch {self.epoch}: the loop would train"
                " on samples again",
                where="data",
                remedy=(
                    "Begin the loop with the epoch of the checkpoint: for epoch in"
                    " range(dataset.epoch, epochs)."
                ),
            )
        self._type.set_epoch(self.dataset, epoch)

    def prepare(self, *given: Any, **named: Any) -> Any:
        """Begin an iteration; only the first iteration after a load begins at the position."""
        if self.is_used:
            self.forget()
        self.is_used = True
        dataset = self.dataset
        side: Any = torch_side()
        position = dataset._starting_state_dict  # noqa: SLF001
        # A worker process loads the position again, into its own shards: all shards don't fit.
        if side is not None and side.is_worker_process():
            dataset._starting_state_dict = None  # noqa: SLF001
        try:
            return getattr(self._type, _PREPARE)(dataset, *given, **named)
        finally:
            dataset._starting_state_dict = position  # noqa: SLF001

    def forget(self) -> None:
        """Let each later iteration begin at the begin of the epoch."""
        self.is_used = True
        self._type.load_state_dict(self.dataset, None)
