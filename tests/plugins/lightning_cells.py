"""Trainings with Lightning that are saved at all moments and resumed, for test_lightning_resumes.py.

One process does many fits: ``lightning_cells.py FOLDER KIND ACTION...``. The actions are done in
order: ``reference`` trains undisturbed and saves at every moment; ``killed`` trains until the
process dies by SIGKILL; ``stopped`` trains to a step, several times; ``resume`` continues each
saved checkpoint with another seed, and writes to ``resumed-RANK.json`` how that differed.
"""

import json
import logging
import os
import random
import signal
import sys
import warnings
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities import CombinedLoader
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)

from ckptfmt.plugins.lightning import CkptfmtIO, CkptfmtModelParallelStrategy, ExactResume
from tests.plugins.trainings import digest, rng_digest

RANK = int(os.environ.get("RANK", "0"))
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
#: Batches of an epoch, of 2 rows for each process, and epochs.
BATCHES = 4
EPOCHS = 3
ROWS = 2 * BATCHES * WORLD
#: The seeds of the first launch, and of the launches that resume.
SEEDS = 1, 77


class Rows(Dataset):  # type: ignore[type-arg]
    """Rows that know their number, with or without random numbers."""

    def __init__(self, count=ROWS, *, noise=False):
        self.count = count
        self.noise = noise

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        noise = torch.rand(4) if self.noise else torch.zeros(4)
        return torch.full((4,), float(index)) + noise, index


class Stream(IterableDataset):  # type: ignore[type-arg]
    """Rows in an order drawn at the start of each epoch, without a length."""

    def __iter__(self):
        for index in torch.randperm(ROWS).tolist():
            yield torch.full((4,), float(index)), index


class OfEpoch(Sampler):  # type: ignore[type-arg]
    """A sampler whose order depends on the epoch alone."""

    def __init__(self):
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return ROWS

    def __iter__(self):
        order = torch.Generator().manual_seed(self.epoch)
        return iter(torch.randperm(ROWS, generator=order).tolist())


def generator():
    return torch.Generator().manual_seed(random.randrange(1 << 30))  # by the seed of the launch


def stateful(*args, **kwargs):
    from torchdata.stateful_dataloader import StatefulDataLoader  # noqa: PLC0415 - optional

    return StatefulDataLoader(*args, **kwargs)


shuffled = partial(DataLoader, batch_size=2, shuffle=True)
LOADERS: dict[str, Any] = {
    "plain": lambda: shuffled(Rows()),
    "noise": lambda: shuffled(Rows(noise=True)),
    "workers": lambda: shuffled(Rows(noise=True), num_workers=2),
    "lasting": lambda: shuffled(Rows(), num_workers=1, persistent_workers=True),
    "generator": lambda: shuffled(Rows(), generator=generator()),
    "weighted": lambda: DataLoader(
        Rows(), 2, sampler=WeightedRandomSampler([1.0 + row for row in range(ROWS)], ROWS)
    ),
    "batches": lambda: DataLoader(
        Rows(),
        batch_sampler=BatchSampler(
            RandomSampler(Rows(), generator=generator()), 2, drop_last=False
        ),
    ),
    "epoch": lambda: DataLoader(Rows(), 2, sampler=OfEpoch()),
    "stateful": lambda: stateful(Rows(), batch_size=2, shuffle=True),
    "stateful workers": lambda: stateful(Rows(), batch_size=2, shuffle=True, num_workers=1),
    "stream": lambda: DataLoader(Stream(), 2),
    "cycle": lambda: {"long": shuffled(Rows()), "short": shuffled(Rows(4))},
    "shortest": lambda: CombinedLoader([shuffled(Rows()), shuffled(Rows(12))], "min_size"),
    "mixed": lambda: [shuffled(Rows()), stateful(Rows(), batch_size=2, shuffle=True)],
}


