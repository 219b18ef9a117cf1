"""What a figure was measured on: processor, memory, kernel, file system; and what it leaves free."""

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
    """Return what a record says of the machine; nothing that names it."""
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
    """Return what a record says of the storage below a directory."""
    kind, device = file_system_of(directory)
    # Only a device has a name worth keeping: a bind mount or an overlay would name places of this
    # machine.
    name = Path(device).name if device.startswith("/dev/") else None
    flag = Path("/sys/class/block") / (name or "none") / "queue" / "rotational"
    with contextlib.suppress(OSError):
        return {"fs": kind, "device": name, "rotational": flag.read_text().strip() == "1"}
    return {"fs": kind, "device": name, "rotational": None}


def file_system_of(directory: Path) -> tuple[str, str]:
    """Return type and source of the file system that holds a directory."""
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
    """Return how much memory may still be taken, as the kernel guesses it."""
    return _meminfo_nbytes("MemAvailable")


def rss_anon_nbytes(pid: int | None = None) -> int:
    """Return the anonymous resident memory of a process, by default this one; 0 if it is gone.

    Shared memory isn't part of it, so slots aren't.
    """
    text = _field(_PROC / str(pid or os.getpid()) / "status", "RssAnon")
    return int(text.split()[0]) * 1024 if text else 0


def rss_unfiled_nbytes() -> int:
    """Return the resident memory of this process that no file stands behind: anonymous, and shared."""
    texts = (_field(_PROC / "self" / "status", name) for name in ("RssAnon", "RssShmem"))
    return sum(int(text.split()[0]) * 1024 for text in texts if text)


def read_by_calls_nbytes() -> int:
    """Return how many bytes this process has read by system calls so far, as the kernel counts them."""
    return int(_field(_PROC / "self" / "io", "rchar") or 0)


def find_children(needle: str) -> list[int]:
    """Return the processes below this one whose command line contains `needle`."""
    parents, needles = {}, []
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                # The name in parentheses may contain blanks and parentheses itself.
                parents[int(entry.name)] = int(
                    (entry / "stat").read_text().rpartition(")")[2].split()[1]
                )
                if needle in (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(
                    errors="replace"
                ):
                    needles.append(int(entry.name))
    return [pid for pid in needles if _descends(pid, os.getpid(), parents)]


def yield_processors(*needles: str) -> None:
    """Let processes below this one have no more of the processors than others leave.

    Args:
        needles: what the command line of each contains. Each is in another session than this
            process.
    """
    for pid in {pid for needle in needles for pid in find_children(needle)}:
        for task in _tasks(pid):
            with contextlib.suppress(OSError):  # it has ended
                os.setpriority(
                    os.PRIO_PROCESS, task, _LOWEST
                )  # of one thread: those it starts are alike
        if os.getsid(pid) != os.getsid(0):
            with contextlib.suppress(OSError):  # many kernels go by the session's
                (_PROC / str(pid) / "autogroup").write_text(str(_LOWEST))


def _tasks(pid: int) -> list[int]:
    """Return the threads of a process; none once it has ended."""
    with contextlib.suppress(OSError):
        return [int(task.name) for task in (_PROC / str(pid) / "task").iterdir()]
    return []


@contextlib.contextmanager
def own_processor() -> Iterator[Callable[[], None]]:
    """Keep one processor for the calling thread, and the others for all other threads of this process and below it.

    Yields what does so again, for threads that were started since: each begins where the thread
        runs that starts it.
    Where there is one processor only, nothing changes.
    """
    processors = os.sched_getaffinity(0)
    own = {min(processors)} if len(processors) > 1 else processors
    caller = threading.get_native_id()

    def keep(own: set[int], rest: set[int]) -> None:
        for pid in (os.getpid(), *find_children("")):
            for task in _tasks(pid):
                with contextlib.suppress(OSError):  # it has ended
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
    """Return the value of the first line ``name: value`` of a file of the kernel; None if there is none."""
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            key, colon, value = line.partition(":")
            if colon and key.strip() == name:
                return value.strip()
    return None


def _selected(path: Path) -> str | None:
    """Return the word in brackets: what is chosen among ``always [madvise] never``."""
    with contextlib.suppress(OSError):
        if found := re.search(r"\[(\w+)\]", path.read_text()):
            return found[1]
    return None
