"""A network that loses requests and answers, or delivers late: a save succeeds, or fails by a name of its own."""

import functools
import itertools

import pytest

from ckptfmt.run import lineage
from ckptfmt.store.memory import Loss, MemoryStore
from tests.explorer.content import deterministic
from tests.explorer.judge import Judge
from tests.explorer.scenes import CASES, LONE_CASES, MemoryScene, prepare, put_paths
from tests.explorer.schedule import explore
from tests.explorer.telling import tell

#: As often as a call is tried, and once less and more.
TIMES = (1, 2, 3, 4)
#: With one actor there is nothing to preempt but by the network, whose late requests arrive at
#: every moment.
ALONE = 2


@pytest.fixture(autouse=True)
def _deterministic():
    with deterministic():
        yield


@pytest.mark.parametrize("name", [name for name in LONE_CASES if "file" not in name])
def test_every_put_may_be_lost_in_every_way(name):
    case, judge = LONE_CASES[name], Judge()
    initial = prepare(case)
    scene_count, run_count, violations = 0, 0, []
    for path, loss, times in itertools.product(put_paths(case), Loss, TIMES):
        losses = ((loss, path),) * times
        make = functools.partial(MemoryScene, case, judge, initial, losses)
        result = explore(make, preemptions=ALONE)
        scene_count += 1
        run_count += result.run_count
        violations += [(path, loss, times, *violation) for violation in result.violations]

    tell(f"{name}: {scene_count} combinations of a put and a fault, {run_count} runs")
    assert violations == []
    assert scene_count >= len(Loss) * len(TIMES)
    assert run_count >= scene_count


@pytest.mark.parametrize("name", [name for name in LONE_CASES if "file" in name])
def test_nothing_is_committed_without_its_files(name):
    case = LONE_CASES[name]
    initial = prepare(case)

    result = explore(lambda: MemoryScene(case, Judge(), initial), preemptions=0)

    assert result.violations == []
    assert result.run_count == 1


@pytest.mark.parametrize(
    "times", [1, 3, *(pytest.param(times, marks=pytest.mark.exhaustive) for times in (2, 4))]
)
@pytest.mark.parametrize("loss", Loss)
@pytest.mark.parametrize("name", ["same_parts_twice", "two_attempts", "committer_and_cleaner"])
def test_a_decision_that_is_lost_is_taken_once(name, loss, times):
    case, judge = CASES[name].but_unsure(), Judge()
    initial = prepare(case)
    losses = ((loss, "manifest.json"),) * times

    result = explore(lambda: MemoryScene(case, judge, initial, losses), preemptions=1)

    tell(f"{name}, {times} x {loss.name}: {result.run_count} runs")
    assert result.violations == []


def test_a_launch_whose_record_lands_late_hurts_nobody():
    case = LONE_CASES["launch"]
    files, _ = prepare(case)
    store = MemoryStore.from_snapshot(files)
    for _ in range(3):
        store.inject(Loss.LATE, path_end="0002.json")
    with pytest.raises(Exception, match="STORE_NO_ANSWER"):
        lineage.begin_launch(store, lineage.open_run(store))

    second, _ = lineage.begin_launch(store, lineage.open_run(store))

    assert store.land() == []
    assert second.launch == 2
