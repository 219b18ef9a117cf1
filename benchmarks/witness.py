"""Costs of a launch's witness per step: microseconds of the training's thread, and logged bytes.

A step trains no model, so that only the loop of a `Checkpointer` is timed. Loops with and without a
witness alternate in the same process. A second pair of loops changes all weights in each step, as
an optimizer does, outside of the timing: the processor's caches are then cold, as in a training.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any, Final

import torch

import ckptfmt
from benchmarks.figures import summarize
from benchmarks.record import Outcome
from benchmarks.rounds import Progress, Workplace, remove
from ckptfmt.run.witness import HEADER_NBYTES, RECORD_NBYTES, STEP_COUNT

#: The numbers of parameters; numbers above the requested maximum are left out.
_COUNTS: Final = (1_000_000, 100_000_000, 1_000_000_000)
MOST_PARAMETERS: Final = _COUNTS[-1]
_ROUNDS: Final = 7
_STEPS: Final = 300
#: The limit of bytes changed by a loop with cold caches: a step of 10^9 parameters takes half a
#: second.
_SWEPT_NBYTES: Final = 16_000_000_000
#: The number of tensors of a model: about the number in a transformer of 12 layers.
_TENSORS: Final = 148
#: The goal of the witness, in microseconds of the training's thread.
_GOAL: Final = "<= 100"


def measure_witness(
    most: int, *, rounds: int | None, place: Workplace, progress: Progress
) -> Outcome:
    """Measure every number of parameters up to `most`, each round with and without a witness."""
    counts = [count for count in _COUNTS if count <= most] or [most]
    rounds = rounds or _ROUNDS
    found: dict[str, list[dict[str, Any]]] = {}
    for count in counts:
        model = _Model(count)
        for number in range(rounds):
            progress.say(f"witness: {count} parameters, round {number + 1}")
            pair = [True, False] if number % 2 else [False, True]
            row: dict[str, float] = {}
            for sweeps, prefix in ((False, ""), (True, "cold_")):
                seconds = {
                    is_on: _time_steps(model, place, is_on=is_on, sweeps=sweeps) for is_on in pair
                }
                row[f"{prefix}with_us"] = seconds[True] * 1e6
                row[f"{prefix}without_us"] = seconds[False] * 1e6
                row[f"{prefix}added_us"] = (seconds[True] - seconds[False]) * 1e6
            found.setdefault(f"{count}_parameters", []).append(row)
        del model
    figures = {
        f"{name}_of_{key}": summarize([row[name] for row in rows])
        for key, rows in found.items()
        for name in rows[0]
    }
    return Outcome(
        workload={
            "nbytes": counts[-1] * 4,
            "tensors": _TENSORS,
            "counts": counts,
            "state": f"{_TENSORS} tensors of float32; a Sampler; SGD; loss observed",
        },
        settings={
            "ckptfmt": {
                "saver": "inline",
                "every": 1_000_000,
                "steps": _STEPS,
                "swept_nbytes": _SWEPT_NBYTES,
            }
        },
        repeats=dict.fromkeys(found, rounds),
        rounds=found,
        figures=figures,
        ratios={},
        goals={
            f"{name}_of_{count}_parameters": _GOAL
            for count in counts
            for name in ("added_us", "cold_added_us")
        },
        memory={
            "log_nbytes": HEADER_NBYTES + STEP_COUNT * RECORD_NBYTES,
            "record_nbytes": RECORD_NBYTES,
        },
        notes={
            "with_us, without_us": (
                "the median of the steps of a loop that trains nothing, in microseconds"
            ),
            "added_us": "the difference of both in one round",
            "cold_": "each step changes all weights before; the time of that is left out",
            "record_nbytes": (
                "bytes that each step and process writes; the log has room for the newest steps"
            ),
        },
    )


class _Model(torch.nn.Module):
    """Parameters in a number of tensors of equal size."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.tensors = torch.nn.ParameterList(
            [
                torch.nn.Parameter(torch.zeros(count // _TENSORS), requires_grad=False)
                for _ in range(_TENSORS)
            ]
        )


def _time_steps(model: _Model, place: Workplace, *, is_on: bool, sweeps: bool) -> float:
    """Return the median of the seconds of a step.

    Args:
        sweeps: whether each step changes all weights, outside of the timing.
    """
    weights = [tensor.data for tensor in model.tensors]
    nbytes = sum(tensor.nbytes for tensor in weights)
    steps = max(24, min(_STEPS, _SWEPT_NBYTES // nbytes)) if sweeps else _STEPS
    path: Path = place.fresh("witness")
    sampler = ckptfmt.Sampler(100_000, global_batch=32, worker=(0, 1))
    optimizer = torch.optim.SGD(list(model.tensors)[:1])
    state = ckptfmt.State(weights=model, optimizer=optimizer, data=sampler, config={})
    batches = iter(sampler)
    loss = torch.zeros(())
    times: list[float] = []
    checkpointer = ckptfmt.Checkpointer(
        path,
        state,
        every=1_000_000,
        saving=ckptfmt.Saving(saver="inline"),
        checks=ckptfmt.Checks(witness=is_on),
    )
    checkpointer.restore_rng()
    for _ in range(steps):
        left_out = 0.0
        begun = time.perf_counter()
        with checkpointer.training_step():
            next(batches)
            if sweeps:
                changing = time.perf_counter()
                torch._foreach_add_(weights, 1)
                left_out = time.perf_counter() - changing
            checkpointer.observe(loss=loss)
        times.append(time.perf_counter() - begun - left_out)
    checkpointer.close()
    remove(path)
    return statistics.median(times)
