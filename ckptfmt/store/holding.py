"""Files that say "somebody is at it": each is locked, and the kernel takes the lock back from whoever dies.

The last one who holds a file removes it. One that stays, because all were killed, is held by nobody and does no harm.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import stat
import time
from typing import Final

from ckptfmt.store.posix import PosixCalls

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
    """A file that this process holds until `end`, or until it dies.

    Args:
        calls: the system calls to use.
        directory_fd: where the file is.
        name: of the file; made if it isn't there.

    Raises:
        OSError: ENXIO if it isn't a regular file.
    """

    def __init__(self, calls: PosixCalls, directory_fd: int, name: str) -> None:
        self._calls = calls
        self._name = name
        self._fd: int | None = None
        for _ in range(_TAKE_TRIES):
            # Exclusively, as everything here is created; and opened by another call, for the lock asks for more.
            with contextlib.suppress(FileExistsError):
                calls.close(calls.open_new(name, directory_fd))
            with contextlib.suppress(FileNotFoundError):
                if self._lock(calls.open_lock(name, directory_fd), directory_fd):
                    return
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    def end(self, directory_fd: int) -> None:
        """Let go of the file, and remove it if nobody else holds it."""
        if self._fd is None:
            return  # the file system has no locks, or this is a forked child's copy of somebody else's hold
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
        with contextlib.suppress(OSError):
            calls.close(fd)


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
