"""Read requests through a few reused buffers: several at a time, each handed on where it lies, in constant memory.

A thread takes a request, reads it into its own buffer, and hands it on before it takes another. So what was read is
checked and copied while it is in the processor's cache; while one thread waits for the device, others do that.
"""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np

from ckptfmt.store.protocol import PAGE_NBYTES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckptfmt.arithmetic.plan import Request
    from ckptfmt.store.protocol import RangeReader, Store

__all__ = ["IN_FLIGHT_NBYTES", "REQUEST_NBYTES", "Borrow", "ReadReport", "stream_requests"]

#: Is given memory, and has it until its context ends: a device may want to know of it.
Borrow: TypeAlias = Callable[[memoryview], AbstractContextManager[None]]

#: Longest request, in bytes. Measured: of files in the page cache, 1 MiB takes a fifth more of the processors' time.
REQUEST_NBYTES: Final = 4 << 20
#: Measured: files in the page cache need as many as there are processors, and a device's queue needs four.
THREAD_COUNT: Final = 4
#: Most bytes of buffers, where one request leaves the choice.
IN_FLIGHT_NBYTES: Final = 32 << 20
#: What is quicker to read in this thread than to start others for, in bytes.
_SMALL_NBYTES: Final = 1 << 20
_HUGE_PAGE_NBYTES: Final = 2 << 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReadReport:
    """What was read for a load.

    Attributes:
        needed_nbytes: of the elements that were asked for.
        read_nbytes: of shards, block edges and gaps included.
        verified_nbytes: of blocks that were compared with their digests.
        request_count: how many ranges of shards were read.
        received_nbytes: of elements that another process read, and sent.
        buffer_nbytes: of buffers, beside the destination.
        metadata_nbytes: of manifest, index, parts and shard headers.
    """

    needed_nbytes: int = 0
    read_nbytes: int = 0
    verified_nbytes: int = 0
    request_count: int = 0
    received_nbytes: int = 0
    buffer_nbytes: int = 0
    metadata_nbytes: int = 0


