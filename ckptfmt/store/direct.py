"""Fast reads and writes of files: direct I/O instead of the page cache where that is faster.

Large aligned chunks of a new file are written by direct I/O, with two concurrent requests.

A buffered write copies every byte once more, on the processor that the training needs, and leaves
the device idle until the kernel writes back. A direct write passes a chunk that is aligned in
memory and in the file straight to the device (``O_DIRECT``). Unaligned data, and all data on a file
system without direct I/O, goes through the page cache.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Final, Self

import numpy as np

from ckptfmt.store.posix import PosixCalls
from ckptfmt.store.protocol import PAGE_NBYTES, Buffer

#: Minimum size of a direct read or write, in bytes. Below, the page cache is faster than a round
#: trip to the device.
DIRECT_NBYTES: Final = 1 << 20
#: Maximum size of a request, in bytes. Measured: 2 MiB to 16 MiB differ by less than 3 %; 16 MiB is
#: the fastest.
REQUEST_NBYTES: Final = 16 << 20
#: Maximum preallocation step of a growing file, in bytes. Measured: 1 % to 5 % faster than without.
#: The kernel needn't make the file's size durable at every request, and requests don't wait for
#: each other to change the size.
ROOM_NBYTES: Final = 256 << 20
#: Minimum size of a growing file, in bytes.
GROWING_NBYTES: Final = 64 << 20
_THREAD_COUNT: Final = 2
_HUGE_PAGE_NBYTES: Final = 2 << 20
#: Sizes of the first and of the largest chunk from `in_pages`, in bytes. A small first chunk starts
#: the store early, and large chunks keep the number of requests low.
_FIRST_NBYTES: Final = 1 << 20
_CHUNK_NBYTES: Final = 4 << 20
#: Error numbers of a file system without direct I/O, or without direct I/O of this alignment.
_REFUSALS: Final = frozenset({errno.EINVAL, errno.EOPNOTSUPP})


class FileWriter:
    """A context manager that writes chunks one after the other to a new, empty file.

    For one thread only. After the context all chunks are written (but not yet durable); after an
    exception, some of them. In both cases no request is in progress and no thread is left. A chunk
    must stay unchanged until then. The descriptor stays open.

    Args:
        calls: the system calls to use.
        fd: the file's descriptor, open for writing.
        nbytes: the final size in bytes, if known: the file is preallocated before the first
            request.
    """

    def __init__(self, calls: PosixCalls, fd: int, *, nbytes: int | None = None) -> None:
        self._calls = calls
        self._fd = fd
        self._nbytes = 0  # passed so far: the file's size at the end
        self._expected_nbytes = nbytes
        self._room_nbytes: int | None = 0  # preallocated so far; None: preallocation failed
        self._requests: _Requests | None = None
        self._is_direct = False
        self._is_refused = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._requests is None:
            return
        try:
            if kind is None:
                self._finish(self._requests)
        finally:
            self._requests.close()

    def write(self, chunk: Buffer) -> None:
        """Write the next chunk, at once or in the background.

        Raises: the error of an earlier chunk. The end of the context may raise the error, too.
        """
        rest = memoryview(chunk).cast("B")
        if self._may_go_direct(rest) and (requests := self._begin_direct()):
            whole_nbytes = len(rest) - len(rest) % PAGE_NBYTES
            for byte_begin in range(0, whole_nbytes, REQUEST_NBYTES):
                self._submit(
                    requests, rest[byte_begin : min(byte_begin + REQUEST_NBYTES, whole_nbytes)]
                )
            rest = rest[whole_nbytes:]
        if rest:
            self._write_buffered(rest)

    def _may_go_direct(self, chunk: memoryview) -> bool:
        if self._is_refused or len(chunk) < DIRECT_NBYTES or self._nbytes % PAGE_NBYTES:
            return False
        return np.frombuffer(chunk, np.uint8).ctypes.data % PAGE_NBYTES == 0

    def _begin_direct(self) -> _Requests | None:
        """Return the queue for direct writes; None if the file system refuses direct writes."""
        if self._requests is not None and self._requests.refused:
            self._is_refused = True
            return None
        if not self._is_direct:
            try:
                self._calls.set_direct(self._fd, on=True)
            except OSError as error:
                if error.errno not in _REFUSALS:
                    raise
                self._is_refused = True
                return None
            self._is_direct = True
        self._requests = self._requests or _Requests(self._calls, self._fd)
        return self._requests

    def _submit(self, requests: _Requests, piece: memoryview) -> None:
        self._make_room(self._nbytes + len(piece))
        requests.submit(self._nbytes, piece)
        self._nbytes += len(piece)

    def _make_room(self, nbytes: int) -> None:
        """Preallocate space for a growing file, so that the next requests don't extend it."""
        if self._room_nbytes is None or nbytes <= self._room_nbytes:
            return
        if self._expected_nbytes is not None and nbytes <= self._expected_nbytes:
            # Preallocate before the first request. Later, preallocation and requests would wait for
            # each other.
            self._room_nbytes = self._expected_nbytes
        elif self._nbytes < GROWING_NBYTES:
            return
        else:
            # At most double the file: on a nearly full disk, other files need the rest.
            self._room_nbytes = self._nbytes + min(self._nbytes, ROOM_NBYTES)
        try:
            self._calls.preallocate(self._fd, self._room_nbytes)
        except OSError:
            # Preallocation is optional. The next write reports a real problem of the disk.
            self._calls.truncate(self._fd, self._nbytes)
            self._room_nbytes = None

    def _write_buffered(self, chunk: memoryview) -> None:
        if self._requests is None:
            while chunk:
                taken_nbytes = self._calls.write(self._fd, chunk)
                self._nbytes += taken_nbytes
                chunk = chunk[taken_nbytes:]
            return
        self._end_direct(self._requests)
        self._write_at(chunk, self._nbytes)
        self._nbytes += len(chunk)

    def _end_direct(self, requests: _Requests) -> None:
        """Wait for the direct writes, then write the refused ones buffered."""
        # No page may be written directly and buffered at once: no kernel guarantees that the cached
        # page and the page on its way to the device agree.
        requests.wait()
        if self._is_direct:
            self._calls.set_direct(self._fd, on=False)
            self._is_direct = False
        while requests.refused:
            byte_begin, piece = requests.refused.pop()
            self._is_refused = True
            self._write_at(piece, byte_begin)

    def _write_at(self, rest: memoryview, byte_begin: int) -> None:
        while rest:
            taken_nbytes = self._calls.write_at(self._fd, rest, byte_begin)
            byte_begin += taken_nbytes
            rest = rest[taken_nbytes:]

    def _finish(self, requests: _Requests) -> None:
        requests.wait()
        if requests.refused:
            self._end_direct(requests)
        if self._room_nbytes is not None and self._room_nbytes > self._nbytes:
            self._calls.truncate(self._fd, self._nbytes)


