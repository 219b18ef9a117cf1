"""What the tests of faults share: trainings whose state says its step, scripts that run them, and their savers.

Every element of a training's state follows from its step alone, so that anybody can tell what was
never live.
"""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np

import ckptfmt
from ckptfmt.checkpointer import Checkpointer
from ckptfmt.documents.manifest import Manifest
from ckptfmt.errors import CkptError
from ckptfmt.run.lineage import list_checkpoints
from ckptfmt.saving import saver
from ckptfmt.saving.handle import SaveHandle
from ckptfmt.store import open_store
from tests.store.helpers import ROOT

#: The environment variable by which the processes of one test are told from all others; savers
#: inherit it.
MARK: Final = "CKPTFMT_FAULTS_MARK"
#: After how many seconds something counts as hanging. Others may have the cores meanwhile.
PATIENCE_S: Final = 60.0
#: What every script begins with.
_PREAMBLE: Final = """
import logging, os, signal, sys, time
import ckptfmt
from ckptfmt.checkpointer import Checkpointer
from tests.faults.driver import *
logging.basicConfig(level=logging.WARNING)  # what a run says of itself is no error

run = sys.argv[1]

def tell(*words):
    print(*words, flush=True)
"""


# --- trainings ------------------------------------------------------------------------------------


def expected(dtype: Any, step: int) -> tuple[float, float]:
    """Return what weights and momentum of a toy are after `step` steps."""
    if np.issubdtype(dtype, np.integer):
        return step, 0
    weight, momentum = np.float32(0), np.float32(0)
    for _ in range(step):
        momentum = np.float32(0.5) * momentum - np.float32(1)
        weight -= momentum
    return float(weight), float(momentum)


