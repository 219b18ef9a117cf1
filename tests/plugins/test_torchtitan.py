"""TorchTitan's own trainer on a CPU, with stand-ins for the accelerator that it asks for; killed and resumed."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfmt
from tests.plugins import trainings

pytest.importorskip("torchtitan")
SCRIPT = Path(__file__).with_name("titan_training.py")
TOTAL = 42


def train(run, journal, *options, **how):
    """Train: to the end, or until it is killed."""
    trainings.run(SCRIPT, run, journal, *options, timeout_s=1200, **how)


@pytest.fixture(scope="module", params=[1, 2])
def killed(request, tmp_path_factory):
    """A run that was killed behind step 23 and resumes from step 20, its journals, and how many processes trained."""
    place = tmp_path_factory.mktemp("killed")
    train(place / "run", place / "journal", processes=request.param, kill_at=23)
    trainings.await_savers(place / "run" / "checkpoint")
    return place, request.param


def test_a_killed_training_goes_on_bit_for_bit(tmp_path, killed):
    """With two processes, FSDP2 shards the model over gloo, and each has a loader of its own."""
    place, count = killed
    shutil.copytree(place, tmp_path, dirs_exist_ok=True)
    shutil.copytree(place / "run", tmp_path / "run-lost")
    right, lost, ours = (tmp_path / name for name in ("right", "lost", "journal"))
    train(tmp_path / "run-right", right, processes=count)
    train(tmp_path / "run", ours, processes=count)
    for rank in range(count):
        assert trainings.compare(f"{right}-{rank}", f"{ours}-{rank}", last_step=TOTAL) == []
        assert len(trainings.read(f"{ours}-{rank}")[22]) == 2
    first, last = trainings.read(f"{right}-0"), trainings.read(f"{right}-{count - 1}")
    assert (first[1][0]["data"] == last[1][0]["data"]) is (count == 1)
    run = tmp_path / "run" / "checkpoint"
    assert ckptfmt.validate(run)
    judged, compared, _ = trainings.verdict(run)
    assert (judged, compared >= {"learning rates", "weights"}) == ("verified", True)
    names = [name for name in ckptfmt.open(run).weights if name.endswith("attention_norm.weight")]
    weights: Any = ckptfmt.load(run, only=[f"weights:{name}" for name in names], framework="torch")
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.zeros_like(weights["weights"][names[0]]))
    loaded = ckptfmt.State(weights=model, rng=False)
    ckptfmt.load(run, loaded, only=names[0], rename={"weight": names[0]}, writer=(0, 1))
    assert torch.equal(model.weight, weights["weights"][names[0]])

    train(tmp_path / "run-lost", lost, "--lose-data", processes=count)
    assert any(
        "data" in line for line in trainings.compare(f"{right}-0", f"{lost}-0", last_step=TOTAL)
    )


def test_on_another_number_of_processes_the_data_begin_anew_if_that_is_asked_for(tmp_path, killed):
    """TorchTitan's loaders aren't resharded. Weights and optimizer are those of the checkpoint, bit for bit."""
    place, count = killed
    shutil.copytree(place / "run", tmp_path / "run")
    with pytest.raises(AssertionError, match=r'exclude_from_loading=\["dataloader"\]'):
        train(tmp_path / "run", tmp_path / "refused", processes=3 - count)
    assert not (tmp_path / "refused-0").exists()
    train(tmp_path / "run", tmp_path / "anew", "--without-loader", processes=3 - count, kill_at=21)
    (loaded,), before = (
        trainings.read(tmp_path / "anew-0.loaded")[20],
        trainings.read(place / "journal-0"),
    )
    assert {name: before[20][0][name] for name in loaded} == loaded
    assert trainings.read(tmp_path / "anew-0")[21][0]["data"] == before[1][0]["data"]
    assert (tmp_path / "anew-0.claim").read_text().startswith("S0 ")
    assert ckptfmt.validate(tmp_path / "run" / "checkpoint")
    newest = ckptfmt.Run(place / "run" / "checkpoint").newest().name
    start = ["--without-loader", "--from", place / "run" / "checkpoint" / newest]
    train(tmp_path / "another", tmp_path / "another", *start, processes=3 - count, kill_at=21)
    assert trainings.read(tmp_path / "another-0.loaded")[20] == [loaded]
    assert trainings.read(tmp_path / "another-0")[21][0]["data"] == before[1][0]["data"]


def test_a_training_that_torchtitans_own_manager_saved_goes_on_in_a_run(tmp_path):
    """In its folder it would begin anew, and is refused with what to do. TorchTitan saves no RNG streams."""
    run, theirs, ours = (tmp_path / name for name in ("run", "theirs", "ours"))
    train(run, theirs, "--theirs")
    with pytest.raises(AssertionError, match=f"initial_load_path='{run}/checkpoint/step-42' and"):
        train(run, ours)
    assert not (run / "checkpoint" / "run.json").exists()
    train(run, ours, "--from", run / "checkpoint" / "step-40")
    right, found = trainings.read(f"{theirs}-0"), trainings.read(f"{ours}-0")
    names = right[41][0].keys() - {"rng"}
    assert {step: {name: lines[0][name] for name in names} for step, lines in found.items()} == {
        step: {name: right[step][0][name] for name in names} for step in (41, 42)
    }
    assert ckptfmt.open(run / "ours").step == TOTAL
