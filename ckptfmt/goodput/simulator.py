"""Play runs that fail, save and restore, event by event, and measure their goodput. Pure: chance comes from a seed.

A run trains, saves at its interval to one or several levels, and commits there while it trains. A failure ends the
training at once. It destroys what the levels hold that don't survive it, and saves in flight. The run restores the
newest checkpoint that is left, from the nearest level that has it; a failure meanwhile makes it begin again. The
interval may be fixed, or be decided as the run goes by whoever measures it (`Pilot`).

Failures of nodes are drawn node by node: the job has `Scenario.nodes` of them, and who fails is replaced. A failed node
takes its cache along; the second level, if it isn't the last one, holds a replica at a partner. Where the partner was
replaced since the last commit at that level, or is among those that are still being replaced, only the last level has
the checkpoint.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from ckptfmt.errors import Code, err
from ckptfmt.goodput.interval import Level, check_interval, check_levels, lost_per_save_s, shortest_interval_s

#: How many failures a simulation may have in all: about a minute.
FAILURES: Final = 3_000_000
#: How many saves it may have that can't be passed over: those around failures.
SAVES: Final = 50_000_000
_RUNS: Final = 100_000
NODES: Final = 10_000_000
_LONGEST_S: Final = 1e10
#: The class of a node's failure, which the state of its partner decides.
NODE: Final = -1
#: The two-sided 95 % quantile of Student's t by degrees of freedom; beyond, that of the normal distribution.
_T95: Final = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
_T95_BEYOND: Final = ((30, 2.131), (60, 2.042), (120, 2.0), (math.inf, 1.98))


class Pilot(Protocol):
    """A decider of the interval as a run goes, by what the run could measure itself; it knows of as many levels."""

    def interval_s(self) -> float:
        """Return the seconds from one save to the next."""

    def note_save(self, lost_s: float, commit_s: float, level: int) -> None:
        """Take note of a committed save, with the farthest level that it went to."""

    def note_time(self, seconds: float) -> None:
        """Take note that the launch has trained for so long since it was last told."""

    def note_failure(self, level: int) -> None:
        """Take note that the launch has failed, and that something was lost at all levels nearer than this one."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One failure: when, and the number of the nearest level that survives it, or `NODE` for the loss of a node."""

    at_s: float
    level: int
    node: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What is simulated.

    Attributes:
        levels: where saves go, nearest first, with their costs and the rates of failures.
        duration_s: how long each run lasts, in seconds.
        nodes: how many nodes a run has.
        node_mtbf_s: mean time between failures of one node; infinite where all failures are in `levels`.
        shape: of the Weibull distribution of times between failures: 1 for a constant rate; below 1 failures come in
            clusters, as they were seen to (Schroeder and Gibson, DSN 2006: 0.7 to 0.8).

    Raises: StateError(ARGUMENT).
    """

    levels: tuple[Level, ...]
    duration_s: float
    nodes: int = 1
    node_mtbf_s: float = math.inf
    shape: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.duration_s <= _LONGEST_S:
            raise err(Code.ARGUMENT, f"a run of {self.duration_s!r} s can't be simulated", where="duration")
        if not 1 <= self.nodes <= NODES:
            raise err(Code.ARGUMENT, f"{self.nodes} nodes can't be simulated, but 1 to {NODES:,}", where="nodes")
        if not self.node_mtbf_s > 0:
            raise err(Code.ARGUMENT, f"{self.node_mtbf_s!r} isn't a time between failures", where="node_mtbf")
        if not 0.1 <= self.shape <= 10:
            raise err(Code.ARGUMENT, f"a shape of {self.shape!r} isn't between 0.1 and 10", where="shape")
        check_levels(self.levels_with_nodes())

    def levels_with_nodes(self) -> tuple[Level, ...]:
        """Return the levels with the failures of nodes among their own, as the formulas take them."""
        if self.node_mtbf_s == math.inf:
            return self.levels
        place = min(1, len(self.levels) - 1)
        rate = 1 / self.levels[place].mtbf_s + self.nodes / self.node_mtbf_s
        levels = list(self.levels)
        levels[place] = dataclasses.replace(levels[place], mtbf_s=1 / rate)
        return tuple(levels)

    def expected_failures(self) -> float:
        """Return how many failures a run has on average."""
        return sum(self.duration_s / level.mtbf_s for level in self.levels_with_nodes())


@dataclasses.dataclass(slots=True)
class Spent:
    """Where the seconds of one run went; they add up to its duration.

    Attributes:
        training_s: training that counts.
        saving_s: training seconds lost to saves, of training that counts.
        redone_s: training that was thrown away, with its saves.
        restoring_s: from failures until training went on.
        failures, saves: how many there were.
    """

    training_s: float = 0.0
    saving_s: float = 0.0
    redone_s: float = 0.0
    restoring_s: float = 0.0
    failures: int = 0
    saves: int = 0

    @property
    def goodput(self) -> float:
        """The share of the time that was training that counts."""
        return self.training_s / (self.training_s + self.saving_s + self.redone_s + self.restoring_s)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a simulation showed.

    Attributes:
        goodput: mean over all runs.
        half_width: of its 95 % confidence interval, by Student's t; infinite for a single run.
        saving, redone, restoring: mean shares of the time.
        failures, saves: in all runs.
        runs: each of them.
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
    """Play a scenario several times.

    Args:
        scenario: what is simulated.
        interval: seconds from the begin of a save to that of the next one; or a pilot for each run.
        runs: how many times, each with failures of its own.
        seed: equal seeds give equal outcomes.
        trace: failures to play in the place of drawn ones, in any order; then one run is enough.

    Raises: StateError(ARGUMENT).
    """
    if not 1 <= runs <= _RUNS:
        raise err(Code.ARGUMENT, f"{runs} runs can't be simulated, but 1 to {_RUNS:,}", where="runs")
    if seed < 0:
        raise err(Code.ARGUMENT, f"a seed of {seed} isn't a number from 0 on", where="seed")
    if isinstance(interval, float | int):
        check_interval(interval, scenario.levels)
    _check_work(scenario, interval, runs * (scenario.expected_failures() if trace is None else len(trace)), runs)
    played = []
    for number, rng in enumerate(np.random.default_rng(seed).spawn(runs)):
        failures = draw_failures(scenario, rng) if trace is None else _checked_trace(scenario, trace)
        fixed_s, pilot = (interval, None) if isinstance(interval, float | int) else (0.0, interval[number])
        played.append(_Play(scenario, fixed_s, pilot).play(failures))
    return _summarize(played, scenario.duration_s)


def _check_work(scenario: Scenario, interval: float | Sequence[Pilot], failures: float, runs: int) -> None:
    """Refuse what would take longer than a minute or so. Raises: StateError(ARGUMENT)."""
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
                remedy="Simulate fewer runs, or shorter ones.",
            )


def _saves_before_failure(levels: Sequence[Level], interval_s: float) -> int:
    """Return how many saves before a failure may still be uncommitted somewhere; the others can be passed over."""
    longest_s = max(level.commit_s for level in levels) + sum(level.lost_s for level in levels)
    return math.ceil(longest_s / interval_s) + 2


def draw_failures(scenario: Scenario, rng: np.random.Generator) -> list[Failure]:
    """Return the failures of one run, in their order."""
    failures: list[Failure] = []
    for number, level in enumerate(scenario.levels):
        failures += [
            Failure(at_s=at_s, level=number) for at_s in _draw_times(level.mtbf_s, scenario, rng).tolist()
        ]  # fmt: skip
    times = _draw_times(scenario.node_mtbf_s / scenario.nodes, scenario, rng)
    nodes = rng.integers(scenario.nodes, size=len(times))
    failures += [
        Failure(at_s=at_s, level=NODE, node=node)
        for at_s, node in zip(times.tolist(), nodes.tolist(), strict=True)
    ]  # fmt: skip
    return sorted(failures, key=lambda failure: failure.at_s)


def _draw_times(mtbf_s: float, scenario: Scenario, rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """Return times of failures in a run's duration: sums of Weibull times of the given mean."""
    if mtbf_s == math.inf:
        return np.empty(0)
    scale, times, last_s = mtbf_s / math.gamma(1 + 1 / scenario.shape), [], 0.0
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
            detail = f"{failure} is none of {len(scenario.levels)} levels and {scenario.nodes} nodes"
            raise err(Code.ARGUMENT, detail, where="trace")
    return sorted((one for one in trace if one.at_s < scenario.duration_s), key=lambda failure: failure.at_s)


