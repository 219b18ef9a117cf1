"""What the witness of a launch costs each step: microseconds of the training's thread, and bytes of the step log.

A step trains nothing: it changes the weights by one in-place addition to each tensor that is cheap at any size, so that
what is left is the loop of a `Checkpointer`. Loops with a witness and without one take turns, in one process.
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
from ckptfmt.documents.witness import HEADER_NBYTES, RECORD_NBYTES, STEP_COUNT

#: The numbers of parameters; those above what is asked for are left out.
_COUNTS: Final = (1_000_000, 100_000_000, 1_000_000_000)
MOST_PARAMETERS: Final = _COUNTS[-1]
_ROUNDS: Final = 7
_STEPS: Final = 300
#: The number of tensors of a model: about that of a transformer of 12 layers.
_TENSORS: Final = 148
#: The goal of the issue that asked for the witness, in microseconds of the training's thread.
_GOAL: Final = "<= 100"


def measure_witness(most: int, *, rounds: int | None, place: Workplace, progress: Progress) -> Outcome:
    """Measure every number of parameters up to `most`, each round with a witness and without one."""
    counts = [count for count in _COUNTS if count <= most] or [most]
    rounds = rounds or _ROUNDS
    found: dict[str, list[dict[str, Any]]] = {}
    for count in counts:
        model = _Model(count)
        for number in range(rounds):
            progress.say(f"witness: {count} parameters, round {number + 1}")
            pair = [True, False] if number % 2 else [False, True]
            seconds = {is_on: _time_steps(model, place, is_on=is_on) for is_on in pair}
            row = {"with_us": seconds[True] * 1e6, "without_us": seconds[False] * 1e6}
            row["added_us"] = row["with_us"] - row["without_us"]
            found.setdefault(f"{count}_parameters", []).append(row)
        del model
    figures = {
        f"{name}_of_{key}": summarize([row[name] for row in rows])
        for key, rows in found.items()
        for name in ("with_us", "without_us", "added_us")
    }
    return Outcome(
        workload={
            "nbytes": counts[-1] * 4,
            "tensors": _TENSORS,
            "counts": counts,
            "state": f"{_TENSORS} tensors of float32; a Sampler; SGD; loss observed",
        },
        settings={"ckptfmt": {"saver": "inline", "every": None, "steps": _STEPS}},
        repeats=dict.fromkeys(found, rounds),
        rounds=found,
        figures=figures,
        ratios={},
        goals={f"added_us_of_{count}_parameters": _GOAL for count in counts},
        memory={"log_nbytes": HEADER_NBYTES + STEP_COUNT * RECORD_NBYTES, "record_nbytes": RECORD_NBYTES},
        notes={
            "with_us, without_us": "the median of the steps of a loop that trains nothing, in microseconds",
            "added_us": "the difference of both in one round",
            "record_nbytes": "bytes that each step and process writes; the log has room for the newest steps",
        },
    )


class _Model(torch.nn.Module):
    """So many parameters in so many tensors of equal size."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.tensors = torch.nn.ParameterList(
            [torch.nn.Parameter(torch.zeros(count // _TENSORS), requires_grad=False) for _ in range(_TENSORS)]
        )


def _time_steps(model: _Model, place: Workplace, *, is_on: bool) -> float:
    """Return the median of the seconds of a step."""
    path: Path = place.fresh("witness")
    sampler = ckptfmt.Sampler(100_000, global_batch=32, worker=(0, 1))
    optimizer = torch.optim.SGD(list(model.tensors)[:1])
    state = ckptfmt.State(weights=model, optimizer=optimizer, data=sampler, config={})
    batches = iter(sampler)
    loss = torch.zeros(())
    times: list[float] = []
    checkpointer = ckptfmt.Checkpointer(path, state, every=None, saver="inline", witness=is_on)
    checkpointer.restore_rng()
    begun = time.perf_counter()
    for _ in range(_STEPS):
        with checkpointer.training_step():
            next(batches)
            checkpointer.observe(loss=loss)
        now = time.perf_counter()
        times.append(now - begun)
        begun = now
    checkpointer.close()
    remove(path)
    return statistics.median(times)
