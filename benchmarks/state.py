"""The state that is saved: a real model and its AdamW, after a step, and a loop that trains it on all cores."""

from __future__ import annotations

import dataclasses
import math
import time
from typing import Final

import torch
from torch.nn import functional

import ckptfmt
from benchmarks.rounds import Progress, Workplace

#: Layers, each with one parameter; AdamW adds two moments of the same shape and a step count to
#: each.
PARAMETERS: Final = 66
_TENSORS_EACH: Final = 3
_FLOAT_NBYTES: Final = 4


def plan_width(nbytes: int) -> int:
    """Return the width of a layer with which weights and moments are nearest to `nbytes`; a multiple of 8.

    >>> plan_width(1_600_000_000)
    1424
    """
    elements = nbytes / (_FLOAT_NBYTES * _TENSORS_EACH * PARAMETERS)
    return max(8, 8 * round(math.sqrt(elements) / 8))


class Stack(torch.nn.Module):
    """Square layers one after the other, normalized between, so that no figure drifts into denormals."""

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
    """Where the seconds of one training step went.

    Attributes:
        passes_s: forward and backward pass.
        guard_s: from the call of the optimizer's step until its last pre-hook: what waits for
            copies stands here.
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
    """A model with an optimizer that has its state, and steps to take.

    Args:
        nbytes: about how many bytes weights and moments are together.
        threads: how many threads the steps use.
        device: what the state lies on, and steps are computed by.
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
        """Bytes of everything that is saved: the numerator of every rate."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return everything that is saved, flat: weights, moments, step counts."""
        flat = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        for number, slots in self.optimizer.state_dict()["state"].items():
            flat |= {f"optimizer.{number}.{name}": tensor for name, tensor in slots.items()}
        return flat

    def state_dict(self) -> dict[str, object]:
        """Return what torch's own savers take."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def describe(self) -> dict[str, object]:
        """Return what a record says of the workload."""
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
        """Choose how many rows a step takes: how long it is."""
        self._rows = torch.randn(rows, self.model.width, device=self.device)

    def drop_gradients(self) -> None:
        """Let go of the gradients: no step is to come."""
        self.optimizer.zero_grad(set_to_none=True)

    def watch_last(self) -> None:
        """Note the time after all hooks that there are by now, the guard of a checkpointer among them."""
        self._hook.remove()
        self._hook = self.optimizer.register_step_pre_hook(self._note_hook)

    def step(self) -> StepTimes:
        """Take one training step; a device has done it when this returns."""
        begin_s = time.perf_counter()
        self.optimizer.zero_grad(
            set_to_none=False
        )  # the gradients' memory stays, and stays touched
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
    """The state that is saved, the place for files, and whom to tell how far it is."""

    trainer: Trainer
    place: Workplace
    progress: Progress
