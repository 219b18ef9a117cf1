"""Slots: shared memory that one process fills and another one writes to storage; and how much of it there may be.

A slot is a memfd: it has no name that a crash could leave behind, it lives until the last descriptor and the last
mapping of it are gone, and the size limit of ``/dev/shm`` doesn't concern it. It is mapped through libc, since
Python's `mmap` keeps a second descriptor of its own. Linux only; elsewhere a slot is refused.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import fcntl
import functools
import mmap
import os
import pathlib
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Final, TypeAlias

from ckptfmt.errors import CkptError, Code, err

# By number: a Python that was built against an old glibc, as conda's may be, lacks the names and the calls.
_MFD_CLOEXEC: Final = 0x1
_MFD_ALLOW_SEALING: Final = 0x2
_MFD_NOEXEC_SEAL: Final = 0x8
_F_ADD_SEALS: Final = 1033
_F_GET_SEALS: Final = 1034
_F_SEAL_SEAL: Final = 0x1
_F_SEAL_SHRINK: Final = 0x2
_F_SEAL_GROW: Final = 0x4
_MADV_DONTFORK: Final = 10
_MADV_DONTDUMP: Final = 16
_MADV_POPULATE_READ: Final = 22
_MADV_POPULATE_WRITE: Final = 23
_MAP_FAILED: Final = ctypes.c_void_p(-1).value
_Mapping: TypeAlias = "ctypes.Array[ctypes.c_ubyte]"

#: What is touched at once: short enough for a progress bar, long enough that calls cost nothing.
_PIECE_NBYTES: Final = 64 * 2**20


class MemoryCalls:
    """The system calls behind a `Slot`: the seam for fault injectors. Methods raise OSError. Without state."""

    def make_memory(self) -> int:
        """Return a new, empty, sealable memory file; it isn't inherited by what this process executes."""
        flags = _MFD_CLOEXEC | _MFD_ALLOW_SEALING
        try:
            # Hardened machines (vm.memfd_noexec=2) refuse memory that might be executed.
            return self._memfd_create(flags | _MFD_NOEXEC_SEAL)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return self._memfd_create(flags)  # Linux before 6.3

    def _memfd_create(self, flags: int) -> int:
        if not hasattr(_libc(), "memfd_create"):
            raise OSError(errno.ENOSYS, "this system has no memfd_create")
        return _checked(_libc().memfd_create(b"ckptfmt-slot", flags))

    def seal_size(self, fd: int, nbytes: int) -> None:
        """Give a memory file its size, for ever: nobody can cut it under a reader, who would die by SIGBUS."""
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW | _F_SEAL_SEAL)

    def has_sealed_size(self, fd: int) -> bool:
        """Say whether nobody can shrink the file; EINVAL for what isn't a memory file."""
        return bool(fcntl.fcntl(fd, _F_GET_SEALS) & _F_SEAL_SHRINK)

    def map(self, fd: int, nbytes: int, *, writable: bool) -> int:
        """Map the file's beginning, shared; return the address. Neither forked processes nor core dumps have it."""
        protection = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
        address: int = _libc().mmap(None, nbytes, protection, mmap.MAP_SHARED, fd, 0)
        if address == _MAP_FAILED:
            raise _os_error()
        try:
            for advice in (_MADV_DONTFORK, _MADV_DONTDUMP):
                _checked(_libc().madvise(address, nbytes, advice))
        except OSError:
            self.unmap(address, nbytes)
            raise
        return address

    def unmap(self, address: int, nbytes: int) -> None:
        """Take a mapping away: who reads or writes there from now on dies by SIGSEGV."""
        _checked(_libc().munmap(address, nbytes))

    def populate(self, address: int, nbytes: int, *, writable: bool) -> None:
        """Give each page its memory, without changing it; EINVAL before Linux 5.14."""
        _checked(_libc().madvise(address, nbytes, _MADV_POPULATE_WRITE if writable else _MADV_POPULATE_READ))

    def allocate(self, fd: int, byte_begin: int, nbytes: int) -> None:
        """Give a part of a memory file its memory, without mapping or changing it."""
        os.posix_fallocate(fd, byte_begin, nbytes)


