"""A trainer that is made to be killed: launch, then save and retire without end, telling what it did as it goes."""

import mmap
import os
import random
import signal
import sys
from collections.abc import Callable
from typing import Final

from ckptfmt.commit import decision as commit
from ckptfmt.documents.run import Launch
from ckptfmt.run import lineage
from ckptfmt.store.local import LocalStore
from tests.explorer import content
from tests.explorer.judge import Marks, clean_up

#: What a trainer is doing: the byte in shared memory is the place in this list.
PHASES: Final = ("starting", "resume", "save", "retirement", "idle")
_DEADLINE_S: Final = 20.0


def train(
    root: str, *, seed: int, told_fd: int, phase: mmap.mmap, save_count: int | None = None
) -> None:
    """Launch and save until killed, or `save_count` times.

    Args:
        root: of the run.
        seed: of what is left to chance: how the second writer runs, and what is kept.
        told_fd: a pipe; every mark is a line.
        phase: one shared byte, a place in `PHASES`.
        save_count: how many saves; None for no end.
    """
    rng = random.Random(seed)
    marks = Marks(lambda mark: _tell(told_fd, mark))
    _enter(phase, "resume")
    store = LocalStore(root, writable=True)
    run = lineage.open_run(store)
    launch, _ = lineage.begin_launch(store, run)
    marks.launched(launch)
    step = _resume(store, launch)
    done = 0
    while save_count is None or done < save_count:
        done += 1
        _enter(phase, "save")
        _save(store, launch, step + done, marks, with_processes=rng.random() < 0.5)
        _enter(phase, "retirement")
        clean_up(store, run, launch, marks, keep=rng.choice((1, 2, 3)))
        _enter(phase, "idle")


def one_launch(
    root: str | os.PathLike[str], *, tell: Callable[[str], None] = lambda _: None
) -> None:
    """Launch, save once, retire the rest: what is traced, system call by system call. Marks go to `tell`."""
    store = LocalStore(root, writable=True)
    marks = Marks(tell)
    run = lineage.open_run(store)
    launch, _ = lineage.begin_launch(store, run)
    marks.launched(launch)
    step = _resume(store, launch)
    marks.saved(
        content.save(store, content.origin_of(launch, step + 1, _attempt(launch, step + 1)))
    )
    clean_up(store, run, launch, marks, keep=1)


def _resume(store: LocalStore, launch: Launch) -> int:
    """Load what the launch resumes from; return its step."""
    if launch.resume_from is None:
        return 0
    loaded = content.load(store.at(launch.resume_from.name), digest=launch.resume_from.digest)
    assert loaded.exact, "the launch resumed from what nobody saved"
    return loaded.step


def _save(
    store: LocalStore, launch: Launch, step: int, marks: Marks, *, with_processes: bool
) -> None:
    """Save with two writers: the second in a process of its own, or after the first."""
    origin = content.origin_of(launch, step, _attempt(launch, step))
    if not with_processes:
        marks.saved(content.save(store, origin))
        return
    writer = os.fork()
    if writer == 0:
        content.write(store, origin, 1)
        os._exit(0)
    content.write(store, origin, 0)
    manifest = commit.commit(content.place_of(store, origin), origin, deadline_s=_DEADLINE_S)
    os.waitpid(writer, 0)
    marks.saved(manifest)


def _attempt(launch: Launch, step: int) -> int:
    return launch.launch << 20 | step


def _enter(phase: mmap.mmap, name: str) -> None:
    phase[0] = PHASES.index(name)


def _tell(fd: int, mark: str) -> None:
    """Write a line at once: a pipe keeps what is written to it, whoever dies."""
    os.write(fd, f"{mark}\n".encode())


def serve() -> None:
    """Make one launch for each root that comes in, in a fork of this process: its imports take a second, a fork none.

    Says ``pid`` when the fork has stopped itself, so that somebody may trace it and let it go on;
    then its marks; then ``ended`` with its exit code, negative for a signal.
    """
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
            one_launch(line.rstrip("\n"), tell=lambda mark: _tell(1, mark))
            os._exit(0)
        os.waitpid(pid, os.WUNTRACED)
        _tell(1, f"pid {pid}")
        _, status = os.waitpid(pid, 0)
        _tell(1, f"ended {os.waitstatus_to_exitcode(status)}")


if __name__ == "__main__":
    serve()
