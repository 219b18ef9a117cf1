"""A training under FSDP2 that saves through torch.distributed.checkpoint, as one of several processes.

Usage: dcp_training.py RUN JOURNALS [forgetful]

It saves every eighth step, in turn with `dcp.save` and `dcp.async_save`, and resumes from the
newest checkpoint in RUN. What DCP doesn't know of, the training puts into its state_dict: RNG
streams, LR schedule, where in the data it is. With "forgetful" it leaves the RNG streams as they
are when it resumes.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader as dcp_load
from torch.distributed.checkpoint import state_dict_saver as dcp_save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import ckptfmt
from ckptfmt.plugins.dcp import CkptfmtReader, CkptfmtWriter
from tests.plugins import trainings

STEPS, EVERY, SAMPLES, BATCH = 44, 8, 48, 8


def make_model() -> torch.nn.Sequential:
    """Return the model, the same in every process."""
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(12, 24), torch.nn.Dropout(0.3), torch.nn.ReLU(), torch.nn.Linear(24, 3)
    )


class Training:
    """What is trained, and all that the next step depends on."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.model = make_model()
        for layer in (self.model[0], self.model[3], self.model):
            fully_shard(layer)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, STEPS)
        self.order = torch.Generator().manual_seed(7)
        self.samples = torch.randn(SAMPLES, 12, generator=torch.Generator().manual_seed(3))
        self.ids: list[int] = []
        self.step = 0
        torch.manual_seed(100 + rank)

    def state_dict(self) -> dict[str, Any]:
        """Return all of it; what each process has of its own is under a key of its own."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {
            "model": model,
            "optim": optimizer,
            "schedule": self.schedule.state_dict(),
            "loop": {"step": self.step, "ids": self.ids, "order": self.order.get_state()},
            f"rng{self.rank}": torch.get_rng_state(),
        }

    def load(self, path: Path, *, forgetful: bool) -> None:
        """Go on from a checkpoint."""
        state = self.state_dict()
        dcp_load.load(state, storage_reader=CkptfmtReader(path))
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
        )
        self.schedule.load_state_dict(state["schedule"])
        self.step, self.ids = state["loop"]["step"], state["loop"]["ids"]
        self.order.set_state(state["loop"]["order"])
        if not forgetful:
            torch.set_rng_state(state[f"rng{self.rank}"])

    def train_step(self) -> dict[str, Any]:
        """Do one step, and return what is to be the same in every run."""
        if not self.ids:
            self.ids = torch.randperm(SAMPLES, generator=self.order).tolist()
        batch, self.ids = self.ids[:BATCH], self.ids[BATCH:]
        mine = batch[self.rank :: dist.get_world_size()]
        loss = self.model(self.samples[mine]).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        self.step += 1
        model, optimizer = get_state_dict(self.model, self.optimizer)
        rates = [group["lr"] for group in self.optimizer.param_groups]
        facts = {
            "ids": repr(batch),
            "rate": repr(rates),
            "loss": loss,
            "rng": torch.get_rng_state(),
        }
        return {**facts, "weights": model, "optimizer": optimizer["state"]}


def main(run: Path, journals: Path, *options: str) -> None:
    """Train to the end."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    # A save beside the training talks in a group of its own: in one group, all ranks must talk in
    # one order.
    beside = dist.new_group()
    training, journal = Training(rank), trainings.Journal(journals / f"rank-{rank}.jsonl")
    found = sorted(run.glob("step-*"), key=lambda path: int(path.name[5:]), reverse=True)
    for path in found:
        if ckptfmt.validate(path).valid:
            training.load(path, forgetful="forgetful" in options)
            break
    pending: Any = None
    while training.step < STEPS:
        facts = training.train_step()
        if training.step % EVERY == 0:
            if pending is not None:
                pending.result()
            writer, state = CkptfmtWriter(run / f"step-{training.step}"), training.state_dict()
            is_async = training.step // EVERY % 2 == 0
            pending = (
                dcp_save.async_save(state, storage_writer=writer, process_group=beside)
                if is_async
                else None
            )
            if not is_async:
                dcp_save.save(state, storage_writer=writer)
        journal.note(training.step, **facts)
    if pending is not None:
        pending.result()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
