"""A training moves from each framework to each: weights and optimizer bit for bit, or a refusal by name."""

import functools
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("lightning")
pytest.importorskip("transformers")

import torch
from lightning.pytorch import Callback as LightningCallback
from lightning.pytorch import LightningModule, Trainer
from torch.distributed.checkpoint import state_dict_loader as dcp_load
from torch.distributed.checkpoint import state_dict_saver as dcp_save
from torch.distributed.checkpoint.api import CheckpointException
from transformers import TrainerCallback, TrainingArguments

import ckptfmt
from ckptfmt.plugins.accelerate import CkptfmtAccelerator
from ckptfmt.plugins.dcp import CkptfmtReader, CkptfmtWriter
from ckptfmt.plugins.lightning import CkptfmtIO
from ckptfmt.plugins.transformers import CkptfmtTrainer
from tests.plugins.test_dcp_optimizers import AppState, bits

pytestmark = pytest.mark.filterwarnings("ignore")  # advice of the frameworks

STEPS = 3


class Net(LightningModule):
    """A model of every framework."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.inner = torch.nn.Linear(6, 5)
        self.norm = torch.nn.BatchNorm1d(5)
        self.outer = torch.nn.Linear(5, 2)
        self.seed = seed
        self.begun: Any = lambda: None

    def forward(self, x: Any) -> dict[str, Any]:
        return {"loss": self.outer(self.norm(self.inner(x)).relu()).square().mean()}

    def training_step(self, batch: Any, _: int) -> Any:
        return self(batch["x"])["loss"]

    def configure_optimizers(self) -> Any:
        groups: list[dict[str, Any]] = [
            {"params": [self.outer.weight, self.inner.bias], "lr": 0.1 / self.seed},
            {"params": [self.inner.weight, *self.norm.parameters(), self.outer.bias]},
        ]
        return torch.optim.AdamW(groups, lr=0.01 / self.seed, betas=(0.9 - self.seed / 100, 0.99))


ROWS = [{"x": torch.linspace(-1, 1, 6) * (row + 1)} for row in range(4 * STEPS)]


def lightning_of(folder: Path, steps: int, *callbacks: Any) -> Trainer:
    return Trainer(
        max_steps=steps, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, plugins=[CkptfmtIO()],
        callbacks=[*callbacks], default_root_dir=folder,
    )  # fmt: skip


def trainer_of(
    folder: Path, net: Net, optimizer: Any, steps: int, *callbacks: Any, **options: Any
) -> Any:
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=4, report_to=[],
        save_strategy="no" if callbacks else "steps", save_steps=steps, use_cpu=True,
        disable_tqdm=True, remove_unused_columns=False,
    )  # fmt: skip
    return CkptfmtTrainer(
        model=net, args=arguments, train_dataset=ROWS, optimizers=(optimizer, None),
        callbacks=[*callbacks], ckptfmt={"saver": "inline", **options},
    )  # fmt: skip


def train(net, optimizer, steps=STEPS):
    for step in range(steps):
        batch = torch.stack([row["x"] for row in ROWS[4 * step : 4 * step + 4]])
        net(batch)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()


# --- saves: each returns the path of a checkpoint, with model and optimizer as saved ----------------


def save_plain(folder):
    net = Net(1)
    optimizer = net.configure_optimizers()
    train(net, optimizer)
    ckptfmt.save(folder / "c", ckptfmt.State(weights=net, optimizer=optimizer), step=STEPS)
    return folder / "c", net, optimizer


def save_dcp(folder):
    net = Net(1)
    optimizer = net.configure_optimizers()
    train(net, optimizer)
    app = {"app": AppState(net, optimizer)}
    dcp_save.save(app, storage_writer=CkptfmtWriter(folder / "c-3"), no_dist=True)
    return folder / "c-3", net, optimizer


def save_trainer(folder):
    net = Net(1)
    optimizer = net.configure_optimizers()
    trainer_of(folder / "hf", net, optimizer, STEPS).train()
    return folder / "hf" / "ckptfmt", net, optimizer


def save_accelerate(folder):
    net = Net(1)
    accelerator = CkptfmtAccelerator(cpu=True)
    model, optimizer = accelerator.prepare(net, net.configure_optimizers())
    train(model, optimizer)
    accelerator.save_state(str(folder / "c"))
    accelerator.end_training()
    return folder / "c", net, optimizer.optimizer


def save_lightning(folder):
    net = Net(1)
    trainer = lightning_of(folder, STEPS)
    loader: Any = torch.utils.data.DataLoader(ROWS, batch_size=4)  # type: ignore[arg-type]
    trainer.fit(net, loader)
    trainer.save_checkpoint(folder / "c")
    trainer.strategy.teardown()
    return folder / "c", net, trainer.optimizers[0]


# --- loads: each returns model and optimizer as loaded, before a step is trained --------------------


def load_live(path, net, optimizer, allow=("unexpected",)):
    """Load into live objects, as a hook of any framework does."""
    state = ckptfmt.State(weights=net, optimizer=optimizer, rng=False)
    ckptfmt.load(path, state, allow=allow)


def load_plain(path: Path, _folder: Path) -> tuple[Any, Any]:
    net = Net(2)
    optimizer = net.configure_optimizers()
    train(net, optimizer, 1)
    load_live(path, net, optimizer)
    return net, optimizer


def load_dcp(path: Path, _folder: Path) -> tuple[Any, Any]:
    net = Net(2)
    optimizer = net.configure_optimizers()
    app = AppState(net, optimizer)
    dcp_load.load({"app": app}, storage_reader=CkptfmtReader(path), no_dist=True)
    return net, optimizer


class AtBegin(TrainerCallback):
    """Load when a Trainer begins, and note what is there then."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: Any = None

    def on_train_begin(self, *_: Any, model: Any = None, optimizer: Any = None, **__: Any) -> None:
        # The Trainer's scheduler has set initial_lr, and its own schedule goes on.
        load_live(self.path, model, optimizer, allow=("unexpected", "missing"))
        self.found = bits(model, getattr(optimizer, "optimizer", optimizer))


