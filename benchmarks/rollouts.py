"""Saves of 100,000 rollouts: the trainer's seconds and the stored bytes, beside full saves.

A policy that doesn't change and a full `Rollouts` are saved again and again. Between two saves some
rows are appended, and the oldest rows are dropped. Runs with deltas and runs of full checkpoints
alternate in the same process.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

import ckptfmt
from benchmarks.figures import paired_ratio, summarize
from benchmarks.record import Outcome
from benchmarks.rounds import Progress, Workplace, remove

#: The number of rows, and the number of rows between two saves.
ROWS: Final = 100_000
_ADDED: Final = 1_000
#: Tokens of a row: the expected number, and the bounds of the drawn numbers.
_LENGTH: Final = 256
_LENGTHS: Final = (128, 384)
_VOCABULARY: Final = 150_000
_ROUNDS: Final = 3
#: Saves of a run, and the number of saves that aren't counted after the first save. The first saves
#: fill the slots.
_SAVES: Final = 6
_PREPARED: Final = 2
#: The goal of the trainer's seconds for a save.
_GOAL: Final = "<= 1"


def measure_rollouts(
    rows: int, *, rounds: int | None, place: Workplace, progress: Progress
) -> Outcome:
    """Measure appends and saves of `rows` rollouts, each round with deltas and with full saves."""
    found: dict[str, list[dict[str, Any]]] = {"delta": [], "full": [], "first": []}
    rounds = rounds or _ROUNDS
    for number in range(rounds):
        for mode in ("delta", "full") if number % 2 else ("full", "delta"):
            progress.say(f"rollouts: round {number + 1}, {mode}")
            first, *later = _measure_run(rows, place.fresh(mode), delta=mode == "delta")
            found["first"].append(first)
            found[mode] += later[_PREPARED:]
    names = list(found["delta"][0])
    figures = {
        f"{mode}_{name}": summarize([row[name] for row in found[mode]])
        for mode in found
        for name in names
    }
    arrays = list(_arrays(_make(rows).state_dict()))
    return Outcome(
        workload={
            "nbytes": sum(array.nbytes for array in arrays),
            "tensors": len(arrays),
            "rows": rows,
            "added": min(_ADDED, rows),
            "state": f"tokens (int32) and log-probabilities (float32) of {_LENGTHS[0]} to"
            f" {_LENGTHS[1]} tokens, and a reward; a Linear of 512 x 512",
        },
        settings={"ckptfmt": {"saver": "process", "delta": {"delta": "auto", "full": "off"}}},
        repeats={"rounds": rounds, "saves": _SAVES - _PREPARED - 1},
        rounds=found,
        figures=figures,
        ratios={
            name: paired_ratio(
                [row[name] for row in found["delta"]], [row[name] for row in found["full"]]
            )
            for name in ("trainer_s", "stored_nbytes")
        },
        goals={"first_trainer_s": _GOAL, "full_trainer_s": _GOAL, "delta_trainer_s": _GOAL},
        memory={},
        notes={
            "first_": "the append of all rows, and the first save of a run, after prepare",
            "append_s": "of the rows appended before the save, with the removal of the oldest rows",
            "trainer_s": "the call of save: the training stands still",
            "committed_s": "from the call of save until the commit",
            "stored_nbytes": "the files of the checkpoint",
        },
        cache="warm: the rollouts were written just before",
    )


def _make(rows: int) -> ckptfmt.Rollouts:
    return ckptfmt.Rollouts(
        {"tokens": "int32", "logprobs": "float32", "reward": "float32"},
        capacity=rows,
        length={"tokens": _LENGTH, "logprobs": _LENGTH, "reward": 1},
        evicts=True,
    )


def _arrays(tree: Any) -> Iterator[np.ndarray[Any, Any]]:
    if isinstance(tree, np.ndarray):
        yield tree
    else:
        for item in tree.values() if isinstance(tree, dict) else tree:
            yield from _arrays(item)


def _measure_run(rows: int, path: Path, *, delta: bool) -> list[dict[str, Any]]:
    """Return the figures of each save of a run."""
    rollouts = _make(rows)
    state = ckptfmt.State(
        weights=torch.nn.Linear(512, 512), extra={"rollouts": rollouts}, rng=False
    )
    drawn = np.random.default_rng(0)
    found = []
    saving = ckptfmt.Saving(delta="auto" if delta else "off")
    with ckptfmt.Checkpointer(path, state, keep=2, saving=saving) as checkpointer:
        checkpointer.prepare()
        key = 0
        for step in range(1, _SAVES + 1):
            new = rows if step == 1 else min(_ADDED, rows)
            counts = drawn.integers(*_LENGTHS, new).tolist()
            tokens = drawn.integers(0, _VOCABULARY, _LENGTHS[1], dtype=np.int32)
            logprobs = drawn.standard_normal(_LENGTHS[1], dtype=np.float32)
            begin_s, begin_cpu_s = time.perf_counter(), time.thread_time()
            for count in counts:
                rollouts.append(key, tokens=tokens[:count], logprobs=logprobs[:count], reward=0.5)
                key += 1
            append_s = time.perf_counter() - begin_s
            append_cpu_s = time.thread_time() - begin_cpu_s
            begin_s = time.perf_counter()
            handle = checkpointer.save(step)
            trainer_s = time.perf_counter() - begin_s
            if handle is None:
                raise RuntimeError(f"no save of step {step}")
            handle.wait()
            committed_s = time.perf_counter() - begin_s
            files = [file for file in Path(handle.path).rglob("*") if file.is_file()]
            found.append(
                {
                    "append_s": append_s,
                    "append_cpu_s": append_cpu_s,
                    "trainer_s": trainer_s,
                    "committed_s": committed_s,
                    "stored_nbytes": sum(file.stat().st_size for file in files),
                }
            )
    remove(path)
    return found
