"""Negative controls: state dropped or damaged after a load.

A suite must turn red for each control.
"""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from ckptfmt_conformance.trajectories.feed import PREFETCH, READ_AHEAD
from ckptfmt_conformance.trajectories.foreign import COUNT, LOADER
from ckptfmt_conformance.trajectories.job import Runnable
from ckptfmt_conformance.trajectories.ledger import Position
from ckptfmt_conformance.trajectories.loaded_job import BATCH
from ckptfmt_conformance.trajectories.plans import plan_of
from ckptfmt_conformance.trajectories.recipes import Recipe

__all__ = ["CONTROLS", "Control"]

#: Undoes a part of a load.
Undo = Callable[[], object]


class Keep(Protocol):
    """Remembers the state of a part of a job before a load. Returns a function to restore it."""

    def __call__(self, job: Any) -> Undo:
        """Remember the state."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """A fault injected after a load.

    Attributes:
        recipe, cut: a run where the fault matters, and the position of the fault.
        drop: for state that isn't restored: the state of a new job is kept.
        damage: for state restored wrongly.
        named: the part of the report that names the fault.
        learns: whether the weights must differ soon; False for a counter without influence.
        worlds: the numbers of processes, for T2.
        loaders: the numbers of a loader's worker processes, before and after.
    """

    recipe: Recipe
    cut: Position = (7, 0)
    drop: Keep | None = None
    damage: Callable[[Any], object] | None = None
    named: str
    learns: bool = True
    worlds: tuple[int, ...] = ()
    loaders: tuple[int, ...] = ()

    def before(self, job: Runnable) -> Undo:
        """Prepare the fault before the load. Return a function to call after the load."""
        if self.drop is not None:
            return self.drop(job)
        damage = self.damage
        return lambda: damage(job) if damage is not None else None


# --- parts of a job -------------------------------------------------------------------------------


def _weights(job: Any) -> dict[str, torch.Tensor]:
    return dict(job.core.named_parameters())


def _buffers(job: Any) -> dict[str, torch.Tensor]:
    return dict(job.core.named_buffers())


def _keep_tensors(
    tensors_of: Callable[[Any], Mapping[str, torch.Tensor]], ending: str = ""
) -> Keep:
    def keep(job: Any) -> Undo:
        before = {
            name: tensor.detach().clone()
            for name, tensor in tensors_of(job).items()
            if name.endswith(ending)
        }

        @torch.no_grad()
        def undo() -> None:
            for name, value in before.items():
                tensors_of(job)[name].copy_(value)

        return undo

    return keep


def _keep_stateful(attribute: str) -> Keep:
    def keep(job: Any) -> Undo:
        before = copy.deepcopy(getattr(job, attribute).state_dict())
        return lambda: getattr(job, attribute).load_state_dict(before)

    return keep


def _keep_attributes(part: Callable[[Any], object], *names: str) -> Keep:
    def keep(job: Any) -> Undo:
        before = {name: copy.deepcopy(getattr(part(job), name)) for name in names}
        return lambda: vars(part(job)).update(before)

    return keep


def _zero_moment(key: str) -> Keep:
    def undo(job: Any) -> None:
        for state in job.optimizer.state.values():
            if isinstance(state[key], torch.Tensor):
                state[key].zero_()
            else:
                state[key] = type(state[key])()

    return lambda job: lambda: undo(job)


def _masters_from_weights(job: Any) -> Undo:
    def undo() -> None:
        for parameter, state in job.optimizer.state.items():
            state["master"] = parameter.detach().float()

    return undo


def _moments_as_weights(job: Any) -> Undo:
    """Cast the state to the weight's dtype, as `Optimizer.load_state_dict` does."""
    return lambda: job.optimizer.load_state_dict(job.optimizer.state_dict())


def _untie(job: Any) -> None:
    job.core.head.weight = nn.Parameter(job.core.head.weight.detach().clone())


def _keep_rate(job: Any) -> Undo:
    before = [group["lr"] for group in job.optimizer.param_groups]

    def undo() -> None:
        for group, rate in zip(job.optimizer.param_groups, before, strict=True):
            group["lr"] = rate

    return undo


