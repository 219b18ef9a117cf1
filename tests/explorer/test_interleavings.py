"""Actors that meet in one run: every order of their steps with few preemptions, on objects and on files."""

import random

import pytest

from tests.explorer.content import deterministic
from tests.explorer.judge import Judge
from tests.explorer.scenes import (
    CASES,
    LONG_CASES,
    FileScene,
    MemoryScene,
    disk_state,
    prepare,
)
from tests.explorer.schedule import explore, sample
from tests.explorer.telling import tell

SEED = 20261121


@pytest.fixture(autouse=True)
def _deterministic():
    with deterministic():
        yield


def on_objects(name):
    case, judge = CASES[name], Judge()
    initial = prepare(case)
    return lambda: MemoryScene(case, judge, initial)


def on_files(name):
    case, judge = CASES[name], Judge()
    files, promises = prepare(case)
    return lambda: FileScene(case, judge, (disk_state(files), promises))


@pytest.mark.parametrize("name", CASES)
def test_no_order_of_steps_on_objects_does_harm(name):
    # REQ-RUN-013 and REQ-RUN-014 are what two launches of these scenes need, one of which retires;
    # test_mutants has the protocols without them.
    preemptions = 1 if name in LONG_CASES else 2
    result = explore(on_objects(name), preemptions=preemptions)

    tell(f"{name}, {preemptions} preemptions: {result}")
    assert result.violations == []
    assert result.run_count >= CASES[name].run_floor
    assert result.state_count >= 50


@pytest.mark.parametrize("name", sorted(CASES.keys() - LONG_CASES))
def test_no_order_of_system_calls_does_harm(name):
    result = explore(on_files(name), preemptions=1)

    tell(f"{name} on files, 1 preemption: {result.run_count} runs")
    assert result.violations == []
    assert result.run_count >= 10


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(LONG_CASES))
def test_no_order_of_system_calls_of_long_actors_does_harm(name):
    result = explore(on_files(name), preemptions=1)

    tell(f"{name} on files, 1 preemption: {result.run_count} runs")
    assert result.violations == []
    assert result.run_count >= 40


@pytest.mark.slow
@pytest.mark.parametrize("count", [12, pytest.param(50, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", CASES)
def test_no_order_by_chance_does_harm(name, count):
    rng = random.Random(SEED)
    result = sample(on_objects(name), count=2 * count, rng=rng)
    result_on_files = sample(on_files(name), count=count, rng=rng)

    tell(
        f"{name}, orders by chance, seed {SEED}: {result.run_count} on objects,"
        f" {result_on_files.run_count} on files"
    )
    assert result.violations == []
    assert result_on_files.violations == []