class _Requests:
    """The direct writes in progress: one in each thread. One more write may wait for a free thread.

    Attributes:
        refused: positions and contents of the writes that the file system refused; these are to be
            written buffered.
    """

    def __init__(self, calls: PosixCalls, fd: int) -> None:
        self.refused: list[tuple[int, memoryview]] = []
        self._calls = calls
        self._fd = fd
        # All attributes below change only under this lock. Every wait rechecks its condition, so
        # that an interruption of the caller at any point corrupts no count.
        self._changed = threading.Condition()
        self._waiting: deque[tuple[int, memoryview]] = deque()
        self._active_count = 0
        self._stopping = False
        self._error: BaseException | None = None
        self._threads: list[threading.Thread] = []

    def submit(self, byte_begin: int, piece: memoryview) -> None:
        """Queue a write as soon as there is a free place. Raises: the error of an earlier write."""
        with self._changed:
            while self._active_count + len(self._waiting) > _THREAD_COUNT:
                self._changed.wait()
            self._raise_if_failed()
            self._waiting.append((byte_begin, piece))
            self._changed.notify_all()
        if len(self._threads) < _THREAD_COUNT:
            self._start()

    def wait(self) -> None:
        """Wait until no write is in progress. Raises: the error of a write."""
        with self._changed:
            while self._active_count or self._waiting:
                self._changed.wait()
            self._raise_if_failed()

    def close(self) -> None:
        """Drop the queued write, wait for the writes in progress, and end the threads."""
        interruption: BaseException | None = None
        while True:
            # An interruption must wait. The descriptor will be closed, another file may then get
            # its number, and a thread that still writes would write into the other file.
            # `Thread.join` doesn't suffice: before Python 3.13 an interrupted join marks the thread
            # as ended.
            try:
                with self._changed:
                    self._stopping = True
                    self._waiting.clear()  # a thread that is about to take a write finds none
                    self._changed.notify_all()
                    while self._active_count:
                        self._changed.wait()
                break
            except BaseException as error:  # noqa: BLE001
                interruption = error
        for thread in self._threads:
            if thread.is_alive():  # or interrupted in its start: it ends at once
                thread.join()
        if interruption is not None:
            raise interruption

    def _raise_if_failed(self) -> None:
        if self._error is not None:
            raise self._error

    def _start(self) -> None:
        # A daemon thread: at exit the interpreter waits for other threads, also while the chunks'
        # producer is blocked.
        thread = threading.Thread(target=self._work, name="ckptfmt-write", daemon=True)
        self._threads.append(thread)
        try:
            thread.start()
        except RuntimeError:  # too many threads, or the interpreter shuts down
            self._threads.remove(thread)
            while not self._threads and self._waiting:
                self._do_next()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._stopping:
                    self._changed.wait()
                if self._stopping:
                    return
            self._do_next()

    def _do_next(self) -> None:
        with self._changed:
            if not self._waiting:
                return  # the other thread took the write
            request = self._waiting.popleft()
            self._active_count += 1
        error: BaseException | None = None
        try:
            if self._error is None:
                self._write(*request)
        except BaseException as caught:  # noqa: BLE001
            error = caught
        with self._changed:
            self._error = self._error or error
            self._active_count -= 1
            self._changed.notify_all()

    def _write(self, byte_begin: int, rest: memoryview) -> None:
        while rest:
            try:
                taken_nbytes = self._calls.write_at(self._fd, rest, byte_begin)
            except OSError as error:
                if error.errno not in _REFUSALS:
                    raise
                taken_nbytes = 0
            # Bytes after the last whole page are written again, so that the next request is aligned
            # too.
            whole_nbytes = taken_nbytes - taken_nbytes % PAGE_NBYTES
            if not whole_nbytes:
                self.refused.append((byte_begin, rest))
                return
            byte_begin += whole_nbytes
            rest = rest[whole_nbytes:]


