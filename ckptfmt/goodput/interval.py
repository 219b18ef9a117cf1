"""The expected waste of a run by the interval of its saves, and the best interval. Pure.

The model. A save costs `Level.lost_s` of training. It is committed `Level.commit_s` after it began, beside the
training, so that a failure throws the run back to the last *committed* save. After a failure the training goes on
`Level.restore_s` later. Failures come at random, at a constant rate.

With one level, the interval P from save to save, training w = P - lost in it, and the rate r = 1 / MTBF, saves are
committed at kP + commit - lost after the training began. The expected number of them before a failure is
exp(-r (P + commit - lost)) / (1 - exp(-r P)), the training gets so far with probability exp(-r restore), and each save
is worth w of training. So goodput = r w exp(-r (restore + P + commit - lost)) / (1 - exp(-r P)). This is exact, as
restores may fail, too. With commit = lost, a synchronous save, it is Daly's formula. Neither commit nor restore moves
its maximum; the first terms of its series give Young's interval, sqrt(2 lost MTBF).

With several levels, each failure is of the class of the nearest level that survives it. Goodput is the product of one
such factor for each class. That is exact to the first order in the rates; `ckptfmt.goodput.simulator` shows the rest.

Source: J. W. Young, A first order approximation to the optimum checkpoint interval, CACM 17 (9), 1974. J. T. Daly, A
higher order estimate of the optimum checkpoint interval for restart dumps, FGCS 22 (3), 2006.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Final

from ckptfmt.errors import Code, err

#: No time is longer, in seconds: 300,000 years.
LIMIT_S: Final = 1e13
_LEVELS: Final = 8
#: Of so many saves at most one goes to a level.
MOST_EVERY: Final = 1_000_000
#: How often `choose_every` has a level saved to that no failure needs, in seconds.
_UNNEEDED_S: Final = 3600.0
#: No interval is shorter, in seconds.
SHORTEST_S: Final = 1e-3
#: Steps of a search that narrows its range by 0.618 each: from 1e13 to 1e-9 of itself.
_STEPS: Final = 120


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """A place that saves go to, nearest first: a cache of the node, peers, home.

    Attributes:
        name: what it is called.
        lost_s: seconds of training that a save to it costs, beyond what the same save to nearer levels costs.
        commit_s: seconds from the begin of a save until this level has all of it.
        restore_s: seconds from a failure until training goes on from here: noticing, restarting, loading.
        mtbf_s: mean time between failures for which this is the nearest level that survives; infinite for none.
        every: of so many saves one goes here, the first of a launch among them.

    Raises: StateError(ARGUMENT).
    """

    name: str
    lost_s: float
    commit_s: float
    restore_s: float
    mtbf_s: float = math.inf
    every: int = 1

    def __post_init__(self) -> None:
        for what in ("lost_s", "commit_s", "restore_s"):
            if not 0 <= getattr(self, what) <= LIMIT_S:
                detail = f"{what} of {self.name} is {getattr(self, what)!r}, and no time from 0 to {LIMIT_S:g} s"
                raise err(Code.ARGUMENT, detail, where=what, remedy="Give seconds that were measured, or an estimate.")
        if not (SHORTEST_S <= self.mtbf_s <= LIMIT_S or self.mtbf_s == math.inf):
            detail = f"mtbf_s of {self.name} is {self.mtbf_s!r}, and no time from {SHORTEST_S:g} to {LIMIT_S:g} s"
            raise err(Code.ARGUMENT, detail, where="mtbf_s", remedy="Give the mean time between failures, or infinity.")
        if not 1 <= self.every <= MOST_EVERY:
            detail = f"of {self.every} saves one goes to {self.name}; this must be from 1 to {MOST_EVERY:,}"
            raise err(Code.ARGUMENT, detail, where="every")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Waste:
    """Where the time of a run goes, each as a share of it.

    Attributes:
        saving: training seconds lost to saves, of training that was kept.
        redone: training that a failure threw away, with its saves.
        restoring: from failures until training went on.
    """

    saving: float
    redone: float
    restoring: float

    @property
    def total(self) -> float:
        """The share of the time that isn't training that counts."""
        return self.saving + self.redone + self.restoring

    @property
    def of_saves(self) -> float:
        """The share that the choice of the interval decides: all but restoring."""
        return self.saving + self.redone


def check_levels(levels: Sequence[Level]) -> None:
    """Refuse levels that no run can have. Raises: StateError(ARGUMENT)."""
    if not 1 <= len(levels) <= _LEVELS:
        raise err(Code.ARGUMENT, f"there are {len(levels)} levels, and not 1 to {_LEVELS}", where="levels")
    if levels[0].every != 1:
        raise err(Code.ARGUMENT, f"{levels[0].name} is the nearest level: every save goes there", where="every")
    if all(level.mtbf_s == math.inf for level in levels):
        detail = "there are no failures, so that any save is waste"
        raise err(Code.ARGUMENT, detail, where="mtbf_s", remedy="Give at least one finite mean time between failures.")


def lost_per_save_s(levels: Iterable[Level]) -> float:
    """Return the seconds of training that a save costs on average."""
    return sum(level.lost_s / level.every for level in levels)


def shortest_interval_s(levels: Sequence[Level]) -> float:
    """Return the shortest interval at which saves don't wait for each other, at any level."""
    commits = (level.commit_s / level.every for level in levels)
    return max(SHORTEST_S, lost_per_save_s(levels) * (1 + 1e-6), *commits)


