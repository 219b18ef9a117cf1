"""torchft's own manager, optimizer and DDP in a State: no plug-in is needed. Killed and resumed on one replica."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfmt
from tests.plugins import trainings

pytest.importorskip("torchft")
SCRIPT = Path(__file__).with_name("torchft_training.py")
TOTAL = 42


def test_a_killed_replica_goes_on_bit_for_bit(tmp_path):
    right, killed, lost = (tmp_path / name for name in ("right", "killed", "lost"))
    trainings.run(SCRIPT, tmp_path / "run-right", right)
    trainings.run(SCRIPT, tmp_path / "run-killed", killed, kill_at=28)
    shutil.copytree(tmp_path / "run-killed", tmp_path / "run-lost")
    trainings.run(SCRIPT, tmp_path / "run-killed", killed)
    assert trainings.compare(right, killed, last_step=TOTAL) == []
    assert len(trainings.read(killed)[27]) == 2
    assert Path(f"{killed}.claim").read_text() == "T1 ()"
    assert ckptfmt.validate(tmp_path / "run-killed")
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 8))
    loaded: Any = ckptfmt.load(tmp_path / "run-killed", ckptfmt.State(weights=model, rng=False))
    assert loaded.step == TOTAL
    assert trainings.digest(model.state_dict()) == trainings.read(right)[TOTAL][0]["weights"]

    trainings.run(SCRIPT, tmp_path / "run-lost", lost, "--lose-rng")
    found = trainings.compare(right, lost, last_step=TOTAL)
    assert any("weights" in line and "rng" in line for line in found)
