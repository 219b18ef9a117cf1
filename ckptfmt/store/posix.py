"""The system calls that `LocalStore` makes, one method each: the seam for recorders and fault injectors. And holds.

Every name is relative to an open directory and is one component, so that nothing below the root can be reached
through a symlink that somebody put in the way. Methods raise OSError, as the system calls do. Linux; elsewhere
`rename_noreplace` is refused and ``fsync`` may promise less.

A hold is a file that says "somebody is at it". It is locked, and the kernel takes the lock back from whoever dies. The
last one who holds a file removes it. One that stays, because all were killed, is held by nobody and does no harm.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import os
import secrets
import stat
import sys
import time
from typing import Final

from ckptfmt.store.protocol import TEMPORARY_PREFIX

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: else opening a named pipe waits for its writer, for ever.
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
#: NFS asks for a file that is open for writing before it locks it for one alone, for reading before it is shared.
_LOCK: Final = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_RENAME_NOREPLACE: Final = 1
_RENAME_EXCHANGE: Final = 2
#: 0 where the system has no such flag.
_DIRECT: Final[int] = getattr(os, "O_DIRECT", 0)


#: The number of cachestat(2), the same on every architecture of Linux that Python has wheels for.
_CACHESTAT: Final = 451 if sys.platform == "linux" and os.uname().machine != "alpha" else None


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _renameat2(name: str, new_name: str, directory_fd: int, flags: int) -> None:
    renameat2 = getattr(_libc(), "renameat2", None)
    if renameat2 is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), name)
    if renameat2(directory_fd, os.fsencode(name), directory_fd, os.fsencode(new_name), flags) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name, None, new_name)


class PosixCalls:
    """The primitive calls, as the system makes them. Without state."""

    def temporary_name(self) -> str:
        """Return a name that no other process and no earlier run chooses."""
        return TEMPORARY_PREFIX + secrets.token_hex(16)

    def open_root(self, path: str) -> int:
        """Open a directory by its absolute path, which may lead through symlinks: it is the caller's own."""
        return os.open(path, _DIRECTORY)

    def open_directory(self, name: str, directory_fd: int) -> int:
        """Open a directory; a symlink is refused (ENOTDIR or ELOOP)."""
        return os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=directory_fd)

    def open_new(self, name: str, directory_fd: int) -> int:
        """Create a file for writing; EEXIST if there is anything of that name."""
        return os.open(name, _NEW, 0o666, dir_fd=directory_fd)

    def open_read(self, name: str, directory_fd: int) -> int:
        """Open a file for reading without waiting; a symlink is refused (ELOOP). It needn't be a regular file."""
        return os.open(name, _READ, dir_fd=directory_fd)

    def open_lock(self, name: str, directory_fd: int) -> int:
        """Open a file for `lock_shared` and `try_lock`; a symlink is refused (ELOOP). It needn't be a regular file."""
        return os.open(name, _LOCK, dir_fd=directory_fd)

    def lock_shared(self, fd: int) -> None:
        """Lock a file as others may too, until it is closed by all who inherited it; wait for `try_lock` of others."""
        fcntl.flock(fd, fcntl.LOCK_SH)

    def try_lock(self, fd: int) -> bool:
        """Lock a file for one alone and return True, or return False if somebody has it locked; an own lock is lost."""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    #: Close a descriptor; it is closed even if this raises (Linux). The function is that of the system, since Python
    #: handles signals before the first line of its own functions: a KeyboardInterrupt would leave a file locked.
    close = staticmethod(os.close)

    def write(self, fd: int, data: memoryview) -> int:
        """Write the beginning of `data` at the file's position and return how many bytes that were."""
        return os.write(fd, data)

    def write_at(self, fd: int, data: memoryview, byte_begin: int) -> int:
        """Write the beginning of `data` at a place of its own and return how many bytes that were."""
        return os.pwrite(fd, data, byte_begin)

    def set_direct(self, fd: int, *, on: bool) -> None:
        """Let writes go past the page cache, or not any more; EINVAL if the file system has no such writing."""
        if not _DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | _DIRECT if on else flags & ~_DIRECT)

    def preallocate(self, fd: int, nbytes: int) -> None:
        """Give a file room for `nbytes` bytes, and at least this size; what wasn't written reads as zeros.

        Source: fallocate(2). Not posix_fallocate(3), which writes to every block where the file system has no such
        call.
        """
        fallocate = getattr(_libc(), "fallocate", None)
        if fallocate is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        if fallocate(fd, 0, ctypes.c_long(0), ctypes.c_long(nbytes)) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def truncate(self, fd: int, nbytes: int) -> None:
        """Give a file this size, and give back the room behind it."""
        os.ftruncate(fd, nbytes)

    def read_at(self, fd: int, nbytes: int, byte_begin: int) -> bytes:
        """Return up to `nbytes` bytes from `byte_begin` on; none at the file's end."""
        return os.pread(fd, nbytes, byte_begin)

    def read_into_at(self, fd: int, buffer: memoryview, byte_begin: int) -> int:
        """Read the bytes from `byte_begin` on into the beginning of `buffer`; return how many, 0 at the file's end."""
        return os.preadv(fd, [buffer], byte_begin)

    def cached_page_count(self, fd: int, byte_begin: int, nbytes: int) -> int:
        """Return how many pages of a range are in the page cache; ENOSYS where the kernel can't tell.

        Source: cachestat(2), Linux 6.5. (Asking by RWF_NOWAIT reads the file in, and mincore(2) needs a mapping.)
        """
        asked = (ctypes.c_uint64 * 2)(byte_begin, nbytes)
        told = (ctypes.c_uint64 * 5)()
        if _CACHESTAT is None or _libc().syscall(_CACHESTAT, fd, asked, told, 0) != 0:
            number = ctypes.get_errno() if _CACHESTAT is not None else errno.ENOSYS
            raise OSError(number, os.strerror(number))
        return told[0]

    def fsync(self, fd: int) -> None:
        """Make a file's contents and size durable. After an error they may be lost, and a second try would hide it."""
        os.fsync(fd)

    def fsync_directory(self, fd: int) -> None:
        """Make durable which names are in a directory."""
        os.fsync(fd)

    def fstat(self, fd: int) -> os.stat_result:
        """Return what is known of an open file."""
        return os.fstat(fd)

    def lstat(self, name: str, directory_fd: int) -> os.stat_result:
        """Return what is known of a name, of a symlink itself."""
        return os.stat(name, dir_fd=directory_fd, follow_symlinks=False)

    def scan(self, directory_fd: int) -> list[tuple[str, bool]]:
        """Return the names in a directory, each with whether it is a directory (a symlink to one isn't)."""
        with os.scandir(directory_fd) as entries:
            return [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]

    def mkdir(self, name: str, directory_fd: int) -> None:
        """Create a directory."""
        os.mkdir(name, dir_fd=directory_fd)

    def link(self, name: str, new_name: str, directory_fd: int) -> None:
        """Give the file `name` a second name; EEXIST if that is taken."""
        os.link(name, new_name, src_dir_fd=directory_fd, dst_dir_fd=directory_fd, follow_symlinks=False)

    def rename_noreplace(self, name: str, new_name: str, directory_fd: int) -> None:
        """Rename `name`; EEXIST if `new_name` is taken. For file systems without hard links.

        Source: renameat2(2), RENAME_NOREPLACE.
        """
        _renameat2(name, new_name, directory_fd, _RENAME_NOREPLACE)

    def exchange(self, name: str, new_name: str, directory_fd: int) -> None:
        """Exchange two names at once, whatever each is of; EINVAL if the file system can't.

        Source: renameat2(2), RENAME_EXCHANGE.
        """
        _renameat2(name, new_name, directory_fd, _RENAME_EXCHANGE)

    def rename(self, name: str, new_name: str, directory_fd: int) -> None:
        """Rename `name` over whatever file `new_name` is."""
        os.rename(name, new_name, src_dir_fd=directory_fd, dst_dir_fd=directory_fd)

    def unlink(self, name: str, directory_fd: int) -> None:
        """Remove a name that isn't a directory's."""
        os.unlink(name, dir_fd=directory_fd)

    def rmdir(self, name: str, directory_fd: int) -> None:
        """Remove an empty directory."""
        os.rmdir(name, dir_fd=directory_fd)


