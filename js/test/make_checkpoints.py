# ruff: noqa: INP001 (a script beside the tests in JavaScript)
"""Make checkpoints with the Python package, for the tests of the JavaScript package.

Usage: python make_checkpoints.py DIRECTORY

Each entry of DIRECTORY is a checkpoint or a run.
"""

from __future__ import annotations

import importlib.util
import pathlib
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import ckptfmt

INTEGERS = ["bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"]
FLOATS = ["float16", "bfloat16", "float32", "float64", "complex64", "complex128", "complex32"]
SMALL = ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"]
DTYPES = INTEGERS + FLOATS + SMALL


def tensor_of(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Return a tensor with random bits."""
    count = int(np.prod(shape))
    width = torch.empty(0, dtype=dtype).element_size()
    high = 2 if dtype == torch.bool else 256
    raw = np.random.default_rng(seed).integers(0, high, count * width, np.uint8)
    whole = torch.frombuffer(bytearray(raw.tobytes() or b"\0"), dtype=torch.uint8)
    return whole[: count * width].view(dtype).reshape(shape)


def save_tensors(root: pathlib.Path) -> None:
    """Save checkpoints that are no runs."""
    weights = {
        name: tensor_of(getattr(torch, name), (3, 5, 7), seed)
        for seed, name in enumerate(DTYPES)
        if hasattr(torch, name)
    }
    ckptfmt.save(root / "dtypes", ckptfmt.State(weights=weights, rng=False), step=1)
    arrays = {
        "scalar": np.float32(2.5).reshape(()),
        "empty": np.zeros((0, 4), "i2"),
        "é/x": np.arange(5),
    }
    ckptfmt.save(root / "shapes", ckptfmt.State(weights=arrays, rng=False), step=2)
    blocks = {"w": tensor_of(torch.float32, (300, 211), 7), "v": tensor_of(torch.int64, (1025,), 8)}
    ckptfmt.save(
        root / "blocks", ckptfmt.State(weights=blocks, rng=False), step=3, block_nbytes=4096
    )
    config = {
        "name": "small",
        "width": 64,
        "rates": [0.1] * 20,
        "names": ["a", "é"] * 12,
        "deep": {"t": (1, None)},
        "big": 2**70,
        "flags": [True] * 16,
    }
    extra = {"counter": {"steps": 7, "set": {1, 2, 3}, "bytes": b"\0\1"}}
    state = ckptfmt.State(
        weights={"w": np.ones(3)}, config=config, extra=extra, provenance={"by": "test"}
    )
    ckptfmt.save(root / "leaves", state, step=4, metrics={"loss": 2.5}, tags=["best"])
    model = torch.nn.Sequential(torch.nn.Linear(9, 5), torch.nn.BatchNorm1d(5))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 9)).square().mean().backward()
    optimizer.step()
    ckptfmt.save(root / "module", ckptfmt.State(weights=model, optimizer=optimizer), step=5)
    for step in (6, 7):
        state = ckptfmt.State(weights={"w": np.full(10, step)}, rng=False)
        ckptfmt.save(root / "replaced", state, step=step, replace=True)


def save_writers(root: pathlib.Path) -> None:
    """Save a checkpoint by three writers."""
    weights = {f"w{k}": tensor_of(torch.float32, (40 + k, 30), k) for k in range(6)}

    def work(writer: int) -> None:
        state = ckptfmt.State(
            weights=dict(weights), data=ckptfmt.PerWorker({"batches": writer}), rng=False
        )
        ckptfmt.save(
            root / "writers", state, step=8, writer=(writer, 3), agree="token", block_nbytes=4096
        )

    threads = [threading.Thread(target=work, args=(writer,)) for writer in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def train(
    run: pathlib.Path,
    steps: int,
    optimizer_of: Callable[[Any], torch.optim.Optimizer],
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> None:
    """Train a run that saves each step."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(120, 90), torch.nn.ReLU(), torch.nn.Linear(90, 50)]
    model = torch.nn.Sequential(*layers).to(dtype)
    optimizer = optimizer_of(model.parameters())
    saving = ckptfmt.Saving(saver="thread", **options)
    state = ckptfmt.State(weights=model, optimizer=optimizer, rng=False)
    with ckptfmt.Checkpointer(run, state, every=1, saving=saving) as checkpointer:
        for _ in checkpointer.steps(steps):
            loss = model(torch.randn(16, 120, dtype=dtype)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def save_runs(root: pathlib.Path) -> None:
    """Save runs, of full checkpoints and of deltas."""
    smallest = {"delta": {"mode": "smallest", "full_every": 8, "restore_budget": 1000.0}}
    train(root / "run-full", 3, lambda p: torch.optim.SGD(p, 0.1))
    train(root / "run-adamw", 6, lambda p: torch.optim.AdamW(p, 1e-3), **smallest)
    train(
        root / "run-adam-amsgrad",
        4,
        lambda p: torch.optim.Adam(p, 1e-3, amsgrad=True, weight_decay=0.1),
        **smallest,
    )
    train(
        root / "run-sgd",
        5,
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
        **smallest,
    )
    train(root / "run-bfloat16", 5, lambda p: torch.optim.SGD(p, 0.1), torch.bfloat16, **smallest)
    train(root / "run-again", 2, lambda p: torch.optim.SGD(p, 0.1), tags=["x"])
    train(root / "run-again", 4, lambda p: torch.optim.SGD(p, 0.1), tags=["x"])


def save_adapters(root: pathlib.Path) -> None:
    """Save a run of adapters, whose frozen base is a file."""
    base = torch.nn.Linear(64, 64).requires_grad_(requires_grad=False)
    safetensors = importlib.import_module("safetensors.torch")
    safetensors.save_file(base.state_dict(), root / "base.safetensors")
    model = torch.nn.ModuleDict({"base_layer": base, "lora": torch.nn.Linear(64, 4)})
    state = ckptfmt.State(weights=model, rng=False, frozen_base=str(root / "base.safetensors"))
    ckptfmt.save(root / "adapters", state, step=9)


if __name__ == "__main__":
    target = pathlib.Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    save_tensors(target)
    save_writers(target)
    save_runs(target)
    if importlib.util.find_spec("safetensors"):
        save_adapters(target)
