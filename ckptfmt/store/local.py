"""A store in a directory of a file system: whole files, exclusive creation, no symlinks.

A file is first written under a temporary name in its directory. Large aligned chunks are written by
direct I/O (`ckptfmt.store.direct`). The file is fsynced and closed, and then receives its name by
``link``, which fails if the name is taken (``rename`` would silently overwrite a file). Names
become durable in `LocalStore.sync`.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from typing import Final, TypeVar

from ckptfmt.errors import CkptError, Code, FormatError, IntegrityError, err, remedy_of
from ckptfmt.store.direct import FileReader, FileWriter, is_cached
from ckptfmt.store.posix import Hold, PosixCalls, is_held
from ckptfmt.store.protocol import (
    TEMPORARY_PREFIX,
    Buffer,
    Names,
    RangeReader,
    SizedChunks,
    check_path,
    check_prefix,
    join_path,
)

T = TypeVar("T")

_CODES: Final = {
    errno.ENOSPC: Code.NO_SPACE,
    errno.EDQUOT: Code.NO_SPACE,
    errno.EACCES: Code.STORE_ACCESS,
    errno.EPERM: Code.STORE_ACCESS,
    errno.EROFS: Code.STORE_ACCESS,
    errno.ENOENT: Code.FILE_MISSING,
    errno.ELOOP: Code.UNSAFE_FILE,
    errno.ENOTDIR: Code.UNSAFE_FILE,
    errno.EISDIR: Code.UNSAFE_FILE,
    errno.ENXIO: Code.UNSAFE_FILE,  # the error of open() for a socket
    errno.ENAMETOOLONG: Code.UNSAFE_PATH,
    errno.EILSEQ: Code.UNSAFE_PATH,
    errno.ETIMEDOUT: Code.STORE_NO_ANSWER,
}
_CLAUSES: Final = {
    Code.FILE_MISSING: "REQ-CKP-004",
    Code.UNSAFE_FILE: "REQ-CKP-002",
    Code.UNSAFE_PATH: "REQ-CKP-001",
}
#: Errors of a file system that doesn't support a call.
_REFUSALS: Final = frozenset(
    {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EMLINK, errno.EXDEV}
)
#: Errors that are tolerated for an ancestor of the root that belongs to another user.
_FOREIGN: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.EINVAL})
_KINDS: Final = {
    stat.S_IFLNK: "symlink",
    stat.S_IFDIR: "directory",
    stat.S_IFIFO: "named pipe",
    stat.S_IFSOCK: "socket",
}
#: Maximum number of attempts of a read whose NFS file handle becomes stale.
_STALE_TRIES: Final = 3
#: Names of temporary files created by a store.
_TEMPORARY: Final = re.compile(re.escape(TEMPORARY_PREFIX) + "[0-9a-f]{32}")


class LocalStore:
    """The directory `root` as a `ckptfmt.store.Store`.

    The object holds no descriptor between calls. Therefore it needs no closing, and may be pickled
    or used after a fork. The path of the root may contain symlinks; below the root no symlink is
    followed.

    Opening for writing creates a missing root, makes the root's name durable, and tests exclusive
    creation in the root. Opening for reading changes no file: a missing root is an empty store.

    Args:
        root: any path, resolved when the object is created.
        writable: whether changes are allowed (else ``STORE_ACCESS``).
        calls: the system calls to use, such as a recorder or a fault injector.

    Raises:
        CkptError: ``STORE_UNSUPPORTED`` if the file system has neither hard links nor
            ``RENAME_NOREPLACE``, or can't fsync a directory; ``UNSAFE_FILE`` if the root isn't a
            directory; the errors of every writing call.
    """

    #: Also False for network file systems, which cache names and pages; see `Store`.
    is_remote = False
    #: A lock ends only with its process; see `Store`.
    holds_expire = False

    def __init__(
        self, root: str | os.PathLike[str], *, writable: bool, calls: PosixCalls | None = None
    ) -> None:
        self._root = os.path.realpath(root)
        self._prefix = ""
        self._writable = writable
        self._calls = PosixCalls() if calls is None else calls
        self._has_link = True
        if writable:
            with self._named_errors(self._root, missing=Code.STORE_IO):
                self._make_directory(self._root)
                self._sync_ancestors()
                self._has_link = self._probe()

    @property
    def name(self) -> str:
        """The absolute path of the root."""
        return os.path.join(self._root, self._prefix) if self._prefix else self._root

    def __repr__(self) -> str:
        return f"LocalStore({self.name!r}, writable={self._writable})"

    def at(self, prefix: str) -> LocalStore:
        """Return the same store with `prefix` as root; see `Store.at`."""
        check_prefix(prefix)
        lower = copy.copy(self)
        lower._prefix = join_path(self._prefix, prefix)  # noqa: SLF001
        return lower

    def beside(self, name: str) -> LocalStore:
        """Return a read-only store of the sibling directory `name`; see `Store.beside`."""
        check_path(name)
        other = copy.copy(self)
        other._writable = False  # noqa: SLF001
        if not self._prefix:
            other._root = os.path.dirname(self._root)  # noqa: SLF001
        other._prefix = join_path(self._prefix.rpartition("/")[0], name)  # noqa: SLF001
        return other

    # Writing

    def create(self, path: str, chunks: Iterable[Buffer]) -> None:
        """Create a file exclusively and whole; see `Store.create`."""
        with self._changing(path), self._parent(path, make=True) as (directory, name):
            temporary = self._write_temporary(directory, chunks)
            try:
                self._publish(directory, temporary, name)
            except FileExistsError as error:
                raise err(
                    Code.STORE_EXISTS, f"the file is in {self.name} already", where=path
                ) from error

    def replace(self, path: str, data: bytes) -> None:
        """Write `data` in place of a file; see `Store.replace`."""
        with self._changing(path), self._parent(path, make=True) as (directory, name):
            temporary = self._write_temporary(directory, [data])
            try:
                self._calls.rename(temporary, name, directory)
            except BaseException:
                self._discard(directory, temporary)
                raise

    @contextlib.contextmanager
    def hold(self, path: str) -> Iterator[None]:
        """Hold a file while the context is open; see `Store.hold`."""
        hold = Hold(self._calls)
        try:
            with self._changing(path), self._parent(path, make=True) as (directory, name):
                hold.begin(directory, name)
            yield
        finally:
            # A file that stays does no harm, since no process holds the file. The context's own
            # error must not be hidden by an error here.
            try:
                with contextlib.suppress(OSError, CkptError), self._parent(path) as (directory, _):
                    hold.end(directory)
            finally:
                hold.release()

    def delete(self, path: str) -> None:
        """Remove a file; see `Store.delete`."""
        with (
            self._changing(path),
            contextlib.suppress(FileNotFoundError),
            self._parent(path) as (directory, name),
        ):
            self._calls.unlink(name, directory)

    def delete_leftovers(self, prefix: str) -> None:
        """Remove the temporary files of killed writers; see `Store.delete_leftovers`."""
        check_prefix(prefix)
        missing = contextlib.suppress(FileNotFoundError)
        with self._changing(prefix), missing, self._directory(self._full(prefix)) as directory:
            for name, is_directory in self._calls.scan(directory):
                if not is_directory and _TEMPORARY.fullmatch(name):
                    with contextlib.suppress(FileNotFoundError):
                        self._calls.unlink(name, directory)

    def remove_directory(self, path: str) -> None:
        """Remove a directory that holds no files; see `Store.remove_directory`."""
        check_prefix(path)
        with self._changing(path):
            outermost_first = [directory for directory, _, _ in self._walk(path)]
            for directory in reversed(outermost_first):
                self._remove_one_directory(directory)

    def sync(self, path: str) -> None:
        """Make the names in `path` and its parents durable; see `Store.sync`."""
        check_prefix(path)
        self._check_writable(path)
        with (
            self._named_errors(path),
            self._directory(self._full(path), on_each=self._calls.fsync_directory),
        ):
            pass

    # Reading

    def read(self, path: str, *, limit_nbytes: int) -> bytes:
        """Return a whole small file; see `Store.read`."""

        def read_whole() -> bytes:
            with self._opened(path) as (fd, nbytes):
                if nbytes > limit_nbytes:
                    detail = f"{nbytes} bytes, of {limit_nbytes} allowed"
                    raise err(Code.LIMIT_EXCEEDED, detail, where=path, requirement="REQ-DOC-008")
                return self._read_exactly(fd, 0, nbytes, path)

        return self._reading(path, read_whole)

    def read_range(self, path: str, byte_begin: int, nbytes: int) -> bytes:
        """Return exactly a range of a file; see `Store.read_range`."""

        def read_part() -> bytes:
            with self._opened(path) as (fd, file_nbytes):
                if not 0 <= byte_begin <= byte_begin + nbytes <= file_nbytes:
                    raise _too_short(path, byte_begin, nbytes, file_nbytes)
                return self._read_exactly(fd, byte_begin, nbytes, path)

        return self._reading(path, read_part)

    @contextlib.contextmanager
    def open_ranges(self, path: str) -> Iterator[RangeReader]:
        """Open a file to read ranges of it; see `Store.open_ranges`."""
        with contextlib.ExitStack() as stack:
            fd, nbytes = self._reading(path, lambda: stack.enter_context(self._opened(path)))
            file = FileReader(self._calls, fd, nbytes=nbytes)
            yield _OpenFile(self, path, file)

    def waits(self, path: str) -> bool:
        """Return whether most of a file is missing from the page cache; see `Store.waits`."""
        with contextlib.suppress(OSError, CkptError), self._opened(path) as (fd, nbytes):
            return not is_cached(self._calls, fd, nbytes)
        return False

    def nbytes(self, path: str) -> int:
        """Return a file's size in bytes; see `Store.nbytes`."""

        def look() -> int:
            with self._parent(path) as (directory, name):
                return _regular_nbytes(self._calls.lstat(name, directory), path)

        return self._reading(path, look)

    def is_held(self, path: str) -> bool:
        """Return whether any process holds a file; see `Store.is_held`."""

        def look() -> bool:
            with contextlib.suppress(FileNotFoundError), self._parent(path) as (directory, name):
                return is_held(self._calls, directory, name)
            return False

        return self._reading(path, look)

    def list_held(self, prefix: str, wanted: Callable[[str], object] = bool) -> Names:
        """Return the names of the held files in a directory; see `Store.list_held`."""
        held = []
        for name in filter(wanted, self.list_names(prefix)):
            with contextlib.suppress(FormatError, IntegrityError):  # not a file that can be held
                held += [name] if self.is_held(join_path(prefix, name)) else []
        return held

    def list(self, prefix: str) -> Names:
        """Return the paths of all files below `prefix`; see `Store.list`."""
        check_prefix(prefix)
        with self._named_errors(prefix):
            return sorted(
                join_path(directory, name)
                for directory, _, names in self._walk(prefix)
                for name in names
                if not name.startswith(TEMPORARY_PREFIX)
            )

    def list_names(self, prefix: str) -> Names:
        """Return the names in the directory `prefix`; see `Store.list_names`."""
        check_prefix(prefix)
        full_path = self._full(prefix)
        with (
            self._named_errors(prefix),
            contextlib.suppress(FileNotFoundError),
            self._directory(full_path) as directory,
        ):
            return sorted(
                name + "/" * is_directory
                for name, is_directory in self._calls.scan(directory)
                if not name.startswith(TEMPORARY_PREFIX)
            )
        return []

    # Opening the root

    def _make_directory(self, path: str) -> None:
        """Create a directory and its missing ancestors."""
        with contextlib.suppress(FileNotFoundError), self._at_path(path):
            return
        parent, name = os.path.split(path)
        self._make_directory(parent)
        with self._at_path(parent) as directory, contextlib.suppress(FileExistsError):
            self._calls.mkdir(name, directory)

    def _sync_ancestors(self) -> None:
        """Make the root's name and the names above durable, up to the mount point.

        The process that created the root may not have done this. Directories above another user's
        directory are that user's responsibility: an error there ends the work silently.
        """
        path = self._root
        with self._at_path(path) as directory:
            device = self._calls.fstat(directory).st_dev
        while path != os.path.dirname(path):
            path = os.path.dirname(path)
            try:
                with self._at_path(path) as directory:
                    if self._calls.fstat(directory).st_dev != device:
                        return
                    self._calls.fsync_directory(directory)
            except OSError as error:
                if error.errno not in _FOREIGN:
                    raise
                return

    def _probe(self) -> bool:
        """Test the operations on which all guarantees depend.

        Returns:
            True if files are published by ``link``, False if by ``rename_noreplace``.

        Raises:
            CkptError: ``STORE_UNSUPPORTED``.
        """
        with self._at_path(self._root) as directory:
            try:
                self._calls.fsync_directory(directory)
            except OSError as error:
                if error.errno not in _REFUSALS:
                    raise
                raise err(
                    Code.STORE_UNSUPPORTED,
                    "the file system can't fsync directories",
                    where=self.name,
                ) from error
            # Three tries, since the cleanup after another save may delete the test's files.
            for publish, is_link in (
                (self._calls.link, True),
                (self._calls.rename_noreplace, False),
            ):
                if any(self._is_exclusive(directory, publish) for _ in range(3)):
                    return is_link
        raise err(
            Code.STORE_UNSUPPORTED,
            "neither link nor renameat2 refuses a taken name",
            where=self.name,
        )

    @contextlib.contextmanager
    def _at_path(self, path: str) -> Iterator[int]:
        """Open a directory by its absolute path."""
        fd = self._calls.open_root(path)
        try:
            yield fd
        finally:
            self._release(fd)

    def _is_exclusive(self, directory: int, publish: Callable[[str, str, int], None]) -> bool:
        """Return whether `publish` creates a free name and refuses a taken name.

        The test's files are removed.
        """
        first, second, target = (self._calls.temporary_name() for _ in range(3))
        try:
            self._calls.close(self._calls.open_new(first, directory))
            self._calls.close(self._calls.open_new(second, directory))
            try:
                publish(first, target, directory)
                publish(second, target, directory)
            except OSError as error:
                if error.errno not in _REFUSALS | {errno.EEXIST, errno.ENOENT}:
                    raise
                return error.errno == errno.EEXIST
            return False
        finally:
            for name in (first, second, target):
                self._discard(directory, name)

    # Steps of create and replace

    def _write_temporary(self, directory: int, chunks: Iterable[Buffer]) -> str:
        """Write `chunks` to a new file and make the contents durable; return the file's name.

        After an exception the file is removed.
        """
        temporary = self._calls.temporary_name()
        try:
            fd = self._calls.open_new(temporary, directory)
            try:
                nbytes = chunks.nbytes if isinstance(chunks, SizedChunks) else None
                with FileWriter(self._calls, fd, nbytes=nbytes) as file:
                    for chunk in chunks:
                        file.write(chunk)
                # fsync is never repeated: after an error the kernel may drop the pages, and the
                # second call succeeds.
                self._calls.fsync(fd)
            except BaseException:
                self._release(fd)
                raise
            self._calls.close(fd)  # may be the first report of a failed write (NFS, quotas)
        except BaseException:
            self._discard(directory, temporary)
            raise
        return temporary

    def _publish(self, directory: int, temporary: str, name: str) -> None:
        """Give a temporary file its final name exclusively, or raise FileExistsError.

        In both cases the temporary name is removed.
        """
        publish = self._calls.link if self._has_link else self._calls.rename_noreplace
        try:
            publish(temporary, name, directory)
        except OSError:
            if not self._is_published(directory, temporary, name):
                raise
        except BaseException:
            self._discard(directory, temporary)
            raise
        else:
            if self._has_link:
                self._discard(directory, temporary)

    def _is_published(self, directory: int, temporary: str, name: str) -> bool:
        """Return whether `name` is this caller's file after a failed publish call.

        The temporary name is removed.

        NFS repeats a request after a lost answer, and the second answer is EEXIST although the
        first request created the name. The traditional test is a link count of two. A comparison of
        inodes gives the same answer, and isn't misled by a backup that makes hard links. Once the
        temporary name is removed, a request still in flight fails, so the answer is final.

        Raises:
            CkptError: ``STORE_NO_ANSWER`` if the outcome can't be determined.
        """
        try:
            # The open descriptor prevents reuse of the inode number by another writer's file.
            held = self._calls.open_read(temporary, directory)
            try:
                with contextlib.suppress(FileNotFoundError):
                    self._calls.unlink(temporary, directory)
                found = self._calls.lstat(name, directory)
                return os.path.samestat(found, self._calls.fstat(held))
            except FileNotFoundError:
                return False
            finally:
                self._release(held)
        except OSError as error:
            self._discard(directory, temporary)
            detail = f"whether {name} was created can't be told"
            raise err(Code.STORE_NO_ANSWER, detail, where=os.path.join(self.name, name)) from error

    def _discard(self, directory: int, name: str) -> None:
        # A leftover temporary file does no harm. An error here must not hide the original error.
        with contextlib.suppress(OSError):
            self._calls.unlink(name, directory)

    def _release(self, fd: int) -> None:
        # The descriptor was only read, or the file is discarded: an error of close has no
        # significance.
        with contextlib.suppress(OSError):
            self._calls.close(fd)

    # Finding the way

    def _full(self, path: str) -> str:
        return join_path(self._prefix, path)

    @contextlib.contextmanager
    def _directory(
        self, full_path: str, *, make: bool = False, on_each: Callable[[int], None] | None = None
    ) -> Iterator[int]:
        """Open a directory below the opened root, one component at a time.

        The function `on_each` is called with each descriptor, that of the root included.
        """
        fd = self._calls.open_root(self._root)
        try:
            if on_each:
                on_each(fd)
            for name in full_path.split("/") if full_path else []:
                upper = fd
                fd = self._open_below(fd, name, make=make)
                self._release(upper)
                if on_each:
                    on_each(fd)
            yield fd
        finally:
            self._release(fd)

    def _open_below(self, directory: int, name: str, *, make: bool) -> int:
        try:
            return self._calls.open_directory(name, directory)
        except FileNotFoundError:
            if not make:
                raise
        with contextlib.suppress(FileExistsError):
            self._calls.mkdir(name, directory)
        return self._calls.open_directory(name, directory)

    @contextlib.contextmanager
    def _parent(self, path: str, *, make: bool = False) -> Iterator[tuple[int, str]]:
        """Open the parent directory of `path`; yield its descriptor and the last component."""
        check_path(path)
        head, _, name = path.rpartition("/")
        with self._directory(self._full(head), make=make) as directory:
            yield directory, name

    @contextlib.contextmanager
    def _opened(self, path: str) -> Iterator[tuple[int, int]]:
        """Open a regular file for reading; yield its descriptor and its size in bytes."""
        with self._parent(path) as (directory, name):
            fd = self._calls.open_read(name, directory)
        try:
            yield fd, _regular_nbytes(self._calls.fstat(fd), path)
        finally:
            self._release(fd)

    def _read_exactly(self, fd: int, byte_begin: int, nbytes: int, path: str) -> bytes:
        """Return a range of a file whose size was checked before.

        Raises:
            CkptError: ``FILE_NBYTES`` if the file has shrunk meanwhile.
        """
        pieces: list[bytes] = []
        done_nbytes = 0
        while done_nbytes < nbytes:
            piece = self._calls.read_at(fd, nbytes - done_nbytes, byte_begin + done_nbytes)
            if not piece:
                raise _too_short(path, byte_begin, nbytes, byte_begin + done_nbytes)
            pieces.append(piece)
            done_nbytes += len(piece)
        return b"".join(pieces)

    def _walk(self, prefix: str) -> Iterator[tuple[str, int, Names]]:
        """Yield each directory from `prefix` down: path, descriptor, names other than directories.

        Each directory is opened from the root, so that trees of any depth need neither recursion
        nor many descriptors.
        """
        pending = [prefix]
        while pending:
            path = pending.pop()
            with (
                contextlib.suppress(FileNotFoundError),
                self._directory(self._full(path)) as directory,
            ):
                entries = self._calls.scan(directory)
                pending += [join_path(path, name) for name, is_directory in entries if is_directory]
                yield path, directory, [name for name, is_directory in entries if not is_directory]

    def _remove_one_directory(self, path: str) -> None:
        head, _, name = self._full(path).rpartition("/")
        if not name:
            return  # the opened root itself stays
        with contextlib.suppress(FileNotFoundError), self._directory(head) as directory:
            try:
                self._calls.rmdir(name, directory)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY):
                    raise

    # Errors

    @contextlib.contextmanager
    def _changing(self, path: str) -> Iterator[None]:
        """Refuse a change of a read-only store, and translate the errors of a change."""
        self._check_writable(path)
        with self._named_errors(path, missing=Code.STORE_IO):
            yield

    def _check_writable(self, path: str) -> None:
        if not self._writable:
            raise err(
                Code.STORE_ACCESS, f"{self.name} is open for reading only", where=path, remedy=""
            )

    def _reading(self, path: str, action: Callable[[], T]) -> T:
        """Return the result of `action`; repeat the call if an NFS file handle became stale."""
        stale_count = 0
        with self._named_errors(path):
            while True:
                try:
                    return action()
                except OSError as error:
                    stale_count += 1
                    if error.errno != errno.ESTALE or stale_count == _STALE_TRIES:
                        raise

    @contextlib.contextmanager
    def _named_errors(self, path: str, *, missing: Code = Code.FILE_MISSING) -> Iterator[None]:
        """Translate an OSError into a CkptError; `missing` is the code for ENOENT."""
        try:
            yield
        except OSError as error:
            raise self._named(error, path, missing=missing) from error

    def _named(self, error: OSError, path: str, *, missing: Code = Code.FILE_MISSING) -> CkptError:
        """Return the CkptError for an OSError; `missing` is the code for ENOENT."""
        code = _CODES.get(error.errno or 0, Code.STORE_IO)
        code = missing if code is Code.FILE_MISSING else code
        detail = f"{error.strerror or error}" + ("" if path == self.name else f" in {self.name}")
        return err(
            code, detail, where=path, requirement=_CLAUSES.get(code), remedy=remedy_of(error)
        )


