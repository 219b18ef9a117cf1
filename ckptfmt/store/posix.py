"""The system calls of `LocalStore`, one method each, to be overridden in tests; and holds.

Recorders and fault injectors override these methods.

Every name is one path component, relative to an open directory. A symlink that another user has
planted therefore can't lead outside the root. Methods raise OSError, like the system calls. The
module is written for Linux; on other systems `rename_noreplace` is refused and ``fsync`` may
promise less.

A hold is a locked file that shows that a process is at work. The kernel releases the lock
when the process dies. The last holder removes the file. A file that stays after all holders were
killed is unlocked, counts as not held, and does no harm.
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
# Without O_NONBLOCK, opening a named pipe waits for a writer, possibly for ever.
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
#: On NFS an exclusive lock needs a file open for writing, and a shared lock a file open for
#: reading.
_LOCK: Final = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_RENAME_NOREPLACE: Final = 1
_RENAME_EXCHANGE: Final = 2
#: The flag for direct I/O; 0 where the system has no such flag.
_DIRECT: Final[int] = getattr(os, "O_DIRECT", 0)


#: Number of the system call cachestat(2), the same on every Linux architecture with Python wheels.
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
    """The primitive system calls. The class has no state."""

    def temporary_name(self) -> str:
        """Return a random name for a temporary file that no other process or earlier run uses."""
        return TEMPORARY_PREFIX + secrets.token_hex(16)

    def open_root(self, path: str) -> int:
        """Open a directory by its absolute path.

        The path may contain symlinks, because the caller chose the path.
        """
        return os.open(path, _DIRECTORY)

    def open_directory(self, name: str, directory_fd: int) -> int:
        """Open a directory; a symlink is refused (ENOTDIR or ELOOP)."""
        return os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=directory_fd)

    def open_new(self, name: str, directory_fd: int) -> int:
        """Create a file for writing; EEXIST if the name is taken."""
        return os.open(name, _NEW, 0o666, dir_fd=directory_fd)

    def open_read(self, name: str, directory_fd: int) -> int:
        """Open a file for reading without waiting; a symlink is refused (ELOOP).

        The caller checks whether the file is a regular file.
        """
        return os.open(name, _READ, dir_fd=directory_fd)

    def open_lock(self, name: str, directory_fd: int) -> int:
        """Open a file for `lock_shared` and `try_lock`; a symlink is refused (ELOOP).

        The caller checks whether the file is a regular file.
        """
        return os.open(name, _LOCK, dir_fd=directory_fd)

    def lock_shared(self, fd: int) -> None:
        """Take a shared lock on a file; wait while another process has an exclusive lock.

        The lock lasts until every process that inherited the descriptor has closed the descriptor.
        """
        fcntl.flock(fd, fcntl.LOCK_SH)

    def try_lock(self, fd: int) -> bool:
        """Take an exclusive lock and return True; return False if another process has a lock.

        A shared lock on the same descriptor may be lost in both cases.
        """
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    #: Close a descriptor, which is closed even if this call raises (Linux). This is the system's
    #: function itself: Python handles signals before the first line of a Python function, and a
    #: KeyboardInterrupt there would leave the file locked.
    close = staticmethod(os.close)

    def write(self, fd: int, data: memoryview) -> int:
        """Write the beginning of `data` at the file's position, and return the number of bytes."""
        return os.write(fd, data)

    def write_at(self, fd: int, data: memoryview, byte_begin: int) -> int:
        """Write the beginning of `data` at `byte_begin`, and return the number of bytes written."""
        return os.pwrite(fd, data, byte_begin)

    def set_direct(self, fd: int, *, on: bool) -> None:
        """Switch direct I/O on or off for a descriptor; EINVAL if this isn't supported."""
        if not _DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | _DIRECT if on else flags & ~_DIRECT)

    def preallocate(self, fd: int, nbytes: int) -> None:
        """Reserve space for `nbytes` bytes, and extend the file to at least this size.

        Unwritten bytes read as zeros.

        Source: fallocate(2). posix_fallocate(3) is unsuitable: where the file system lacks
            fallocate, posix_fallocate writes to every block.
        """
        fallocate = getattr(_libc(), "fallocate", None)
        if fallocate is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        if fallocate(fd, 0, ctypes.c_long(0), ctypes.c_long(nbytes)) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def truncate(self, fd: int, nbytes: int) -> None:
        """Set a file's size to `nbytes`, and release the space after the new end."""
        os.ftruncate(fd, nbytes)

    def read_at(self, fd: int, nbytes: int, byte_begin: int) -> bytes:
        """Return up to `nbytes` bytes from `byte_begin` on; no bytes at the file's end."""
        return os.pread(fd, nbytes, byte_begin)

    def read_into_at(self, fd: int, buffer: memoryview, byte_begin: int) -> int:
        """Read bytes from `byte_begin` on into the beginning of `buffer`, and return their number.

        The number is 0 at the file's end.
        """
        return os.preadv(fd, [buffer], byte_begin)

    def cached_page_count(self, fd: int, byte_begin: int, nbytes: int) -> int:
        """Return the number of pages of a range in the page cache; ENOSYS without the system call.

        Source: cachestat(2), Linux 6.5. (A read with RWF_NOWAIT starts readahead, and mincore(2)
            needs a mapping.)
        """
        asked = (ctypes.c_uint64 * 2)(byte_begin, nbytes)
        told = (ctypes.c_uint64 * 5)()
        if _CACHESTAT is None or _libc().syscall(_CACHESTAT, fd, asked, told, 0) != 0:
            number = ctypes.get_errno() if _CACHESTAT is not None else errno.ENOSYS
            raise OSError(number, os.strerror(number))
        return told[0]

    def fsync(self, fd: int) -> None:
        """Make a file's contents and size durable.

        After an error the contents may be lost, and a second call could succeed and hide the loss.
        """
        os.fsync(fd)

    def fsync_directory(self, fd: int) -> None:
        """Make the names in a directory durable."""
        os.fsync(fd)

    def fstat(self, fd: int) -> os.stat_result:
        """Return the status of an open file."""
        return os.fstat(fd)

    def lstat(self, name: str, directory_fd: int) -> os.stat_result:
        """Return the status of a name; for a symlink, the status of the symlink."""
        return os.stat(name, dir_fd=directory_fd, follow_symlinks=False)

    def scan(self, directory_fd: int) -> list[tuple[str, bool]]:
        """Return the names in a directory, each with whether the name is a directory.

        A symlink to a directory doesn't count as a directory.
        """
        with os.scandir(directory_fd) as entries:
            return [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]

    def mkdir(self, name: str, directory_fd: int) -> None:
        """Create a directory."""
        os.mkdir(name, dir_fd=directory_fd)

    def link(self, name: str, new_name: str, directory_fd: int) -> None:
        """Give the file `name` a second name; EEXIST if the new name is taken."""
        os.link(
            name, new_name, src_dir_fd=directory_fd, dst_dir_fd=directory_fd, follow_symlinks=False
        )

    def rename_noreplace(self, name: str, new_name: str, directory_fd: int) -> None:
        """Rename `name`; EEXIST if `new_name` is taken. Used on file systems without hard links.

        Source: renameat2(2), RENAME_NOREPLACE.
        """
        _renameat2(name, new_name, directory_fd, _RENAME_NOREPLACE)

    def exchange(self, name: str, new_name: str, directory_fd: int) -> None:
        """Exchange two names of files of any kind atomically; EINVAL if this isn't supported.

        Source: renameat2(2), RENAME_EXCHANGE.
        """
        _renameat2(name, new_name, directory_fd, _RENAME_EXCHANGE)

    def rename(self, name: str, new_name: str, directory_fd: int) -> None:
        """Rename `name` to `new_name`, and replace an existing file."""
        os.rename(name, new_name, src_dir_fd=directory_fd, dst_dir_fd=directory_fd)

    def unlink(self, name: str, directory_fd: int) -> None:
        """Remove a name of a file; a directory is refused."""
        os.unlink(name, dir_fd=directory_fd)

    def rmdir(self, name: str, directory_fd: int) -> None:
        """Remove an empty directory."""
        os.rmdir(name, dir_fd=directory_fd)


