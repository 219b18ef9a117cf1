"""The trainer: microbatches of logical workers, one sum on the tree, one division, one update."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer

from ckptfmt_conformance.elastic.arithmetic import grad_norm
from ckptfmt_conformance.elastic.plan import Plan
from ckptfmt_conformance.elastic.scale import LossScale
from ckptfmt_conformance.elastic.tree import Reduction, Sums, TreeSum, WindowSum

__all__ = ["LossOf", "StepReport", "Trainer"]

#: Returns the *summed* loss of some samples, and the number of summands (tokens, rows).
LossOf: TypeAlias = Callable[[nn.Module, range], tuple[torch.Tensor, int]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """The result of a step; the same on every process.

    Attributes:
        step: the number of finished steps.
        samples: the positions, in the order of the data, of the samples of all logical workers.
        loss: the mean loss over all samples.
        norm: the norm of the gradient before clipping.
        skipped: whether the gradient overflowed and the optimizer's step was skipped.
    """

    step: int
    samples: range
    loss: float
    norm: float
    skipped: bool = False


class Trainer:
    """Train a model with the same bits of every step on any number of processes.

    Each process makes the same model, optimizer and trainer, and calls `step` equally often. Before
    every microbatch of a logical worker, Python's and torch's random numbers are seeded by plan,
    step, microbatch and worker. Afterwards the process's own streams are restored. For other
    streams, such as numpy's, `loss_of` derives seeds from the positions.

    **Buffers** belong to logical workers too: each worker begins a microbatch with the same
    buffers. For floating-point buffers, such as the running statistics of BatchNorm, the mean over
    the logical workers is kept. Integer buffers grow by the sum of all workers' increments. Any
    other state changed by a forward pass would depend on the process: keep such state in a buffer.

    Args:
        model: the model, with the same initial values on every process.
        optimizer: any elementwise optimizer, with fixed `foreach` and `fused`.
        plan: the fixed shape of the run.
        loss_of: the loss of some samples, given as positions in the order of the data.
        max_norm: the maximum norm of the clipped gradient; None for no clipping.
        scale: a loss scale, for half precision; saved with the trainer.
        reduction: the sum over the logical workers; `TreeSum` by default.

    Attributes:
        steps_done: the number of finished steps.
        micro: the number of finished microbatches of the unfinished step.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        plan: Plan,
        loss_of: LossOf,
        *,
        max_norm: float | None = None,
        scale: LossScale | None = None,
        reduction: Reduction | None = None,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._plan = plan
        self._loss_of = loss_of
        self._max_norm = max_norm
        self._scale = scale
        self._reduction: Reduction = reduction or TreeSum()
        self._parameters = [
            parameter for parameter in model.parameters() if parameter.requires_grad
        ]
        self.window = WindowSum()
        self.steps_done = 0

    @property
    def micro(self) -> int:
        """The number of finished microbatches of the unfinished step."""
        return self.window.count

    def step(self) -> StepReport:
        """Finish the step: its remaining microbatches and the optimizer's step.

        Call on every process.
        """
        while (report := self.microbatch()) is None:
            pass
        return report

    def microbatch(self) -> StepReport | None:
        """Do one microbatch of every logical worker.

        Returns: the step's report after its last microbatch; None before.
        """
        before = [buffer.clone() for buffer in self._model.buffers()]

        def leaf(worker: int) -> Sums:
            with torch.no_grad():
                for buffer, value in zip(self._model.buffers(), before, strict=True):
                    buffer.copy_(value)
            return self._compute(worker, before)

        sums = self._reduction(leaf, self._plan, like=self._make_empty(before))
        self.window.push(self._take_buffers(sums, before))
        return self._finish() if self.micro == self._plan.accumulate else None

    def _compute(self, worker: int, before: list[torch.Tensor]) -> Sums:
        """Return a logical worker's summands: gradients, loss and buffers; counts."""
        at = {"step": self.steps_done, "micro": self.micro, "worker": worker}
        with _streams(self._plan.stream_seed(**at)):
            loss, count = self._loss_of(self._model, self._plan.samples(**at))
            scaled = loss * self._scale.scale if self._scale else loss
            # `.grad` would add the gradients of several logical workers in the order of the
            # process.
            gradients = torch.autograd.grad(
                scaled, self._parameters, allow_unused=True, materialize_grads=True
            )
        floats = [gradient.reshape(-1).float() for gradient in gradients] + [
            loss.detach().reshape(1).float()
        ]
        wholes = [torch.tensor([count], device=loss.device)]
        for buffer, old in zip(self._model.buffers(), before, strict=True):
            if buffer.is_floating_point():
                floats.append(buffer.detach().reshape(-1).float())
                wholes.append((buffer != old).any().long().reshape(1))
            else:
                wholes.append((buffer.long() - old.long()).reshape(-1))
        return torch.cat(floats), torch.cat(wholes)

    def _make_empty(self, before: list[torch.Tensor]) -> Sums:
        device = self._parameters[0].device
        floats = sum(parameter.numel() for parameter in self._parameters) + 1
        floats += sum(buffer.numel() for buffer in before if buffer.is_floating_point())
        wholes = 1 + sum(1 if buffer.is_floating_point() else buffer.numel() for buffer in before)
        return torch.empty(floats, device=device), torch.empty(
            wholes, dtype=torch.int64, device=device
        )

    @torch.no_grad()
    def _take_buffers(self, sums: Sums, before: list[torch.Tensor]) -> Sums:
        """Set the buffers from a microbatch's sums. Return the sums that the window needs."""
        floats, wholes = sums
        at_float = sum(parameter.numel() for parameter in self._parameters) + 1
        at_whole = 1
        kept = floats[:at_float].clone(), wholes[:at_whole].clone()
        for buffer, old in zip(self._model.buffers(), before, strict=True):
            if buffer.is_floating_point():
                mean = (floats[at_float : at_float + old.numel()] / self._plan.workers).view_as(old)
                # An unchanged buffer is kept: the sum of equal values, divided by their number, may
                # differ from the value.
                buffer.copy_(mean if wholes[at_whole] else old)
                at_float = at_float + old.numel()
                at_whole = at_whole + 1
            else:
                buffer.copy_(old + wholes[at_whole : at_whole + old.numel()].view_as(old))
                at_whole += old.numel()
        return kept

    @torch.no_grad()
    def _finish(self) -> StepReport:
        """Divide once, clip, and do the optimizer's step.

        The result is the same on every process without communication.
        """
        floats, wholes = self.window.total()
        self.window.clear()
        count = int(wholes[0].item())
        scale = self._scale.scale if self._scale else 1.0
        flat = floats[:-1] / scale / count
        skipped = bool(self._scale) and not bool(torch.isfinite(flat).all())
        parts = torch.split(flat, [parameter.numel() for parameter in self._parameters])
        gradients = [
            part.view_as(parameter) for part, parameter in zip(parts, self._parameters, strict=True)
        ]
        norm = grad_norm(gradients)
        if not skipped:
            factor = (
                torch.clamp(self._max_norm / (norm + 1e-6), max=1.0) if self._max_norm else None
            )
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                parameter.grad = (gradient if factor is None else gradient * factor).to(
                    parameter.dtype
                )
            self._optimizer.step()
            self._optimizer.zero_grad()
        if self._scale:
            self._scale.update(overflow=skipped)
        begin = self.steps_done * self._plan.global_batch
        self.steps_done += 1
        return StepReport(
            step=self.steps_done,
            samples=range(begin, begin + self._plan.global_batch),
            loss=float(floats[-1].item()) / count,
            norm=float(norm.item()),
            skipped=skipped,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the run, the same on every process, between and within steps."""
        return {
            "plan": self._plan.as_tree(),
            "steps_done": self.steps_done,
            "scale": self._scale.state_dict() if self._scale else None,
            "window": self.window.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state saved by any number of processes.

        Raises: ValueError for a run of another plan.
        """
        self._plan.check_same(state["plan"])
        self.window.load_state_dict(state["window"])
        self.steps_done = state["steps_done"]
        if self._scale and state["scale"] is not None:
            self._scale.load_state_dict(state["scale"])


@contextmanager
def _streams(seed: int) -> Iterator[None]:
    """Seed Python's and torch's random numbers; restore the process's streams at the end."""
    python = random.getstate()
    with torch.random.fork_rng():
        random.seed(seed)
        torch.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
