"""The simulator beside closed forms, beside itself save by save, and beside histories told by hand."""

import dataclasses
import json
import math

import numpy as np
import pytest

from ckptfmt.__main__ import main
from ckptfmt.errors import StateError
from ckptfmt.loop.interval import Level, best_interval_s, expected_waste
from ckptfmt_tools.simulator import NODE, Failure, Scenario, draw_failures, simulate

HOUR_S, DAY_S = 3600.0, 86400.0
HOME = Level(name="home", lost_s=1, commit_s=4, restore_s=50)
CACHE = Level(name="cache", lost_s=0.5, commit_s=1, restore_s=10, mtbf_s=1e9)
PEERS = Level(name="peers", lost_s=0, commit_s=2, restore_s=20)


@pytest.mark.parametrize(
    ("lost_s", "commit_s", "restore_s", "mtbf_s", "interval_s"),
    [
        (30, 30, 600, 3 * HOUR_S, 805),  # synchronous: Daly's formula
        (60, 60, 600, 900, 400),  # more failures than training
        (0.5, 20, 120, HOUR_S, 60),
        (60, 300, 600, 1800, 900),
        (0.01, 1, 5, 100, 2),
    ],
)
def test_goodput_is_that_of_the_closed_form(lost_s, commit_s, restore_s, mtbf_s, interval_s):
    """Within three half-widths of a 95 % interval, which one seed in a billion would leave; and that is narrow."""
    one = Level(name="home", lost_s=lost_s, commit_s=commit_s, restore_s=restore_s, mtbf_s=mtbf_s)
    seen = simulate(Scenario(levels=(one,), duration_s=3000 * mtbf_s), interval_s, runs=16, seed=1)
    expected = expected_waste(interval_s, [one])
    assert seen.goodput == pytest.approx(1 - expected.total, abs=3 * seen.half_width)
    assert seen.half_width < 0.01
    assert seen.restoring == pytest.approx(expected.restoring, rel=0.05)


def test_levels_by_their_rates():
    levels = (
        dataclasses.replace(CACHE, mtbf_s=HOUR_S),
        dataclasses.replace(PEERS, mtbf_s=8 * HOUR_S),
        dataclasses.replace(HOME, mtbf_s=100 * HOUR_S, every=5),
    )
    seen = simulate(Scenario(levels=levels, duration_s=2000 * HOUR_S), 30, runs=16, seed=2)
    assert seen.goodput == pytest.approx(
        1 - expected_waste(30, levels).total, abs=3 * seen.half_width
    )
    assert seen.half_width < 0.001


class Steady:
    """A pilot that never changes its mind, so that every save is played."""

    def __init__(self, interval_s):
        self._interval_s, self.trained_s, self.saves, self.failures = interval_s, 0.0, 0, 0

    def interval_s(self):
        return self._interval_s

    def note_save(self, lost_s, commit_s, level):
        assert lost_s == (HOME.lost_s + CACHE.lost_s if level else CACHE.lost_s)
        assert commit_s == (CACHE, HOME)[level].commit_s
        self.saves += 1

    def note_time(self, seconds):
        self.trained_s += seconds

    def note_failure(self, level):
        assert level in (0, 1)
        self.failures += 1


def test_cycles_that_are_passed_over_change_nothing():
    levels = (
        dataclasses.replace(CACHE, mtbf_s=HOUR_S),
        dataclasses.replace(HOME, mtbf_s=9 * HOUR_S, every=3),
    )
    scenario = Scenario(levels=levels, duration_s=100 * HOUR_S)
    pilots = [Steady(7), Steady(7)]
    over, played = simulate(scenario, 7, runs=2, seed=3), simulate(scenario, pilots, runs=2, seed=3)
    for one, other, pilot in zip(over.runs, played.runs, pilots, strict=True):
        assert dataclasses.astuple(one) == pytest.approx(dataclasses.astuple(other), rel=1e-6)
        assert pilot.failures == other.failures > 50
        assert pilot.trained_s == pytest.approx(scenario.duration_s - other.restoring_s)
        assert pilot.saves <= other.saves <= pilot.saves + pilot.failures + 1


