"""Slots: shared memory that the trainer fills and the saver reads; and how many slots fit.

A slot is a memfd. A memfd has no name that a crash could leave behind, lives until its last
descriptor and its last mapping are gone, and isn't limited by the size of ``/dev/shm``. The mapping
goes through libc, since Python's `mmap` keeps a second descriptor. Linux only: on other systems,
`Slot.make` raises an error.
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
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeAlias

from ckptfmt.errors import CkptError, Code, err

# By number: a Python built against an old glibc, as in conda, lacks the names and the calls.
_MFD_CLOEXEC: Final = 0x1
_MFD_ALLOW_SEALING: Final = 0x2
_MFD_NOEXEC_SEAL: Final = 0x8
_F_ADD_SEALS: Final = 1033
_F_GET_SEALS: Final = 1034
_F_SEAL_SEAL: Final = 0x1
_F_SEAL_SHRINK: Final = 0x2
_F_SEAL_GROW: Final = 0x4
_MADV_DONTFORK: Final = 10
_MADV_HUGEPAGE: Final = 14
_MADV_DONTDUMP: Final = 16
_MADV_POPULATE_READ: Final = 22
_MADV_POPULATE_WRITE: Final = 23
_MAP_FAILED: Final = ctypes.c_void_p(-1).value
_Mapping: TypeAlias = "ctypes.Array[ctypes.c_ubyte]"

#: Size of a piece that is touched at once: short enough for a progress bar, long enough to make
#: the calls' own time negligible.
_PIECE_NBYTES: Final = 64 * 2**20


class MemoryCalls:
    """The system calls behind a `Slot`; fault injectors replace them. No state. Raise OSError."""

    def make_memory(self) -> int:
        """Return a new, empty, sealable memory file, which executed programs don't inherit."""
        flags = _MFD_CLOEXEC | _MFD_ALLOW_SEALING
        try:
            # Hardened machines (vm.memfd_noexec=2) refuse memory files without this seal.
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
        """Set the size of a memory file and seal the size.

        A file that shrinks under a reader would end the reader by SIGBUS.
        """
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW | _F_SEAL_SEAL)

    def has_sealed_size(self, fd: int) -> bool:
        """Return whether the file can't shrink. Raises: OSError(EINVAL) without a memory file."""
        return bool(fcntl.fcntl(fd, _F_GET_SEALS) & _F_SEAL_SHRINK)

    def map(self, fd: int, nbytes: int, *, writable: bool) -> int:
        """Map the beginning of a file, shared, and return the address.

        Forked children and core dumps don't contain the mapping.
        """
        protection = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
        address: int = _libc().mmap(None, nbytes, protection, mmap.MAP_SHARED, fd, 0)
        if address == _MAP_FAILED:
            raise _os_error()
        try:
            for advice in (_MADV_DONTFORK, _MADV_DONTDUMP):
                _checked(_libc().madvise(address, nbytes, advice))
            # Fewer pages to allocate and to pin; the system may lack such pages.
            _libc().madvise(address, nbytes, _MADV_HUGEPAGE)
        except OSError:
            self.unmap(address, nbytes)
            raise
        return address

    def unmap(self, address: int, nbytes: int) -> None:
        """Remove a mapping: later accesses to the addresses end the process by SIGSEGV."""
        _checked(_libc().munmap(address, nbytes))

    def populate(self, address: int, nbytes: int, *, writable: bool) -> None:
        """Allocate each page without changing it. Raises: OSError(EINVAL) before Linux 5.14."""
        _checked(
            _libc().madvise(
                address, nbytes, _MADV_POPULATE_WRITE if writable else _MADV_POPULATE_READ
            )
        )

    def allocate(self, fd: int, byte_begin: int, nbytes: int) -> None:
        """Allocate memory for a part of a memory file, without mapping or changing it."""
        os.posix_fallocate(fd, byte_begin, nbytes)


