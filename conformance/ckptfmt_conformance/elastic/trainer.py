"""The trainer: microbatches of logical workers, summed on the tree, one division, one optimizer step."""

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

#: Returns the loss of some samples, *summed* over what it's taken of, and how many those are (tokens, rows).
LossOf: TypeAlias = Callable[[nn.Module, range], tuple[torch.Tensor, int]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What a step did; the same on every process.

    Attributes:
        step: steps done.
        samples: positions in the order of the data that all logical workers took.
        loss: mean over all of them.
        norm: of the gradient, before it was clipped.
        skipped: whether the gradient overflowed, and nothing was learnt.
    """

    step: int
    samples: range
    loss: float
    norm: float
    skipped: bool = False


class Trainer:
    """Train a model so that the bits of every step are the same on any number of processes.

    Each process makes the same model, optimizer and trainer, and calls `step` equally often. Before every microbatch of
    a logical worker Python's and torch's random numbers are seeded by plan, step, microbatch and worker; afterwards
    the process's own streams are as they were. Other streams, such as numpy's, are for `loss_of` to derive from the
    positions.

    **Buffers** go by logical workers, too: each begins a microbatch with the same ones. Of floating-point buffers, such
    as the running statistics of BatchNorm, the mean over the logical workers is kept; whole numbers count up by what
    all of them add together. Anything else that a forward pass changes would go by processes: keep it in a buffer.

    Args:
        model: the same on every process, also in its first values.
        optimizer: any that treats each element alone; with a fixed `foreach` and `fused`.
        plan: what is fixed for the run.
        loss_of: the loss of some samples, given as positions in the order of the data.
        max_norm: what the gradient's norm is clipped to.
        scale: a loss scale, for half precision; saved with the trainer.
        reduction: how to sum over the logical workers.

    Attributes:
        steps_done: steps done.
        micro: microbatches done of the step that isn't.
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
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.window = WindowSum()
        self.steps_done = 0

    @property
    def micro(self) -> int:
        """Microbatches done of the step that isn't."""
        return self.window.count

    def step(self) -> StepReport:
        """Finish the step: all of its microbatches, and the optimizer's step; on every process."""
        while (report := self.microbatch()) is None:
            pass
        return report

    def microbatch(self) -> StepReport | None:
        """Do one microbatch of every logical worker; with the last one of a step, return the step's report."""
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
        """Return what a logical worker adds to the sums: gradients, loss and buffers; counts."""
        at = {"step": self.steps_done, "micro": self.micro, "worker": worker}
        with _streams(self._plan.stream_seed(**at)):
            loss, count = self._loss_of(self._model, self._plan.samples(**at))
            scaled = loss * self._scale.scale if self._scale else loss
            # Not into `.grad`, where it would be added to another logical worker's.
            gradients = torch.autograd.grad(scaled, self._parameters, allow_unused=True, materialize_grads=True)
        floats = [gradient.reshape(-1).float() for gradient in gradients] + [loss.detach().reshape(1).float()]
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
        return torch.empty(floats, device=device), torch.empty(wholes, dtype=torch.int64, device=device)

    @torch.no_grad()
    def _take_buffers(self, sums: Sums, before: list[torch.Tensor]) -> Sums:
        """Set the buffers from a microbatch's sums, and return the sums that the window still needs."""
        floats, wholes = sums
        at_float, at_whole = sum(parameter.numel() for parameter in self._parameters) + 1, 1
        kept = floats[:at_float].clone(), wholes[:at_whole].clone()
        for buffer, old in zip(self._model.buffers(), before, strict=True):
            if buffer.is_floating_point():
                mean = (floats[at_float : at_float + old.numel()] / self._plan.workers).view_as(old)
                # What nobody changed stays: a sum of equals, divided by their number, may be another value.
                buffer.copy_(mean if wholes[at_whole] else old)
                at_float, at_whole = at_float + old.numel(), at_whole + 1
            else:
                buffer.copy_(old + wholes[at_whole : at_whole + old.numel()].view_as(old))
                at_whole += old.numel()
        return kept

    @torch.no_grad()
    def _finish(self) -> StepReport:
        """Divide once, clip, and let the optimizer step: the same on every process, without a word between them."""
        floats, wholes = self.window.total()
        self.window.clear()
        count = int(wholes[0].item())
        scale = self._scale.scale if self._scale else 1.0
        flat = floats[:-1] / scale / count
        skipped = bool(self._scale) and not bool(torch.isfinite(flat).all())
        parts = torch.split(flat, [parameter.numel() for parameter in self._parameters])
        gradients = [part.view_as(parameter) for part, parameter in zip(parts, self._parameters, strict=True)]
        norm = grad_norm(gradients)
        if not skipped:
            factor = torch.clamp(self._max_norm / (norm + 1e-6), max=1.0) if self._max_norm else None
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                parameter.grad = (gradient if factor is None else gradient * factor).to(parameter.dtype)
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
        """Return where the run stands: the same on every process, at a step's end and within a step alike."""
        return {
            "plan": self._plan.as_tree(),
            "steps_done": self.steps_done,
            "scale": self._scale.state_dict() if self._scale else None,
            "window": self.window.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state that was saved by any number of processes.

        Raises: ValueError for a run of another plan.
        """
        self._plan.check_same(state["plan"])
        self.window.load_state_dict(state["window"])
        self.steps_done = state["steps_done"]
        if self._scale and state["scale"] is not None:
            self._scale.load_state_dict(state["scale"])


@contextmanager
def _streams(seed: int) -> Iterator[None]:
    """Seed Python's and torch's random numbers, and leave the process's own streams as they were."""
    python = random.getstate()
    with torch.random.fork_rng():
        random.seed(seed)
        torch.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
