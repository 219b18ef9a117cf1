"""Writing and reading files at the speed of their device: past the page cache where that is quicker.

A new file's large aligned chunks are written past it, two requests at a time.

Buffered writing copies every byte once more, on the processor that the training needs, and leaves the device idle until
the kernel decides to write. Here a chunk that is aligned in memory and in the file is handed to the device as it is
(``O_DIRECT``); what isn't, and everything on a file system that knows no such writing, goes through the page cache.
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

#: From what size on a chunk is written or read directly, in bytes: below, the page cache is quicker than a round trip.
DIRECT_NBYTES: Final = 1 << 20
#: Longest request, in bytes. Measured: 2 MiB to 16 MiB are within 3 % of each other, the longest ahead.
REQUEST_NBYTES: Final = 16 << 20
#: How much room a growing file is given at once, in bytes. Measured: 1 % to 5 % quicker than without, for the size of
#: a file needn't be made durable at every request, and requests don't wait for each other to change it.
ROOM_NBYTES: Final = 256 << 20
#: From what size on a file is taken for a growing one.
GROWING_NBYTES: Final = 64 << 20
_THREAD_COUNT: Final = 2
_HUGE_PAGE_NBYTES: Final = 2 << 20
#: How many bytes `in_pages` yields at first, and how many at once at most: the store shall have something to do early,
#: and few requests.
_FIRST_NBYTES: Final = 1 << 20
_CHUNK_NBYTES: Final = 4 << 20
#: What a file system says that has no direct writing, or none of this alignment.
_REFUSALS: Final = frozenset({errno.EINVAL, errno.EOPNOTSUPP})


class FileWriter:
    """Write chunks one behind the other to a file that is new, empty and open for writing.

    A context manager, to be used from one thread: at its end all is written (but not yet durable), after an exception
    some of it; either way no request is under way any more and no thread is left. A chunk must stay as it is until
    then. The descriptor stays open.

    Args:
        calls: the system calls to use.
        fd: of the file.
        nbytes: how large it will be, where that is known: room is made for all of it before the first request.
    """

    def __init__(self, calls: PosixCalls, fd: int, *, nbytes: int | None = None) -> None:
        self._calls = calls
        self._fd = fd
        self._nbytes = 0  # handed over so far: the file's size at the end
        self._expected_nbytes = nbytes
        self._room_nbytes: int | None = 0  # asked for so far; None: the file system has none to give
        self._requests: _Requests | None = None
        self._is_direct = False
        self._is_refused = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._requests is None:
            return
        try:
            if kind is None:
                self._finish(self._requests)
        finally:
            self._requests.close()

    def write(self, chunk: Buffer) -> None:
        """Hand over the next chunk. An error of an earlier one may come out here, or at the end."""
        rest = memoryview(chunk).cast("B")
        if self._may_go_direct(rest) and (requests := self._begin_direct()):
            whole_nbytes = len(rest) - len(rest) % PAGE_NBYTES
            for byte_begin in range(0, whole_nbytes, REQUEST_NBYTES):
                self._submit(requests, rest[byte_begin : min(byte_begin + REQUEST_NBYTES, whole_nbytes)])
            rest = rest[whole_nbytes:]
        if rest:
            self._write_buffered(rest)

    def _may_go_direct(self, chunk: memoryview) -> bool:
        if self._is_refused or len(chunk) < DIRECT_NBYTES or self._nbytes % PAGE_NBYTES:
            return False
        return np.frombuffer(chunk, np.uint8).ctypes.data % PAGE_NBYTES == 0

    def _begin_direct(self) -> _Requests | None:
        """Return where to submit direct writes; None if the file system refuses them."""
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
        """Let a file that goes on growing be larger than it is, so that the next requests don't have to enlarge it."""
        if self._room_nbytes is None or nbytes <= self._room_nbytes:
            return
        if self._expected_nbytes is not None and nbytes <= self._expected_nbytes:
            # Now, while nothing is under way: else it waits for all requests, and they for it.
            self._room_nbytes = self._expected_nbytes
        elif self._nbytes < GROWING_NBYTES:
            return
        else:
            # Never more than there is already: of a disk that is nearly full, others need the rest.
            self._room_nbytes = self._nbytes + min(self._nbytes, ROOM_NBYTES)
        try:
            self._calls.preallocate(self._fd, self._room_nbytes)
        except OSError:
            # It is a courtesy. What is wrong with the disk, the next write says.
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
        """Wait for the direct writes, and write what of them was refused."""
        # No page is written both ways at once: that a page in the cache and one on its way to the device agree
        # isn't promised by any kernel.
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
    """Direct writes under way: one in each thread, and one that waits for the first that ends.

    Attributes:
        refused: positions and contents of what the file system doesn't take this way; it is to be written buffered.
    """

    def __init__(self, calls: PosixCalls, fd: int) -> None:
        self.refused: list[tuple[int, memoryview]] = []
        self._calls = calls
        self._fd = fd
        # All below changes under this lock only. It is looked at again after every wait, so that an interruption of
        # the caller, wherever it strikes, loses count of nothing.
        self._changed = threading.Condition()
        self._waiting: deque[tuple[int, memoryview]] = deque()
        self._active_count = 0
        self._stopping = False
        self._error: BaseException | None = None
        self._threads: list[threading.Thread] = []

    def submit(self, byte_begin: int, piece: memoryview) -> None:
        """Take a write as soon as there is room for it. Raises: what an earlier one raised."""
        with self._changed:
            while self._active_count + len(self._waiting) > _THREAD_COUNT:
                self._changed.wait()
            self._raise_if_failed()
            self._waiting.append((byte_begin, piece))
            self._changed.notify_all()
        if len(self._threads) < _THREAD_COUNT:
            self._start()

    def wait(self) -> None:
        """Wait until no write is under way. Raises: what one of them raised."""
        with self._changed:
            while self._active_count or self._waiting:
                self._changed.wait()
            self._raise_if_failed()

    def close(self) -> None:
        """Drop what waits, wait for what is under way, and end the threads."""
        interruption: BaseException | None = None
        while True:
            # An interruption has to wait: the descriptor will be closed, its number may be another file's next, and a
            # thread that still writes would write there. (That it has ended isn't asked of `Thread.join`, which takes
            # a thread for ended when it is interrupted, before Python 3.13.)
            try:
                with self._changed:
                    self._stopping = True
                    self._waiting.clear()  # a thread that is just about to take one finds none
                    self._changed.notify_all()
                    while self._active_count:
                        self._changed.wait()
                break
            except BaseException as error:  # noqa: BLE001 - raised below
                interruption = error
        for thread in self._threads:
            if thread.is_alive():  # or interrupted in its start: it will find that it has nothing to do
                thread.join()
        if interruption is not None:
            raise interruption

    def _raise_if_failed(self) -> None:
        if self._error is not None:
            raise self._error

    def _start(self) -> None:
        # A daemon: the interpreter's end, which waits for the others, may come while the chunks' maker waits for more.
        thread = threading.Thread(target=self._work, name="ckptfmt-write", daemon=True)
        self._threads.append(thread)
        try:
            thread.start()
        except RuntimeError:  # there are too many, or the interpreter is about to end
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
                return  # the other thread was quicker
            request = self._waiting.popleft()
            self._active_count += 1
        error: BaseException | None = None
        try:
            if self._error is None:
                self._write(*request)
        except BaseException as caught:  # noqa: BLE001 - raised where the caller is
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
            # Whatever is taken beyond the last whole page is written again, so that the next request is aligned too.
            whole_nbytes = taken_nbytes - taken_nbytes % PAGE_NBYTES
            if not whole_nbytes:
                self.refused.append((byte_begin, rest))
                return
            byte_begin += whole_nbytes
            rest = rest[whole_nbytes:]