# --- holds ------------------------------------------------------------------------------------------------------------

#: What a file system says that has no locks.
_NO_LOCKS: Final = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS})
#: What is said to somebody who may only read.
_READERS: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
#: How often a holder makes the file anew that others who end their hold remove.
_TAKE_TRIES: Final = 1000
#: How often a lock is tried: whoever only looks has it for an instant.
_LOCK_TRIES: Final = 3
_PAUSE_S: Final = 0.001


class Hold:
    """A file that this process holds from `begin` until `end` or `release`, or until the process dies.

    The caller of `begin` calls `release` in any case: a KeyboardInterrupt may come right behind the lock.

    Args:
        calls: the system calls to use.
    """

    def __init__(self, calls: PosixCalls) -> None:
        self._calls = calls
        self._name = ""
        self._fd: int | None = None

    def begin(self, directory_fd: int, name: str) -> None:
        """Hold a file.

        Args:
            directory_fd: where the file is.
            name: of the file; made if it isn't there.

        Raises:
            OSError: ENXIO if it isn't a regular file.
        """
        self._name = name
        for _ in range(_TAKE_TRIES):
            # Exclusively, as everything here is created; and opened by another call, for the lock asks for more.
            with contextlib.suppress(FileExistsError):
                self._calls.close(self._calls.open_new(name, directory_fd))
            with contextlib.suppress(FileNotFoundError):
                if self._lock(self._calls.open_lock(name, directory_fd), directory_fd):
                    return
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    def end(self, directory_fd: int) -> None:
        """Let go of the file, and remove it if nobody else holds it."""
        if self._fd is None:
            return  # nothing was held, for the file system has no locks; or a forked child's copy of somebody's hold
        try:
            # Alone, so that nobody can begin to hold a file that is just about to lose its name.
            if _try_lock(self._calls, self._fd) and self._is_named(self._fd, directory_fd):
                self._calls.unlink(self._name, directory_fd)
        finally:
            self.release()

    def release(self) -> None:
        """Let go of the file without removing it."""
        fd, self._fd = self._fd, None
        _HOLDS.discard(self)
        if fd is not None:
            with contextlib.suppress(OSError):
                self._calls.close(fd)

    def forget(self) -> None:
        """Give up a copy that was inherited: the file stays held by the process that we were forked from."""
        if self._fd is not None:
            with contextlib.suppress(OSError):
                self._calls.close(self._fd)
            self._fd = None

    def _lock(self, fd: int, directory_fd: int) -> bool:
        """Lock the opened file; return False if it has lost its name meanwhile."""
        _watch_forks()
        self._fd = fd
        _HOLDS.add(self)
        try:
            _check_regular(self._calls, fd)
            self._calls.lock_shared(fd)
            if self._is_named(fd, directory_fd):
                return True
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                self.release()
                raise
            with contextlib.suppress(OSError):
                self._calls.unlink(self._name, directory_fd)
            self.release()
            return True
        except BaseException:
            self.release()
            raise
        self.release()
        return False

    def _is_named(self, fd: int, directory_fd: int) -> bool:
        try:
            named = self._calls.lstat(self._name, directory_fd)
        except FileNotFoundError:
            return False
        return os.path.samestat(named, self._calls.fstat(fd))