class Toy:
    """A training on three arrays, of `nbytes` in all."""

    dtype: Any = np.int64

    def __init__(self, nbytes: int = 1 << 20) -> None:
        weights = {f"w{number}": np.zeros(max(1, nbytes // 24), self.dtype) for number in range(3)}
        self.arrays: list[Any] = list(weights.values())
        self.data = {"step": 0}
        self.state = ckptfmt.State(weights=weights, data=self.data)

    def train(self) -> None:
        """Do a step."""
        self.data["step"] += 1
        for array in self.arrays:
            array[:] = self.data["step"]

    def save(self, checkpointer: Checkpointer) -> SaveHandle:
        """Do a step, and begin its save."""
        self.train()
        handle = checkpointer.save(step=self.data["step"])
        assert handle is not None
        return handle

    def check(self, step: int) -> None:
        """Raise AssertionError unless this is what was live after `step` steps."""
        assert self.data == {"step": step}
        weight, _ = expected(self.dtype, step)
        assert all(bool((array == weight).all()) for array in self.arrays), (
            f"weights that aren't of step {step}"
        )


class TorchToy(Toy):
    """A training with an optimizer, so that what it saves is copied beside the next step."""

    dtype = np.float32

    def __init__(self, nbytes: int = 1 << 20) -> None:
        import torch  # noqa: PLC0415

        self.model = torch.nn.ParameterList([torch.zeros(max(1, nbytes // 24)) for _ in range(3)])
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0, momentum=0.5)
        self.arrays = [parameter.detach() for parameter in self.model]
        self.data = {"step": 0}
        self.state = ckptfmt.State(weights=self.model, optimizer=self.optimizer, data=self.data)
        for parameter in self.model:
            parameter.grad = parameter.detach() * 0 - 1

    def train(self) -> None:
        """Do a step."""
        self.optimizer.step()
        self.data["step"] += 1


# --- what is on disk ------------------------------------------------------------------------------


def committed(run: str | os.PathLike[str]) -> list[int]:
    """Return the steps of the committed checkpoints of a run."""
    entries = list_checkpoints(open_store(run, writable=False))
    return [entry.step for entry in entries if isinstance(entry.register, Manifest)]


def problems(run: str | os.PathLike[str]) -> list[str]:
    """Return what is wrong with a run: what `validate` finds, and contents that were never live."""
    if not pathlib.Path(run, "run.json").exists():
        return []  # killed before there was anything
    found = [str(violation) for violation in ckptfmt.validate(run).violations]
    for entry in list_checkpoints(open_store(run, writable=False)):
        if isinstance(entry.register, Manifest) and not found:
            trees: Any = ckptfmt.load(pathlib.Path(run) / entry.name, framework="numpy")
            momenta = [
                state["momentum_buffer"]
                for name, state in trees.get("optimizer", {}).items()
                if "state" in name
            ]
            if trees["data"] != {"step": entry.step} or not _is_of(
                entry.step, [*trees["weights"].values()], momenta
            ):
                found.append(f"{entry.name} holds what was never live")
    return found


def _is_of(step: int, weights: list[Any], momenta: list[Any]) -> bool:
    weight, momentum = expected(weights[0].dtype, step)
    return all((array == weight).all() for array in weights) and all(
        (array == momentum).all() for array in momenta
    )


def resume(run: str | os.PathLike[str], toy: Toy | None = None, **options: Any) -> int:
    """Launch anew, check what is restored, and return its step."""
    toy = toy or Toy()
    # Which streams there are depends on who imported torch, here another test maybe.
    with Checkpointer(run, toy.state, saver="inline", allow="streams", **options) as checkpointer:
        toy.check(checkpointer.step)
        return checkpointer.step


def code_of(action: Callable[[], object]) -> str:
    """Return the code of the error that `action` raises, or "ok"."""
    try:
        action()
    except CkptError as error:
        return str(error.code)
    return "ok"


def outcome_of(handle: SaveHandle) -> str:
    """Return the code of the error that a save ends with, or "ok"."""
    return code_of(lambda: handle.wait(timeout_s=PATIENCE_S))


# --- processes ------------------------------------------------------------------------------------


def until(
    condition: Callable[[], object], timeout_s: float = PATIENCE_S, *, every_s: float = 0.02
) -> bool:
    """Wait until something holds; say whether it does."""
    end_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end_s:
            return False
        time.sleep(every_s)
    return True


def mark_of(pid: int) -> str | None:
    """Return the mark that a process was started with."""
    prefix = f"{MARK}=".encode()
    with contextlib.suppress(OSError):
        for line in pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if line.startswith(prefix):
                return line[len(prefix) :].decode()
    return None


def savers() -> list[int]:
    """Return the processes that are savers of this test."""
    found = []
    for place in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"\0{saver.__name__}\0".encode() in (place / "cmdline").read_bytes():
                found.append(int(place.name))
    return [pid for pid in found if (mark_of(pid) or "").startswith(os.environ[MARK])]


def send(pid: int, number: int) -> None:
    """Send a signal; wait until a process that is to stop has stopped, thread by thread, or is gone."""
    os.kill(pid, number)
    if number == signal.SIGSTOP:
        assert until(lambda: _has_stopped(pid))


def _has_stopped(pid: int) -> bool:
    try:
        return all(_state_of(task) in "TtZ" for task in pathlib.Path(f"/proc/{pid}/task").iterdir())
    except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
        return True


def _state_of(task: pathlib.Path) -> str:
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def save_and_stop(checkpointer: Checkpointer, toy: Toy) -> SaveHandle:
    """Save until the saver could be stopped while it had a save that was staged and not committed; return that."""
    while True:
        handle = toy.save(checkpointer)
        handle.wait("STAGED", PATIENCE_S)
        (pid,) = savers()
        send(pid, signal.SIGSTOP)
        if not pathlib.Path(handle.path, "manifest.json").exists():
            return handle
        send(pid, signal.SIGCONT)
        handle.wait("COMMITTED", PATIENCE_S)


def start(script: str, run: str | os.PathLike[str], **options: Any) -> subprocess.Popen[str]:
    """Start a script in a new interpreter, and in a session of its own as launchers do."""
    return subprocess.Popen(
        [sys.executable, "-c", _PREAMBLE + script, str(run)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **options,
    )


def hear(process: subprocess.Popen[str]) -> str:
    """Return the next line that a script tells; empty if it has ended."""
    assert process.stdout is not None
    return process.stdout.readline().strip()
