"""The death of one of two processes: seconds by phase until the next step, in four ways.

Two ways start all processes again by torchrun, and read the run or a cache. In two ways the
survivor stays, and a replacement joins: a new process, or a spare process with all imports done.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist

from benchmarks.death_worker import count_layers
from benchmarks.figures import summarize
from benchmarks.record import Outcome
from benchmarks.rounds import Progress, Workplace, check_room, order_of_round, remove

_ROUNDS: Final = 5
#: The longest time of a training, in seconds.
_TRAINING_S: Final = 300.0
_POLL_S: Final = 0.02
#: The place of caches in memory.
_MEMORY: Final = Path("/dev/shm")
_WORKER: Final = (sys.executable, "-m", "benchmarks.death_worker")
_TORCHRUN: Final = (
    sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1",
    "--monitor-interval=0.1", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0",
    "-m", "benchmarks.death_worker",
)  # fmt: skip
#: The ways, by name: whether torchrun starts the processes again, and whether there is a cache or a
#: spare process.
WAYS: Final = {
    "restart_home": (True, False),
    "restart_cache": (True, True),
    "regroup": (False, False),
    "regroup_spare": (False, True),
}


def measure_death(
    nbytes: int, *, rounds: int | None, place: Workplace, progress: Progress
) -> Outcome:
    """Measure the seconds from a death until the next step, by way and phase.

    Args:
        nbytes: the approximate size of the state.
        rounds: the number of rounds; None for 5.

    Raises: SystemExit without enough memory or storage.
    """
    check_room(place.directory, memory_nbytes=10 * nbytes, storage_nbytes=6 * nbytes)
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in WAYS}
    for number in range(rounds or _ROUNDS):
        for name in order_of_round([*WAYS], number):
            progress.say(f"death: round {number}, {name}")
            rows[name].append(play(name, nbytes, place))
    progress.say("")
    figures = {
        f"{name}_{phase}": summarize([row[phase] for row in mine])
        for name, mine in rows.items()
        for phase in mine[0]
    }
    return Outcome(
        workload={
            "nbytes": nbytes,
            "tensors": 8 * count_layers(nbytes),
            "processes": 2,
            "network": "gloo on one machine",
        },
        settings={"ckptfmt": {"saver": "a process", "every": "3 steps"}},
        repeats={"rounds": rounds or _ROUNDS},
        rounds=rows,
        figures=figures,
        ratios={},
        goals={},
        memory={},
        notes={
            "*_s": "seconds from the death until both processes are in the phase; started: the"
            " first line of a new process; noticed: the survivor's error; met: the process group;"
            " built: DDP; loaded: the load; ready: streams, slots and savers; stepped: the step",
            "*_home_nbytes": "bytes of tensor files that both processes read from the run",
        },
        cache="files of the run in the page cache",
    )


def play(name: str, nbytes: int, place: Workplace) -> dict[str, float]:
    """Train once, and return seconds since the death by phase, and bytes read from the run.

    Raises: RuntimeError if the training ends in another way.
    """
    is_restart, has_more = WAYS[name]
    folder = place.fresh(name)
    folder.mkdir(parents=True)
    told = {"run": str(folder / "run"), "nbytes": nbytes, "journal": str(folder / "journal")}
    if is_restart:
        with tempfile.TemporaryDirectory(dir=_MEMORY) as cache:
            _run_torchrun(told | ({"cache": cache} if has_more else {}), folder)
    else:
        _run_group(told, folder, has_spare=has_more)
    lines = (folder / "journal").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    remove(folder)
    (died,) = [row["died"] for row in rows if "died" in row]
    found = [row for row in rows if "times" in row]
    if len(found) != 2:
        raise RuntimeError(f"{name}: {len(found)} of 2 processes have gone on")
    phases = dict.fromkeys(phase for row in found for phase in row["times"])
    seconds = {
        f"{phase}_s": max(row["times"][phase] for row in found if phase in row["times"]) - died
        for phase in phases
    }
    # A spare process has started before the death.
    seconds = {phase: one for phase, one in seconds.items() if one > 0}
    return {**seconds, "home_nbytes": sum(row["nbytes"]["home"] for row in found)}


@contextlib.contextmanager
def _processes(folder: Path) -> Iterator[Any]:
    """Yield a function that starts a program; all programs end with the context."""
    started: list[subprocess.Popen[bytes]] = []
    with (folder / "output").open("wb") as output:

        def start(words: tuple[str, ...], told: dict[str, Any], **more: str) -> Any:
            variables = {
                **os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
                "DEATH": json.dumps(told), **more,
            }  # fmt: skip
            started.append(
                subprocess.Popen(words, env=variables, stdout=output, stderr=subprocess.STDOUT)
            )
            return started[-1]

        try:
            yield start
        finally:
            for process in started:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(10)
                process.kill()
                process.wait()


def _run_torchrun(told: dict[str, Any], folder: Path) -> None:
    with _processes(folder) as start:
        if start(_TORCHRUN, told).wait(_TRAINING_S) != 0:
            raise RuntimeError((folder / "output").read_text()[-4000:])


def _run_group(told: dict[str, Any], folder: Path, *, has_spare: bool) -> None:
    make: Any = dist.TCPStore  # type: ignore[attr-defined]
    store = make("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    told = told | {"port": store.port}
    end_s = time.monotonic() + _TRAINING_S
    with _processes(folder) as start:
        spare = None
        if has_spare:
            spare = start(_WORKER, told | {"group": 1, "is_spare": True}, RANK="1")
            store.wait(["spare"])
        processes = [start(_WORKER, told, RANK=str(rank)) for rank in range(2)]
        while any(process.poll() is None for process in processes):
            if time.monotonic() > end_s or processes[0].poll():
                raise RuntimeError((folder / "output").read_text()[-4000:])
            if processes[1].poll():
                processes[1] = spare or start(_WORKER, told | {"group": 1}, RANK="1")
                store.set("wanted", "")
            time.sleep(_POLL_S)