class Noting(TrainerCallback):
    """Note what is there when a Trainer begins."""

    found: Any = None

    def on_train_begin(self, *_: Any, model: Any = None, optimizer: Any = None, **__: Any) -> None:
        self.found = bits(model, getattr(optimizer, "optimizer", optimizer))


class AtStart(LightningCallback):
    """Load when Lightning begins, and note what is there then."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: Any = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        load_live(self.path, pl_module, trainer.optimizers[0])
        self.found = bits(pl_module, trainer.optimizers[0])


def load_trainer(path, folder):
    net = Net(2)
    noted = AtBegin(path)
    trainer_of(folder / "new", net, net.configure_optimizers(), 1, noted).train()
    return noted.found


def load_accelerate(path, _folder):
    net = Net(2)
    accelerator = CkptfmtAccelerator(cpu=True)
    _, optimizer = accelerator.prepare(net, net.configure_optimizers())
    accelerator.load_state(
        str(path),
        load_kwargs={"only": ["weights:*", "optimizer:*"], "allow": ["unexpected", "missing"]},
    )
    return net, optimizer.optimizer


def load_lightning(path, folder):
    net = Net(2)
    noted = AtStart(path)
    loader: Any = torch.utils.data.DataLoader(ROWS, batch_size=4)  # type: ignore[arg-type]
    lightning_of(folder, 1, noted).fit(net, loader)
    return noted.found


SAVES = {
    "plain": save_plain,
    "dcp": save_dcp,
    "trainer": save_trainer,
    "accelerate": save_accelerate,
    "lightning": save_lightning,
}
LOADS = {
    "plain": load_plain,
    "dcp": load_dcp,
    "trainer": load_trainer,
    "accelerate": load_accelerate,
    "lightning": load_lightning,
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a function that returns the checkpoint of a framework, made once."""

    @functools.cache
    def of(framework):
        path, net, optimizer = SAVES[framework](tmp_path_factory.mktemp(framework))
        return path, bits(net, optimizer)

    return of


def without_schedule(found):
    """Return bits without the option of a scheduler, which doesn't move with the optimizer."""
    options, tensors = found
    return [{key: one[key] for key in one if key != "initial_lr"} for one in options], tensors


CELLS = [(one, other) for one in SAVES for other in LOADS if (one, other) != ("lightning", "dcp")]


@pytest.mark.parametrize(("framework", "to"), CELLS)
def test_a_training_moves(saved, framework, to, tmp_path):
    path, expected = saved(framework)
    found = LOADS[to](path, tmp_path)
    found = bits(*found) if isinstance(found[0], torch.nn.Module) else found
    assert without_schedule(found) == without_schedule(expected)


def test_lightning_to_dcp_is_refused_by_name(saved, tmp_path):
    """CkptfmtIO gets an optimizer without the names of parameters; the remedy takes positions."""
    path, expected = saved("lightning")
    with pytest.raises(CheckpointException, match=r"positions .* ckptfmt\.load\(path"):
        load_dcp(path, tmp_path)
    again = {"app": AppState(*load_plain(path, tmp_path))}
    dcp_save.save(again, storage_writer=CkptfmtWriter(tmp_path / "c-3"), no_dist=True)
    assert bits(*load_dcp(tmp_path / "c-3", tmp_path)) == expected


FOREIGN = [framework for framework in SAVES if framework != "accelerate"]


@pytest.mark.parametrize("framework", FOREIGN)
def test_accelerate_names_what_another_program_lacks(saved, framework):
    accelerator = CkptfmtAccelerator(cpu=True)
    net = Net(2)
    accelerator.prepare(net, net.configure_optimizers())
    with pytest.raises(ckptfmt.CkptError, match="extra:accelerator"):
        accelerator.load_state(str(saved(framework)[0]))


@pytest.mark.parametrize("framework", [name for name in SAVES if name != "trainer"])
def test_a_trainer_begins_a_run_from_another_program(saved, framework, tmp_path):
    """A Trainer said that it can't find a valid checkpoint; it names init_from."""
    path, expected = saved(framework)
    net = Net(2)
    optimizer = net.configure_optimizers()
    trainer = trainer_of(tmp_path / "new", net, optimizer, 1)
    with pytest.raises(ValueError, match=r"'init_from': ckptfmt\.InitFrom"):
        trainer.train(resume_from_checkpoint=str(path))
    initial = ckptfmt.InitFrom(
        path, only=["weights:*", "optimizer:*"], allow=["missing", "unexpected"]
    )
    noted = Noting()
    trainer = trainer_of(tmp_path / "new", net, optimizer, 1, noted, init_from=initial)
    trainer.train()
    assert without_schedule(noted.found) == without_schedule(expected)


@pytest.mark.parametrize("framework", [name for name in SAVES if name != "lightning"])
def test_lightning_names_the_way_from_another_program(saved, framework, tmp_path):
    """`fit` raised KeyError 'pytorch-lightning_version'."""
    loader: Any = torch.utils.data.DataLoader(ROWS, batch_size=4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"on_train_start: ckptfmt\.load"):
        lightning_of(tmp_path, 5).fit(Net(2), loader, ckpt_path=str(saved(framework)[0]))