def _flip(
    tensors_of: Callable[[Any], Mapping[str, torch.Tensor]], ending: str = ""
) -> Callable[[Any], None]:
    """Flip the last bit of every number of one tensor.

    A single number may belong to a unit that dropout removes in the next step.
    """

    @torch.no_grad()
    def damage(job: Any) -> None:
        tensor = next(tensor for name, tensor in tensors_of(job).items() if name.endswith(ending))
        width = tensor.element_size()
        tensor.view(-1).view(torch.uint8).view(-1, width)[:, 0].bitwise_xor_(1)

    return damage


def _moments(key: str) -> Callable[[Any], Mapping[str, torch.Tensor]]:
    def moments(job: Any) -> Mapping[str, torch.Tensor]:
        return {
            str(number): state[key] for number, state in enumerate(job.optimizer.state.values())
        }

    return moments


def _averages(job: Any) -> dict[str, torch.Tensor]:
    return dict(job.averaged.module.named_parameters())


def _alter(part: Callable[[Any], Any], name: str, by: float = 1) -> Callable[[Any], None]:
    return lambda job: setattr(part(job), name, getattr(part(job), name) + by)


def _shift_betas(job: Any) -> None:
    for group in job.optimizer.param_groups:
        group["betas"] = (0.91, group["betas"][1])


# --- streams --------------------------------------------------------------------------------------


def _keep_python(job: Any) -> Undo:
    del job
    before = random.getstate()
    return lambda: random.setstate(before)


def _keep_numpy(job: Any) -> Undo:
    del job
    before = np.random.get_state()  # noqa: NPY002 - the fault concerns the global stream
    return lambda: np.random.set_state(before)  # noqa: NPY002


def _keep_torch(job: Any) -> Undo:
    del job
    before = torch.get_rng_state()
    return lambda: torch.set_rng_state(before)


def _keep_augment(job: Any) -> Undo:
    before = job.augment.get_state()
    return lambda: job.augment.set_state(before)


def _one_for_all(job: Any) -> None:
    """Copy the torch stream of the first process to all processes."""
    del job
    state = torch.get_rng_state()
    dist.broadcast(state, src=0)
    torch.set_rng_state(state)


@torch.no_grad()
def _statistics_of_first(job: Any) -> None:
    """Copy the statistics of the first process to all processes.

    A checkpoint written by the first process only has this effect.
    """
    for buffer in job.core.buffers():
        dist.broadcast(buffer, src=0)


# --- the table of controls ------------------------------------------------------------------------


def _keep_scaler(*names: str) -> Keep:
    def keep(job: Any) -> Undo:
        before = job.scaler.state_dict()
        return lambda: job.scaler.load_state_dict(
            job.scaler.state_dict() | {name: before[name] for name in names}
        )

    return keep


def _curriculum(job: Any) -> Any:
    return job.core.curriculum


_MLP: Final = Recipe(optimizer="adamw-loop")
_AVERAGED: Final = Recipe(optimizer="sgd", averaged=True)
_WINDOW: Final = Recipe(accumulate=2, optimizer="sgd")
_MOE: Final = Recipe(model="moe", accumulate=2)
_HALF: Final = Recipe(precision="fp16", optimizer="sgd")
_MASTERS: Final = Recipe(precision="bf16", optimizer="adamw-masters")
_DDP: Final = Recipe(layout="ddp", world_size=2)
_ELASTIC: Final = Recipe(
    layout="elastic", world_size=None, model="gpt", optimizer="adamw-loop", accumulate=2
)
_MIXED: Final = Recipe(data="mixed")
_FOREIGN: Final = Recipe(data=LOADER)
_RING: Final = dataclasses.replace(_ELASTIC, ring=True)


def _moment_controls() -> dict[str, Control]:
    named = {
        "exp_avg": _MLP, "exp_avg_sq": _MLP, "max_exp_avg_sq": Recipe(optimizer="adam-amsgrad"),
        "momentum_buffer": Recipe(optimizer="sgd"), "square_avg": Recipe(optimizer="rmsprop"),
        "sum": Recipe(optimizer="adagrad"), "mu_product": Recipe(optimizer="nadam"),
    }  # fmt: skip
    controls = {
        "optimizer.step/drop": Control(
            recipe=_MLP, drop=_zero_moment("step"), named="optimizer's step"
        )
    }
    controls["optimizer.mu_product/drop"] = Control(
        recipe=named.pop("mu_product"),
        drop=_zero_moment("mu_product"),
        named="optimizer's mu_product",
    )
    for key, recipe in named.items():
        common: dict[str, Any] = {"recipe": recipe, "named": f"optimizer's {key}"}
        controls[f"optimizer.{key}/drop"] = Control(drop=_zero_moment(key), **common)
        controls[f"optimizer.{key}/damage"] = Control(damage=_flip(_moments(key)), **common)
    controls["optimizer.master/drop"] = Control(
        recipe=_MASTERS, drop=_masters_from_weights, named="optimizer's master"
    )  # fmt: skip
    controls["optimizer.dtypes/drop"] = Control(
        recipe=_MASTERS, drop=_moments_as_weights, named="optimizer's exp_avg_sq"
    )  # fmt: skip
    controls["optimizer.lr/drop"] = Control(
        recipe=Recipe(schedule="exponential"), drop=_keep_rate, named="option lr"
    )  # fmt: skip
    controls["optimizer.betas/damage"] = Control(
        recipe=_MLP, damage=_shift_betas, named="option betas"
    )
    return controls


