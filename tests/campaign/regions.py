"""Rounds of outages, partitions and take-overs of a run with three homes, each judged by its bytes.

Three S3 servers are the homes. A job is a process with proxies of its own before each home, so that
a home can be away for one job and answer another. A round begins a run, goes through a few phases of
trouble, heals the network, and lets a last job train to its end. Then everything is compared: the
acknowledged saves with the launch records and checkpoints of all homes, and the weights of each
resume with those of an undisturbed training. The command prints a line for each round with a
violation, and a summary; its status is 1 after a violation.

    python -m tests.campaign.regions --rounds 500 --seed 1
    python -m tests.campaign.regions --rounds 1 --seed 17 --verbose
    python -m tests.campaign.regions --rounds 50 --seed 1 --break confirm
"""

# ruff: noqa: T201 - a command that prints

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import faulthandler
import logging
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import queue
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Self

import numpy as np
import obstore.store  # noqa: F401 - jobs are forked with everything imported

import ckptfmt
from ckptfmt.documents.manifest import Manifest, Tombstone, parse_checkpoint_name
from ckptfmt.documents.run import Launch
from ckptfmt.errors import CkptError
from ckptfmt.run.elections import RunHomes
from ckptfmt.run.lineage import iter_lineage, list_checkpoints, list_launches, read_run
from ckptfmt.run.votes import OtherHomes
from ckptfmt.store import ObjectStore, objects
from ckptfmt.store.leases import Leases
from ckptfmt_tools.demo.servers import Server
from tests.campaign.network import CUT, DELAY, HOLE, PASS, REFUSE, Gate, Network, open_home
from tests.store.helpers import FAST_DIRECTORY

_LOG: Final = logging.getLogger("ckptfmt")
#: Homes of a run.
COUNT: Final = 3
_AWAY: Final = (REFUSE, HOLE)
#: Rules of several homes that a negative control takes away.
RULES: Final = ("confirm", "follow", "votes")

#: Exit statuses of a job: a refusal of ckptfmt, a wrong state after a resume, any other error.
REFUSED, WRONG_STATE, CRASHED = 10, 20, 21
#: Refusals that an outage or a newer launch explains.
_EXPLAINED: Final = (
    "FENCED",
    "HOMES_AWAY",
    "HOME_BEHIND",
    "STORE_NO_ANSWER",
    "STORE_IO",
    "SAVER_LOST",
)
#: Refusals of a job that was stopped in mid-save, while a newer launch has removed its files.
_OVERTAKEN: Final = ("FILE_MISSING", "CHECKPOINT_ABORTED", "CHECKPOINT_RETIRED")
#: Longest time without progress of a job, in seconds. Each wait of a job ends sooner.
_HANG_S: Final = 75.0
#: Time beyond `away_after_s` for a start while a single home is away.
_START_S: Final = 30.0
#: Deadline of jobs, and of a job that ends a round, in seconds.
_DEADLINE_S: Final = 4.0
_LAST_DEADLINE_S: Final = 30.0
#: Number of jobs that may end a round: on a busy machine, copies may not be done by a job's end.
_LAST_COUNT: Final = 3
#: Time-lapse of the time limits of stores, in seconds; the rules stay.
_CREATE_S: Final = 6.0
_TERM_S: Final = 4.0
#: Longest time of a request to a home, in seconds.
_REQUEST_S: Final = 3
_WORDS: Final = 256


# --- the training ---------------------------------------------------------------------------------


def begin_weights() -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Return the weights before the first step."""
    return np.arange(_WORDS, dtype=np.uint64)


def train_step(weights: np.ndarray[Any, np.dtype[np.uint64]]) -> None:
    """Train a step: each bit depends on all steps before."""
    weights *= np.uint64(6364136223846793005)
    weights += np.uint64(1442695040888963407)


def undisturbed(steps: int) -> bytes:
    """Return the weights after a training that nothing disturbs."""
    weights = begin_weights()
    for _ in range(steps):
        train_step(weights)
    return weights.tobytes()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a job does.

    Attributes:
        addresses: URL and endpoint of each home, as this job reaches it.
        away_after_s, keep, saver: options of the run and of the job.
        steps: number of steps after the resume; None to train until a signal.
        step_s: time of a step.
        broken: a rule that the job doesn't follow; None for none.
        directory: where the job leaves its log and the stacks of a hang.
        name: name of the files there.
    """

    addresses: Sequence[tuple[str, str]]
    away_after_s: float
    keep: int | None
    saver: str
    steps: int | None
    step_s: float
    broken: str | None
    directory: str
    name: str


