"""The measurements of process 0 for `every="auto"`; `AutoInterval` chooses the interval."""

from __future__ import annotations

import itertools
import logging
import math
import statistics
from collections.abc import Iterator
from typing import Final

from ckptfmt.documents.durability import HOME
from ckptfmt.documents.manifest import parse_checkpoint_name
from ckptfmt.documents.run import Launch, RunRecord
from ckptfmt.errors import CkptError
from ckptfmt.loop.auto_interval import DEVICE_MTBF_S, AutoInterval
from ckptfmt.loop.step_meter import Beside, StepMeter
from ckptfmt.run.lineage import read_launch
from ckptfmt.saving.handle import SaveHandle
from ckptfmt.store.protocol import Store

_LOG: Final = logging.getLogger("ckptfmt")
#: Fewest steps without a save from which the duration of a step is known.
_STEPS_LEAST: Final = 3
#: Number of earlier launches to examine.
_LAUNCHES: Final = 16
#: Factor by which the interval must change before a new line in the log.
_TOLD: Final = 1.25


class AutoEvery:
    """The interval of a run's saves, from measurements of the run itself.

    The cost of a save is the additional time of the steps during the save, compared with other
    steps, and at least the time for which the save blocked. If other saves to caches began during a
    save to home, their median cost is subtracted.

    Each earlier launch counts as a failure after the steps from which its successor resumed, also
    if a user ended the launch. If only some saves go home, there are two levels: the caches and
    home. The record of the next launch shows whether the caches survived a failure: after a loss of
    the caches a checkpoint was passed over.

    Args:
        mtbf_s: expected mean time between failures before the first failure, in seconds; None for
            one failure in 50,700 hours of each process.
        process_count: number of processes of the job.
        upload_every: number of saves of which one goes home.
    """

    def __init__(self, mtbf_s: float | None, process_count: int, upload_every: int = 1) -> None:
        expected_s = DEVICE_MTBF_S / process_count if mtbf_s is None else mtbf_s
        self._auto = AutoInterval(
            mtbf_s=expected_s, every=(1, upload_every) if upload_every > 1 else (1,)
        )
        self._home = len(self._auto.meters) - 1
        #: For each earlier launch the steps, and the level of the successor's source. Empty once
        #: the launches are counted. Until then `_early_s` has this launch's training time.
        self._launches: list[tuple[int, int]] = []
        self._early_s = 0.0
        self._steps = StepMeter()
        self._told_s = 0.0
        self._told_count = 0

    def note_launches(self, store: Store, run: RunRecord, launch: Launch) -> None:
        """Record the launches before this launch whose records can be read."""
        resumed: list[tuple[int, int, int]] = []  # source launch, source step, and level
        for number in range(max(1, launch.launch - _LAUNCHES), launch.launch + 1):
            try:
                found = launch if number == launch.launch else read_launch(store, number, run)
            except CkptError as error:
                _LOG.debug("every='auto' doesn't count launch %d: %s", number, error)
                continue
            source = found.resume_from and parse_checkpoint_name(found.resume_from.name)
            level = self._home if found.chosen_by == "fallback" else 0
            resumed.append((source[1], source[0], level) if source else (0, 0, level))
        self._launches = [
            (max(0, after[1] - before[1]), after[2])
            for before, after in itertools.pairwise(resumed)
        ]

    def note_steps(self, now_s: float, count: int) -> None:
        """Record the end of `count` steps at the time `now_s`."""
        seconds, over = self._steps.note_steps(now_s, count)
        if self._launches:
            self._early_s += seconds
        else:
            self._auto.note_time(seconds)
        if over is not None and over.handle.state == "COMMITTED":
            self._note_committed(over)

    def note_save(self, handle: SaveHandle) -> None:
        """Record the start of a save. A single save is measured at a time."""
        self._auto.note_begun()
        self._steps.note_save(handle)

    def interval_s(self) -> float:
        """Return the interval of saves in seconds, and log a change of the interval."""
        interval_s = self._auto.interval_s()
        count = sum(meter.is_measured for meter in self._auto.meters)
        is_told = self._told_s / _TOLD <= interval_s <= self._told_s * _TOLD
        if count > self._told_count or (count and not is_told):
            self._told_s = interval_s
            self._told_count = count
            _LOG.info(
                "every='auto': saves every %.3g s: %s", interval_s, "; ".join(self._reasons())
            )
        return interval_s

    def _reasons(self) -> Iterator[str]:
        places = (
            [("", "")]
            if not self._home
            else [(" to caches", " that leaves them"), (" home", " that takes caches")]
        )
        for meter, (to, of) in zip(self._auto.meters, places, strict=True):
            if meter.is_measured:
                yield (
                    f"a save{to} costs {meter.lost_s:.3g} s of training and is committed after"
                    f" {meter.commit_s:.3g} s"
                )
            yield (
                f"a failure{of} is expected every {meter.mtbf_s / 3600:.3g} h ({meter.failures}"
                " seen)"
            )

    def _note_committed(self, over: Beside) -> None:
        alone_s = math.inf
        if len(self._steps.alone_s) >= _STEPS_LEAST:
            alone_s = statistics.median(self._steps.alone_s)
            self._count_launches(alone_s)
        lost_s = sum(over.steps_s) - len(over.steps_s) * alone_s
        if self._home:  # the cost of other saves during the upload
            lost_s -= sum(
                max(other.blocked_s, self._auto.meters[0].lost_s) for other in over.others
            )
        report = over.handle.report
        level = self._home if report is None or report.durability == HOME else 0
        self._auto.note_save(
            max(over.handle.blocked_s, lost_s), over.handle.times["COMMITTED"], level
        )

    def _count_launches(self, step_s: float) -> None:
        """Count the launches before this launch, once the duration of a step is known."""
        for steps, level in self._launches:
            self._auto.note_time(steps * step_s)
            self._auto.note_failure(level)
        self._auto.note_time(self._early_s)
        self._launches = []
        self._early_s = 0.0
