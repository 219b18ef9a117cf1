"""The random numbers from which a framework's loaders take the order of an epoch."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
import torch

#: The reason for a lower claim if fetching a batch draws from the streams of the process.
DRAWS: Final = (
    "fetching a batch draws from the random numbers of the process, and batches are fetched ahead"
    " of the training: a resume within an epoch sees other random numbers"
)
#: The same for worker processes.
WORKERS_DRAW: Final = (
    "worker processes draw random numbers for a batch, and begin with new random numbers after a"
    " resume: a resume within an epoch sees other random numbers"
)
#: Number of batches from which draws are looked for, in each epoch.
_WATCHED: Final = 8


def read_streams() -> dict[str, Any]:
    """Return the RNG streams from which the creation of an iterator may draw."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),  # noqa: NPY002 - the global stream itself
        "torch": torch.get_rng_state(),
    }


def put_streams(streams: Mapping[str, Any]) -> None:
    """Set the RNG streams to the result of `read_streams`."""
    random.setstate(streams["python"])
    np.random.set_state(streams["numpy"])  # noqa: NPY002 - the global stream itself
    torch.set_rng_state(streams["torch"])


def have_moved(before: Mapping[str, Any]) -> bool:
    """Return whether the RNG streams were drawn from since `before`, a result of `read_streams`."""
    now = read_streams()
    return not (
        torch.equal(now["torch"], before["torch"])
        and now["python"] == before["python"]
        and now["numpy"][2:] == before["numpy"][2:]
        and np.array_equal(now["numpy"][1], before["numpy"][1])
    )


def generators_of(loader: Any) -> dict[str, torch.Generator]:
    """Return the generators from which a loader that accelerate prepared takes its order.

    On several processes accelerate creates a generator for the sampler, and the loader has none.
    """
    base = getattr(loader, "base_dataloader", loader)
    found = {
        "loader": getattr(base, "generator", None),
        "synchronized": getattr(loader, "synchronized_generator", None),
    }
    sampler = getattr(base, "batch_sampler", None)
    sampler = getattr(base, "sampler", None) if sampler is None else sampler
    while sampler is not None:
        found["sampler"] = getattr(sampler, "generator", None)
        inner = getattr(sampler, "batch_sampler", None)
        sampler = getattr(sampler, "sampler", None) if inner is None else inner
    return {name: one for name, one in found.items() if isinstance(one, torch.Generator)}


def read_generators(loader: Any) -> dict[str, Any]:
    """Return the states of a loader's generators."""
    return {name: generator.get_state() for name, generator in generators_of(loader).items()}


def put_generators(loader: Any, states: Mapping[str, Any]) -> None:
    """Set a loader's generators to the result of `read_generators`."""
    for name, generator in generators_of(loader).items():
        if name in states:
            generator.set_state(states[name])


def dump_begin(loader: Any) -> dict[str, Any]:
    """Return the RNG streams and a loader's generators as plain values."""
    streams = read_streams()
    kind, keys, *rest = streams["numpy"]
    return {
        "streams": {
            "python": streams["python"],
            "numpy": (kind, keys.astype("<u4").tobytes(), *rest),
            "torch": _dump_torch(streams["torch"]),
        },
        "generators": {name: _dump_torch(state) for name, state in read_generators(loader).items()},
    }


def put_begin(loader: Any, begin: Mapping[str, Any], *, is_within_epoch: bool) -> None:
    """Set a loader's generators, and within an epoch the RNG streams, to saved values."""
    put_generators(
        loader, {name: _parse_torch(state) for name, state in begin["generators"].items()}
    )
    if is_within_epoch:
        streams = begin["streams"]
        kind, keys, *rest = streams["numpy"]
        version, numbers, gauss = streams["python"]
        put_streams(
            {
                "python": (version, tuple(numbers), gauss),
                "numpy": (kind, np.frombuffer(keys, "<u4").astype(np.uint32), *rest),
                "torch": _parse_torch(streams["torch"]),
            }
        )


def _dump_torch(state: torch.Tensor) -> bytes:
    return state.numpy().tobytes()


def _parse_torch(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


class DrawWatch:
    """A watch for random numbers that are drawn while batches of a loader are fetched.

    Args:
        loader: a loader that accelerate prepared. Its function for collation is wrapped, since only
            this function runs in the worker processes.
    """

    def __init__(self, loader: Any) -> None:
        base = getattr(loader, "base_dataloader", loader)
        self._count = 0
        self._has_drawn = False
        self._in_workers: _WatchedCollate | None = None
        if getattr(base, "num_workers", 0):
            self._in_workers = base.collate_fn = _WatchedCollate(base.collate_fn)

    def begin_epoch(self) -> None:
        """Begin with the first fetch of an epoch, which may draw the order of the epoch."""
        self._count = 0

    @contextlib.contextmanager
    def fetching(self) -> Iterator[None]:
        """Watch the streams of this process during a fetch."""
        self._count += 1
        before = read_streams() if 1 < self._count <= _WATCHED and not self._has_drawn else None
        yield
        self._has_drawn = self._has_drawn or (before is not None and have_moved(before))

    def find_doubt(self) -> str | None:
        """Return the reason why a resume within an epoch can't be exact, if one was found."""
        if self._in_workers is not None and self._in_workers.has_drawn.item():
            return WORKERS_DRAW
        return DRAWS if self._has_drawn else None


class _WatchedCollate:
    """A function for collation that compares the streams of a worker process between batches.

    Attributes:
        has_drawn: whether a worker process has drawn, in shared memory.
    """

    def __init__(self, collate: Any) -> None:
        self._collate = collate
        self._after: dict[str, Any] | None = None
        self._count = 0
        self.has_drawn = torch.zeros(1, dtype=torch.bool).share_memory_()

    def __call__(self, samples: Any) -> Any:
        batch = self._collate(samples)
        if torch.utils.data.get_worker_info() is not None and self._count < _WATCHED:
            if self._after is not None and have_moved(self._after):
                self.has_drawn[0] = True
            self._after = read_streams()
            self._count += 1
        return batch
