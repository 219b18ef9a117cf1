"""Run ids of W&B, MLflow and TensorBoard as tags of checkpoints, with the real packages and no network."""

from pathlib import Path

import pytest

pytest.importorskip("mlflow")
pytest.importorskip("wandb")
pytest.importorskip("tensorboard")
pytest.importorskip("transformers")

import mlflow
import torch
import wandb
from torch.utils.tensorboard import SummaryWriter

import ckptfmt
from ckptfmt.__main__ import main
from tests.plugins.transformers_training import make_trainer


@pytest.fixture
def tags(tmp_path, monkeypatch):
    """The tags of a run in each tracker, as docs/operating.md has them."""
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    writer = SummaryWriter(log_dir=str(tmp_path / "tensorboard/lively-fox"))
    run = wandb.init(mode="offline", dir=tmp_path)
    mlflow.start_run()
    found = [
        f"wandb:{wandb.run.id}",
        f"mlflow:{mlflow.active_run().info.run_id}",
        f"tensorboard:{Path(writer.log_dir).name}",
    ]
    assert found[0] == f"wandb:{run.id}"
    assert found[2] == "tensorboard:lively-fox"
    yield found
    writer.close()
    run.finish()
    mlflow.end_run()


@pytest.mark.filterwarnings("ignore")  # of the three packages
def test_ids_of_three_trackers_are_tags_of_each_save(tmp_path, tags, capsys):
    saving = ckptfmt.Saving(saver="thread", tags=tags)
    state = ckptfmt.State(weights=torch.nn.Linear(2, 2))
    with ckptfmt.Checkpointer(tmp_path / "run", state, every=2, saving=saving) as checkpointer:
        for _ in checkpointer.steps(4):
            pass
    trainer = make_trainer(
        tmp_path, args={"max_steps": 2, "save_steps": 1}, ckptfmt={"saving": saving}
    )
    trainer.train()
    for place in (tmp_path / "run", tmp_path / "out/ckptfmt"):
        found = [one.tags for one in ckptfmt.Run(place).list()]
        assert found == [tuple(sorted(tags))] * 2
        for command in ("log", "inspect"):
            capsys.readouterr()
            newest = ckptfmt.Run(place).list()[-1].name
            assert main([command, str(place), *([newest] * (command == "inspect"))]) == 0
            output = capsys.readouterr().out
            assert all(tag in output for tag in tags), command
