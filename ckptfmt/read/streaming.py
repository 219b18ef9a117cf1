"""Read requests with several threads through a few reused buffers; run other work ahead of its use.

Both happen in constant memory. Each thread reads a request, then checks and places the bytes, while
they are in the processor's cache. Where file contents are in memory, each processor has a thread.
Where reads wait for storage, more threads keep the storage's queue full. Over a network, requests
are longer and still more requests are in flight.

A device copies from the buffers while the host reads on. A buffer is filled again only after the
device's copies out of the buffer have ended.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Final, Protocol, Self, TypeAlias, TypeVar

from ckptfmt.layout.read_plan import Request
from ckptfmt.store.direct import make_memory
from ckptfmt.store.protocol import PAGE_NBYTES, RangeReader
from ckptfmt.write.processors import processor_count

#: Called with a request and its bytes, which are valid until the call returns.
_Take: TypeAlias = "Callable[[Request, memoryview], None]"


class Loan(Protocol):
    """Memory from which a device copies. The calls of a loan come from any thread."""

    def mark(self, buffer: memoryview) -> None:
        """Remember the copies that were enqueued so far, as copies out of `buffer`.

        Raises: the errors of the device.
        """

    def wait(self, buffer: memoryview) -> None:
        """Wait until all marked copies out of `buffer` have ended. Raises: as `mark`."""

    def wait_all(self) -> None:
        """Wait until all copies out of the memory have ended. Raises: as `mark`."""


#: Called with memory; lends the memory to a device for the time of the returned context. The end of
#: the context waits for the device.
Borrow: TypeAlias = Callable[[memoryview], AbstractContextManager[Loan]]

#: Maximum size of a request in bytes. Measured with a cold page cache, larger buffers are slower to
#: fill: four buffers of 4 MiB reach three quarters of the rate of four buffers of 1 MiB. With a
#: warm page cache both sizes are equally fast, since 1 MiB stays in the processor's cache.
REQUEST_NBYTES: Final = 1 << 20
#: Maximum size of a request in bytes where a device copies from the buffers. A copy of this size
#: takes 20 times as long as its start.
LENT_REQUEST_NBYTES: Final = 4 << 20
#: Maximum number of threads that check and place; fewer on a machine with fewer processors, or with
#: several trainers. Sixteen processors digest more bytes per second than most memory delivers.
THREAD_COUNT: Final = 16
#: Number of threads, besides those of `thread_count`, where reads wait for a disk: enough for the
#: disk's queue, and two more threads between two requests.
READER_COUNT: Final = 6
#: Maximum total size of the buffers in bytes; one buffer is always allocated.
IN_FLIGHT_NBYTES: Final = 32 << 20
#: Request size, number of further threads and total buffer size for remote stores. A request takes
#: 20 to 100 ms until the first byte, and a connection transfers 50 to 90 MB/s. With 8 MiB the
#: latency is a small part of a request. Fifteen such requests, in 128 MiB of buffers, fill a link
#: of 5 Gbit/s.
REMOTE_REQUEST_NBYTES: Final = 8 << 20
REMOTE_READER_COUNT: Final = 16
REMOTE_IN_FLIGHT_NBYTES: Final = 128 << 20
#: Number of buffers for each thread where a device copies from the buffers: the device copies from
#: one buffer while the thread fills the other.
LENT_BUFFER_COUNT: Final = 2
#: Maximum total size in bytes of buffers from which a device copies.
LENT_IN_FLIGHT_NBYTES: Final = 128 << 20
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


class BufferMemory:
    """The memory of the buffers, kept from one read to the next. A context.

    Args:
        borrow: lends the memory to a device; None without a device.

    Attributes:
        loan: the loan of the memory; None without a device, or before the first read.
    """

    def __init__(self, borrow: Borrow | None = None) -> None:
        self.loan: Loan | None = None
        self._borrow = borrow
        self._memory = memoryview(b"")
        self._lent = contextlib.ExitStack()

    @property
    def is_lent(self) -> bool:
        """Whether a device copies from the memory."""
        return self._borrow is not None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._memory = memoryview(b"")
        self._lent.__exit__(kind, error, traceback)

    def reserve(self, nbytes: int) -> memoryview:
        """Return memory that begins at a page. No copy out of the memory is in progress.

        Raises: the errors of the device.
        """
        if self._memory.nbytes < nbytes:
            self._lent.close()
            self._memory = make_memory(nbytes)
            if self._borrow is not None:
                self.loan = self._lent.enter_context(self._borrow(self._memory))
        return self._memory[:nbytes]


def stream_requests(
    store: Ranges, requests: Sequence[Request], take: _Take, *, memory: BufferMemory | None = None
) -> int:
    """Read every request, and call `take` with each; return the total size of the buffers in bytes.

    After an error no further request begins. If several requests fail, the error of the first of
    them in the order of the requests is raised, independently of the timing of the threads.

    When the call returns, the device's copies out of the buffers have ended.

    Args:
        take: called with each request and its bytes, by several threads at once. In a loan, `take`
            may leave copies out of the bytes in progress.
        memory: the memory for the buffers; None for memory of this call.

    Raises: the errors of the store, of `take` and of the loan.
    """
    if not requests:
        return 0
    memory = BufferMemory() if memory is None else memory
    plan = _plan_buffers(store, requests, is_lent=memory.is_lent)
    shares = plan.cut(memory.reserve(plan.nbytes))
    loan = memory.loan
    with _RequestQueue(store, requests, take, loan) as work:
        for buffers in shares[1:]:
            work.start(functools.partial(work.run, buffers))
        work.run(shares[0])  # the calling thread is one of the threads
    try:
        if loan is not None:
            loan.wait_all()
    except Exception:
        work.raise_error()  # the error of a request says more
        raise
    work.raise_error()
    return plan.nbytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _BufferPlan:
    """The buffers and the threads for a sequence of requests.

    Attributes:
        buffer_nbytes: size of a buffer in bytes.
        count: number of buffers.
        thread_count: maximum number of threads.
    """

    buffer_nbytes: int
    count: int
    thread_count: int

    @property
    def nbytes(self) -> int:
        """The total size of the buffers in bytes."""
        return self.buffer_nbytes * self.count

    def cut(self, memory: memoryview) -> list[list[memoryview]]:
        """Return each thread's buffers in a memory of the total size."""
        nbytes = self.buffer_nbytes
        buffers = [memory[number * nbytes : (number + 1) * nbytes] for number in range(self.count)]
        thread_count = min(self.thread_count, self.count)
        return [buffers[number::thread_count] for number in range(thread_count)]