def test_a_history_told_by_hand():
    """Saves every 10 s lose 1 s, and are committed 4 s after they began; then one failure."""
    scenario = Scenario(levels=(dataclasses.replace(HOME, mtbf_s=1e9),), duration_s=200)
    # 9 s of training, a save from 9 to 10, 9 more, a save at 19 that is committed at 23.
    late, early = (
        simulate(scenario, 10, trace=[Failure(at_s=at_s, level=0)], runs=1).runs[0]
        for at_s in (23, 22.9)
    )
    assert late.redone_s == pytest.approx(
        23 - 18 - 1
    )  # all but 18 s of training, with a second lost
    assert early.redone_s == pytest.approx(22.9 - 9)  # back to the save at 9 s
    assert late.restoring_s == pytest.approx(50) == early.restoring_s
    assert late.training_s + late.saving_s + late.redone_s + late.restoring_s == pytest.approx(200)


def test_a_failure_while_restoring_begins_it_again():
    scenario = Scenario(levels=(dataclasses.replace(HOME, mtbf_s=1e9),), duration_s=300)
    trace = [Failure(at_s=at_s, level=0) for at_s in (130, 100)]
    assert simulate(scenario, 10, trace=trace, runs=1).runs[0].restoring_s == 30 + 50


@pytest.mark.parametrize(
    ("nodes", "restoring_s"),
    [
        ((0,), 20),  # its partner has it
        ((0, 1), 5 + 20),  # another one fails meanwhile: its partner has it, too
        ((0, 4), 5 + 50),  # both of a pair: home alone
        ((0, 4, 1), 5 + 5 + 50),  # and nothing nearer has it yet
    ],
)
def test_partners_that_are_lost_together_leave_home_alone(nodes, restoring_s):
    levels = (CACHE, PEERS, dataclasses.replace(HOME, mtbf_s=1e9))
    scenario = Scenario(levels=levels, duration_s=300, nodes=8)
    trace = [
        Failure(at_s=100 + 5 * number, level=NODE, node=node) for number, node in enumerate(nodes)
    ]
    assert simulate(scenario, 10, trace=trace, runs=1).runs[0].restoring_s == restoring_s


def test_a_pair_is_safe_again_after_a_commit():
    scenario = Scenario(
        levels=(CACHE, PEERS, dataclasses.replace(HOME, mtbf_s=1e9)), duration_s=300, nodes=8
    )
    trace = [Failure(at_s=100, level=NODE, node=0), Failure(at_s=160, level=NODE, node=4)]
    assert simulate(scenario, 10, trace=trace, runs=1).runs[0].restoring_s == 20 + 20


@pytest.mark.parametrize("nodes", [8, 100_000])
def test_nodes_fail_each_by_itself(nodes):
    levels = (CACHE, PEERS, HOME)
    scenario = Scenario(
        levels=levels, duration_s=30 * DAY_S, nodes=nodes, node_mtbf_s=nodes * 2 * HOUR_S
    )
    interval_s = best_interval_s(scenario.levels_with_nodes())
    seen = simulate(scenario, interval_s, runs=8, seed=4)
    assert seen.failures == pytest.approx(8 * 360, rel=0.1)
    assert seen.goodput == pytest.approx(
        1 - expected_waste(interval_s, scenario.levels_with_nodes()).total, abs=0.003
    )


def test_the_shape_keeps_the_mean_and_changes_the_spread():
    one = (dataclasses.replace(HOME, mtbf_s=HOUR_S),)
    counts = {}
    for shape in (0.6, 1.0, 3.0):
        scenario = Scenario(levels=one, duration_s=50 * HOUR_S, shape=shape)
        seen = simulate(scenario, 60, runs=300, seed=5)
        assert seen.failures == pytest.approx(300 * 50, rel=0.1)
        numbers = [run.failures for run in seen.runs]
        mean = sum(numbers) / len(numbers)
        counts[shape] = sum((number - mean) ** 2 for number in numbers)
    assert counts[0.6] > 1.5 * counts[1.0] > 3 * counts[3.0]


def test_equal_seeds_give_equal_outcomes():
    scenario = Scenario(levels=(dataclasses.replace(HOME, mtbf_s=HOUR_S),), duration_s=DAY_S)
    assert simulate(scenario, 60, seed=6) == simulate(scenario, 60, seed=6)
    assert simulate(scenario, 60, seed=6).goodput != simulate(scenario, 60, seed=7).goodput
    assert math.isinf(simulate(scenario, 60, runs=1).half_width)


