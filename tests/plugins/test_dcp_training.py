"""A training under FSDP2 that saves through DCP is killed and resumed: every bit as if nothing had happened."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import state_dict_loader as dcp_load

import ckptfmt
from ckptfmt.plugins.dcp import CkptfmtReader
from tests.plugins import trainings
from tests.plugins.dcp_training import EVERY, STEPS, make_model

SCRIPT = Path(__file__).with_name("dcp_training.py")
#: The step before is saved beside the training: the kill meets that save, or comes just after it.
KILL_AT = 4 * EVERY + 1


def train(run, journals, *options, kill_at=None):
    for path in (run, journals):
        path.mkdir(exist_ok=True)
    trainings.run(SCRIPT, run, journals, *options, processes=2, kill_at=kill_at)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_training_that_is_killed_goes_on_bit_by_bit(tmp_path):
    train(tmp_path / "undisturbed", tmp_path / "right")
    train(tmp_path / "killed", tmp_path / "journals", kill_at=KILL_AT)
    shutil.copytree(tmp_path / "killed", tmp_path / "control")
    train(tmp_path / "killed", tmp_path / "journals")
    train(tmp_path / "control", tmp_path / "forgetful", "forgetful")

    for rank in range(2):
        name = f"rank-{rank}.jsonl"
        assert (
            trainings.compare(
                tmp_path / "right" / name, tmp_path / "journals" / name, last_step=STEPS
            )
            == []
        )
        resumed_at = min(trainings.read(tmp_path / "forgetful" / name))
        assert resumed_at > EVERY, "it did resume"
        differs = trainings.compare(
            tmp_path / "right" / name, tmp_path / "forgetful" / name, last_step=STEPS
        )
        assert any(f"step {resumed_at} differs in" in line and "rng" in line for line in differs), (
            "the control"
        )
        assert any("weights" in line for line in differs)

    last = tmp_path / "killed" / f"step-{STEPS // EVERY * EVERY}"
    command = [sys.executable, "-m", "ckptfmt", "validate", str(last)]
    assert subprocess.run(command, check=False, capture_output=True, timeout=120).returncode == 0
    plain, through_dcp = make_model(), make_model().state_dict()
    report: Any = ckptfmt.load(last, ckptfmt.State(weights=plain, rng=False), only="weights:*")
    assert report.step == STEPS // EVERY * EVERY
    dcp_load.load({"model": through_dcp}, storage_reader=CkptfmtReader(last), no_dist=True)
    saved = trainings.read(tmp_path / "right" / "rank-0.jsonl")[report.step][0]["weights"]
    assert trainings.digest(plain.state_dict()) == trainings.digest(through_dcp) == saved
    with torch.random.fork_rng():
        assert trainings.digest(make_model().state_dict()) != saved, "the control"
