"""`every="auto"`: the decision itself, driven by simulated runs, beside the best fixed interval."""

import dataclasses
import itertools

import numpy as np
import pytest

from ckptfmt.loop.auto_interval import AutoInterval
from ckptfmt.loop.interval import Level, best_interval_s, shortest_interval_s
from ckptfmt_tools.simulator import Scenario, draw_failures, simulate

HOUR_S = 3600.0


def waste_of(outcome):
    return outcome.saving + outcome.redone


class Noisy(AutoInterval):
    """Whose measurements are off, by 30 % on average."""

    rng = np.random.default_rng(0)

    def note_save(self, lost_s, commit_s, level=0):
        super().note_save(
            lost_s * self.rng.lognormal(0, 0.3), commit_s * self.rng.lognormal(0, 0.3), level
        )


@pytest.fixture(autouse=True)
def _same_noise(monkeypatch):
    """Give each test the same noise, whichever tests run before."""
    monkeypatch.setattr(Noisy, "rng", np.random.default_rng(0))


def scenario_of(lost_s, commit_s, mtbf_s, failures=100):
    level = Level(name="home", lost_s=lost_s, commit_s=commit_s, restore_s=120, mtbf_s=mtbf_s)
    return Scenario(levels=(level,), duration_s=failures * mtbf_s)


def every_second(*axes):
    """Return the product of lists of values; every second case is exhaustive.

    Each pair of values of two lists has a case that isn't.
    """
    cases = []
    for numbers in itertools.product(*(range(len(axis)) for axis in axes)):
        values = [axis[number] for axis, number in zip(axes, numbers, strict=True)]
        marks = [pytest.mark.exhaustive] if sum(numbers) % 2 else []
        cases.append(pytest.param(*values, marks=marks))
    return cases


@pytest.mark.parametrize(
    ("costs_s", "mtbf_s", "expected_s"),
    every_second([(0.5, 2), (2, 60), (60, 60)], [600, 3 * HOUR_S], [1, 30]),
)
def test_it_wastes_hardly_more_than_the_best_fixed_interval(costs_s, mtbf_s, expected_s):
    lost_s, commit_s = costs_s
    scenario = scenario_of(lost_s, commit_s, mtbf_s)
    pilots = [Noisy(mtbf_s=mtbf_s * expected_s) for _ in range(4)]
    seen = waste_of(simulate(scenario, pilots, runs=4, seed=1))
    best = waste_of(simulate(scenario, best_interval_s(scenario.levels), runs=4, seed=1))
    assert seen <= 1.1 * best
    assert {pilot.failures for pilot in pilots} <= set(range(60, 140))


def two_levels(lost_s, commit_s, share, every):
    """Each save goes to the caches, and of `every` saves one goes home; a share of failures takes the caches along."""
    cache = Level(
        name="caches",
        lost_s=lost_s[0],
        commit_s=commit_s[0],
        restore_s=60,
        mtbf_s=HOUR_S / (1 - share),
    )
    home = Level(
        name="home",
        lost_s=lost_s[1],
        commit_s=commit_s[1],
        restore_s=120,
        mtbf_s=HOUR_S / share,
        every=every,
    )
    return Scenario(levels=(cache, home), duration_s=200 * HOUR_S)


def best_waste_of(scenario):
    interval_s = best_interval_s(scenario.levels)
    return min(
        waste_of(simulate(scenario, interval_s * factor, runs=4, seed=1))
        for factor in (0.7, 0.85, 1, 1.2, 1.4)
        if interval_s * factor >= shortest_interval_s(scenario.levels)
    )


@pytest.mark.parametrize(
    ("costs", "share", "every"),
    every_second(
        [((0.2, 3.0), (1, 60), 1), ((1.0, 5.0), (10, 300), 30)], [0.03, 0.2, 0.8], [4, 32]
    ),
)
def test_it_wastes_hardly_more_with_two_levels(costs, share, every):
    """What a failure took is only seen where a newer save was lost by it."""
    lost_s, commit_s, expected_s = costs
    scenario = two_levels(lost_s, commit_s, share, every)
    pilots = [Noisy(mtbf_s=HOUR_S * expected_s, every=(1, every)) for _ in range(4)]
    assert waste_of(simulate(scenario, pilots, runs=4, seed=1)) <= 1.1 * best_waste_of(scenario)
    assert all(pilot.meters[1].failures for pilot in pilots)


