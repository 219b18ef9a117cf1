"""The time of a run, over all launches, by use: training, saving, restoring and lost work. Pure.

If a launch resumed from step S of an earlier launch, all training of the earlier launch after S was
thrown away. The times of a launch are known up to the last entry in the ledger. The time after the
last entry was thrown away as well, unless a later save was committed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping

from ckptfmt.run.ledger import LaunchTimes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KnownLaunch:
    """The known times of a launch.

    Attributes:
        is_measured: whether the launch has a ledger entry; otherwise only the time from the first
            to the last save is known, and counts as training.
        started_s, measured_s: begin and end of the time covered by `times`, in seconds since 1970.
        ended_s: end of the launch, in seconds since 1970; None if unknown.
        first_step, step: number of steps done when training began, and at `measured_s`.
        save_count, commit_count, committing_ms: the same members as in a ledger entry.
        times: the same times as in a ledger entry.
    """

    is_measured: bool
    started_s: float
    measured_s: float
    ended_s: float | None
    first_step: int
    step: int
    save_count: int = 0
    commit_count: int = 0
    committing_ms: int = 0
    times: LaunchTimes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The average costs of saves and failures: the inputs of `ckptfmt interval` and `simulate`.

    An attribute is None if the records of the run don't show the cost.

    Attributes:
        lost_s: training time lost to a save, in seconds.
        commit_s: time from begin to commit of a save, in seconds.
        restore_s: time from the end of a launch to the training of the next launch, in seconds.
        mtbf_s: mean time between restarts, in seconds.
        interval_s: time from save to save during training, in seconds.
    """

    lost_s: float | None
    commit_s: float | None
    restore_s: float | None
    mtbf_s: float | None
    interval_s: float | None


@dataclasses.dataclass(slots=True, kw_only=True)
class Goodput:
    """The time of a run by use, in seconds.

    Attributes:
        training_s: kept training: training that no failure threw away.
        blocked_s: time for which saves stopped kept training.
        lost_s: slowdown of kept training by saves in the background.
        redone_s: training thrown away, including saves.
        initialising_s: from the start of process 0 to the first step, less waiting and restoring.
        restoring_s: choosing, verifying and loading a checkpoint.
        waiting_s: waiting for saves of earlier launches.
        down_s: time between launches, including launches without any step.
        unknown_s: training thrown away, or time between launches; the records don't
            distinguish the two.
        launch_count, save_count: number of launches and of saves.
        unmeasured_count: number of launches with training, but without a ledger entry.
        costs: average costs of a save and of a restart.
        doubts: facts missing in the records, a sentence each.
    """

    training_s: float = 0.0
    blocked_s: float = 0.0
    lost_s: float = 0.0
    redone_s: float = 0.0
    initialising_s: float = 0.0
    restoring_s: float = 0.0
    waiting_s: float = 0.0
    down_s: float = 0.0
    unknown_s: float = 0.0
    launch_count: int = 0
    save_count: int = 0
    unmeasured_count: int = 0
    costs: Costs = Costs(lost_s=None, commit_s=None, restore_s=None, mtbf_s=None, interval_s=None)
    doubts: tuple[str, ...] = ()

    @property
    def elapsed_s(self) -> float:
        """The time from the first known moment of the run to the last."""
        return sum(self.times_s.values())

    @property
    def times_s(self) -> dict[str, float]:
        """The time of the run by use, in seconds."""
        names = (
            "training",
            "blocked",
            "lost",
            "redone",
            "initialising",
            "restoring",
            "waiting",
            "down",
            "unknown",
        )
        return {name: getattr(self, f"{name}_s") for name in names}

    @property
    def goodput(self) -> float | None:
        """The share of kept training in the time; None if a launch's times are unknown.

        Of a launch without a ledger, only the time between the first and the last save is known,
        and all of this time counts as training. A share would mean little.
        """
        is_known = not self.unmeasured_count and (self.training_s > 0 or self.unknown_s == 0)
        return self.training_s / self.elapsed_s if is_known and self.elapsed_s > 0 else None

    def as_json(self) -> dict[str, object]:
        """Return the account as JSON members."""
        return {
            "goodput": self.goodput,
            "elapsed_s": self.elapsed_s,
            "times_s": self.times_s,
            "launch_count": self.launch_count,
            "save_count": self.save_count,
            "unmeasured_count": self.unmeasured_count,
            "costs": dataclasses.asdict(self.costs),
            "doubts": list(self.doubts),
        }


def account(
    resumed: Mapping[int, tuple[int, int] | None],
    known: Mapping[int, KnownLaunch],
    untimed: Collection[int] = (),
) -> Goodput:
    """Return the time of a run by use.

    Args:
        resumed: step and launch from which each launch resumed; None for a fresh start.
        known: known times of the launches; a launch without any step has none.
        untimed: launches with training, but without known times.
    """
    return _Account(resumed, known, untimed).add_all()


def kept_steps(resumed: Mapping[int, tuple[int, int] | None]) -> dict[int, float]:
    """Return the step up to which each launch's training counts.

    Launches from which the newest launch doesn't descend are left out.

    >>> kept_steps({1: None, 2: (8, 1), 3: (4, 1)})
    {3: inf, 1: 4}
    """
    kept: dict[int, float] = {}
    number = max(resumed, default=0)
    step = math.inf
    while number in resumed and number not in kept:
        kept[number] = step
        source = resumed[number]
        if source is None:
            break
        step, number = source
    return kept


