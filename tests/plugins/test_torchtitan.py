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


def test_a_killed_training_goes_on_bit_for_bit(tmp_path):
    right, killed, lost = (tmp_path / name for name in ("right", "killed", "lost"))
    trainings.run(SCRIPT, tmp_path / "run-right", right)
    trainings.run(SCRIPT, tmp_path / "run-killed", killed, kill_at=23)
    shutil.copytree(tmp_path / "run-killed", tmp_path / "run-lost")
    trainings.run(SCRIPT, tmp_path / "run-killed", killed)
    assert trainings.compare(right, killed, last_step=TOTAL) == []
    assert len(trainings.read(killed)[22]) == 2
    run = tmp_path / "run-killed" / "checkpoint"
    assert ckptfmt.validate(run)
    names = [name for name in ckptfmt.open(run).weights if name.endswith("attention_norm.weight")]
    weights: Any = ckptfmt.load(run, only=[f"weights:{name}" for name in names], framework="torch")
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.zeros_like(weights["weights"][names[0]]))
    loaded = ckptfmt.State(weights=model, rng=False)
    ckptfmt.load(run, loaded, only=names[0], rename={"weight": names[0]}, writer=(0, 1))
    assert torch.equal(model.weight, weights["weights"][names[0]])

    trainings.run(SCRIPT, tmp_path / "run-lost", lost, "--lose-data")
    assert any("data" in line for line in trainings.compare(right, lost, last_step=TOTAL))
