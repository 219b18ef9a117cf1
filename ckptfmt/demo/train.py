"""The training script of the demo: what a user writes, and a ledger.

    torchrun --nproc-per-node 2 -m ckptfmt.demo.train --checkpoints DIR --ledgers DIR --name first

What ckptfmt asks of it is a `State`, a `Checkpointer`, and its `steps` as the loop. It begins a run and resumes one by
the same code.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR

from ckptfmt import Checkpointer, Sampler, State
from ckptfmt.demo.digests import digest_state
from ckptfmt.demo.leave_out import leave_out
from ckptfmt.demo.ledger import Entry, Header, LedgerWriter, ledger_path
from ckptfmt.demo.model import BYTES, TinyGPT
from ckptfmt.demo.settings import ITEMS, Settings, make_settings
from ckptfmt.demo.text import Text, read_text

__all__ = ["main", "train"]


def train(
    settings: Settings, run: Path, ledgers: Path, name: str, *, resume: str = "auto", without: str | None = None
) -> None:
    """Train until the last step, from wherever the run stands.

    Args:
        run: directory of the checkpoints.
        ledgers: directory of the ledgers.
        name: of this launch's ledgers.
        resume: as for `Checkpointer`.
        without: what to leave out of the restore, as a negative control.
    """
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    text = read_text(text_nbytes=settings.text_nbytes, chunk_nbytes=settings.chunk_nbytes)
    torch.manual_seed(settings.seed)  # the same first weights on every process
    model = TinyGPT(settings)
    replica = wrap(model) if world_size > 1 else model
    optimizer = AdamW(replica.parameters(), lr=settings.lr, weight_decay=settings.weight_decay)
    scheduler = make_scheduler(optimizer, settings)
    sampler = Sampler(text, global_batch=settings.global_batch, seed=settings.seed, fingerprint=text.fingerprint())
    seed_streams(settings.seed + 1 + rank)  # other crops, noise and dropout on every process

    state = State(weights=replica, optimizer=optimizer, data=sampler, config=settings, extra={"scheduler": scheduler})
    put_back = leave_out(without, model, optimizer, scheduler, sampler) if without else lambda: None
    ledger = LedgerWriter(ledger_path(ledgers, name, rank))
    with Checkpointer(run, state, every=settings.every, keep=4, resume=resume) as checkpointer:
        ledger.write(describe(checkpointer, model, text, rank, world_size))
        batches = iter(sampler)
        samples, loss = None, None
        for step in checkpointer.steps(settings.steps):
            if samples is None:
                put_back()
            digests = digest_state(model, optimizer, scheduler, sampler)
            ledger.write(Entry(step=step, digests=digests, samples=samples, loss=loss))
            samples = tuple(next(batches))
            loss = train_step(replica, model, optimizer, scheduler, make_batch(text, samples, settings))
    digests = digest_state(model, optimizer, scheduler, sampler)
    ledger.write(Entry(step=settings.steps, digests=digests, samples=samples, loss=loss))
    ledger.close()


def train_step(
    replica: nn.Module,
    model: TinyGPT,
    optimizer: AdamW,
    scheduler: LRScheduler,
    batch: tuple[torch.Tensor, torch.Tensor],
) -> str:
    """Do one step and return the bits of its loss on this process."""
    tokens, targets = batch
    loss = functional.cross_entropy(replica(tokens).flatten(0, 1), targets.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    model.count(targets)
    return float(loss.item()).hex()


def make_batch(text: Text, samples: Sequence[int], settings: Settings) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and targets, (batch, context), of some samples: windows at random places, with noise.

    Python's stream says where in its chunk a window begins, numpy's which of its bytes become noise; torch's is left to
    the dropout. So each of the three has a part in every step.
    """
    windows = np.empty((len(samples), settings.context + 1), dtype=np.uint8)
    for row, sample in enumerate(samples):
        begin = random.randrange(settings.chunk_nbytes - settings.context)
        windows[row] = np.frombuffer(text.chunk(sample)[begin : begin + settings.context + 1], dtype=np.uint8)
    tokens, targets = windows[:, :-1].copy(), windows[:, 1:]
    noise = np.random.random(tokens.shape) < settings.masked  # noqa: NPY002 - the global stream is one to restore
    tokens[noise] = np.random.randint(BYTES, size=int(noise.sum()), dtype=np.uint8)  # noqa: NPY002
    return torch.from_numpy(tokens).long(), torch.from_numpy(targets).long()


def wrap(model: nn.Module) -> nn.Module:
    """Return a replica whose gradients are summed in the same order in every step after every start.

    By default DDP lays its buckets out anew after the first step of each process, and from three processes on another
    place in a bucket is another order of summing: the first step after a resume would differ in its last bits from the
    same step of a run that goes on. Where it looks for unused parameters, it keeps the buckets that it began with.
    """
    return DistributedDataParallel(model, find_unused_parameters=True)


def make_scheduler(optimizer: AdamW, settings: Settings) -> SequentialLR:
    """Return a linear warm-up followed by a cosine down to nearly nothing."""
    warm_up = LinearLR(optimizer, start_factor=0.1, total_iters=settings.warmup_steps)
    cosine = CosineAnnealingLR(optimizer, T_max=settings.steps - settings.warmup_steps, eta_min=settings.lr / 20)
    return SequentialLR(optimizer, [warm_up, cosine], milestones=[settings.warmup_steps])


def seed_streams(seed: int) -> None:
    """Seed the streams of Python, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)


def describe(checkpointer: Checkpointer, model: nn.Module, text: Text, rank: int, world_size: int) -> Header:
    """Return what the ledger begins with."""
    launch, report = checkpointer.launch, checkpointer.load_report
    resume = launch.resume_from if launch else None
    return Header(
        pid=os.getpid(),
        rank=rank,
        world_size=world_size,
        launch=launch.launch if launch else 0,
        resumed_from=resume.name if resume else None,
        claim=report.claim if report else None,
        lowered_by=tuple(report.lowered_by) if report else (),
        parameter_count=sum(parameter.numel() for parameter in model.parameters()),
        sample_count=len(text),
        text=f"{text.file_count} modules of Python {sys.version_info[0]}.{sys.version_info[1]}'s standard library",
    )


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the arguments of one process."""
    parser = argparse.ArgumentParser(prog="python -m ckptfmt.demo.train", description="One process of the demo's run.")
    parser.add_argument("--checkpoints", type=Path, required=True, help="directory of the checkpoints")
    parser.add_argument("--ledgers", type=Path, required=True, help="directory of the ledgers")
    parser.add_argument("--name", required=True, help="name of this launch's ledgers")
    parser.add_argument("--steps", type=int, help="training steps in all")
    parser.add_argument("--quick", action="store_true", help="a much smaller model, fewer steps")
    parser.add_argument("--resume", default="auto", help="auto, fresh, or the name of a checkpoint")
    parser.add_argument("--leave-out", choices=ITEMS, help="leave this out of the restore: a negative control")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Train as one process of a job; torchrun starts several."""
    arguments = parse_arguments(argv)
    torch.set_num_threads(1)  # sums depend on how many threads share them
    torch.use_deterministic_algorithms(mode=True)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
    train(
        make_settings(steps=arguments.steps, quick=arguments.quick),
        arguments.checkpoints,
        arguments.ledgers,
        arguments.name,
        resume=arguments.resume,
        without=arguments.leave_out,
    )
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
