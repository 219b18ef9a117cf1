"""Ray Train: two workers, one of which is killed in mid-run and started again; then another number of workers."""

from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfmt
from tests.plugins import trainings

ray: Any = pytest.importorskip("ray")
SCRIPT = Path(__file__).with_name("ray_training.py")
TOTAL = 42
ENV = {"RAY_AUTH_MODE": "disabled", "RAY_TRAIN_V2_ENABLED": "1", "RAY_USAGE_STATS_ENABLED": "0"}


def train(directory, name, *, kill_at=0, workers=2, last_step=TOTAL):
    """Train under Ray, and return the journals of the workers; worker 1 kills itself behind step `kill_at`, once."""
    arguments = [directory / "storage", name, directory / name, workers, last_step, kill_at]
    told = trainings.run(SCRIPT, *arguments, env=ENV, timeout_s=400)
    assert "TRAINED" in told, told[-4000:]
    return [Path(f"{directory / name}-{rank}") for rank in range(workers)], told


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    directory = tmp_path_factory.mktemp("ray")
    return directory, train(directory, "right")[0], *train(directory, "killed", kill_at=28)


def test_a_killed_worker_is_started_again_and_goes_on_bit_for_bit(trained):
    directory, right, killed, told = trained
    for ours, theirs in zip(killed, right, strict=True):
        assert trainings.compare(theirs, ours, last_step=TOTAL) == []
        assert len(trainings.read(ours)[26]) == 2
    assert Path(f"{killed[0]}.claim").read_text() == "T1 ()"
    run = directory / "storage" / "killed" / "ckptfmt"
    assert ckptfmt.validate(run)
    assert [one.launch for one in ckptfmt.Run(run).list()][-1] == 2
    newest = ckptfmt.Run(run).newest()
    assert newest is not None
    assert f"REPORTED {run / newest.name}" in told
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 8))
    loaded: Any = ckptfmt.load(run, ckptfmt.State(weights=model, rng=False), writer=(0, 1))
    assert loaded.step == TOTAL
    assert trainings.digest(model.state_dict()) == trainings.read(right[0])[TOTAL][0]["weights"]


def test_the_streams_of_a_worker_decide_what_is_compared(trained):
    """The negative control: the two workers draw other numbers for dropout."""
    _, right, _, _ = trained
    first, second = (trainings.read(one)[TOTAL][0] for one in right)
    assert first["weights"] == second["weights"]
    assert first["rng"] != second["rng"]
    assert first["ids"] != second["ids"]


def test_the_run_goes_on_with_another_number_of_workers(trained):
    directory, _, _, _ = trained
    (journal,), _ = train(directory, "right", workers=1, last_step=TOTAL + 4)
    lines = trainings.read(journal)
    both = [trainings.read(Path(f"{directory / 'right'}-{rank}")) for rank in range(2)]
    assert min(step for step in lines if len(lines[step]) == 1 and step > TOTAL) == TOTAL + 1
    sampler = ckptfmt.Sampler(60, global_batch=4, seed=3, worker=(0, 1))
    for step in range(1, TOTAL + 5):
        ids = (
            lines[step][-1]["numbers"]
            if step > TOTAL
            else both[0][step][0]["numbers"] + "," + both[1][step][0]["numbers"]
        )
        assert sorted(map(int, ids.split(","))) == sorted(sampler.indices(step - 1))
    assert Path(f"{journal}.claim").read_text().startswith("S1 ")
