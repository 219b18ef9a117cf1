"""Kills of a saving process at many moments, and loads of the remains.

The moments are spread over the duration of a save, and over the file-system events: Python's audit
events report each file opened, renamed or linked in the directory. The page cache outlives a killed
process, so this is no test of durability.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from ckptfmt_conformance.judge import Status
from ckptfmt_conformance.neutral.asking import one_line, try_load
from ckptfmt_conformance.neutral.case import Bench, NeutralCase, Verdict
from ckptfmt_conformance.neutral.children import Child, call
from ckptfmt_conformance.neutral.peer import AsyncPeer, Peer, Unsupported
from ckptfmt_conformance.neutral.states import Expected, mixed_state

__all__ = ["CASES"]

_EVENTS: Final = frozenset({"open", "os.mkdir", "os.rename", "os.link", "os.remove", "os.truncate"})
_TIMEOUT_S: Final = 60.0


@dataclasses.dataclass(slots=True)
class _Victim:
    """A process with a single save, killed during the save unless spared.

    Attributes:
        step: the step of the save, which determines the state.
        done: whether the process reported the end of the save.
        moment: the moment of the kill, in words.
    """

    step: int
    moment: str
    done: bool = False
    problem: str = ""


class _Run:
    """A directory with a series of checkpoints, each saved by a new process."""

    def __init__(self, peer: Peer, bench: Bench) -> None:
        self.victims: list[_Victim] = []
        self._peer = peer
        self._bench = bench
        self._keeps = peer.describe().keeps

    def path(self, step: int) -> Path:
        """Return the path of a step's checkpoint."""
        return self._bench.scratch / f"step-{step:04d}"

    def state(self, step: int) -> Mapping[str, object]:
        """Return the state of a step."""
        return mixed_state(self._bench.effort.killed_nbytes, step)

    def save(
        self,
        moment: str,
        *,
        after_s: float | None = None,
        at_event: int | None = None,
        in_background: bool = False,
    ) -> list[str]:
        """Save one more step in a new process, and return the lines sent by the process.

        Args:
            moment: the moment of the kill, in words.
            after_s: the time from the begin to the kill, in seconds; None for no such kill.
            at_event: the number of the file-system event at which the process kills itself; None
                for no such kill.
            in_background: whether the process saves asynchronously, and dies after the call.
        """
        step = len(self.victims) + 1
        self._bench.note(f"saving step {step}, killed {moment}")
        child = Child(
            lambda tell: self._be_killed(step, tell, at_event, in_background=in_background)
        )
        if child.wait_for("asked", _TIMEOUT_S) and after_s is not None:
            if in_background:
                child.wait_for("returned", _TIMEOUT_S)
            time.sleep(after_s)
            child.kill()
        code = child.end(_TIMEOUT_S)
        lines = child.lines()
        problems = [line.removeprefix("failed ") for line in lines if line.startswith("failed ")]
        problem = (
            problems[0]
            if problems
            else ""
            if code in {0, -signal.SIGKILL}
            else f"it ended with status {code}"
        )
        self.victims.append(_Victim(step, moment, "done" in lines, problem))
        return lines

    def _be_killed(
        self, step: int, tell: Callable[[str], None], at_event: int | None, *, in_background: bool
    ) -> None:
        state = self.state(step)
        events = _watch(str(self._bench.scratch), at_event)
        begin_s = time.monotonic()
        tell("asked")
        try:
            if in_background and isinstance(self._peer, AsyncPeer):
                pending = self._peer.save_async(self.path(step), state, step)
                tell("returned")
                pending.wait()
            else:
                self._peer.save(self.path(step), state, step)
        except Unsupported as error:
            tell(f"unsupported {error}")
        # Any exception is reported to the judging process.
        except BaseException as error:  # noqa: BLE001
            tell(f"failed {one_line(error)}")
        else:
            tell("done")
        tell(f"took {time.monotonic() - begin_s} {events[0]}")

    def outcomes(self) -> list[list[str]]:
        """Load every step, and return kind and text of each outcome. Call in a new process."""
        ended = []
        for victim in self.victims:
            state = self.state(victim.step)
            self._bench.note(f"loading step {victim.step}, killed {victim.moment}")
            expected = Expected.of(state, victim.step if "step" in self._keeps else None)
            outcome = try_load(self._peer, self.path(victim.step), state, expected)
            ended.append([outcome.kind, outcome.said])
        return ended


