"""Rates of durable saves, with raw direct writes, DCP, safetensors and torch.save."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any, Final

from benchmarks.figures import median_of, paired_ratio, summarize
from benchmarks.memory import PeakMemory
from benchmarks.ours import Ours
from benchmarks.pages import Region, pages_in_order
from benchmarks.peers import Dcp, Safetensors, TorchSave, process_group
from benchmarks.raw import SETTINGS, RawWriter
from benchmarks.record import Outcome
from benchmarks.rounds import Progress, Saver, Workplace, check_room, order_of_round, time_save
from benchmarks.state import Bench, Trainer

_ROUNDS: Final = 11
_TRIALS: Final = 3  # trials per setting, for the choice by median

#: Our rate divided by a peer's: name, peer, goal.
RATIOS: Final = {
    "save_vs_direct": ("raw", ">= 0.9"),
    "save_vs_dcp": ("dcp", ">= 2.5"),
    "save_vs_safetensors": ("safetensors", ">= 1.3"),
    "save_vs_dcp_best": ("dcp_best", ""),
    "save_vs_torch_save": ("torch_save", ""),
    "save_vs_direct_huge_pages": ("raw_huge_pages", ""),
}


def measure_save(
    nbytes: int, *, rounds: int | None, place: Workplace, progress: Progress
) -> Outcome:
    """Measure all durable rates, in interleaved rounds.

    Args:
        nbytes: the approximate size of the state.
        rounds: the number of rounds; None for as many as a figure needs.

    Raises: SystemExit without enough memory or storage.
    """
    check_room(place.directory, memory_nbytes=9 * nbytes, storage_nbytes=4 * nbytes)
    rounds = rounds or _ROUNDS
    bench = Bench(
        trainer=Trainer(nbytes, threads=os.cpu_count() or 1), place=place, progress=progress
    )
    bench.trainer.drop_gradients()
    with process_group(), contextlib.ExitStack() as stack:
        progress.say("save: making slots")
        with pages_in_order(nbytes), PeakMemory() as memory:
            # Without training, a save can't overlap with any step.
            ours = Ours(place.fresh("run"), bench.trainer.state, overlap=False)
            stack.callback(ours.close)
            time_save(ours, place)
        peers, tried = _choose_peers(bench, trials=min(_TRIALS, rounds))
        savers: list[Saver] = [ours, *peers]
        rows = _run_rounds(bench, savers, rounds)
        progress.say("")
        return _sum_up(
            bench.trainer,
            rows,
            settings={saver.name: saver.describe() for saver in savers},
            memory=memory.describe(),
            notes={"slots_ready_s": ours.slots_ready_s, "tried_s": tried},
        )


def _list_candidates(trainer: Trainer) -> dict[str, list[Saver]]:
    """Return every peer in each setting worth a trial."""
    with pages_in_order(trainer.nbytes):
        small, huge = (
            Region(trainer.tensors().values(), huge=is_huge) for is_huge in (False, True)
        )
    return {
        "raw": [RawWriter("raw", small, setting) for setting in SETTINGS],
        "raw_huge_pages": [RawWriter("raw_huge_pages", huge, setting) for setting in SETTINGS],
        "dcp": [Dcp(trainer.state_dict)],
        "dcp_best": [
            Dcp(trainer.state_dict, name="dcp_best", thread_count=count, checksums=checksums)
            for count, checksums in ((2, True), (1, False), (2, False))
        ],
        "safetensors": [Safetensors(trainer.tensors)],
        "torch_save": [TorchSave(trainer.state_dict)],
    }


def _choose_peers(bench: Bench, *, trials: int) -> tuple[list[Saver], dict[str, list[float]]]:
    """Warm every peer up, choose the best settings by median, and return the medians in seconds."""
    candidates = _list_candidates(bench.trainer)
    seconds = {name: [[0.0] * trials for _ in savers] for name, savers in candidates.items()}
    for trial in range(trials):
        for name, savers in candidates.items():
            bench.progress.say(f"save: warming up, {trial + 1} of {trials}: {name}")
            for number, saver in enumerate(savers):
                seconds[name][number][trial] = time_save(saver, bench.place)
    medians = {name: [median_of(tried) for tried in lists] for name, lists in seconds.items()}
    return [
        savers[medians[name].index(min(medians[name]))] for name, savers in candidates.items()
    ], medians


def _run_rounds(bench: Bench, savers: Sequence[Saver], rounds: int) -> list[dict[str, Any]]:
    by_name = {saver.name: saver for saver in savers}
    rows = []
    for number in range(rounds):
        order = order_of_round(list(by_name), number)
        seconds = {}
        for name in order:
            bench.progress.say(f"save: round {number + 1} of {rounds}: {name}")
            seconds[name] = time_save(by_name[name], bench.place)
        rows.append({"order": order, "seconds": seconds})
    return rows


def _sum_up(
    trainer: Trainer,
    rows: list[dict[str, Any]],
    *,
    settings: dict[str, object],
    memory: dict[str, int],
    notes: dict[str, object],
) -> Outcome:
    rates = {
        name: [trainer.nbytes / row["seconds"][name] / 1e9 for row in rows] for name in settings
    }
    return Outcome(
        workload=trainer.describe(),
        settings=settings,
        repeats={"save": len(rows)},
        rounds={"save": rows},
        figures={f"{name}_gb_per_s": summarize(of_rounds) for name, of_rounds in rates.items()},
        ratios={
            name: paired_ratio(rates["ckptfmt"], rates[peer]) for name, (peer, _) in RATIOS.items()
        },
        goals={name: goal for name, (_, goal) in RATIOS.items() if goal},
        memory=memory,
        notes=notes,
    )
