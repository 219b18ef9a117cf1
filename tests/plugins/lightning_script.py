"""A training with Lightning, of which tests/plugins/test_lightning.py compares every bit: run by that."""

import argparse
import logging
import os
import warnings
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.distributed.fsdp import fully_shard

from ckptfmt.plugins.lightning import CkptfmtIO, CkptfmtModelParallelStrategy, ExactResume
from tests.plugins.trainings import Journal, rng_digest

STEPS = 46
SAVE_EVERY = 7  # of 14 steps in an epoch: in its middle, and at its end


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Rows that know their number."""

    def __len__(self):
        return 28

    def __getitem__(self, index):
        return torch.full((6,), float(index)), index


class Net(LightningModule):
    def __init__(self, width=16):
        super().__init__()
        self.save_hyperparameters()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(6, width), torch.nn.Dropout(0.4), torch.nn.Linear(width, 1)
        )
        self.numbers = self.loss = None

    def training_step(self, batch, _batch_idx):
        inputs, self.numbers = batch
        self.loss = self.layers(inputs / 28 + torch.randn_like(inputs)).square().mean()
        self.log("loss", self.loss)
        return self.loss

    def validation_step(self, batch, _batch_idx):
        inputs, _ = batch
        self.log("val_loss", self.layers(inputs / 28 + torch.randn_like(inputs)).square().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


class Sharded(Net):
    """The same on two processes, each with its half of every parameter."""

    def configure_model(self):
        fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])


class Notes(Callback):
    """Notes each step, and each validation in a journal of its own."""

    def __init__(self, path):
        self.journal = Journal(path)
        self.validations = Journal(f"{path}-validations")

    def on_train_batch_end(self, trainer, pl_module, *_):
        saves = getattr(trainer.strategy, "saves", None) or getattr(
            trainer.strategy.checkpoint_io, "saves", None
        )
        if saves is not None and self.journal.is_last(trainer.global_step):
            # The newest checkpoint is that of the last save: which one is resumed is no matter of
            # chance.
            for handle in saves._handles.values():
                handle.wait()
                handle.wait_over()
        self.journal.note(
            trainer.global_step,
            loss=pl_module.loss.detach(),
            numbers=pl_module.numbers,
            weights=pl_module.state_dict(),
            optimizer=trainer.optimizers[0].state_dict(),
            lr=trainer.optimizers[0].param_groups[0]["lr"],
            rng=rng_digest(),
        )

    def on_validation_end(self, trainer, _pl_module):
        if not trainer.sanity_checking:
            loss = trainer.callback_metrics["val_loss"]
            self.validations.note(trainer.global_step, validation=1, loss=loss, rng=rng_digest())


def parse_arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("journal")
    parser.add_argument("--loader", default="plain", choices=("plain", "stateful", "generator"))
    parser.add_argument("--kind", default="one", choices=("one", "ddp", "sharded"))
    parser.add_argument("--native", action="store_true", help="without CkptfmtIO")
    parser.add_argument("--inexact", action="store_true", help="without ExactResume")
    parser.add_argument(
        "--epochs", action="store_true", help="save at the end of epochs, by Lightning's default"
    )
    parser.add_argument(
        "--validate",
        type=int,
        default=0,
        help="after so many steps of an epoch, with a save behind it",
    )
    parser.add_argument(
        "--save-before", action="store_true", help="save every so many steps all the same"
    )
    return parser.parse_args()


def make_loader(options):
    if options.loader == "stateful":
        from torchdata.stateful_dataloader import StatefulDataLoader  # noqa: PLC0415 - the framework's signature

        return StatefulDataLoader(Rows(), batch_size=2, shuffle=True)
    generator = torch.Generator().manual_seed(3) if options.loader == "generator" else None
    return torch.utils.data.DataLoader(Rows(), batch_size=2, shuffle=True, generator=generator)


def main():
    options = parse_arguments()
    logging.getLogger("lightning").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rank = os.environ.get("RANK", "0")
    seed_everything(7 + int(rank), verbose=False)
    cadence = {"every_n_epochs": 1} if options.epochs else {"every_n_train_steps": SAVE_EVERY}
    saves = ModelCheckpoint(
        dirpath=options.out, save_top_k=2, monitor="step", mode="max", save_last=True, **cadence
    )
    if options.validate and not options.save_before:
        saves = ModelCheckpoint(
            dirpath=options.out, save_top_k=-1, monitor="val_loss", save_last=True
        )
    exact = [] if options.inexact else [ExactResume()]
    strategies = {"one": "auto", "ddp": "ddp"}
    if options.kind == "sharded":
        strategies["sharded"] = CkptfmtModelParallelStrategy(
            data_parallel_size=2, tensor_parallel_size=1
        )
    trainer = Trainer(
        max_steps=STEPS,
        val_check_interval=options.validate or None,
        accelerator="cpu",
        devices=1 if options.kind == "one" else 2,
        strategy=strategies[options.kind],
        plugins=[] if options.native else [CkptfmtIO()],
        callbacks=[saves, *exact, Notes(f"{options.journal}-{rank}")],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Sharded() if options.kind == "sharded" else Net()
    held_out = torch.utils.data.DataLoader(Rows(), batch_size=7) if options.validate else None
    trainer.fit(module, make_loader(options), held_out, ckpt_path="last")


main()
