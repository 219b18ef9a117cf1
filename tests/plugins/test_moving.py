"""Coming from other frameworks: the ways of the page about moving, with files that these frameworks wrote."""

import re
from pathlib import Path

import pytest

pytest.importorskip("lightning")

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer

import ckptfmt
from ckptfmt.__main__ import main

PAGE = Path(__file__).resolve().parents[2] / "docs/moving.md"

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's advice


def snippet(section):
    """Return the Python example of a section of the page."""
    (found,) = re.findall(
        rf"^## {section}\n.*?```python no-run\n(.*?)```",
        PAGE.read_text("utf-8"),
        re.DOTALL | re.MULTILINE,
    )[:1]
    return found


def trained_bits(model, optimizer):
    """Make a step, and return all bits of model and optimizer."""
    optimizer.zero_grad()
    model(torch.arange(8.0).reshape(2, 4)).square().sum().backward()
    optimizer.step()
    state = optimizer.state_dict()["state"]
    moments = [value for one in state.values() for value in one.values()]
    return [value.detach().numpy().tobytes() for value in (*model.state_dict().values(), *moments)]


def test_a_checkpoint_of_lightning_goes_on_in_plain_torch_bit_for_bit(tmp_path):
    """The weights, the optimizer and the step of a `.ckpt` file, loaded into live objects of another program."""

    class Net(LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 2)

        def forward(self, batch):
            return self.layer(batch)

        def training_step(self, batch, _):
            return self.layer(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    net = Net()
    rows: torch.utils.data.Dataset[torch.Tensor] = torch.randn(12, 4)  # type: ignore[assignment]
    loader = torch.utils.data.DataLoader(rows, batch_size=2)
    trainer = Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(net, loader)
    trainer.save_checkpoint(tmp_path / "last.ckpt")

    assert main(["convert", str(tmp_path / "last.ckpt"), str(tmp_path / "imported")]) == 0

    with ckptfmt.open(tmp_path / "imported") as checkpoint:
        assert checkpoint.step == trainer.global_step == 6
    fresh = Net()
    optimizer = fresh.configure_optimizers()
    ckptfmt.load(tmp_path / "imported", ckptfmt.State(weights=fresh), only="weights:*")
    optimizer.load_state_dict(ckptfmt.optimizer_state_dict(tmp_path / "imported", 0))
    assert trained_bits(fresh, optimizer) == trained_bits(net, trainer.optimizers[0])


def test_a_directory_of_save_pretrained_loads_into_the_model(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=1, n_embd=8, n_positions=8, vocab_size=16)
    model = transformers.GPT2LMHeadModel(config)
    model.save_pretrained(tmp_path / "hf")

    assert (
        main(["convert", str(tmp_path / "hf"), str(tmp_path / "imported"), "--step", "1200"]) == 0
    )

    fresh = transformers.GPT2LMHeadModel(config)
    report = ckptfmt.load(tmp_path / "imported", ckptfmt.State(weights=fresh))
    assert report.step == 1200
    for name, value in model.state_dict().items():
        assert torch.equal(value, fresh.state_dict()[name]), name


def test_what_orbax_restores_is_saved_as_the_page_shows(tmp_path, monkeypatch):
    jax = pytest.importorskip("jax")
    orbax = pytest.importorskip("orbax.checkpoint")
    params = {
        "dense": {
            "kernel": jax.numpy.arange(6.0).reshape(2, 3),
            "bias": jax.numpy.ones(3, "bfloat16"),
        }
    }
    with orbax.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "orbax", {"params": params, "step": 1200})
    monkeypatch.chdir(tmp_path)

    exec(
        compile(
            snippet("From Orbax").replace("/runs/old/1200", str(tmp_path / "orbax")),
            "moving.md",
            "exec",
        ),
        {},
    )

    with ckptfmt.open(tmp_path / "imported") as checkpoint:
        assert checkpoint.step == 1200
        kernel = checkpoint.weights["dense/kernel"][:]
        assert np.array_equal(kernel, np.arange(6.0, dtype=np.float32).reshape(2, 3))
        assert "dense/bias" in checkpoint.weights
