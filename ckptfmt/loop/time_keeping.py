"""The times of a launch as measured by process 0, for the launch's entry in the run's ledger."""

from __future__ import annotations

import contextlib
import logging
import os
import statistics
import time
from pathlib import Path
from typing import Final

from ckptfmt.errors import CkptError
from ckptfmt.loop.launching import Taken
from ckptfmt.loop.step_meter import StepMeter
from ckptfmt.run.ledger import LEDGER, LaunchTimes, LedgerEntry
from ckptfmt.saving.handle import SaveHandle
from ckptfmt.store.protocol import Store

_LOG: Final = logging.getLogger("ckptfmt")
#: Fewest steps without a save from which the additional time during saves is known.
_STEPS_LEAST: Final = 3


class TimeKeeper:
    """The meter of a launch's times.

    The keeper writes the launch's entry when the first step begins and when the run is closed. In
    between, each save carries an entry, which the saver writes after the commit.

    Args:
        age_s: time since the launch has started, in seconds; None for the age of this process.
    """

    def __init__(self, age_s: float | None = None) -> None:
        self._clock = time.monotonic
        now_s = self._clock()
        self._started_s = now_s - (process_age_s() if age_s is None else age_s)
        self._started_unix_s = time.time() - (now_s - self._started_s)
        self._store: Store | None = None
        self._taken: Taken | None = None
        self._waiting_s = self._restoring_s = 0.0
        self._begun_s: float | None = None
        self._closing_s: float | None = None
        self._first_step = 0
        self._steps = StepMeter()
        self._handles: list[SaveHandle] = []
        #: Those of the handles that are snapshots in memory, and count as saves once written.
        self._snapshots: set[SaveHandle] = set()
        # The measured save and later saves: all of these block the measured steps.
        self._beside: list[SaveHandle] = []
        self._save_count = self._commit_count = 0
        self._committing_s = self._blocked_s = self._extra_s = 0.0
        self._is_warned = False

    def note_launch(self, store: Store, taken: Taken) -> None:
        """Record the begun launch of the run at `store`."""
        self._store = store
        self._taken = taken
        self._waiting_s = taken.waited_s
        self._taken_s = self._clock()

    def note_restored(self) -> None:
        """Record the end of the load."""
        if self._taken is not None:
            self._restoring_s = (
                self._clock() - self._taken_s + self._taken.seconds - self._waiting_s
            )

    def note_begun(self, step: int) -> None:
        """Record the start of the first step, after `step` steps, and write the entry."""
        self._begun_s = self._clock()
        self._first_step = step
        self._write(self.entry(step))

    def note_steps(self, now_s: float, count: int) -> None:
        """Record the end of `count` steps at the time `now_s`."""
        _, over = self._steps.note_steps(now_s, count)
        if over is not None and len(self._steps.alone_s) >= _STEPS_LEAST:
            alone_s = statistics.fmean(self._steps.alone_s)
            blocked_s = sum(handle.blocked_s for handle in self._beside)
            self._extra_s += sum(over.steps_s) - len(over.steps_s) * alone_s - blocked_s
        if over is not None:
            self._beside.clear()

    def note_save(self, handle: SaveHandle) -> None:
        """Record the start of a save."""
        self._save_count += 1
        self._steps.note_save(handle)
        self._handles.append(handle)
        self._beside.append(handle)

    def note_snapshot(self, handle: SaveHandle) -> None:
        """Record the start of a snapshot, which stays in memory."""
        self._handles.append(handle)
        self._snapshots.add(handle)

    def note_closing(self) -> None:
        """Record the end of the steps: from now on the run only waits for saves."""
        self._closing_s = self._clock()

    def close(self, step: int, store: Store | None = None) -> None:
        """Write the last entry.

        Args:
            store: the store at which the run goes on; None at the end. If the run goes on at
                another home, the entry stays as it is, since the former home may not answer.
        """
        if self._begun_s is not None and store in (None, self._store):
            self._write(self.entry(step, has_ended=True))

    def entry(self, step: int, *, is_save: bool = False, has_ended: bool = False) -> LedgerEntry:
        """Return the entry as of now, after `step` steps of the run.

        Args:
            is_save: whether a save begins now.
            has_ended: whether the launch ends now.
        """
        assert self._taken is not None  # noqa: S101
        now_s = self._clock()
        if self._begun_s is None:  # a program that saves before its first step
            self._begun_s = now_s
            self._first_step = step
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
        """Add the finished saves to the sums.

        Returns: the time for which all saves have blocked the training so far, in seconds.
        """
        open_handles = []
        for handle in self._handles:
            if not handle.is_over:
                open_handles.append(handle)
                continue
            self._blocked_s += handle.blocked_s
            is_committed = "COMMITTED" in handle.times
            if handle in self._snapshots:
                self._snapshots.discard(handle)
                self._save_count += is_committed
            if is_committed:
                self._commit_count += 1
                self._committing_s += handle.times["COMMITTED"]
        self._handles = open_handles
        return self._blocked_s + sum(handle.blocked_s for handle in open_handles)

    def _write(self, entry: LedgerEntry) -> None:
        assert self._store is not None  # noqa: S101
        try:
            self._store.replace(entry.path, entry.dump())
            self._store.sync(LEDGER)
        except CkptError as error:  # a missing ledger entry mustn't stop a training
            if not self._is_warned:
                _LOG.warning("the ledger of the run can't be written: %s", error)
            self._is_warned = True


def process_age_s() -> float:
    """Return the age of this process in seconds; 0 if the system doesn't tell the start time."""
    with contextlib.suppress(OSError, ValueError, IndexError, AttributeError):
        # Field 2 is the program's name, which may contain any characters. Counted from the end of
        # the name, field 22 is the start in ticks since the boot.
        ticks = int(
            Path("/proc/self/stat").read_text("utf-8", "replace").rpartition(")")[2].split()[19]
        )
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    return 0.0


def _ms(seconds: float) -> int:
    return max(0, round(seconds * 1000))