def break_rule(rule: str | None) -> None:
    """Take a rule away in this process."""
    if rule == "confirm":
        OtherHomes.confirm = lambda *_: None  # type: ignore[method-assign]
    elif rule == "follow":
        OtherHomes.await_copy = lambda *_, **__: None  # type: ignore[method-assign]
    elif rule == "votes":
        whole = RunHomes._collect

        def collect(self: RunHomes, *arguments: Any) -> Any:
            majority, self._majority = self._majority, 1
            try:
                return whole(self, *arguments)
            finally:
                self._majority = majority

        RunHomes._collect = collect  # type: ignore[method-assign,assignment]


def work(plan: Plan, told: multiprocessing.connection.Connection) -> None:
    """Live as a job: resume, check the state, train, and tell each committed save."""
    place = pathlib.Path(plan.directory)
    stacks = (place / f"{plan.name}.stack").open("w")
    faulthandler.dump_traceback_later(_HANG_S, file=stacks)
    faulthandler.register(signal.SIGUSR1, file=stacks)
    logging.basicConfig(
        filename=place / f"{plan.name}.log",
        level=logging.INFO,
        format="%(asctime)s %(threadName)s %(message)s",
    )
    break_rule(plan.broken)
    if plan.saver != "process":  # the saver's process has the true limits
        objects._DEADLINE_S = _CREATE_S  # type: ignore[misc]
        objects._PROBE_TIMEOUT = "3s"  # type: ignore[misc]
        defaults = Leases.__init__.__kwdefaults__ or {}
        Leases.__init__.__kwdefaults__ = {**defaults, "term_s": _TERM_S}
    lock = threading.Lock()

    def tell(*message: Any) -> None:
        with lock, contextlib.suppress(OSError):
            told.send((time.monotonic(), *message))

    status = CRASHED
    try:
        status = _train(plan, tell, lambda: faulthandler.dump_traceback_later(_HANG_S, file=stacks))
    except CkptError as error:
        _LOG.exception("refused")
        tell("refused", str(error.code), str(error))
        status = REFUSED
    except BaseException:  # noqa: BLE001
        _LOG.exception("crashed")
        tell("crashed", traceback.format_exc())
    faulthandler.cancel_dump_traceback_later()
    told.close()
    sys.exit(status)


def _train(plan: Plan, tell: Callable[..., None], progress: Callable[[], None]) -> int:
    weights = begin_weights()
    state = ckptfmt.State(
        weights={"w": weights}, data={"step": 0}, config={}, rng=False, absent={"optimizer": "-"}
    )

    before_s: dict[int, float] = {}  # a moment before the save of each step began

    def on_save(event: ckptfmt.SaveEvent) -> None:
        if event.kind == "committed":
            name = pathlib.PurePosixPath(event.path).name
            tell("saved", name, before_s.get(event.step, 0.0))
        elif event.kind == "failed":
            tell("failed", event.step, str(event.error))

    begin_s = time.monotonic()
    first, *others = [
        open_home(url, endpoint, timeout_s=_REQUEST_S) for url, endpoint in plan.addresses
    ]
    checkpointer = ckptfmt.Checkpointer(
        first,
        state,
        every=2,
        keep=plan.keep,
        copies=[ckptfmt.Homes(others, away_after_s=plan.away_after_s)],
        saving=ckptfmt.Saving(saver=plan.saver, failed_saves=100),  # type: ignore[arg-type]
        job=ckptfmt.Job(deadline_s=_LAST_DEADLINE_S if plan.steps else _DEADLINE_S),
        stop=ckptfmt.Stop(signals=[signal.SIGTERM], deadline_s=_DEADLINE_S),
        on_save=on_save,
    )
    with checkpointer:
        launch = checkpointer.launch
        assert launch is not None
        held: Any = state.weights
        seconds = time.monotonic() - begin_s
        tell("launched", launch.launch, checkpointer.step, seconds, launch.nonce)
        if held["w"].tobytes() != undisturbed(checkpointer.step):
            return WRONG_STATE
        total = 1_000_000 if plan.steps is None else checkpointer.step + plan.steps
        for _ in checkpointer.steps(total):
            progress()
            train_step(held["w"])
            state.data["step"] += 1  # type: ignore[index]
            time.sleep(plan.step_s)
            before_s[checkpointer.step + 1] = time.monotonic()
        progress()
    return 0


