"""Work that a few threads do ahead of whoever takes it, in order, and never far ahead."""

from __future__ import annotations

import collections
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, TypeVar

from ckptfmt.read.streaming import thread_count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

Item = TypeVar("Item")
Result = TypeVar("Result")

#: How many items for each thread are begun or wait to be taken, beside the one that is taken.
WAITING: Final = 2


def iter_ahead(
    work: Callable[[Item], Result], items: Iterable[Item], *, count: int | None = None, ahead_count: int | None = None
) -> Iterator[Result]:
    """Yield what `work` returns for each item, in their order; only a few results are there at a time.

    Args:
        count: of threads; `thread_count` if None.
        ahead_count: how many items are begun or wait to be taken, beside the one that is taken; `WAITING` for each
            thread if None.

    Raises: what `work` raises, when its turn has come.

    >>> list(iter_ahead(abs, [3, -1, 2]))
    [3, 1, 2]
    """
    count = thread_count() if count is None else count
    ahead_count = WAITING * count if ahead_count is None else ahead_count
    running: collections.deque[Any] = collections.deque()
    with ThreadPoolExecutor(count, thread_name_prefix="ckptfmt-ahead") as threads:
        try:
            for item in items:
                running.append(threads.submit(work, item))
                if len(running) > ahead_count:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()
        finally:
            threads.shutdown(wait=True, cancel_futures=True)


def iter_batches(
    items: Iterable[Item], nbytes_of: Callable[[Item], int], *, nbytes: int, count: int
) -> Iterator[list[Item]]:
    """Yield items in lists, for which handing one over is cheap: each as soon as it has so many bytes, or items.

    >>> list(iter_batches([3, 1, 1, 1], lambda item: item, nbytes=3, count=2))
    [[3], [1, 1], [1]]
    """
    batch: list[Item] = []
    batch_nbytes = 0
    for item in items:
        batch.append(item)
        batch_nbytes += nbytes_of(item)
        if batch_nbytes >= nbytes or len(batch) == count:
            yield batch
            batch, batch_nbytes = [], 0
    if batch:
        yield batch
