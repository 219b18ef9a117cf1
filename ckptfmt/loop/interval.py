"""The expected waste of a run as a function of the interval of saves, and the best interval. Pure.

The model. A save costs `Level.lost_s` of training. The save is committed `Level.commit_s` after its
begin, while the training goes on, so that a failure throws the run back to the last *committed*
save. Training resumes `Level.restore_s` after a failure. Failures are random, at a constant rate.

With one level, let P be the interval from save to save, w = P - lost the training in an interval,
and r = 1 / MTBF the rate. Saves are committed at kP + commit - lost after the training began. The
expected number of commits before a failure is exp(-r (P + commit - lost)) / (1 - exp(-r P)). The
restore succeeds with probability exp(-r restore), and each save is worth w of training. So
goodput = r w exp(-r (restore + P + commit - lost)) / (1 - exp(-r P)). The formula is exact,
including failures during restores. With commit = lost, a synchronous save, the formula is Daly's.
Neither commit nor restore moves the maximum. The first terms of the series give Young's interval,
sqrt(2 lost MTBF).

With several levels, the class of a failure is the nearest level that survives it. Goodput is the
product of one such factor for each class. The product is exact to the first order in the rates;
`ckptfmt_tools.simulator` shows the deviation.

Source: J. W. Young, A first order approximation to the optimum checkpoint interval, CACM 17 (9),
1974. J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps,
FGCS 22 (3), 2006.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Final

from ckptfmt.errors import Code, err

#: Longest allowed time, in seconds: 300,000 years.
LIMIT_S: Final = 1e13
_LEVELS: Final = 8
#: Largest `Level.every`.
MOST_EVERY: Final = 1_000_000
#: Time between saves to a level without failures, as picked by `choose_every`, in seconds.
_UNNEEDED_S: Final = 3600.0
#: Shortest interval, in seconds.
SHORTEST_S: Final = 1e-3
#: Number of search steps. Each narrows the range by 0.618: all together by more than 1e22.
_STEPS: Final = 120


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """A place for saves, nearest first: the node's cache, peers, or home.

    Attributes:
        name: name of the level.
        lost_s: training time lost to a save to this level, beyond the loss to the same save to
            nearer levels, in seconds.
        commit_s: time from the begin of a save until the level has all of the save, in seconds.
        restore_s: time from a failure until training resumes from this level, in seconds: noticing,
            restarting, loading.
        mtbf_s: mean time between failures for which this is the nearest level that survives, in
            seconds; infinite if there are no such failures.
        every: n, if every n-th save reaches this level, beginning with the first of a launch.

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
                detail = (
                    f"{what} of {self.name} is {getattr(self, what)!r}, and no time from 0"
                    f" to {LIMIT_S:g} s"
                )
                raise err(
                    Code.ARGUMENT,
                    detail,
                    where=what,
                    remedy="Give seconds that were measured, or an estimate.",
                )
        if not (SHORTEST_S <= self.mtbf_s <= LIMIT_S or self.mtbf_s == math.inf):
            detail = (
                f"mtbf_s of {self.name} is {self.mtbf_s!r}, and no time from {SHORTEST_S:g}"
                f" to {LIMIT_S:g} s"
            )
            raise err(
                Code.ARGUMENT,
                detail,
                where="mtbf_s",
                remedy="Give the mean time between failures, or infinity.",
            )
        if not 1 <= self.every <= MOST_EVERY:
            detail = (
                f"of {self.every} saves one goes to {self.name}; this must be from 1 to"
                f" {MOST_EVERY:,}"
            )
            raise err(Code.ARGUMENT, detail, where="every")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Waste:
    """The wasted shares of a run's time.

    Attributes:
        saving: training time lost to saves, in kept training.
        redone: training thrown away by failures, including saves.
        restoring: time from failures until training resumed.
    """

    saving: float
    redone: float
    restoring: float

    @property
    def total(self) -> float:
        """The share of time without kept training."""
        return self.saving + self.redone + self.restoring

    @property
    def of_saves(self) -> float:
        """The share that depends on the interval: all waste except restoring."""
        return self.saving + self.redone


def check_levels(levels: Sequence[Level]) -> None:
    """Check that a run can have these levels. Raises: StateError(ARGUMENT)."""
    if not 1 <= len(levels) <= _LEVELS:
        raise err(
            Code.ARGUMENT, f"there are {len(levels)} levels, and not 1 to {_LEVELS}", where="levels"
        )
    if levels[0].every != 1:
        raise err(
            Code.ARGUMENT,
            f"{levels[0].name} is the nearest level: every save goes there",
            where="every",
        )
    if all(level.mtbf_s == math.inf for level in levels):
        detail = "there are no failures, so that any save is waste"
        raise err(
            Code.ARGUMENT,
            detail,
            where="mtbf_s",
            remedy="Give at least one finite mean time between failures.",
        )


def lost_per_save_s(levels: Iterable[Level]) -> float:
    """Return the average training time lost to a save, in seconds."""
    return sum(level.lost_s / level.every for level in levels)


def shortest_interval_s(levels: Sequence[Level]) -> float:
    """Return the shortest interval at which no save waits for an earlier save, at any level."""
    commits = (level.commit_s / level.every for level in levels)
    return max(SHORTEST_S, lost_per_save_s(levels) * (1 + 1e-6), *commits)