class Blind(AutoInterval):
    """Which takes all saves and failures for those of one level."""

    def note_save(self, lost_s, commit_s, _=0):
        super().note_save(lost_s, commit_s)

    def note_failure(self, _=0):
        super().note_failure()


def test_without_a_second_level_it_wastes_more():
    """The control of the test above."""
    scenario = two_levels((0.2, 3.0), (1, 60), 0.8, 32)
    seen = simulate(scenario, [Blind(mtbf_s=HOUR_S) for _ in range(4)], runs=4, seed=1)
    assert waste_of(seen) > 1.5 * best_waste_of(scenario)


def test_what_is_known_of_two_levels_is_the_levels_of_the_model():
    auto = AutoInterval(mtbf_s=HOUR_S, every=(1, 8))
    assert auto.levels() == []
    auto.note_save(
        5.0, 60.0, 1
    )  # the first save goes home: what one to the caches costs isn't known yet
    assert [(one.lost_s, one.commit_s) for one in auto.levels()] == [(5.0, 60.0), (0.0, 60.0)]
    auto.note_save(0.5, 2.0, 0)
    cache, home = auto.levels()
    assert (cache.lost_s, cache.commit_s, cache.every) == (0.5, 2.0, 1)
    assert (home.lost_s, home.commit_s, home.every) == (4.5, 60.0, 8)
    assert cache.mtbf_s == home.mtbf_s == 2 * HOUR_S  # a failure an hour, of either
    auto.note_time(HOUR_S)
    before_s = auto.interval_s()
    for _ in range(5):
        auto.note_time(600)
        auto.note_failure(1)
    cache, home = auto.levels()
    assert home.mtbf_s < HOUR_S < cache.mtbf_s
    assert auto.interval_s() < before_s
    assert [meter.failures for meter in auto.meters] == [0, 5]


@pytest.mark.parametrize("factor", [0.1, 10])
def test_it_follows_a_rate_that_changes_by_ten(factor):
    """The first half of the failures at one rate, the second at another; the best interval of each is the yardstick."""
    first, second = scenario_of(0.5, 5, HOUR_S), scenario_of(0.5, 5, HOUR_S * factor)
    both = dataclasses.replace(first, duration_s=first.duration_s + second.duration_s)
    seen, best = [], []
    for seed in range(4):
        rng = np.random.default_rng(seed)
        before, after = draw_failures(first, rng), draw_failures(second, rng)
        moved = [dataclasses.replace(one, at_s=one.at_s + first.duration_s) for one in after]
        seen.append(
            waste_of(simulate(both, [AutoInterval(mtbf_s=HOUR_S)], runs=1, trace=before + moved))
        )
        halves = [
            waste_of(simulate(half, best_interval_s(half.levels), runs=1, trace=drawn))
            * half.duration_s
            for half, drawn in ((first, before), (second, after))
        ]
        best.append(sum(halves) / both.duration_s)
    assert sum(seen) <= 1.1 * sum(best)


def test_costs_that_change_are_followed():
    auto = AutoInterval(mtbf_s=HOUR_S)
    assert auto.interval_s() == 60  # nothing is known
    auto.note_begun()
    assert auto.interval_s() == 180  # nothing is known yet
    for _ in range(9):
        auto.note_save(0.5, 2)
    before_s = auto.interval_s()
    assert before_s == pytest.approx(60, rel=0.01)
    auto.note_save(50, 2)  # one that was held up
    assert auto.interval_s() == before_s
    for _ in range(9):
        auto.note_save(5, 200)
    assert auto.interval_s() == pytest.approx(200)  # they would wait for each other


def test_it_has_bounds():
    auto = AutoInterval(mtbf_s=1e9)
    auto.note_save(0.0, 0.0)
    assert auto.interval_s() <= HOUR_S
    for _ in range(9):
        auto.note_save(30, 60)
    assert auto.interval_s() == 200 * 30
    for _ in range(50):
        auto.note_failure()  # at once, again and again
    assert auto.interval_s() >= 60
