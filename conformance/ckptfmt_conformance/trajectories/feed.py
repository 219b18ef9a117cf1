"""What stands between a sampler and a training step: a DataLoader with worker processes, and a queue behind it."""

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

#: Batches that each worker process fetches ahead.
PREFETCH: Final = 2
#: Batches that the trainer itself holds ready: so that what was fetched is ahead without worker processes, too.
READ_AHEAD: Final = 2

#: A batch: source and sample of each row; inputs and targets.
Fetched = tuple[list[tuple[str, int]], torch.Tensor, torch.Tensor]


class _Rows:
    """A map-style data set of all sources of a plan."""

    def __init__(self, plan: DataPlan, model: str) -> None:
        self._first = plan.sources[0][0]
        self._places = {name: 67 * number for number, (name, _) in enumerate(plan.sources)}
        self._model = model

    def __getitem__(self, key: int | tuple[str, int]) -> tuple[tuple[str, int], torch.Tensor, torch.Tensor]:
        """Return source, sample and row of what a sampler asks for."""
        source, sample = (self._first, key) if isinstance(key, int) else key
        inputs, targets = rows_of(self._model, [self._places[source] + sample])
        return (source, sample), inputs[0], targets


def _collate(rows: list[tuple[tuple[str, int], torch.Tensor, torch.Tensor]]) -> Fetched:
    if not rows:  # a step may have none where others have some
        return [], torch.empty(0), torch.empty(0)
    keys, inputs, targets = zip(*rows, strict=True)
    return list(keys), torch.stack(inputs), torch.cat(targets)


class _Counted:
    """Counts the batches that are asked for."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self.count = 0

    def __iter__(self) -> Iterator[list[Any]]:
        """Yield what the sampler yields."""
        for batch in self._sampler:
            self.count += 1
            yield batch


class Loader(DataLoader[Any]):
    """A loader that fetches ahead, and leaves the process's random-number streams alone.

    Each iterator of a DataLoader draws a seed for its workers: from torch's own stream, unless it's given another. A
    run that resumes makes one more iterator than one that doesn't, and would go on with other dropout.

    Args:
        dataset: a map-style data set.
        batches: a batch sampler.
        processes: worker processes; 0 for none.
        collate: makes a batch of samples.
    """

    def __init__(self, dataset: Any, batches: Any, processes: int, collate: Callable[[list[Any]], Any]) -> None:  # noqa: ANN401 - any of them
        with _many_processes():
            super().__init__(
                dataset,
                batch_sampler=batches,
                collate_fn=collate,
                num_workers=processes,
                prefetch_factor=PREFETCH if processes else None,
                generator=torch.Generator(),
            )

    def __iter__(self) -> Any:  # noqa: ANN401 - torch has two kinds, and a type of neither
        """Begin to fetch."""
        with _many_processes():
            return super().__iter__()


@contextlib.contextmanager
def _many_processes() -> Iterator[None]:
    """Have nothing said of there being more worker processes than cores: they have little to do."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create")
        yield


class Feed:
    """The batches of a sampler, fetched ahead.

    Args:
        sampler: whose batches, from where it stands at the first `take`.
        plan: what the sampler was made of.
        model: whose inputs the rows are.
        processes: worker processes of the loader; 0 for none.
    """

    def __init__(self, sampler: Sampler, plan: DataPlan, model: str, processes: int) -> None:
        self._asked = _Counted(sampler)
        self._loader = Loader(_Rows(plan, model), self._asked, processes, _collate)
        self._batches: Iterator[Fetched] | None = None
        self._ready: deque[Fetched] = deque()
        self._taken = 0

    @property
    def ahead(self) -> int:
        """Batches that were asked of the sampler, and not taken."""
        return self._asked.count - self._taken

    def take(self) -> Fetched:
        """Return the next batch, and have all queues full again."""
        if self._batches is None:
            self._batches = iter(self._loader)
        while len(self._ready) <= READ_AHEAD:
            self._ready.append(next(self._batches))
        self._taken += 1
        return self._ready.popleft()

    def restart(self) -> None:
        """Let go of what was fetched and of the worker processes: the order has changed."""
        self._batches = None
        self._ready.clear()
        self._taken = self._asked.count
