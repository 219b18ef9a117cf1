"""A power cut at every point of every workload: every state that it may leave is read, judged and recovered from."""

import functools
import random

import pytest

from tests.explorer import copies, workloads
from tests.explorer.content import deterministic
from tests.explorer.crashes import CrashCounts, explore_crashes, explore_recoveries, record
from tests.explorer.fsmodel import EXT4_ORDERED, LIMIT, POSIX_MIN, DiskState
from tests.explorer.judge import Judge, Promises
from tests.explorer.telling import tell
from tests.explorer.workloads import saves_by_chance

SEED = 20261121
WORKLOADS = copies.WORKLOADS
#: States of a point that are all judged, where that isn't `LIMIT`; `tests.explorer.exhaust` takes all.
LIMITS = {"save_in_cache": 4, "deltas": 8, "compaction": 16, "later_copy": 16}


@pytest.fixture(autouse=True)
def _deterministic():
    with deterministic():
        yield


@functools.cache
def explored(name, model=POSIX_MIN):
    """Return what a workload's crashes came to, and the states that they may leave: several tests ask for them."""
    workload = WORKLOADS[name]
    met: list[tuple[DiskState, Promises, list[str]]] = []
    counts = explore_crashes(
        record(workload.run, setup=workload.setup),
        copies.judge_of(name),
        model=model,
        rng=random.Random(SEED),
        limit=LIMITS.get(name, LIMIT),
        on_state=lambda *state: met.append(state),
    )
    return counts, met


@pytest.mark.parametrize("name", WORKLOADS)
def test_no_crash_loses_or_invents_anything(name):
    counts, _ = explored(name)

    tell(f"{name}, {POSIX_MIN}, seed {SEED}: {counts}")
    assert counts.violations == []
    assert counts.point_count >= WORKLOADS[name].point_floor
    assert counts.distinct_count >= WORKLOADS[name].state_floor


@pytest.mark.slow
@pytest.mark.parametrize("name", WORKLOADS)
def test_no_crash_on_ext4_loses_or_invents_anything(name):
    counts, _ = explored(name, EXT4_ORDERED)

    tell(f"{name}, {EXT4_ORDERED}, seed {SEED}: {counts}")
    assert counts.violations == []
    assert counts.distinct_count >= 8


def sampled_recoveries(names, per_workload):
    """Crash in each workload, then in the recovery from a sample of what that left."""
    rng, judge = random.Random(SEED), Judge()
    total = CrashCounts()
    for name in names:
        _, met = explored(name)
        total += explore_recoveries(rng.sample(met, min(per_workload, len(met))), judge, rng=rng)
    return total


def test_a_crash_in_the_middle_of_recovery_changes_nothing():
    counts = sampled_recoveries(["second_attempt", "resume", "retirement"], per_workload=1)

    tell(f"recoveries, seed {SEED}: {counts}")
    assert counts.violations == []
    assert counts.distinct_count >= 100


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_crash_in_the_middle_of_many_recoveries_changes_nothing():
    counts = sampled_recoveries(workloads.WORKLOADS, per_workload=4)

    tell(f"recoveries, seed {SEED}: {counts}")
    assert counts.violations == []
    assert counts.distinct_count >= 1500


@pytest.mark.slow
@pytest.mark.parametrize("order_count", [8, pytest.param(40, marks=pytest.mark.exhaustive)])
def test_no_crash_hurts_however_the_writers_interleave(order_count):
    rng, judge = random.Random(SEED), Judge()
    counts = CrashCounts()
    for _ in range(order_count):
        workload = WORKLOADS["second_save_of_two_at_once"]
        recording = record(saves_by_chance(rng), setup=workload.setup)
        counts += explore_crashes(recording, judge, rng=rng)

    tell(f"two writers and a cleaner in {order_count} orders, seed {SEED}: {counts}")
    assert counts.violations == []
    assert counts.distinct_count >= 10 * order_count