class FileReader:
    """Read ranges of an open file: past the page cache, if little of the file is in it.

    Buffered, a cold file comes at a third of its device's rate (measured), and pushes what is in use out of the cache.
    A file that is mostly in the cache is quicker from there. For any number of threads; the descriptor stays open, and
    is used by nobody else meanwhile.

    Args:
        calls: the system calls to use.
        fd: of the file, open for reading.
        nbytes: its size.
    """

    def __init__(self, calls: PosixCalls, fd: int, *, nbytes: int) -> None:
        self.nbytes: Final = nbytes
        self._calls = calls
        self._fd = fd
        self._is_direct = nbytes >= DIRECT_NBYTES and not is_cached(calls, fd, nbytes) and self._set_direct()

    def read_into(self, byte_begin: int, nbytes: int, buffer: memoryview) -> memoryview:
        """Read a range into `buffer`; return what came, where it is: less than `nbytes` if the file has shrunk."""
        if not self._is_direct:
            return buffer[: self._read(byte_begin, buffer[:nbytes])]
        first = byte_begin % PAGE_NBYTES
        whole_nbytes = -(-(first + nbytes) // PAGE_NBYTES) * PAGE_NBYTES
        if whole_nbytes > len(buffer) or np.frombuffer(buffer, np.uint8).ctypes.data % PAGE_NBYTES:
            raise ValueError(f"{len(buffer)} bytes have no room for {nbytes} in whole pages")
        done_nbytes = self._read(byte_begin - first, buffer[:whole_nbytes])
        return buffer[first : min(first + nbytes, max(first, done_nbytes))]

    def _read(self, byte_begin: int, buffer: memoryview) -> int:
        """Fill `buffer`, up to the file's end; return how many bytes came."""
        done_nbytes = 0
        while done_nbytes < len(buffer):
            taken_nbytes = self._calls.read_into_at(self._fd, buffer[done_nbytes:], byte_begin + done_nbytes)
            done_nbytes += taken_nbytes
            if not taken_nbytes or (self._is_direct and taken_nbytes % PAGE_NBYTES):
                break  # a direct read ends off a page only at the file's end
        return done_nbytes

    def _set_direct(self) -> bool:
        """Let all reads go past the page cache; False where the file system refuses, at once or at the first read.

        A first page that can't be read isn't told here: whoever reads it meets that, and knows what was asked for.
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
    """Return memory from a page's begin on: of huge pages, and from the begin of one on, where the kernel gives them.

    Measured: direct reads into pages of 4 KiB reach half the rate of those into huge ones.
    """
    if nbytes < _HUGE_PAGE_NBYTES:
        return memoryview(mmap.mmap(-1, nbytes))  # the mapping goes with the last view of it
    # A mapping begins at any small page, and only what lies between the begins of huge ones can be one.
    memory = mmap.mmap(-1, nbytes + 2 * _HUGE_PAGE_NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    first = -np.frombuffer(memory, np.uint8).ctypes.data % _HUGE_PAGE_NBYTES
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # None for the last few bytes: the kernel clears all of a page when its first byte is touched.
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE, first, nbytes - nbytes % _HUGE_PAGE_NBYTES)
    return memoryview(memory)[first : first + nbytes]


def in_pages(pieces: Iterable[Buffer]) -> Iterator[memoryview]:
    """Yield the same bytes in chunks such as a file takes past the page cache: whole pages, from the begin of one on.

    A piece may be changed once the next one is asked for.
    """
    memory, filled_nbytes = make_memory(_FIRST_NBYTES), 0
    for piece in pieces:
        rest = memoryview(piece).cast("B")
        while rest:
            taken_nbytes = min(len(rest), len(memory) - filled_nbytes)
            # By numpy, which lets other threads run meanwhile: a memoryview doesn't.
            target = np.frombuffer(memory[filled_nbytes : filled_nbytes + taken_nbytes], np.uint8)
            np.copyto(target, np.frombuffer(rest[:taken_nbytes], np.uint8))
            filled_nbytes += taken_nbytes
            rest = rest[taken_nbytes:]
            if filled_nbytes == len(memory):
                yield memory
                # The store may still be writing it.
                memory, filled_nbytes = make_memory(min(2 * len(memory), _CHUNK_NBYTES)), 0
    if filled_nbytes:
        yield memory[:filled_nbytes]


def is_cached(calls: PosixCalls, fd: int, nbytes: int) -> bool:
    """Say whether most of a file is in the page cache; True where the kernel can't tell."""
    try:
        return calls.cached_page_count(fd, 0, nbytes) * PAGE_NBYTES > nbytes // 2
    except OSError:
        return True
