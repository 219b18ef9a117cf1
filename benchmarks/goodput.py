"""A live run with repeated kills: goodput from the ledger, compared with the simulator."""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import ckptfmt
from benchmarks.figures import summarize
from benchmarks.record import Outcome
from benchmarks.rounds import Progress, Workplace
from ckptfmt.loop.interval import Level
from ckptfmt.run.accounts import Goodput
from ckptfmt.run.lineage import read_known_run
from ckptfmt.run.spent_time import read_entries, read_goodput
from ckptfmt.store import open_store
from ckptfmt_tools.simulator import Failure, Scenario, simulate

MINUTES: Final = 60
_MTBF_S: Final = 90.0
_EVERY_S: Final = 10.0
_STEP_S: Final = 0.1
#: The training's four parameters, and both moments of each.
_NBYTES: Final = 3 * 4 * (512 * 512 + 512 + 512 + 1)
#: The delay from a kill to the restart of the training: time to detect a failure and find a node.
_NOTICE_S: Final = 3.0
_SEED: Final = 22
_RUNS: Final = 256
#: The time limit for the training's final save and exit, in seconds.
_END_S: Final = 120.0


def measure_goodput(
    minutes: float,
    *,
    rounds: int | None,
    place: Workplace,
    progress: Progress,
    snapshot_every: int | None = None,
) -> Outcome:
    """Run a training under a supervisor with random kills, and compare with the simulator.

    Args:
        minutes: the duration of a run.
        rounds: the number of runs, each with different times; None for a single run.
        snapshot_every: steps between snapshots in memory; None for no snapshots.

    Raises: RuntimeError if the training ends by itself.
    """
    rows = [
        _measure_once(
            place.fresh("run"),
            minutes * 60,
            seed=_SEED + number,
            progress=progress,
            snapshot_every=snapshot_every,
        )
        for number in range(rounds or 1)
    ]
    ratios = {
        name: summarize([row[name] for row in rows])
        for name in ("measured_vs_rates", "measured_vs_kills")
    }
    shares = ("measured", "by_rates", "by_kills", "by_steps")
    costs = ("lost_s", "commit_s", "restore_s", "interval_s")
    figures = {f"goodput_{name}": [row["goodput"][name] for row in rows] for name in shares}
    figures |= {name: [row["costs"][name] for row in rows] for name in costs}
    return Outcome(
        workload={
            "nbytes": _NBYTES,
            "tensors": 12,
            "minutes": minutes,
            "step_s": _STEP_S,
            "mtbf_s": _MTBF_S,
            "state": "two linear layers, 512 wide, under AdamW",
        },
        settings={
            "ckptfmt": {
                "every": f"{_EVERY_S:g}s",
                "keep": 2,
                "ledger": True,
                "saver": "process",
                "snapshot_every": snapshot_every,
            }
        },
        repeats={"runs": len(rows)},
        rounds={"runs": rows},
        figures={name: summarize(values) for name, values in figures.items()},
        ratios=ratios,
        goals=dict.fromkeys(ratios, "0.95 to 1.05"),
        memory={},
        notes={
            "kills": f"SIGKILL of the training, one for each {_MTBF_S:g} s, at times that are"
            " drawn uniformly, whatever"
            f" it does then; the saver is left alone. It is started again {_NOTICE_S:g} s later",
            "measured": (
                "training that counts, of all time since the first step, by the ledger of the run"
            ),
            "by_rates": (
                f"the simulator's mean of {_RUNS} runs, with the costs of the ledger and"
                " the rate of kills; with snapshots, these are the simulator's saves"
            ),
            "by_kills": (
                "the simulator's, with the same costs, and a failure at each moment of a kill"
            ),
            "by_steps": (
                "the last step times step_s, of the same time: no clock of the ledger has"
                " a part in it"
            ),
        },
        cache="warm",
    )