@dataclass
class Kind:
    """A kind of training: loader, options of the Trainer, what else it has."""

    loader: str = "plain"
    validates: bool = False
    plateau: bool = False
    strategy: Any = None
    exact: bool = True
    options: dict[str, Any] = field(default_factory=dict)


def sharded(data=2, tensor=1):
    return CkptfmtModelParallelStrategy(
        data_parallel_size=data, tensor_parallel_size=tensor, saving={"saver": "inline"}
    )


STEPS = {"max_steps": BATCHES * EPOCHS, "max_epochs": -1}
KINDS = {name: Kind(name) for name in LOADERS} | {
    "steps": Kind(options=STEPS),
    "stateful steps": Kind("stateful", options=STEPS),
    "validation": Kind(validates=True),
    "validation steps": Kind(validates=True, options=STEPS),
    "validation 2": Kind(validates=True, options={"val_check_interval": 2}),
    "validation half": Kind("stateful", validates=True, options={"val_check_interval": 0.5}),
    "validation 3": Kind(
        validates=True, options={"val_check_interval": 3, "check_val_every_n_epoch": None}
    ),
    "every 2nd validation": Kind(validates=True, options={"check_val_every_n_epoch": 2}),
    "plateau": Kind(validates=True, plateau=True),
    "limit": Kind(options={"limit_train_batches": 3}),
    "limit stateful": Kind("stateful", options={"limit_train_batches": 3}),
    "accumulate": Kind(options={"accumulate_grad_batches": 2}),
    "reload": Kind(options={"reload_dataloaders_every_n_epochs": 1}),
    "reload 2": Kind(options={"reload_dataloaders_every_n_epochs": 2}),
    "inexact": Kind(exact=False),
    "sharded": Kind(strategy=sharded),
    "tensors": Kind(strategy=partial(sharded, 1, 2)),
    "without plug-in": Kind(strategy=partial(ModelParallelStrategy, 2, 1)),
}


