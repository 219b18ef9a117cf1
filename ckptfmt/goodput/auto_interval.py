"""Decide the interval of saves from what a run measures of itself: costs of saves, and failures. Pure.

The decision is that of `ckptfmt.goodput.interval` for the levels of the run: those of which each save goes to, and
home where that gets fewer. The time to restore isn't asked for: it doesn't change the best interval.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from typing import Final

from ckptfmt.goodput.interval import (
    LIMIT_S,
    MOST_EVERY,
    SHORTEST_S,
    Level,
    best_interval_s,
    lost_per_save_s,
    shortest_interval_s,
    young_interval_s,
)

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


class LevelMeter:
    """One level, as far as it is known: the cost of saves that go there and no farther, and how often it has to help.

    Args:
        every: of so many saves one goes there.
        mtbf_s: mean time between failures which nothing nearer survives, as long as there were none, in seconds.

    Attributes:
        failures: how many of these there were, none of them forgotten.
    """

    def __init__(self, every: int, mtbf_s: float) -> None:
        self.every, self.failures = every, 0
        self._weight, self._time_s = _PRIOR, _PRIOR * mtbf_s
        self._since_s = 0.0
        self._lost_s: collections.deque[float] = collections.deque(maxlen=_SAVES)
        self._commit_s: collections.deque[float] = collections.deque(maxlen=_SAVES)

    @property
    def is_measured(self) -> bool:
        """Whether a save was committed that went to this level and no farther."""
        return bool(self._lost_s)

    @property
    def lost_s(self) -> float:
        """Seconds of training that such a save costs: the median of the last ones."""
        return max(_LEAST_LOST_S, _median(self._lost_s)) if self._lost_s else 0.0

    @property
    def commit_s(self) -> float:
        """How long such a save takes until it is committed, in seconds: the median of the last ones."""
        return _median(self._commit_s) if self._commit_s else 0.0

    @property
    def mtbf_s(self) -> float:
        """The mean time between failures as seen so far, later failures counting more."""
        return min(max(SHORTEST_S, (self._time_s + self._since_s) / self._weight), LIMIT_S)

    def note_save(self, lost_s: float, commit_s: float) -> None:
        """Take note of a committed save that went to this level and no farther."""
        self._lost_s.append(lost_s)
        self._commit_s.append(commit_s)

    def note_time(self, seconds: float) -> None:
        """Take note that there was no failure for so long."""
        self._since_s += seconds

    def note_failure(self) -> None:
        """Take note of a failure."""
        self.failures += 1
        self._time_s = _FORGET * self._time_s + self._since_s
        self._weight = _FORGET * self._weight + 1
        self._since_s = 0.0


class AutoInterval:
    """The interval of a run, while it goes; a `ckptfmt.goodput.simulator.Pilot`.

    Args:
        mtbf_s: mean time between failures that is expected before there were any, in seconds. Each level is expected
            to have to help as often as any other.
        every: for each level, nearest first, of how many saves one goes there.

    Attributes:
        meters: what is known of each level.
    """

    def __init__(self, *, mtbf_s: float, every: Sequence[int] = (1,)) -> None:
        self.meters = [LevelMeter(min(one, MOST_EVERY), min(mtbf_s * len(every), LIMIT_S)) for one in every]
        self._unmeasured = 0
        #: The interval that was chosen, and about what it was at that time: Young's, or the shortest one.
        self._chosen_s = self._about_s = 0.0

    @property
    def failures(self) -> int:
        """How many failures there were, none of them forgotten."""
        return sum(meter.failures for meter in self.meters)

    def note_time(self, seconds: float) -> None:
        """Take note that the launch has trained for so long since it was last told."""
        for meter in self.meters:
            meter.note_time(seconds)

    def note_failure(self, level: int = 0) -> None:
        """Take note that the launch has failed, and that nothing nearer than a level helped."""
        self.meters[level].note_failure()

    def note_begun(self) -> None:
        """Take note that a save has begun."""
        self._unmeasured += 1

    def note_save(self, lost_s: float, commit_s: float, level: int = 0) -> None:
        """Take note of a committed save.

        Args:
            lost_s: seconds of training that it cost.
            commit_s: seconds until it was committed there.
            level: the farthest one that it went to.
        """
        self.meters[level].note_save(lost_s, commit_s)

    def levels(self) -> list[Level]:
        """Return the levels as the model takes them; none before a save is measured.

        A level of which no save is measured costs what the nearest farther one does, else what the one before does.
        """
        measured = [meter for meter in self.meters if meter.is_measured]
        found: list[Level] = []
        lost_s = 0.0
        for number, meter in enumerate(self.meters if measured else ()):
            known = next((one for one in self.meters[number:] if one.is_measured), measured[-1])
            more_s = max(0.0, known.lost_s - lost_s)
            lost_s += more_s
            costs = {"lost_s": more_s, "commit_s": known.commit_s, "restore_s": 0.0}
            found.append(Level(name=f"level {number}", **costs, mtbf_s=meter.mtbf_s, every=meter.every))
        return found

    def interval_s(self) -> float:
        """Return the seconds from one save to the next."""
        levels = self.levels()
        if not levels:
            return _FIRST_S * 3.0 ** min(self._unmeasured, 2)
        shortest_s = shortest_interval_s(levels)
        about_s = max(young_interval_s(levels), shortest_s)
        is_near = self._about_s / _KEPT <= about_s <= self._about_s * _KEPT
        if not is_near or shortest_s > self._chosen_s:
            longest_s = max(_LONGEST_S, _LONGEST_OF_LOST * lost_per_save_s(levels), shortest_s)
            self._chosen_s, self._about_s = min(best_interval_s(levels), longest_s), about_s
        return self._chosen_s


def _median(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]
