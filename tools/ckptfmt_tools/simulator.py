"""The simulation of runs that fail, save and restore, event by event, to measure goodput. Pure.

Random numbers come from a seed. A run trains, saves at its interval to one or several levels, and
commits there while training. A failure stops the training at once, and destroys the saves in flight
and the contents of the levels that don't survive it. The run restores the newest remaining
checkpoint, from the nearest level that has it. A failure during a restore starts the restore again.
The interval is fixed, or decided during the run by a `Pilot`, from the run's measurements.

Failures of nodes are drawn for each of the `Scenario.nodes` nodes of the job. A failed node is
replaced, and its cache is lost. The second level, if it isn't the last, holds a replica on a
partner node. If the partner was replaced after the last commit at that level, or is still being
replaced, only the last level has the checkpoint.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from ckptfmt.errors import Code, err
from ckptfmt.loop.interval import (
    Level,
    check_interval,
    check_levels,
    lost_per_save_s,
    shortest_interval_s,
)

#: Most failures in a simulation, all runs together: about a minute.
FAILURES: Final = 3_000_000
#: Most saves in a simulation close to failures, where none can be skipped.
SAVES: Final = 50_000_000
_RUNS: Final = 100_000
NODES: Final = 10_000_000
_LONGEST_S: Final = 1e10
#: The level of a node's failure, for which the state of the partner decides the actual level.
NODE: Final = -1
#: Two-sided 95 % quantiles of Student's t by degrees of freedom; then steps down to the normal
#: distribution's.
_T95: Final = (
    12.71,
    4.303,
    3.182,
    2.776,
    2.571,
    2.447,
    2.365,
    2.306,
    2.262,
    2.228,
    2.201,
    2.179,
    2.160,
    2.145,
    2.131,
)
_T95_BEYOND: Final = ((30, 2.131), (60, 2.042), (120, 2.0), (math.inf, 1.98))


class Pilot(Protocol):
    """A decider of the interval during a run, from the run's own measurements of all levels."""

    def interval_s(self) -> float:
        """Return the time from one save to the next, in seconds."""

    def note_save(self, lost_s: float, commit_s: float, level: int) -> None:
        """Record a committed save and the farthest level of the save."""

    def note_time(self, seconds: float) -> None:
        """Record the training time since the previous call, in seconds."""

    def note_failure(self, level: int) -> None:
        """Record a failure after which all levels nearer than `level` had lost data."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A failure: its time, and the nearest level that survives it, or `NODE` for a lost node."""

    at_s: float
    level: int
    node: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A scenario to simulate.

    Attributes:
        levels: levels of the run, nearest first, with costs and rates of failures.
        duration_s: duration of each run in seconds.
        nodes: number of nodes of a run.
        node_mtbf_s: mean time between failures of one node, in seconds; infinite if `levels` has
            all failures.
        shape: shape of the Weibull distribution of times between failures: 1 for a constant rate.
            Below 1, failures come in clusters, as in observed systems (0.7 to 0.8).

    Raises: StateError(ARGUMENT).
    Source: B. Schroeder and G. Gibson, DSN 2006, for the observed shapes.
    """

    levels: tuple[Level, ...]
    duration_s: float
    nodes: int = 1
    node_mtbf_s: float = math.inf
    shape: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.duration_s <= _LONGEST_S:
            raise err(
                Code.ARGUMENT,
                f"a run of {self.duration_s!r} s can't be simulated",
                where="duration",
            )
        if not 1 <= self.nodes <= NODES:
            raise err(
                Code.ARGUMENT,
                f"{self.nodes} nodes can't be simulated, but 1 to {NODES:,}",
                where="nodes",
            )
        if not self.node_mtbf_s > 0:
            raise err(
                Code.ARGUMENT,
                f"{self.node_mtbf_s!r} isn't a time between failures",
                where="node_mtbf",
            )
        if not 0.1 <= self.shape <= 10:
            raise err(
                Code.ARGUMENT, f"a shape of {self.shape!r} isn't between 0.1 and 10", where="shape"
            )
        check_levels(self.levels_with_nodes())

    def levels_with_nodes(self) -> tuple[Level, ...]:
        """Return the levels for the formulas, with the failures of nodes added to a level's own."""
        if self.node_mtbf_s == math.inf:
            return self.levels
        place = min(1, len(self.levels) - 1)
        rate = 1 / self.levels[place].mtbf_s + self.nodes / self.node_mtbf_s
        levels = list(self.levels)
        levels[place] = dataclasses.replace(levels[place], mtbf_s=1 / rate)
        return tuple(levels)

    def expected_failures(self) -> float:
        """Return the mean number of failures of a run."""
        return sum(self.duration_s / level.mtbf_s for level in self.levels_with_nodes())


