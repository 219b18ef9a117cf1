"""The automatic interval of saves, from the run's own measurements of saves and failures. Pure.

The decision follows `ckptfmt.loop.interval`, for the levels of the run: the levels for each
save, and home, which may get fewer. Restore times are ignored, since they don't change the best
interval.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from typing import Final

from ckptfmt.loop.interval import (
    LIMIT_S,
    MOST_EVERY,
    SHORTEST_S,
    Level,
    best_interval_s,
    lost_per_save_s,
    shortest_interval_s,
    young_interval_s,
)

#: Assumed mean time between failures of an accelerator, in seconds: 16,384 accelerators had 419
#: interruptions in 54 days.
#: Source: Grattafiori et al., The Llama 3 herd of models, 2024, section 3.3.4.
DEVICE_MTBF_S: Final = 16384 * 54 * 86400 / 419
#: Factor of a failure's weight after each later failure: about the last seven failures count.
_FORGET: Final = 0.85
#: Weight of the expected mean time between failures, as a number of failures.
_PRIOR: Final = 0.5
#: Number of saves in the medians.
_SAVES: Final = 9
#: The interval before the first measured save, in seconds; tripled after each unmeasured save.
_FIRST_S: Final = 60.0
#: Upper bound of intervals: an hour, or this many times a save's cost, whichever is longer.
_LONGEST_S: Final = 3600.0
_LONGEST_OF_LOST: Final = 200
#: Least cost of a save, in seconds: a smaller cost can't be measured.
_LEAST_LOST_S: Final = 1e-3
#: An interval stays until the estimate of the best interval has changed by this factor.
_KEPT: Final = 1.1


class LevelMeter:
    """The measurements of a level: the cost of saves, and the rate of failures that need the level.

    A save counts for its farthest level only.

    Args:
        every: n, if every n-th save reaches this level.
        mtbf_s: expected mean time between failures for which no nearer level is enough, in seconds.
            The expectation counts less with each failure.

    Attributes:
        failures: number of such failures since the begin.
    """

    def __init__(self, every: int, mtbf_s: float) -> None:
        self.every = every
        self.failures = 0
        self._weight = _PRIOR
        self._time_s = _PRIOR * mtbf_s
        self._since_s = 0.0
        self._lost_s: collections.deque[float] = collections.deque(maxlen=_SAVES)
        self._commit_s: collections.deque[float] = collections.deque(maxlen=_SAVES)

    @property
    def is_measured(self) -> bool:
        """Whether a save of this level, and no farther level, has been committed."""
        return bool(self._lost_s)

    @property
    def lost_s(self) -> float:
        """The training time lost to such a save, in seconds: the median of the last saves."""
        return max(_LEAST_LOST_S, _median(self._lost_s)) if self._lost_s else 0.0

    @property
    def commit_s(self) -> float:
        """The time from begin to commit of such a save, in seconds: the median of the last."""
        return _median(self._commit_s) if self._commit_s else 0.0

    @property
    def mtbf_s(self) -> float:
        """The mean time between failures in seconds, with more weight on later failures."""
        return min(max(SHORTEST_S, (self._time_s + self._since_s) / self._weight), LIMIT_S)

    def note_save(self, lost_s: float, commit_s: float) -> None:
        """Record a committed save of this level."""
        self._lost_s.append(lost_s)
        self._commit_s.append(commit_s)

    def note_time(self, seconds: float) -> None:
        """Record a time without a failure, in seconds."""
        self._since_s += seconds

    def note_failure(self) -> None:
        """Record a failure."""
        self.failures += 1
        self._time_s = _FORGET * self._time_s + self._since_s
        self._weight = _FORGET * self._weight + 1
        self._since_s = 0.0


class AutoInterval:
    """The interval of a run in progress; a `ckptfmt_tools.simulator.Pilot`.

    Args:
        mtbf_s: expected mean time between failures, in seconds, before the first failure. Failures
            are expected to need each level equally often.
        every: for each level, nearest first: n, if every n-th save reaches the level.

    Attributes:
        meters: the measurements of each level.
    """

    def __init__(self, *, mtbf_s: float, every: Sequence[int] = (1,)) -> None:
        self.meters = [
            LevelMeter(min(one, MOST_EVERY), min(mtbf_s * len(every), LIMIT_S)) for one in every
        ]
        self._unmeasured = 0
        #: The chosen interval, and the estimate at the time of the choice: Young's interval, or the
        #: shortest.
        self._chosen_s = self._about_s = 0.0

    @property
    def failures(self) -> int:
        """The number of failures since the begin."""
        return sum(meter.failures for meter in self.meters)

    def note_time(self, seconds: float) -> None:
        """Record the training time since the previous call, in seconds."""
        for meter in self.meters:
            meter.note_time(seconds)

    def note_failure(self, level: int = 0) -> None:
        """Record a failure, given the nearest level with a usable save."""
        self.meters[level].note_failure()

    def note_begun(self) -> None:
        """Record that a save has begun."""
        self._unmeasured += 1

    def note_save(self, lost_s: float, commit_s: float, level: int = 0) -> None:
        """Record a committed save.

        Args:
            lost_s: training time lost to the save, in seconds.
            commit_s: time from begin to commit, in seconds.
            level: number of the farthest level of the save.
        """
        self.meters[level].note_save(lost_s, commit_s)

    def levels(self) -> list[Level]:
        """Return the levels for the model; no levels before the first measured save.

        A level without a measured save gets the cost of the nearest farther level, otherwise of the
        last measured level.
        """
        measured = [meter for meter in self.meters if meter.is_measured]
        found: list[Level] = []
        lost_s = 0.0
        for number, meter in enumerate(self.meters if measured else ()):
            known = next((one for one in self.meters[number:] if one.is_measured), measured[-1])
            more_s = max(0.0, known.lost_s - lost_s)
            lost_s += more_s
            costs = {"lost_s": more_s, "commit_s": known.commit_s, "restore_s": 0.0}
            found.append(
                Level(name=f"level {number}", **costs, mtbf_s=meter.mtbf_s, every=meter.every)
            )
        return found

    def interval_s(self) -> float:
        """Return the time from one save to the next, in seconds."""
        levels = self.levels()
        if not levels:
            return _FIRST_S * 3.0 ** min(self._unmeasured, 2)
        shortest_s = shortest_interval_s(levels)
        about_s = max(young_interval_s(levels), shortest_s)
        is_near = self._about_s / _KEPT <= about_s <= self._about_s * _KEPT
        if not is_near or shortest_s > self._chosen_s:
            longest_s = max(_LONGEST_S, _LONGEST_OF_LOST * lost_per_save_s(levels), shortest_s)
            self._chosen_s = min(best_interval_s(levels), longest_s)
            self._about_s = about_s
        return self._chosen_s


def _median(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]