@pytest.mark.parametrize(
    ("members", "arguments", "said"),
    [
        ({"duration_s": -1}, {}, "can't be simulated"),
        ({"duration_s": math.nan}, {}, "can't be simulated"),
        ({"nodes": 0}, {}, "nodes can't be simulated"),
        ({"node_mtbf_s": 0}, {}, "isn't a time between failures"),
        ({"shape": 0}, {}, "shape"),
        ({}, {"runs": 0}, "0 runs"),
        ({}, {"seed": -1}, "seed"),
        ({"duration_s": 1e10}, {}, "about 88,888,889 failures"),
        (
            {
                "duration_s": 1e8,
                "levels": (CACHE, dataclasses.replace(HOME, commit_s=3600, mtbf_s=1e6, every=1000)),
            },
            {"interval": 3.6, "runs": 20_000},
            "saves would be played one by one",
        ),
        ({}, {"trace": [Failure(at_s=1, level=1)]}, "is none of 1 levels"),
        ({}, {"trace": [Failure(at_s=1, level=NODE, node=1)]}, "is none of 1 levels and 1 nodes"),
        ({}, {"interval": 3}, "saves at shorter intervals wait"),
    ],
)
def test_what_can_not_be_simulated_is_refused_by_name(members, arguments, said):
    made = {"levels": (dataclasses.replace(HOME, mtbf_s=HOUR_S),), "duration_s": DAY_S, **members}
    with pytest.raises(StateError, match=said):
        simulate(Scenario(**made), arguments.pop("interval", 60), **arguments)


COSTS = ["--commit", "1", "2", "4", "--restore", "10", "20", "50", "--lost", "0.5", "0", "1"]


def test_the_command_plays_what_is_typed(capsys):
    typed = [
        "simulate",
        *COSTS,
        "--nodes",
        "64",
        "--node-mtbf",
        "64h",
        "--duration",
        "10d",
        "--runs",
        "4",
    ]
    assert main([*typed, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert abs(told["goodput"] - told["goodput_by_formula"]) < 0.003
    assert (
        told["failures"]
        == sum(run["failures"] for run in told["runs"])
        == pytest.approx(960, rel=0.1)
    )
    assert main(typed) == 0
    assert f"goodput    {told['goodput'] * 100:.3f} %" in capsys.readouterr().out


def test_the_command_plays_a_trace(tmp_path, capsys):
    trace = tmp_path / "failures.txt"
    trace.write_text(
        "# a day\n3600 cache\n2h node 3  # its fan\n7205 node 7\n20000 home\n", "utf-8"
    )
    typed = [
        "simulate",
        *COSTS,
        "--nodes",
        "8",
        "--duration",
        "1d",
        "--every",
        "60",
        "--share",
        "1",
        "1",
        "1",
    ]
    assert main([*typed, "--trace", str(trace), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["runs"][0]["restoring_s"] == 10 + 5 + 50 + 50
    assert told["half_width"] is told["goodput_by_formula"] is None
    trace.write_text("3600 moon\n", "utf-8")
    assert main([*typed, "--trace", str(trace)]) == 2
    assert "'3600 moon' isn't SECONDS and a level (cache, peers, home)" in capsys.readouterr().err
    assert main([*typed, "--trace", str(tmp_path / "none")]) == 2
    assert "the trace can't be read" in capsys.readouterr().err


def test_drawn_failures_are_in_order_and_in_time():
    levels = (dataclasses.replace(CACHE, mtbf_s=HOUR_S), HOME)
    scenario = Scenario(levels=levels, duration_s=DAY_S, nodes=4, node_mtbf_s=HOUR_S)
    drawn = draw_failures(scenario, np.random.default_rng(8))
    assert [one.at_s for one in drawn] == sorted(one.at_s for one in drawn)
    assert 0 < drawn[0].at_s < drawn[-1].at_s < DAY_S
    assert {one.level for one in drawn} == {0, NODE}
    assert {one.node for one in drawn} == {0, 1, 2, 3}