class Slot:
    """Shared memory of a fixed size, made and filled in one process, attached and read in another.

    The memory is accessed through `view`, or through `address` while the caller keeps a `view`. A
    view,
    and any slice, array or tensor made from it, owns the mapping: after `close` the view stays
    valid, and the mapping goes with the last view. So no Python object points into unmapped memory.

    A forked child has no part of a slot: the mapping isn't inherited, the descriptor is closed, and
    each use of the slot raises an error. A view made before the fork must not be read in the child
    (SIGSEGV).

    A slot without references closes itself. Slots are made by `Slot.make` and `Slot.attach` only.
    """

    def __init__(self, fd: int, nbytes: int, *, writable: bool, calls: MemoryCalls) -> None:
        address = calls.map(fd, nbytes, writable=writable)
        self._mapping: _Mapping | None = (ctypes.c_ubyte * nbytes).from_address(address)
        # `atexit` off: at exit other threads may still use the memory, and the system frees it
        # anyway.
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
        """Return a slot for an image: writable, all zeros, without allocated memory until touched.

        Args:
            nbytes: size of the image in bytes; `Slot.nbytes` is rounded up to whole pages, at least
                one.
            calls: system calls to use, for example those of a fault injector.

        Raises:
            CkptError: ``SLOT_MEMORY`` if the system refuses the slot, ``ARGUMENT`` for a negative
            size.
        """
        calls = MemoryCalls() if calls is None else calls
        nbytes = slot_nbytes(nbytes)
        with _no_fork(), _named_errors(nbytes), _closed_if_failed(calls.make_memory()) as fd:
            calls.seal_size(fd, nbytes)
            return cls(fd, nbytes, writable=True, calls=calls)

    @classmethod
    def attach(cls, fd: int, *, calls: MemoryCalls | None = None) -> Slot:
        """Return the read-only slot behind a descriptor from another process.

        Args:
            fd: descriptor, owned by the slot from now on: closed with the slot, and after an error.
            calls: system calls to use, for example those of a fault injector.

        Raises:
            CkptError: ``SLOT_MEMORY`` if `fd` isn't a slot's descriptor, or can't be mapped.
        """
        calls = MemoryCalls() if calls is None else calls
        with _no_fork(), _named_errors(None), _closed_if_failed(fd):
            os.set_inheritable(fd, False)  # noqa: FBT003
            if not calls.has_sealed_size(fd):
                raise err(
                    Code.SLOT_MEMORY, "the size of the attached memory isn't sealed", remedy=""
                )
            return cls(fd, os.fstat(fd).st_size, writable=False, calls=calls)

    def __repr__(self) -> str:
        state = (
            "closed" if self._mapping is None else "read-write" if self._writable else "read-only"
        )
        return f"<Slot of {self.nbytes} bytes, {state}>"

    @property
    def view(self) -> memoryview:
        """The memory as bytes; read-only in an attached slot."""
        whole = memoryview(self._open_mapping()).cast("B")
        return whole if self._writable else whole.toreadonly()

    @property
    def address(self) -> int:
        """The address of the memory. Keep a `view` as long as the address is in use."""
        return ctypes.addressof(self._open_mapping())

    @property
    def fd(self) -> int:
        """The descriptor, for sending to another process; owned by the slot."""
        if not self._close_fd.alive:
            raise err(Code.SLOT_MEMORY, "the slot's descriptor is closed", remedy="")
        return self._fd

    def touch(
        self, on_progress: Callable[[int], None] | None = None, *, thread_count: int = 1
    ) -> None:
        """Allocate all pages now, in this process's page table, so that no copy waits for them.

        The contents don't change, and other threads run meanwhile. Beyond a cgroup's limit the
        system
        kills processes and raises no error: call `plan_slots` first. Needs the open descriptor.

        Args:
            on_progress: called after each piece (64 MiB) with the number of bytes touched so far.
            thread_count: number of threads that touch, since the system clears one page after the
                other.

        Raises:
            CkptError: ``SLOT_MEMORY`` if memory runs out, or if the slot or its descriptor is
            closed.
        """
        # A reference keeps the mapping alive: if another thread closes the slot, this call fails,
        # but doesn't crash.
        mapping = self._open_mapping()
        view = memoryview(mapping).cast("B")
        address = ctypes.addressof(mapping)

        def touch_piece(byte_begin: int) -> int:
            byte_end = min(byte_begin + _PIECE_NBYTES, self.nbytes)
            with _named_errors(self.nbytes):
                self._touch_piece(
                    view[byte_begin:byte_end], address + byte_begin, self.fd, byte_begin
                )
            return byte_end

        begins = range(0, self.nbytes, _PIECE_NBYTES)
        with contextlib.ExitStack() as stack:
            ends: Iterable[int] = map(touch_piece, begins)
            if min(thread_count, len(begins)) > 1:
                threads = stack.enter_context(ThreadPoolExecutor(thread_count, "ckptfmt-touch"))
                stack.callback(threads.shutdown, wait=False, cancel_futures=True)
                with contextlib.suppress(RuntimeError):  # no thread can start
                    ends = threads.map(touch_piece, begins)
            for byte_end in ends:
                if on_progress:
                    on_progress(byte_end)

    def _touch_piece(self, piece: memoryview, address: int, fd: int, byte_begin: int) -> None:
        try:
            self._calls.populate(address, piece.nbytes, writable=self._writable)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # First allocate: the system can refuse that with an error, but refuses a touch with
            # SIGBUS. Then touch each page by reading a byte. A write could undo a write of another
            # thread.
            self._calls.allocate(fd, byte_begin, piece.nbytes)
            piece[:: mmap.PAGESIZE].tobytes()

    def close(self) -> None:
        """Close the descriptor and drop the mapping, which goes with the last view. Idempotent."""
        self.close_fd()
        self._mapping = None  # last: freeing memory is slow, and forks needn't wait

    def close_fd(self) -> None:
        """Close the descriptor only; the memory and the views stay. Idempotent."""
        self._close_fd()

    def _open_mapping(self) -> _Mapping:
        mapping = self._mapping
        if mapping is None:
            raise err(
                Code.SLOT_MEMORY,
                "the slot is closed, or belongs to the parent process",
                remedy="",
            )
        return mapping