# --- a round --------------------------------------------------------------------------------------


@dataclasses.dataclass(slots=True)
class JobState:
    """What the harness knows of a job.

    Attributes:
        net: the mode of each home's proxy.
        is_steady: whether the network has been as at the start since then.
        saves: names of the acknowledged saves, in order.
        before_s: for each of them, a moment before the save began.
        launched_s: the moment when its launch had begun.
        launch: number of its launch; 0 before it is known.
        seconds: time from its begin to the resumed state.
        away: homes that were away for the whole start, if there was no other trouble; else None.
        refusal: code and text of the error that ended it.
        is_killed: whether the harness has killed it.
        was_stopped: whether it was asked to end.
    """

    name: str
    process: Any
    told: multiprocessing.connection.Connection
    gates: list[Gate]
    net: list[str]
    is_steady: bool = True
    saves: list[str] = dataclasses.field(default_factory=list)
    before_s: list[float] = dataclasses.field(default_factory=list)
    launched_s: float = float("inf")
    launch: int = 0
    step: int = -1
    seconds: float = 0.0
    nonce: str = ""
    away: int | None = None
    refusal: tuple[str, str] | None = None
    is_killed: bool = False
    was_stopped: bool = False
    is_over: bool = False


@dataclasses.dataclass(slots=True)
class Result:
    """What came of a round, or of several rounds.

    Attributes:
        saves, lost: numbers of acknowledged saves, and of those that a take-over has lost.
        launches, take_overs: numbers of launches that resumed, and of those after the first.
        away_starts: number of starts while a single home was away.
        start_s: the longest of these starts.
        slow_starts: number of starts that failed although a majority answered. On a busy machine a
            home may seem away; a second failure in a row is a violation.
        late_copies: number of jobs at whose end a home was still behind, as the job reported.
        forks: number of violations of the single history.
        violations: a sentence each.
        refusals: numbers of refusals of jobs, by code.
    """

    rounds: int = 0
    launches: int = 0
    saves: int = 0
    lost: int = 0
    forks: int = 0
    take_overs: int = 0
    away_starts: int = 0
    start_s: float = 0.0
    slow_starts: int = 0
    late_copies: int = 0
    violations: list[str] = dataclasses.field(default_factory=list)
    refusals: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    @property
    def summary(self) -> str:
        """The figures as text."""
        return (
            f"{self.rounds} rounds, {self.launches} launches, {self.saves} saves acknowledged,"
            f" {self.lost} lost, {self.forks} forks, {self.take_overs} take-overs,"
            f" {self.away_starts} starts with a home away (longest {self.start_s:.1f} s),"
            f" {self.slow_starts} starts failed for slowness,"
            f" {self.late_copies} late copies, refusals {dict(self.refusals)},"
            f" {len(self.violations)} violations"
        )

    def add(self, other: Result) -> None:
        """Add the figures of other rounds."""
        for field in dataclasses.fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            whole = max(mine, theirs) if field.name == "start_s" else mine + theirs
            setattr(self, field.name, whole)


