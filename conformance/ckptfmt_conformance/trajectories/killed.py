"""Cells with a trainer killed by SIGKILL at a phase of an asynchronous save.

The first process trains and saves, polls the phase of its save, and kills itself at the wanted
phase. A few earlier saves are completed, so that there are checkpoints to lose. A second process
resumes from the remains, trains to the end, and saves once more. It must not resume from a step
before the last promised save, and from there on every byte of its state must equal the
uninterrupted run's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from ckptfmt_conformance.protocol import Unsupported
from ckptfmt_conformance.trajectories.gang import start_process
from ckptfmt_conformance.trajectories.job import Runnable, seed_streams
from ckptfmt_conformance.trajectories.ledger import Comparison, Facts, Position
from ckptfmt_conformance.trajectories.play import make_job, own_streams, reference_of
from ckptfmt_conformance.trajectories.protocol import (
    ERROR,
    FAIL,
    PASS,
    PHASES,
    UNSUPPORTED,
    AsyncCheckpointing,
    AsyncRun,
    AsyncSave,
    Cell,
    CellResult,
    Checkpointing,
    Kill,
)
from ckptfmt_conformance.trajectories.recipes import STEPS
from ckptfmt_conformance.trajectories.vacuity import find_vacuity

__all__ = ["FEATURE", "play_killed"]

#: The feature that an implementation needs for these cells.
FEATURE: Final = "async-saves"
#: The number of the first save at which a trainer may be killed. If the moment was missed, every
#: second save follows.
_FIRST_DOOMED: Final = 4
#: The number of saves that run during a step. For all later saves, every phase is polled.
_BESIDE: Final = 2
#: The number of trainers to try, since a phase may end before a poll sees it.
_TRAINERS: Final = 4
#: The interval of the polls, and the time limit of a save, in seconds.
_NAP_S: Final = 0.00005
_SAVE_S: Final = 30.0
#: The time limit of a process, in seconds.
_PROCESS_S: Final = 90.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Death:
    """The knowledge of a killed trainer.

    Attributes:
        step: the number of finished training steps.
        reached: the last observed phase of each save, by its step.
    """

    step: int
    reached: dict[int, str]

    def explain(self) -> str:
        """Return the moment of the kill, in words."""
        phase = self.reached.get(self.step)
        when = (
            f"as the save of step {self.step} was {phase}"
            if phase
            else f"before the save of step {self.step}"
        )
        return f"killed {when}"

    def find_loss(self, kill: Kill, step: int) -> str | None:
        """Return the broken promise of a resume at `step`; None where every promise is kept."""
        promise = PHASES.index("COMMITTED" if kill.together else "STAGED")
        kept = max(
            (saved for saved, phase in self.reached.items() if PHASES.index(phase) >= promise),
            default=0,
        )
        if step < kept:
            return f"step {kept} was {self.reached[kept]}, and is lost"
        return None if step in self.reached or not step else f"step {step} was never saved"


def play_killed(cell: Cell, checkpointing: Checkpointing, directory: Path) -> CellResult:
    """Run a cell with a killed trainer.

    Args:
        directory: an empty directory for the runs.
    """
    begin_s = time.monotonic()
    try:
        result = _play(cell, checkpointing, directory)
    except Unsupported as answer:
        result = CellResult(status=UNSUPPORTED, divergence=answer.feature)
    except RuntimeError as error:
        result = CellResult(status=ERROR, divergence=str(error))
    return dataclasses.replace(result, seconds=time.monotonic() - begin_s)


def _play(cell: Cell, checkpointing: Checkpointing, directory: Path) -> CellResult:
    assert cell.kill is not None
    if not isinstance(checkpointing, AsyncCheckpointing):
        raise Unsupported(FEATURE)
    phase = cell.kill.phase
    phases = checkpointing.phases
    if phase and (phase not in phases or (cell.kill.midway and phase == phases[-1])):
        raise Unsupported(
            f"{FEATURE}: its saves don't tell of {phase}" + " and what follows" * cell.kill.midway
        )
    for number in range(_TRAINERS):
        run = str(directory / f"run-{number}")
        death = _ask(_train, cell, checkpointing, run)
        if death is not None:
            result: CellResult = _ask(_go_on, cell, checkpointing, run, death)
            return result
    return CellResult(
        status=FAIL, divergence=f"the cell proves nothing: no save was ever seen {phase}"
    )


def _ask(function: Callable[..., Any], *arguments: object) -> Any:
    """Call a function in a new process. Return its return value, or the death that it reported.

    Raises: Unsupported; RuntimeError for any other failure.
    """
    process, connection = start_process(_answer, function, *arguments)
    try:
        if not connection.poll(_PROCESS_S):
            raise RuntimeError(f"a process didn't answer within {_PROCESS_S:g} s")
        try:
            kind, content = connection.recv()
        except (EOFError, OSError) as error:
            raise RuntimeError("a process died before it was killed") from error
        process.join(_SAVE_S)
        if kind == "killed" and process.exitcode != -signal.SIGKILL:
            raise RuntimeError(f"a process that was killed ended with {process.exitcode}")
    finally:
        process.kill()
        process.join()
        connection.close()
    if kind == "unsupported":
        raise Unsupported(content)
    if kind == "error":
        raise RuntimeError(content)
    return content


# --- in the trainers' processes -------------------------------------------------------------------


def _answer(function: Callable[..., Any], *arguments: Any) -> None:
    *given, connection = arguments
    answer: tuple[str, Any]
    try:
        with own_streams():
            answer = "done", function(connection, *given)
    except Unsupported as feature:
        answer = "unsupported", feature.feature
    except Exception as error:  # noqa: BLE001 - any exception is an error of this cell
        answer = "error", f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"
    connection.send(answer)


def _train(
    connection: Connection, cell: Cell, checkpointing: AsyncCheckpointing, directory: str
) -> None:
    """Train and save until the moment of the kill. Return if the moment doesn't come."""
    _Victim(connection, cell, checkpointing, directory).train()


