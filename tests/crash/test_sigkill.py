"""Trainers are killed at random moments, hundreds of times: nothing acknowledged is lost, and nobody has to help."""

import json
import subprocess
import sys

import pytest

from tests.explorer.telling import tell
from tests.store.helpers import ROOT

SEED = 20261121
KILL_COUNT = 320


@pytest.mark.slow
@pytest.mark.timeout(2000)
def test_kills_at_random_moments_lose_nothing():
    command = [sys.executable, "-m", "tests.crash.driver", "--kills", str(KILL_COUNT), "--seed", str(SEED)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)

    tell(f"seed {SEED}: {report}")
    assert report["violations"] == []
    assert report["kill_count"] >= 300
    assert all(report["kills_in"].get(phase, 0) >= 30 for phase in ("resume", "save", "retirement"))
    assert report["torn_count"] >= 10, "hardly a kill left a torn save behind"
    assert report["acknowledged_count"] >= 100
    assert report["checked_count"] >= 300