class Slot:
    """Shared memory of a fixed size: made and filled by one process, attached to and read by another.

    The memory is read and written through `view`, or through `address` by whoever keeps a `view` meanwhile. A view,
    and whatever was made of it (slices, arrays, tensors), owns the mapping: after `close` it stays valid, and the
    mapping goes with the last of them. So nothing that Python can hold ever points into memory that is gone.

    A process forked from this one has nothing of a slot: the mapping isn't passed on, the descriptor is closed, and
    each use of the slot is refused. A view that was made before the fork must not be read there (SIGSEGV).

    A slot that is dropped is closed. Made by `Slot.make` and `Slot.attach` only.
    """

    def __init__(self, fd: int, nbytes: int, *, writable: bool, calls: MemoryCalls) -> None:
        address = calls.map(fd, nbytes, writable=writable)
        self._mapping: _Mapping | None = (ctypes.c_ubyte * nbytes).from_address(address)
        # `atexit` off: at exit other threads may still use the memory, and the system takes it back anyway.
        weakref.finalize(self._mapping, _unmap, calls, address, nbytes, os.getpid()).atexit = False
        self._close_fd = weakref.finalize(self, _close, fd)
        self._close_fd.atexit = False
        self._fd = fd
        self._calls = calls
        self._writable = writable
        self.nbytes: Final = nbytes
        _LIVE.add(self)
        _DESCRIPTORS.add(fd)

    @classmethod
    def make(cls, nbytes: int, *, calls: MemoryCalls | None = None) -> Slot:
        """Return a slot for an image of `nbytes` bytes: writable, all zeros, without memory until it is touched.

        Args:
            nbytes: rounded up to whole pages, and to one page at least; `Slot.nbytes` says what came of it.
            calls: the system calls to use, such as those of a fault injector.

        Raises:
            CkptError: ``SLOT_MEMORY`` if the system refuses it, ``ARGUMENT`` for a negative size.
        """
        calls = MemoryCalls() if calls is None else calls
        nbytes = slot_nbytes(nbytes)
        with _no_fork(), _named_errors(nbytes), _closed_if_failed(calls.make_memory()) as fd:
            calls.seal_size(fd, nbytes)
            return cls(fd, nbytes, writable=True, calls=calls)

    @classmethod
    def attach(cls, fd: int, *, calls: MemoryCalls | None = None) -> Slot:
        """Return the slot behind a descriptor that another process sent; it can be read only.

        Args:
            fd: taken over: closed with the slot, and also if this raises.
            calls: the system calls to use, such as those of a fault injector.

        Raises:
            CkptError: ``SLOT_MEMORY`` if it isn't a slot's descriptor, or can't be mapped.
        """
        calls = MemoryCalls() if calls is None else calls
        with _no_fork(), _named_errors(None), _closed_if_failed(fd):
            os.set_inheritable(fd, False)  # noqa: FBT003 - the standard library's signature
            if not calls.has_sealed_size(fd):
                raise err(Code.SLOT_MEMORY, "the size of the attached memory isn't sealed", remedy="")
            return cls(fd, os.fstat(fd).st_size, writable=False, calls=calls)

    def __repr__(self) -> str:
        state = "closed" if self._mapping is None else "read-write" if self._writable else "read-only"
        return f"<Slot of {self.nbytes} bytes, {state}>"

    @property
    def view(self) -> memoryview:
        """The memory as bytes; read-only in an attached slot."""
        whole = memoryview(self._open_mapping()).cast("B")
        return whole if self._writable else whole.toreadonly()

    @property
    def address(self) -> int:
        """Where the memory begins. Keep a `view` for as long as something uses the address."""
        return ctypes.addressof(self._open_mapping())

    @property
    def fd(self) -> int:
        """The descriptor, to be sent to another process; it stays this slot's."""
        if not self._close_fd.alive:
            raise err(Code.SLOT_MEMORY, "the slot's descriptor is closed", remedy="")
        return self._fd

    def touch(self, on_progress: Callable[[int], None] | None = None) -> None:
        """Give each page its memory now, in this process's page table, so that no copy waits for it later.

        Contents stay, and other threads run meanwhile. Beyond the limit of a cgroup the system kills rather than
        refuses: ask `plan_slots` first. Needs the descriptor.

        Args:
            on_progress: called after each piece (64 MiB) with the number of bytes touched so far.

        Raises:
            CkptError: ``SLOT_MEMORY`` where memory runs out, or if the slot or its descriptor is closed.
        """
        mapping = self._open_mapping()  # held: should another thread close the slot, this fails but doesn't crash
        view, address = memoryview(mapping).cast("B"), ctypes.addressof(mapping)
        for byte_begin in range(0, self.nbytes, _PIECE_NBYTES):
            byte_end = min(byte_begin + _PIECE_NBYTES, self.nbytes)
            with _named_errors(self.nbytes):
                self._touch_piece(view[byte_begin:byte_end], address + byte_begin, self.fd, byte_begin)
            if on_progress:
                on_progress(byte_end)

    def _touch_piece(self, piece: memoryview, address: int, fd: int, byte_begin: int) -> None:
        try:
            self._calls.populate(address, piece.nbytes, writable=self._writable)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # First the memory, since the system can refuse that by an error; a touch it refuses by SIGBUS. Then one
            # byte of each page is read, not written, lest a byte be lost that somebody else writes meanwhile.
            self._calls.allocate(fd, byte_begin, piece.nbytes)
            piece[:: mmap.PAGESIZE].tobytes()

    def close(self) -> None:
        """Close the descriptor and give up the mapping, which goes with the last view of it. Idempotent."""
        self.close_fd()
        self._mapping = None  # last: giving memory back takes a while, and forks needn't wait for it

    def close_fd(self) -> None:
        """Close the descriptor only; memory and views stay. Idempotent."""
        self._close_fd()

    def _open_mapping(self) -> _Mapping:
        mapping = self._mapping
        if mapping is None:
            raise err(Code.SLOT_MEMORY, "the slot is closed, or belongs to the process that forked this one", remedy="")
        return mapping