def stream_requests(
    store: Store,
    requests: Sequence[Request],
    take: Callable[[Request, memoryview], None],
    *,
    borrow: Borrow | None = None,
) -> int:
    """Read every request, and give each to `take`; return how many bytes of buffers that took.

    After an error no more requests are begun, and the error of the first request that has one is raised: which
    one that is doesn't depend on the threads.

    Args:
        take: called with a request and its bytes, which are valid until it returns; by several threads at once.
        borrow: is given all memory of buffers, for as long as it is used.

    Raises: what the store and `take` raise.
    """
    if not requests:
        return 0
    longest_nbytes = max(request.nbytes for request in requests)
    is_small = sum(request.nbytes for request in requests) <= _SMALL_NBYTES
    # Two pages more: what is read past the page cache begins and ends at pages.
    buffer_nbytes = (-(-longest_nbytes // PAGE_NBYTES) + 2) * PAGE_NBYTES
    count = 1 if is_small else max(1, min(THREAD_COUNT, len(requests), IN_FLIGHT_NBYTES // buffer_nbytes))
    memory = _make_memory(buffer_nbytes * count)
    with contextlib.nullcontext() if borrow is None else borrow(memory):
        buffers = [memory[number * buffer_nbytes : (number + 1) * buffer_nbytes] for number in range(count)]
        _run(_Work(store, requests, take), buffers)
    return buffer_nbytes * count


def _run(work: _Work, buffers: Sequence[memoryview]) -> None:
    """Do all the work: in a thread for each buffer, of which this is one."""
    own, *others = buffers
    try:
        for buffer in others:
            # A daemon: at its end the interpreter waits for the others, whatever they wait for.
            threading.Thread(target=work.run_beside, args=(buffer,), name="ckptfmt-read", daemon=True).start()
    except RuntimeError:
        pass  # there are too many, or the interpreter is about to end: then fewer do it all
    try:
        work.run(own)
    finally:
        work.end()
    work.raise_error()


class _Work:
    """Requests to be taken one after the other, by whichever thread is free."""

    def __init__(self, store: Store, requests: Sequence[Request], take: Callable[[Request, memoryview], None]) -> None:
        self._files = _Files(store, requests)
        self._requests = requests
        self._take = take
        # All below changes under this lock only.
        self._changed = threading.Condition()
        self._next = 0
        self._active_count = 0
        self._errors: dict[int, BaseException] = {}

    def run_beside(self, buffer: memoryview) -> None:
        """Do as `run`, in a thread that `end` waits for."""
        with self._changed:
            if self._next == len(self._requests):
                return
            self._active_count += 1
        try:
            self.run(buffer)
        finally:
            with self._changed:
                self._active_count -= 1
                self._changed.notify_all()

    def run(self, buffer: memoryview) -> None:
        """Take requests until there are none left, or one has failed."""
        while (number := self._draw()) is not None:
            request = self._requests[number]
            try:
                with self._files.opened(request.path) as file:
                    content = file.read_into(request.byte_begin, request.nbytes, buffer)
                self._take(request, content)
            except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
                with self._changed:
                    self._errors[number] = error
                    self._next = len(self._requests)

    def end(self) -> None:
        """Let no more requests be begun, and wait for those that are under way."""
        interruption: BaseException | None = None
        while True:
            # An interruption has to wait: the destination mustn't change once the caller goes on. (That a thread has
            # ended isn't asked of `Thread.join`, which takes it for ended when interrupted, before Python 3.13.)
            try:
                with self._changed:
                    self._next = len(self._requests)
                    while self._active_count:
                        self._changed.wait()
                break
            except BaseException as error:  # noqa: BLE001 - raised below
                interruption = error
        self._files.close()
        if interruption is not None:
            raise interruption

    def raise_error(self) -> None:
        """Raise the error of the first request that has one: all before it were begun before it, and have ended."""
        if self._errors:
            raise self._errors[min(self._errors)]

    def _draw(self) -> int | None:
        with self._changed:
            if self._next == len(self._requests):
                return None
            self._next += 1
            return self._next - 1


class _Files:
    """Files that are open from the first request for them to the last; of requests in their order, few at a time."""

    def __init__(self, store: Store, requests: Sequence[Request]) -> None:
        self._store = store
        self._left = Counter(request.path for request in requests)
        self._lock = threading.Lock()
        self._open: dict[str, tuple[RangeReader, contextlib.ExitStack]] = {}

    @contextlib.contextmanager
    def opened(self, path: str) -> Iterator[RangeReader]:
        with self._lock:
            if path not in self._open:
                stack = contextlib.ExitStack()
                self._open[path] = (stack.enter_context(self._store.open_ranges(path)), stack)
            file = self._open[path][0]
        try:
            yield file
        finally:
            with self._lock:
                self._left[path] -= 1
                if not self._left[path]:
                    self._open.pop(path)[1].close()

    def close(self) -> None:
        """Close what is still open, after requests that were never begun."""
        for _, stack in self._open.values():
            stack.close()
        self._open.clear()


def _make_memory(nbytes: int) -> memoryview:
    """Return memory from a page's begin on: of huge pages, and from the begin of one on, where the kernel gives them.

    Measured: direct reads into pages of 4 KiB reach half the rate of those into huge ones.
    """
    if nbytes < _HUGE_PAGE_NBYTES:
        return memoryview(mmap.mmap(-1, nbytes))  # the mapping goes with the last view of it
    # A mapping begins at any small page, and only what lies between the begins of huge ones can be one.
    memory = mmap.mmap(-1, nbytes + 2 * _HUGE_PAGE_NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    first = -np.frombuffer(memory, np.uint8).ctypes.data % _HUGE_PAGE_NBYTES
    return memoryview(memory)[first : first + nbytes]