def _stream_controls() -> dict[str, Control]:
    kept = {
        "python": _keep_python,
        "numpy": _keep_numpy,
        "torch": _keep_torch,
        "augment": _keep_augment,
    }
    draw: dict[str, Callable[[Any], object]] = {
        "python": lambda _: random.random(),
        # The fault concerns the global stream.
        "numpy": lambda _: np.random.random(),  # noqa: NPY002
        "torch": lambda _: torch.rand(1),
        "augment": lambda job: torch.rand(1, generator=job.augment),
    }
    controls = {}
    for name, keep in kept.items():
        common: dict[str, Any] = {"recipe": _MLP, "named": f"random-number stream {name}"}
        controls[f"rng.{name}/drop"] = Control(drop=keep, **common)
        controls[f"rng.{name}/damage"] = Control(damage=draw[name], **common)
    return controls


def _other_plan(**changes: Any) -> Callable[[Any], None]:
    """Return a fault that remakes the samplers from another plan.

    Their cursor is complete, but belongs to another run.
    """
    return lambda job: job.reading.use(
        dataclasses.replace(job.reading.plan, **changes), job.position[0]
    )


def _fetched(job: Any) -> None:
    """Continue after the prefetched batches, as if they had been consumed."""
    job.reading.advance(READ_AHEAD + PREFETCH)


def _count_more(job: Any) -> None:
    job.arguments.consumed_train_samples += 4


def _data_controls() -> dict[str, Control]:
    later: dict[str, Any] = {"loaders": (2, 0), "named": "the data cursor"}
    elastic = dataclasses.replace(_ELASTIC, accumulate=1, data="mixed")
    first = plan_of("mixed", BATCH).stages[:1]
    return {
        "data.cursor/drop": Control(recipe=_MIXED, drop=_keep_stateful("reading"), **later),
        "data.fetched/damage": Control(recipe=_MIXED, damage=_fetched, **later),
        "data.tail/damage": Control(recipe=Recipe(data="pad"), cut=(4, 0),
                                    damage=_other_plan(tail="carry"), **later),
        "data.skips/drop": Control(
            recipe=Recipe(data="quarantine-mixed"), cut=(8, 0), damage=_other_plan(skips=()),
            named="the data cursor's skips",
        ),
        "data.shard/drop": Control(
            recipe=Recipe(data="quarantine"),
            damage=_other_plan(skips=plan_of("quarantine", BATCH).skips[::2]),
            named="the data cursor's skips",
        ),
        "data.stages/drop": Control(
            recipe=_MIXED, damage=_other_plan(stages=first), named="the data cursor's mixture"
        ),
        "data.elastic/damage": Control(recipe=elastic, worlds=(3, 2), damage=_fetched,
                                       named="the data cursor"),
        "foreign.position/drop": Control(recipe=_FOREIGN, drop=_keep_stateful("loader"),
                                         named="the data cursor"),
        "foreign.fetched/damage": Control(
            recipe=_FOREIGN, damage=lambda job: job.take_batch(), named="the data cursor"
        ),
        "foreign.count/damage": Control(recipe=Recipe(data=COUNT), damage=_count_more,
                                        named="the data cursor"),
    }  # fmt: skip