def check_interval(interval_s: float, levels: Sequence[Level]) -> None:
    """Refuse an interval at which saves wait for each other. Raises: StateError(ARGUMENT)."""
    shortest_s = shortest_interval_s(levels)
    if not shortest_s * (1 - 1e-9) <= interval_s <= LIMIT_S:
        raise err(
            Code.ARGUMENT,
            f"an interval of {interval_s:g} s isn't between {shortest_s:g} s, within which saves would wait for each"
            f" other, and {LIMIT_S:g} s",
            where="interval",
            remedy="Give a longer interval; or let fewer saves go to the level whose commit takes longest.",
        )


def expected_waste(interval_s: float, levels: Sequence[Level]) -> Waste:
    """Return the expected waste of a long run. The module says which model this is.

    Args:
        interval_s: from the begin of a save to that of the next one, in seconds.
        levels: where saves go, nearest first.

    Raises: StateError(ARGUMENT).

    >>> home = Level(name="home", lost_s=30, commit_s=30, restore_s=600, mtbf_s=3 * 3600)
    >>> round(expected_waste(805, [home]).of_saves, 4)  # synchronous saves of 30 s, a failure in three hours
    0.0688
    """
    check_levels(levels)
    check_interval(interval_s, levels)
    kept, restored, lost_s = 1.0, 1.0, 0.0
    for level in levels:
        lost_s += level.lost_s
        if level.mtbf_s == math.inf:
            continue
        period = interval_s * level.every / level.mtbf_s
        delay = max(0.0, level.commit_s - lost_s) / level.mtbf_s
        kept *= period * math.exp(-period - delay) / -math.expm1(-period)
        restored *= math.exp(-level.restore_s / level.mtbf_s)
    saving = lost_per_save_s(levels) / interval_s
    return Waste(saving=restored * kept * saving, redone=restored * (1 - kept), restoring=1 - restored)


def young_interval_s(levels: Sequence[Level]) -> float:
    """Return Young's interval, for several levels: the first-order optimum, without regard to the shortest interval.

    >>> young_interval_s([Level(name="home", lost_s=0.5, commit_s=20, restore_s=120, mtbf_s=3600)])
    60.0
    """
    check_levels(levels)
    return math.sqrt(2 * lost_per_save_s(levels) / sum(level.every / level.mtbf_s for level in levels))


def best_interval_s(levels: Sequence[Level], *, shortest_s: float = 0.0) -> float:
    """Return the interval of the least expected waste.

    The logarithm of goodput is a sum of concave functions of the interval, so that a golden-section search finds its
    maximum.

    Args:
        levels: where saves go, nearest first.
        shortest_s: none shorter than this is taken; nor one at which saves wait for each other.
    """
    check_levels(levels)
    low_s = max(shortest_s, shortest_interval_s(levels))
    longest_s = max(level.mtbf_s for level in levels if level.mtbf_s != math.inf)
    # No optimum is longer than the mean time between the rarest failures and what a save costs.
    low, high = math.log(low_s), math.log(min(LIMIT_S, low_s + longest_s + lost_per_save_s(levels)))
    ratio = (math.sqrt(5) - 1) / 2
    for _ in range(_STEPS):
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        if _log_goodput(math.exp(left), levels) >= _log_goodput(math.exp(right), levels):
            high = right
        else:
            low = left
    return max(low_s, math.exp(low), key=lambda interval_s: _log_goodput(interval_s, levels))


def _log_goodput(interval_s: float, levels: Sequence[Level]) -> float:
    """Return the logarithm of goodput, up to what doesn't depend on the interval; it doesn't underflow."""
    told = math.log1p(-min(1 - 1e-12, lost_per_save_s(levels) / interval_s))
    for level in levels:
        period = interval_s * level.every / level.mtbf_s
        told += math.log(period / -math.expm1(-period)) - period if period > 0 else 0.0
    return told


def choose_every(levels: Sequence[Level]) -> list[Level]:
    """Return the levels with the best `Level.every`: how many saves go to the farther ones.

    From several intervals on, the interval and the multiples of it at which farther levels get a save are improved in
    turn; the best end counts.
    """
    once = [dataclasses.replace(level, every=1) for level in levels]
    lost_s = lost_per_save_s(once)
    alone = [[dataclasses.replace(level, lost_s=lost_s)] for level in once if level.mtbf_s != math.inf]
    begins = [best_interval_s(once), shortest_interval_s(once[:1]), *map(best_interval_s, alone)]
    ends = [once, *(_improve_every(once, interval_s) for interval_s in begins)]
    return min(ends, key=lambda end: expected_waste(best_interval_s(end), end).total)


def _improve_every(once: list[Level], interval_s: float) -> list[Level]:
    chosen: list[Level] = []
    for _ in range(20):
        before, chosen = chosen, [once[0], *(_with_every(level, interval_s) for level in once[1:])]
        if chosen == before:
            break
        interval_s = best_interval_s(chosen)
    return chosen


def _with_every(level: Level, interval_s: float) -> Level:
    once = dataclasses.replace(level, every=1)
    fewest = math.ceil(level.commit_s / interval_s - 1e-9)
    alone_s = best_interval_s([once]) if level.lost_s and level.mtbf_s != math.inf else level.commit_s
    if level.mtbf_s == math.inf:
        alone_s = max(_UNNEEDED_S, level.commit_s)
    return dataclasses.replace(once, every=max(1, min(MOST_EVERY, max(fewest, round(alone_s / interval_s)))))