class _OpenFile:
    """A `RangeReader` of an open file.

    Args:
        store: the store, which reads a range anew after an error.
        path: the file's path in the store.
        file: the reader of the open descriptor.
    """

    def __init__(self, store: LocalStore, path: str, file: FileReader) -> None:
        self._store = store
        self._path = path
        self._file = file

    def read_into(self, byte_begin: int, nbytes: int, buffer: memoryview) -> memoryview:
        """Read exactly a range; see `RangeReader.read_into`."""
        if not 0 <= byte_begin <= byte_begin + nbytes <= self._file.nbytes:
            raise _too_short(self._path, byte_begin, nbytes, self._file.nbytes)
        try:
            found = self._file.read_into(byte_begin, nbytes, buffer)
        except OSError:  # a second try opens the file anew and translates errors
            return memoryview(self._store.read_range(self._path, byte_begin, nbytes))
        if len(found) < nbytes:
            raise _too_short(self._path, byte_begin, nbytes, byte_begin + len(found))
        return found


def _regular_nbytes(status: os.stat_result, path: str) -> int:
    """Return the size of a regular file; raise UNSAFE_FILE for any other kind of file."""
    if not stat.S_ISREG(status.st_mode):
        detail = (
            f"it is a {_KINDS.get(stat.S_IFMT(status.st_mode), 'special file')}, not a regular file"
        )
        raise err(Code.UNSAFE_FILE, detail, where=path, requirement="REQ-CKP-002")
    return status.st_size


def _too_short(path: str, byte_begin: int, nbytes: int, file_nbytes: int) -> CkptError:
    detail = f"bytes [{byte_begin}, {byte_begin + nbytes}) of a file of {file_nbytes}"
    return err(Code.FILE_NBYTES, detail, where=path, requirement="REQ-CKP-003")