# --- holds ----------------------------------------------------------------------------------------

#: Errors of a file system without locks.
_NO_LOCKS: Final = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS})
#: Errors for a user without write access.
_READERS: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
#: Maximum number of times that a holder creates the file again, after other holders removed the
#: file.
_TAKE_TRIES: Final = 1000
#: Maximum number of lock attempts: `is_held` in another process has the lock for an instant.
_LOCK_TRIES: Final = 3
_PAUSE_S: Final = 0.001


class Hold:
    """A file held by this process from `begin` until `end` or `release`, or until its death.

    The caller of `begin` calls `release` in any case: a KeyboardInterrupt may arrive directly after
    the lock was taken.

    Args:
        calls: the system calls to use.
    """

    def __init__(self, calls: PosixCalls) -> None:
        self._calls = calls
        self._name = ""
        self._fd: int | None = None

    def begin(self, directory_fd: int, name: str) -> None:
        """Hold a file, with a shared lock. On a file system without locks, return without a hold.

        Args:
            directory_fd: descriptor of the file's directory.
            name: the file's name; a missing file is created.

        Raises:
            OSError: ENXIO for a file that isn't regular; EBUSY if other holders remove the file
                again and again.
        """
        self._name = name
        for _ in range(_TAKE_TRIES):
            # The file is created exclusively, like every file of this store. A separate call then
            # opens the file, because the lock needs other flags.
            with contextlib.suppress(FileExistsError):
                self._calls.close(self._calls.open_new(name, directory_fd))
            with contextlib.suppress(FileNotFoundError):
                if self._lock(self._calls.open_lock(name, directory_fd), directory_fd):
                    return
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    def end(self, directory_fd: int) -> None:
        """Release the hold, and remove the file if no other process holds the file."""
        if self._fd is None:
            return  # no hold: the file system lacks locks, or this is a forked child
        try:
            # The exclusive lock prevents a new hold on a file that is about to be removed.
            if _try_lock(self._calls, self._fd) and self._is_named(self._fd, directory_fd):
                self._calls.unlink(self._name, directory_fd)
        finally:
            self.release()

    def release(self) -> None:
        """Release the hold without removing the file."""
        fd = self._fd
        self._fd = None
        _HOLDS.discard(self)
        if fd is not None:
            with contextlib.suppress(OSError):
                self._calls.close(fd)

    def forget(self) -> None:
        """Close an inherited descriptor in a forked child. The parent process keeps its hold."""
        if self._fd is not None:
            with contextlib.suppress(OSError):
                self._calls.close(self._fd)
            self._fd = None

    def _lock(self, fd: int, directory_fd: int) -> bool:
        """Lock the opened file; return False if the file has lost its name meanwhile."""
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
    """Return whether any process holds the file; False if the file system has no locks.

    Raises:
        OSError: ENOENT for a missing file; ENXIO for a file that isn't regular.
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
        # No Python function is called before `close`: a KeyboardInterrupt there would leave the
        # file locked by this process.
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
        raise OSError(errno.ENXIO, "it isn't a regular file")  # the error of open() for a socket


# A lock belongs to the open file description, which a forked child shares. A data loader that
# outlives its killed trainer would keep the trainer's hold alive. Therefore a forked child closes
# inherited holds. Each hold in this set has an open descriptor: a hold is added before the lock is
# taken, and discarded before the descriptor is closed.
_HOLDS: Final[set[Hold]] = set()


def _forget_inherited() -> None:
    for hold in _HOLDS:
        hold.forget()
    _HOLDS.clear()


@functools.cache
def _watch_forks() -> None:
    """Register the handler of forks when the first file is held.

    Import registers no handler, since most programs that import this package hold no file.
    """
    os.register_at_fork(after_in_child=_forget_inherited)