class _Victim:
    """A trainer that kills itself at a moment of a save.

    The first saves run during a step, which changes all saved tensors. For later saves, the phases
    are polled. Half of a phase's last duration gives the middle of the phase.
    """

    def __init__(
        self, connection: Connection, cell: Cell, checkpointing: AsyncCheckpointing, directory: str
    ) -> None:  # fmt: skip
        assert cell.kill is not None
        self._connection = connection
        self._kill = cell.kill
        self._final = checkpointing.phases[-1]
        self._job: Runnable = make_job(cell.recipe, seed=1)
        self._run: AsyncRun = checkpointing.open_run(
            directory, self._job.state(), delta=cell.kill.delta
        )
        self._reached: dict[int, str] = {}
        self._helpers: list[int] = []
        self._delay_s = 0.0

    def train(self) -> None:
        """Train until the moment of the kill, or until the last step."""
        number = 0
        while self._job.position[0] < STEPS - 1:
            self._job.advance()
            number += 1
            is_doomed = number >= _FIRST_DOOMED and number % 2 == _FIRST_DOOMED % 2
            if is_doomed:
                self._helpers = _find_descendants(os.getpid()) if self._kill.together else []
                if self._kill.phase is None:
                    self._die()
            step = self._job.position[0]
            save = self._run.save(step)
            if number <= _BESIDE or self._kill.phase is None:
                self._job.advance()
            self._follow(step, save, is_doomed=is_doomed)
        self._run.close()

    def _follow(self, step: int, save: AsyncSave, *, is_doomed: bool) -> None:
        """Wait until a save ends, and kill the process at the wanted moment."""
        wanted = self._kill.phase
        seen_s: dict[str, float] = {}
        end_s = time.monotonic() + _SAVE_S
        while True:
            phase = save.phase()
            now_s = time.monotonic()
            since_s = now_s - seen_s.setdefault(phase, now_s)
            self._reached[step] = phase
            if is_doomed and phase == wanted and since_s >= self._delay_s:
                self._die()
            if phase == self._final:
                break
            if now_s > end_s:
                raise TimeoutError(f"the save of step {step} is still {phase} after {_SAVE_S:g} s")
            time.sleep(_NAP_S)
        if wanted is not None and wanted in seen_s and self._kill.midway:
            after = (
                at_s for later, at_s in seen_s.items() if PHASES.index(later) > PHASES.index(wanted)
            )
            self._delay_s = (min(after) - seen_s[wanted]) / 2

    def _die(self) -> None:
        death = _Death(step=self._job.position[0], reached=self._reached)
        self._connection.send(("killed", death))
        for pid in self._helpers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


def _find_descendants(root: int) -> list[int]:
    """Return the ids of all direct and indirect child processes.

    Raises: Unsupported without ``/proc``.
    """
    children = defaultdict(list)
    for place in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process may have ended
            parent = int(place.read_text().rpartition(")")[2].split()[1])
            children[parent].append(int(place.parent.name))
    if not children:
        raise Unsupported(f"{FEATURE}: the system doesn't tell which processes a trainer started")
    found = list(children[root])
    for pid in found:  # the list grows during the loop
        found += children[pid]
    return found


def _go_on(
    connection: Connection,
    cell: Cell,
    checkpointing: AsyncCheckpointing,
    directory: str,
    death: _Death,
) -> CellResult:
    """Resume, compare the restored state with the promises, and train to the end."""
    del connection
    assert cell.kill is not None
    reference = reference_of(cell.recipe)
    job = make_job(cell.recipe, seed=1001)
    seed_streams(2001)
    fresh = job.facts()
    run = checkpointing.open_run(directory, job.state(), delta=cell.kill.delta)
    begin = (run.step, 0)
    comparison = Comparison(reference)
    said = f"{death.explain()}, resumed from step {run.step}"
    problem = death.find_loss(cell.kill, run.step)
    if problem is None and job.position != begin:
        problem = f"its counters say step {job.position[0]}"
    if problem is None:
        problem = _find_vacuity(cell, comparison, begin, reference, fresh)
    if problem is None:
        comparison.look(begin, job.facts(), loads=1, at_load=True)
        while job.position < (STEPS, 0):
            job.advance()
            comparison.look(job.position, job.facts(), loads=1, at_load=False)
        problem = comparison.explain()
    if problem is None:
        _save_last(run, checkpointing.phases[-1])
    run.close()
    return CellResult(
        status=FAIL if problem else PASS, divergence=f"{said}: {problem}" if problem else said
    )


def _find_vacuity(
    cell: Cell,
    comparison: Comparison,
    begin: Position,
    reference: dict[Position, Facts],
    fresh: Facts,
) -> str | None:
    """Return the reason why resuming there would prove nothing; None where it would be a proof."""
    if comparison.has_same_weights(begin, fresh):
        return "the cell proves nothing: the job to load into has the weights already"
    vacuous = find_vacuity(dataclasses.replace(cell, cuts=(begin,)), reference)
    return f"the cell proves nothing: {vacuous}" if vacuous else None


def _save_last(run: AsyncRun, final: str) -> None:
    """Save at the end, which checks that the run can be continued. Raises: the save's errors."""
    save = run.save(STEPS)
    end_s = time.monotonic() + _SAVE_S
    while (phase := save.phase()) != final:
        if time.monotonic() > end_s:
            raise TimeoutError(f"the last save is still {phase} after {_SAVE_S:g} s")
        time.sleep(_NAP_S)