class Net(LightningModule):
    """A small net whose loss depends on rows, weights and random numbers."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1)
        )
        self.numbers = self.loss = None

    def configure_model(self):
        if self.kind.strategy is None:
            return
        if isinstance(self.layers[0].weight, torch.nn.Parameter) and self.device_mesh.size(1) > 1:
            ways = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            parallelize_module(self.layers, self.device_mesh["tensor_parallel"], ways)
        else:
            fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])

    def on_save_checkpoint(self, checkpoint):
        checkpoint["arrays"] = {"uint32": np.arange(3, dtype=np.uint32)}
        checkpoint["empty"] = {}

    def on_load_checkpoint(self, checkpoint):
        array = checkpoint["arrays"]["uint32"]
        assert type(array) is np.ndarray
        assert array.dtype == np.uint32
        assert checkpoint["empty"] == {}

    def training_step(self, batch, _batch_idx):
        rows = torch.utils._pytree.tree_leaves(batch)
        self.numbers = [numbers.tolist() for numbers in rows[1::2]]
        self.loss = sum(
            (self.layers(inputs / 8 + torch.randn_like(inputs)) - 1).square().mean()
            for inputs in rows[::2]
        )
        self.log("loss", self.loss)
        return self.loss

    def validation_step(self, batch, _batch_idx):
        inputs, _ = batch
        self.log("val_loss", self.layers(inputs / 8 + torch.randn_like(inputs)).square().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        if self.kind.plateau:  # changes the learning rate after each validation
            scheduler: Any = torch.optim.lr_scheduler.ReduceLROnPlateau(
                optimizer, patience=0, threshold=10.0
            )
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"},
            }
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


#: The moments of a step or epoch at which a checkpoint is saved, in their order.
MOMENTS = ("batch", "validation", "epoch")


class Notes(Callback):
    """Notes facts at each moment under ``STEP-MOMENT``, and saves checkpoints of that name.

    Args:
        facts: receives the facts.
        saves: the folder of checkpoints; None to save none.
        kill_at: the step behind which the process dies.
    """

    def __init__(self, facts, saves=None, kill_at=None):
        self.facts = facts
        self.saves = saves
        self.kill_at = kill_at

    def _note(self, trainer, moment, **facts):
        step = trainer.fit_loop.epoch_loop.total_batch_idx + 1
        name = f"{step:02}-{moment}"
        lr = trainer.optimizers[0].param_groups[0]["lr"]
        mine = {"epoch": trainer.current_epoch, "lr": lr, "rng": rng_digest(), **facts}
        self.facts.setdefault(name, []).append(mine)
        if self.saves is not None:
            trainer.save_checkpoint(self.saves / name)
        if moment == "batch" and step == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_end(self, trainer, pl_module, *_):
        self._note(
            trainer,
            "batch",
            loss=pl_module.loss.item(),
            numbers=pl_module.numbers,
            weights=digest(pl_module.state_dict()),
            optimizer=digest(trainer.optimizers[0].state_dict()),
        )

    def on_validation_end(self, trainer, _pl_module):
        if not trainer.sanity_checking:
            self._note(trainer, "validation", loss=trainer.callback_metrics["val_loss"].item())

    def on_train_epoch_end(self, trainer, _pl_module):
        self._note(trainer, "epoch")


def fit(kind, notes, seed, path=None, **options):
    """Train with a new Trainer; return the reasons for which a resume isn't exact."""
    seed_everything(seed + RANK, verbose=False)
    resume = ExactResume()
    settings = {
        "max_epochs": EPOCHS,
        "accelerator": "cpu",
        "devices": WORLD,
        "strategy": kind.strategy() if kind.strategy else "ddp" if WORLD > 1 else "auto",
        "enable_checkpointing": False,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        **kind.options,
        **options,
    }
    trainer = Trainer(
        plugins=[CkptfmtIO(saver="inline")],
        callbacks=[resume, notes] if kind.exact else [notes],
        **settings,
    )
    held_out = DataLoader(Rows(4 * WORLD), batch_size=2) if kind.validates else None
    trainer.fit(Net(kind), LOADERS[kind.loader](), held_out, ckpt_path=path)
    return list(resume.differences)


def position(name):
    return int(name[:2]), MOMENTS.index(name[3:])


def difference(reference, found, name):
    """Return how what a resume from a checkpoint did differs from the undisturbed training."""
    for key in sorted(reference, key=position):
        if position(key) <= position(name):
            continue
        if key not in found:
            return f"{key} is missing"
        if found[key] != reference[key]:
            names = [
                fact for fact in reference[key][0] if found[key][0][fact] != reference[key][0][fact]
            ]
            return f"{key} differs in {', '.join(names) or 'number'}"
    return next((f"{key} is too many" for key in found if key not in reference), "")


def main():
    folder, name, *actions = sys.argv[1:]
    for logger in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    kind = KINDS[name]
    place = Path(folder)
    reference: dict[str, Any] = {}
    found = {}
    for action, _, argument in (told.partition("=") for told in actions):
        if action == "reference":
            fit(kind, Notes(reference, place / "reference"), SEEDS[0])
        elif action == "killed":
            fit(kind, Notes({}, place / "killed", kill_at=int(argument)), SEEDS[0])
        elif action == "stopped":
            for step in map(int, argument.split(",")):
                notes = Notes({}, place / f"stopped-{step}")
                fit(kind, notes, SEEDS[0], max_steps=step, max_epochs=-1)
        elif action == "refused":
            try:
                fit(kind, Notes({}), SEEDS[0])
            except TypeError as error:
                found["refused"] = ["", [str(error)]]
        for path in sorted(place.glob(argument)) if action == "resume" else ():
            facts: dict[str, Any] = {}
            reasons = fit(kind, Notes(facts, place / "again"), SEEDS[1], path)
            found[str(path.relative_to(place))] = [difference(reference, facts, path.name), reasons]
    (place / f"resumed-{RANK}.json").write_text(json.dumps(found))


main()
