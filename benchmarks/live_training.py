"""A small torch training that mostly sleeps; `benchmarks.goodput` starts, kills and restarts it."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

import ckptfmt


def main(arguments: Sequence[str]) -> int:
    """Train until a SIGTERM, each step at the pace of a clock; then save and close the run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.live_training")
    parser.add_argument("run", type=Path)
    parser.add_argument("--step-s", type=float, required=True)
    parser.add_argument("--every", required=True)
    parser.add_argument("--snapshot-every", type=int)
    parser.add_argument("--width", type=int, default=512)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    width = options.width
    model = torch.nn.Sequential(
        torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters())
    state = ckptfmt.State(weights=model, optimizer=optimizer)
    checkpointer = ckptfmt.Checkpointer(
        options.run,
        state,
        every=options.every,
        keep=2,
        ledger=True,
        saving=ckptfmt.Saving(snapshot_every=options.snapshot_every),
        stop=ckptfmt.Stop(signals=[signal.SIGTERM]),
    )
    with checkpointer:
        for _ in checkpointer.steps(10**9):
            begin_s = time.monotonic()
            model(torch.randn(4, width)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(max(0.0, begin_s + options.step_s - time.monotonic()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
