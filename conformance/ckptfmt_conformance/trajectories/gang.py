"""A permanent group of processes, which play cells of several processes one after another.

A start of torch takes seconds, and a new process group takes milliseconds. So each process starts
only once, forked from a server that has imported torch. Processes beyond a cell's number wait.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Final, cast

from ckptfmt_conformance.trajectories.play import play
from ckptfmt_conformance.trajectories.protocol import (
    ERROR,
    FAIL,
    PASS,
    Cell,
    CellResult,
    Checkpointing,
)

__all__ = ["GANG_SIZE", "Gang", "close_gang", "play_in_gang", "shared_gang", "start_process"]

GANG_SIZE: Final = 8
#: The time limit of a cell on all processes, in seconds.
CELL_S: Final = 120.0
#: The time limit of all other processes after a failure, in seconds.
GRACE_S: Final = 2.0
_PRELOADED: Final = [
    "torch", "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch.optim.swa_utils",
    "numpy.random",
    # the first optimizer of a process imports this module, which takes a second
    "torch._dynamo",
    # setting deterministic algorithms imports this module, which takes half a second
    "torch._inductor.config",
    "ckptfmt_conformance.trajectories.play",
]  # fmt: skip


class Gang:
    """A group of processes that run the same function at a time.

    Args:
        size: the number of processes.
    """

    def __init__(self, size: int = GANG_SIZE) -> None:
        self._members = [start_process(_member, rank) for rank in range(size)]

    def __len__(self) -> int:
        return len(self._members)

    def run(
        self, function: Callable[..., Any], *arguments: object, timeout_s: float = CELL_S
    ) -> list[Any]:
        """Run ``function(rank, *arguments)`` on every process, and return the results by rank.

        After the first failure of a process, the other processes have `GRACE_S` left, since they
        may wait for the failed process. The end of a process comes before tracebacks, which may
        tell of the lost connection alone.

        Raises: RuntimeError with the first traceback, or with the silent ranks. The gang is closed
        then.
        """
        waiting: dict[Connection, int] = {}
        answers: dict[int, Any] = {}
        died: str | None = None
        failure: str | None = None
        end_s = time.monotonic() + timeout_s
        for rank, (_, connection) in enumerate(self._members):
            with contextlib.suppress(OSError):  # the read below reports a dead process
                connection.send((function, arguments))
            waiting[connection] = rank
        while waiting and (left_s := end_s - time.monotonic()) > 0:
            for ready in wait(list(waiting), left_s):
                connection = cast("Connection", ready)
                rank = waiting.pop(connection)
                try:
                    trace, answers[rank] = connection.recv()
                except (EOFError, OSError):
                    trace = died = died or f"process {rank} died"
                if trace is not None:
                    failure = failure or trace
                    end_s = min(end_s, time.monotonic() + GRACE_S)
        failure = died or failure
        if waiting and failure is None:
            failure = f"processes {sorted(waiting.values())} didn't answer within {timeout_s:g} s"
        if failure is not None:
            self.close()
            raise RuntimeError(failure)
        return [answers[rank] for rank in range(len(self._members))]

    def close(self) -> None:
        """End all processes."""
        for process, connection in self._members:
            connection.close()
            process.kill()
            process.join()
        self._members = []


def start_process(target: Callable[..., None], *arguments: object) -> tuple[Any, Connection]:
    """Start a process that calls ``target(*arguments, connection)``.

    Returns: the process, and the other end of the connection.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(*arguments, theirs), daemon=True)
    with _environment():
        process.start()
    theirs.close()
    return process, ours


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """Set the environment of the fork server: one thread, and no warnings of DDP."""
    before = dict(os.environ)
    os.environ.update(OMP_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="ERROR")
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _member(rank: int, connection: Connection) -> None:
    """Run functions from the connection until its end."""
    while True:
        try:
            function, arguments = connection.recv()
        except EOFError:
            return
        try:
            connection.send((None, function(rank, *arguments)))
        except Exception:  # noqa: BLE001 - any exception is reported to the caller
            connection.send((traceback.format_exc(), None))


_shared: list[Gang] = []


def shared_gang() -> Gang:
    """Return the gang of this process, which the first call starts.

    The program's exit ends the gang.
    """
    if not _shared or not len(_shared[0]):
        _shared[:] = [Gang()]
        atexit.register(close_gang)
    return _shared[0]


def close_gang() -> None:
    """End the shared gang, if there is one."""
    while _shared:
        _shared.pop().close()


def play_in_gang(cell: Cell, checkpointing: Checkpointing, directory: Path) -> CellResult:
    """Run a cell of several processes, and return the worst result."""
    try:
        results = shared_gang().run(_play_member, cell, checkpointing, str(directory))
    except RuntimeError as error:
        return CellResult(status=ERROR, divergence=(str(error).splitlines() or [""])[-1][:300])
    return _join(cell, results)


def _play_member(rank: int, cell: Cell, checkpointing: Checkpointing, directory: str) -> CellResult:
    result = play(cell, checkpointing, Path(directory), rank)
    if result.status == ERROR:
        # after an error, the processes may be in different places, so all processes end
        raise RuntimeError(f"rank {rank}: {result.divergence}")
    return result


def _join(cell: Cell, results: list[CellResult]) -> CellResult:
    """Return the common result of the cell's processes.

    A control must turn red on some process only.
    """
    taking_part = list(enumerate(results[: cell.processes]))
    if cell.control:
        for rank, result in taking_part:
            if result.status == PASS:
                return _said(rank, result)
        return _said(*taking_part[0])
    order = {PASS: 0, FAIL: 2, ERROR: 3}
    worst = max(taking_part, key=lambda pair: (order.get(pair[1].status, 1), -pair[0]))
    return _said(*worst)


def _said(rank: int, result: CellResult) -> CellResult:
    said = f"rank {rank}: {result.divergence}" if result.divergence else None
    return CellResult(status=result.status, divergence=said, seconds=result.seconds)