CONTROLS: Final[Mapping[str, Control]] = {
    "weights/drop": Control(recipe=_MLP, drop=_keep_tensors(_weights), named="the weights"),
    "weights/damage": Control(recipe=_MLP, damage=_flip(_weights), named="the weights"),
    "weights.tie/damage": Control(recipe=Recipe(model="gpt"), damage=_untie,
                                  named="tie between two weights"),
    "buffer.mean/drop": Control(
        recipe=_AVERAGED, drop=_keep_tensors(_buffers, "running_mean"),
        named="buffer norm.running_mean"
    ),
    "buffer.variance/damage": Control(
        recipe=_AVERAGED, damage=_flip(_buffers, "running_var"), named="buffer norm.running_var"
    ),
    "buffer.tracked/drop": Control(
        recipe=_MLP, drop=_keep_tensors(_buffers, "num_batches_tracked"),
        named="num_batches_tracked", learns=False
    ),
    "buffer.bias/drop": Control(recipe=_MOE, drop=_keep_tensors(_buffers, ".bias"),
                                named="feed.bias"),
    "buffer.counts/drop": Control(
        recipe=_MOE, cut=(7, 1), drop=_keep_tensors(_buffers, ".counts"), named="feed.counts"
    ),
    "extra_state/drop": Control(
        recipe=Recipe(model="cnn"), drop=_keep_attributes(_curriculum, "seen"),
        named="extra state curriculum"
    ),
    "extra_state/damage": Control(
        recipe=Recipe(model="cnn"), damage=_alter(_curriculum, "seen"),
        named="extra state curriculum"
    ),
    "scheduler/drop": Control(recipe=_MLP, drop=_keep_stateful("scheduler"), named="the scheduler"),
    "scheduler/damage": Control(
        recipe=Recipe(schedule="one-cycle"), damage=_alter(lambda job: job.scheduler, "last_epoch"),
        named="the scheduler",
    ),
    "scheduler.plateau/drop": Control(
        recipe=Recipe(schedule="plateau"), cut=(5, 0), drop=_keep_stateful("scheduler"),
        named="the scheduler"
    ),
    "scaler.scale/drop": Control(recipe=_HALF, cut=(4, 0), drop=_keep_scaler("scale"),
                                 named="the loss scaler"),
    "scaler.growth/drop": Control(
        recipe=_HALF, cut=(8, 0), drop=_keep_scaler("_growth_tracker"), named="the loss scaler"
    ),
    "cursor/drop": Control(recipe=_MLP, drop=_keep_stateful("cursor"), named="the data cursor"),
    "cursor/damage": Control(recipe=_MLP, damage=_alter(lambda job: job.cursor, "consumed"),
                             named="the data cursor"),
    "window.gradients/drop": Control(
        recipe=_WINDOW, cut=(7, 1), drop=lambda job: job.core.zero_grad,
        named="the accumulation window"
    ),
    "averaged.weights/drop": Control(recipe=_AVERAGED, drop=_keep_tensors(_averages),
                                     named="the averaged weights"),
    "averaged.weights/damage": Control(recipe=_AVERAGED, damage=_flip(_averages),
                                       named="the averaged weights"),
    "averaged.count/drop": Control(
        recipe=_AVERAGED, drop=_keep_tensors(lambda job: {"n": job.averaged.n_averaged}),
        named="the averaged weights"
    ),
    "progress.skipped/drop": Control(
        recipe=_HALF, drop=_keep_attributes(lambda job: job.progress, "skipped"),
        named="loop's counters", learns=False
    ),
    **_moment_controls(),
    **_stream_controls(),
    **_data_controls(),
    "ranks.stream/damage": Control(recipe=_DDP, damage=_one_for_all,
                                   named="random-number stream torch"),
    "ranks.statistics/damage": Control(
        recipe=_DDP, damage=_statistics_of_first, named="buffer norm.running_mean", learns=False
    ),
    "elastic.weights/damage": Control(recipe=_ELASTIC, worlds=(3, 2), damage=_flip(_weights),
                                      named="the weights"),
    "elastic.window/drop": Control(
        recipe=_ELASTIC, worlds=(2, 3), cut=(7, 1), named="the trainer's own state",
        drop=lambda job: lambda: [slot[0].zero_() for slot in job.trainer.window.slots.values()],
    ),
    # No state is lost or damaged here. The usual order of summation alone must give other bits.
    "elastic.ring/damage": Control(recipe=_RING, worlds=(3, 4), named="nothing was restored yet"),
    "elastic.exp_avg/drop": Control(
        recipe=_ELASTIC, worlds=(1, 2), drop=_zero_moment("exp_avg"), named="optimizer's exp_avg"
    ),
}  # fmt: skip