class FileReader:
    """A reader of ranges of an open file, by direct I/O if the page cache holds little of the file.

    A buffered read of a cold file reaches a third of the device's rate (measured), and evicts other
    data from the cache. A file that is mostly cached is faster from the cache. Any number of
    threads may read. The descriptor stays open, and no other code may use the descriptor meanwhile.

    Args:
        calls: the system calls to use.
        fd: the file's descriptor, open for reading.
        nbytes: the file's size in bytes.
    """

    def __init__(self, calls: PosixCalls, fd: int, *, nbytes: int) -> None:
        self.nbytes: Final = nbytes
        self._calls = calls
        self._fd = fd
        self._is_direct = (
            nbytes >= DIRECT_NBYTES and not is_cached(calls, fd, nbytes) and self._set_direct()
        )

    def read_into(self, byte_begin: int, nbytes: int, buffer: memoryview) -> memoryview:
        """Read a range into `buffer`, and return a view of the bytes read.

        The view is shorter than `nbytes` if the file has shrunk.

        Raises: ValueError for a direct read into a buffer that is too small or not page-aligned;
            OSError.
        """
        if not self._is_direct:
            return buffer[: self._read(byte_begin, buffer[:nbytes])]
        first = byte_begin % PAGE_NBYTES
        whole_nbytes = -(-(first + nbytes) // PAGE_NBYTES) * PAGE_NBYTES
        if whole_nbytes > len(buffer) or np.frombuffer(buffer, np.uint8).ctypes.data % PAGE_NBYTES:
            raise ValueError(f"{len(buffer)} bytes have no room for {nbytes} in whole pages")
        done_nbytes = self._read(byte_begin - first, buffer[:whole_nbytes])
        return buffer[first : min(first + nbytes, max(first, done_nbytes))]

    def _read(self, byte_begin: int, buffer: memoryview) -> int:
        """Fill `buffer`, up to the end of the file; return the number of bytes read."""
        done_nbytes = 0
        while done_nbytes < len(buffer):
            taken_nbytes = self._calls.read_into_at(
                self._fd, buffer[done_nbytes:], byte_begin + done_nbytes
            )
            done_nbytes += taken_nbytes
            if not taken_nbytes or (self._is_direct and taken_nbytes % PAGE_NBYTES):
                break  # a direct read ends inside a page only at the file's end
        return done_nbytes

    def _set_direct(self) -> bool:
        """Switch all reads to direct I/O; return False where the file system refuses.

        The file system may refuse at once or at the first read. An I/O error of the first page
        isn't raised here: the read that needs the page raises it, with the requested range.
        """
        try:
            self._calls.set_direct(self._fd, on=True)
            self._calls.read_into_at(self._fd, memoryview(mmap.mmap(-1, PAGE_NBYTES)), 0)
        except OSError:
            with contextlib.suppress(OSError):
                self._calls.set_direct(self._fd, on=False)
            return False
        return True


def make_memory(nbytes: int) -> memoryview:
    """Return memory that starts at a page boundary, in huge pages where the kernel has them.

    Memory in huge pages starts at the boundary of a huge page. Measured: direct reads into pages of
    4 KiB reach half the rate of direct reads into huge pages.
    """
    if nbytes < _HUGE_PAGE_NBYTES:
        return memoryview(mmap.mmap(-1, nbytes))  # the mapping is freed with its last view
    # A mapping starts at any small page. Only the part between boundaries of huge pages can be
    # huge.
    memory = mmap.mmap(
        -1, nbytes + 2 * _HUGE_PAGE_NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )
    first = -np.frombuffer(memory, np.uint8).ctypes.data % _HUGE_PAGE_NBYTES
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # No huge page for the last bytes: the kernel clears a whole page at the first access.
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE, first, nbytes - nbytes % _HUGE_PAGE_NBYTES)
    return memoryview(memory)[first : first + nbytes]


