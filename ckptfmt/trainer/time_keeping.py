"""Where the time of a launch goes, as process 0 measures it: the entry of the launch in the ledger of its run."""

from __future__ import annotations

import contextlib
import logging
import os
import statistics
import time
from pathlib import Path
from typing import Final

from ckptfmt.documents.ledger import LEDGER, LaunchTimes, LedgerEntry
from ckptfmt.errors import CkptError
from ckptfmt.store.protocol import Store
from ckptfmt.trainer.handle import SaveHandle
from ckptfmt.trainer.launching import Taken
from ckptfmt.trainer.step_meter import StepMeter

_LOG: Final = logging.getLogger("ckptfmt")
#: How many steps without a save there must be to tell how much longer those beside one take.
_STEPS_LEAST: Final = 3


class TimeKeeper:
    """Measures one launch. It writes its entry when the first step begins, and when the run is closed.

    In between, each save takes the entry of its moment along, and the saver writes it behind the commit.
    """

    def __init__(self) -> None:
        self._clock = time.monotonic
        now_s = self._clock()
        self._started_s = now_s - process_age_s()
        self._started_unix_s = time.time() - (now_s - self._started_s)
        self._store: Store | None = None
        self._taken: Taken | None = None
        self._waiting_s = self._restoring_s = 0.0
        self._begun_s: float | None = None
        self._closing_s: float | None = None
        self._first_step = 0
        self._steps = StepMeter()
        self._handles: list[SaveHandle] = []
        # The save whose steps are measured, and those that began since: all of them block these steps.
        self._beside: list[SaveHandle] = []
        self._save_count = self._commit_count = 0
        self._committing_s = self._blocked_s = self._extra_s = 0.0
        self._is_warned = False

    def note_launch(self, store: Store, taken: Taken) -> None:
        """Take note of the launch that was begun in the run at `store`."""
        self._store, self._taken, self._waiting_s = store, taken, taken.waited_s
        self._taken_s = self._clock()

    def note_restored(self) -> None:
        """Take note that the state is loaded."""
        if self._taken is not None:
            self._restoring_s = self._clock() - self._taken_s + self._taken.seconds - self._waiting_s

    def note_begun(self, step: int) -> None:
        """Take note that the first step begins, behind so many of the run, and write the entry."""
        self._begun_s, self._first_step = self._clock(), step
        self._write(self.entry(step))

    def note_steps(self, now_s: float, count: int) -> None:
        """Take note that so many steps are over."""
        _, over = self._steps.note_steps(now_s, count)
        if over is not None and len(self._steps.alone_s) >= _STEPS_LEAST:
            alone_s = statistics.fmean(self._steps.alone_s)
            blocked_s = sum(handle.blocked_s for handle in self._beside)
            self._extra_s += sum(over.steps_s) - len(over.steps_s) * alone_s - blocked_s
        if over is not None:
            self._beside.clear()

    def note_save(self, handle: SaveHandle) -> None:
        """Take note that a save has begun."""
        self._save_count += 1
        self._steps.note_save(handle)
        self._handles.append(handle)
        self._beside.append(handle)

    def note_closing(self) -> None:
        """Take note that no step follows: what the run waits for from now on are its saves."""
        self._closing_s = self._clock()

    def close(self, step: int) -> None:
        """Write the last entry."""
        if self._begun_s is not None:
            self._write(self.entry(step, has_ended=True))

    def entry(self, step: int, *, is_save: bool = False, has_ended: bool = False) -> LedgerEntry:
        """Return the entry as of now, after so many steps of the run.

        Args:
            is_save: whether a save begins now.
            has_ended: whether the launch ends now.
        """
        assert self._taken is not None  # noqa: S101 - nothing is saved before a launch is taken
        now_s = self._clock()
        if self._begun_s is None:  # a program that saves before its first step
            self._begun_s, self._first_step = now_s, step
        blocked_s = self._add_handles()
        if self._closing_s is not None:
            blocked_s += now_s - self._closing_s
        in_training_s = now_s - self._begun_s
        blocked_s = min(blocked_s, in_training_s)
        lost_s = min(max(0.0, self._extra_s), in_training_s - blocked_s)
        before_s = self._begun_s - self._started_s - self._waiting_s - self._restoring_s
        times = LaunchTimes(
            initialising=_ms(before_s),
            waiting=_ms(self._waiting_s),
            restoring=_ms(self._restoring_s),
            training=_ms(in_training_s - blocked_s - lost_s),
            blocked=_ms(blocked_s),
            lost=_ms(lost_s),
        )
        measured_unix_ms = _ms(self._started_unix_s + now_s - self._started_s)
        return LedgerEntry(
            run_id=self._taken.run.run_id,
            launch=self._taken.launch.launch,
            started_unix_ms=_ms(self._started_unix_s),
            measured_unix_ms=measured_unix_ms,
            ended_unix_ms=measured_unix_ms if has_ended else None,
            first_step=self._first_step,
            step=step,
            save_count=self._save_count + is_save,
            commit_count=self._commit_count,
            committing_ms=_ms(self._committing_s),
            times=times,
        )

    def _add_handles(self) -> float:
        """Add up the saves that are over; return how long all saves have blocked the training so far."""
        open_handles = []
        for handle in self._handles:
            if not handle.is_over:
                open_handles.append(handle)
                continue
            self._blocked_s += handle.blocked_s
            if "COMMITTED" in handle.times:
                self._commit_count += 1
                self._committing_s += handle.times["COMMITTED"]
        self._handles = open_handles
        return self._blocked_s + sum(handle.blocked_s for handle in open_handles)

    def _write(self, entry: LedgerEntry) -> None:
        assert self._store is not None  # noqa: S101 - see entry
        try:
            self._store.replace(entry.path, entry.dump())
            self._store.sync(LEDGER)
        except CkptError as error:  # it says where time went: no reason to stop a training
            if not self._is_warned:
                _LOG.warning("the ledger of the run can't be written: %s", error)
            self._is_warned = True


def process_age_s() -> float:
    """Return how long ago this process was started, in seconds; 0 where the system doesn't say it."""
    with contextlib.suppress(OSError, ValueError, IndexError, AttributeError):
        # Behind the name of the program, which may hold anything, field 22 is the start in ticks since the boot.
        ticks = int(Path("/proc/self/stat").read_text("utf-8", "replace").rpartition(")")[2].split()[19])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    return 0.0


def _ms(seconds: float) -> int:
    return max(0, round(seconds * 1000))
