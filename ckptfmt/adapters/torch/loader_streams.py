"""The RNG streams from which the samplers and the data set of a torch DataLoader draw."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import torch

from ckptfmt.adapters import torch_side
from ckptfmt.adapters.live_trees import GLOBAL, Encoder, plain_values
from ckptfmt.adapters.rng_streams import (
    held_streams,
    live_streams,
    make_stream_digest,
)
from ckptfmt.data.epoch_position import SavedStream, Streams
from ckptfmt.documents.tree import dump_tree, parse_tree
from ckptfmt.state import LiveRngStream

#: The states of streams, by name: kind and state.
States = dict[str, tuple[str, Any]]
_HELD: Final = "held/"


class LoaderStreams:
    """The streams of Python, numpy and torch's host, and the generators in an object's attributes.

    Args:
        holder: the loader in the trainer's process, the data set in a worker process.
        prefix: first part of the paths of generators.
    """

    def __init__(self, holder: object, prefix: str = "") -> None:
        side = torch_side()
        streams = [
            stream
            for stream in live_streams(None, frozenset(), side)
            if not stream.name.startswith("torch.cuda")
        ]
        streams += held_streams(holder, f"{_HELD}{prefix}", side)
        self._streams: dict[str, LiveRngStream] = {stream.name: stream for stream in streams}
        self._digests: list[Callable[[], int]] = [make_stream_digest(one) for one in streams]

    def marks(self) -> tuple[int, ...]:
        """Return a number for each stream, which changes with each draw."""
        return tuple(digest() for digest in self._digests)

    def moved(self, before: tuple[int, ...]) -> tuple[str, ...]:
        """Return the names of the streams that were drawn from since `marks` was `before`."""
        rows = zip(self._streams, before, self.marks(), strict=True)
        return tuple(name for name, then, now in rows if then != now)

    def read(self, names: Iterable[str] | None = None) -> States:
        """Return the states of some streams, or of all."""
        chosen = self._streams if names is None else names
        return {name: (self._streams[name].kind, self._streams[name].read()) for name in chosen}

    def write(self, states: Mapping[str, tuple[str, Any]]) -> list[str]:
        """Set streams to states, and return the names for which there is no stream here."""
        missing = []
        for name, (kind, state) in states.items():
            stream = self._streams.get(name)
            if stream is None or stream.kind != kind:
                missing.append(name)
            else:
                stream.write(state)
        return missing


def is_of_program(name: str) -> bool:
    """Return whether a stream is one of the program's, and no generator of the loader."""
    return not name.startswith(_HELD)


def dump_states(states: States) -> Streams:
    """Return the states as saved."""
    encoder = Encoder(field="data", scope=GLOBAL, inline=True)
    return tuple(
        SavedStream(
            name=name, kind=kind, state=dump_tree(encoder.encode(state, name), where=f"data:{name}")
        )
        for name, (kind, state) in states.items()
    )


def parse_states(streams: Streams) -> States:
    """Return the states that were saved. Raises: FormatError for a state that is no tree."""
    return {
        stream.name: (
            stream.kind,
            plain_values(parse_tree(stream.state, where=f"loader/{stream.name}")),
        )
        for stream in streams
    }


class WorkerStreams:
    """The functions that a loader's worker processes call, to return and set their RNG streams.

    An instance takes the place of two arguments of the loader while the loader creates its worker
    processes. With each batch that draws random numbers, a worker process returns the states of
    the streams after the batch.

    Args:
        collate: the loader's ``collate_fn``.
        init: the loader's ``worker_init_fn``, or None.
        states: the states with which each worker process begins; None for the fresh streams.
    """

    def __init__(
        self,
        collate: Callable[[Any], Any],
        init: Callable[[int], object] | None,
        states: list[States | None],
    ) -> None:
        self._collate = collate
        self._init = init
        self._states = states
        self._worker = 0
        self._streams: LoaderStreams | None = None
        self._marks: tuple[int, ...] = ()

    def begin(self, worker: int) -> None:
        """Begin a worker process: the loader's own function, then the saved states."""
        if self._init is not None:
            self._init(worker)
        info = torch.utils.data.get_worker_info()
        self._streams = LoaderStreams(None if info is None else info.dataset, "dataset.")
        self._worker = worker
        self._streams.write(self._states[worker] or {})
        self._marks = self._streams.marks()

    def collate(self, samples: Any) -> Any:
        """Return a batch; with the states of the streams if random numbers were drawn."""
        batch = self._collate(samples)
        assert self._streams is not None  # noqa: S101
        moved = self._streams.moved(self._marks)
        if not moved:
            return batch
        self._marks = self._streams.marks()
        return DrawnBatch(batch, self._worker, self._streams.read(moved))


class DrawnBatch:
    """A batch from a worker process, with the states of the streams after the batch."""

    def __init__(self, batch: Any, worker: int, states: States) -> None:
        self.batch = batch
        self.worker = worker
        self.states = states

    def pin_memory(self) -> DrawnBatch:
        """Copy the batch to pinned memory: torch's thread calls this method."""
        pin: Any = torch.utils.data._utils.pin_memory.pin_memory  # noqa: SLF001 - no public name
        self.batch = pin(self.batch)
        return self
