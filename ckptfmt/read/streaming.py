"""Read requests with several threads through a few reused buffers; run other work ahead of its use.

Both happen in constant memory. Where file contents are in memory, each thread reads a request, then
checks and places the bytes, while they are in the processor's cache. Where reads wait for a device
or a network, some threads only read, so that the device never waits for a processor, and other
threads check and place. Over a network, requests are longer and more requests are in flight.
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
from typing import Any, Final, Protocol, Self, TypeAlias, TypeVar

from ckptfmt.layout.read_plan import Request
from ckptfmt.store.direct import make_memory
from ckptfmt.store.protocol import PAGE_NBYTES, RangeReader

#: Called with a request and its bytes, which are valid until the call returns.
_Take: TypeAlias = "Callable[[Request, memoryview], None]"
#: Called with the buffers' memory; the returned context lasts as long as the memory is in use. A
#: device may register the memory.
Borrow: TypeAlias = Callable[[memoryview], AbstractContextManager[None]]

#: Maximum size of a request in bytes. Measured with a cold page cache, larger buffers are slower to
#: fill: four buffers of 4 MiB reach three quarters of the rate of four buffers of 1 MiB. With a
#: warm page cache both sizes are equally fast, since 1 MiB stays in the processor's cache.
REQUEST_NBYTES: Final = 1 << 20
#: Maximum number of threads that check and place; fewer on a machine with fewer processors. The
#: gain of more than four threads wasn't measured.
THREAD_COUNT: Final = 4
#: Number of threads that only read: enough for a device's queue, and two more threads between two
#: requests.
READER_COUNT: Final = 6
#: Number of buffers for threads that only read: for each thread, one buffer being filled and one
#: full buffer waiting to be taken.
WAITING_BUFFER_COUNT: Final = 2 * READER_COUNT
#: Maximum total size of the buffers in bytes; one buffer is always allocated.
IN_FLIGHT_NBYTES: Final = 32 << 20
#: Request size, number of reading threads and total buffer size for remote stores. A request takes
#: 20 to 100 ms until the first byte, and a connection transfers 50 to 90 MB/s. With 8 MiB the
#: latency is a small part of a request. Fifteen such requests, in 128 MiB of buffers, fill a link
#: of 5 Gbit/s.
REMOTE_REQUEST_NBYTES: Final = 8 << 20
REMOTE_READER_COUNT: Final = 16
REMOTE_IN_FLIGHT_NBYTES: Final = 128 << 20
#: Maximum total size in bytes of requests that this thread reads alone: starting threads would take
#: longer.
_SMALL_NBYTES: Final = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReadReport:
    """The amounts read for a load.

    Attributes:
        needed_nbytes: size of the requested elements.
        read_nbytes: bytes read from shards, including unneeded bytes of blocks and gaps between
            ranges.
        verified_nbytes: bytes compared with a digest: contents of blocks, and stored bytes of
            encoded blocks.
        request_count: number of range reads of shards.
        received_nbytes: bytes read and sent by other processes.
        decoded_nbytes: size of the decoded blocks, including the blocks needed to decode other
            blocks.
        buffer_nbytes: size of the buffers, without the destination.
        metadata_nbytes: size of manifest, index, parts and shard headers.
        memory_nbytes: bytes taken from this process's memory, without a comparison of digests.
    """

    needed_nbytes: int = 0
    read_nbytes: int = 0
    verified_nbytes: int = 0
    request_count: int = 0
    received_nbytes: int = 0
    decoded_nbytes: int = 0
    buffer_nbytes: int = 0
    metadata_nbytes: int = 0
    memory_nbytes: int = 0


class Ranges(Protocol):
    """A source of range reads, such as a `Store`."""

    def open_ranges(self, path: str) -> AbstractContextManager[RangeReader]:
        """Open a file for range reads; see `Store.open_ranges`."""

    @property
    def is_remote(self) -> bool:
        """Whether each read is a network request; see `Store.is_remote`."""

    def waits(self, path: str) -> bool:
        """Return whether reads of a file wait; see `Store.waits`."""


def stream_requests(
    store: Ranges, requests: Sequence[Request], take: _Take, *, borrow: Borrow | None = None
) -> int:
    """Read every request, and call `take` with each; return the total size of the buffers in bytes.

    After an error no further request begins. If several requests fail, the error of the first of
    them in the order of the requests is raised, independently of the timing of the threads.

    Args:
        take: called with each request and its bytes, by several threads at once.
        borrow: called with the memory of all buffers; the returned context lasts as long as the
            memory is in use.

    Raises: the errors of the store and of `take`.
    """
    if not requests:
        return 0
    plan = _plan_buffers(store, requests)
    memory = make_memory(plan.buffer_nbytes * plan.count)
    with contextlib.nullcontext() if borrow is None else borrow(memory):
        buffers = plan.cut(memory)
        work = _RequestQueue(store, requests, take)
        if plan.reader_count:
            _read_beside_taking(work, buffers, plan.reader_count)
        else:
            with work:  # each thread reads and takes; the calling thread is one of the threads
                for buffer in buffers[1:]:
                    work.start(functools.partial(work.run, buffer))
                work.run(buffers[0])
        work.raise_error()
    return memory.nbytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _BufferPlan:
    """The memory and the threads for a sequence of requests.

    Attributes:
        buffer_nbytes: size of a buffer in bytes.
        count: number of buffers.
        reader_count: number of threads that only read; 0 where each thread reads and takes.
    """

    buffer_nbytes: int
    count: int
    reader_count: int

    def cut(self, memory: memoryview) -> list[memoryview]:
        """Return the buffers in a memory of their total size."""
        nbytes = self.buffer_nbytes
        return [memory[number * nbytes : (number + 1) * nbytes] for number in range(self.count)]


def _plan_buffers(store: Ranges, requests: Sequence[Request]) -> _BufferPlan:
    longest_nbytes = max(request.nbytes for request in requests)
    # Two more pages: direct I/O begins and ends at page boundaries.
    buffer_nbytes = (-(-longest_nbytes // PAGE_NBYTES) + 2) * PAGE_NBYTES
    reader_count = 0
    count = thread_count()
    most_nbytes = IN_FLIGHT_NBYTES
    if store.is_remote:
        reader_count = REMOTE_READER_COUNT
        count = 2 * REMOTE_READER_COUNT
        most_nbytes = REMOTE_IN_FLIGHT_NBYTES
    elif sum(request.nbytes for request in requests) <= _SMALL_NBYTES:
        count = 1
    elif store.waits(requests[0].path):
        reader_count = READER_COUNT
        count = WAITING_BUFFER_COUNT
    count = max(1, min(count, len(requests), most_nbytes // buffer_nbytes))
    if count == 1:
        reader_count = 0
    return _BufferPlan(buffer_nbytes=buffer_nbytes, count=count, reader_count=reader_count)


def thread_count() -> int:
    """Return the number of threads that check and place."""
    return min(THREAD_COUNT, len(os.sched_getaffinity(0)))


def _read_beside_taking(
    work: _RequestQueue, buffers: Sequence[memoryview], reader_count: int
) -> None:
    """Read with some threads, and take with other threads."""
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


class _RequestQueue:
    """The requests of a read, drawn one after the other by any free thread.

    A context that ends all threads of the work.
    """

    def __init__(self, store: Ranges, requests: Sequence[Request], take: _Take) -> None:
        self._files = _RequestFiles(store, requests)
        self._requests = requests
        self._take = take
        # The lock guards all attributes below.
        self._changed = threading.Condition()
        self._next = 0
        self._open_count = 0
        self._running_count = 0
        self._has_ended = False
        self._failed: tuple[int, BaseException] | None = None  # the first in the order of requests

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def run(self, buffer: memoryview) -> None:
        """Read and take requests until no request is left or a request has failed."""
        while (number := self.draw()) is not None:
            content = self.read(number, buffer)
            if content is not None:
                self.take(number, content)

    def draw(self) -> int | None:
        """Return the number of the next request; None if no request is left or one has failed."""
        with self._changed:
            if self._next == len(self._requests):
                return None
            self._next += 1
            self._open_count += 1
            return self._next - 1

    def read(self, number: int, buffer: memoryview) -> memoryview | None:
        """Return the bytes of a request; None if the request failed."""
        request = self._requests[number]
        try:
            file = self._files.open(request.path)
            try:
                return file.read_into(request.byte_begin, request.nbytes, buffer)
            finally:
                self._files.close_after(request.path)
        except BaseException as error:  # noqa: BLE001
            self._finish(number, error)
            return None

    def take(self, number: int, content: memoryview) -> None:
        """Pass the bytes of a request on, unless an earlier request has failed."""
        error: BaseException | None = None
        failed = self._failed
        try:
            if failed is None or number < failed[0]:
                self._take(self._requests[number], content)
        except BaseException as caught:  # noqa: BLE001
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
        """Run a function in `count` new threads; return the number of threads that were started."""

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
                # A daemon thread, because the interpreter waits at exit for all non-daemon threads,
                # even for blocked ones.
                threading.Thread(target=run_counted, name="ckptfmt-read", daemon=True).start()
            except RuntimeError:  # too many threads, or the interpreter shuts down
                return started_count
        return count

    def wait(self) -> None:
        """Wait until all requests are taken.

        After a failure, wait until all requests that had begun are finished.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: not self._open_count and self._next == len(self._requests)
            )

    def end(self, wake: Callable[[], None] = lambda: None) -> None:
        """Let no further request begin, and wait for the other threads.

        Args:
            wake: wakes threads that wait for a buffer or a request.
        """
        interruption: BaseException | None = None
        while True:
            # An interruption is raised only after the loop: the destination must not change once
            # the caller continues. `Thread.join` isn't used, because before Python 3.13 an
            # interrupted `join` marks a running thread as ended.
            try:
                with self._changed:
                    self._next = len(self._requests)
                    self._has_ended = True
                    wake()
                    while self._running_count:
                        self._changed.wait()
                break
            except BaseException as error:  # noqa: BLE001
                interruption = error
        self._files.close()
        if interruption is not None:
            raise interruption

    def raise_error(self) -> None:
        """Raise the error of the first failed request.

        All earlier requests began before the failed request, and have ended.
        """
        if self._failed is not None:
            raise self._failed[1]


