"""Trainers that save beside the training are killed at random moments: what they had staged is never lost."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest

from tests.explorer.telling import tell
from tests.faults.driver import PATIENCE_S, TorchToy, Toy, problems, resume, start, until
from tests.faults.killing import PHASES
from tests.store.helpers import ROOT

SEEDS = (20261201, 20261202)


def kill(kill_count, seed, *options):
    """Start who kills so many trainers."""
    command = [
        sys.executable,
        "-m",
        "tests.faults.killing",
        "--kills",
        str(kill_count),
        "--seed",
        str(seed),
        *options,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def report_of(process):
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    tell(output)
    return json.loads(output)


def shared_memory():
    """What lies in shared memory under a name; directories are other tests' runs."""
    return {place.name for place in pathlib.Path("/dev/shm").glob("*") if not place.is_dir()}


def test_kills_lose_nothing_that_was_staged():
    before = shared_memory()
    report = report_of(kill(8, SEEDS[0], "--torch"))
    assert report["violations"] == []
    assert report["kill_count"] == 8
    assert report["resumed_count"] >= 2
    assert until(lambda: shared_memory() <= before, timeout_s=10), "memory was left under a name"


@pytest.mark.parametrize("toy", ["Toy", "TorchToy"])
def test_trainer_that_dies_as_soon_as_a_save_is_staged_loses_nothing(run, toy):
    """Of `TorchToy`, the third save is copied beside the training, which takes a while for so much."""
    script = f"""
toy = {toy}(150 << 20)
checkpointer = Checkpointer(run, toy.state)
for _ in range(2):
    toy.save(checkpointer).wait("COMMITTED")
handle = toy.save(checkpointer)
assert handle.state == "STAGING" or toy.dtype != TorchToy.dtype
handle.wait("STAGED")
os.kill(os.getpid(), signal.SIGKILL)
"""
    with start(script, run) as trainer:
        _, errors = trainer.communicate(timeout=PATIENCE_S)
    assert trainer.returncode == -signal.SIGKILL, errors
    assert resume(run, Toy(150 << 20) if toy == "Toy" else TorchToy(150 << 20)) == 3
    assert problems(run) == []


@pytest.mark.exhaustive
@pytest.mark.timeout(2000)
@pytest.mark.parametrize("kill_count", [200])
def test_many_kills_lose_nothing_that_was_staged(kill_count):
    before = shared_memory()
    reports = [
        report_of(process) for process in [kill(kill_count // 2, seed, "--torch") for seed in SEEDS]
    ]
    assert [report["violations"] for report in reports] == [[], []]
    assert sum(report["kill_count"] for report in reports) == kill_count
    assert kill_count / 4 <= sum(report["group_count"] for report in reports) <= kill_count * 3 / 4
    for phase in PHASES:
        killed = sum(report["kills_in"][phase] for report in reports)
        assert killed >= kill_count // 50, f"hardly a trainer was killed {phase}"
    rescued = sum(report["rescued_count"] for report in reports)
    assert rescued >= kill_count // 12, "hardly a saver had to finish what it was left"
    assert until(lambda: shared_memory() <= before, timeout_s=10), "memory was left under a name"
