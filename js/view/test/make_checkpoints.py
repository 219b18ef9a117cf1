# ruff: noqa: INP001 (a script beside the tests in JavaScript)
"""Make a run and checkpoints for the tests of the page.

Usage: python make_checkpoints.py DIRECTORY [NBYTES]

DIRECTORY gets the run `run`, of deltas and three launches; the checkpoints `many` (10,000 tensors),
`kinds` (dtypes and plain values), `tied`, `writers` (three writers) and `damaged` (a flipped bit);
and `expected.json`, with the values that the page must show. With NBYTES, the script makes only the
checkpoint `large` of this size.
"""

from __future__ import annotations

import json
import math
import pathlib
import sys
import threading
from typing import Any

import numpy as np
import torch

import ckptfmt


def train(run: pathlib.Path, steps: int, resume: str = "auto") -> torch.nn.Module:
    """Train one launch of a run that saves each step, as deltas."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(120, 90), torch.nn.ReLU(), torch.nn.Linear(90, 50)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    saving = ckptfmt.Saving(
        saver="thread",
        tags=["demo"],
        delta={"mode": "smallest", "full_every": 8, "restore_budget": 1000.0},
    )
    config = {"model": {"width": 90, "dropout": 0.1, "seed": 2**70}, "name": "small"}
    state = ckptfmt.State(weights=model, optimizer=optimizer, config=config)
    with ckptfmt.Checkpointer(run, state, every=1, saving=saving, resume=resume) as checkpointer:
        for _ in checkpointer.steps(steps):
            loss = model(torch.randn(16, 120)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model


def save_kinds(root: pathlib.Path) -> dict[str, Any]:
    """Save dtypes, shapes and plain values, and return the values to be shown."""
    cube = np.random.default_rng(1).standard_normal((3, 4, 40, 30)).astype(np.float32)
    cube[2, 3, 39, 29] = np.nan
    cube[0, 0, 0, 1] = np.inf
    base = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    weights = {
        "cube": torch.from_numpy(cube),
        "half": torch.tensor([0.1, -2.5, 65504.0, float("nan")], dtype=torch.float16),
        "brain": torch.tensor([0.1, 3.0e38], dtype=torch.bfloat16),
        "wide": torch.tensor([[0.1, math.pi], [1e300, -0.0]], dtype=torch.float64),
        "big": torch.tensor([2**62 + 1, -(2**53) - 1, 0], dtype=torch.int64),
        "flags": torch.tensor([True, False]),
        "wave": torch.tensor([1 + 2j, -0.5j], dtype=torch.complex64),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros((0, 4)),
        "long": torch.arange(5000, dtype=torch.int32),
        "tied": base,
        "tied.again": base,
        "<img src=x onerror=alert(1)>": torch.ones(1),
    }
    config = {
        "rate": 0.1,
        "third": 1 / 3,
        "seed": 2**70,
        "names": [f"layer-{k}" for k in range(450)],
        "deep": {"t": (1, None, True), "empty": {}},
    }
    state = ckptfmt.State(weights=weights, config=config, provenance={"by": "test"})
    ckptfmt.save(root / "kinds", state, step=42, metrics={"loss": 2.5}, tags=["best"])
    finite = cube[np.isfinite(cube)].astype(np.float64)
    return {
        "window": [[float(value) for value in row] for row in cube[1, 2, 3:27, 4:12]],
        "min": float(np.nanmin(cube)),
        "mean": float(finite.mean()),
    }


def save_tied(root: pathlib.Path) -> None:
    """Save a module with tied weights and a non-persistent buffer."""
    model = torch.nn.ModuleDict({"embed": torch.nn.Linear(4, 3), "head": torch.nn.Linear(4, 3)})
    model["head"].weight = model["embed"].weight
    model.register_buffer("mask", torch.ones(5), persistent=False)
    ckptfmt.save(root / "tied", ckptfmt.State(weights=model, rng=False), step=9)


def save_many(root: pathlib.Path) -> None:
    """Save 10,000 small tensors."""
    weights = {
        f"layers.{k // 10}.block.{k % 10}.weight": np.full((2, 3), k, np.float32)
        for k in range(10_000)
    }
    ckptfmt.save(root / "many", ckptfmt.State(weights=weights, rng=False), step=7)


def save_writers(root: pathlib.Path) -> None:
    """Save a checkpoint by three writers, and a copy with a flipped bit."""

    def work(name: str, writer: int) -> None:
        weights = {f"w{k}": torch.full((400, 300), float(k)) for k in range(6)}
        state = ckptfmt.State(
            weights=weights, data=ckptfmt.PerWorker({"batches": writer}), rng=False
        )
        ckptfmt.save(root / name, state, step=8, writer=(writer, 3), agree=name)

    for name in ("writers", "damaged"):
        threads = [threading.Thread(target=work, args=(name, writer)) for writer in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    shard = max(root.joinpath("damaged").rglob("*.safetensors"), key=lambda p: p.stat().st_size)
    content = bytearray(shard.read_bytes())
    content[-1000] ^= 1
    shard.write_bytes(content)


def save_large(root: pathlib.Path, nbytes: int) -> None:
    """Save random tensors of 16 MiB."""
    count = max(1, round(nbytes / 2**24))
    random = np.random.default_rng(0)
    weights = {f"w{k}": random.standard_normal(2**22, np.float32) for k in range(count)}
    ckptfmt.save(root / "large", ckptfmt.State(weights=weights, rng=False), step=1)


def main() -> None:
    """Make everything that the arguments ask for."""
    root = pathlib.Path(sys.argv[1])
    root.mkdir(parents=True, exist_ok=True)
    if len(sys.argv) > 2:
        save_large(root, int(sys.argv[2]))
        return
    train(root / "run", 4)
    train(root / "run", 6)
    model = train(root / "run", 7, "step-00000005-l0002")
    expected = save_kinds(root)
    save_tied(root)
    save_many(root)
    save_writers(root)
    with torch.no_grad():
        expected["weight"] = model[0].weight[:24, :8].tolist()
    (root / "expected.json").write_text(json.dumps(expected), "utf-8")


if __name__ == "__main__":
    main()
