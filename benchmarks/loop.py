"""Training steps with a save among them: wall time of both."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from benchmarks.peers import Pending
from benchmarks.state import Bench, StepTimes


class Contestant(Protocol):
    """A contestant that saves during the steps.

    Attributes:
        name: the name in the record.
        is_buffered: whether writes go through the page cache.
    """

    name: str
    is_buffered: bool

    def describe(self) -> dict[str, object]:
        """Return the settings."""
        ...

    def start(self, path: Path) -> Pending:
        """Start a save under a fresh name."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoopRun:
    """A loop of steps, with a save started before the first step, or without a save.

    Attributes:
        steps: the number of steps.
        wall_s: the total time, the call of the save included.
        call_s: the time of the save's call; 0 without a save.
        first: the first step, during which copies may go on.
        is_done: whether the save was durable after the last step.
        save_s: the time from the call to durability, to within a step; 0 without a save.
        told_blocked_s: the blocking time reported by the save; None without a report.
    """

    steps: int
    wall_s: float
    call_s: float
    first: StepTimes
    is_done: bool
    save_s: float
    told_blocked_s: float | None

    def describe(self) -> dict[str, object]:
        """Return the raw figures for a record.

        ``blocked_s`` is the training's idle time as seen from outside: in the call, and at the
        guard of the following update.
        """
        return {
            "wall_s": self.wall_s,
            "call_s": self.call_s,
            "guard_s": self.first.guard_s,
            "blocked_s": self.call_s + self.first.guard_s,
            "told_blocked_s": self.told_blocked_s,
            "first_update_s": self.first.update_s,
            "save_s": self.save_s,
            "is_done": self.is_done,
        }


def run_loop(bench: Bench, steps: int, contestant: Contestant | None) -> LoopRun:
    """Run a fixed number of steps, with a save if a contestant is given.

    The rest of a longer save is awaited outside of the timing; see `LoopRun.is_done`.
    """
    return _run(bench, contestant, is_over=lambda taken, _: taken >= steps)


def run_until_done(bench: Bench, contestant: Contestant) -> LoopRun:
    """Start a save, and run steps until the save is durable."""
    return _run(bench, contestant, is_over=lambda _, is_done: is_done)


def _run(
    bench: Bench, contestant: Contestant | None, *, is_over: Callable[[int, bool], bool]
) -> LoopRun:
    is_buffered = contestant is not None and contestant.is_buffered
    path = bench.place.fresh(contestant.name if contestant else "none")
    bench.place.settle(is_buffered=is_buffered)
    begin_s = time.perf_counter()
    pending = contestant.start(path) if contestant else None
    call_s = time.perf_counter() - begin_s
    first = bench.trainer.step()
    taken = 1
    save_s = 0.0
    while True:
        if pending and not save_s and pending.is_done():
            save_s = time.perf_counter() - begin_s
        if is_over(taken, save_s > 0):
            break
        bench.trainer.step()
        taken += 1
    wall_s = time.perf_counter() - begin_s
    is_done = pending is None or save_s > 0
    if pending:
        pending.wait()
        save_s = save_s or time.perf_counter() - begin_s
        bench.place.discard(pending.path, is_buffered=is_buffered)
    return LoopRun(
        steps=taken,
        wall_s=wall_s,
        call_s=call_s if pending else 0.0,
        first=first,
        is_done=is_done,
        save_s=save_s,
        told_blocked_s=pending.blocked_s() if pending else None,
    )
