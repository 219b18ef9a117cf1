"""Time that saves take from a training on a device, and the rate of loads, as JSON."""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

import ckptfmt
from benchmarks.gpu.round_trip import bits_of

#: The steps before the first save, and the steps over which a save's loss is added up.
_BEFORE: Final = 10
_WINDOW: Final = 8
_LATER_SAVES: Final = 3
_LOADS: Final = 3
_LAYERS: Final = 24
#: Weight and two moments of an element, in bytes.
_ELEMENT_NBYTES: Final = 12


class Training:
    """A deep linear network; a step's batch gives the device much more work than Python needs."""

    def __init__(self, device: torch.device, nbytes: int, *, seed: int = 0) -> None:
        torch.manual_seed(seed)
        width = max(16, math.isqrt(nbytes // (_LAYERS * _ELEMENT_NBYTES)))
        layers = [torch.nn.Linear(width, width, bias=False) for _ in range(_LAYERS)]
        self.device = device
        self.model = torch.nn.Sequential(*layers).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=device.type == "cuda")
        self.rows = torch.randn(4096 if device.type == "cuda" else 4, width, device=device)
        self.state = ckptfmt.State(weights=self.model, optimizer=self.optimizer)

    def step(self) -> None:
        """Run a step."""
        self.optimizer.zero_grad()
        self.model(self.rows).square().mean().backward()
        self.optimizer.step()

    def tensors(self) -> list[torch.Tensor]:
        """Return the parameters and the optimizer's tensors."""
        states = [value for held in self.optimizer.state.values() for value in held.values()]
        return [*self.model.parameters(), *states]

    def time_step(self, before: Callable[[], object] = lambda: None) -> float:
        """Return the seconds of a call and of a step after it, to the end of the device's work."""
        begin_s = time.perf_counter()
        before()
        self.step()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - begin_s


def measure_saves(training: Training, run: Path, delta: str) -> dict[str, Any]:
    """Save after ten steps and some times later; return the seconds lost to each save.

    Lost is the time of the save's call and of the steps after it, beyond the median of steps
    without a save.
    """
    for _ in range(3):
        training.time_step()  # kernels are loaded, and the optimizer's state is made
    plain_s = statistics.median(training.time_step() for _ in range(_WINDOW))
    saves = []
    with ckptfmt.Checkpointer(
        run, training.state, keep=1, saving=ckptfmt.Saving(delta=delta)
    ) as checkpointer:
        with checkpointer.training_step():
            training.time_step()
        for number in range(1 + _LATER_SAVES):
            for _ in range(_BEFORE):
                with checkpointer.training_step():
                    training.time_step()
            handles: list[Any] = []
            call_s: list[float] = []

            def save() -> None:
                begin_s = time.perf_counter()
                handles.append(checkpointer.save())  # noqa: B023
                call_s.append(time.perf_counter() - begin_s)  # noqa: B023

            steps_s = [training.time_step(save)]
            steps_s += [training.time_step() for _ in range(_WINDOW - 1)]
            checkpointer.step += _WINDOW
            handles[0].wait()
            saves.append(
                {
                    "number": number,
                    "call_s": call_s[0],
                    "lost_s": sum(steps_s) - _WINDOW * plain_s,
                    "steps_s": steps_s,
                    "times": handles[0].times,
                }
            )
        reports = list(checkpointer.reports)
    return {"delta": delta, "plain_step_s": plain_s, "saves": saves, "reports": reports}


def measure_loads(training: Training, path: Path, nbytes: int) -> dict[str, Any]:
    """Save, load some times onto the device, and compare every bit."""
    ckptfmt.save(path, training.state, step=1)
    other = Training(training.device, nbytes, seed=1)
    other.step()
    seconds = []
    for _ in range(_LOADS):
        begin_s = time.perf_counter()
        ckptfmt.load(path, other.state)
        seconds.append(time.perf_counter() - begin_s)
    equal = all(
        bits_of(one) == bits_of(two)
        for one, two in zip(training.tensors(), other.tensors(), strict=True)
    )
    return {"warm_load_s": seconds, "equal": equal}


def main() -> int:
    """Measure, print the figures, and return 0 if every bit is right."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--nbytes", type=int, default=3_200_000_000)
    options = parser.parse_args()
    device = torch.device(options.device)
    with tempfile.TemporaryDirectory(prefix="ckptfmt-gpu-") as directory:
        training = Training(device, options.nbytes)
        found: dict[str, Any] = {
            "saves": [
                measure_saves(training, Path(directory) / delta, delta)
                for delta in ("off", "smallest")
            ]
        }
        found["nbytes"] = sum(tensor.nbytes for tensor in training.tensors())
        found |= measure_loads(training, Path(directory) / "load", options.nbytes)
    print(json.dumps(found, indent=1))
    return int(not found["equal"])


if __name__ == "__main__":
    raise SystemExit(main())
