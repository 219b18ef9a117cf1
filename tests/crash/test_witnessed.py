"""Trainings are killed anywhere, the witness's own writes included: no claim is refuted, and no bit differs."""

import json
import os

import pytest

from tests.explorer.telling import tell
from tests.forks import run_program
from tests.store.helpers import ROOT

SEED = 20261127


def campaign(place, *options):
    words = ["-m", "tests.crash.witnessed", "--seed", str(SEED), *map(str, options)]
    errors = place / "errors"
    code, printed = run_program(words, place=ROOT, variables=os.environ, errors=str(errors))
    assert code == 0, errors.read_text("utf-8")
    report = json.loads(printed)
    tell(f"seed {SEED}: {report}")
    return report


@pytest.mark.slow
@pytest.mark.timeout(2000)
@pytest.mark.parametrize(
    ("kill_count", "writers", "saver"),
    [
        (6, 1, "thread"),
        (6, 2, "thread"),
        pytest.param(200, 1, "thread", marks=pytest.mark.exhaustive),
        pytest.param(200, 2, "thread", marks=pytest.mark.exhaustive),
        pytest.param(100, 1, "process", marks=pytest.mark.exhaustive),
        pytest.param(100, 2, "process", marks=pytest.mark.exhaustive),
    ],
)
def test_a_killed_run_is_never_refuted_and_is_the_undisturbed_one(
    kill_count, writers, saver, tmp_path
):
    """REQ-RUN-061: a kill at any moment leaves the records of the steps before whole."""
    report = campaign(tmp_path, "--kills", kill_count, "--writers", writers, "--saver", saver)
    assert report["violations"] == []
    assert report["refuted"] == []
    assert report["differing"] == []
    assert report["kill_count"] == kill_count
    assert report["repeated_count"] > 0
    assert kill_count < 100 or report["verified_steps"] >= kill_count
    assert all(
        kill_count < 100 or report["kills_in"][phase] > 0
        for phase in ("open", "step", "witness", "save")
    )


@pytest.mark.slow
@pytest.mark.timeout(2000)
def test_a_run_with_one_difference_is_refuted(tmp_path):
    """The control of the campaign: a learning rate that is warmed up after each start."""
    report = campaign(tmp_path, "--kills", 5, "--faulty")
    assert report["violations"] == []
    assert any("an option of an optimizer" in text for text in report["refuted"])
    assert report["differing"]
    assert report["verified_launches"] == 0
