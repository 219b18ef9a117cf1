"""A remote store: another store behind a link with a given rate in bytes per second."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager

from ckptfmt.store import Buffer, Store
from ckptfmt.store.protocol import Names, RangeReader, SizedChunks


class Link:
    """A link that all bytes pass in turn, in both directions; thread-safe.

    Bytes occupy the link for their whole transmission. The sender's work meanwhile costs no extra
    time: a store as fast as the link is no slower behind the link.

    Args:
        nbytes_per_s: the link's rate.
        clock: the function that returns the time in seconds.
        sleep: the function that waits for seconds.

    Attributes:
        written_nbytes: the bytes transmitted to the store.
        read_nbytes: the bytes transmitted from the store.
    """

    def __init__(
        self,
        nbytes_per_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._nbytes_per_s = nbytes_per_s
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._free_at_s = clock()
        self.written_nbytes = 0
        self.read_nbytes = 0

    @contextlib.contextmanager
    def write(self, nbytes: int) -> Iterator[None]:
        """Transmit bytes to the store while the context processes them."""
        with self._lock:
            self.written_nbytes += nbytes
        with self._pass(nbytes):
            yield

    @contextlib.contextmanager
    def read(self, nbytes: int) -> Iterator[None]:
        """Transmit bytes back while the context gets them."""
        with self._lock:
            self.read_nbytes += nbytes
        with self._pass(nbytes):
            yield

    @contextlib.contextmanager
    def _pass(self, nbytes: int) -> Iterator[None]:
        with self._lock:
            self._free_at_s = arrived_s = (
                max(self._clock(), self._free_at_s) + nbytes / self._nbytes_per_s
            )
        yield
        left_s = arrived_s - self._clock()
        if left_s > 0:
            self._sleep(left_s)


class ThrottledStore:
    """A `ckptfmt.store.Store` with contents behind a link. Names, sizes and listings take no time.

    The class isn't a `LocalStore`, even around a local store, so that no other process opens the
    same directory directly.
    """

    def __init__(self, inner: Store, link: Link) -> None:
        self._inner = inner
        self._link = link

    @property
    def name(self) -> str:
        """The place in words."""
        return self._inner.name

    @property
    def is_remote(self) -> bool:
        """False: bytes take time, but requests don't."""
        return False

    def at(self, prefix: str) -> Store:
        """Return the same store, behind the same link, with `prefix` as root."""
        return ThrottledStore(self._inner.at(prefix), self._link)

    def beside(self, name: str) -> Store:
        """Return the neighbouring store, behind the same link."""
        return ThrottledStore(self._inner.beside(name), self._link)

    def create(self, path: str, chunks: Iterable[Buffer]) -> None:
        """Create a file, writing each chunk after its transmission."""
        passing: Iterable[Buffer] = self._iter_passing(chunks)
        if isinstance(chunks, SizedChunks):
            passing = SizedChunks(passing, chunks.nbytes)
        self._inner.create(path, passing)

    def replace(self, path: str, data: bytes) -> None:
        """Replace a file by `data`."""
        with self._link.write(len(data)):
            self._inner.replace(path, data)

    def read(self, path: str, *, limit_nbytes: int) -> bytes:
        """Return a whole small file."""
        content = self._inner.read(path, limit_nbytes=limit_nbytes)
        with self._link.read(len(content)):
            return content

    def read_range(self, path: str, byte_begin: int, nbytes: int) -> bytes:
        """Return a range of a file."""
        with self._link.read(nbytes):
            return self._inner.read_range(path, byte_begin, nbytes)

    @contextlib.contextmanager
    def open_ranges(self, path: str) -> Iterator[RangeReader]:
        """Open a file with ranges behind the link."""
        with self._inner.open_ranges(path) as ranges:
            yield _ThrottledRanges(ranges, self._link)

    def waits(self, path: str) -> bool:  # noqa: ARG002
        """Return True, since reads wait."""
        return True

    def nbytes(self, path: str) -> int:
        """Return a file's size."""
        return self._inner.nbytes(path)

    def list(self, prefix: str) -> Names:
        """Return the paths of all files below `prefix`."""
        return self._inner.list(prefix)

    def list_names(self, prefix: str) -> Names:
        """Return the names in the directory `prefix`."""
        return self._inner.list_names(prefix)

    def delete(self, path: str) -> None:
        """Remove a file."""
        self._inner.delete(path)

    def delete_leftovers(self, prefix: str) -> None:
        """Remove leftovers of killed writers."""
        self._inner.delete_leftovers(prefix)

    def remove_directory(self, path: str) -> None:
        """Remove a directory without files."""
        self._inner.remove_directory(path)

    def sync(self, path: str) -> None:
        """Make names durable."""
        self._inner.sync(path)

    def hold(self, path: str) -> AbstractContextManager[None]:
        """Hold a file."""
        return self._inner.hold(path)

    @property
    def holds_expire(self) -> bool:
        """Return whether a stopped holder's hold expires."""
        return self._inner.holds_expire

    def is_held(self, path: str) -> bool:
        """Return whether a process holds a file."""
        return self._inner.is_held(path)

    def list_held(self, prefix: str, wanted: Callable[[str], object] = bool) -> Names:
        """Return the held files in a directory."""
        return self._inner.list_held(prefix, wanted)

    def _iter_passing(self, chunks: Iterable[Buffer]) -> Iterator[Buffer]:
        for chunk in chunks:
            # The inner store writes a chunk during the transmission, and asks for the next chunk
            # afterwards.
            with self._link.write(memoryview(chunk).nbytes):
                yield chunk


class _ThrottledRanges:
    """An open file behind a link; see `RangeReader`."""

    def __init__(self, inner: RangeReader, link: Link) -> None:
        self._inner = inner
        self._link = link

    def read_into(self, byte_begin: int, nbytes: int, buffer: memoryview) -> memoryview:
        """Read exactly a range."""
        with self._link.read(nbytes):
            return self._inner.read_into(byte_begin, nbytes, buffer)