def check_interval(interval_s: float, levels: Sequence[Level]) -> None:
    """Check that saves at this interval don't wait for each other. Raises: StateError(ARGUMENT)."""
    shortest_s = shortest_interval_s(levels)
    if not shortest_s * (1 - 1e-9) <= interval_s <= LIMIT_S:
        raise err(
            Code.ARGUMENT,
            f"an interval of {interval_s:g} s isn't between {shortest_s:g} s (saves at shorter"
            f" intervals wait for earlier saves) and {LIMIT_S:g} s",
            where="interval",
            remedy=(
                "Give a longer interval; or send fewer saves to the level with the slowest commit."
            ),
        )


def expected_waste(interval_s: float, levels: Sequence[Level]) -> Waste:
    """Return the expected waste of a long run, by the model in the module's docstring.

    Args:
        interval_s: time from the begin of a save to the begin of the next, in seconds.
        levels: levels of the run, nearest first.

    Raises: StateError(ARGUMENT).

    >>> home = Level(name="home", lost_s=30, commit_s=30, restore_s=600, mtbf_s=3 * 3600)
    >>> round(expected_waste(805, [home]).of_saves, 4)  # saves of 30 s, a failure in three hours
    0.0688
    """
    check_levels(levels)
    check_interval(interval_s, levels)
    kept = 1.0
    restored = 1.0
    lost_s = 0.0
    for level in levels:
        lost_s += level.lost_s
        if level.mtbf_s == math.inf:
            continue
        period = interval_s * level.every / level.mtbf_s
        delay = max(0.0, level.commit_s - lost_s) / level.mtbf_s
        kept *= period * math.exp(-period - delay) / -math.expm1(-period)
        restored *= math.exp(-level.restore_s / level.mtbf_s)
    saving = lost_per_save_s(levels) / interval_s
    return Waste(
        saving=restored * kept * saving, redone=restored * (1 - kept), restoring=1 - restored
    )


def young_interval_s(levels: Sequence[Level]) -> float:
    """Return Young's interval in seconds, extended to several levels: the first-order optimum.

    The shortest interval is not respected.

    >>> young_interval_s([Level(name="home", lost_s=0.5, commit_s=20, restore_s=120, mtbf_s=3600)])
    60.0
    """
    check_levels(levels)
    return math.sqrt(
        2 * lost_per_save_s(levels) / sum(level.every / level.mtbf_s for level in levels)
    )


def best_interval_s(levels: Sequence[Level], *, shortest_s: float = 0.0) -> float:
    """Return the interval of the least expected waste, in seconds.

    The logarithm of goodput is a sum of concave functions of the interval, so that a golden-section
    search finds the maximum.

    Args:
        levels: levels of the run, nearest first.
        shortest_s: lower bound of the interval, in seconds; the bound by commits holds as well.
    """
    check_levels(levels)
    low_s = max(shortest_s, shortest_interval_s(levels))
    longest_s = max(level.mtbf_s for level in levels if level.mtbf_s != math.inf)
    # No optimum exceeds the mean time between the rarest failures plus the cost of a save.
    low = math.log(low_s)
    high = math.log(min(LIMIT_S, low_s + longest_s + lost_per_save_s(levels)))
    ratio = (math.sqrt(5) - 1) / 2
    for _ in range(_STEPS):
        left = high - ratio * (high - low)
        right = low + ratio * (high - low)
        if _log_goodput(math.exp(left), levels) >= _log_goodput(math.exp(right), levels):
            high = right
        else:
            low = left
    return max(low_s, math.exp(low), key=lambda interval_s: _log_goodput(interval_s, levels))


def _log_goodput(interval_s: float, levels: Sequence[Level]) -> float:
    """Return the logarithm of goodput without terms that don't depend on the interval.

    The logarithm doesn't underflow.
    """
    told = math.log1p(-min(1 - 1e-12, lost_per_save_s(levels) / interval_s))
    for level in levels:
        period = interval_s * level.every / level.mtbf_s
        told += math.log(period / -math.expm1(-period)) - period if period > 0 else 0.0
    return told


def choose_every(levels: Sequence[Level]) -> list[Level]:
    """Return the levels with the best `Level.every`: how many saves the farther levels get.

    From several starting intervals, the interval and the factors `every` are improved in turn. The
    best result is returned.
    """
    once = [dataclasses.replace(level, every=1) for level in levels]
    lost_s = lost_per_save_s(once)
    alone = [
        [dataclasses.replace(level, lost_s=lost_s)] for level in once if level.mtbf_s != math.inf
    ]
    begins = [best_interval_s(once), shortest_interval_s(once[:1]), *map(best_interval_s, alone)]
    ends = [once, *(_improve_every(once, interval_s) for interval_s in begins)]
    return min(ends, key=lambda end: expected_waste(best_interval_s(end), end).total)


def _improve_every(once: list[Level], interval_s: float) -> list[Level]:
    chosen: list[Level] = []
    for _ in range(20):
        before = chosen
        chosen = [once[0], *(_with_every(level, interval_s) for level in once[1:])]
        if chosen == before:
            break
        interval_s = best_interval_s(chosen)
    return chosen


def _with_every(level: Level, interval_s: float) -> Level:
    once = dataclasses.replace(level, every=1)
    fewest = math.ceil(level.commit_s / interval_s - 1e-9)
    alone_s = (
        best_interval_s([once]) if level.lost_s and level.mtbf_s != math.inf else level.commit_s
    )
    if level.mtbf_s == math.inf:
        alone_s = max(_UNNEEDED_S, level.commit_s)
    return dataclasses.replace(
        once, every=max(1, min(MOST_EVERY, max(fewest, round(alone_s / interval_s))))
    )
