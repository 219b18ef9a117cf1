"""Two short hours of the soak, and that growth, damage and another end are found."""

import dataclasses

import pytest

from tests.campaign import soak
from tests.campaign.soak import Soak, Usage, find_growth

USAGE = Usage(
    saves=100,
    rss_nbytes=500 << 20,
    slot_nbytes=1 << 20,
    threads=20,
    descriptors=60,
    run_nbytes=10 << 20,
    run_files=200,
    save_s=0.1,
)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_hours_change_no_bit_and_leave_nothing_behind(tmp_path):
    day = Soak(tmp_path, 2, hour=20)
    day.run()
    assert day.problems == []
    assert day.counts["kills"] == 1
    assert day.counts["checks"] >= 3
    assert len(day.usage()) >= 2


@pytest.mark.parametrize("name", ["rss_nbytes", "slot_nbytes", "threads", "descriptors"])
def test_growth_is_found(name):
    grown = [
        dataclasses.replace(USAGE, **{name: getattr(USAGE, name) * (100 + 2 * number) // 100})
        for number in range(40)
    ]
    assert find_growth([USAGE] * 40) == []
    (problem,) = find_growth(grown)
    assert problem.startswith(f"{name} grew")


def test_another_end_is_found(tmp_path, monkeypatch):
    """A training that gets other samples in one step, and a file that a killed writer left."""
    soak.train(tmp_path, 4, 0)
    day = Soak(tmp_path, 2, hour=2)
    (tmp_path / "run" / ".tmp-left").touch()
    monkeypatch.setattr(soak, "undisturbed", lambda steps: {"0.weight": bytes(steps)})
    day._check_end()
    problems = "; ".join(day.problems)
    assert "run: the weights aren't the undisturbed training's" in problems
    assert "left over" in problems
