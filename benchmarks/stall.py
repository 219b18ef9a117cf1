"""Training stalls of a save, and total lost seconds, with DCP and a floor."""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any, Final

from benchmarks.account import measure_account, sum_up_account
from benchmarks.figures import Figure, median_of, paired_ratio, summarize
from benchmarks.lost import CopyYardstick, measure_lost, sum_up_lost
from benchmarks.memory import PeakMemory
from benchmarks.ours import Ours
from benchmarks.pages import pages_in_order
from benchmarks.peers import process_group
from benchmarks.record import Outcome
from benchmarks.rounds import Progress, Workplace, check_room, order_of_round
from benchmarks.state import Bench, Trainer

_COPY_ROUNDS: Final = 11
_FIRST_ROUNDS: Final = 5
_LOST_ROUNDS: Final = 7
_ACCOUNT_ROUNDS: Final = 11
_LATER_SAVES: Final = 3  # after each first save
_BATCHES: Final = (16, 32, 64, 128, 256, 512)
#: The ratio of passes to the copy: a copy during a busy loop takes longer than a copy alone.
_PASSES_PER_COPY: Final = 4
#: The factor of rows on a GPU, for passes as long as a copy from the device.
_ROWS_ON_DEVICE: Final = 32

GOALS: Final = {
    "stall_vs_copy": "<= 1.1",
    "first_stall_vs_later": "<= 1.5",
    "cpu_vs_floor": "<= 1.4",
    "lost_vs_floor": "<= 1.4",
    "lost_vs_dcp_thread": "<= 0.4",
    "lost_vs_dcp_process": "<= 0.35",
    "overlap_blocked_vs_copy": "<= 0.05",
    "overlap_lost_vs_not": "<= 1",
}


def measure_stall(
    nbytes: int, *, rounds: int | None, place: Workplace, progress: Progress, device: str = "cpu"
) -> Outcome:
    """Measure stalls and lost seconds, in interleaved rounds.

    Args:
        nbytes: the approximate size of the state.
        rounds: the number of rounds of each experiment; None for as many as each figure needs.
        device: the device of the state.

    Raises: SystemExit without enough memory or storage.
    """
    check_room(place.directory, memory_nbytes=12 * nbytes, storage_nbytes=4 * nbytes)
    bench = Bench(
        trainer=Trainer(nbytes, threads=os.cpu_count() or 1, device=device),
        place=place,
        progress=progress,
    )
    with pages_in_order(nbytes):
        yardstick = CopyYardstick(bench.trainer)
    workload = {**bench.trainer.describe(), **_choose_batch(bench.trainer, yardstick)}
    memory = _measure_memory(bench)
    firsts = _measure_firsts(bench, rounds or _FIRST_ROUNDS)
    with process_group(), contextlib.ExitStack() as stack:
        with pages_in_order(nbytes):
            copying, overlapping = (
                Ours(place.fresh("run"), bench.trainer.state, overlap=overlap, name=name)
                for name, overlap in (("ckptfmt_copy", False), ("ckptfmt", True))
            )
        stack.callback(copying.close)
        stack.callback(overlapping.close)
        stalls = _measure_stalls(bench, copying, yardstick, rounds or _COPY_ROUNDS)
        bench.trainer.watch_last()
        lost = measure_lost(bench, (overlapping, copying), yardstick, rounds=rounds or _LOST_ROUNDS)
        account = measure_account(bench, overlapping, rounds=rounds or _ACCOUNT_ROUNDS)
    progress.say("")
    figures, ratios = sum_up_lost(lost.rows)
    spent, cpu_ratios = sum_up_account(account)
    return Outcome(
        workload=workload,
        settings=lost.settings,
        repeats={
            "first": len(firsts),
            "stall": len(stalls),
            "lost": len(lost.rows),
            "account": len(account),
        },
        rounds={"first": firsts, "stall": stalls, "lost": lost.rows, "account": account},
        figures={**_stall_figures(firsts, stalls), **figures, **spent},
        ratios={
            **_stall_ratios(firsts, stalls, f"copy_{copying.staging_threads}"),
            **ratios,
            **cpu_ratios,
        },
        goals=GOALS,
        memory=memory,
        notes=lost.notes,
    )