def _plan_buffers(store: Ranges, requests: Sequence[Request], *, is_lent: bool) -> _BufferPlan:
    longest_nbytes = max(request.nbytes for request in requests)
    # Two more pages: direct I/O begins and ends at page boundaries.
    buffer_nbytes = (-(-longest_nbytes // PAGE_NBYTES) + 2) * PAGE_NBYTES
    most_nbytes = LENT_IN_FLIGHT_NBYTES if is_lent else IN_FLIGHT_NBYTES
    threads = thread_count()
    if store.is_remote:
        threads += REMOTE_READER_COUNT
        most_nbytes = REMOTE_IN_FLIGHT_NBYTES
    elif sum(request.nbytes for request in requests) <= _SMALL_NBYTES:
        threads = 1
    elif store.waits(requests[0].path):
        threads += READER_COUNT
    count = threads * (LENT_BUFFER_COUNT if is_lent else 1)
    count = max(1, min(count, len(requests), most_nbytes // buffer_nbytes))
    return _BufferPlan(buffer_nbytes=buffer_nbytes, count=count, thread_count=threads)


def thread_count() -> int:
    """Return the number of threads that check and place: this trainer's share of the processors."""
    return min(THREAD_COUNT, processor_count())


class _RequestQueue:
    """The requests of a read, drawn one after the other by any free thread.

    A context that ends all threads of the work.
    """

    def __init__(
        self, store: Ranges, requests: Sequence[Request], take: _Take, loan: Loan | None = None
    ) -> None:
        self._files = _RequestFiles(store, requests)
        self._requests = requests
        self._take = take
        self._loan = loan
        # The lock guards all attributes below.
        self._changed = threading.Condition()
        self._next = 0
        self._running_count = 0
        self._has_ended = False
        self._failed: tuple[int, BaseException] | None = None  # the first in the order of requests

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def run(self, buffers: Sequence[memoryview]) -> None:
        """Read and take requests until no request is left or a request has failed.

        Args:
            buffers: the buffers of this thread, used in turn.
        """
        for buffer in itertools.cycle(buffers):
            number = self._draw()
            if number is None:
                return
            try:
                self._pass_on(number, buffer)
            except BaseException as error:  # noqa: BLE001
                self._fail(number, error)

    def _draw(self) -> int | None:
        """Return the number of the next request; None if no request is left or one has failed."""
        with self._changed:
            if self._next == len(self._requests):
                return None
            self._next += 1
            return self._next - 1

    def _pass_on(self, number: int, buffer: memoryview) -> None:
        """Read a request, and take the bytes unless an earlier request has failed."""
        request = self._requests[number]
        if self._loan is not None:
            self._loan.wait(buffer)
        file = self._files.open(request.path)
        try:
            content = file.read_into(request.byte_begin, request.nbytes, buffer)
        finally:
            self._files.close_after(request.path)
        failed = self._failed
        if failed is not None and failed[0] < number:
            return
        try:
            self._take(request, content)
        finally:  # copies may be in progress after an error, too
            if self._loan is not None:
                self._loan.mark(buffer)

    def _fail(self, number: int, error: BaseException) -> None:
        with self._changed:
            self._next = len(self._requests)
            if self._failed is None or number < self._failed[0]:
                self._failed = (number, error)

    def start(self, run: Callable[[], None]) -> None:
        """Run a function in a new thread, if a thread can be started."""

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

        # RuntimeError: too many threads, or the interpreter shuts down
        with contextlib.suppress(RuntimeError):
            # A daemon thread, because the interpreter waits at exit for all non-daemon threads,
            # even for blocked ones.
            threading.Thread(target=run_counted, name="ckptfmt-read", daemon=True).start()

    def end(self) -> None:
        """Let no further request begin, and wait for the other threads."""
        interruption: BaseException | None = None
        while True:
            # An interruption is raised only after the loop: the destination must not change once
            # the caller continues. `Thread.join` isn't used, because before Python 3.13 an
            # interrupted `join` marks a running thread as ended.
            try:
                with self._changed:
                    self._next = len(self._requests)
                    self._has_ended = True
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
