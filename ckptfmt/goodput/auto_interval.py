"""Decide the interval of saves from what a run measures of itself: costs of saves, and failures. Pure.

The decision is that of `ckptfmt.goodput.interval` for one level. The time to restore isn't asked for: it doesn't change
the best interval.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable
from typing import Final

from ckptfmt.goodput.interval import SHORTEST_S, Level, best_interval_s

#: Mean time between failures of one accelerator where nothing is known, in seconds: 16,384 of them were interrupted 419
#: times in 54 days. Source: Grattafiori et al., The Llama 3 herd of models, 2024, section 3.3.4.
DEVICE_MTBF_S: Final = 16384 * 54 * 86400 / 419
#: By how much a failure counts less for each later one: the last seven decide.
_FORGET: Final = 0.85
#: For how many failures the expectation of the beginning counts.
_PRIOR: Final = 0.5
#: How many saves are remembered.
_SAVES: Final = 9
#: The interval before the first save is measured, in seconds; three times as long after each save that isn't.
_FIRST_S: Final = 60.0
#: No interval is longer than an hour, or than this many times what a save costs, if that is longer.
_LONGEST_S: Final = 3600.0
_LONGEST_OF_LOST: Final = 200
#: What a save costs at least, in seconds: less can't be measured.
_LEAST_LOST_S: Final = 1e-3
#: An interval is kept as long as the best one is within this factor of it.
_KEPT: Final = 1.1


class AutoInterval:
    """The interval of a run, while it goes; a `ckptfmt.goodput.simulator.Pilot`.

    Args:
        mtbf_s: mean time between failures that is expected before there were any, in seconds.

    Attributes:
        failures: how many failures there were, none of them forgotten.
    """

    def __init__(self, *, mtbf_s: float) -> None:
        self.failures = 0
        self._weight, self._time_s = _PRIOR, _PRIOR * mtbf_s
        self._uptime_s = 0.0
        self._lost_s: collections.deque[float] = collections.deque(maxlen=_SAVES)
        self._commit_s: collections.deque[float] = collections.deque(maxlen=_SAVES)
        self._unmeasured = 0
        #: The interval that was chosen, and about what it was at that time: Young's, or the time of a commit.
        self._chosen_s = self._about_s = 0.0

    @property
    def mtbf_s(self) -> float:
        """The mean time between failures as seen so far, later failures counting more."""
        return max(SHORTEST_S, (self._time_s + self._uptime_s) / self._weight)

    @property
    def lost_s(self) -> float:
        """What a save costs of training, in seconds: the median of the last ones."""
        return max(_LEAST_LOST_S, _median(self._lost_s)) if self._lost_s else 0.0

    @property
    def commit_s(self) -> float:
        """How long a save takes until it is committed, in seconds: the median of the last ones."""
        return _median(self._commit_s) if self._commit_s else 0.0

    def note_time(self, seconds: float) -> None:
        """Take note that the launch has trained for so long since it was last told."""
        self._uptime_s += seconds

    def take_uptime(self) -> float:
        """Return how long the launch has trained, and forget it: failures before it are told next."""
        uptime_s, self._uptime_s = self._uptime_s, 0.0
        return uptime_s

    def note_failure(self) -> None:
        """Take note that the launch has failed."""
        self.failures += 1
        self._time_s = _FORGET * self._time_s + self._uptime_s
        self._weight = _FORGET * self._weight + 1
        self._uptime_s = 0.0

    def note_begun(self) -> None:
        """Take note that a save has begun."""
        self._unmeasured += 1

    def note_save(self, lost_s: float, commit_s: float) -> None:
        """Take note of a committed save: the training seconds that it cost, and how long it took."""
        self._lost_s.append(lost_s)
        self._commit_s.append(commit_s)

    def interval_s(self) -> float:
        """Return the seconds from one save to the next."""
        if not self._lost_s:
            return _FIRST_S * 3.0 ** min(self._unmeasured, 2)
        lost_s, commit_s, mtbf_s = self.lost_s, self.commit_s, self.mtbf_s
        about_s = max(math.sqrt(2 * lost_s * mtbf_s), commit_s)
        is_near = self._about_s / _KEPT <= about_s <= self._about_s * _KEPT
        if not is_near or commit_s > self._chosen_s:
            level = Level(name="home", lost_s=lost_s, commit_s=commit_s, restore_s=0, mtbf_s=mtbf_s)
            longest_s = max(_LONGEST_S, _LONGEST_OF_LOST * lost_s, commit_s)
            self._chosen_s, self._about_s = min(best_interval_s([level]), longest_s), about_s
        return self._chosen_s


def _median(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]