@dataclasses.dataclass(slots=True)
class _Saved:
    """A save that a level has or gets: when it is committed there, what was trained by then, lost seconds included."""

    at_s: float
    trained_s: float
    saving_s: float


class _Play:
    """One run, while it is played."""

    def __init__(self, scenario: Scenario, interval_s: float, pilot: Pilot | None) -> None:
        self._scenario, self._levels = scenario, scenario.levels
        self._interval_s, self._pilot = interval_s, pilot
        self._spent = Spent()
        #: For each level its newest committed save, and those behind it that aren't committed yet.
        self._held: list[list[_Saved]] = [[] for _ in self._levels]
        self._trained_s = self._saving_s = 0.0  # of the training as it stands
        #: Nodes that were replaced since the last commit at the level of partners, and when the last one was.
        self._replaced: set[int] = set()
        self._replaced_s = -math.inf
        self._mean_lost_s = lost_per_save_s(self._levels)
        self._left = _saves_before_failure(self._levels, interval_s) if pilot is None else 0

    def play(self, failures: Sequence[Failure]) -> Spent:
        """Return where the time went."""
        spent, now_s, restore_s = self._spent, 0.0, 0.0
        for failure in failures:
            self._go_on(now_s, restore_s, failure.at_s)
            now_s = failure.at_s
            spent.failures += 1
            restore_s = self._fail(failure).restore_s
        self._go_on(now_s, restore_s, self._scenario.duration_s)
        spent.training_s, spent.saving_s = self._trained_s, self._saving_s
        return spent

    def _go_on(self, begin_s: float, restore_s: float, end_s: float) -> None:
        """Restore and train until something happens."""
        ready_s = min(begin_s + restore_s, end_s)
        self._spent.restoring_s += ready_s - begin_s
        if ready_s < end_s:
            self._train(ready_s, end_s)

    def _train(self, now_s: float, end_s: float) -> None:
        """Train, and save, from one moment to another."""
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
                    farthest = max(place for place, level in enumerate(self._levels) if (number - 1) % level.every == 0)
                    self._pilot.note_save(lost_s, self._levels[farthest].commit_s, farthest)

    def _save(self, save_s: float, number: int) -> float:
        """Begin a save, and return the seconds of training that it costs."""
        lost_s = 0.0
        for level, held in zip(self._levels, self._held, strict=True):
            if number % level.every == 0:
                lost_s += level.lost_s
                while len(held) > 1 and held[1].at_s <= save_s:  # of those that are committed, the newest is enough
                    del held[0]
                held.append(_Saved(save_s + level.commit_s, self._trained_s, self._saving_s))
        self._spent.saves += 1
        return lost_s

    def _jump(self, now_s: float, end_s: float, number: int) -> tuple[float, int]:
        """Pass over saves that are committed everywhere long before a failure: of each level only the last one counts.

        No simulation takes longer for having more of them.
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
        """Return what the saves from one number to before another one cost, in seconds of training."""
        return sum(level.lost_s * (-(-end // level.every) - -(-first // level.every)) for level in self._levels)

    def _fail(self, failure: Failure) -> Level:
        """Lose what a failure takes, go back to the newest save that is left, and return the level that has it."""
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
        if self._pilot is not None:  # all that a run can tell: whether something newer was lost
            self._pilot.note_failure(nearest if lost_s > saved.trained_s else 0)
        self._spent.redone_s += (self._trained_s - saved.trained_s) + (self._saving_s - saved.saving_s)
        self._trained_s, self._saving_s = saved.trained_s, saved.saving_s
        return self._levels[place]

    def _level_of_node(self, failure: Failure) -> int:
        """Return the nearest level that survives the loss of a node now."""
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