class Round:
    """A round, repeatable by its seed but for the moments at which things happen.

    Args:
        stage: servers, buckets and network.
        seed: seed of all choices.
        broken: see `Plan`.
        say: called with a sentence for each event.
    """

    def __init__(
        self, stage: Stage, seed: int, *, broken: str | None, say: Callable[[str], None]
    ) -> None:
        self._stage = stage
        self._rng = random.Random(seed)
        self._seed = seed
        self._broken = broken
        self._say_line = say
        self._begin_s = time.monotonic()
        self._directory = pathlib.Path(tempfile.mkdtemp(dir=stage.directory, prefix=f"r{seed}-"))
        self._jobs: list[JobState] = []
        self._away_after_s = self._rng.choice([2.0, 2.5, 3.0])
        self._keep = self._rng.choice([None, None, 3])
        saver = self._rng.choice([*["thread"] * 5, "inline", "inline", "process"])
        self._saver = "thread" if broken and saver == "process" else saver
        self._step_s = self._rng.choice([0.02, 0.06, 0.12])
        #: The network that a job finds at its start.
        self._weather = [PASS] * COUNT
        #: Number of starts in a row that failed although a majority answered.
        self._slow = 0
        self.result = Result(rounds=1)

    def run(self) -> Result:
        """Play the round and judge it."""
        try:
            self._play()
            self._judge()
        except Exception:  # noqa: BLE001
            self._violate(f"harness: {traceback.format_exc()}")
        finally:
            for job in self._jobs:
                self._kill(job)
                job.told.close()
                self._stage.network.close(job.gates)
        if not self.result.violations:
            shutil.rmtree(self._directory, ignore_errors=True)
        return self.result

    def _say(self, sentence: str) -> None:
        self._say_line(f"{time.monotonic() - self._begin_s:7.2f} {sentence}")

    def _violate(self, sentence: str, *, fork: bool = False) -> None:
        self.result.forks += fork
        self.result.violations.append(sentence)
        self._say(f"VIOLATION: {sentence}")

    # --- jobs -------------------------------------------------------------------------------------

    @property
    def _living(self) -> list[JobState]:
        return [job for job in self._jobs if not job.is_over]

    def _start(self, *, steps: int | None = None) -> JobState:
        stage = self._stage
        gates = stage.network.make_gates(stage.endpoints)
        for gate, mode in zip(gates, self._weather, strict=True):
            stage.network.turn(gate, mode)
        name = f"job{len(self._jobs) + 1}"
        prefix = f"{self._seed}-{self._directory.name}"
        plan = Plan(
            addresses=[
                (f"s3://{bucket}/{prefix}", gate.url)
                for bucket, gate in zip(stage.buckets, gates, strict=True)
            ],
            away_after_s=self._away_after_s,
            keep=self._keep,
            saver=self._saver,
            steps=steps,
            step_s=self._step_s,
            broken=self._broken,
            directory=str(self._directory),
            name=name,
        )
        here, there = stage.context.Pipe(duplex=False)
        process = stage.context.Process(target=work, args=(plan, there))
        process.start()
        there.close()
        job = JobState(name, process, here, gates, list(self._weather))
        self._jobs.append(job)
        self._say(f"{name} starts, network {'/'.join(job.net)}, living {len(self._living)}")
        return job

    def _set_net(self, job: JobState, net: Sequence[str]) -> None:
        for number, mode in enumerate(net):
            if job.net[number] != mode:
                job.is_steady = job.is_steady and bool(job.launch)
                job.net[number] = mode
                self._stage.network.turn(job.gates[number], mode)

    def _kill(self, job: JobState) -> None:
        if job.process.is_alive():
            job.is_killed = True
            job.process.kill()
        job.process.join()

    def _pump(self, seconds: float, *, until: Callable[[], bool] = lambda: False) -> bool:
        """Take in messages for a time; return whether `until` became true."""
        end_s = time.monotonic() + seconds
        while not until():
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                return False
            living = {job.told: job for job in self._living}
            if not living:
                time.sleep(min(left_s, 0.05))
                continue
            ready = multiprocessing.connection.wait(list(living), min(left_s, 0.1))
            for told in ready:
                self._hear(living[told])  # type: ignore[index]
        return True

    def _hear(self, job: JobState) -> None:
        try:
            told_s, kind, *values = job.told.recv()
        except (EOFError, OSError):
            self._see_end(job)
            return
        self._say(f"{job.name}: {kind} {' '.join(map(str, values))[:160]}")
        if kind == "launched":
            job.launch, job.step, job.seconds, job.nonce = values
            job.launched_s = told_s
            away = [mode for mode in job.net if mode != PASS]
            if job.is_steady and all(mode in _AWAY for mode in away):
                job.away = len(away)
            self._slow = 0
            self._note_start(job)
        elif kind == "saved":
            job.saves.append(values[0])
            job.before_s.append(values[1])
        elif kind == "refused":
            job.refusal = (values[0], values[1])
            self.result.refusals[values[0]] += 1
        elif kind == "crashed":
            self._violate(f"{job.name} crashed: {values[0]}")

    def _note_start(self, job: JobState) -> None:
        result = self.result
        result.launches += 1
        result.take_overs += job.launch > 1
        if job.away == 1:
            result.away_starts += 1
            result.start_s = max(result.start_s, job.seconds)
            if job.seconds > self._away_after_s + _START_S:
                self._violate(f"{job.name} took {job.seconds:.1f} s to start, with one home away")

    def _see_end(self, job: JobState) -> None:
        job.is_over = True
        job.process.join(45)  # threads that ask a home hold up the end
        code = job.process.exitcode
        self._say(f"{job.name} ends with {code}{' (killed)' if job.is_killed else ''}")
        stacks = self._directory / f"{job.name}.stack"
        if stacks.exists() and stacks.stat().st_size:
            self._violate(f"{job.name} hung: {stacks}")
        if job.is_killed or (job.was_stopped and code == -signal.SIGTERM):
            return  # a signal before or after the time of the checkpointer's handler ends the job
        away = sum(mode != PASS for mode in job.net)
        if code == WRONG_STATE:
            self._violate(f"{job.name} resumed step {job.step} with wrong weights")
        elif job.was_stopped and job.refusal is not None and job.refusal[0] == "SAVE_PENDING":
            pass  # the deadline of this harness is short
        elif (
            job.refusal is not None
            and job.refusal[0] not in _EXPLAINED
            and not (job.refusal[0] in _OVERTAKEN and self._is_overtaken(job))
        ):
            self._violate(f"{job.name} ended with {job.refusal[1]}")
        elif (
            job.refusal is not None
            and not job.launch
            and job.is_steady
            and away <= 1
            and all(mode in (PASS, *_AWAY) for mode in job.net)
        ):
            self.result.slow_starts += 1
            self._slow += 1
            self._say(f"{job.name} didn't start with {away} homes away")
            if self._slow > 1:
                self._violate(
                    f"{self._slow} starts failed with {away} homes away: {job.refusal[1]}"
                )
        elif code not in (0, REFUSED):
            self._violate(f"{job.name} ended with the status {code}")

    def _is_overtaken(self, job: JobState) -> bool:
        return any(other.launch > job.launch for other in self._jobs)

    # --- phases -----------------------------------------------------------------------------------

    def _play(self) -> None:
        rng = self._rng
        self._say(
            f"seed {self._seed}: away_after_s={self._away_after_s}, keep={self._keep},"
            f" saver={self._saver}, step_s={self._step_s}"
        )
        first = self._start()
        if not self._pump(_HANG_S, until=lambda: len(first.saves) >= 1 or first.is_over):
            self._violate("the first job made no save in time")
        for _ in range(rng.randint(3, 5)):
            self._phase()
        self._weather = [PASS] * COUNT
        for job in self._living:
            self._set_net(job, self._weather)
        self._say("the network is healed")
        self._pump(rng.choice([0.0, 0.3, 1.0]))
        for job in self._living:
            self._end(job, kills=rng.random() < 0.6)
        for _ in range(_LAST_COUNT):
            last = self._run_to_end()
            heads = self._find_heads()
            if len(set(heads)) == 1:
                break
            self._say(f"the heads are {heads}")
            self.result.late_copies += 1
            if "MIRROR_BEHIND" not in (self._directory / f"{last.name}.log").read_text("utf-8"):
                self._violate(f"{last.name} doesn't report that a home is behind: {heads}")

    def _run_to_end(self) -> JobState:
        last = self._start(steps=6)
        if not self._pump(2 * _HANG_S, until=lambda: last.is_over):
            self._violate("the last job hung")
            self._signal(last, signal.SIGUSR1)
            time.sleep(0.5)
        elif last.process.exitcode != 0:
            self._violate(f"the last job ended with {last.process.exitcode}: {last.refusal}")
        return last

    def _open_homes(self) -> list[ObjectStore]:
        stage = self._stage
        return [
            open_home(
                f"s3://{bucket}/{self._seed}-{self._directory.name}", endpoint, timeout_s=_REQUEST_S
            )
            for bucket, endpoint in zip(stage.buckets, stage.endpoints, strict=True)
        ]

    def _find_heads(self) -> list[str | None]:
        heads = []
        for store in self._open_homes():
            launches = list_launches(store)
            lineage = iter_lineage(launches, list_checkpoints(store, with_labels=False))
            heads.append(next((one.name for one in lineage if one.manifest is not None), None))
        return heads

    def _end(self, job: JobState, *, kills: bool) -> None:
        if job.is_over:
            return
        if kills:
            self._say(f"{job.name} is killed")
            self._kill(job)
        else:
            self._say(f"{job.name} is asked to stop")
            job.was_stopped = True
            self._signal(job, signal.SIGTERM)
        if not self._pump(_HANG_S, until=lambda: job.is_over):
            self._signal(job, signal.SIGUSR1)
            time.sleep(0.5)
            self._violate(f"{job.name} doesn't end")
            self._kill(job)
            self._pump(5.0, until=lambda: job.is_over)

    def _choose_net(self) -> list[str]:
        """Return a network: mostly one home away, sometimes calm or worse."""
        rng = self._rng
        net = [PASS] * COUNT
        kind = rng.random()
        home = rng.choice([0, 0, 1, 2])  # the first home has the commits
        if kind < 0.2:
            return net
        if kind < 0.7:
            net[home] = rng.choice(_AWAY)
        elif kind < 0.8:
            net = [rng.choice(_AWAY)] * COUNT
            net[home] = PASS
        elif kind < 0.9:
            net[home] = CUT
        elif kind < 0.95:
            net[home] = DELAY
        else:
            net = [PASS, DELAY, DELAY]
        return net

    def _phase(self) -> None:
        rng = self._rng
        nets = [self._choose_net() for _ in range(2)]
        if rng.random() < 0.4:
            nets[1] = nets[0]  # the same for everybody
        action = rng.choice(
            ["start", "start", "race", "kill", "replace", "replace", "pause", "wait"]
        )
        flaps = rng.random() < 0.25
        seconds = rng.choice([0.2, 0.5, 1.0, 1.5])
        picks = rng.random()
        lead_s = rng.choice([0.0, 0.0, 0.1, 0.4])
        rest_s = rng.choice([0.0, 0.1, 0.5])

        living = self._living
        self._say(f"phase: {action}, {'/'.join(nets[0])} before, {'/'.join(nets[1])} for new jobs")
        for job in living:
            self._set_net(job, nets[0])
        self._weather = nets[1]
        self._pump(lead_s)
        living = self._living
        old = living[int(picks * len(living))] if living else None
        paused = None
        if action in ("kill", "replace") and old is not None:
            self._say(f"{old.name} is killed")
            self._kill(old)
            self._pump(rest_s)
        if action == "pause" and old is not None:
            paused = old
            paused.is_steady &= bool(paused.launch)
            self._say(f"{old.name} is paused")
            self._signal(old, signal.SIGSTOP)
        begun = None
        active = [job for job in self._living if job is not paused]
        if (action in ("start", "replace", "pause") and len(active) < 2) or not active:
            begun = self._start()
        if action == "race" and len(active) < 2:
            begun = self._race()
        if flaps:
            self._flap()
        elif begun is not None:
            job = begun
            self._pump(8.0, until=lambda: bool(job.launch) or job.is_over)
        self._pump(seconds)
        if paused is not None and paused.process.is_alive():
            self._signal(paused, signal.SIGCONT)
            self._say(f"{paused.name} goes on")
            self._pump(seconds)

    def _race(self) -> JobState:
        """Start two jobs at once, mostly while each of them misses another home."""
        if self._rng.random() < 0.75:
            away = self._rng.sample(range(COUNT), 2)
            nets = [[REFUSE if home == one else PASS for home in range(COUNT)] for one in away]
        else:
            nets = [self._weather, self._choose_net()]
        for self._weather in nets:
            begun = self._start()
        return begun

    def _flap(self) -> None:
        """Let a home of every job come and go."""
        home = self._rng.randrange(COUNT)
        for pause_s in [self._rng.uniform(0.02, 0.4) for _ in range(12)]:
            mode = self._rng.choice([PASS, REFUSE, CUT])
            for job in self._living:
                net = list(job.net)
                net[home] = mode
                self._set_net(job, net)
            self._pump(pause_s)

    @staticmethod
    def _signal(job: JobState, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(job.process.pid, number)

    # --- the judge --------------------------------------------------------------------------------

    def _judge(self) -> None:
        launches: dict[int, Launch] = {}
        digests: dict[str, set[str]] = collections.defaultdict(set)
        heads = {
            self._judge_home(number, store, launches, digests)
            for number, store in enumerate(self._open_homes())
        }
        if len(heads) > 1:
            self._violate(f"the homes have different heads: {heads}")
        for name, found_digests in digests.items():
            if len(found_digests) > 1:
                self._violate(f"two checkpoints have the name {name}", fork=True)
        self._judge_launches(launches)
        self._judge_order()
        self._judge_saves(launches, digests)

    def _judge_home(
        self,
        number: int,
        store: ObjectStore,
        launches: dict[int, Launch],
        digests: dict[str, set[str]],
    ) -> tuple[str, str] | None:
        """Add the launches and checkpoints of a home; return name and digest of its head."""
        run = read_run(store)
        if run is None:
            self._violate(f"home {number} has no run")
            return None
        found = list_launches(store, run)
        entries = list_checkpoints(store, run, with_labels=False)
        for launch in found:
            if not isinstance(launch, Launch):
                self._violate(f"home {number}: launch {launch.launch} can't be read")
            elif launches.setdefault(launch.launch, launch) != launch:
                self._violate(f"two launches have the number {launch.launch}", fork=True)
        for entry in entries:
            register = entry.register
            if isinstance(register, Manifest):
                digests[entry.name].add(register.digest)
            elif isinstance(register, Tombstone) and register.manifest_digest:
                digests[entry.name].add(register.manifest_digest)
            elif isinstance(register, CkptError):
                self._violate(f"home {number}: {entry.name}: {register}")
        lineage = iter_lineage(found, entries)
        head = next((entry for entry in lineage if entry.manifest is not None), None)
        if head is None or head.manifest is None:
            self._violate(f"home {number} has no head")
            return None
        report = ckptfmt.validate(store.at(head.name))
        if not report:
            self._violate(f"home {number}: {head.name} isn't valid: {report.violations}")
        return head.name, head.manifest.digest

    def _judge_launches(self, launches: Mapping[int, Launch]) -> None:
        jobs = [job for job in self._jobs if job.launch]
        for job in jobs:
            if launches.get(job.launch) is None:
                self._violate(f"launch {job.launch} of {job.name} is at no home", fork=True)
            elif launches[job.launch].nonce != job.nonce:
                self._violate(f"launch {job.launch} of {job.name} is another one", fork=True)
        numbers = [job.launch for job in jobs]
        if len(set(numbers)) < len(numbers):
            self._violate(f"two jobs have the same launch: {numbers}", fork=True)

    def _judge_order(self) -> None:
        """Check that no save was begun after a newer launch had begun, and then acknowledged."""
        for job in self._jobs:
            for name, before_s in zip(job.saves, job.before_s, strict=True):
                newer = [
                    other.launch
                    for other in self._jobs
                    if other.launch > job.launch and other.launched_s < before_s
                ]
                if newer:
                    self._violate(f"{name} was acknowledged after launch {newer[0]}", fork=True)

    def _judge_saves(self, launches: Mapping[int, Launch], digests: Mapping[str, set[str]]) -> None:
        cuts = {number: cuts_of(launches, number) for number in launches}
        newest = max(launches, default=0)
        by_launch = {job.launch: job for job in self._jobs if job.launch}
        lost_by: dict[int, list[str]] = collections.defaultdict(list)
        for job in self._jobs:
            self.result.saves += len(job.saves)
            for name in job.saves:
                if name not in digests:
                    self._violate(f"{name} was acknowledged, and is at no home", fork=True)
            lost = [name for name in job.saves if not is_on(name, cuts.get(newest, {}))]
            self.result.lost += len(lost)
            if lost and lost != job.saves[-1:]:
                self._violate(
                    f"{lost} were acknowledged and are lost, {job.saves[-1]} is the last one",
                    fork=True,
                )
            for name in lost:
                newer = (one for one in sorted(launches) if one > job.launch)
                lost_by[next((one for one in newer if not is_on(name, cuts[one])), 0)].append(name)
        for taker, names in lost_by.items():
            self._say(f"launch {taker} has lost {names}")
            other = by_launch.get(taker)
            if len(names) > 1:
                self._violate(f"launch {taker} has lost {len(names)} saves: {names}", fork=True)
            if other is not None and other.away == 0:
                self._violate(f"launch {taker} has lost {names}, and no home was away", fork=True)


def cuts_of(launches: Mapping[int, Launch], newest: int) -> dict[int, float]:
    """Return the launches on the lineage of a launch, each with the last step on the lineage."""
    cuts: dict[int, float] = {newest: float("inf")}
    number = newest
    while number in launches:
        reference = launches[number].resume_from
        place = None if reference is None else parse_checkpoint_name(reference.name)
        if place is None or place[1] in cuts:
            break
        cuts[place[1]] = place[0]
        number = place[1]
    return cuts


def is_on(name: str, cuts: Mapping[int, float]) -> bool:
    """Return whether a checkpoint is on a lineage.

    >>> is_on("step-00000004-l0002", {2: 4}), is_on("step-00000006-l0002", {2: 4})
    (True, False)
    """
    place = parse_checkpoint_name(name)
    return place is not None and place[0] <= cuts.get(place[1], -1)


# --- the stage ------------------------------------------------------------------------------------


class Stage:
    """Three servers and the network, for any number of rounds, one after the other."""

    def __init__(self) -> None:
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(
            ["tests.campaign.regions", "ckptfmt.saving.home_copies"]
        )
        self.directory = tempfile.mkdtemp(prefix="regions-", dir=FAST_DIRECTORY)
        self.network = Network()
        self._servers = [Server("moto") for _ in range(COUNT)]
        self.endpoints = [server.endpoint.url for server in self._servers]
        self.buckets = [server.endpoint.make_bucket() for server in self._servers]

    def next_round(self) -> None:
        """Take new buckets: a listing reads the names of a whole bucket."""
        self.buckets = [server.endpoint.make_bucket() for server in self._servers]

    def close(self) -> None:
        """End the servers; what rounds with violations left stays."""
        self.network.end()
        for server in self._servers:
            server.close()
        with contextlib.suppress(OSError):
            os.rmdir(self.directory)  # noqa: PTH106

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def play(
    seeds: Iterable[int],
    *,
    broken: str | None = None,
    say: Callable[[str], None] = lambda _: None,
    told: Callable[[int, Result], object] = lambda *_: None,
) -> Result:
    """Play rounds of these seeds in this process; return the sum.

    Args:
        told: called with seed and result of each round.
    """
    whole = Result()
    with Stage() as stage:
        for seed in seeds:
            stage.next_round()
            result = Round(stage, seed, broken=broken, say=say).run()
            told(seed, result)
            whole.add(result)
    return whole


def _play_in_process(seeds: Any, results: Any, broken: str | None, end_s: float) -> None:
    def take() -> Iterable[int]:
        with contextlib.suppress(queue.Empty):
            while time.monotonic() < end_s:
                yield seeds.get(timeout=1.0)

    try:
        play(take(), broken=broken, told=lambda seed, result: results.put((seed, result)))
    finally:
        results.put(None)


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaign.regions", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1, help="seed of the first round")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no round after so long")
    parser.add_argument("--break", dest="broken", choices=RULES, help="take a rule away")
    parser.add_argument("--first", action="store_true", help="end at the first violation")
    parser.add_argument("--verbose", action="store_true", help="tell each event; one process")
    options = parser.parse_args()
    begin_s = time.monotonic()
    whole = Result()

    def tell(seed: int, result: Result) -> None:
        for violation in result.violations:
            print(f"seed {seed}: {violation}", flush=True)

    seeds = range(options.seed, options.seed + options.rounds)
    if options.verbose:
        whole = play(seeds, broken=options.broken, say=lambda line: print(line, flush=True))
    else:
        context = multiprocessing.get_context("spawn")
        todo, results = context.Queue(), context.Queue()
        for seed in seeds:
            todo.put(seed)
        workers = [
            context.Process(
                target=_play_in_process,
                args=(todo, results, options.broken, begin_s + options.seconds),
            )
            for _ in range(min(options.processes, options.rounds))
        ]
        for worker in workers:
            worker.start()
        left = len(workers)
        while left:
            found = results.get()
            if found is None:
                left -= 1
                continue
            tell(*found)
            whole.add(found[1])
            if whole.rounds % 10 == 0:
                print(f"so far: {whole.summary}, {time.monotonic() - begin_s:.0f} s", flush=True)
            if options.first and (whole.forks if options.broken else whole.violations):
                with contextlib.suppress(queue.Empty):
                    while True:
                        todo.get(timeout=0.2)
        for worker in workers:
            worker.join()
    print(f"{whole.summary}, {time.monotonic() - begin_s:.0f} s")
    return 1 if whole.violations else 0


if __name__ == "__main__":
    from tests.campaign import regions

    # Jobs and workers needn't run this file again: what they run is in the imported module.
    del __file__
    __spec__ = None  # type: ignore[assignment]
    sys.exit(regions.main())
