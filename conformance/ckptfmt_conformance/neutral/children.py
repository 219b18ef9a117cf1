"""Forked processes with a return value or a cause of death. All of them share an import of torch.

The parent process has only imported modules, and has no threads and no process group.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import signal
import time
import traceback
from collections.abc import Callable
from typing import Any, Final

__all__ = ["Answer", "Child", "call"]

_NAP_S: Final = 0.0005


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """The result of a child process.

    Attributes:
        value: the return value, as JSON; None if the child died.
        problem: the cause of death, in one line; "" if the child didn't die.
    """

    value: Any
    problem: str


class Child:
    """A forked process in a new process group, which sends lines to the parent."""

    def __init__(self, work: Callable[[Callable[[str], None]], None]) -> None:
        read_fd, write_fd = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(read_fd)
            _work(work, write_fd)
        # Parent and child both set the group, since either may run first. A kill needs the group.
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.setpgid(self.pid, self.pid)
        os.close(write_fd)
        self._read_fd = read_fd
        self._heard = b""

    def lines(self) -> list[str]:
        """Return all lines read so far."""
        return self._heard.decode().split("\n")[:-1]

    def wait_for(self, word: str, timeout_s: float) -> bool:
        """Wait for a line. Return False if the child ends or the time limit is reached before."""
        end_s = time.monotonic() + timeout_s
        while word not in self.lines():
            if not self._read(end_s - time.monotonic()):
                return False
        return True

    def kill(self) -> None:
        """Kill the process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def end(self, timeout_s: float) -> int | None:
        """Read until the process ends, and return the exit code, negative for a signal.

        Return None if the process was killed at the time limit.
        """
        try:
            return self._end(time.monotonic() + timeout_s)
        except BaseException:
            self.kill()  # an interrupt doesn't reach the child's process group
            raise

    def _end(self, end_s: float) -> int | None:
        while self._read(end_s - time.monotonic()):
            pass
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                os.close(self._read_fd)
                return os.waitstatus_to_exitcode(status)
            if time.monotonic() > end_s:
                self.kill()
                os.waitpid(self.pid, 0)
                os.close(self._read_fd)
                return None
            time.sleep(_NAP_S)

    def _read(self, timeout_s: float) -> bool:
        """Read available output. Return False at the end, or at the time limit."""
        if timeout_s <= 0 or not select.select([self._read_fd], [], [], timeout_s)[0]:
            return False
        content = os.read(self._read_fd, 1 << 16)
        self._heard += content
        return bool(content)


def _work(work: Callable[[Callable[[str], None]], None], write_fd: int) -> None:
    """Run the child's work, and exit the process without returning."""
    code = 1
    try:
        os.setpgid(0, 0)
        work(lambda line: _write(write_fd, f"{line}\n".encode()))
        code = 0
    except BaseException:  # noqa: BLE001 - any exception is printed to standard error
        traceback.print_exc()
    finally:
        os._exit(code)  # without the exit handlers of imported modules


def _write(fd: int, content: bytes) -> None:
    while content:
        content = content[os.write(fd, content) :]


def call(function: Callable[[], object], *, timeout_s: float) -> Answer:
    """Call a function in a forked process, and return the result."""
    child = Child(lambda tell: tell(json.dumps(function())))
    code = child.end(timeout_s)
    lines = child.lines()
    if code is None:
        return Answer(None, f"it didn't end within {timeout_s:g} s")
    if code < 0:
        return Answer(None, f"it died of {signal.Signals(-code).name}")
    return (
        Answer(json.loads(lines[-1]), "")
        if code == 0 and lines
        else Answer(None, f"it ended with status {code}")
    )
