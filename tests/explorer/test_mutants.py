"""Every broken protocol is convicted, for a reason that is its own: the proof that the explorer bites."""

import random

import pytest

from tests.explorer import copies
from tests.explorer.content import deterministic
from tests.explorer.crashes import explore_crashes
from tests.explorer.judge import Judge
from tests.explorer.mutants import (
    CRASH_MUTANTS,
    READER_MUTANTS,
    SCENE_MUTANTS,
    record_mutant,
)
from tests.explorer.scenes import CASES, LONE_CASES, FileScene, MemoryScene, disk_state, prepare
from tests.explorer.schedule import explore
from tests.explorer.telling import tell

SEED = 20261121


@pytest.fixture(autouse=True)
def _deterministic():
    with deterministic():
        yield


@pytest.mark.parametrize("name", CRASH_MUTANTS)
def test_a_crash_convicts(name):
    mutant = CRASH_MUTANTS[name]

    counts = explore_crashes(
        record_mutant(mutant),
        copies.judge_of(mutant.workload),
        rng=random.Random(SEED),
        recovery=False,
    )

    tell(f"{name}: {counts}; {sorted(counts.rules)}")
    assert counts.rules & mutant.rules, f"{name} wasn't convicted"
    assert counts.rules <= mutant.rules | {"older", "partial", "lost"}, (
        "convicted of something else"
    )


@pytest.mark.parametrize("name", SCENE_MUTANTS)
def test_a_meeting_convicts(name):
    mutant = SCENE_MUTANTS[name]
    case = (CASES | LONE_CASES)[mutant.case]
    files, promises = prepare(case)
    judge = Judge()

    def make():
        if mutant.on_files:
            return FileScene(case, judge, (disk_state(files), promises))
        return MemoryScene(case, judge, (files, promises), mutant.losses)

    rules = set()
    for preemptions in range(3):
        with mutant.patch():
            result = explore(make, preemptions=preemptions, stop_early=True)
        rules = {violation.rule for violation, _ in result.violations}
        if rules:
            break

    tell(f"{name}: {preemptions} preemptions, run {result.run_count}: {sorted(rules)}")
    assert rules & mutant.rules, f"{name} wasn't convicted; {rules}"


@pytest.mark.parametrize("name", READER_MUTANTS)
def test_a_lying_disk_convicts_a_reader(name):
    recording = record_mutant(CRASH_MUTANTS["no_fsync_of_shards"])
    right = explore_crashes(
        recording, Judge(), rng=random.Random(SEED), recovery=False, enough=100_000
    )
    with READER_MUTANTS[name]():
        broken = explore_crashes(
            recording, Judge(), rng=random.Random(SEED), recovery=False, enough=100_000
        )

    tell(f"{name}: {broken}; the right reader: {right}")
    assert "silent" in broken.rules
    assert not {"silent", "untyped"} & right.rules, "the right reader returned what nobody saved"
    assert right.distinct_count >= 100


def test_there_are_enough_of_them():
    assert len(CRASH_MUTANTS) + len(SCENE_MUTANTS) + len(READER_MUTANTS) >= 20