def is_held(calls: PosixCalls, directory_fd: int, name: str) -> bool:
    """Return whether some process holds the file; False if the file system has no locks.

    Raises:
        OSError: ENOENT if it isn't there; ENXIO if it isn't a regular file.
    """
    try:
        fd = calls.open_lock(name, directory_fd)
    except OSError as error:
        if error.errno not in _READERS:
            raise
        fd = calls.open_read(name, directory_fd)
    try:
        _check_regular(calls, fd)
        return not _try_lock(calls, fd)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return False
    finally:
        # Nothing of Python's own is called before: a KeyboardInterrupt there would leave the file locked by who looks.
        try:  # noqa: SIM105
            calls.close(fd)
        except OSError:
            pass


def _try_lock(calls: PosixCalls, fd: int) -> bool:
    for number in range(_LOCK_TRIES):
        if number:
            time.sleep(_PAUSE_S)
        if calls.try_lock(fd):
            return True
    return False


def _check_regular(calls: PosixCalls, fd: int) -> None:
    if not stat.S_ISREG(calls.fstat(fd).st_mode):
        raise OSError(errno.ENXIO, "it isn't a regular file")  # what open() says to a socket


# A lock belongs to the open file, and a forked child has that too: a data loader that outlives its killed trainer would
# go on holding what nobody is at any more. So a child closes what it inherits. What is here is open: a hold is added
# before it locks, and discarded before it closes.
_HOLDS: Final[set[Hold]] = set()


def _forget_inherited() -> None:
    for hold in _HOLDS:
        hold.forget()
    _HOLDS.clear()


@functools.cache
def _watch_forks() -> None:
    """See to forks from now on; not at import, since most programs that import this package hold no file."""
    os.register_at_fork(after_in_child=_forget_inherited)