@dataclasses.dataclass(slots=True)
class Spent:
    """The seconds of a run by use, which add up to the duration.

    Attributes:
        training_s: kept training.
        saving_s: training time lost to saves, in kept training.
        redone_s: training thrown away, including saves.
        restoring_s: time from failures until training resumed.
        failures, saves: number of failures and of saves.
    """

    training_s: float = 0.0
    saving_s: float = 0.0
    redone_s: float = 0.0
    restoring_s: float = 0.0
    failures: int = 0
    saves: int = 0

    @property
    def goodput(self) -> float:
        """The share of kept training in the time."""
        return self.training_s / (
            self.training_s + self.saving_s + self.redone_s + self.restoring_s
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of a simulation.

    Attributes:
        goodput: mean over all runs.
        half_width: half width of the 95 % confidence interval of `goodput`, by Student's t;
            infinite for a single run.
        saving, redone, restoring: mean shares of the time.
        failures, saves: number of failures and of saves in all runs.
        runs: times of each run.
    """

    goodput: float
    half_width: float
    saving: float
    redone: float
    restoring: float
    failures: int
    saves: int
    runs: tuple[Spent, ...]


def simulate(
    scenario: Scenario, interval: float | Sequence[Pilot], *, runs: int = 32, seed: int = 0,
    trace: Sequence[Failure] | None = None,
) -> Outcome:  # fmt: skip
    """Simulate a scenario several times, and return the outcome.

    Args:
        scenario: scenario to simulate.
        interval: time from the begin of a save to the begin of the next, in seconds; or a pilot for
            each run.
        runs: number of runs, each with different random failures.
        seed: seed of the random numbers; equal seeds give equal outcomes.
        trace: failures to use instead of random failures, in any order; a single run is then
            enough.

    Raises: StateError(ARGUMENT).
    """
    if not 1 <= runs <= _RUNS:
        raise err(
            Code.ARGUMENT, f"{runs} runs can't be simulated, but 1 to {_RUNS:,}", where="runs"
        )
    if seed < 0:
        raise err(Code.ARGUMENT, f"a seed of {seed} isn't a number from 0 on", where="seed")
    if isinstance(interval, float | int):
        check_interval(interval, scenario.levels)
    _check_work(
        scenario,
        interval,
        runs * (scenario.expected_failures() if trace is None else len(trace)),
        runs,
    )
    played = []
    for number, rng in enumerate(np.random.default_rng(seed).spawn(runs)):
        failures = (
            draw_failures(scenario, rng) if trace is None else _checked_trace(scenario, trace)
        )
        fixed_s, pilot = (
            (interval, None) if isinstance(interval, float | int) else (0.0, interval[number])
        )
        played.append(_Play(scenario, fixed_s, pilot).play(failures))
    return _summarize(played, scenario.duration_s)


def _check_work(
    scenario: Scenario, interval: float | Sequence[Pilot], failures: float, runs: int
) -> None:
    """Check that the simulation takes a minute or so at most. Raises: StateError(ARGUMENT)."""
    saves = 0.0
    if isinstance(interval, float | int):
        behind = _saves_before_failure(scenario.levels, interval)
        saves = min((failures + runs) * behind, runs * scenario.duration_s / interval)
    for count, most, what in ((failures, FAILURES, "failures"), (saves, SAVES, "saves")):
        if count > most:
            raise err(
                Code.ARGUMENT,
                f"about {count:,.0f} {what} would be played one by one, and the most are {most:,}",
                where="runs",
                remedy="Simulate fewer runs, or shorter runs.",
            )


def _saves_before_failure(levels: Sequence[Level], interval_s: float) -> int:
    """Return how many saves before a failure may lack a commit, and can't be skipped."""
    longest_s = max(level.commit_s for level in levels) + sum(level.lost_s for level in levels)
    return math.ceil(longest_s / interval_s) + 2


def draw_failures(scenario: Scenario, rng: np.random.Generator) -> list[Failure]:
    """Return the random failures of a run, in order of time."""
    failures: list[Failure] = []
    for number, level in enumerate(scenario.levels):
        failures += [
            Failure(at_s=at_s, level=number)
            for at_s in _draw_times(level.mtbf_s, scenario, rng).tolist()
        ]
    times = _draw_times(scenario.node_mtbf_s / scenario.nodes, scenario, rng)
    nodes = rng.integers(scenario.nodes, size=len(times))
    failures += [
        Failure(at_s=at_s, level=NODE, node=node)
        for at_s, node in zip(times.tolist(), nodes.tolist(), strict=True)
    ]  # fmt: skip
    return sorted(failures, key=lambda failure: failure.at_s)


def _draw_times(
    mtbf_s: float, scenario: Scenario, rng: np.random.Generator
) -> npt.NDArray[np.float64]:
    """Return random times of failures in a run: sums of Weibull times with the given mean."""
    if mtbf_s == math.inf:
        return np.empty(0)
    scale = mtbf_s / math.gamma(1 + 1 / scenario.shape)
    times = []
    last_s = 0.0
    while last_s < scenario.duration_s:
        more = int((scenario.duration_s - last_s) / mtbf_s * 1.1) + 16
        drawn = last_s + np.cumsum(scale * rng.weibull(scenario.shape, more))
        times.append(drawn)
        last_s = float(drawn[-1])
    found = np.concatenate(times)
    return found[found < scenario.duration_s]


def _checked_trace(scenario: Scenario, trace: Sequence[Failure]) -> list[Failure]:
    for failure in trace:
        is_known = failure.level == NODE or 0 <= failure.level < len(scenario.levels)
        if not (is_known and failure.at_s >= 0 and 0 <= failure.node < scenario.nodes):
            detail = (
                f"{failure} is none of {len(scenario.levels)} levels and {scenario.nodes} nodes"
            )
            raise err(Code.ARGUMENT, detail, where="trace")
    return sorted(
        (one for one in trace if one.at_s < scenario.duration_s), key=lambda failure: failure.at_s
    )


@dataclasses.dataclass(slots=True)
class _Saved:
    """A save at a level: the time of the commit, and the training and lost time up to the save."""

    at_s: float
    trained_s: float
    saving_s: float


class _Play:
    """The state of a simulated run."""

    def __init__(self, scenario: Scenario, interval_s: float, pilot: Pilot | None) -> None:
        self._scenario = scenario
        self._levels = scenario.levels
        self._interval_s = interval_s
        self._pilot = pilot
        self._spent = Spent()
        #: For each level: the newest committed save, then the saves without a commit yet.
        self._held: list[list[_Saved]] = [[] for _ in self._levels]
        self._trained_s = self._saving_s = 0.0  # of the current training
        #: Nodes replaced since the last commit at the partners' level, and the time of the last
        #: replacement.
        self._replaced: set[int] = set()
        self._replaced_s = -math.inf
        self._mean_lost_s = lost_per_save_s(self._levels)
        self._left = _saves_before_failure(self._levels, interval_s) if pilot is None else 0

    def play(self, failures: Sequence[Failure]) -> Spent:
        """Simulate the run with these failures, and return the time by use."""
        spent = self._spent
        now_s = 0.0
        restore_s = 0.0
        for failure in failures:
            self._go_on(now_s, restore_s, failure.at_s)
            now_s = failure.at_s
            spent.failures += 1
            restore_s = self._fail(failure).restore_s
        self._go_on(now_s, restore_s, self._scenario.duration_s)
        spent.training_s = self._trained_s
        spent.saving_s = self._saving_s
        return spent

    def _go_on(self, begin_s: float, restore_s: float, end_s: float) -> None:
        """Restore and train up to the next failure or the end of the run."""
        ready_s = min(begin_s + restore_s, end_s)
        self._spent.restoring_s += ready_s - begin_s
        if ready_s < end_s:
            self._train(ready_s, end_s)

    def _train(self, now_s: float, end_s: float) -> None:
        """Train and save from one moment to another."""
        number = 0
        while now_s < end_s:
            if self._pilot is not None:
                self._interval_s = max(self._pilot.interval_s(), shortest_interval_s(self._levels))
            else:
                now_s, number = self._jump(now_s, end_s, number)
            begin_s = now_s
            save_s = min(begin_s + self._interval_s - self._mean_lost_s, end_s)
            self._trained_s += save_s - begin_s
            lost_s = self._save(save_s, number) if save_s < end_s else 0.0
            now_s = min(save_s + lost_s, end_s)
            self._saving_s += now_s - save_s
            number += 1
            if self._pilot is not None:
                self._pilot.note_time(now_s - begin_s)
                if now_s < end_s:
                    farthest = max(
                        place
                        for place, level in enumerate(self._levels)
                        if (number - 1) % level.every == 0
                    )
                    self._pilot.note_save(lost_s, self._levels[farthest].commit_s, farthest)

    def _save(self, save_s: float, number: int) -> float:
        """Begin a save, and return the training time lost to it, in seconds."""
        lost_s = 0.0
        for level, held in zip(self._levels, self._held, strict=True):
            if number % level.every == 0:
                lost_s += level.lost_s
                while (
                    len(held) > 1 and held[1].at_s <= save_s
                ):  # only the newest committed save is needed
                    del held[0]
                held.append(_Saved(save_s + level.commit_s, self._trained_s, self._saving_s))
        self._spent.saves += 1
        return lost_s

    def _jump(self, now_s: float, end_s: float, number: int) -> tuple[float, int]:
        """Skip saves that are committed at all levels long before a failure.

        Only the last of them at each level matters. More saves don't slow the simulation down.
        """
        count = int((end_s - now_s) / self._interval_s) - self._left
        if count <= 0:
            return now_s, number
        work_s = self._interval_s - self._mean_lost_s
        for level, held in zip(self._levels, self._held, strict=True):
            last = (number + count - 1) // level.every * level.every
            if last >= number:
                trained_s = self._trained_s + (last - number + 1) * work_s
                held[:] = [_Saved(now_s, trained_s, self._saving_s + self._lost_s(number, last))]
        lost_s = self._lost_s(number, number + count)
        self._trained_s += count * work_s
        self._saving_s += lost_s
        self._spent.saves += count
        return now_s + count * work_s + lost_s, number + count

    def _lost_s(self, first: int, end: int) -> float:
        """Return the training time lost to the saves from `first` up to `end`, in seconds."""
        return sum(
            level.lost_s * (-(-end // level.every) - -(-first // level.every))
            for level in self._levels
        )

    def _fail(self, failure: Failure) -> Level:
        """Drop the data destroyed by a failure, and go back to the newest remaining save.

        Returns: the level with that save.
        """
        for held in self._held:
            while held and held[-1].at_s > failure.at_s:
                held.pop()
            del held[:-1]
        nearest = failure.level if failure.level != NODE else self._level_of_node(failure)
        lost_s = max((held[-1].trained_s for held in self._held[:nearest] if held), default=0.0)
        for held in self._held[:nearest]:
            held.clear()
        left = [(-held[-1].trained_s, place) for place, held in enumerate(self._held) if held]
        place = min(left)[1] if left else len(self._levels) - 1
        saved = self._held[place][-1] if left else _Saved(failure.at_s, 0.0, 0.0)
        if self._pilot is not None:  # a run knows only whether newer data was lost
            self._pilot.note_failure(nearest if lost_s > saved.trained_s else 0)
        self._spent.redone_s += (self._trained_s - saved.trained_s) + (
            self._saving_s - saved.saving_s
        )
        self._trained_s = saved.trained_s
        self._saving_s = saved.saving_s
        return self._levels[place]

    def _level_of_node(self, failure: Failure) -> int:
        """Return the nearest level that survives the loss of a node at this time."""
        last = len(self._levels) - 1
        if last < 2:
            return last  # there are no partners
        replicas = self._held[1]
        if replicas and replicas[-1].at_s > self._replaced_s:
            self._replaced.clear()
        partner = (failure.node + self._scenario.nodes // 2) % self._scenario.nodes
        is_alone = partner in self._replaced or partner == failure.node
        self._replaced.add(failure.node)
        self._replaced_s = failure.at_s
        return last if is_alone else 1


def _summarize(played: list[Spent], duration_s: float) -> Outcome:
    goodput = np.array([one.goodput for one in played])
    count = len(played)
    half_width = math.inf
    if count > 1:
        freedom = count - 1
        beyond = next(value for limit, value in _T95_BEYOND if freedom <= limit)
        t95 = _T95[freedom - 1] if freedom <= len(_T95) else beyond
        half_width = t95 * float(goodput.std(ddof=1)) / math.sqrt(count)
    return Outcome(
        goodput=float(goodput.mean()),
        half_width=half_width,
        saving=sum(one.saving_s for one in played) / count / duration_s,
        redone=sum(one.redone_s for one in played) / count / duration_s,
        restoring=sum(one.restoring_s for one in played) / count / duration_s,
        failures=sum(one.failures for one in played),
        saves=sum(one.saves for one in played),
        runs=tuple(played),
    )
