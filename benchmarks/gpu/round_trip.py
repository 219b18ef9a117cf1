"""Save, load, save deltas and resume on a device, compare every bit; print the checks as JSON."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import tempfile
from pathlib import Path
from typing import Any, Final

import torch

import ckptfmt

_STEPS: Final = 6
_KILLED_AFTER: Final = 4
_LAYERS: Final = 4
#: Weights and two moments, in bytes per element.
_ELEMENT_NBYTES: Final = 12
_DTYPES: Final = (
    *(
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int8,
        torch.uint8,
        torch.int16,
        torch.int32,
    ),
    *(
        torch.int64,
        torch.bool,
        torch.complex64,
        torch.complex128,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    ),
)


@dataclasses.dataclass(slots=True)
class Training:
    """A model with dropout and its optimizer on a device; seed and steps determine the state."""

    model: Any
    optimizer: Any
    device: torch.device
    data: dict[str, int]

    @classmethod
    def make(cls, device: torch.device, width: int, *, seed: int) -> Training:
        """Return a new training before the first step."""
        torch.manual_seed(seed)
        layers = [
            torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Dropout(0.1))
            for _ in range(_LAYERS)
        ]
        model = torch.nn.Sequential(*layers).to(device)
        model.register_buffer("count", torch.zeros((), dtype=torch.int64, device=device))
        return cls(model, torch.optim.AdamW(model.parameters(), lr=1e-3), device, {"step": 0})

    @property
    def state(self) -> ckptfmt.State:
        """The state to save and restore."""
        config = {"width": self.model[0][0].in_features}
        return ckptfmt.State(
            weights=self.model, optimizer=self.optimizer, data=self.data, config=config
        )

    def step(self) -> None:
        """Run a step; dropout draws from the device's own stream."""
        width = self.model[0][0].in_features
        rows = torch.full((16, width), 0.5 + 0.1 * self.data["step"], device=self.device)
        self.optimizer.zero_grad()
        (self.model(rows) - 1).square().mean().backward()
        self.optimizer.step()
        self.model.count += 1
        self.data["step"] += 1

    def bits(self) -> dict[str, bytes]:
        """Return all tensors as bytes."""
        tensors = dict(self.model.state_dict())
        for number, held in self.optimizer.state_dict()["state"].items():
            tensors |= {f"{number}.{name}": tensor for name, tensor in held.items()}
        return {name: bits_of(tensor) for name, tensor in tensors.items()}


def bits_of(tensor: torch.Tensor) -> bytes:
    """Return the elements of a tensor as bytes, in C order."""
    host = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return host.reshape(-1).view(torch.uint8).numpy().tobytes()


def main() -> int:
    """Run all checks, print the results, and return 0 if all pass."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--nbytes", type=int, default=200_000_000)
    options = parser.parse_args()
    torch.use_deterministic_algorithms(mode=True)
    device = torch.device(options.device)
    width = max(64, math.isqrt(options.nbytes // (_LAYERS * _ELEMENT_NBYTES)))
    found: dict[str, object] = {}
    with tempfile.TemporaryDirectory(prefix="ckptfmt-gpu-") as directory:
        found |= check_dtypes(Path(directory) / "dtypes", device)
        found |= check_run(Path(directory) / "run", device, width)
    print(json.dumps(found, indent=1))
    return int(False in found.values())


def check_dtypes(path: Path, device: torch.device) -> dict[str, object]:
    """Save tensors of all dtypes, some with unusual strides, and load on device and host."""
    made = {}
    for number, dtype in enumerate(_DTYPES):
        size = torch.empty(0, dtype=dtype).element_size()
        raw = torch.randint(0, 2 if dtype is torch.bool else 256, (1001 * size,), dtype=torch.uint8)
        flat = raw.to(device).view(dtype)
        made[f"{number}-{dtype}"] = flat[: 7 * 11 * 13].view(77, 13).T if number % 2 else flat
    made |= {"scalar": torch.tensor(1.5, device=device), "empty": torch.empty(0, 3, device=device)}
    ckptfmt.save(path, ckptfmt.State(weights=made), step=1)
    found: dict[str, object] = {}
    for where in {device.type, "cpu"}:
        live = {name: torch.zeros_like(tensor, device=where) for name, tensor in made.items()}
        ckptfmt.load(path, ckptfmt.State(weights=live))
        found[f"dtypes, loaded on {where}"] = all(
            bits_of(live[name]) == bits_of(made[name]) for name in made
        )
    return found


def check_run(run: Path, device: torch.device, width: int) -> dict[str, object]:
    """Train without and with an interruption, from deltas; compare each state and checkpoint."""
    undisturbed = Training.make(device, width, seed=1)
    expected = {}
    for _ in range(_STEPS):
        undisturbed.step()
        expected[undisturbed.data["step"]] = undisturbed.bits()

    found: dict[str, object] = {}
    reports = []
    first = Training.make(device, width, seed=1)
    with ckptfmt.Checkpointer(
        run, first.state, saving=ckptfmt.Saving(delta="smallest"), every=1
    ) as checkpointer:
        for _ in checkpointer.steps(_KILLED_AFTER):
            first.step()
        reports += checkpointer.reports
    found["trained alike"] = first.bits() == expected[_KILLED_AFTER]

    second = Training.make(device, width, seed=2)
    with ckptfmt.Checkpointer(
        run, second.state, saving=ckptfmt.Saving(delta="smallest"), every=1
    ) as checkpointer:
        report = checkpointer.load_report
        assert report is not None, "the run has checkpoints"
        found["resumed"] = second.bits() == expected[_KILLED_AFTER]
        found["claim"] = f"{report.claim} {', '.join(report.lowered_by)}"
        for _ in checkpointer.steps(_STEPS):
            second.step()
        reports += checkpointer.reports
    found["went on alike"] = second.bits() == expected[_STEPS]

    profiles = []
    for path in sorted(run.glob("step-*")):
        with ckptfmt.open(path) as checkpoint:
            profiles.append(checkpoint.manifest.profile)
        again = Training.make(device, width, seed=3)
        again.step()
        ckptfmt.load(path, again.state)
        found[f"{path.name} loaded"] = again.bits() == expected[again.data["step"]]
        found[f"{path.name} valid"] = not ckptfmt.validate(path).violations
    found["a delta among them"] = "delta" in profiles
    found["nothing reported"] = not reports
    return {**found, "profiles": profiles, "reports": reports}


if __name__ == "__main__":
    raise SystemExit(main())