def slot_nbytes(image_nbytes: int) -> int:
    """Return how much memory a slot for an image takes: whole pages, and one page at least.

    Raises:
        CkptError: ``ARGUMENT`` for a negative size.
    """
    if image_nbytes < 0:
        raise err(Code.ARGUMENT, f"an image of {image_nbytes} bytes")
    return -(-max(image_nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE


@contextlib.contextmanager
def _named_errors(nbytes: int | None) -> Iterator[None]:
    try:
        yield
    except (OSError, OverflowError) as error:
        slot = "the attached slot" if nbytes is None else f"a slot of {nbytes} bytes"
        reason = error.strerror if isinstance(error, OSError) else None
        raise err(Code.SLOT_MEMORY, f"the system refuses memory for {slot}: {reason or error}") from error


@contextlib.contextmanager
def _closed_if_failed(fd: int) -> Iterator[int]:
    try:
        yield fd
    except BaseException:
        with contextlib.suppress(OSError):
            os.close(fd)
        raise


# libc


@functools.cache
def _libc() -> ctypes.CDLL:
    """Return libc with prototypes of its own: a pointer would be cut to an int without them."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    ]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc


def _checked(result: int) -> int:
    if result < 0:
        raise _os_error()
    return result


def _os_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


# Forks

_LIVE: Final[weakref.WeakSet[Slot]] = weakref.WeakSet()
#: The open descriptors of slots. Those of `_LIVE` aren't enough: a fork may come between a slot's end and its close.
_DESCRIPTORS: Final[set[int]] = set()
#: Held while a slot is half made or a descriptor half closed, and by forks: else a child would keep what isn't listed.
_GATE: Final = threading.RLock()


@contextlib.contextmanager
def _no_fork() -> Iterator[None]:
    with _GATE:
        _watch_forks()
        yield


@functools.cache
def _watch_forks() -> None:
    """See to forks from now on; not at import, since most programs that import this package make no slot."""
    os.register_at_fork(before=_GATE.acquire, after_in_parent=_GATE.release, after_in_child=_forget_all)


def _forget_all() -> None:
    """Let a forked process keep nothing of its parent's slots: else their memory would live as long as it does."""
    for slot in list(_LIVE):
        slot.close()
    for fd in list(_DESCRIPTORS):
        _close(fd)
    _GATE.release()


def _close(fd: int) -> None:
    with _GATE, contextlib.suppress(OSError):
        _DESCRIPTORS.discard(fd)
        os.close(fd)


def _unmap(calls: MemoryCalls, address: int, nbytes: int, pid: int) -> None:
    # A forked process hasn't got the mapping, and may have something else at the address by now.
    if os.getpid() == pid:
        calls.unmap(address, nbytes)


# How much memory slots may take
#
# A process that goes beyond a cgroup's limit isn't refused memory, it is killed; hence the sums are done before.
# Source: Linux, Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst; proc_meminfo(5).

#: The process that writes takes some 100 MiB of its own, and page tables take 0.2 % of a slot in each of two processes.
_MARGIN_NBYTES: Final = 256 * 2**20
#: "Available" is the kernel's estimate, and the trainer and its data loaders go on allocating: 5 % stay.
_MARGIN_DIVISOR: Final = 20
#: What the system says where memory, processes, threads or descriptors are short.
_SHORT: Final = frozenset({errno.ENOMEM, errno.EAGAIN, errno.EMFILE, errno.ENFILE})
#: A limit of version 1 from which on it means "none": the kernel says the greatest multiple of a page.
_NO_LIMIT_NBYTES: Final = 2**62


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Names:
    """What the files of one version of cgroups are called."""

    mounts: tuple[str, ...]
    limits: tuple[str, ...]
    used: str
    reclaimable: frozenset[str]


_VERSION_1: Final = _Names(
    mounts=("sys/fs/cgroup/memory",),
    limits=("memory.limit_in_bytes",),
    used="memory.usage_in_bytes",
    reclaimable=frozenset({"total_inactive_file", "total_active_file"}),
)
# memory.high kills nobody, but a process beyond it is made to sleep: a training would all but stand still.
_VERSION_2: Final = _Names(
    mounts=("sys/fs/cgroup", "sys/fs/cgroup/unified"),
    limits=("memory.max", "memory.high"),
    used="memory.current",
    reclaimable=frozenset({"inactive_file", "active_file"}),
)


def available_nbytes(root: str | os.PathLike[str] = "/") -> int:
    """Return how many bytes may be allocated now without swapping and without being killed.

    It is the least of the kernel's ``MemAvailable`` and, at each level from this process's cgroup up (version 2,
    version 1, or both), the limit less what is used, where file cache that can be dropped doesn't count as used.
    What can't be read doesn't bound; a system that says nothing at all has 0.

    Args:
        root: what lies above ``proc`` and ``sys``.
    """
    base = pathlib.Path(root)
    rooms = [kib * 1024 for kib in _iter_table(base / "proc/meminfo", frozenset({"MemAvailable:"}))]
    rooms += [room_nbytes for level, names in _iter_levels(base) for room_nbytes in _iter_rooms(level, names)]
    return max(0, min(rooms, default=0))


def plan_slots(image_nbytes: int, wanted: int, available_nbytes: int, shared_by: int) -> int:
    """Return how many slots to make, from `wanted` down to 0, so that each trainer's margin stays free.

    Args:
        image_nbytes: bytes of this trainer's image.
        wanted: how many slots there should be.
        available_nbytes: what the function of that name said, before any trainer of this machine made a slot.
        shared_by: how many trainers of this machine ask at once; each gets an equal share.

    Raises:
        CkptError: ``ARGUMENT`` for a negative number, or no trainer.

    >>> [plan_slots(10**9, wanted=2, available_nbytes=n * 10**9, shared_by=1) for n in (1, 2, 3)]
    [0, 1, 2]
    """
    if min(wanted, available_nbytes) < 0 or shared_by < 1:
        raise err(Code.ARGUMENT, f"{wanted} slots of {available_nbytes} bytes, shared by {shared_by}")
    share_nbytes = available_nbytes // shared_by
    free_nbytes = max(0, share_nbytes - margin_nbytes(share_nbytes))
    return min(wanted, free_nbytes // slot_nbytes(image_nbytes))


def margin_nbytes(share_nbytes: int) -> int:
    """Return what of one trainer's share stays free: 5 %, and 256 MiB at least."""
    return max(_MARGIN_NBYTES, share_nbytes // _MARGIN_DIVISOR)


def is_shortage(error: BaseException) -> bool:
    """Tell whether an error says that memory, threads or descriptors are short."""
    known = isinstance(error, CkptError) and error.code == Code.SLOT_MEMORY
    known |= isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in _SHORT)
    known |= isinstance(error, RuntimeError) and "can't start new thread" in str(error)
    return known or (error.__cause__ is not None and is_shortage(error.__cause__))


def _iter_levels(base: pathlib.Path) -> Iterator[tuple[pathlib.Path, _Names]]:
    """Yield the directory of each cgroup that this process is in, from its own up, with the names of its files.

    A container often sees the path that its host knows, and only its own cgroup, as the root: levels that aren't
    there are passed over, and the root is always among them.
    """
    for line in _read_text(base / "proc/self/cgroup").splitlines():
        _, _, controllers_and_path = line.partition(":")
        controllers, _, path = controllers_and_path.partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        names = _VERSION_1 if controllers else _VERSION_2
        parts = [part for part in path.split("/") if part]
        if ".." in parts:  # this process was put outside of what it sees
            parts = []
        for mount in names.mounts:
            for depth in range(len(parts), -1, -1):
                yield base.joinpath(mount, *parts[:depth]), names


def _iter_rooms(level: pathlib.Path, names: _Names) -> Iterator[int]:
    """Yield what is left below each limit of a cgroup."""
    limits = [_count(_read_text(level / name)) for name in names.limits]
    used_nbytes = _count(_read_text(level / names.used)) or 0
    cache_nbytes = sum(_iter_table(level / "memory.stat", names.reclaimable))
    for limit_nbytes in limits:
        if limit_nbytes is not None and limit_nbytes < _NO_LIMIT_NBYTES:
            yield limit_nbytes - max(0, used_nbytes - cache_nbytes)


def _iter_table(path: pathlib.Path, keys: frozenset[str]) -> Iterator[int]:
    """Yield the numbers beside `keys` in a file that has one key and its number on each line."""
    for line in _read_text(path).splitlines():
        words = line.split()
        number = _count(words[1]) if len(words) >= 2 and words[0] in keys else None
        if number is not None:
            yield number


def _count(text: str) -> int | None:
    """Return the number that is the whole text; None for anything else, such as "max"."""
    digits = text.strip()
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) <= 20 else None


def _read_text(path: pathlib.Path) -> str:
    """Return what is in a file, or nothing if it can't be read."""
    with contextlib.suppress(OSError, ValueError):
        return os.fsdecode(path.read_bytes())  # a cgroup's name may be any bytes
    return ""
