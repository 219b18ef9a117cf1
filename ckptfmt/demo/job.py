"""Start the training under torchrun, watch it by its journals, kill one process of it, and leave nothing behind."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from ckptfmt.demo.journal import Follower, Journal, journal_path, read_journal

#: How often the journals are looked at, and how long they may stay as they are, in seconds.
_POLL_S = 0.02
_STALL_S = 300.0
#: How long torchrun gets to end its processes before they are killed, in seconds.
_GRACE_S = 20.0

#: How a line of torchrun's own log begins, when it reports an error.
_TORCHRUN_ERROR = re.compile(r"E[0-9]{4} ")


class JobError(Exception):
    """A job that didn't do what the demo needs it to. The text says what its output says."""


class Job:
    """One launch of the training under torchrun; a context manager that ends all its processes.

    Args:
        directory: of the demo; checkpoints, journals and logs lie under it.
        run: name of the run, which is a directory there.
        name: of this launch.
        world_size: how many processes.
        options: more for the training script.
    """

    def __init__(self, directory: Path, *, run: str, name: str, world_size: int, options: Sequence[str]) -> None:
        self.name = name
        journals = directory / "journals"
        self._journal_paths = [journal_path(journals, name, rank) for rank in range(world_size)]
        self._followers = [Follower(path) for path in self._journal_paths]
        self._log = directory / "logs" / f"{name}.txt"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
        script = ["-m", "ckptfmt.demo.train", "--checkpoints", str(directory / run)]
        self._command = [sys.executable, *launcher, *script, "--journals", str(journals), "--name", name, *options]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        with self._log.open("wb") as log:
            # In a session of its own, so that Ctrl-C reaches the demo, which then ends the job in good order.
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
                start_new_session=True,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end()

    def journals(self) -> list[Journal]:
        """Return what the processes wrote."""
        return [read_journal(path) for path in self._journal_paths]

    def wait(self, on_step: Callable[[int], None]) -> None:
        """Wait until the job has ended well; call `on_step` with the steps done as they are done.

        Raises: JobError if it fails, or stands still.
        """
        self._watch(on_step)
        if self._returncode() != 0:
            raise self._failure(f"ended with exit code {self._returncode()}")

    def kill_after(self, step: int, rank: int, on_step: Callable[[int], None]) -> None:
        """Send SIGKILL to one process once all have done `step` steps, and wait until the job has failed of it.

        Raises: JobError if there was nothing to kill, or the job went on all the same.
        """
        self._watch(on_step, until=step)
        pid = self._followers[rank].pid
        if pid is None or self._returncode() is not None:
            raise self._failure(f"ended before it could be killed after step {step}")
        _kill(pid)
        self._watch(on_step)
        if self._returncode() == 0:
            raise self._failure("ended well, although one of its processes was killed")

    def end(self) -> None:
        """End the job if it is still running: first torchrun, which ends its processes; then whoever is left."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            for follower in self._followers:
                follower.poll()
                if follower.pid is not None:
                    _kill(follower.pid)

    def _returncode(self) -> int | None:
        return None if self._process is None else self._process.poll()

    def _watch(self, on_step: Callable[[int], None], *, until: int | None = None) -> None:
        """Follow the journals until all processes have done a step, or the job has ended."""
        last_step, change_s = 0, time.monotonic()
        while self._returncode() is None:
            step = min(follower.poll() for follower in self._followers)
            if step != last_step:
                last_step, change_s = step, time.monotonic()
                on_step(step)
            if until is not None and step >= until:
                return
            if time.monotonic() - change_s > _STALL_S:
                raise self._failure(f"did nothing for {_STALL_S:g} s")
            time.sleep(_POLL_S)

    def _failure(self, what: str) -> JobError:
        lines = self._log.read_text("utf-8", errors="replace").splitlines() if self._log.exists() else []
        # After the processes' own last words torchrun repeats at length that they failed.
        own = list(itertools.takewhile(lambda line: not _TORCHRUN_ERROR.match(line), lines)) or lines
        said = "".join(f"\n    {line}" for line in own[-15:])
        return JobError(f"the launch {self.name!r} {what}; its output, {self._log}, says:{said}")


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
