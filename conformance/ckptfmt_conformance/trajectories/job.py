"""A training job as users write it, with its state exposed: plain, DDP, FSDP2, tensor parallel."""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Mapping
from typing import Any, Final, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ckptfmt_conformance.elastic.tree import place
from ckptfmt_conformance.trajectories.data import Cursor, make_batch
from ckptfmt_conformance.trajectories.device import DEVICE
from ckptfmt_conformance.trajectories.ledger import Facts, Position, facts_of, float_bits
from ckptfmt_conformance.trajectories.models import Experts, make_model
from ckptfmt_conformance.trajectories.optimizers import make_optimizer, make_schedule
from ckptfmt_conformance.trajectories.protocol import PerRank
from ckptfmt_conformance.trajectories.recipes import EPOCH_STEPS, OVERFLOW_STEP, Recipe

__all__ = [
    "Job",
    "Progress",
    "Runnable",
    "TrainingJob",
    "Window",
    "model_facts",
    "optimizer_facts",
    "seed_streams",
]

MICROBATCH = 4
#: The factors are no powers of two. So the scale influences the rounding of gradients, and a lost
#: scale changes the training.
SCALER: Final[dict[str, Any]] = {
    "init_scale": 1000.0,
    "growth_factor": 1.7,
    "backoff_factor": 0.6,
    "growth_interval": 3,
}


class Runnable(Protocol):
    """The interface of a job for cells."""

    @property
    def position(self) -> Position:
        """The number of finished steps, and of finished microbatches in the unfinished step."""

    def advance(self) -> None:
        """Do one microbatch, and finish the step if the microbatch is its last."""

    def facts(self) -> Facts:
        """Return all state for the comparison."""

    def state(self) -> dict[str, object]:
        """Return the state for the checkpointing."""


class Progress:
    """The loop's counters."""

    def __init__(self) -> None:
        self.step = 0
        self.skipped = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the counters."""
        return dict(vars(self))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the counters."""
        vars(self).update(state)


