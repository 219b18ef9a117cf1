"""Total training seconds lost to a save: K steps with a save minus the same K steps without."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch.distributed.checkpoint.staging import DefaultStager

from benchmarks.account import Floor
from benchmarks.figures import Figure, floor_all, median_of, paired_ratio, summarize
from benchmarks.loop import Contestant, LoopRun, run_loop, run_until_done
from benchmarks.ours import Ours
from benchmarks.peers import DcpAsync, make_stager
from benchmarks.rounds import order_of_round
from benchmarks.state import Bench, Trainer


class CopyYardstick:
    """Copy targets for every tensor of a trainer, and a timed copy."""

    def __init__(self, trainer: Trainer) -> None:
        self._sources = list(trainer.tensors().values())
        # From a device, the fastest copy goes into pinned memory.
        self._is_far = trainer.device.type == "cuda"
        self._targets = [
            torch.empty_like(source, device="cpu", pin_memory=self._is_far)
            for source in self._sources
        ]
        self._threads = trainer.threads
        self.time_copy(threads=self._threads)  # touches the targets

    def time_copy(self, *, threads: int) -> float:
        """Return the seconds of a copy of all tensors with a number of threads."""
        torch.set_num_threads(threads)
        try:
            begin_s = time.perf_counter()
            for source, target in zip(self._sources, self._targets, strict=True):
                target.copy_(source, non_blocking=self._is_far)
            if self._is_far:
                torch.cuda.synchronize()
            return time.perf_counter() - begin_s
        finally:
            torch.set_num_threads(self._threads)


_TRIALS: Final = 2  # trials per number of threads
_THREAD_COUNTS: Final = (1, 2)
#: The ratio of the steps' duration to the longest save of the warm-up.
MARGIN: Final = 1.2
#: A loss below this bound can't be measured: ratios use the bound instead.
_FLOOR_S: Final = 0.001
_UNCHECKED: Final = "thread_count=1, no checksums"
_WITHOUT: Final = "without"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """The results of the experiment: raw rounds, settings of the contestants, and notes."""

    rows: list[dict[str, Any]]
    settings: dict[str, object]
    notes: dict[str, object]


def measure_lost(
    bench: Bench, ours: tuple[Ours, Ours], yardstick: CopyYardstick, *, rounds: int
) -> Lost:
    """Run interleaved rounds of the same K steps: no save, ckptfmt's save, DCP's, and the floor's.

    The steps without a save run twice in each round, since every loss of the round is a difference
    from them.

    Args:
        ours: the checkpointers with overlap and without.
    """
    stager = make_stager(bench.trainer.device)
    try:
        bench.progress.say("stall: warming up")
        runs = [run_until_done(bench, one) for one in ours * 2]
        chosen: list[Contestant] = [*ours]
        tried = {}
        for kind in ("thread", "process"):
            best, of_best, tried[f"dcp_{kind}"] = _choose(
                bench, _list_candidates(kind, bench, stager)
            )
            chosen.append(best)
            runs += of_best
        floor = Floor(bench.trainer)
        runs += [run_until_done(bench, floor)]
        chosen.append(floor)
        steps = math.ceil(MARGIN * max(run.steps for run in runs)) + 1
        rows = []
        for number in range(rounds):
            bench.progress.say(
                f"stall: lost seconds, round {number + 1} of {rounds}, {steps} steps each"
            )
            row = run_round(bench, {one.name: one for one in chosen}, number, steps)
            rows.append({**row, "copy_s": _time_copy(yardstick, ours[0].staging_threads)})
    finally:
        stager.close()
    return Lost(
        rows=rows,
        settings={one.name: one.describe() for one in chosen},
        notes={
            "steps": steps,
            "saves_that_outlasted_the_steps": sum(
                not run["is_done"] for row in rows for run in row["runs"].values()
            ),
            "dcp_tried_lost_s": tried,
        },
    )


def _list_candidates(kind: str, bench: Bench, stager: DefaultStager) -> dict[str, DcpAsync]:
    """Return the candidates; the last candidate is tried only for the record."""
    make = functools.partial(DcpAsync, kind, bench.trainer.state_dict, stager)
    checked = {f"thread_count={count}": make(thread_count=count) for count in _THREAD_COUNTS}
    return {**checked, _UNCHECKED: make(thread_count=_THREAD_COUNTS[0], checksums=False)}


def _choose(
    bench: Bench, candidates: dict[str, DcpAsync]
) -> tuple[DcpAsync, list[LoopRun], dict[str, float]]:
    """Warm a peer up, choose the threads with the least loss, and return the runs and trials."""
    first = next(iter(candidates.values()))
    bench.place.discard(first.warm_up(bench.place.fresh(first.name)), is_buffered=True)
    runs: dict[str, list[LoopRun]] = {setting: [] for setting in candidates}
    lost: dict[str, list[float]] = {setting: [] for setting in candidates}
    for trial in range(_TRIALS):
        for setting, peer in candidates.items():
            bench.progress.say(
                f"stall: warming up, {trial + 1} of {_TRIALS}: {peer.name}, {setting}"
            )
            run = run_until_done(bench, peer)
            runs[setting].append(run)
            lost[setting].append(run.wall_s - run_loop(bench, run.steps, None).wall_s)
    medians = {setting: median_of(seconds) for setting, seconds in lost.items()}
    best = min(medians.keys() - {_UNCHECKED}, key=medians.__getitem__)
    return candidates[best], runs[best], medians


def run_round(
    bench: Bench, contestants: Mapping[str, Contestant], number: int, steps: int
) -> dict[str, Any]:
    """Run the same steps with each contestant's save, and twice without; return the raw figures."""
    names = list(contestants)
    order = order_of_round(
        [_WITHOUT, *names[: len(names) // 2], _WITHOUT, *names[len(names) // 2 :]], number
    )
    without: list[float] = []
    runs: dict[str, dict[str, object]] = {}
    for name in order:
        run = run_loop(bench, steps, contestants.get(name))
        if name == _WITHOUT:
            without.append(run.wall_s)
        else:
            runs[name] = run.describe()
    return {"order": order, "without_s": without, "runs": runs}


def _time_copy(yardstick: CopyYardstick, threads: int) -> float:
    """Return the seconds of a copy to warm targets."""
    yardstick.time_copy(threads=threads)
    return yardstick.time_copy(threads=threads)


def sum_up_lost(rows: list[dict[str, Any]]) -> tuple[dict[str, Figure], dict[str, Figure]]:
    """Return the figures and the ratios of the rounds."""
    names = sorted(rows[0]["runs"])
    without = [sum(row["without_s"]) / len(row["without_s"]) for row in rows]
    lost = {
        name: [
            row["runs"][name]["wall_s"] - base_s for row, base_s in zip(rows, without, strict=True)
        ]
        for name in names
    }
    blocked = [row["runs"]["ckptfmt"]["blocked_s"] for row in rows]
    copies = [row["copy_s"] for row in rows]
    figures = {
        "steps_without_s": summarize(without),
        **{f"lost_{name}_s": summarize(seconds) for name, seconds in lost.items()},
        **{
            f"call_{name}_s": summarize([row["runs"][name]["call_s"] for row in rows])
            for name in names
        },
        "overlap_blocked_s": summarize(blocked),
        "copy_s": summarize(copies),
    }
    floored = {name: floor_all(seconds, _FLOOR_S) for name, seconds in lost.items()}
    ratios = {
        "lost_vs_floor": paired_ratio(floored["ckptfmt"], floored["floor"]),
        "lost_vs_dcp_thread": paired_ratio(floored["ckptfmt"], floored["dcp_thread"]),
        "lost_vs_dcp_process": paired_ratio(floored["ckptfmt"], floored["dcp_process"]),
        "overlap_blocked_vs_copy": paired_ratio(blocked, copies),
        "overlap_lost_vs_not": paired_ratio(floored["ckptfmt"], floored["ckptfmt_copy"]),
    }
    return figures, ratios
