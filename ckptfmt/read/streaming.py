"""Read requests through a few reused buffers, and do other work ahead: several at a time, in constant memory.

What is in memory is read by threads that each check and place what they have read before they read more: it is in
their processor's cache. What comes from a device or a network is read by threads that do nothing else, so that it never
waits for a processor, while others check and place. Over a network requests are longer, and more of them are under way.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from queue import SimpleQueue
from typing import Any, Final, Protocol, TypeAlias, TypeVar

from ckptfmt.layout.read_plan import Request
from ckptfmt.store.direct import make_memory
from ckptfmt.store.protocol import PAGE_NBYTES, RangeReader

#: Is given a request and its bytes, which are valid until it returns.
_Take: TypeAlias = "Callable[[Request, memoryview], None]"
#: Is given memory, and has it until its context ends: a device may want to know of it.
Borrow: TypeAlias = Callable[[memoryview], AbstractContextManager[None]]

#: Longest request, in bytes. Measured, cold: the more memory a device fills, the slower it is; four buffers of 4 MiB
#: get three quarters of the rate of four of 1 MiB. Warm, both are as quick: 1 MiB stays in the cache it is read to.
REQUEST_NBYTES: Final = 1 << 20
#: Most threads that check and place. There are as many as there are processors; what more than four would add wasn't
#: measured.
THREAD_COUNT: Final = 4
#: How many threads only read: what a device's queue needs, and two that are between two requests.
READER_COUNT: Final = 6
#: Buffers of threads that only read: as many again are full, and wait to be taken.
WAITING_BUFFER_COUNT: Final = 2 * READER_COUNT
#: Most bytes of buffers, where one request leaves the choice.
IN_FLIGHT_NBYTES: Final = 32 << 20
#: The same for remote stores. A request to one takes 20 to 100 ms before its first byte, and a connection carries 50 to
#: 90 MB/s: with 8 MiB the wait is a small part of it, and 15 of these, in 128 MiB, are what a link of 5 Gbit/s takes.
REMOTE_REQUEST_NBYTES: Final = 8 << 20
REMOTE_READER_COUNT: Final = 16
REMOTE_IN_FLIGHT_NBYTES: Final = 128 << 20
#: What is quicker to read in this thread than to start others for, in bytes.
_SMALL_NBYTES: Final = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReadReport:
    """What was read for a load.

    Attributes:
        needed_nbytes: of the elements that were asked for.
        read_nbytes: of shards, block edges and gaps included.
        verified_nbytes: of what was compared with a digest: contents of blocks, and what they are stored as.
        request_count: how many ranges of shards were read.
        received_nbytes: of elements that another process read, and sent.
        decoded_nbytes: of blocks that were decoded, those that others are decoded from among them.
        buffer_nbytes: of buffers, beside the destination.
        metadata_nbytes: of manifest, index, parts and shard headers.
    """

    needed_nbytes: int = 0
    read_nbytes: int = 0
    verified_nbytes: int = 0
    request_count: int = 0
    received_nbytes: int = 0
    decoded_nbytes: int = 0
    buffer_nbytes: int = 0
    metadata_nbytes: int = 0


class Ranges(Protocol):
    """Files to read ranges of; a `Store` is one."""

    def open_ranges(self, path: str) -> AbstractContextManager[RangeReader]:
        """Open a file; see `Store.open_ranges`."""

    @property
    def is_remote(self) -> bool:
        """Whether each read is a request over a network; see `Store.is_remote`."""

    def waits(self, path: str) -> bool:
        """Return whether reads of a file wait; see `Store.waits`."""


def stream_requests(store: Ranges, requests: Sequence[Request], take: _Take, *, borrow: Borrow | None = None) -> int:
    """Read every request, and give each to `take`; return how many bytes of buffers that took.

    After an error no more requests are begun, and the error of the first request that has one is raised: which
    one that is doesn't depend on the threads.

    Args:
        take: called by several threads at once.
        borrow: is given all memory of buffers, for as long as it is used.

    Raises: what the store and `take` raise.
    """
    if not requests:
        return 0
    longest_nbytes = max(request.nbytes for request in requests)
    # Two pages more: what is read past the page cache begins and ends at pages.
    buffer_nbytes = (-(-longest_nbytes // PAGE_NBYTES) + 2) * PAGE_NBYTES
    reader_count, count, most_nbytes = 0, thread_count(), IN_FLIGHT_NBYTES
    if store.is_remote:
        reader_count, count, most_nbytes = REMOTE_READER_COUNT, 2 * REMOTE_READER_COUNT, REMOTE_IN_FLIGHT_NBYTES
    elif sum(request.nbytes for request in requests) <= _SMALL_NBYTES:
        count = 1
    elif store.waits(requests[0].path):
        reader_count, count = READER_COUNT, WAITING_BUFFER_COUNT
    count = max(1, min(count, len(requests), most_nbytes // buffer_nbytes))
    memory = make_memory(buffer_nbytes * count)
    with contextlib.nullcontext() if borrow is None else borrow(memory):
        buffers = [memory[number * buffer_nbytes : (number + 1) * buffer_nbytes] for number in range(count)]
        if reader_count and count > 1:
            _read_beside_taking(_Work(store, requests, take), buffers, reader_count)
        else:
            _read_and_take(_Work(store, requests, take), buffers)
    return buffer_nbytes * count


def thread_count() -> int:
    """Return how many threads check and place."""
    return min(THREAD_COUNT, len(os.sched_getaffinity(0)))


def _read_and_take(work: _Work, buffers: Sequence[memoryview]) -> None:
    """Read and take with a thread for each buffer, of which this is one."""
    try:
        for buffer in buffers[1:]:
            work.start(functools.partial(work.run, buffer))
        work.run(buffers[0])
    finally:
        work.end()
    work.raise_error()


def _read_beside_taking(work: _Work, buffers: Sequence[memoryview], reader_count: int) -> None:
    """Read with some threads, and take with others."""
    free: SimpleQueue[memoryview | None] = SimpleQueue()
    ready: SimpleQueue[tuple[int, memoryview, memoryview] | None] = SimpleQueue()

    def read() -> None:
        while (number := work.draw()) is not None and (buffer := free.get()) is not None:
            content = work.read(number, buffer)
            if content is None:
                free.put(buffer)
            else:
                ready.put((number, content, buffer))

    def take() -> None:
        while (found := ready.get()) is not None:
            number, content, buffer = found
            work.take(number, content)
            free.put(buffer)

    def wake() -> None:
        for _ in range(reader_count + THREAD_COUNT):
            free.put(None)
            ready.put(None)

    for buffer in buffers:
        free.put(buffer)
    try:
        if work.start(take, thread_count()) and work.start(read, min(reader_count, len(buffers))):
            work.wait()
        else:
            work.run(buffers[0])
    finally:
        work.end(wake)
    work.raise_error()


class _Work:
    """Requests to be drawn one after the other, by whichever thread is free."""

    def __init__(self, store: Ranges, requests: Sequence[Request], take: _Take) -> None:
        self._files = _Files(store, requests)
        self._requests = requests
        self._take = take
        # All below changes under this lock only.
        self._changed = threading.Condition()
        self._next = 0
        self._open_count = 0
        self._running_count = 0
        self._has_ended = False
        self._failed: tuple[int, BaseException] | None = None  # the first request that did

    def run(self, buffer: memoryview) -> None:
        """Read and take requests until there are none left, or one has failed."""
        while (number := self.draw()) is not None:
            content = self.read(number, buffer)
            if content is not None:
                self.take(number, content)

    def draw(self) -> int | None:
        """Return the number of the next request; None where there is none left, or one has failed."""
        with self._changed:
            if self._next == len(self._requests):
                return None
            self._next += 1
            self._open_count += 1
            return self._next - 1

    def read(self, number: int, buffer: memoryview) -> memoryview | None:
        """Return the bytes of a request; None if it failed."""
        request = self._requests[number]
        try:
            file = self._files.open(request.path)
            try:
                return file.read_into(request.byte_begin, request.nbytes, buffer)
            finally:
                self._files.close_after(request.path)
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
            self._finish(number, error)
            return None

    def take(self, number: int, content: memoryview) -> None:
        """Hand on what was read, unless an earlier request has failed."""
        error: BaseException | None = None
        failed = self._failed
        try:
            if failed is None or number < failed[0]:
                self._take(self._requests[number], content)
        except BaseException as caught:  # noqa: BLE001 - raised in the caller's thread
            error = caught
        self._finish(number, error)

    def _finish(self, number: int, error: BaseException | None) -> None:
        with self._changed:
            if error is not None:
                self._next = len(self._requests)
                if self._failed is None or number < self._failed[0]:
                    self._failed = (number, error)
            self._open_count -= 1
            if not self._open_count and self._next == len(self._requests):
                self._changed.notify_all()

    def start(self, run: Callable[[], None], count: int = 1) -> int:
        """Run something in other threads; return in how many, if no more can be started."""

        def run_counted() -> None:
            with self._changed:
                if self._has_ended:
                    return
                self._running_count += 1
            try:
                run()
            finally:
                with self._changed:
                    self._running_count -= 1
                    self._changed.notify_all()

        for started_count in range(count):
            try:
                # A daemon: at its end the interpreter waits for the others, whatever they wait for.
                threading.Thread(target=run_counted, name="ckptfmt-read", daemon=True).start()
            except RuntimeError:  # there are too many, or the interpreter is about to end
                return started_count
        return count

    def wait(self) -> None:
        """Wait until every request was taken, or one has failed and those before it were taken."""
        with self._changed:
            self._changed.wait_for(lambda: not self._open_count and self._next == len(self._requests))

    def end(self, wake: Callable[[], None] = lambda: None) -> None:
        """Let no more requests be begun, and wait for the other threads.

        Args:
            wake: lets threads go on that wait for others.
        """
        interruption: BaseException | None = None
        while True:
            # An interruption has to wait: the destination mustn't change once the caller goes on. (That a thread has
            # ended isn't asked of `Thread.join`, which takes it for ended when interrupted, before Python 3.13.)
            try:
                with self._changed:
                    self._next = len(self._requests)
                    self._has_ended = True
                    wake()
                    while self._running_count:
                        self._changed.wait()
                break
            except BaseException as error:  # noqa: BLE001 - raised below
                interruption = error
        self._files.close()
        if interruption is not None:
            raise interruption

    def raise_error(self) -> None:
        """Raise the error of the first request that has one: all before it were begun before it, and have ended."""
        if self._failed is not None:
            raise self._failed[1]


class _Files:
    """Files that are open from the first request for them to the last; of requests in their order, few at a time."""

    def __init__(self, store: Ranges, requests: Sequence[Request]) -> None:
        self._store = store
        self._left = Counter(request.path for request in requests)
        self._lock = threading.Lock()
        self._open: dict[str, tuple[RangeReader, contextlib.ExitStack]] = {}

    def open(self, path: str) -> RangeReader:
        """Return a file, opened if need be, for one request; `close_after` has to follow."""
        with self._lock:
            if path not in self._open:
                stack = contextlib.ExitStack()
                self._open[path] = (stack.enter_context(self._store.open_ranges(path)), stack)
            return self._open[path][0]

    def close_after(self, path: str) -> None:
        """Close a file if no request for it is left."""
        with self._lock:
            self._left[path] -= 1
            if not self._left[path]:
                self._open.pop(path)[1].close()

    def close(self) -> None:
        """Close what is still open, after requests that were never begun."""
        for _, stack in self._open.values():
            stack.close()
        self._open.clear()


# --- work ahead -------------------------------------------------------------------------------------------------------


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
