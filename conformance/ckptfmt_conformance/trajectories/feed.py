"""The path from a sampler to a training step: a DataLoader with worker processes, and a queue."""

from __future__ import annotations

import contextlib
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch.utils.data import DataLoader

from ckptfmt_conformance.trajectories.data import rows_of
from ckptfmt_conformance.trajectories.plans import DataPlan
from ckptfmt_conformance.trajectories.protocol import Sampler

__all__ = ["PREFETCH", "READ_AHEAD", "Feed", "Fetched", "Loader"]

#: The number of batches that each worker process prefetches.
PREFETCH: Final = 2
#: The number of batches in the trainer's own queue, so that batches are prefetched without worker
#: processes too.
READ_AHEAD: Final = 2

#: A batch: source and sample of each row; inputs and targets.
Fetched = tuple[list[tuple[str, int]], torch.Tensor, torch.Tensor]


class _Rows:
    """A map-style data set of all sources of a plan."""

    def __init__(self, plan: DataPlan, model: str) -> None:
        self._first = plan.sources[0][0]
        self._places = {name: 67 * number for number, (name, _) in enumerate(plan.sources)}
        self._model = model

    def __getitem__(
        self, key: int | tuple[str, int]
    ) -> tuple[tuple[str, int], torch.Tensor, torch.Tensor]:
        """Return source, sample and row for a key of the sampler."""
        source, sample = (self._first, key) if isinstance(key, int) else key
        inputs, targets = rows_of(self._model, [self._places[source] + sample])
        return (source, sample), inputs[0], targets


def _collate(rows: list[tuple[tuple[str, int], torch.Tensor, torch.Tensor]]) -> Fetched:
    if not rows:  # a process may have no rows in a step
        return [], torch.empty(0), torch.empty(0)
    keys, inputs, targets = zip(*rows, strict=True)
    return list(keys), torch.stack(inputs), torch.cat(targets)


class _Counted:
    """A batch sampler that counts its batches."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self.count = 0

    def __iter__(self) -> Iterator[list[Any]]:
        """Yield the sampler's batches."""
        for batch in self._sampler:
            self.count += 1
            yield batch


class Loader(DataLoader[Any]):
    """A loader that prefetches batches, and doesn't use the process's random-number streams.

    Each iterator of a DataLoader draws a seed for its workers, by default from torch's own stream.
    A resumed run makes one more iterator than an uninterrupted run, and would continue with another
    dropout.

    Args:
        dataset: a map-style data set.
        batches: a batch sampler.
        processes: the number of worker processes; 0 for none.
        collate: makes a batch of samples.
    """

    def __init__(
        self, dataset: Any, batches: Any, processes: int, collate: Callable[[list[Any]], Any]
    ) -> None:
        with _many_processes():
            super().__init__(
                dataset,
                batch_sampler=batches,
                collate_fn=collate,
                num_workers=processes,
                prefetch_factor=PREFETCH if processes else None,
                generator=torch.Generator(),
            )

    def __iter__(self) -> Any:
        """Start to prefetch, and return the iterator."""
        with _many_processes():
            return super().__iter__()


@contextlib.contextmanager
def _many_processes() -> Iterator[None]:
    """Suppress the warning about more worker processes than cores. The workers have little work."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create")
        yield


class Feed:
    """The batches of a sampler, prefetched.

    Args:
        sampler: the source of batches. The first `take` starts at its current position.
        plan: the sampler's plan.
        model: the name of the model whose inputs the rows are.
        processes: the number of worker processes of the loader; 0 for none.
    """

    def __init__(self, sampler: Sampler, plan: DataPlan, model: str, processes: int) -> None:
        self._asked = _Counted(sampler)
        self._loader = Loader(_Rows(plan, model), self._asked, processes, _collate)
        self._batches: Iterator[Fetched] | None = None
        self._ready: deque[Fetched] = deque()
        self._taken = 0

    @property
    def ahead(self) -> int:
        """The number of batches drawn from the sampler and not yet taken."""
        return self._asked.count - self._taken

    def take(self) -> Fetched:
        """Return the next batch, and refill all queues."""
        if self._batches is None:
            self._batches = iter(self._loader)
        while len(self._ready) <= READ_AHEAD:
            self._ready.append(next(self._batches))
        self._taken += 1
        return self._ready.popleft()

    def restart(self) -> None:
        """Discard prefetched batches and worker processes, after a change of the order."""
        self._batches = None
        self._ready.clear()
        self._taken = self._asked.count
