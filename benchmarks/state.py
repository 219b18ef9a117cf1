"""The saved state: a real model with AdamW after a step, and a training loop on all cores."""

from __future__ import annotations

import dataclasses
import math
import time
from typing import Final

import torch
from torch.nn import functional

import ckptfmt
from benchmarks.rounds import Progress, Workplace

#: Layers with a parameter each; AdamW adds two moments of the same shape and a step count to each.
PARAMETERS: Final = 66
_TENSORS_EACH: Final = 3
_FLOAT_NBYTES: Final = 4


def plan_width(nbytes: int) -> int:
    """Return the layer width for weights and moments of about `nbytes`; a multiple of 8.

    >>> plan_width(1_600_000_000) 1424
    """
    elements = nbytes / (_FLOAT_NBYTES * _TENSORS_EACH * PARAMETERS)
    return max(8, 8 * round(math.sqrt(elements) / 8))


class Stack(torch.nn.Module):
    """Consecutive square layers, normalized between, so that no number drifts into denormals."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        layers = [torch.nn.Linear(width, width, bias=False) for _ in range(PARAMETERS)]
        for layer in layers:
            torch.nn.init.normal_(layer.weight, std=width**-0.5)
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows after all layers."""
        for layer in self.layers:
            rows = functional.layer_norm(layer(rows), rows.shape[-1:])
        return rows


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """The seconds of a training step.

    Attributes:
        passes_s: forward and backward pass.
        guard_s: the time from the call of the optimizer's step until the last pre-hook: waits for
            copies happen here.
        update_s: the rest of the optimizer's step.
    """

    passes_s: float
    guard_s: float
    update_s: float

    @property
    def step_s(self) -> float:
        """The whole step."""
        return self.passes_s + self.guard_s + self.update_s


class Trainer:
    """A model with an optimizer and its state, ready for steps.

    Args:
        nbytes: the approximate size of weights and moments together.
        threads: the number of threads for steps.
        device: the device of the state and of steps.
    """

    def __init__(self, nbytes: int, *, threads: int, device: str = "cpu") -> None:
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        self.threads = threads
        self.device = torch.device(device)
        self.model = Stack(plan_width(nbytes)).to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self.state = ckptfmt.State(weights=self.model, optimizer=self.optimizer)
        self._hooked_s = 0.0
        self._hook = self.optimizer.register_step_pre_hook(self._note_hook)
        self.set_batch(1)
        self.step()

    @property
    def nbytes(self) -> int:
        """Bytes of the whole saved state: the numerator of every rate."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the whole saved state, flat: weights, moments, step counts."""
        flat = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        for number, slots in self.optimizer.state_dict()["state"].items():
            flat |= {f"optimizer.{number}.{name}": tensor for name, tensor in slots.items()}
        return flat

    def state_dict(self) -> dict[str, object]:
        """Return the state for torch's own savers."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def describe(self) -> dict[str, object]:
        """Return the workload's entry for a record."""
        large = [tensor for tensor in self.tensors().values() if tensor.ndim]
        return {
            "nbytes": self.nbytes,
            "tensors": len(large),
            "step_counts": len(self.tensors()) - len(large),
            "dtype": "float32",
            "shape": list(large[0].shape),
            "optimizer": "AdamW(fused=True)",
            "device": self.device.type,
        }

    def set_batch(self, rows: int) -> None:
        """Set the number of rows in a step, which determines the duration."""
        self._rows = torch.randn(rows, self.model.width, device=self.device)

    def drop_gradients(self) -> None:
        """Release the gradients; no step may follow."""
        self.optimizer.zero_grad(set_to_none=True)

    def watch_last(self) -> None:
        """Record the time after all current hooks, the guard of a checkpointer included."""
        self._hook.remove()
        self._hook = self.optimizer.register_step_pre_hook(self._note_hook)

    def step(self) -> StepTimes:
        """Run a training step, and wait until the device has finished."""
        begin_s = time.perf_counter()
        self.optimizer.zero_grad(
            set_to_none=False
        )  # the gradients' memory stays allocated and touched
        loss = (self.model(self._rows) - 1).square().mean()
        loss.backward()
        self._settle()
        called_s = time.perf_counter()
        self.optimizer.step()
        self._settle()
        return StepTimes(
            passes_s=called_s - begin_s,
            guard_s=self._hooked_s - called_s,
            update_s=time.perf_counter() - self._hooked_s,
        )

    def _settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _note_hook(self, *_: object) -> None:
        self._hooked_s = time.perf_counter()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """The saved state, the place for files, and the receiver of progress messages."""

    trainer: Trainer
    place: Workplace
    progress: Progress
