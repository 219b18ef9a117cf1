"""How much memory slots may take: what the machine has left, what each cgroup around this process has left.

A process that goes beyond a cgroup's limit isn't refused memory, it is killed; hence the sums are done before.
Source: Linux, Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst; proc_meminfo(5).
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import pathlib
from collections.abc import Iterator
from typing import Final

from ckptfmt.errors import CkptError, Code, err
from ckptfmt.stage.slot import slot_nbytes

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
    rooms = [*_iter_table(base / "proc/meminfo", frozenset({"MemAvailable:"}))]
    rooms = [room_nbytes * 1024 for room_nbytes in rooms]
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
