"""Where the time of a run went, over all launches, from what is known of each of them. Pure.

Of a launch that resumed from step S of another one, all that the other one trained behind S was thrown away. The times
of a launch are known up to its last entry in the ledger; what came behind that entry was thrown away, too, unless a
later save was committed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping

from ckptfmt.documents.ledger import LaunchTimes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KnownLaunch:
    """What is known of the time of a launch.

    Attributes:
        is_measured: whether a ledger entry says it; else only its training is known, from when its saves were taken.
        started_s, measured_s: between these moments `times` are known; in seconds since 1970.
        ended_s: when it ended; None where nobody saw it.
        first_step, step: steps done when training began, and when it was measured.
        save_count, commit_count, committing_ms: as in a ledger entry.
        times: as in a ledger entry.
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
    """What saves and failures cost a run, on average: the inputs of `ckptfmt interval` and `ckptfmt simulate`.

    Attributes:
        lost_s: seconds of training that a save cost.
        commit_s: from the begin of a save until it was committed, in seconds.
        restore_s: from the end of a launch until its successor trained, in seconds.
        mtbf_s: time between restarts, in seconds.
        interval_s: from save to save while the run trained, in seconds.

    Each is None where the run doesn't show it.
    """

    lost_s: float | None
    commit_s: float | None
    restore_s: float | None
    mtbf_s: float | None
    interval_s: float | None