class _RequestFiles:
    """Files that are open from their first request to their last.

    For requests in the order of files, few files are open at a time.
    """

    def __init__(self, store: Ranges, requests: Sequence[Request]) -> None:
        self._store = store
        self._left = Counter(request.path for request in requests)
        self._lock = threading.Lock()
        self._open: dict[str, tuple[RangeReader, contextlib.ExitStack]] = {}

    def open(self, path: str) -> RangeReader:
        """Return a file for one request, and open the file if necessary.

        A call of `close_after` must follow.
        """
        with self._lock:
            if path not in self._open:
                stack = contextlib.ExitStack()
                self._open[path] = (stack.enter_context(self._store.open_ranges(path)), stack)
            return self._open[path][0]

    def close_after(self, path: str) -> None:
        """Close a file after its last request."""
        with self._lock:
            self._left[path] -= 1
            if not self._left[path]:
                self._open.pop(path)[1].close()

    def close(self) -> None:
        """Close the files that are still open because some requests never began."""
        for _, stack in self._open.values():
            stack.close()
        self._open.clear()


# --- work ahead -----------------------------------------------------------------------------------


Item = TypeVar("Item")
Result = TypeVar("Result")

#: Number of items per thread that are in progress or wait to be taken, in addition to the item just
#: taken.
WAITING: Final = 2


def iter_ahead(
    work: Callable[[Item], Result],
    items: Iterable[Item],
    *,
    count: int | None = None,
    ahead_count: int | None = None,
) -> Iterator[Result]:
    """Yield the result of `work` for each item, in order, with few results in memory at a time.

    Args:
        count: number of threads; None for `thread_count`.
        ahead_count: number of items in progress or waiting to be taken, in addition to the item
            just taken; None for `WAITING` per thread.

    Raises: an error of `work` when the item's turn has come.

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
    """Yield items in lists, to reduce the cost of handing over single small items.

    A list ends once its size reaches `nbytes` bytes or `count` items.

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
            batch = []
            batch_nbytes = 0
    if batch:
        yield batch
