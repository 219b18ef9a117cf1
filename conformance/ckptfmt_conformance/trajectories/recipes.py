"""The model, training and layout of a cell: `Recipe`."""

from __future__ import annotations

import dataclasses
from typing import Final

from ckptfmt_conformance.trajectories.ledger import Position

__all__ = ["EPOCH_STEPS", "OVERFLOW_STEP", "STEPS", "Recipe"]

#: The number of steps of each run, which reads its data more than twice.
STEPS: Final = 12
EPOCH_STEPS: Final = 5
#: The step, counted from 0, whose gradients overflow if losses are scaled.
OVERFLOW_STEP: Final = 5


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The training of a cell.

    Attributes:
        model: a name of `MODELS`.
        optimizer: a name of `OPTIMIZERS`.
        schedule: a name of `SCHEDULES`.
        precision: ``fp32``; ``bf16``, weights in bfloat16; or ``fp16``, autocast with a loss
            scaler.
        layout: ``plain``, ``ddp``, ``fsdp2``, ``tp``; or ``elastic``, the reference trainer.
        world_size: the number of processes; None if the number changes from leg to leg.
        accumulate: the number of microbatches in a step.
        averaged: whether averaged weights are kept, which also contribute to the loss.
        workers: the number of logical workers of the reference trainer.
        data: the data plan and its loader: a name of `PLANS`, or of `FOREIGN`; "" for the suite's
            own cursor.
        ring: whether to sum naively, process by process around a ring: the control of ``elastic``.
    """

    model: str = "mlp"
    optimizer: str = "adamw-foreach"
    schedule: str = "warmup-cosine"
    precision: str = "fp32"
    layout: str = "plain"
    world_size: int | None = 1
    accumulate: int = 1
    averaged: bool = False
    workers: int = 8
    data: str = ""
    ring: bool = False

    def positions(self) -> list[Position]:
        """Return all positions of a run, from the begin to the end."""
        inner = [(step, micro) for step in range(STEPS) for micro in range(self.accumulate)]
        return [*inner, (STEPS, 0)]