class Window:
    """The accumulation window: the number of accumulated microbatches, and the gradients.

    Args:
        model: the model of the gradients.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.micro = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the gradients by name; none at a step's boundary."""
        named = self._model.named_parameters()
        gradients = {
            name: parameter.grad for name, parameter in named if parameter.grad is not None
        }
        return {"micro": self.micro, "gradients": gradients if self.micro else {}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the window."""
        self.micro = state["micro"]
        for name, parameter in self._model.named_parameters():
            gradient = state["gradients"].get(name)
            parameter.grad = (
                None if gradient is None else gradient.detach().clone().to(parameter.device)
            )


class TrainingJob:
    """Model, optimizer and all other state of a recipe. The seed determines the initial values.

    Attributes:
        core: the model without a wrapper.
    """

    def __init__(self, recipe: Recipe, seed: int) -> None:
        self.recipe = recipe
        self.rank, self.world_size = place()
        self.replicas = 1 if recipe.layout == "tp" else self.world_size
        torch.manual_seed(seed)  # the same initial weights on every process
        precision = torch.bfloat16 if recipe.precision == "bf16" else torch.float32
        self.core = make_model(recipe.model).to(DEVICE, precision)
        self.model = spread(self.core, recipe)
        averaging = get_ema_multi_avg_fn(0.8)  # type: ignore[no-untyped-call]
        self.averaged = (
            AveragedModel(self.core, multi_avg_fn=averaging) if recipe.averaged else None
        )
        self.optimizer: Optimizer = make_optimizer(recipe.optimizer, self.core)
        self.scheduler = make_schedule(recipe.schedule, self.optimizer)
        scaled = recipe.precision == "fp16"
        self.scaler = torch.amp.GradScaler(DEVICE.type, **SCALER) if scaled else None
        self.cursor = Cursor(EPOCH_STEPS * self.step_samples, seed=3)
        self.augment = torch.Generator()
        self.window = Window(self.core)
        self.progress = Progress()
        self.samples: list[int] = []
        self.loss = 0.0
        seed_streams(seed + 100 * (self.rank if recipe.layout != "tp" else 0), self.augment)

    @property
    def step_samples(self) -> int:
        """The number of samples in a step, over all processes."""
        return self.replicas * self.recipe.accumulate * MICROBATCH

    @property
    def position(self) -> Position:
        """The number of finished steps, and of finished microbatches in the unfinished step."""
        return self.progress.step, self.window.micro

    def advance(self) -> None:
        """Do one microbatch, and finish the step if the microbatch is its last."""
        taken = self.cursor.take(self.replicas * MICROBATCH)
        first = self.rank * MICROBATCH if self.replicas > 1 else 0
        self.samples = taken[first : first + MICROBATCH]
        last = self.window.micro + 1 == self.recipe.accumulate
        held = isinstance(self.model, DistributedDataParallel) and not last
        with self.model.no_sync() if held else contextlib.nullcontext():  # type: ignore[operator]
            inputs, targets = make_batch(self.recipe.model, self.samples, self.augment)
            loss = self._loss(inputs.to(DEVICE), targets.to(DEVICE))
            self.loss = float(loss.item())
            if self.scaler and self.progress.step == OVERFLOW_STEP:
                loss = loss * float("inf")
            scaled = loss / self.recipe.accumulate
            (self.scaler.scale(scaled) if self.scaler else scaled).backward()  # type: ignore[no-untyped-call]
        self.window.micro += 1
        if last:
            self._finish()

    def _loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss. The averaged model adds a term whose weight grows with the step."""
        inputs = (
            inputs if inputs.dtype == torch.int64 else inputs.to(next(self.core.parameters()).dtype)
        )
        half = self.recipe.precision == "fp16"
        with torch.autocast(DEVICE.type, dtype=torch.float16, enabled=half):
            logits = self.model(inputs)
        loss = functional.cross_entropy(logits.float(), targets)
        if self.averaged is not None:
            self.averaged.eval()
            with torch.no_grad():
                taught = self.averaged(inputs).float()
            loss = loss + min(1.0, self.progress.step / 8) * functional.mse_loss(
                logits.float(), taught
            )
        return loss

    def _finish(self) -> None:
        if self.scaler:
            before = self.scaler.get_scale()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.progress.skipped += self.scaler.get_scale() < before
        else:
            self.optimizer.step()
        self.scheduler.step(*([self.loss] if self.recipe.schedule == "plateau" else []))
        self.optimizer.zero_grad()
        for module in self.core.modules():
            if isinstance(module, Experts):
                module.after_step()
        if self.averaged is not None:
            self.averaged.update_parameters(self.core)
        self.window.micro = 0
        self.progress.step += 1

    def state(self) -> dict[str, object]:
        """Return the state for the checkpointing."""
        state: dict[str, object] = {
            "weights": self.model,
            "optimizer": self.optimizer,
            "data": self.cursor,
            "config": {"model": self.recipe.model, "optimizer": self.recipe.optimizer},
            "rng": {"augment": self.augment},
            "scheduler": self.scheduler,
            # Each process has its own gradients until they are summed.
            "window": PerRank(self.window) if self.recipe.layout == "ddp" else self.window,
            "progress": self.progress,
        }
        if self.scaler:
            state["scaler"] = self.scaler
        if self.averaged is not None:
            state["averaged"] = self.averaged
        return state

    def facts(self) -> Facts:
        """Return all state for the comparison, read from the live objects by the suite's code."""
        facts = model_facts(self.core) | optimizer_facts(self.core, self.optimizer)
        facts |= facts_of("scheduler", self.scheduler.state_dict())
        facts |= facts_of("cursor", self.cursor.state_dict())
        facts |= facts_of("window", self.window.state_dict()) | facts_of(
            "progress", self.progress.state_dict()
        )
        if self.scaler:
            facts |= facts_of("scaler", self.scaler.state_dict())
        if self.averaged is not None:
            facts |= facts_of("ema", dict(self.averaged.state_dict()))
        facts |= facts_of("rng/augment", self.augment.get_state()) | stream_facts()
        facts["sample/ids"], facts["loss/bits"] = repr(self.samples), float_bits(self.loss)
        return facts


#: Makes a job from a recipe and a seed.
Job = TrainingJob


def spread(model: nn.Module, recipe: Recipe) -> nn.Module:
    """Return the model in the layout of a recipe.

    FSDP2 and tensor parallelism change the model in place.
    """
    if recipe.layout == "ddp":
        # With three or more processes, DDP rebuilds its buckets after the first step and then sums
        # in another order. The search for unused parameters prevents the rebuild. Statistics stay
        # separate for each process.
        with warnings.catch_warnings():
            # of the argument; its replacement is too new
            warnings.simplefilter("ignore", FutureWarning)
            return DistributedDataParallel(
                model, broadcast_buffers=False, find_unused_parameters=dist.get_world_size() > 2
            )
    if recipe.layout in ("fsdp2", "tp"):
        # Slow to import, and seldom needed.
        from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        if recipe.layout == "fsdp2":
            from torch.distributed.fsdp import fully_shard  # noqa: PLC0415 - the same

            fully_shard(model, mesh=mesh)
        else:
            from torch.distributed.tensor.parallel import (  # noqa: PLC0415 - the same
                ColwiseParallel,
                RowwiseParallel,
                parallelize_module,
            )

            feed = "block.feed." if recipe.model == "gpt" else ""
            names = (f"{feed}0", f"{feed}2") if feed else ("up", "down")
            parallelize_module(
                model, mesh, {names[0]: ColwiseParallel(), names[1]: RowwiseParallel()}
            )
    return model


def seed_streams(seed: int, *generators: torch.Generator) -> None:
    """Seed Python's, numpy's and torch's streams, and the given generators."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - the global stream is under test
    torch.manual_seed(seed)
    for generator in generators:
        generator.manual_seed(seed)


def stream_facts() -> Facts:
    """Return the states of the three global streams."""
    facts: Facts = {"rng/python": repr(random.getstate())}
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002 - the same
    facts["rng/numpy/keys"] = torch.from_numpy(np.asarray(keys).astype(np.int64))
    facts["rng/numpy/place"] = repr([kind, *rest])
    if DEVICE.type == "cuda":
        facts |= facts_of("rng/torch.cuda", torch.cuda.get_rng_state(DEVICE))
    return facts | facts_of("rng/torch", torch.get_rng_state())


def model_facts(model: nn.Module) -> Facts:
    """Return parameters, all buffers, extra state, and the ties between weights."""
    facts: Facts = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        facts |= facts_of(f"parameter/{name}", parameter)
    for name, buffer in model.named_buffers():
        facts |= facts_of(f"buffer/{name}", buffer)
    for name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            facts |= facts_of(f"extra_state/{name}", module.get_extra_state())
    first = {
        id(parameter): name
        for name, parameter in reversed(list(model.named_parameters(remove_duplicate=False)))
    }
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first[id(parameter)] != name:
            facts[f"alias/{name}"] = first[id(parameter)]
    return facts


def optimizer_facts(model: nn.Module, optimizer: Optimizer) -> Facts:
    """Return an optimizer's state by the names of its parameters, and the options of its groups."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    facts: Facts = {}
    for number, group in enumerate(optimizer.param_groups):
        facts |= facts_of(
            f"group/{number}", {key: value for key, value in group.items() if key != "params"}
        )
        for parameter in group["params"]:
            for key, value in optimizer.state.get(parameter, {}).items():
                facts |= facts_of(f"moment/{key}/{names[id(parameter)]}", value)
    return facts