def _choose_batch(trainer: Trainer, yardstick: CopyYardstick) -> dict[str, object]:
    """Choose a batch with passes longer than the copy, and return the steps' entry for a record."""
    copy_s = median_of([yardstick.time_copy(threads=1) for _ in range(3)])
    for rows in [
        rows * (_ROWS_ON_DEVICE if trainer.device.type == "cuda" else 1) for rows in _BATCHES
    ]:
        trainer.set_batch(rows)
        trainer.step()
        times = [trainer.step() for _ in range(3)]
        passes_s = median_of([step.passes_s for step in times])
        if passes_s >= _PASSES_PER_COPY * copy_s:
            break
    return {
        "batch_rows": rows,
        "passes_s": passes_s,
        "step_s": median_of([step.step_s for step in times]),
        "copy_one_thread_s": copy_s,
        "threads": trainer.threads,
    }


def _measure_memory(bench: Bench) -> dict[str, int]:
    """Return the peaks of anonymous memory from before construction to the second commit."""
    bench.progress.say("stall: peak memory")
    bench.trainer.step()
    with PeakMemory() as memory:
        ours = Ours(bench.place.fresh("run"), bench.trainer.state, overlap=True)
        for _ in range(2):
            pending = ours.start()
            bench.trainer.step()
            pending.wait()
            bench.place.discard(pending.path, is_buffered=False)
        ours.close()
    return memory.describe()


def _measure_firsts(bench: Bench, rounds: int) -> list[dict[str, Any]]:
    """Make new checkpointers, and time the immediate first save and the later saves."""
    rows = []
    for number in range(rounds):
        bench.progress.say(f"stall: first save, round {number + 1} of {rounds}")
        with pages_in_order(bench.trainer.nbytes):
            ours = Ours(bench.place.fresh("run"), bench.trainer.state, overlap=False)
        first_s, *later = [_time_call(ours, bench.place) for _ in range(1 + _LATER_SAVES)]
        ours.close()
        rows.append({"slots_ready_s": ours.slots_ready_s, "first_s": first_s, "later_s": later})
    return rows


def _measure_stalls(
    bench: Bench, ours: Ours, yardstick: CopyYardstick, rounds: int
) -> list[dict[str, Any]]:
    """Time the call of `save`, and copies of the same tensors by a single thread and by more."""
    most = max(bench.trainer.threads, ours.staging_threads)
    copies = {f"copy_{count}": count for count in range(1, most + 1)}
    for _ in range(2):  # slots alternate
        _time_call(ours, bench.place)
    rows = []
    for number in range(rounds):
        bench.progress.say(f"stall: steady state, round {number + 1} of {rounds}")
        order = order_of_round([ours.name, *copies], number)
        seconds = {}
        for name in order:
            if name in copies:
                seconds[name] = yardstick.time_copy(threads=copies[name])
            else:
                seconds[name] = _time_call(ours, bench.place)
        rows.append({"order": order, "seconds": seconds})
    return rows


def _time_call(ours: Ours, place: Workplace) -> float:
    """Return the seconds of the call of `save`; the rest of the save is awaited, untimed."""
    os.sync()
    begin_s = time.perf_counter()
    pending = ours.start()
    seconds = time.perf_counter() - begin_s
    pending.wait()
    place.discard(pending.path, is_buffered=False)
    return seconds


def _stall_figures(firsts: list[dict[str, Any]], stalls: list[dict[str, Any]]) -> dict[str, Figure]:
    return {
        "slots_ready_s": summarize([row["slots_ready_s"] for row in firsts]),
        "first_stall_s": summarize([row["first_s"] for row in firsts]),
        "later_stall_s": summarize([median_of(row["later_s"]) for row in firsts]),
        **{
            f"{'stall' if name == 'ckptfmt_copy' else name}_s": summarize(
                [row["seconds"][name] for row in stalls]
            )
            for name in sorted(stalls[0]["seconds"])
        },
    }


def _stall_ratios(
    firsts: list[dict[str, Any]], stalls: list[dict[str, Any]], copy_name: str
) -> dict[str, Figure]:
    return {
        "stall_vs_copy": paired_ratio(
            [row["seconds"]["ckptfmt_copy"] for row in stalls],
            [row["seconds"][copy_name] for row in stalls],
        ),
        "first_stall_vs_later": paired_ratio(
            [row["first_s"] for row in firsts], [median_of(row["later_s"]) for row in firsts]
        ),
    }
