"""Ray Train: two workers, one of which is killed in mid-run and started again; then another number of workers."""

from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfmt
from tests.plugins import trainings

ray: Any = pytest.importorskip("ray")
pytestmark = (
    pytest.mark.slow
)  # minutes in few tests: begun last, the file alone would be waited for
SCRIPT = Path(__file__).with_name("ray_training.py")
TOTAL = 42
ENV = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray's controller takes one report of each worker per check: 2 s for each step by default.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1",
}
#: Name, workers, last step, and the step behind which worker 1 kills itself once; 0 for none.
TRAININGS = (
    f"right,2,{TOTAL},0",
    f"killed,2,{TOTAL},28",
    "forgetful,2,30,28",
    f"right,1,{TOTAL + 4},0",
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return the directory of all trainings, which one cluster runs in order, and the output."""
    directory = tmp_path_factory.mktemp("ray")
    told = trainings.run(SCRIPT, directory, *TRAININGS, env=ENV, timeout_s=900)
    assert "TRAINED" in told, told[-4000:]
    return directory, told


def journal(directory, name, rank):
    return directory / f"{name}-{rank}"


def test_a_killed_worker_is_started_again_and_goes_on_bit_for_bit(trained):
    directory, told = trained
    right, killed = (
        [journal(directory, name, rank) for rank in range(2)] for name in ("right", "killed")
    )
    for ours, theirs in zip(killed, right, strict=True):
        assert trainings.compare(theirs, ours, last_step=TOTAL) == []
        assert len(trainings.read(ours)[26]) == 2
    assert Path(f"{killed[0]}.claim").read_text() == "T1 ()"
    run = directory / "storage" / "killed" / "ckptfmt"
    assert ckptfmt.validate(run)
    judged, compared, _ = trainings.verdict(run)
    assert (judged, compared >= {"samples", "loss", "batch", "weights"}) == ("verified", True)
    assert [one.launch for one in ckptfmt.Run(run).list()][-1] == 2
    newest = ckptfmt.Run(run).newest()
    assert newest is not None
    assert f"REPORTED {run / newest.name}" in told
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 8)
    )
    loaded: Any = ckptfmt.load(run, ckptfmt.State(weights=model, rng=False), writer=(0, 1))
    assert loaded.step == TOTAL
    assert trainings.digest(model.state_dict()) == trainings.read(right[0])[TOTAL][0]["weights"]


def test_the_comparison_sees_streams_and_samples_that_are_not_restored(trained):
    """The negative control: worker 0 forgets its RNG streams, worker 1 where its sampler stood."""
    directory, _ = trained
    streams, samples = (
        trainings.compare(
            journal(directory, "right", rank), journal(directory, "forgetful", rank), last_step=30
        )
        for rank in range(2)
    )
    assert streams[0] == "step 26 differs in loss, optimizer, rng, weights"
    assert samples[0] == "step 26 differs in ids, loss, numbers, optimizer, weights"
    judged, what, _ = trainings.verdict(directory / "storage" / "forgetful" / "ckptfmt")
    assert (judged, what) == ("refuted", {"rng"})


def test_the_run_goes_on_with_another_number_of_workers(trained):
    directory, _ = trained
    both = [trainings.read(journal(directory, "right", rank)) for rank in range(2)]
    lines = both[0]
    assert max(both[1]) == TOTAL
    assert [len(lines[step]) for step in range(TOTAL, TOTAL + 5)] == [1] * 5
    sampler = ckptfmt.Sampler(60, global_batch=4, seed=3, worker=(0, 1))
    for step in range(1, TOTAL + 5):
        ids = (
            lines[step][-1]["numbers"]
            if step > TOTAL
            else both[0][step][0]["numbers"] + "," + both[1][step][0]["numbers"]
        )
        assert sorted(map(int, ids.split(","))) == sorted(sampler.indices(step - 1))
    assert Path(f"{directory / 'right'}-0.claim").read_text().startswith("S1 ")