@dataclasses.dataclass(slots=True, kw_only=True)
class Goodput:
    """Where the time of a run went, in seconds.

    Attributes:
        training_s: training that counts.
        blocked_s: saves for which the training stood still, of training that counts.
        lost_s: by how much saves slowed down the steps beside them, of training that counts.
        redone_s: training that was thrown away, with its saves.
        initialising_s: from the start of process 0 until the first step, less waiting and restoring.
        restoring_s: choosing, verifying and loading.
        waiting_s: for saves of earlier launches.
        down_s: between launches, launches that ended before their first step included.
        unknown_s: training that was thrown away, or between launches: no record tells which.
        launch_count, save_count: how many there were.
        unmeasured_count: how many of the launches trained and have no entry in a ledger.
        costs: what a save and a restart cost on average.
        doubts: what isn't known, a sentence each.
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
        """All of it: from the first moment that is known to the last one."""
        return sum(self.times_s.values())

    @property
    def times_s(self) -> dict[str, float]:
        """Where the time went, in seconds, by name."""
        names = ("training", "blocked", "lost", "redone", "initialising", "restoring", "waiting", "down", "unknown")
        return {name: getattr(self, f"{name}_s") for name in names}

    @property
    def goodput(self) -> float | None:
        """The share of the time that was training that counts; None where the time of a launch isn't known.

        Of a launch without a ledger the time from its first save to its last one is known, all of which counts as
        training: a share of it says nothing.
        """
        is_known = not self.unmeasured_count and (self.training_s > 0 or self.unknown_s == 0)
        return self.training_s / self.elapsed_s if is_known and self.elapsed_s > 0 else None

    def as_json(self) -> dict[str, object]:
        """Return what it says as JSON."""
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
    """Return where the time of a run went.

    Args:
        resumed: of each launch, step and launch of what it resumed from; None for a fresh start.
        known: what is known of the launches' times; those that ended before their first step aren't among them.
        untimed: launches that trained, and of which no time is known.
    """
    return _Account(resumed, known, untimed).add_all()


def kept_steps(resumed: Mapping[int, tuple[int, int] | None]) -> dict[int, float]:
    """Return up to which step each launch's training counts; launches off the way to the newest one are left out.

    >>> kept_steps({1: None, 2: (8, 1), 3: (4, 1)})
    {3: inf, 1: 4}
    """
    kept: dict[int, float] = {}
    number, step = max(resumed, default=0), math.inf
    while number in resumed and number not in kept:
        kept[number] = step
        source = resumed[number]
        if source is None:
            break
        step, number = source
    return kept


class _Account:
    """The sums, while launch after launch is added to them."""

    def __init__(
        self,
        resumed: Mapping[int, tuple[int, int] | None],
        known: Mapping[int, KnownLaunch],
        untimed: Collection[int],
    ) -> None:
        self._resumed, self._known, self._untimed = resumed, known, untimed
        self._kept = kept_steps(resumed)
        self._sums = Goodput(launch_count=len(resumed))
        #: Until when everything is accounted for, and whether the launch before is known to have ended then.
        self._until_s: float | None = None
        self._has_ended = False
        #: Training behind the last entry of the launch before that counts, in seconds: it lies before the next one.
        self._extra_s = 0.0
        self._restores: list[float] = []

    def add_all(self) -> Goodput:
        passed: list[int] = []
        for number in sorted(self._resumed):
            if number not in self._known:
                passed.append(number)
                continue
            one = self._known[number]
            late_s, gap_s = self._add_gap(one, has_untimed=any(other in self._untimed for other in passed))
            # A launch that was lost before it trained makes the gap that of two failures.
            self._add(number, one, late_s, None if passed else gap_s)
            passed.clear()
        self._sums.unmeasured_count = len(self._list_unmeasured())
        self._sums.costs = self._costs()
        self._sums.doubts = tuple(self._doubts())
        return self._sums

    def _add_gap(self, one: KnownLaunch, *, has_untimed: bool) -> tuple[float, float | None]:
        """Account for the time before a launch; return by how much it overlaps the one before, and the gap if known."""
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
            late_s: so much of its first seconds belongs to the launch before, in whose process it began.
            gap_s: how long nothing ran before it, in seconds; None where that isn't known.
        """
        sums, times = self._sums, one.times
        initialising_s = max(0.0, times.initialising / 1000 - late_s)
        sums.initialising_s += initialising_s
        sums.waiting_s += times.waiting / 1000
        sums.restoring_s += times.restoring / 1000
        if gap_s is not None:
            self._restores.append(gap_s + initialising_s + (times.waiting + times.restoring) / 1000)
        kept_step, steps = self._kept.get(number, one.first_step), one.step - one.first_step
        # Of a launch of which one save alone is left no steps are known: the share is 1 or 0.
        share = 1.0 if kept_step >= one.step else max(0.0, (kept_step - one.first_step) / max(1, steps))
        sums.training_s += share * times.training / 1000
        sums.blocked_s += share * times.blocked / 1000
        sums.lost_s += share * times.lost / 1000
        sums.redone_s += (1 - share) * times.in_training / 1000
        sums.save_count += one.save_count
        # Of a save that was committed behind the last entry the steps are known, and their time isn't.
        behind = max(0.0, kept_step - one.step) if math.isfinite(kept_step) else 0.0
        self._extra_s = behind * times.in_training / 1000 / steps if steps else 0.0
        self._until_s, self._has_ended = max(self._until_s or -math.inf, one.measured_s), one.ended_s is not None
        if one.ended_s is not None:
            rest_s = max(0.0, one.ended_s - self._until_s)
            extra_s = min(self._extra_s, rest_s)
            sums.training_s += extra_s
            sums.redone_s += rest_s - extra_s
            self._until_s += rest_s
            self._extra_s = 0.0

    def _costs(self) -> Costs:
        measured = [one for one in self._known.values() if one.is_measured]
        saves, commits = sum(one.save_count for one in measured), sum(one.commit_count for one in measured)
        stopped_ms = sum(one.times.blocked + one.times.lost for one in measured)
        committing_ms = sum(one.committing_ms for one in measured)
        in_training_ms = sum(one.times.in_training for one in measured)
        restarts = len(self._resumed) - 1
        return Costs(
            lost_s=stopped_ms / 1000 / commits if commits else None,
            commit_s=committing_ms / 1000 / commits if commits else None,
            restore_s=sum(self._restores) / len(self._restores) if self._restores else None,
            mtbf_s=self._sums.elapsed_s / restarts if restarts > 0 and self._sums.elapsed_s > 0 else None,
            interval_s=in_training_ms / 1000 / saves if saves else None,
        )

    def _list_unmeasured(self) -> list[int]:
        """Return the launches that trained and have no entry in a ledger."""
        unmeasured = [number for number, one in self._known.items() if not one.is_measured]
        return sorted({*unmeasured, *self._untimed})

    def _doubts(self) -> list[str]:
        """Return what the records don't say."""
        unmeasured = self._list_unmeasured()
        doubts = []
        if unmeasured:
            first = ", ".join(map(str, unmeasured[:5])) + (", ..." if len(unmeasured) > 5 else "")
            doubts.append(
                f"{len(unmeasured)} of {len(self._resumed)} launches have no ledger entry ({first}): of these only the"
                " times of saves are known whose checkpoints are still there, to the second; what saves cost is counted"
                " as training, and all before the first and behind the last of them is unknown"
            )
        if self._sums.unknown_s > 0 and len(unmeasured) < len(self._resumed):
            doubts.append(
                "of some launches nobody saw the end: from their last entry until the next launch, training that was"
                " thrown away can't be told from the time between launches"
            )
        return doubts
