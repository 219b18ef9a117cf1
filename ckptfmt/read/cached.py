"""Read a run's files from a node's cache where the cached copy is intact, else from the home store.

Spec: REQ-RUN-038.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Final

from ckptfmt import limits
from ckptfmt.documents.manifest import part_path
from ckptfmt.documents.part import Part
from ckptfmt.errors import CkptError, StoreError
from ckptfmt.read.verified_files import VerifiedFile, stored_files_of
from ckptfmt.store.protocol import Buffer, Names, RangeReader, Store, join_path

_STORED_NAME: Final = re.compile(
    r"[a-z][a-z_]{0,40}-([0-9a-f]{16})-([0-9]{5,9})\.(?:safetensors|pack)"
)


@dataclasses.dataclass(slots=True)
class _Seen:
    """The results of the checks of cached files, by their paths relative to the run.

    Each file has its own lock.
    """

    report: Callable[[str], None]
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)  # guards `locks`
    locks: dict[str, threading.Lock] = dataclasses.field(default_factory=dict)
    is_whole: dict[str, bool] = dataclasses.field(default_factory=dict)
    files: dict[str, dict[str, VerifiedFile]] = dataclasses.field(default_factory=dict)


class CachedStore:
    """A run's home store, with shards and packs read from a node's cache after a check.

    The first access to a cached file reads the whole file and compares every byte with the digests
    in its part, which is read from the home store. A file that fails the check is reported and read
    from the home store. The cached copy is also deleted, unless the failure is a store error. A
    cached file that disappears or becomes unreadable after the check is read from the home store.
    Documents are always read from the home store, and every change goes to the home store.

    Args:
        home: the home store, rooted at the run.
        cache: the cache, rooted at the cache's directory for the run.
        report: called with a sentence for each cached file that fails the check, from any thread.
    """

    def __init__(self, home: Store, cache: Store, report: Callable[[str], None]) -> None:
        self._home = home
        self._cache = cache
        self._prefix = ""
        self._seen = _Seen(report)

    @property
    def name(self) -> str:
        """The name of the home store."""
        return self._home.name

    @property
    def is_remote(self) -> bool:
        """Whether the home store is remote."""
        return self._home.is_remote

    @property
    def holds_expire(self) -> bool:
        """Whether holds in the home store expire; see `Store.holds_expire`."""
        return self._home.holds_expire

    def at(self, prefix: str) -> CachedStore:
        """Return the same store with the directory `prefix` as root; see `Store.at`."""
        return self._of(
            self._home.at(prefix), self._cache.at(prefix), join_path(self._prefix, prefix)
        )

    def beside(self, name: str) -> CachedStore:
        """Return the store of the sibling directory `name`; see `Store.beside`."""
        upper = self._prefix.rpartition("/")[0]
        return self._of(self._home.beside(name), self._cache.beside(name), join_path(upper, name))

    # --- reading ----------------------------------------------------------------------------------

    def read(self, path: str, *, limit_nbytes: int) -> bytes:
        """Return a whole small file from the home store; see `Store.read`."""
        return self._home.read(path, limit_nbytes=limit_nbytes)

    def read_range(self, path: str, byte_begin: int, nbytes: int) -> bytes:
        """Return a range of a file, from the cache if possible; see `Store.read_range`."""
        if self._is_whole(path):
            with contextlib.suppress(CkptError):
                return self._cache.read_range(path, byte_begin, nbytes)
        return self._home.read_range(path, byte_begin, nbytes)

    @contextlib.contextmanager
    def open_ranges(self, path: str) -> Iterator[RangeReader]:
        """Open a file for range reads, from the cache if possible; see `Store.open_ranges`."""
        with contextlib.ExitStack() as stack:
            found: RangeReader | None = None
            if self._is_whole(path):
                with contextlib.suppress(CkptError):
                    cached = stack.enter_context(self._cache.open_ranges(path))
                    found = _CachedRanges(
                        cached, lambda: stack.enter_context(self._home.open_ranges(path))
                    )
            yield found or stack.enter_context(self._home.open_ranges(path))

    def nbytes(self, path: str) -> int:
        """Return a file's size in bytes; see `Store.nbytes`."""
        if self._is_whole(path):
            with contextlib.suppress(CkptError):
                return self._cache.nbytes(path)
        return self._home.nbytes(path)

    def waits(self, path: str) -> bool:
        """Return whether reads of a file wait; see `Store.waits`."""
        return (self._cache if self._is_whole(path) else self._home).waits(path)

    def list(self, prefix: str) -> Names:
        """Return the paths in the home store; see `Store.list`."""
        return self._home.list(prefix)

    def list_names(self, prefix: str) -> Names:
        """Return the names in the home store; see `Store.list_names`."""
        return self._home.list_names(prefix)

    # --- other calls of the home store ------------------------------------------------------------

    def create(self, path: str, chunks: Iterable[Buffer]) -> None:
        """Create a file in the home store; see `Store.create`."""
        self._home.create(path, chunks)

    def replace(self, path: str, data: bytes) -> None:
        """Replace a file in the home store; see `Store.replace`."""
        self._home.replace(path, data)

    def delete(self, path: str) -> None:
        """Remove a file from the home store; see `Store.delete`."""
        self._home.delete(path)

    def delete_leftovers(self, prefix: str) -> None:
        """Remove unfinished files from the home store; see `Store.delete_leftovers`."""
        self._home.delete_leftovers(prefix)

    def remove_directory(self, path: str) -> None:
        """Remove empty directories from the home store; see `Store.remove_directory`."""
        self._home.remove_directory(path)

    def sync(self, path: str) -> None:
        """Make names in the home store durable; see `Store.sync`."""
        self._home.sync(path)

    def hold(self, path: str) -> AbstractContextManager[None]:
        """Hold a file in the home store; see `Store.hold`."""
        return self._home.hold(path)

    def is_held(self, path: str) -> bool:
        """Return whether a process holds a file in the home store; see `Store.is_held`."""
        return self._home.is_held(path)

    def list_held(self, prefix: str, wanted: Callable[[str], object] = bool) -> Names:
        """Return the names of held files in the home store; see `Store.list_held`."""
        return self._home.list_held(prefix, wanted)

    # --- the check of cached files ----------------------------------------------------------------

    def _of(self, home: Store, cache: Store, prefix: str) -> CachedStore:
        other = CachedStore(home, cache, self._seen.report)
        other._prefix = prefix
        other._seen = self._seen
        return other

    def _is_whole(self, path: str) -> bool:
        """Return whether a file may be read from the cache.

        The first call for a file compares every byte.
        """
        named = _STORED_NAME.fullmatch(path)
        if named is None:
            return False
        key = join_path(self._prefix, path)
        with self._seen.lock:
            lock = self._seen.locks.setdefault(key, threading.Lock())
        with lock:
            if key not in self._seen.is_whole:
                self._seen.is_whole[key] = self._look(path, part_path(named[1], int(named[2])))
            return self._seen.is_whole[key]

    def _look(self, path: str, path_of_part: str) -> bool:
        with contextlib.suppress(CkptError):
            self._cache.nbytes(path)
            file = self._files_of(path_of_part).get(path)
            return file is not None and self._verify(file)
        return False  # the cached file or its part is missing; a reader of the part gets the error

    def _files_of(self, path_of_part: str) -> dict[str, VerifiedFile]:
        key = join_path(self._prefix, path_of_part)
        if key not in self._seen.files:
            content = self._home.read(path_of_part, limit_nbytes=limits.MSGPACK_NBYTES)
            files = stored_files_of(Part.parse(content, where=path_of_part)[0])
            self._seen.files[key] = {file.path: file for file in files}
        return self._seen.files[key]

    def _verify(self, file: VerifiedFile) -> bool:
        try:
            for _ in file.iter_chunks(self._cache):
                pass
        except CkptError as error:
            self._seen.report(
                f"CACHE_DAMAGED: {join_path(self._prefix, file.path)} is read from home: {error}"
            )
            if not isinstance(error, StoreError):  # a store error doesn't prove damage
                with contextlib.suppress(CkptError):
                    self._cache.delete(file.path)
            return False
        return True


class _CachedRanges:
    """A range reader of a cached file that switches to the home store after a failed read."""

    def __init__(self, cached: RangeReader, open_home: Callable[[], RangeReader]) -> None:
        self._reader = cached
        self._open_home: Callable[[], RangeReader] | None = open_home
        self._lock = threading.Lock()

    def read_into(self, byte_begin: int, nbytes: int, buffer: memoryview) -> memoryview:
        """Read a range; see `RangeReader.read_into`."""
        try:
            return self._reader.read_into(byte_begin, nbytes, buffer)
        except CkptError:
            with self._lock:
                if self._open_home is not None:
                    self._reader = self._open_home()
                    self._open_home = None
            return self._reader.read_into(byte_begin, nbytes, buffer)