def _watch(root: str, at_event: int | None) -> list[int]:
    """Count file events below a directory, for the life of this process.

    Kill the process at `at_event`.
    """
    events = [0]

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event in _EVENTS and any(
            isinstance(arg, str | bytes) and os.fsdecode(arg).startswith(root) for arg in args
        ):
            events[0] += 1
            if events[0] == at_event:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    return events


def _killed(peer: Peer, bench: Bench) -> Verdict:
    run = _Run(peer, bench)
    for _ in range(2):  # the first save includes one-time costs
        lines = run.save("never")
        if not run.victims[-1].done:
            said = next((line for line in lines if line.startswith("unsupported ")), "")
            status = Status.UNSUPPORTED if said else Status.FAIL
            return Verdict(status, said.removeprefix("unsupported ") or run.victims[-1].problem)
    took_s, event_count = (float(word) for word in lines[-1].split()[1:])
    kills = bench.effort.kills
    for number in range(kills):
        run.save(
            f"after {(number + 0.5) / kills:.0%} of a save", after_s=took_s * (number + 0.5) / kills
        )
    events = sorted(
        {1 + round(number * (event_count - 1) / max(1, kills - 1)) for number in range(kills)}
    )
    for event in events if event_count else []:
        run.save(f"at what it does {event}. of {event_count:.0f}", at_event=event)
    if isinstance(peer, AsyncPeer):
        for part in (0.0, 0.5):
            run.save(
                f"{part:.0%} of a save after an async one returned",
                after_s=took_s * part,
                in_background=True,
            )
    run.save("never")
    return _judge(run)


def _judge(run: _Run) -> Verdict:
    answer = call(run.outcomes, timeout_s=_TIMEOUT_S)
    if answer.problem:
        return Verdict(Status.FAIL, f"loading what was left: {answer.problem}")
    found = []
    cut_short = 0
    whole = 0
    for victim, (kind, said) in zip(run.victims, answer.value, strict=True):
        if victim.problem:
            found.append(f"step {victim.step}, killed {victim.moment}: {victim.problem}")
        if kind == "other":
            found.append(
                f"killed {victim.moment}: what was left was taken for a checkpoint: {said}"
            )
        elif victim.done and kind == "raised":
            found.append(f"a save that had returned is lost (killed {victim.moment}): {said}")
        cut_short += not victim.done
        whole += not victim.done and kind == "same"
    kills = sum(victim.moment != "never" for victim in run.victims)
    seen = (
        f"{kills} processes killed, {cut_short} of them in mid-save: {whole} checkpoints whole"
        " all the same"
    )
    if found:
        return Verdict(Status.FAIL, f"{seen}; {len(found)} wrong, first: {found[0]}")
    if not cut_short:
        return Verdict(Status.ERROR, f"{seen}: nothing was shown")
    return Verdict(
        Status.PASS,
        f"{seen}, {cut_short - whole} refused; {kills - cut_short + 3} returned saves all there",
    )


CASES = (
    NeutralCase(
        id="crash/killed-in-save",
        asked=(
            "Kill processes by SIGKILL at many moments of their saves, beside complete"
            " checkpoints; load them all."
        ),
        passes=(
            "A returned save loads with the saved bytes; a cut save is refused, or loads with"
            " the saved bytes."
        ),
        fails="A complete checkpoint is lost, or a cut save loads with other bytes.",
        unsupported="The library's documentation calls a killed save unsafe.",
        judge=_killed,
    ),
)
