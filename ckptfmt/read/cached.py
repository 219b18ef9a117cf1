"""Read a run's files from a node's cache where they are whole there, and from home otherwise. Spec: REQ-RUN-038."""

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

_STORED_NAME: Final = re.compile(r"[a-z][a-z_]{0,40}-([0-9a-f]{16})-([0-9]{5,9})\.(?:safetensors|pack)")


@dataclasses.dataclass(slots=True)
class _Seen:
    """What was found out of cached files, by their paths from the run on; each under its own lock."""

    report: Callable[[str], None]
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)  # guards the dictionary of locks
    locks: dict[str, threading.Lock] = dataclasses.field(default_factory=dict)
    is_whole: dict[str, bool] = dataclasses.field(default_factory=dict)
    files: dict[str, dict[str, VerifiedFile]] = dataclasses.field(default_factory=dict)


class CachedStore:
    """A run's home, of which shards and packs are read from a cache once every byte of them was seen to be right.

    A cached file is read through when it is first asked for, and compared with the digests of its part at home. One
    that fails is reported, deleted, and read from home; so is one that goes, or can't be read, later. Documents are
    read from home, and all that writes goes there.

    Args:
        home: rooted at the run.
        cache: rooted where the cache has the run's files.
        report: called with a sentence for each cached file that isn't what was saved, from any thread.
    """

    def __init__(self, home: Store, cache: Store, report: Callable[[str], None]) -> None:
        self._home, self._cache = home, cache
        self._prefix = ""
        self._seen = _Seen(report)

    @property
    def name(self) -> str:
        """The name of the home."""
        return self._home.name

    @property
    def is_remote(self) -> bool:
        """Whether the home is."""
        return self._home.is_remote

    @property
    def holds_expire(self) -> bool:
        """See `Store.holds_expire`."""
        return self._home.holds_expire

    def at(self, prefix: str) -> CachedStore:
        """Return the same store with a directory as root; see `Store.at`."""
        return self._of(self._home.at(prefix), self._cache.at(prefix), join_path(self._prefix, prefix))

    def beside(self, name: str) -> CachedStore:
        """Return the directory of that name beside this one; see `Store.beside`."""
        upper = self._prefix.rpartition("/")[0]
        return self._of(self._home.beside(name), self._cache.beside(name), join_path(upper, name))

    # --- reading ------------------------------------------------------------------------------------------------------

    def read(self, path: str, *, limit_nbytes: int) -> bytes:
        """Return a whole small file, of home; see `Store.read`."""
        return self._home.read(path, limit_nbytes=limit_nbytes)

    def read_range(self, path: str, byte_begin: int, nbytes: int) -> bytes:
        """Return bytes of a file; see `Store.read_range`."""
        if self._is_whole(path):
            with contextlib.suppress(CkptError):
                return self._cache.read_range(path, byte_begin, nbytes)
        return self._home.read_range(path, byte_begin, nbytes)

    @contextlib.contextmanager
    def open_ranges(self, path: str) -> Iterator[RangeReader]:
        """Open a file to read ranges of it; see `Store.open_ranges`."""
        with contextlib.ExitStack() as stack:
            found: RangeReader | None = None
            if self._is_whole(path):
                with contextlib.suppress(CkptError):
                    cached = stack.enter_context(self._cache.open_ranges(path))
                    found = _Ranges(cached, lambda: stack.enter_context(self._home.open_ranges(path)))
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
        """Return the paths of home; see `Store.list`."""
        return self._home.list(prefix)

    def list_names(self, prefix: str) -> Names:
        """Return the names of home; see `Store.list_names`."""
        return self._home.list_names(prefix)

    # --- all else is home's -------------------------------------------------------------------------------------------

    def create(self, path: str, chunks: Iterable[Buffer]) -> None:
        """See `Store.create`."""
        self._home.create(path, chunks)

    def replace(self, path: str, data: bytes) -> None:
        """See `Store.replace`."""
        self._home.replace(path, data)

    def delete(self, path: str) -> None:
        """See `Store.delete`."""
        self._home.delete(path)

    def delete_leftovers(self, prefix: str) -> None:
        """See `Store.delete_leftovers`."""
        self._home.delete_leftovers(prefix)

    def remove_directory(self, path: str) -> None:
        """See `Store.remove_directory`."""
        self._home.remove_directory(path)

    def sync(self, path: str) -> None:
        """See `Store.sync`."""
        self._home.sync(path)

    def hold(self, path: str) -> AbstractContextManager[None]:
        """See `Store.hold`."""
        return self._home.hold(path)

    def is_held(self, path: str) -> bool:
        """See `Store.is_held`."""
        return self._home.is_held(path)

    def list_held(self, prefix: str, wanted: Callable[[str], object] = bool) -> Names:
        """See `Store.list_held`."""
        return self._home.list_held(prefix, wanted)

    # --- what is whole ------------------------------------------------------------------------------------------------

    def _of(self, home: Store, cache: Store, prefix: str) -> CachedStore:
        other = CachedStore(home, cache, self._seen.report)
        other._prefix, other._seen = prefix, self._seen
        return other

    def _is_whole(self, path: str) -> bool:
        """Return whether a file may be read from the cache; every byte is compared when it is asked for first."""
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
        return False  # it isn't there; or its part isn't, which the reader is told when it asks for that

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
            self._seen.report(f"CACHE_DAMAGED: {join_path(self._prefix, file.path)} is read from home: {error}")
            if not isinstance(error, StoreError):  # which says nothing of what the cache holds
                with contextlib.suppress(CkptError):
                    self._cache.delete(file.path)
            return False
        return True


class _Ranges:
    """Ranges of a cached file; from the first one on that it can't give, of the file at home."""

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
                    self._reader, self._open_home = self._open_home(), None
            return self._reader.read_into(byte_begin, nbytes, buffer)
