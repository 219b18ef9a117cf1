"""The expected waste by the interval of saves, beside the formulas that it contains."""

import dataclasses
import json
import math

import pytest

from ckptfmt.__main__ import main
from ckptfmt.errors import StateError
from ckptfmt.loop.interval import (
    Level,
    best_interval_s,
    choose_every,
    expected_waste,
    young_interval_s,
)

HOUR_S = 3600.0


def level(**members):
    return Level(
        **{
            "name": "home",
            "lost_s": 0.5,
            "commit_s": 20,
            "restore_s": 120,
            "mtbf_s": HOUR_S,
            **members,
        }
    )


@pytest.mark.parametrize("mtbf_s", [600, HOUR_S, 30 * HOUR_S])
@pytest.mark.parametrize("lost_s", [0.05, 5, 60])
def test_a_synchronous_save_is_dalys(lost_s, mtbf_s):
    """Daly's expected wall time: M exp(R/M) (exp((w + lost)/M) - 1) for each w of training."""
    synchronous = level(lost_s=lost_s, commit_s=lost_s, mtbf_s=mtbf_s)
    for interval_s in (2 * lost_s, 5 * lost_s, 100 * lost_s):
        work_s = interval_s - lost_s
        wall_s = mtbf_s * math.exp(120 / mtbf_s) * math.expm1(interval_s / mtbf_s)
        assert 1 - expected_waste(interval_s, [synchronous]).total == pytest.approx(
            work_s / wall_s, rel=1e-9
        )


def lambert_w(value):
    """The principal branch of Lambert's W, by Newton's method."""
    found = 0.0 if value > -0.3 else -1 + math.sqrt(2 * (1 + math.e * value))
    for _ in range(100):
        found -= (found * math.exp(found) - value) / (math.exp(found) * (1 + found))
    return found


@pytest.mark.parametrize("lost_s", [0.5, 20.0, 300.0])
def test_the_best_interval_is_dalys_whatever_commit_and_restore(lost_s):
    """Its maximum in closed form: w = M (1 + W(-exp(-1 - lost/M)))."""
    work_s = HOUR_S * (1 + lambert_w(-math.exp(-1 - lost_s / HOUR_S)))
    for commit_s in (lost_s, lost_s + 50):
        for restore_s in (0, 1000):
            one = level(lost_s=lost_s, commit_s=commit_s, restore_s=restore_s)
            assert best_interval_s([one]) == pytest.approx(max(work_s + lost_s, commit_s), rel=1e-5)


def test_youngs_is_the_first_term():
    one = level(lost_s=0.01, commit_s=1, mtbf_s=1e6)
    assert young_interval_s([one]) == pytest.approx(math.sqrt(2 * 0.01 * 1e6))
    assert best_interval_s([one]) == pytest.approx(young_interval_s([one]), rel=1e-3)
    assert best_interval_s([level(lost_s=0)]) == 20  # saves that cost nothing: one behind the other
    assert best_interval_s([one], shortest_s=200) == 200


def test_saves_to_levels_that_fail_seldom_are_rare():
    near = level(name="cache", commit_s=1, mtbf_s=HOUR_S)
    far = level(lost_s=10, commit_s=100, mtbf_s=50 * HOUR_S)
    chosen = choose_every([near, far])
    assert chosen[0].every == 1
    best = expected_waste(best_interval_s(chosen), chosen).total
    for every in (1, chosen[1].every // 3, chosen[1].every * 3):
        other = [near, dataclasses.replace(far, every=every)]
        assert best < expected_waste(best_interval_s(other), other).total
    assert (
        best
        < expected_waste(best_interval_s([level(lost_s=10.5, commit_s=100)]), [near, far]).total
    )


@pytest.mark.parametrize(
    ("members", "where"),
    [
        ({"lost_s": -1}, "lost_s"),
        ({"commit_s": math.nan}, "commit_s"),
        ({"restore_s": math.inf}, "restore_s"),
        ({"mtbf_s": 0}, "mtbf_s"),
        ({"every": 0}, "every"),
    ],
)
def test_what_is_no_level_is_refused_by_name(members, where):
    with pytest.raises(StateError) as caught:
        level(**members)
    assert (caught.value.code, caught.value.where) == ("ARGUMENT", where)


def test_intervals_within_which_saves_would_wait_are_refused():
    with pytest.raises(StateError, match=r"20 s \(saves at shorter"):
        expected_waste(19, [level()])
    with pytest.raises(StateError, match="there are no failures"):
        expected_waste(30, [level(mtbf_s=math.inf)])
    with pytest.raises(StateError, match="nearest level"):
        expected_waste(30, [level(every=2)])


def test_the_command_prints_the_best_among_others(capsys):
    typed = ["interval", "--lost", "0.5", "--commit", "20", "--restore", "2min", "--mtbf", "1h"]
    assert main([*typed, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    wastes = {one["interval_s"]: one["waste"] for one in told["intervals"]}
    assert told["best"]["waste"] == min(wastes.values())
    assert told["best"]["interval_s"] == pytest.approx(best_interval_s([level()]))
    assert told["young_interval_s"] == 60
    assert len(wastes) > 4
    assert main(typed) == 0
    assert sum(line.endswith("best") for line in capsys.readouterr().out.splitlines()) == 1


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (
            ["--commit", "1", "2", "--restore", "1", "--mtbf", "9"],
            "--restore has 1 value, and --commit 2 values",
        ),
        (["--commit", "soon", "--restore", "1", "--mtbf", "9"], "'soon' isn't a time"),
        (["--commit", "1", "--restore", "1"], "there are no failures"),
        (
            ["--commit", "1", "--restore", "1", "--mtbf", "9", "--nodes", "8"],
            "--nodes says nothing",
        ),
        (
            ["--commit", "1", "2", "--restore", "1", "1", "--mtbf", "9", "9", "--share", "1", "x"],
            "isn't a whole",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(typed, said, capsys):
    assert main(["interval", *typed]) == 2
    assert said in capsys.readouterr().err
