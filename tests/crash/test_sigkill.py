"""Trainers are killed at random moments, dozens of times or hundreds: nothing acknowledged is lost."""

import json
import subprocess
import sys

import pytest

from tests.explorer.telling import tell
from tests.store.helpers import ROOT

SEED = 20261121


@pytest.mark.slow
@pytest.mark.timeout(2000)
@pytest.mark.parametrize("kill_count", [60, pytest.param(320, marks=pytest.mark.exhaustive)])
def test_kills_at_random_moments_lose_nothing(kill_count):
    """After each 20 kills a trainer comes to its end, without anybody's help."""
    command = [
        sys.executable,
        "-m",
        "tests.crash.driver",
        "--kills",
        str(kill_count),
        "--seed",
        str(SEED),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)

    tell(f"seed {SEED}: {report}")
    assert report["violations"] == []
    assert report["kill_count"] == kill_count
    least = max(1, kill_count // 60)
    assert all(
        report["kills_in"].get(phase, 0) >= least for phase in ("resume", "save", "retirement")
    )
    assert report["torn_count"] >= least, "hardly a kill left a torn save behind"
    assert report["acknowledged_count"] >= max(1, kill_count // 8)
    assert report["checked_count"] >= max(1, kill_count // 2)