def slot_nbytes(image_nbytes: int) -> int:
    """Return the size of a slot for an image in bytes: whole pages, at least one.

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
        raise err(
            Code.SLOT_MEMORY, f"the system refuses memory for {slot}: {reason or error}"
        ) from error


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
    """Return libc with prototypes, without which ctypes would cut pointers to C integers."""
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
#: The open descriptors of slots. `_LIVE` isn't enough: a fork may come after a slot's end and
#: before the descriptor is closed.
_DESCRIPTORS: Final[set[int]] = set()
#: Held while a slot is made or a descriptor is closed, and during forks: otherwise a child could
#: inherit an unlisted descriptor.
_GATE: Final = threading.RLock()


@contextlib.contextmanager
def _no_fork() -> Iterator[None]:
    with _GATE:
        _watch_forks()
        yield


@functools.cache
def _watch_forks() -> None:
    """Handle forks from now on.

    This isn't done at import, since most programs that import this package make no slot.
    """
    os.register_at_fork(
        before=_GATE.acquire, after_in_parent=_GATE.release, after_in_child=_forget_all
    )


def _forget_all() -> None:
    """Drop all slots of the parent in a forked child, so that the child keeps no memory alive."""
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
    # A forked child lacks the mapping, and may have mapped other memory at the address.
    if os.getpid() == pid:
        calls.unmap(address, nbytes)


# How much memory slots may take
#
# Beyond a cgroup's limit a process is killed instead of refused memory, so that sizes are checked
# before the allocation.
# Source: Linux, Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst; proc_meminfo(5).

#: Free memory for the saver process, about 100 MiB, and for page tables, which take 0.2 % of a slot
#: in each of two processes.
_MARGIN_NBYTES: Final = 256 * 2**20
#: Share of memory to keep free, as a divisor (5 %): "available" is an estimate of the kernel, and
#: the trainer and its data loaders go on allocating.
_MARGIN_DIVISOR: Final = 20
#: Error numbers of the system for a shortage of memory, processes, threads or descriptors.
_SHORT: Final = frozenset({errno.ENOMEM, errno.EAGAIN, errno.EMFILE, errno.ENFILE})
#: Least value that means "no limit" in version 1, where the kernel shows the largest multiple of a
#: page.
_NO_LIMIT_NBYTES: Final = 2**62


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Names:
    """The names of the files of one version of cgroups."""

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
# memory.high kills no process, but slows a process beyond it down: a training would nearly stop.
_VERSION_2: Final = _Names(
    mounts=("sys/fs/cgroup", "sys/fs/cgroup/unified"),
    limits=("memory.max", "memory.high"),
    used="memory.current",
    reclaimable=frozenset({"inactive_file", "active_file"}),
)


def available_nbytes(root: str | os.PathLike[str] = "/") -> int:
    """Return how many bytes can be allocated now without swapping and without being killed.

    The result is the least of the kernel's ``MemAvailable`` and, for each cgroup from this
    process's own up to the root (version 2, version 1 or both), the limit less the used memory.
    File cache that can be dropped doesn't count as used. An unreadable limit is no limit; a system
    without any readable number has 0.

    Args:
        root: directory above ``proc`` and ``sys``.
    """
    base = pathlib.Path(root)
    rooms = [kib * 1024 for kib in _iter_table(base / "proc/meminfo", frozenset({"MemAvailable:"}))]
    rooms += [
        room_nbytes
        for level, names in _iter_levels(base)
        for room_nbytes in _iter_rooms(level, names)
    ]
    return max(0, min(rooms, default=0))


def plan_slots(image_nbytes: int, wanted: int, available_nbytes: int, shared_by: int) -> int:
    """Return how many slots to make, at most `wanted`, so that each trainer's margin stays free.

    Args:
        image_nbytes: size of this trainer's image in bytes.
        wanted: number of slots to make if memory suffices.
        available_nbytes: result of `available_nbytes` before the first slot of any trainer of this
            machine.
        shared_by: number of trainers of this machine that plan at once, with equal shares.

    Raises:
        CkptError: ``ARGUMENT`` for a negative number, or no trainer.

    >>> [plan_slots(10**9, wanted=2, available_nbytes=n * 10**9, shared_by=1) for n in (1, 2, 3)]
    [0, 1, 2]
    """
    if min(wanted, available_nbytes) < 0 or shared_by < 1:
        raise err(
            Code.ARGUMENT, f"{wanted} slots of {available_nbytes} bytes, shared by {shared_by}"
        )
    share_nbytes = available_nbytes // shared_by
    free_nbytes = max(0, share_nbytes - margin_nbytes(share_nbytes))
    return min(wanted, free_nbytes // slot_nbytes(image_nbytes))


def margin_nbytes(share_nbytes: int) -> int:
    """Return how many bytes of a trainer's share stay free: 5 %, and at least 256 MiB."""
    return max(_MARGIN_NBYTES, share_nbytes // _MARGIN_DIVISOR)


def is_shortage(error: BaseException) -> bool:
    """Return whether an error means a shortage of memory, threads or descriptors."""
    known = isinstance(error, CkptError) and error.code == Code.SLOT_MEMORY
    known |= isinstance(error, MemoryError) or (
        isinstance(error, OSError) and error.errno in _SHORT
    )
    known |= isinstance(error, RuntimeError) and "can't start new thread" in str(error)
    return known or (error.__cause__ is not None and is_shortage(error.__cause__))


def _iter_levels(base: pathlib.Path) -> Iterator[tuple[pathlib.Path, _Names]]:
    """Yield the directory and file names of each cgroup of this process, from its own up.

    A container often sees the path of its host, but only its own cgroup, as the root. Missing
    levels are skipped by the caller, and the root is always included.
    """
    for line in _read_text(base / "proc/self/cgroup").splitlines():
        _, _, controllers_and_path = line.partition(":")
        controllers, _, path = controllers_and_path.partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        names = _VERSION_1 if controllers else _VERSION_2
        parts = [part for part in path.split("/") if part]
        if ".." in parts:  # the process is outside of the visible hierarchy
            parts = []
        for mount in names.mounts:
            for depth in range(len(parts), -1, -1):
                yield base.joinpath(mount, *parts[:depth]), names


def _iter_rooms(level: pathlib.Path, names: _Names) -> Iterator[int]:
    """Yield the free bytes below each limit of a cgroup."""
    limits = [_count(_read_text(level / name)) for name in names.limits]
    used_nbytes = _count(_read_text(level / names.used)) or 0
    cache_nbytes = sum(_iter_table(level / "memory.stat", names.reclaimable))
    for limit_nbytes in limits:
        if limit_nbytes is not None and limit_nbytes < _NO_LIMIT_NBYTES:
            yield limit_nbytes - max(0, used_nbytes - cache_nbytes)


def _iter_table(path: pathlib.Path, keys: frozenset[str]) -> Iterator[int]:
    """Yield the numbers of `keys` in a file with a key and a number on each line."""
    for line in _read_text(path).splitlines():
        words = line.split()
        number = _count(words[1]) if len(words) >= 2 and words[0] in keys else None
        if number is not None:
            yield number


def _count(text: str) -> int | None:
    """Return the number in a text; None for any text that isn't a number, such as "max"."""
    digits = text.strip()
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) <= 20 else None


def _read_text(path: pathlib.Path) -> str:
    """Return the text of a file; an empty text if the file can't be read."""
    with contextlib.suppress(OSError, ValueError):
        return os.fsdecode(path.read_bytes())  # the name of a cgroup may be any bytes
    return ""
