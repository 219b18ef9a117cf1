"""Wrappers with a hook before and after each operation: what recorders, fault injectors and schedulers are made of.

`HookedStore` wraps any store and sees its operations; `HookedCalls` sees the system calls of a
`LocalStore`.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import errno
import os
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from ckptfmt.errors import CkptError
from ckptfmt.store.posix import PosixCalls
from ckptfmt.store.protocol import Buffer, Names, RangeReader, Store, join_path

T = TypeVar("T")

#: The outcome of an operation that raised nothing.
OK = "ok"


@dataclasses.dataclass(frozen=True, slots=True)
class Operation:
    """One operation on a store, or one system call.

    Attributes:
        op: the name of the method, such as ``create`` or ``fsync_directory``.
        path: what it is done to, from the root of the wrapped store or the base of the wrapped
            calls on.
        to: the second name of a link or a rename.
        data: what is written; after a write, only what was taken.
        who: the actor, where several share a log.
        outcome: `OK`, the code of a CkptError, or the name of an errno such as ``EIO``; empty while
            it isn't known.
        byte_begin: where in the file a ``write_at`` begins.
        nbytes: the size that a ``preallocate`` or a ``truncate`` gives to a file.
    """

    op: str
    path: str
    to: str = ""
    data: bytes = b""
    who: str = ""
    outcome: str = ""
    byte_begin: int = 0
    nbytes: int = 0


class HookedStore:
    """A store that calls `before` and `after` around each operation of the store inside. Here both do nothing."""

    def __init__(self, inner: Store) -> None:
        self._inner = inner
        self._prefix = ""

    def before(self, operation: Operation) -> None:
        """Meet an operation that is about to begin; an exception keeps it from beginning."""

    def after(self, operation: Operation) -> None:
        """Meet an operation that has ended, with its outcome; an exception takes the place of its answer."""

    @property
    def name(self) -> str:
        """The name of the store inside."""
        return self._inner.name

    @property
    def is_remote(self) -> bool:
        """Whether the store inside is."""
        return self._inner.is_remote

    def at(self, prefix: str) -> HookedStore:
        """Return the same store with `prefix` as root; operations tell their paths from the wrapped root on."""
        lower = copy.copy(self)
        lower._inner = self._inner.at(prefix)
        lower._prefix = join_path(self._prefix, prefix)
        return lower

    def beside(self, name: str) -> HookedStore:
        """See `Store.beside`; beside the wrapped root itself, operations tell their paths from there on."""
        other = copy.copy(self)
        other._inner = self._inner.beside(name)
        other._prefix = join_path(self._prefix.rpartition("/")[0], name)
        return other

    def create(self, path: str, chunks: Iterable[Buffer]) -> None:
        """See `Store.create`. The chunks are drawn before the operation begins."""
        data = b"".join(chunks)
        self._run("create", path, lambda: self._inner.create(path, [data]), data)

    def replace(self, path: str, data: bytes) -> None:
        """See `Store.replace`."""
        self._run("replace", path, lambda: self._inner.replace(path, data), data)

    def read(self, path: str, *, limit_nbytes: int) -> bytes:
        """See `Store.read`."""
        return self._run("read", path, lambda: self._inner.read(path, limit_nbytes=limit_nbytes))

    def read_range(self, path: str, byte_begin: int, nbytes: int) -> bytes:
        """See `Store.read_range`."""
        return self._run(
            "read_range", path, lambda: self._inner.read_range(path, byte_begin, nbytes)
        )

    @contextlib.contextmanager
    def open_ranges(self, path: str) -> Iterator[RangeReader]:
        """See `Store.open_ranges`. Each range that is read is an operation, ``read_range`` as if read alone."""
        with self._inner.open_ranges(path) as ranges:
            yield _HookedRanges(self._run, path, ranges)

    def waits(self, path: str) -> bool:
        """See `Store.waits`; a hint, so no operation."""
        return self._inner.waits(path)

    def nbytes(self, path: str) -> int:
        """See `Store.nbytes`."""
        return self._run("nbytes", path, lambda: self._inner.nbytes(path))

    def list(self, prefix: str) -> Names:
        """See `Store.list`."""
        return self._run("list", prefix, lambda: self._inner.list(prefix))

    def list_names(self, prefix: str) -> Names:
        """See `Store.list_names`."""
        return self._run("list_names", prefix, lambda: self._inner.list_names(prefix))

    def delete(self, path: str) -> None:
        """See `Store.delete`."""
        self._run("delete", path, lambda: self._inner.delete(path))

    def delete_leftovers(self, prefix: str) -> None:
        """See `Store.delete_leftovers`."""
        self._run("delete_leftovers", prefix, lambda: self._inner.delete_leftovers(prefix))

    def remove_directory(self, path: str) -> None:
        """See `Store.remove_directory`."""
        self._run("remove_directory", path, lambda: self._inner.remove_directory(path))

    def sync(self, path: str) -> None:
        """See `Store.sync`."""
        self._run("sync", path, lambda: self._inner.sync(path))

    @contextlib.contextmanager
    def hold(self, path: str) -> Iterator[None]:
        """See `Store.hold`. The operation is to begin; its end has no hooks."""
        with contextlib.ExitStack() as stack:
            self._run("hold", path, lambda: stack.enter_context(self._inner.hold(path)))
            yield

    def is_held(self, path: str) -> bool:
        """See `Store.is_held`."""
        return self._run("is_held", path, lambda: self._inner.is_held(path))

    @property
    def holds_expire(self) -> bool:
        """See `Store.holds_expire`; no operation."""
        return self._inner.holds_expire

    def list_held(self, prefix: str, wanted: Callable[[str], object] = bool) -> Names:
        """See `Store.list_held`."""
        return self._run("list_held", prefix, lambda: self._inner.list_held(prefix, wanted))

    def _run(self, op: str, path: str, action: Callable[[], T], data: bytes = b"") -> T:
        operation = Operation(op, join_path(self._prefix, path), data=data)
        self.before(operation)
        try:
            answer = action()
        except CkptError as error:
            self.after(dataclasses.replace(operation, outcome=str(error.code)))
            raise
        self.after(dataclasses.replace(operation, outcome=OK))
        return answer


class _HookedRanges:
    """An open file of a `HookedStore`; see `RangeReader`."""

    def __init__(self, run: Callable[..., memoryview], path: str, inner: RangeReader) -> None:
        self._run = run
        self._path = path
        self._inner = inner

    def read_into(self, byte_begin: int, nbytes: int, buffer: memoryview) -> memoryview:
        """See `RangeReader.read_into`."""
        return self._run(
            "read_range", self._path, lambda: self._inner.read_into(byte_begin, nbytes, buffer)
        )


class HookedCalls(PosixCalls):
    """System calls with `before` and `after` around each. Here both do nothing. Thread-safe if the hooks are.

    Args:
        base: a directory, the store's root or above it: paths are told from there on, those outside
            of it in full.
        inner: the calls to wrap.
    """

    def __init__(self, base: str | os.PathLike[str], *, inner: PosixCalls | None = None) -> None:
        self._base = os.path.realpath(base)
        self._inner = PosixCalls() if inner is None else inner
        self._path_of_fd: dict[int, str] = {}

    def before(self, operation: Operation) -> None:
        """Meet a call that is about to be made; an exception keeps it from being made (but `close` is made)."""

    def after(self, operation: Operation) -> None:
        """Meet a call that was made, with its outcome; an exception takes the place of its answer."""

    def temporary_name(self) -> str:
        """See `PosixCalls.temporary_name`; no system call, so no hook."""
        return self._inner.temporary_name()

    def open_root(self, path: str) -> int:
        """See `PosixCalls.open_root`."""
        return self._open("open_root", path, lambda: self._inner.open_root(path))

    def open_directory(self, name: str, directory_fd: int) -> int:
        """See `PosixCalls.open_directory`."""
        path = self._below(directory_fd, name)
        return self._open(
            "open_directory", path, lambda: self._inner.open_directory(name, directory_fd)
        )

    def open_new(self, name: str, directory_fd: int) -> int:
        """See `PosixCalls.open_new`."""
        path = self._below(directory_fd, name)
        return self._open("open_new", path, lambda: self._inner.open_new(name, directory_fd))

    def open_read(self, name: str, directory_fd: int) -> int:
        """See `PosixCalls.open_read`."""
        path = self._below(directory_fd, name)
        return self._open("open_read", path, lambda: self._inner.open_read(name, directory_fd))

    def open_lock(self, name: str, directory_fd: int) -> int:
        """See `PosixCalls.open_lock`."""
        path = self._below(directory_fd, name)
        return self._open("open_lock", path, lambda: self._inner.open_lock(name, directory_fd))

    def lock_shared(self, fd: int) -> None:
        """See `PosixCalls.lock_shared`."""
        self._run("lock_shared", self._path_of_fd[fd], lambda: self._inner.lock_shared(fd))

    def try_lock(self, fd: int) -> bool:
        """See `PosixCalls.try_lock`."""
        return self._run("try_lock", self._path_of_fd[fd], lambda: self._inner.try_lock(fd))

    def close(self, fd: int) -> None:
        """See `PosixCalls.close`."""
        # Forgotten first: once it is closed, another thread may be given the same number.
        operation = Operation("close", self._tell(self._path_of_fd.pop(fd)))
        try:
            self.before(operation)
        except BaseException:
            self._inner.close(fd)
            raise
        self._inner.close(fd)
        self.after(dataclasses.replace(operation, outcome=OK))

    def write(self, fd: int, data: memoryview) -> int:
        """See `PosixCalls.write`."""
        operation = Operation("write", self._tell(self._path_of_fd[fd]), data=bytes(data))
        return self._write(operation, lambda: self._inner.write(fd, data))

    def write_at(self, fd: int, data: memoryview, byte_begin: int) -> int:
        """See `PosixCalls.write_at`."""
        path = self._tell(self._path_of_fd[fd])
        operation = Operation("write_at", path, data=bytes(data), byte_begin=byte_begin)
        return self._write(operation, lambda: self._inner.write_at(fd, data, byte_begin))

    def set_direct(self, fd: int, *, on: bool) -> None:
        """See `PosixCalls.set_direct`."""
        self._run("set_direct", self._path_of_fd[fd], lambda: self._inner.set_direct(fd, on=on))

    def preallocate(self, fd: int, nbytes: int) -> None:
        """See `PosixCalls.preallocate`."""
        self._run(
            "preallocate",
            self._path_of_fd[fd],
            lambda: self._inner.preallocate(fd, nbytes),
            nbytes=nbytes,
        )

    def truncate(self, fd: int, nbytes: int) -> None:
        """See `PosixCalls.truncate`."""
        self._run(
            "truncate",
            self._path_of_fd[fd],
            lambda: self._inner.truncate(fd, nbytes),
            nbytes=nbytes,
        )

    def read_at(self, fd: int, nbytes: int, byte_begin: int) -> bytes:
        """See `PosixCalls.read_at`."""
        return self._run(
            "read_at", self._path_of_fd[fd], lambda: self._inner.read_at(fd, nbytes, byte_begin)
        )

    def read_into_at(self, fd: int, buffer: memoryview, byte_begin: int) -> int:
        """See `PosixCalls.read_into_at`."""
        path = self._path_of_fd[fd]
        return self._run(
            "read_into_at", path, lambda: self._inner.read_into_at(fd, buffer, byte_begin)
        )

    def cached_page_count(self, fd: int, byte_begin: int, nbytes: int) -> int:
        """See `PosixCalls.cached_page_count`; it changes nothing and decides nothing but the way, so no hook."""
        return self._inner.cached_page_count(fd, byte_begin, nbytes)

    def fsync(self, fd: int) -> None:
        """See `PosixCalls.fsync`."""
        self._run("fsync", self._path_of_fd[fd], lambda: self._inner.fsync(fd))

    def fsync_directory(self, fd: int) -> None:
        """See `PosixCalls.fsync_directory`."""
        self._run("fsync_directory", self._path_of_fd[fd], lambda: self._inner.fsync_directory(fd))

    def fstat(self, fd: int) -> os.stat_result:
        """See `PosixCalls.fstat`."""
        return self._run("fstat", self._path_of_fd[fd], lambda: self._inner.fstat(fd))

    def lstat(self, name: str, directory_fd: int) -> os.stat_result:
        """See `PosixCalls.lstat`."""
        return self._run(
            "lstat", self._below(directory_fd, name), lambda: self._inner.lstat(name, directory_fd)
        )

    def scan(self, directory_fd: int) -> list[tuple[str, bool]]:
        """See `PosixCalls.scan`."""
        return self._run(
            "scan", self._path_of_fd[directory_fd], lambda: self._inner.scan(directory_fd)
        )

    def mkdir(self, name: str, directory_fd: int) -> None:
        """See `PosixCalls.mkdir`."""
        self._run(
            "mkdir", self._below(directory_fd, name), lambda: self._inner.mkdir(name, directory_fd)
        )

    def link(self, name: str, new_name: str, directory_fd: int) -> None:
        """See `PosixCalls.link`."""
        self._run_two("link", name, new_name, directory_fd, self._inner.link)

    def rename_noreplace(self, name: str, new_name: str, directory_fd: int) -> None:
        """See `PosixCalls.rename_noreplace`."""
        self._run_two(
            "rename_noreplace", name, new_name, directory_fd, self._inner.rename_noreplace
        )

    def exchange(self, name: str, new_name: str, directory_fd: int) -> None:
        """See `PosixCalls.exchange`."""
        self._run_two("exchange", name, new_name, directory_fd, self._inner.exchange)

    def rename(self, name: str, new_name: str, directory_fd: int) -> None:
        """See `PosixCalls.rename`."""
        self._run_two("rename", name, new_name, directory_fd, self._inner.rename)

    def unlink(self, name: str, directory_fd: int) -> None:
        """See `PosixCalls.unlink`."""
        self._run(
            "unlink",
            self._below(directory_fd, name),
            lambda: self._inner.unlink(name, directory_fd),
        )

    def rmdir(self, name: str, directory_fd: int) -> None:
        """See `PosixCalls.rmdir`."""
        self._run(
            "rmdir", self._below(directory_fd, name), lambda: self._inner.rmdir(name, directory_fd)
        )

    def _open(self, op: str, path: str, action: Callable[[], int]) -> int:
        def opened() -> int:
            fd = action()
            self._path_of_fd[fd] = path
            return fd

        return self._run(op, path, opened, undo=self.close)

    def _run_two(
        self,
        op: str,
        name: str,
        new_name: str,
        directory_fd: int,
        action: Callable[[str, str, int], None],
    ) -> None:
        path, to = self._below(directory_fd, name), self._below(directory_fd, new_name)
        self._run(op, path, lambda: action(name, new_name, directory_fd), to=self._tell(to))

    def _write(self, operation: Operation, action: Callable[[], int]) -> int:
        self.before(operation)
        try:
            nbytes = action()
        except OSError as error:
            self.after(dataclasses.replace(operation, data=b"", outcome=_errno_name(error)))
            raise
        self.after(dataclasses.replace(operation, data=operation.data[:nbytes], outcome=OK))
        return nbytes

    def _run(
        self,
        op: str,
        path: str,
        action: Callable[[], T],
        *,
        to: str = "",
        nbytes: int = 0,
        undo: Callable[[T], None] | None = None,
    ) -> T:
        """Do `action` between the hooks; if `after` raises, its answer reaches nobody, and is undone."""
        operation = Operation(op, self._tell(path), to, nbytes=nbytes)
        self.before(operation)
        try:
            answer = action()
        except OSError as error:
            self.after(dataclasses.replace(operation, outcome=_errno_name(error)))
            raise
        try:
            self.after(dataclasses.replace(operation, outcome=OK))
        except BaseException:
            if undo:
                undo(answer)
            raise
        return answer

    def _below(self, directory_fd: int, name: str) -> str:
        return f"{self._path_of_fd[directory_fd].rstrip('/')}/{name}"

    def _tell(self, path: str) -> str:
        if path == self._base:
            return ""
        return path.removeprefix(self._base.rstrip("/") + "/")


def _errno_name(error: OSError) -> str:
    return errno.errorcode.get(error.errno or 0, "EUNKNOWN")
