"""`every="auto"`: the decision itself, driven by simulated runs, beside the best fixed interval."""

import dataclasses

import numpy as np
import pytest

from ckptfmt.goodput.auto_interval import AutoInterval
from ckptfmt.goodput.interval import Level, best_interval_s
from ckptfmt.goodput.simulator import Scenario, draw_failures, simulate

HOUR_S = 3600.0


def waste_of(outcome):
    return outcome.saving + outcome.redone


class Noisy(AutoInterval):
    """Whose measurements are off, by 30 % on average."""

    rng = np.random.default_rng(0)

    def note_save(self, lost_s, commit_s):
        super().note_save(lost_s * self.rng.lognormal(0, 0.3), commit_s * self.rng.lognormal(0, 0.3))


def scenario_of(lost_s, commit_s, mtbf_s, failures=100):
    level = Level(name="home", lost_s=lost_s, commit_s=commit_s, restore_s=120, mtbf_s=mtbf_s)
    return Scenario(levels=(level,), duration_s=failures * mtbf_s)


@pytest.mark.parametrize("expected_s", [1, 30], ids=["prior", "prior-30-times"])
@pytest.mark.parametrize("mtbf_s", [600, 3 * HOUR_S])
@pytest.mark.parametrize(("lost_s", "commit_s"), [(0.5, 2), (2, 60), (60, 60)])
def test_it_wastes_hardly_more_than_the_best_fixed_interval(lost_s, commit_s, mtbf_s, expected_s):
    scenario = scenario_of(lost_s, commit_s, mtbf_s)
    pilots = [Noisy(mtbf_s=mtbf_s * expected_s) for _ in range(4)]
    seen = waste_of(simulate(scenario, pilots, runs=4, seed=1))
    best = waste_of(simulate(scenario, best_interval_s(scenario.levels), runs=4, seed=1))
    assert seen <= 1.1 * best
    assert {pilot.failures for pilot in pilots} <= set(range(60, 140))


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
        seen.append(waste_of(simulate(both, [AutoInterval(mtbf_s=HOUR_S)], runs=1, trace=before + moved)))
        halves = [
            waste_of(simulate(half, best_interval_s(half.levels), runs=1, trace=drawn)) * half.duration_s
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
