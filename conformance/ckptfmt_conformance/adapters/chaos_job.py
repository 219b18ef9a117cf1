"""ckptfmt's own training job for fault campaigns.

Use: ``python -m ckptfmt_conformance.adapters.chaos_job``.

The job trains a small model with `ckptfmt_conformance.elastic`, whose bits are the same on any
number of processes, and saves each step. The job doesn't know of faults. The precautions are
recommended by the page on elastic runs: a time-out for collective calls, `stop_on`,
`check_replicas`, the end of a launch after a takeover, and a check for finite weights.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import signal
import sys
import time
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import blake3

import ckptfmt
from ckptfmt.errors import CkptError, FencedError

#: The time after which a silent process counts as lost, in seconds.
_SILENCE_S = 10
#: The time limit of the orderly stop after SIGTERM, in seconds. torchrun also sends SIGTERM after
#: the loss of other processes, and a wait for these would be in vain.
_STOP_S = 5


def train(run: Path, *, steps: int, progress: Path | None, pace_s: float) -> bool:
    """Train from the run's current step until `steps` are done, as a process of a job or alone.

    Returns: False if a signal stopped the training before.
    """
    import torch  # noqa: PLC0415 - reading a run needs no torch
    import torch.distributed as dist  # noqa: PLC0415
    from torch import nn  # noqa: PLC0415

    from ckptfmt_conformance.elastic import Plan, Trainer  # noqa: PLC0415

    # sums depend on the number of threads; `pin_arithmetic` would import the compiler
    torch.set_num_threads(1)
    rank = int(os.environ.get("RANK", "0"))
    if "RANK" in os.environ:
        dist.init_process_group("gloo", timeout=dt.timedelta(seconds=_SILENCE_S))
    _leave_out_compiler()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.1), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    inputs = torch.randn(999, 8, generator=torch.Generator().manual_seed(1))
    sampler = ckptfmt.Sampler(len(inputs), global_batch=8, seed=0, worker=(0, 1))
    batch: list[int] = []

    def loss_of(_: nn.Module, positions: range) -> tuple[torch.Tensor, int]:
        samples = [batch[position % len(batch)] for position in positions]
        return (model(inputs[samples]) - inputs[samples].sum(1, keepdim=True)).square().sum(), len(
            samples
        )

    trainer = Trainer(model, optimizer, Plan(workers=4, microbatch=2, seed=5), loss_of)
    state = ckptfmt.State(
        weights=model, optimizer=optimizer, data=sampler, extra={"trainer": trainer}
    )
    with ckptfmt.Checkpointer(
        run,
        state,
        every=1,
        checks=ckptfmt.Checks(replicas=True),
        stop=ckptfmt.Stop(signals=[signal.SIGTERM], deadline_s=_STOP_S),
        job=ckptfmt.Job(deadline_s=2 * _SILENCE_S),
    ) as checkpointer:
        batches = iter(sampler)
        for step in checkpointer.steps(steps):
            batch[:] = next(batches)
            trainer.step()
            if not all(bool(parameter.isfinite().all()) for parameter in model.parameters()):
                raise FloatingPointError(f"step {step}: the weights aren't finite")
            if progress is not None and rank == 0:
                with progress.open("a", encoding="utf-8") as file:
                    file.write(
                        f"{step} {time.monotonic():.3f} {os.environ.get('WORLD_SIZE', '1')}\n"
                    )
            time.sleep(pace_s)
    return not checkpointer.stopped


def _leave_out_compiler() -> None:
    """Replace torch's compiler by a stub.

    The first call of an optimizer would import the compiler, which takes half of a restart's time.
    """
    nothing: Any = types.SimpleNamespace(
        disable=lambda function, *_, **__: function, graph_break=lambda: None
    )
    # The stub has all functions called by optimizers.
    sys.modules.setdefault("torch._dynamo", nothing)


def read_states(run: Path) -> dict[str, dict[str, str | int]]:
    """Return the step of each committed checkpoint, and the digest of the bits or a problem."""
    found: dict[str, dict[str, str | int]] = {}
    for one in ckptfmt.Run(run).list():
        if one.state == "unreadable":
            found[one.name] = {"step": one.step, "problem": "its manifest can't be read"}
        if one.state != "committed":
            continue
        try:
            found[one.name] = {"step": one.step, "digest": _digest_of(run / one.name)}
        except (CkptError, OSError) as error:
            found[one.name] = {
                "step": one.step,
                "problem": f"{getattr(error, 'code', type(error).__name__)}",
            }
    return found


def _digest_of(path: Path) -> str:
    """Return the digest of the state shared by all world sizes.

    The state consists of weights, optimizer, position in the data, and trainer.
    """
    report = ckptfmt.validate(path)
    if report.violations:
        raise report.violations[0]
    digest = blake3.blake3()
    with ckptfmt.open(path) as checkpoint:
        for field in ("weights", "optimizer"):
            view = checkpoint.field(field)
            for name in sorted(view):
                digest.update(f"{field}/{name}".encode())
                digest.update(checkpoint.read(field, name).tobytes())
        digest.update(
            repr((checkpoint.leaf("data"), checkpoint.extra["trainer"]["steps_done"])).encode()
        )
    return digest.hexdigest()


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m ckptfmt_conformance.adapters.chaos_job")
    commands = parser.add_subparsers(dest="command", required=True)
    training = commands.add_parser("train")
    training.add_argument("run", type=Path)
    training.add_argument("--steps", type=int, required=True)
    training.add_argument("--progress", type=Path)
    training.add_argument("--pace", type=float, default=0.0)
    for question in ("states", "newest"):
        commands.add_parser(question).add_argument("run", type=Path)
    arguments = parser.parse_args(argv)
    if arguments.command == "states":
        print(json.dumps(read_states(arguments.run)))
        return 0
    if arguments.command == "newest":
        found = [one for one in ckptfmt.Run(arguments.run).list() if one.state == "committed"]
        print(json.dumps(max(found, key=lambda one: (one.launch, one.step)).name))
        return 0
    try:
        is_done = train(
            arguments.run,
            steps=arguments.steps,
            progress=arguments.progress,
            pace_s=arguments.pace,
        )
        # with exit code 0, torchrun would count the job as finished
        return 0 if is_done else 128 + signal.SIGTERM
    except FencedError as error:
        # a newer launch owns the run: exit with 0, so that no scheduler restarts this launch
        print(error, file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
