"""A live run with mixed failures: healed within the processes, beside restarts of all processes.

Two trainings run side by side, with the same failures at the same times. One goes back in memory,
replaces a lost process by a spare one, and goes on at another home without a restart. The other is
started again after each failure, as torchrun does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, Self

import torch.distributed as dist

from benchmarks.failures_worker import AWAY_S, REQUEST_S, WAIT_S, WIDTH, WORLD_SIZE
from benchmarks.figures import Figure, summarize
from benchmarks.record import Outcome
from benchmarks.rounds import Progress, Workplace
from ckptfmt.loop.interval import Level
from ckptfmt_tools.demo.servers import Server
from ckptfmt_tools.simulator import Failure, Scenario, simulate
from tests.campaign.network import DELAY, PASS, REFUSE, Network

#: The kinds of failures, each equally often.
KINDS: Final = ("rank killed", "node lost", "NaN batch", "slow home", "home away")
_PERIOD_S: Final = 90.0
#: Earliest and latest time of a failure in its period, in seconds.
_EARLY_S: Final = 5.0
_LATE_S: Final = 75.0
_EVERY_S: Final = 10.0
_SNAPSHOT_EVERY: Final = 10
_STEP_S: Final = 0.1
#: The time for which a home is slow or away, and from which a process dies with it, in seconds.
_TROUBLE_S: Final = 60.0
#: The delay from the death of a process to a start: time to detect a failure and find a node.
_NOTICE_S: Final = 3.0
_POLL_S: Final = 0.02
_END_S: Final = 120.0
_SEED: Final = 37
_NBYTES: Final = 3 * 4 * (WIDTH * WIDTH + WIDTH + WIDTH + 1)
_WORKER: Final = (sys.executable, "-m", "benchmarks.failures_worker")
WAYS: Final = {"in_place": True, "restarts": False}


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """A failure: its time since the beginning in seconds, its kind, and the rank that dies."""

    at_s: float
    kind: str
    rank: int


@dataclasses.dataclass(frozen=True, slots=True)
class Stop:
    """A gap in the steps of a training.

    Attributes:
        at_s: time of the last step before, in seconds since 1970.
        seconds: time from there to the begin of the next step.
        redone: number of steps that were done again.
    """

    at_s: float
    seconds: float
    redone: int


def measure_failures(
    minutes: float, *, rounds: int | None, place: Workplace, progress: Progress
) -> Outcome:
    """Measure the goodput of a run with mixed failures, healed in place and by restarts.

    Args:
        minutes: the duration of the run.
        rounds: of no effect: both ways have a single run.

    Raises: RuntimeError if a training can't go on.
    """
    del rounds
    duration_s = minutes * 60
    events = draw_events(duration_s, random.Random(_SEED))
    with contextlib.ExitStack() as held:
        servers = [held.enter_context(Server("moto")) for _ in range(3)]
        network = Network()
        held.callback(network.end)
        jobs = [
            held.enter_context(_Job(name, servers, network, place.fresh(name))) for name in WAYS
        ]
        for job in jobs:
            job.await_steps()
        begin_s = time.monotonic()
        left = list(events)
        while (now_s := time.monotonic() - begin_s) < duration_s:
            progress.say(
                f"{now_s / 60:.0f} of {minutes:g} minutes, {len(events) - len(left)} failures"
            )
            while left and left[0].at_s <= now_s:
                for job in jobs:
                    job.strike(left[0])
                del left[0]
            for job in jobs:
                job.look()
            time.sleep(_POLL_S)
        for job in jobs:
            job.await_steps()
        for job in jobs:
            job.end()
        progress.say("")
    rows = {job.name: _account(job) for job in jobs}
    ratios = {
        f"{name}_vs_simulator": row["goodput"] / row["simulated"] for name, row in rows.items()
    }
    ratios["in_place_vs_restarts"] = rows["in_place"]["goodput"] / rows["restarts"]["goodput"]
    figures = {
        f"{name}_{figure}": row[figure]
        for name, row in rows.items()
        for figure in ("goodput", "simulated", "stopped_s", "redone_s", "slowed_s")
    }
    return Outcome(
        workload={
            "nbytes": _NBYTES,
            "tensors": 12,
            "processes": WORLD_SIZE,
            "minutes": minutes,
            "step_s": _STEP_S,
            "homes": "three moto servers, each behind a proxy for each training",
            "failures": {kind: sum(event.kind == kind for event in events) for kind in KINDS},
        },
        settings={
            "ckptfmt": {
                "every": f"{_EVERY_S:g}s",
                "keep": 2,
                "away_after_s": AWAY_S,
                "request_s": REQUEST_S,
                "deadline_s": WAIT_S,
            },
            "in_place": {"snapshot_every": _SNAPSHOT_EVERY, "spare_processes": 1},
            "restarts": {"snapshot_every": None},
        },
        repeats=dict.fromkeys(rows, 1),
        rounds={name: [row] for name, row in rows.items()},
        figures={name: _single(value) for name, value in figures.items()},
        ratios={name: _single(value) for name, value in ratios.items()},
        goals={name: "0.95 to 1.05" for name in ratios if name.endswith("simulator")}
        | {"in_place_vs_restarts": ">= 1"},
        memory={},
        notes={
            "failures": f"one in each {_PERIOD_S:g} s, at a random time from {_EARLY_S:g} to"
            f" {_LATE_S:g} s: the same for both trainings",
            "rank killed": "SIGKILL of a random process; its saver finishes its save",
            "node lost": "SIGKILL of a random process and of its saver",
            "NaN batch": "a sample of the next batch is NaN from then on",
            "slow home": f"each 64 KiB to the home of the saves wait 0.25 s, for {_TROUBLE_S:g} s",
            "home away": f"the home of the saves refuses connections for {_TROUBLE_S:g} s, and a"
            " random process and its saver die with it",
            "in_place": "rewind after a NaN; else regroup with a spare process, which has imported"
            f" all, {_NOTICE_S:g} s after a death",
            "restarts": f"all processes start {_NOTICE_S:g} s after a death or an alarm, and leave"
            " out the samples between the save and the alarm",
            "goodput": "the last step times step_s, of all time since the first step",
            "simulated": "the simulator's, with a failure at each gap in the steps, and the mean"
            " gap, interval, time to commit and time lost to a save of the same training",
        },
        cache="warm",
    )


def _single(value: float) -> Figure:
    return summarize([value])


def draw_events(duration_s: float, chance: random.Random) -> list[Event]:
    """Return a failure for each period of a duration: all kinds in turns of a random order."""
    events: list[Event] = []
    kinds: list[str] = []
    for number in range(int(duration_s // _PERIOD_S)):
        if not kinds:
            kinds = chance.sample(KINDS, len(KINDS))
        at_s = number * _PERIOD_S + chance.uniform(_EARLY_S, _LATE_S)
        events.append(Event(at_s, kinds.pop(), chance.randrange(WORLD_SIZE)))
    return events


class _Job:
    """A training with its supervisor: the rendezvous, the network, and the starts.

    Args:
        name: a name of `WAYS`.
        servers: the servers of the homes.
        place: the directory for journals and output.
    """

    def __init__(self, name: str, servers: Sequence[Server], network: Network, place: Path) -> None:
        self.name = name
        self.place = place
        self.struck: list[tuple[float, Event]] = []
        self._is_in_place = WAYS[name]
        self._network = network
        place.mkdir(parents=True)
        self._buckets = [server.endpoint.make_bucket() for server in servers]
        self._gates = network.make_gates(server.endpoint.url for server in servers)
        make: Any = dist.TCPStore  # type: ignore[attr-defined]
        self._store = make("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._output = (place / "output").open("wb")
        self._group = 0
        self._spares = 0
        self._spare: subprocess.Popen[bytes] | None = None
        #: The end of the delay after a death, by the monotonic clock; None without a death.
        self._due_s: float | None = None
        self._timers: list[threading.Timer] = []
        self._processes = [self._start(rank=rank, group=0) for rank in range(WORLD_SIZE)]
        self._make_spare()

    # --- processes --------------------------------------------------------------------------------

    def _start(self, **told: Any) -> subprocess.Popen[bytes]:
        facts = {
            "port": self._store.port,
            "place": str(self.place),
            "homes": [
                (f"s3://{bucket}/run", gate.url)
                for bucket, gate in zip(self._buckets, self._gates, strict=True)
            ],
            "in_place": self._is_in_place,
            "every_s": _EVERY_S,
            "step_s": _STEP_S,
            "snapshot_every": _SNAPSHOT_EVERY if self._is_in_place else None,
            **told,
        }
        variables = {
            **os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "FAILURES": json.dumps(facts),
        }  # fmt: skip
        return subprocess.Popen(
            _WORKER, env=variables, stdout=self._output, stderr=subprocess.STDOUT
        )

    def _make_spare(self) -> None:
        if self._is_in_place:
            self._spares += 1
            self._spare = self._start(spare=f"spare-{self._spares}")

    def _replace(self, ranks: Sequence[int]) -> None:
        """Let the spare process take the first rank, and new processes the others."""
        for rank in ranks[1:]:
            self._processes[rank] = self._start(rank=rank, group=self._group)
        for rank in ranks[:1]:
            assert self._spare is not None
            self._processes[rank] = self._spare
            told = {"rank": rank, "group": self._group}
            self._store.set(f"spare-{self._spares}", json.dumps(told))
            self._make_spare()

    def look(self) -> None:
        """Start processes after a death, or let the processes meet again."""
        now_s = time.monotonic()
        dead = [rank for rank, process in enumerate(self._processes) if process.poll() is not None]
        if dead:
            if self._due_s is None:
                self._due_s = now_s + _NOTICE_S
                if not self._is_in_place:
                    self._kill_all()
            if now_s < self._due_s:
                return
        elif not self._is_in_place or not self._have_left():
            return
        self._due_s = None
        self._group += 1
        if self._is_in_place:
            self._replace(dead)
        else:
            self._processes = [
                self._start(rank=rank, group=self._group) for rank in range(WORLD_SIZE)
            ]
        self._store.set(f"group-{self._group}", "")

    def _have_left(self) -> bool:
        """Return whether all processes have left the present process group."""
        keys = [f"left-{self._group}-{rank}" for rank in range(WORLD_SIZE)]
        return bool(self._store.check(keys))

    def _kill_all(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def await_steps(self) -> None:
        """Wait until the training makes steps, and has a save.

        Raises: RuntimeError if it has none in time.
        """
        end_s = time.monotonic() + _END_S
        while time.monotonic() < end_s:
            self.look()
            journals = [self.place / f"journal-{rank}" for rank in range(WORLD_SIZE)]
            ages_s = [time.time() - path.stat().st_mtime for path in journals if path.exists()]
            is_training = len(ages_s) == WORLD_SIZE and max(ages_s) < 2 * _STEP_S
            if is_training and any(kind == "saved" for _, kind, _ in self.rows()):
                return
            time.sleep(_POLL_S)
        raise self._failure("no steps")

    def _failure(self, what: str) -> RuntimeError:
        output = (self.place / "output").read_text(errors="replace")
        return RuntimeError(f"{self.name}: {what}: {output[-4000:]}")

    def end(self) -> None:
        """Let the training save and end. Raises: RuntimeError if it doesn't."""
        for timer in self._timers:
            timer.cancel()
        for number in range(len(self._gates)):
            self._turn(number, PASS)
        for process in self._processes:
            process.send_signal(signal.SIGTERM)
        for process in self._processes:
            if process.wait(_END_S) != 0:
                raise self._failure(f"exit code {process.returncode}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for timer in self._timers:
            timer.cancel()
        self._kill_all()
        if self._spare is not None:
            self._spare.kill()
            self._spare.wait()
        self._network.close(self._gates)
        self._output.close()

    # --- failures ---------------------------------------------------------------------------------

    def strike(self, event: Event) -> None:
        """Let a failure happen."""
        self.struck.append((time.time(), event))
        if event.kind == "NaN batch":
            (self.place / "damage").touch()
        elif event.kind in ("slow home", "home away"):
            number = self._find_home()
            self._turn(number, DELAY if event.kind == "slow home" else REFUSE)
            timer = threading.Timer(_TROUBLE_S, self._turn, (number, PASS))
            timer.daemon = True
            timer.start()
            self._timers.append(timer)
        if event.kind in ("rank killed", "node lost", "home away"):
            process = self._processes[event.rank]
            savers = [] if event.kind == "rank killed" else list_children(process.pid)
            process.kill()
            for saver in savers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(saver, signal.SIGKILL)

    def _turn(self, number: int, mode: str) -> None:
        self._network.turn(self._gates[number], mode)

    def _find_home(self) -> int:
        """Return the number of the home with the newest save."""
        saves = [row for row in self.rows() if row[1] == "saved"]
        for number, bucket in enumerate(self._buckets):
            if saves and bucket in saves[-1][2][0]:
                return number
        return 0

    def rows(self) -> list[list[Any]]:
        """Return the journal of process 0: time, kind and value of each row."""
        lines = (self.place / "journal-0").read_text().splitlines()
        return [json.loads(line) for line in lines if line.endswith("]")]

    def steps(self) -> list[tuple[float, int]]:
        """Return time and number of each step of process 0."""
        return [(at_s, int(value)) for at_s, kind, value in self.rows() if kind == "step"]


def list_children(pid: int) -> list[int]:
    """Return the processes that a process has started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[1]) == pid:
                found.append(int(path.parent.name))
    return found


def find_stops(steps: Iterable[tuple[float, int]], step_s: float) -> list[Stop]:
    """Return the gaps in the steps of a training: where it hasn't gone on with the next step.

    >>> find_stops([(1.0, 0), (1.1, 1), (1.2, 2), (4.0, 1), (4.1, 2)], 0.1)
    [Stop(at_s=1.2, seconds=2.7, redone=2)]
    """
    rows = list(steps)
    return [
        Stop(at_s, round(later_s - at_s - step_s, 4), step + 1 - later)
        for (at_s, step), (later_s, later) in itertools.pairwise(rows)
        if later != step + 1
    ]


def _account(job: _Job) -> dict[str, Any]:
    """Return the time of a training by use, and the simulator's goodput."""
    rows = job.rows()
    steps = job.steps()
    saves = [value for _, kind, value in rows if kind == "saved"]
    first_s = steps[0][0] - _STEP_S
    elapsed_s = steps[-1][0] - first_s
    stops = find_stops(steps, _STEP_S)
    stopped_s = sum(stop.seconds for stop in stops)
    redone_s = sum(stop.redone for stop in stops) * _STEP_S
    kept_s = (steps[-1][1] + 1) * _STEP_S
    slowed_s = elapsed_s - kept_s - stopped_s - redone_s
    commit_s = statistics.fmean(seconds for _, seconds, _ in saves)
    level = Level(
        name="home",
        lost_s=max(0.0, slowed_s) / len(saves),
        commit_s=commit_s,
        restore_s=stopped_s / len(stops),
        mtbf_s=elapsed_s / len(stops),
    )
    trace = [Failure(at_s=stop.at_s - first_s, level=0) for stop in stops]
    scenario = Scenario(levels=(level,), duration_s=elapsed_s)
    simulated = simulate(scenario, _EVERY_S, runs=1, trace=trace)
    return {
        "goodput": kept_s / elapsed_s,
        "simulated": simulated.goodput,
        "elapsed_s": elapsed_s,
        "kept_s": kept_s,
        "stopped_s": stopped_s,
        "redone_s": redone_s,
        "slowed_s": slowed_s,
        "saves": len(saves),
        "commit_s": commit_s,
        "stops": [
            dataclasses.asdict(stop) | {"at_s": round(stop.at_s - first_s, 1)} for stop in stops
        ],
        "by_kind": sum_by_kind(stops, job.struck),
        "failures": [[at_s - first_s, event.kind] for at_s, event in job.struck],
        "errors": [[at_s - first_s, value] for at_s, kind, value in rows if kind == "error"],
    }


def sum_by_kind(
    stops: Sequence[Stop], struck: Sequence[tuple[float, Event]]
) -> dict[str, dict[str, float]]:
    """Return number and mean cost of the failures of each kind, with the stops until the next."""
    found: list[list[Stop]] = [[] for _ in struck]
    for stop in stops:
        # The last step before a failure may have ended a moment earlier.
        later_s = stop.at_s + 2 * _STEP_S
        causes = [number for number, (at_s, _) in enumerate(struck) if at_s <= later_s]
        if causes:
            found[causes[-1]].append(stop)
    table: dict[str, dict[str, float]] = {}
    for kind in KINDS:
        mine = [own for own, (_, event) in zip(found, struck, strict=True) if event.kind == kind]
        if mine:
            table[kind] = {
                "count": len(mine),
                "stops": sum(map(len, mine)),
                "stopped_s": sum(stop.seconds for own in mine for stop in own) / len(mine),
                "redone_s": sum(stop.redone for own in mine for stop in own) * _STEP_S / len(mine),
            }
    return table
