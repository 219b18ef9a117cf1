"""The machine of a measurement: processor, memory, kernel, file system, and free resources."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

#: The lowest priority of a process.
_LOWEST = 19
_PROC = Path("/proc")


def describe_machine() -> dict[str, object]:
    """Return the machine's entries for a record, without names of the machine."""
    return {
        "cpu": _field(_PROC / "cpuinfo", "model name"),
        "arch": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "ram_gib": round(_meminfo_nbytes("MemTotal") / 2**30, 1),
        "gpu": None,
        "kernel": platform.release(),
        "huge_pages": _selected(Path("/sys/kernel/mm/transparent_hugepage/enabled")),
        "shared_huge_pages": _selected(Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")),
        "load_average": list(os.getloadavg()),
    }


def describe_storage(directory: Path) -> dict[str, object]:
    """Return the entries for a record about the storage below a directory."""
    kind, device = file_system_of(directory)
    # Only a device has a name of interest: a bind mount or an overlay would name places of this
    # machine.
    name = Path(device).name if device.startswith("/dev/") else None
    flag = Path("/sys/class/block") / (name or "none") / "queue" / "rotational"
    with contextlib.suppress(OSError):
        return {"fs": kind, "device": name, "rotational": flag.read_text().strip() == "1"}
    return {"fs": kind, "device": name, "rotational": None}


def file_system_of(directory: Path) -> tuple[str, str]:
    """Return type and source of a directory's file system."""
    wanted = directory.stat().st_dev
    found = ("unknown", "")
    with contextlib.suppress(OSError):
        for line in (_PROC / "self" / "mountinfo").read_text().splitlines():
            mount, _, source = line.partition(" - ")
            major, minor = mount.split()[2].split(":")
            if os.makedev(int(major), int(minor)) == wanted:
                found = (source.split()[0], source.split()[1])
    return found


def available_nbytes() -> int:
    """Return the kernel's estimate of available memory."""
    return _meminfo_nbytes("MemAvailable")


def rss_anon_nbytes(pid: int | None = None) -> int:
    """Return the anonymous resident memory of a process, by default this process; 0 after its end.

    The memory excludes shared memory, hence also slots.
    """
    text = _field(_PROC / str(pid or os.getpid()) / "status", "RssAnon")
    return int(text.split()[0]) * 1024 if text else 0


def rss_unfiled_nbytes() -> int:
    """Return the resident memory of this process without a file behind: anonymous and shared."""
    texts = (_field(_PROC / "self" / "status", name) for name in ("RssAnon", "RssShmem"))
    return sum(int(text.split()[0]) * 1024 for text in texts if text)


def read_by_calls_nbytes() -> int:
    """Return the number of bytes that this process has read through system calls."""
    return int(_field(_PROC / "self" / "io", "rchar") or 0)


def find_children(needle: str) -> list[int]:
    """Return the processes below this process with `needle` in the command line."""
    parents, needles = {}, []
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                # The name in parentheses may contain blanks and parentheses.
                parents[int(entry.name)] = int(
                    (entry / "stat").read_text().rpartition(")")[2].split()[1]
                )
                if needle in (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(
                    errors="replace"
                ):
                    needles.append(int(entry.name))
    return [pid for pid in needles if _descends(pid, os.getpid(), parents)]


def yield_processors(*needles: str) -> None:
    """Give processes below this process only the processor time left by all other processes.

    Args:
        needles: substrings of the command lines. Each process is in a separate session.
    """
    for pid in {pid for needle in needles for pid in find_children(needle)}:
        for task in _tasks(pid):
            with contextlib.suppress(OSError):  # the process has ended
                os.setpriority(
                    os.PRIO_PROCESS, task, _LOWEST
                )  # a single thread: threads inherit the policy
        if os.getsid(pid) != os.getsid(0):
            with contextlib.suppress(OSError):  # many kernels use the session's value
                (_PROC / str(pid) / "autogroup").write_text(str(_LOWEST))


def _tasks(pid: int) -> list[int]:
    """Return the threads of a process; none after the end of the process."""
    with contextlib.suppress(OSError):
        return [int(task.name) for task in (_PROC / str(pid) / "task").iterdir()]
    return []


@contextlib.contextmanager
def own_processor() -> Iterator[Callable[[], None]]:
    """Keep a processor for the calling thread, and the rest for all other threads and children.

    Yields a function that repeats the assignment for new threads: a new thread inherits the
    processors of the thread that starts it. On a machine with a single processor, no assignment
    changes.
    """
    processors = os.sched_getaffinity(0)
    own = {min(processors)} if len(processors) > 1 else processors
    caller = threading.get_native_id()

    def keep(own: set[int], rest: set[int]) -> None:
        for pid in (os.getpid(), *find_children("")):
            for task in _tasks(pid):
                with contextlib.suppress(OSError):  # the thread has ended
                    os.sched_setaffinity(task, own if task == caller else rest)

    def keep_apart() -> None:
        keep(own, processors - own or processors)

    keep_apart()
    try:
        yield keep_apart
    finally:
        keep(processors, processors)


def _descends(pid: int, ancestor: int, parents: dict[int, int]) -> bool:
    while (pid := parents.get(pid, 0)) > 0:
        if pid == ancestor:
            return True
    return False


def _meminfo_nbytes(name: str) -> int:
    text = _field(_PROC / "meminfo", name)
    return int(text.split()[0]) * 1024 if text else 0


def _field(path: Path, name: str) -> str | None:
    """Return the value of the first line ``name: value`` of a kernel file, or None."""
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            key, colon, value = line.partition(":")
            if colon and key.strip() == name:
                return value.strip()
    return None


def _selected(path: Path) -> str | None:
    """Return the word in brackets: the selected value in ``always [madvise] never``."""
    with contextlib.suppress(OSError):
        if found := re.search(r"\[(\w+)\]", path.read_text()):
            return found[1]
    return None
