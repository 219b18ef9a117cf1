"""A training job on the reference trainer, with the same state on any number of processes."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ckptfmt_conformance.elastic import LossScale, Plan, Trainer, TreeSum
from ckptfmt_conformance.trajectories.data import order_of, rows_of
from ckptfmt_conformance.trajectories.job import (
    Progress,
    model_facts,
    optimizer_facts,
    seed_streams,
)
from ckptfmt_conformance.trajectories.ledger import Facts, Position, facts_of, float_bits
from ckptfmt_conformance.trajectories.models import Experts, make_model
from ckptfmt_conformance.trajectories.optimizers import make_optimizer, make_schedule
from ckptfmt_conformance.trajectories.recipes import EPOCH_STEPS, OVERFLOW_STEP, Recipe
from ckptfmt_conformance.trajectories.ring import NaiveRing

__all__ = ["ElasticJob"]


class ElasticJob:
    """Model, optimizer, schedule and trainer of a recipe.

    The seed determines the initial values.
    """

    def __init__(self, recipe: Recipe, seed: int) -> None:
        self.recipe = recipe
        torch.manual_seed(seed)
        self.core = make_model(recipe.model).to(
            torch.bfloat16 if recipe.precision == "bf16" else torch.float32
        )
        self.optimizer = make_optimizer(recipe.optimizer, self.core)
        self.scheduler = make_schedule(recipe.schedule, self.optimizer)
        averaging = get_ema_multi_avg_fn(0.8)  # type: ignore[no-untyped-call]
        self.averaged = (
            AveragedModel(self.core, multi_avg_fn=averaging) if recipe.averaged else None
        )
        self.plan = Plan(
            workers=recipe.workers, microbatch=2, accumulate=recipe.accumulate, seed=11
        )
        self.trainer = Trainer(
            self.core,
            self.optimizer,
            self.plan,
            self._loss_of,
            max_norm=0.5,
            scale=LossScale(scale=1024.0, interval=3) if recipe.precision == "fp16" else None,
            reduction=NaiveRing() if recipe.ring else TreeSum(),
        )
        self.progress = Progress()
        self.samples = 0, 0
        self.loss = 0.0
        seed_streams(seed)

    @property
    def position(self) -> Position:
        """The number of finished steps, and of finished microbatches in the unfinished step."""
        return self.trainer.steps_done, self.trainer.micro

    def _loss_of(self, model: nn.Module, samples: range) -> tuple[torch.Tensor, int]:
        count = EPOCH_STEPS * self.plan.global_batch
        ids = [order_of(count, 3, at // count)[at % count] for at in samples]
        inputs, targets = rows_of(self.recipe.model, ids)
        inputs = (
            inputs if inputs.dtype == torch.int64 else inputs.to(next(model.parameters()).dtype)
        )
        with torch.autocast("cpu", dtype=torch.float16, enabled=self.recipe.precision == "fp16"):
            logits = model(inputs)
        loss = functional.cross_entropy(logits.float(), targets, reduction="sum")
        if self.averaged is not None:
            self.averaged.eval()
            with torch.no_grad():
                taught = self.averaged(inputs).float()
            loss = loss + 0.3 * functional.mse_loss(logits.float(), taught, reduction="sum")
        if self.recipe.precision == "fp16" and self.trainer.steps_done == OVERFLOW_STEP:
            loss = loss * float("inf")
        return loss, len(targets)

    def advance(self) -> None:
        """Do one microbatch, and finish the step if the microbatch is its last."""
        report = self.trainer.microbatch()
        if report is None:
            self.samples = (0, 0)  # samples and loss belong to whole steps
            self.loss = 0.0
            return
        self.scheduler.step()
        for module in self.core.modules():
            if isinstance(module, Experts):
                module.after_step()
        if self.averaged is not None:
            self.averaged.update_parameters(self.core)
        self.progress.step = report.step
        self.loss = report.loss
        self.progress.skipped += report.skipped
        self.samples = report.samples.start, report.samples.stop

    def state(self) -> dict[str, object]:
        """Return the state for the checkpointing."""
        state: dict[str, object] = {
            "weights": self.core,
            "optimizer": self.optimizer,
            "data": self.trainer,
            "config": {"model": self.recipe.model, "optimizer": self.recipe.optimizer},
            "rng": {},
            "scheduler": self.scheduler,
            "progress": self.progress,
        }
        return state | ({"averaged": self.averaged} if self.averaged is not None else {})

    def facts(self) -> Facts:
        """Return all state for the comparison.

        The process's random streams are omitted, since each microbatch seeds its own streams.
        """
        facts = model_facts(self.core) | optimizer_facts(self.core, self.optimizer)
        facts |= facts_of("scheduler", self.scheduler.state_dict()) | facts_of(
            "trainer", self.trainer.state_dict()
        )
        facts |= facts_of("progress", self.progress.state_dict())
        if self.averaged is not None:
            facts |= facts_of("ema", dict(self.averaged.state_dict()))
        facts["sample/ids"], facts["loss/bits"] = repr(self.samples), float_bits(self.loss)
        return facts
