"""Rewinds within a process: seconds to the next step, beside a plain copy and loads of the run."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Final

import torch

import ckptfmt
from benchmarks.cold import list_files, make_cold, make_warm
from benchmarks.figures import paired_ratio, summarize
from benchmarks.record import Outcome
from benchmarks.rounds import Progress, Workplace, check_room, remove
from benchmarks.state import Trainer

_ROUNDS: Final = 7


def measure_rewind(
    nbytes: int, *, rounds: int | None, place: Workplace, progress: Progress
) -> Outcome:
    """Measure rewinds to a save in memory, in the page cache and on the disk.

    Args:
        nbytes: the approximate size of the state.
        rounds: the number of rounds; None for 7.

    Raises: SystemExit without enough memory or storage.
    """
    check_room(place.directory, memory_nbytes=6 * nbytes, storage_nbytes=4 * nbytes)
    trainer = Trainer(nbytes, threads=os.cpu_count() or 1)
    trainer.drop_gradients()
    tensors = trainer.tensors()
    kept = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    path = place.fresh("run")
    state = ckptfmt.State(weights=trainer.model, optimizer=trainer.optimizer)
    rows: list[dict[str, Any]] = []
    with ckptfmt.Checkpointer(path, state, checks=ckptfmt.Checks(witness=False)) as checkpointer:
        checkpointer.restore_rng()
        checkpointer.end_step(1)
        saved = checkpointer.save()
        assert saved is not None
        saved.wait_over(600)
        (checkpoint,) = path.glob("step-*")
        for number in range(rounds or _ROUNDS):
            progress.say(f"rewind: round {number}")
            rows.append(_measure_round(checkpointer, tensors, kept, checkpoint, state))
    remove(path)
    names = list(rows[0])
    copies = [row["copy_s"] for row in rows]
    return Outcome(
        workload=trainer.describe(),
        settings={"ckptfmt": {"saver": "a process, 2 slots"}},
        repeats={"rounds": len(rows)},
        rounds={"rewind": rows},
        figures={name: summarize([row[name] for row in rows]) for name in names},
        ratios={
            "rewind_over_copy": paired_ratio([row["rewind_s"] for row in rows], copies),
            "warm_load_over_copy": paired_ratio([row["warm_load_s"] for row in rows], copies),
            "cold_load_over_copy": paired_ratio([row["cold_load_s"] for row in rows], copies),
        },
        goals={"rewind_over_copy": "<= 1.3"},
        memory={},
        notes={
            "copy_s": "torch's copy of all tensors from other tensors in memory",
            "rewind_s": "rewind() and restore_rng(), from the call until a step may begin",
            "warm_load_s": "ckptfmt.load of the same checkpoint, in the page cache",
            "cold_load_s": "ckptfmt.load of the same checkpoint, not in the page cache",
        },
        cache="as the notes say; memory of all touched",
    )


def _measure_round(
    checkpointer: ckptfmt.Checkpointer,
    tensors: dict[str, torch.Tensor],
    kept: dict[str, torch.Tensor],
    checkpoint: Path,
    state: ckptfmt.State,
) -> dict[str, float]:
    """Return the seconds of each way back, after a check of the bits."""
    found: dict[str, float] = {}

    def timed(name: str, action: Any) -> None:
        with torch.no_grad():
            for tensor in tensors.values():
                tensor.fill_(0.5)
        begin_s = time.perf_counter()
        action()
        found[f"{name}_s"] = time.perf_counter() - begin_s
        for key, tensor in tensors.items():
            if not torch.equal(tensor, kept[key]):
                raise RuntimeError(f"{name}: {key} isn't what was saved")

    def rewind() -> None:
        report = checkpointer.rewind()
        checkpointer.restore_rng()
        if report.reads.memory_nbytes != report.reads.needed_nbytes:
            raise RuntimeError("a rewind read the run")

    def copy() -> None:
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(kept[name])

    timed("copy", copy)
    timed("rewind", rewind)
    files = list_files(checkpoint)
    make_warm(files)
    timed("warm_load", lambda: ckptfmt.load(checkpoint, state))
    make_cold(files)
    timed("cold_load", lambda: ckptfmt.load(checkpoint, state))
    return found
