"""`every="auto"`: what process 0 measures of the training, for the interval that `AutoInterval` decides."""

from __future__ import annotations

import itertools
import logging
import math
import statistics
from typing import Final

from ckptfmt.documents.manifest import parse_checkpoint_name
from ckptfmt.documents.run import Launch, RunRecord
from ckptfmt.errors import CkptError
from ckptfmt.goodput.auto_interval import DEVICE_MTBF_S, AutoInterval
from ckptfmt.run.lineage import read_launch
from ckptfmt.store.protocol import Store
from ckptfmt.trainer.handle import SaveHandle
from ckptfmt.trainer.step_meter import Beside, StepMeter

_LOG: Final = logging.getLogger("ckptfmt")
#: How many steps without a save there must be to tell how long a step takes.
_STEPS_LEAST: Final = 3
#: How many launches before this one are looked at.
_LAUNCHES: Final = 16
#: By which factor the interval changes before the log says so again.
_TOLD: Final = 1.25


class AutoEvery:
    """The interval of a run's saves, measured on the run itself.

    What a save loses is by how much the steps beside it take longer than other steps, but at least what it blocked.
    Failures are the launches before this one; each lasted for the steps that its successor went on from. A launch that
    was ended by hand counts as a failure, too.

    Args:
        mtbf_s: mean time between failures that is expected before there were any; None for one in 50,700 hours of each
            process.
        process_count: how many processes the job has.
    """

    def __init__(self, mtbf_s: float | None, process_count: int) -> None:
        self._auto = AutoInterval(mtbf_s=DEVICE_MTBF_S / process_count if mtbf_s is None else mtbf_s)
        self._launch_steps: list[int] = []
        self._steps = StepMeter()
        self._told_s = 0.0

    def note_launches(self, store: Store, run: RunRecord, launch: Launch) -> None:
        """Take note of the launches before this one, as far as their records can be read."""
        resumed: list[tuple[int, int]] = []  # the launch that each one went on from, and its step
        for number in range(max(1, launch.launch - _LAUNCHES), launch.launch + 1):
            try:
                found = launch if number == launch.launch else read_launch(store, number, run)
            except CkptError as error:
                _LOG.debug("every='auto' doesn't count launch %d: %s", number, error)
                continue
            source = found.resume_from and parse_checkpoint_name(found.resume_from.name)
            resumed.append((source[1], source[0]) if source else (0, 0))
        self._launch_steps = [max(0, after[1] - before[1]) for before, after in itertools.pairwise(resumed)]

    def note_steps(self, now_s: float, count: int) -> None:
        """Take note that so many steps are over."""
        seconds, over = self._steps.note_steps(now_s, count)
        self._auto.note_time(seconds)
        if over is not None and over.handle.state == "COMMITTED":
            self._note_committed(over)

    def note_save(self, handle: SaveHandle) -> None:
        """Take note that a save has begun; of those that begin while one is measured, nothing is measured."""
        self._auto.note_begun()
        self._steps.note_save(handle)

    def interval_s(self) -> float:
        """Return the seconds from one save to the next, and say in the log when they change."""
        interval_s, auto = self._auto.interval_s(), self._auto
        if auto.lost_s and not self._told_s / _TOLD <= interval_s <= self._told_s * _TOLD:
            self._told_s = interval_s
            _LOG.info(
                "every='auto': saves every %.3g s: a save costs %.3g s of training and is committed after %.3g s, and a"
                " failure is expected every %.3g h (%d seen)",
                interval_s,
                auto.lost_s,
                auto.commit_s,
                auto.mtbf_s / 3600,
                auto.failures,
            )
        return interval_s

    def _note_committed(self, over: Beside) -> None:
        alone_s = math.inf
        if len(self._steps.alone_s) >= _STEPS_LEAST:
            alone_s = statistics.median(self._steps.alone_s)
            self._count_launches(alone_s)
        lost_s = sum(over.steps_s) - len(over.steps_s) * alone_s
        self._auto.note_save(max(over.handle.blocked_s, lost_s), over.handle.times["COMMITTED"])

    def _count_launches(self, step_s: float) -> None:
        """Count the launches before this one, once it is known how long a step takes."""
        if not self._launch_steps:
            return
        uptime_s = self._auto.take_uptime()
        for steps in self._launch_steps:
            self._auto.note_time(steps * step_s)
            self._auto.note_failure()
        self._auto.note_time(uptime_s)
        self._launch_steps = []
