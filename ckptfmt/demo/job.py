"""Start the training under torchrun, watch it by its ledgers, kill one process of it, and leave nothing behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from ckptfmt.demo.ledger import Ledger, ledger_path, read_ledger

__all__ = ["Job", "JobError"]

#: How often the ledgers are looked at, and how long they may stay as they are, in seconds.
_POLL_S = 0.02
_STALL_S = 300.0
#: How long torchrun gets to end its processes before they are killed, in seconds.
_GRACE_S = 20.0


class JobError(Exception):
    """A job that didn't do what the demo needs it to. The text says what its output says."""


class Job:
    """One launch of the training under torchrun; a context manager that ends all its processes.

    Args:
        directory: of the demo; checkpoints, ledgers and logs lie under it.
        run: name of the run, which is a directory there.
        name: of this launch.
        world_size: how many processes.
        options: more for the training script.
    """

    def __init__(self, directory: Path, *, run: str, name: str, world_size: int, options: Sequence[str]) -> None:
        self.name = name
        self._ledgers = directory / "ledgers"
        self._world_size = world_size
        self._log = directory / "logs" / f"{name}.txt"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
        script = ["-m", "ckptfmt.demo.train", "--checkpoints", str(directory / run)]
        self._command = [sys.executable, *launcher, *script, "--ledgers", str(self._ledgers), "--name", name, *options]
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

    def ledgers(self) -> list[Ledger]:
        """Return what the processes have written so far."""
        return [read_ledger(ledger_path(self._ledgers, self.name, rank)) for rank in range(self._world_size)]

    def wait(self, on_step: Callable[[int], None]) -> None:
        """Wait until the job has ended well; call `on_step` with the steps done as they are done.

        Raises: JobError if it fails, or stands still.
        """
        while self._is_running():
            self._watch(on_step, until=None)
        assert self._process is not None  # noqa: S101 - the context was entered
        if self._process.returncode != 0:
            raise self._failure(f"ended with exit code {self._process.returncode}")

    def kill_after(self, step: int, rank: int, on_step: Callable[[int], None]) -> int:
        """Send SIGKILL to one process once it has done `step` steps, and wait until the job has failed of it.

        Returns: the last step in that process's ledger.
        Raises: JobError if there was nothing to kill, or the job goes on all the same.
        """
        self._watch(on_step, until=step)
        header = self.ledgers()[rank].header
        if header is None or not self._is_running():
            raise self._failure(f"ended before it could be killed after step {step}")
        with contextlib.suppress(ProcessLookupError):
            os.kill(header.pid, signal.SIGKILL)
        while self._is_running():
            self._watch(on_step, until=None)
        if self._process is None or self._process.returncode == 0:
            raise self._failure("ended well, although one of its processes was killed")
        return self.ledgers()[rank].last_step

    def end(self) -> None:
        """End the job if it is still running: first torchrun, which ends its processes; then whoever is left."""
        if self._process is None or self._process.poll() is not None:
            return
        pids = [ledger.header.pid for ledger in self.ledgers() if ledger.header is not None]
        self._process.terminate()
        try:
            self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _watch(self, on_step: Callable[[int], None], *, until: int | None) -> None:
        """Follow the ledgers until a step is done, or the job has ended."""
        last_step, change_s = 0, time.monotonic()
        while self._is_running():
            step = min(ledger.last_step for ledger in self.ledgers())
            if step != last_step:
                last_step, change_s = step, time.monotonic()
                on_step(step)
            if until is not None and step >= until:
                return
            if time.monotonic() - change_s > _STALL_S:
                raise self._failure(f"did nothing for {_STALL_S:g} s")
            time.sleep(_POLL_S)

    def _failure(self, what: str) -> JobError:
        lines = self._log.read_text("utf-8", errors="replace").splitlines()[-15:] if self._log.exists() else []
        said = "".join(f"\n    {line}" for line in lines)
        return JobError(f"the launch {self.name!r} {what}; its output, {self._log}, ends with:{said}")
