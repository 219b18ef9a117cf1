"""The training script of the demo: a user's script, plus a journal.

    torchrun --nproc-per-node 2 -m ckptfmt_tools.demo.train --checkpoints DIR --journals DIR \
        --name first

For ckptfmt, the script has a `State`, a `Checkpointer`, and its `steps` as the loop. The same code
begins a run and resumes a run. The trainer is `ckptfmt_conformance.elastic`, with the same bits on
any number of processes.
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
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from ckptfmt import Checkpointer, Sampler, State
from ckptfmt_conformance.elastic import Plan, Trainer, pin_arithmetic
from ckptfmt_tools.demo.journal import Header, JournalEntry, JournalWriter, journal_path
from ckptfmt_tools.demo.judge import digest_state, leave_out
from ckptfmt_tools.demo.settings import ITEMS, Settings, make_settings
from ckptfmt_tools.demo.task import Task, Text, TinyGPT, read_text


def train(
    settings: Settings,
    run: str,
    journals: Path,
    name: str,
    *,
    resume: str = "auto",
    without: str | None = None,
) -> None:
    """Train until the last step, from the run's newest checkpoint on.

    Args:
        run: directory of the checkpoints, or its URL.
        journals: directory of the journals.
        name: name of this launch, for its journals.
        resume: as in `Checkpointer`.
        without: state to leave out of the restore, as a negative control.
    """
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    text = read_text(text_nbytes=settings.text_nbytes, chunk_nbytes=settings.chunk_nbytes)
    torch.manual_seed(settings.seed)  # the same first weights on every process
    model = TinyGPT(settings)
    optimizer = AdamW(
        model.parameters(), lr=settings.lr, weight_decay=settings.weight_decay, foreach=False
    )
    scheduler = make_scheduler(optimizer, settings)
    # Every process knows the samples of the whole step; the trainer knows the positions of this
    # process.
    sampler = Sampler(
        text,
        global_batch=settings.global_batch,
        seed=settings.seed,
        worker=(0, 1),
        fingerprint=text.fingerprint(),
    )
    task = Task(model, text, sampler, settings)
    trainer = Trainer(model, optimizer, make_plan(settings), task.loss_of)
    seed_streams(settings.seed + 1 + rank)  # a different seed on every process

    extra = {"scheduler": scheduler, "trainer": trainer}
    state = State(weights=model, optimizer=optimizer, data=sampler, config=settings, extra=extra)
    put_back = (
        leave_out(
            without,
            model,
            optimizer=optimizer,
            scheduler=scheduler,
            sampler=sampler,
            trainer=trainer,
        )
        if without
        else lambda: None
    )
    journal = JournalWriter(journal_path(journals, name, rank))
    with Checkpointer(run, state, every=settings.every, keep=4, resume=resume) as checkpointer:
        # Before the first step, since the journal records the load's claim.
        checkpointer.restore_rng()
        journal.write(describe(checkpointer, model, text, rank, world_size))
        samples = None
        loss = None
        for step in checkpointer.steps(settings.steps):
            if samples is None:
                put_back()
            digests = digest_state(model, optimizer, scheduler, sampler, trainer)
            journal.write(JournalEntry(step=step, digests=digests, samples=samples, loss=loss))
            task.begin_step()
            loss = trainer.step().loss.hex()
            scheduler.step()
            samples = tuple(task.taken)
    digests = digest_state(model, optimizer, scheduler, sampler, trainer)
    journal.write(JournalEntry(step=settings.steps, digests=digests, samples=samples, loss=loss))
    journal.close()


def make_plan(settings: Settings) -> Plan:
    """Return the assignment of computations to workers, for any number of processes."""
    microbatch = settings.global_batch // settings.workers
    return Plan(workers=settings.workers, microbatch=microbatch, seed=settings.seed)


def make_scheduler(optimizer: AdamW, settings: Settings) -> SequentialLR:
    """Return a linear warm-up followed by a cosine down to nearly zero."""
    warm_up = LinearLR(optimizer, start_factor=0.1, total_iters=settings.warmup_steps)
    cosine = CosineAnnealingLR(
        optimizer, T_max=settings.steps - settings.warmup_steps, eta_min=settings.lr / 20
    )
    return SequentialLR(optimizer, [warm_up, cosine], milestones=[settings.warmup_steps])


def seed_streams(seed: int) -> None:
    """Seed the RNG streams of Python, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)


def describe(
    checkpointer: Checkpointer, model: nn.Module, text: Text, rank: int, world_size: int
) -> Header:
    """Return the journal's header."""
    launch = checkpointer.launch
    report = checkpointer.load_report
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
        text=(
            f"{text.file_count} modules of Python {sys.version_info[0]}.{sys.version_info[1]}'s"
            " standard library"
        ),
    )


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the arguments of one process."""
    parser = argparse.ArgumentParser(
        prog="python -m ckptfmt_tools.demo.train", description="One process of the demo's run."
    )
    parser.add_argument(
        "--checkpoints", required=True, help="directory of the checkpoints, or its URL"
    )
    parser.add_argument("--journals", type=Path, required=True, help="directory of the journals")
    parser.add_argument("--name", required=True, help="name of this launch's journals")
    parser.add_argument("--steps", type=int, help="training steps in all")
    parser.add_argument("--quick", action="store_true", help="a much smaller model, fewer steps")
    parser.add_argument("--resume", default="auto", help="auto, fresh, or the name of a checkpoint")
    parser.add_argument(
        "--leave-out", choices=ITEMS, help="leave this out of the restore: a negative control"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Train as one process of a job; torchrun starts several."""
    arguments = parse_arguments(argv)
    pin_arithmetic()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
    train(
        make_settings(steps=arguments.steps, quick=arguments.quick),
        arguments.checkpoints,
        arguments.journals,
        arguments.name,
        resume=arguments.resume,
        without=arguments.leave_out,
    )
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