def in_pages(pieces: Iterable[Buffer]) -> Iterator[memoryview]:
    """Yield the same bytes in chunks for direct I/O: whole pages that start at a page boundary.

    A piece may be changed once the next piece is requested.
    """
    memory = make_memory(_FIRST_NBYTES)
    filled_nbytes = 0
    for piece in pieces:
        rest = memoryview(piece).cast("B")
        while rest:
            taken_nbytes = min(len(rest), len(memory) - filled_nbytes)
            # numpy releases the GIL during the copy, unlike a memoryview.
            target = np.frombuffer(memory[filled_nbytes : filled_nbytes + taken_nbytes], np.uint8)
            np.copyto(target, np.frombuffer(rest[:taken_nbytes], np.uint8))
            filled_nbytes += taken_nbytes
            rest = rest[taken_nbytes:]
            if filled_nbytes == len(memory):
                yield memory
                # The store may still be writing the yielded memory.
                memory = make_memory(min(2 * len(memory), _CHUNK_NBYTES))
                filled_nbytes = 0
    if filled_nbytes:
        yield memory[:filled_nbytes]


def is_cached(calls: PosixCalls, fd: int, nbytes: int) -> bool:
    """Return whether the page cache holds most of a file; True where the kernel can't tell."""
    try:
        return calls.cached_page_count(fd, 0, nbytes) * PAGE_NBYTES > nbytes // 2
    except OSError:
        return True