def _measure_once(
    run: Path, duration_s: float, *, seed: int, progress: Progress, snapshot_every: int | None
) -> dict[str, Any]:
    options = [] if snapshot_every is None else ["--snapshot-every", str(snapshot_every)]
    kills_s, step, elapsed_s = _supervise(run, duration_s, random.Random(seed), progress, options)
    found = read_goodput(open_store(run, writable=False))
    first_s = _first_step_after_s(run)
    in_run_s = found.elapsed_s - first_s
    measured = found.training_s / in_run_s
    costs = _known_costs(found)
    interval_s = costs["interval_s"] if snapshot_every is None else snapshot_every * _STEP_S
    # The ledger's time for each save includes the snapshots since the save before.
    lost_s = costs["lost_s"] * interval_s / costs["interval_s"]
    level = Level(
        name="home",
        lost_s=lost_s,
        **{name: costs[name] for name in ("commit_s", "restore_s")},
        mtbf_s=_MTBF_S,
    )
    scenario = Scenario(levels=(level,), duration_s=in_run_s)
    by_rates = simulate(scenario, interval_s, runs=_RUNS, seed=seed)
    trace = [Failure(at_s=at_s - first_s, level=0) for at_s in kills_s if at_s > first_s]
    by_kills = simulate(scenario, interval_s, runs=1, trace=trace)
    return {
        "measured_vs_rates": measured / by_rates.goodput,
        "measured_vs_kills": measured / by_kills.goodput,
        "goodput": {
            "measured": measured,
            "by_rates": by_rates.goodput,
            "by_kills": by_kills.goodput,
            "by_steps": step * _STEP_S / in_run_s,
        },
        "half_width_by_rates": by_rates.half_width,
        "seed": seed,
        "kills": len(kills_s),
        "killed_at_s": kills_s,
        "supervised_s": elapsed_s,
        "steps": step,
        "costs": costs,
        "times_s": found.times_s,
        "launches": found.launch_count,
        "saves": found.save_count,
    }


def _supervise(
    run: Path,
    duration_s: float,
    chance: random.Random,
    progress: Progress,
    options: Sequence[str],
) -> tuple[list[float], int, float]:
    """Start the training, kill the process repeatedly, and end the run properly.

    Returns: the times of the kills since the beginning, the last step, and the total duration.
    """
    begin_s = time.monotonic()
    kills_s: list[float] = []
    # A constant rate with a given number of failures: a random number would range from 28 to 52 per
    # hour.
    due_s = sorted(
        chance.uniform(0, duration_s) for _ in range(max(1, round(duration_s / _MTBF_S)))
    )
    process = _start(run, options)
    try:
        while (now_s := time.monotonic() - begin_s) < duration_s:
            progress.say(f"{now_s / 60:.0f} of {duration_s / 60:g} minutes, {len(kills_s)} kills")
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, min([*due_s[:1], duration_s]) - now_s))
                raise RuntimeError(f"the training ended by itself, with code {process.returncode}")
            now_s = time.monotonic() - begin_s
            if not due_s or now_s < due_s[0]:
                continue
            process.kill()
            process.wait()
            kills_s.append(now_s)
            time.sleep(_NOTICE_S)
            # A failure while no process runs has no effect; the rate is per wall clock.
            due_s = [at_s for at_s in due_s if at_s > now_s + _NOTICE_S]
            process = _start(run, options)
        process.send_signal(signal.SIGTERM)
        process.wait(_END_S)
    finally:
        process.kill()
        process.wait()
    return kills_s, ckptfmt.Run(run).newest().step, time.monotonic() - begin_s


def _start(run: Path, options: Sequence[str]) -> subprocess.Popen[bytes]:
    options = ["--step-s", str(_STEP_S), "--every", f"{_EVERY_S:g}s", *options]
    command = (sys.executable, "-m", "benchmarks.live_training", str(run), *options)
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _first_step_after_s(run: Path) -> float:
    """Return the time from the first launch to its first step, where the simulation starts."""
    store = open_store(run, writable=False)
    entries, _ = read_entries(store, read_known_run(store))
    times = entries[min(entries)].times
    return (times.initialising + times.waiting + times.restoring) / 1000


def _known_costs(found: Goodput) -> dict[str, float]:
    """Return the costs of a run with enough kills to show all costs. Raises: RuntimeError."""
    costs = {
        name: getattr(found.costs, name)
        for name in ("lost_s", "commit_s", "restore_s", "interval_s", "mtbf_s")
    }
    missing = [name for name, seconds in costs.items() if seconds is None]
    if missing:
        raise RuntimeError(f"the run was too short: its ledger doesn't show {', '.join(missing)}")
    return {name: float(seconds) for name, seconds in costs.items() if seconds is not None}