class _Account:
    """The sums of a run's times, to which launches are added in order."""

    def __init__(
        self,
        resumed: Mapping[int, tuple[int, int] | None],
        known: Mapping[int, KnownLaunch],
        untimed: Collection[int],
    ) -> None:
        self._resumed = resumed
        self._known = known
        self._untimed = untimed
        self._kept = kept_steps(resumed)
        self._sums = Goodput(launch_count=len(resumed))
        #: End of the accounted time, and whether the last launch is known to have ended then.
        self._until_s: float | None = None
        self._has_ended = False
        #: Kept training after the last ledger entry of the previous launch, in seconds: a part of
        #: the gap before the next launch.
        self._extra_s = 0.0
        self._restores: list[float] = []

    def add_all(self) -> Goodput:
        passed: list[int] = []
        for number in sorted(self._resumed):
            if number not in self._known:
                passed.append(number)
                continue
            one = self._known[number]
            late_s, gap_s = self._add_gap(
                one, has_untimed=any(other in self._untimed for other in passed)
            )
            # With a launch lost before its first step, this is the gap of two failures.
            self._add(number, one, late_s, None if passed else gap_s)
            passed.clear()
        self._sums.unmeasured_count = len(self._list_unmeasured())
        self._sums.costs = self._costs()
        self._sums.doubts = tuple(self._doubts())
        return self._sums

    def _add_gap(self, one: KnownLaunch, *, has_untimed: bool) -> tuple[float, float | None]:
        """Account for the time before a launch.

        Returns: the overlap with the previous launch in seconds, and the gap in seconds if known.
        """
        if self._until_s is None:
            return 0.0, None
        gap_s = one.started_s - self._until_s
        if gap_s < 0:
            return -gap_s, 0.0
        extra_s = min(self._extra_s, gap_s)
        self._sums.training_s += extra_s
        if self._has_ended and one.is_measured and not has_untimed:
            self._sums.down_s += gap_s - extra_s
            return 0.0, gap_s
        self._sums.unknown_s += gap_s - extra_s
        return 0.0, None

    def _add(self, number: int, one: KnownLaunch, late_s: float, gap_s: float | None) -> None:
        """Account for a launch.

        Args:
            late_s: overlap with the previous launch, in the same process, in seconds.
            gap_s: time without any launch before this launch, in seconds; None if unknown.
        """
        sums = self._sums
        times = one.times
        initialising_s = max(0.0, times.initialising / 1000 - late_s)
        sums.initialising_s += initialising_s
        sums.waiting_s += times.waiting / 1000
        sums.restoring_s += times.restoring / 1000
        if gap_s is not None:
            self._restores.append(gap_s + initialising_s + (times.waiting + times.restoring) / 1000)
        kept_step = self._kept.get(number, one.first_step)
        steps = one.step - one.first_step
        # With a single remaining save, no number of steps is known: the share is 1 or 0.
        share = (
            1.0 if kept_step >= one.step else max(0.0, (kept_step - one.first_step) / max(1, steps))
        )
        sums.training_s += share * times.training / 1000
        sums.blocked_s += share * times.blocked / 1000
        sums.lost_s += share * times.lost / 1000
        sums.redone_s += (1 - share) * times.in_training / 1000
        sums.save_count += one.save_count
        # For a save committed after the last entry, the steps are known, but not their time.
        behind = max(0.0, kept_step - one.step) if math.isfinite(kept_step) else 0.0
        self._extra_s = behind * times.in_training / 1000 / steps if steps else 0.0
        self._until_s = max(self._until_s or -math.inf, one.measured_s)
        self._has_ended = one.ended_s is not None
        if one.ended_s is not None:
            rest_s = max(0.0, one.ended_s - self._until_s)
            extra_s = min(self._extra_s, rest_s)
            sums.training_s += extra_s
            sums.redone_s += rest_s - extra_s
            self._until_s += rest_s
            self._extra_s = 0.0

    def _costs(self) -> Costs:
        measured = [one for one in self._known.values() if one.is_measured]
        saves = sum(one.save_count for one in measured)
        commits = sum(one.commit_count for one in measured)
        stopped_ms = sum(one.times.blocked + one.times.lost for one in measured)
        committing_ms = sum(one.committing_ms for one in measured)
        in_training_ms = sum(one.times.in_training for one in measured)
        restarts = len(self._resumed) - 1
        return Costs(
            lost_s=stopped_ms / 1000 / commits if commits else None,
            commit_s=committing_ms / 1000 / commits if commits else None,
            restore_s=sum(self._restores) / len(self._restores) if self._restores else None,
            mtbf_s=self._sums.elapsed_s / restarts
            if restarts > 0 and self._sums.elapsed_s > 0
            else None,
            interval_s=in_training_ms / 1000 / saves if saves else None,
        )

    def _list_unmeasured(self) -> list[int]:
        """Return the launches with training, but without a ledger entry."""
        unmeasured = [number for number, one in self._known.items() if not one.is_measured]
        return sorted({*unmeasured, *self._untimed})

    def _doubts(self) -> list[str]:
        """Return sentences about facts missing in the records."""
        unmeasured = self._list_unmeasured()
        doubts = []
        if unmeasured:
            first = ", ".join(map(str, unmeasured[:5])) + (", ..." if len(unmeasured) > 5 else "")
            doubts.append(
                f"{len(unmeasured)} of {len(self._resumed)} launches have no ledger entry"
                f" ({first}): of these only the"
                " times of saves are known whose checkpoints are still there, to the second; what"
                " saves cost is counted"
                " as training, and all before the first and behind the last of them is unknown"
            )
        if self._sums.unknown_s > 0 and len(unmeasured) < len(self._resumed):
            doubts.append(
                "of some launches nobody saw the end: from their last entry until the next"
                " launch, training that was"
                " thrown away can't be told from the time between launches"
            )
        return doubts
