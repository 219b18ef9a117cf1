"""Where the time of a run went: histories told by hand, to the second."""

from typing import Any

import pytest

from ckptfmt.run.accounts import KnownLaunch, account
from ckptfmt.run.ledger import LaunchTimes


def launch(
    started_s: float,
    *,
    training: float,
    ended_s: float | None,
    first: int,
    step: int,
    **times: float,
) -> KnownLaunch:
    """A measured launch with the given times, in seconds; one that begins to train 5 s after it was started."""
    seconds: dict[str, float] = {"initialising": 3, "restoring": 2, "training": training, **times}
    return KnownLaunch(
        is_measured=True,
        started_s=started_s,
        measured_s=started_s + sum(seconds.values()),
        ended_s=ended_s,
        first_step=first,
        step=step,
        save_count=2,
        commit_count=2,
        committing_ms=3000,
        times=LaunchTimes(**{name: round(value * 1000) for name, value in seconds.items()}),
    )


def test_a_kill_throws_away_what_came_behind_the_last_commit() -> None:
    # Launch 1 saved step 40 after 45 s, and was killed 12 s later; launch 2 began 8 s after that,
    # and trains.
    first = launch(1000, training=38, blocked=1, lost=1, ended_s=1057, first=0, step=40)
    second = launch(1065, training=20, ended_s=None, first=40, step=60)
    found = account({1: None, 2: (40, 1)}, {1: first, 2: second})
    assert found.times_s == pytest.approx(
        {
            "training": 58, "blocked": 1, "lost": 1, "redone": 12, "initialising": 6, "restoring": 4, "waiting": 0,
            "down": 8, "unknown": 0,
        }
    )  # fmt: skip
    assert found.elapsed_s == pytest.approx(90)
    assert found.goodput == pytest.approx(58 / 90)
    assert found.doubts == ()
    costs = found.costs
    assert (costs.lost_s, costs.commit_s, costs.restore_s) == pytest.approx((0.5, 1.5, 13))
    assert (costs.mtbf_s, costs.interval_s) == pytest.approx((90, (40 + 20) / 4))


def test_without_a_witness_the_split_is_unknown_and_the_goodput_is_the_same() -> None:
    first = launch(1000, training=40, ended_s=None, first=0, step=40)
    second = launch(1065, training=20, ended_s=None, first=40, step=60)
    found = account({1: None, 2: (40, 1)}, {1: first, 2: second})
    assert (found.training_s, found.redone_s, found.down_s, found.unknown_s) == pytest.approx(
        (60, 0, 0, 20)
    )
    assert found.goodput == pytest.approx(60 / 90)
    assert "nobody saw the end" in found.doubts[0]


def test_a_rollback_throws_away_all_that_came_behind_the_chosen_step() -> None:
    first = launch(1000, training=40, ended_s=1045, first=0, step=40)
    second = launch(1050, training=60, ended_s=1115, first=40, step=100)
    third = launch(1120, training=5, ended_s=None, first=10, step=15)
    found = account({1: None, 2: (40, 1), 3: (10, 1)}, {1: first, 2: second, 3: third})
    assert found.training_s == pytest.approx(10 + 5)
    assert found.redone_s == pytest.approx(30 + 60)


@pytest.mark.parametrize("ended_s", [1060, None])
def test_a_save_that_was_committed_behind_the_last_entry_counts_by_its_steps(
    ended_s: float | None,
) -> None:
    first = launch(
        1000, training=40, ended_s=ended_s, first=0, step=40
    )  # a second for each step, until 1045
    second = launch(1065, training=1, ended_s=None, first=50, step=51)
    found = account({1: None, 2: (50, 1)}, {1: first, 2: second})
    assert found.training_s == pytest.approx(40 + 10 + 1)
    assert found.redone_s + found.down_s + found.unknown_s == pytest.approx(10)


def test_a_launch_that_never_trained_is_time_between_launches() -> None:
    first = launch(1000, training=40, ended_s=1045, first=0, step=40)
    third = launch(1065, training=20, ended_s=None, first=40, step=60)
    found = account({1: None, 2: (40, 1), 3: (40, 1)}, {1: first, 3: third})
    assert (found.down_s, found.unknown_s, found.launch_count) == (20, 0, 3)
    assert found.costs.restore_s is None  # these are 20 s of two failures


def test_a_launch_that_trained_without_a_ledger_leaves_what_it_did_unknown() -> None:
    first = launch(1000, training=40, ended_s=1045, first=0, step=40)
    third = launch(1065, training=20, ended_s=None, first=50, step=60)
    resumed: Any = {1: None, 2: (40, 1), 3: (50, 2)}
    found = account(resumed, {1: first, 3: third}, untimed=(2,))
    assert (found.down_s, found.unknown_s) == (0, 20)
    assert "1 of 3 launches have no ledger entry (2)" in found.doubts[0]


def test_launches_of_one_process_do_not_count_its_seconds_twice() -> None:
    first = launch(1000, training=40, ended_s=1045, first=0, step=40)
    second = launch(1000, training=20, ended_s=1070, first=40, step=60, initialising=48)
    found = account({1: None, 2: (40, 1)}, {1: first, 2: second})
    assert found.elapsed_s == pytest.approx(70)
    assert found.initialising_s == pytest.approx(3 + 3)


def test_of_a_run_without_times_nothing_is_said() -> None:
    found = account({1: None}, {}, untimed=(1,))
    assert (found.elapsed_s, found.goodput) == (0, None)
    assert account({}, {}).goodput is None


def test_a_launch_of_which_one_save_is_left_that_nobody_goes_on_from() -> None:
    """Its manifest says one moment and no more: nothing is divided by."""
    one = KnownLaunch(
        is_measured=False,
        started_s=1000,
        measured_s=1000,
        ended_s=None,
        first_step=20,
        step=20,
        save_count=1,
        times=LaunchTimes(training=0),
    )
    found = account(
        {1: None, 2: (10, 1)},
        {1: one, 2: launch(1065, training=20, ended_s=None, first=10, step=30)},
    )
    assert found.times_s["training"] == 20


def test_where_no_training_is_known_no_share_is_told() -> None:
    """Two launches without a ledger, each with all of its saves within a second: not a goodput of 0."""
    launches = {
        number: launch(
            1000 + 3 * number,
            training=0,
            initialising=0,
            restoring=0,
            ended_s=None,
            first=0,
            step=1,
        )
        for number in (1, 2)
    }
    found = account({1: None, 2: (1, 1)}, launches)
    assert (found.training_s, found.goodput) == (0, None)
    assert found.unknown_s == pytest.approx(3)
