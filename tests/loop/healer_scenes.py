"""Lives of runs with a healer: seeded causes of failures, played by real processes.

`make_case` draws a case, `play` starts processes until the run ends, stops or loops, and `expected`
says what the cause demands. A start is a fork of a process that has imported torch, so that a life
of several starts takes about a second.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime as dt
import errno
import json
import math
import os
import random
import re
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, get_args
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

import ckptfmt
from ckptfmt.documents.run import Launch
from ckptfmt.errors import CkptError, Code
from ckptfmt.loop import healer as healer_module
from ckptfmt.run.failures import LaunchFailure, Means, Plan, read_decisions
from ckptfmt.run.lineage import list_checkpoints, list_launches, read_known_run
from ckptfmt.store import open_store
from ckptfmt.store.local import LocalStore
from tests.forks import fork, settle

CauseName = Literal[
    "NaN data",
    "poisoned checkpoint",
    "flipped bit",
    "deterministic bug",
    "out of memory",
    "killed",
    "flaky storage",
]
HealerName = Literal["healer", "without witness", "always retries", "always skips"]
Moment = Literal["fetch", "begin", "middle", "end", "save"]

#: The causes; a seed's cause is the one at the seed's remainder.
CAUSES: Final[tuple[CauseName, ...]] = get_args(CauseName)
#: The healers that a case has to convict.
CONTROLS: Final[tuple[HealerName, ...]] = ("without witness", "always retries", "always skips")
#: Most starts of a life; a life with more is a loop.
STARTS: Final = 12
#: Most launches that the requirement allows at one step.
STARTS_AT_ONE: Final = 3
#: Longest time of a start in seconds. A start takes less than a second on an idle machine.
_START_S: Final = 120.0
#: Longest wait of a process for another process, in seconds.
_WAIT_S: Final = 60.0
#: Longest time until the processes of a start have met, in seconds, and the number of tries.
_MEET_S: Final = 20.0
_MEETINGS: Final = 4
#: The reports of a start whose processes haven't met.
_NOT_MET: Final = [{"end": "not met"}]
#: Time from SIGTERM to SIGKILL in seconds.
_TERM_S: Final = 5.0
_SAMPLES: Final = 400
_WIDTH: Final = 8
_QUARANTINE: Final = 100
#: The exit code of a start that didn't end the run.
_UNFINISHED: Final = 1
_BUGS: Final[tuple[tuple[type[Exception], str], ...]] = (
    (ValueError, "a bug"),
    (KeyError, "layers.7.bias"),
    (IndexError, "index 50257 is out of range"),
    (RuntimeError, "The size of tensor a (16) must match the size of tensor b (8)"),
    (ZeroDivisionError, "division by zero"),
    (AssertionError, ""),
)
_STORAGE_ERRORS: Final = (errno.EIO, errno.ENOSPC, errno.ESTALE, errno.ETIMEDOUT)
_READ_ERRORS: Final[tuple[tuple[type[OSError], str], ...]] = (
    (OSError, "Input/output error"),
    (ConnectionResetError, "Connection reset by peer"),
    (TimeoutError, "timed out"),
    (FileNotFoundError, "shard-00017.bin"),
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A run with one trouble.

    Attributes:
        seed: the seed of the case.
        cause: the cause of the failures.
        variant: the form of the cause.
        world: number of processes.
        steps: number of steps of the run.
        every: number of steps between two saves.
        step: number of the step with the trouble; for a poisoned checkpoint, of the save.
        batch: number of samples of a step, over all processes.
        slot: place of a bad sample in the batch.
        rank: the process with the trouble; None for all processes.
        moment: the part of the step in which the trouble comes.
        launches: number of launches with the trouble, from the first one; None for all launches.
        error: number of the error among the errors of the cause.
        action: the action of `Triggers`.
        observes: whether the training passes its loss to `Checkpointer.observe`.
        is_ddp: whether two processes average by DDP, otherwise by all-reduces of the training.
        optimizer: "adamw" or "sgd".
        quarantine: see `ckptfmt.Healer`.
        grace_s: time from the end of one process to the SIGTERM of the other one, in seconds.
    """

    seed: int
    cause: CauseName
    variant: str
    world: int
    steps: int
    every: int
    step: int
    batch: int
    slot: int
    rank: int | None
    moment: Moment
    launches: int | None
    error: int
    action: Literal["back", "rewind", "save"]
    observes: bool
    is_ddp: bool
    optimizer: str
    quarantine: int
    grace_s: float

    @property
    def bad_positions(self) -> tuple[int, int]:
        """Begin and end of the positions of the step with the trouble."""
        return (self.step - 1) * self.batch, self.step * self.batch

    def describe(self) -> str:
        """Return the case in a line."""
        processes = "2 processes" if self.world == 2 else "1 process"
        return (
            f"seed {self.seed}: {self.cause} ({self.variant}), step {self.step} of {self.steps},"
            f" {self.moment}, every {self.every}, {processes}, rank {self.rank}, {self.action}"
        )


def make_case(seed: int) -> Case:
    """Return the case of a seed; seven successive seeds have all causes."""
    chance = random.Random(f"healer {seed}")
    cause = CAUSES[seed % len(CAUSES)]
    world = 2 if cause == "flipped bit" else chance.choice((1, 1, 2))
    steps = chance.randint(30, 40)
    every = chance.randint(5, 12)
    rank = chance.choice((None, *range(world)))
    action: Any = chance.choice(("back", "rewind", "save"))
    moment: Moment = chance.choice(("begin", "middle", "end"))
    step = chance.randint(1, steps)
    launches: int | None = None
    optimizer = chance.choice(("adamw", "sgd"))
    observes = chance.random() < 0.5
    quarantine = _QUARANTINE
    choices = {
        "NaN data": ("alarm", "alarm", "alarm", "raised"),
        "poisoned checkpoint": ("weights", "moments"),
        "flipped bit": ("weight", "bias"),
        "deterministic bug": ("bug",),
        "out of memory": ("killer", "batch"),
        "killed": ("trainer", "trainer", "save"),
        "flaky storage": ("save", "read"),
    }
    variant = chance.choice(choices[cause])
    times = chance.choice((1, 1, 2))
    if cause == "out of memory":
        variant = ("killer", "batch")[seed // len(CAUSES) % 2]
    if cause == "poisoned checkpoint":
        step = every * chance.randint(2, (steps - 3) // every)
        moment, launches = "end", 1
        quarantine = chance.choice((0, _QUARANTINE))
        rank = None
        optimizer = "adamw" if variant == "moments" else optimizer
    elif cause == "flipped bit":
        step = chance.randint(1, steps - 1)
        rank, launches, observes = chance.randrange(world), 1, True
        moment = "begin"
    elif cause == "flaky storage" or variant in ("killer", "trainer", "save"):
        launches = 1 if variant == "killer" else times
    if variant == "save":
        moment = "save"
        step = every * chance.randint(1, steps // every)
    elif variant == "read":
        moment = "fetch"
    batch = chance.choice((4, 8))
    return Case(
        seed=seed,
        cause=cause,
        variant=variant,
        world=world,
        steps=steps,
        every=every,
        step=step,
        batch=batch,
        slot=chance.randrange(batch),
        rank=rank,
        moment=moment,
        launches=launches,
        error=chance.randrange(1000),
        action=action,
        observes=observes,
        is_ddp=world == 2 and chance.random() < 0.5,
        optimizer=optimizer,
        quarantine=quarantine,
        grace_s=chance.choice((0.0, 1.0)),
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The life of a run.

    Attributes:
        processes: number of starts of processes; two processes of one job count once.
        launches: number of launches, with those of rewinds.
        starts: greatest number of launches that began at one checkpoint; a first launch that saved
            isn't counted.
        failures: greatest number of failed launches at one step.
        choices: the choice of each decision.
        cause: the cause in the outcome of the last decision; None without an outcome.
        outcome: the text of the outcome; empty without one.
        writers: the numbers of the processes that the outcome names.
        ended: whether the run did all steps.
        stopped: whether the healer stopped the run.
        is_loop: whether the run neither ended nor stopped within `STARTS` starts.
        is_late: whether a start didn't end in time.
        skips: begin and end of the positions left out, in the last state.
        is_same: whether the last state has the bits of the undisturbed run with these skips.
        texts: the sentence of each decision.
        error: the end of the last start in words.
        seconds: the time of the life.
    """

    processes: int
    launches: int
    starts: int
    failures: int
    choices: tuple[str, ...]
    cause: str | None
    outcome: str
    writers: tuple[int, ...]
    ended: bool
    stopped: bool
    is_loop: bool
    is_late: bool
    skips: tuple[tuple[int, int], ...]
    is_same: bool
    texts: tuple[str, ...]
    error: str
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a cause demands of a healer.

    Attributes:
        choices: the accepted sequences of choices.
        ends: whether the run ends with all steps; otherwise the healer has to stop the run.
        skips: the positions that have to be left out at the end.
        causes: the accepted causes in the last outcome; none if the outcome may be absent.
        writer: the process that the outcome has to name; None for none.
    """

    choices: tuple[tuple[str, ...], ...]
    ends: bool = True
    skips: tuple[tuple[int, int], ...] = ()
    causes: tuple[str, ...] = ()
    writer: int | None = None

    def complaints(self, result: Result) -> list[str]:
        """Return in which way a life isn't as demanded; nothing if the healer decided well."""
        found = []
        if result.choices not in self.choices:
            found.append(f"choices {result.choices}")
        if result.ended is not self.ends or result.stopped is self.ends:
            found.append(f"ended {result.ended}, stopped {result.stopped}: {result.error}")
        if self.ends and result.ended:
            if result.skips != self.skips:
                found.append(f"left out {result.skips} in place of {self.skips}")
            if not result.is_same:
                found.append("other bits than the undisturbed run")
        if self.causes and result.cause not in self.causes:
            found.append(f"outcome {result.cause}: {result.outcome}")
        if self.writer is not None and result.writers != (self.writer,):
            found.append(f"processes {result.writers} named: {result.outcome}")
        return found + complaints_of_all(result)

    def __call__(self, result: Result) -> bool:
        """Return whether a life is as demanded."""
        return not self.complaints(result)


def complaints_of_all(result: Result) -> list[str]:
    """Return the complaints that hold for each cause: loops, starts, and texts."""
    found = []
    if result.is_loop or result.is_late:
        found.append("a loop" if result.is_loop else "a start didn't end")
    if max(result.starts, result.failures) > STARTS_AT_ONE:
        found.append(f"{result.starts} starts, {result.failures} failures at one step")
    if not all(text.strip() and text.isprintable() for text in result.texts):
        found.append("a decision without a line of text")
    return found


def expected(case: Case) -> Demand:
    """Return what the cause of a case demands."""
    if case.cause == "NaN data" or case.variant == "batch":
        return Demand(choices=(("retry", "skip"),), skips=(case.bad_positions,), causes=("data",))
    if case.cause == "poisoned checkpoint":
        skip = () if case.quarantine == 0 else ("skip",)
        # The launch from the older checkpoint also sees the damage: other weights after the save.
        causes = ("state", "hardware")
        return Demand(choices=(("retry", *skip, "back"), ("retry", "back")), causes=causes)
    if case.cause == "flipped bit":
        return Demand(choices=(("retry",),), causes=("hardware",), writer=case.rank)
    if case.cause == "deterministic bug":
        return Demand(choices=(("retry", "skip", "stop"),), ends=False)
    return Demand(choices=(("retry",) * (case.launches or 1),))


# --- one process ----------------------------------------------------------------------------------


class _Training:
    """The program of a case on one process, without its trouble."""

    def __init__(self, case: Case, rank: int) -> None:
        random.seed(case.seed)
        np.random.seed(case.seed)  # noqa: NPY002 - the stream of a program that seeds all
        torch.manual_seed(case.seed)
        net: Any = torch.nn.Sequential(
            torch.nn.Linear(_WIDTH, 16),
            torch.nn.Tanh(),
            torch.nn.Dropout(0.1),
            torch.nn.Linear(16, 1),
        )
        self.last = net[3]
        self.parameters = list(net.parameters())
        self.averages = case.world > 1 and not case.is_ddp
        if case.is_ddp:
            net = torch.nn.parallel.DistributedDataParallel(net)
        self.net = net
        self.optimizer = (
            torch.optim.AdamW(net.parameters(), lr=0.01)
            if case.optimizer == "adamw"
            else torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
        )
        torch.manual_seed(2 * case.seed + rank)
        self.sampler = ckptfmt.Sampler(_SAMPLES, global_batch=case.batch, seed=case.seed)
        self.inputs = torch.randn(
            _SAMPLES, _WIDTH + 1, generator=torch.Generator().manual_seed(case.seed)
        )
        self.inputs[:, _WIDTH] = torch.arange(float(_SAMPLES))
        self.state = ckptfmt.State(
            weights=net, optimizer=self.optimizer, data=self.sampler, config={}
        )

    def batches(self) -> Iterator[torch.Tensor]:
        dataset: Any = self.inputs
        return iter(torch.utils.data.DataLoader(dataset, batch_sampler=self.sampler))

    def lose(self, batch: torch.Tensor) -> torch.Tensor:
        inputs = batch[:, :_WIDTH]
        loss: torch.Tensor = (self.net(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        return loss

    def descend(self, loss: torch.Tensor) -> None:
        loss.backward()
        for parameter in self.parameters if self.averages else ():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()

    def bits(self) -> str:
        """Return the raw bytes of weights, moments and random streams as digits."""
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        tensors = [*self.parameters, *(one for one in moments if isinstance(one, torch.Tensor))]
        raw = [tensor.detach().numpy().tobytes() for tensor in tensors]
        return b"".join([*raw, torch.get_rng_state().numpy().tobytes()]).hex()

    def skips(self) -> list[list[int]]:
        return sorted(list(skip["range"]) for skip in self.sampler.state_dict()["skips"])


class _Trouble:
    """The trouble of a case on one process."""

    def __init__(self, case: Case, training: _Training, rank: int) -> None:
        self._case = case
        self._training = training
        self._is_here = case.rank in (None, rank)
        order = ckptfmt.Sampler(
            _SAMPLES, global_batch=case.batch, seed=case.seed, worker=(0, 1)
        ).indices(case.step - 1)
        self._bad = int(order[case.slot])
        self._is_storage_broken = False
        if case.cause == "NaN data":
            training.inputs[self._bad, case.error % _WIDTH] = math.nan

    def is_due(self, step: int, launch: int) -> bool:
        """Return whether the trouble comes at a step of a launch on this process."""
        launches = self._case.launches
        in_launch = launches is None or launch <= launches
        return self._is_here and in_launch and step == self._case.step

    def meet(
        self, moment: Moment, step: int, launch: int, batch: torch.Tensor | None = None
    ) -> None:
        """Do damage, raise, or kill this process, if the time for trouble has come."""
        case = self._case
        self._is_storage_broken = False
        if case.variant == "batch":
            if moment == case.moment and batch is not None and self._bad in batch[:, _WIDTH]:
                raise (torch.OutOfMemoryError if case.error % 2 else MemoryError)(
                    f"CUDA out of memory. Tried to allocate {time.time_ns() % 999}.00 MiB"
                )
            return
        if not self.is_due(step, launch):
            return
        if case.moment == "save":
            self._is_storage_broken = moment == "end"
        elif moment == case.moment:
            self._strike()

    def _strike(self) -> None:
        case = self._case
        if case.cause == "poisoned checkpoint":
            self._poison()
        elif case.cause == "flipped bit":
            tensor = getattr(self._training.last, case.variant)
            flat = tensor.data.view(torch.int32).view(-1)
            flat[case.error % flat.numel()] ^= 1 << 30
        elif case.cause == "deterministic bug":
            kind, text = _BUGS[case.error % len(_BUGS)]
            raise kind(f"{text} in {time.time_ns()}" if case.error % 5 == 0 else text)
        elif case.cause == "flaky storage":
            read_kind, text = _READ_ERRORS[case.error % len(_READ_ERRORS)]
            raise read_kind(errno.EIO, text)
        elif case.cause in ("killed", "out of memory"):
            os.kill(os.getpid(), signal.SIGKILL)

    def _poison(self) -> None:
        training = self._training
        with torch.no_grad():
            if self._case.variant == "weights":
                training.last.weight.mul_(1e30)
                return
            for state in training.optimizer.state.values():
                state["exp_avg"].fill_(math.inf)

    def break_storage(self) -> None:
        """Let the files of saves fail, or kill this process within a save, once armed."""
        write: Callable[..., str] = LocalStore._write_temporary
        case = self._case

        def fail(store: LocalStore, directory: int, chunks: Any) -> str:
            if not self._is_storage_broken:
                return write(store, directory, chunks)
            if case.cause == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            number = _STORAGE_ERRORS[case.error % len(_STORAGE_ERRORS)]
            raise OSError(number, os.strerror(number))

        mock.patch.object(LocalStore, "_write_temporary", fail).start()


def _train(case: Case, run: Path, *, rank: int, skips: Sequence[tuple[int, int]] | None) -> Any:
    """Train one process of a start.

    Args:
        case: the case.
        run: the directory of the run.
        rank: number of the process.
        skips: the positions that an undisturbed run leaves out; None for a start with the trouble
            and a healer.
    """
    training = _Training(case, rank)
    triggers = None
    healer = None
    trouble = None
    if skips is None:
        trouble = _Trouble(case, training, rank)
        trouble.break_storage()
        triggers = ckptfmt.Triggers(case.action)
        healer = ckptfmt.Healer(quarantine=case.quarantine)
    for positions in skips or ():
        training.sampler.skip(positions=positions, policy="shift", reason="told")
    with ckptfmt.Checkpointer(
        run,
        training.state,
        every=case.every,
        saving=ckptfmt.Saving(saver="inline", failed_saves=0),
        stop=ckptfmt.Stop(triggers=triggers, healer=healer),
        job=ckptfmt.Job(deadline_s=_WAIT_S),
    ) as checkpointer:
        batches = training.batches()
        for done in checkpointer.steps(case.steps):
            assert checkpointer.launch is not None
            step, launch = done + 1, checkpointer.launch.launch
            if launch > STARTS:
                return {"end": "loop"}

            def meet(
                moment: Moment,
                batch: torch.Tensor | None = None,
                *,
                step: int = step,
                launch: int = launch,
            ) -> None:
                if trouble is not None:
                    trouble.meet(moment, step, launch, batch)

            meet("fetch")
            batch = next(batches)
            meet("begin", batch)
            loss = training.lose(batch)
            meet("middle", batch)
            if case.variant == "raised" and not math.isfinite(loss.item()):
                raise FloatingPointError(f"loss is {loss.item()} at step {step}")
            training.descend(loss)
            if case.observes:
                checkpointer.observe(loss=loss)
            if triggers is not None:
                triggers.feed(loss=loss)
            training.optimizer.step()
            training.optimizer.zero_grad()
            meet("end", batch)
    ended = checkpointer.step == case.steps and checkpointer.alarm is None
    text = f"step {checkpointer.step}, alarm {checkpointer.alarm}"
    return {
        "end": "done" if ended else "unfinished",
        "text": text,
        "bits": training.bits(),
        "skips": training.skips(),
    }


def _always_retry(failures: Sequence[LaunchFailure], means: Means) -> Plan:
    return Plan(choice="retry", why=f"always, {len(failures)} failures, {means.head}")


def _always_skip(failures: Sequence[LaunchFailure], means: Means) -> Plan:
    step = failures[-1].step
    return Plan(choice="skip", skip=(step, step), why=f"always, {means.head}")


def _compare_nothing(*_: Any) -> None:
    return None


#: The function of the healer's module that each control replaces.
_REPLACED: Final[dict[HealerName, tuple[str, Callable[..., Any]]]] = {
    "without witness": ("_compare", _compare_nothing),
    "always retries": ("decide", _always_retry),
    "always skips": ("decide", _always_skip),
}


def _patch(healer: HealerName) -> None:
    """Replace a part of the healer in this process. Raises: AttributeError for an unknown part."""
    if healer in _REPLACED:
        name, function = _REPLACED[healer]
        mock.patch.object(healer_module, name, function).start()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Start:
    """A start of a job.

    Attributes:
        case: the case.
        run: the directory of the run.
        place: the directory for the reports of the processes.
        healer: the healer.
        skips: see `_train`.
    """

    case: Case
    run: Path
    place: Path
    healer: HealerName
    skips: tuple[tuple[int, int], ...] | None = None

    def be(self, rank: int) -> None:
        """Be one process of the start, and end."""
        code = _UNFINISHED
        try:
            code = self._be(rank)
        except BaseException:  # noqa: BLE001
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _be(self, rank: int) -> int:
        signal.alarm(int(_START_S))
        fd = os.open(self.place / f"log-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        torch.set_num_threads(1)
        _patch(self.healer)
        if self.case.world > 1:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{self.place / 'meeting'}",
                rank=rank,
                world_size=self.case.world,
                timeout=dt.timedelta(seconds=_WAIT_S),
            )
        (self.place / f"met-{rank}").touch()
        try:
            report = _train(self.case, self.run, rank=rank, skips=self.skips)
        except CkptError as error:
            traceback.print_exc()
            end = "stopped" if error.code == Code.HEALING_STOPPED else "error"
            report = {"end": end, "text": str(error)}
        except Exception as error:  # noqa: BLE001
            traceback.print_exc()
            report = {"end": "error", "text": f"{type(error).__name__}: {error}"}
        path = self.place / f"report-{rank}"
        path.with_suffix(".part").write_text(json.dumps(report), "utf-8")
        path.with_suffix(".part").rename(path)
        is_well = report["end"] in ("done", "stopped", "loop")
        until_s = time.monotonic() + _TERM_S
        paths = [self.place / f"report-{number}" for number in range(self.case.world)]
        # A process that leaves first would break the last messages of the other process.
        while is_well and time.monotonic() < until_s and not all(one.exists() for one in paths):
            time.sleep(0.002)
        return 0 if is_well else _UNFINISHED


# --- a life ---------------------------------------------------------------------------------------


def _run_start(start: _Start) -> list[dict[str, Any]] | None:
    """Start a job, again and again until the processes have met; see `_try_start`.

    On a busy machine, gloo's processes may not reach each other.
    """
    for number in range(_MEETINGS):
        told = _try_start(start, is_last=number == _MEETINGS - 1)
        if told != _NOT_MET:
            return told
        shutil.rmtree(start.place)
    raise AssertionError  # the last try has another result


def _fork(start: _Start, rank: int) -> int:
    """Start a process of a start, and return the id."""
    pid = os.fork()
    if pid == 0:
        start.be(rank)
    return pid


def _have_met(start: _Start) -> bool:
    """Return whether all processes of a start have reached each other."""
    return all((start.place / f"met-{rank}").exists() for rank in range(start.case.world))


def _try_start(start: _Start, *, is_last: bool) -> list[dict[str, Any]] | None:
    """Start the processes of a job, and wait for all; None if the job didn't end in time.

    As torchrun does, the end of one process with an error ends the other one.

    Args:
        is_last: whether to wait for a meeting of the processes as for the job.

    Returns: the report of each process that wrote a report; `_NOT_MET` if the processes haven't met
        in time.
    """
    case = start.case
    start.place.mkdir(parents=True)
    sys.stdout.flush()
    sys.stderr.flush()
    living = {_fork(start, rank) for rank in range(case.world)}
    end_s = time.monotonic() + _START_S
    due: dict[int, float] = {signal.SIGKILL: end_s}
    meet_s = end_s if is_last else time.monotonic() + _MEET_S
    while living:
        if time.monotonic() >= meet_s and not _have_met(start):
            due = {signal.SIGKILL: 0.0}
        for pid in list(living):
            found, status = os.waitpid(pid, os.WNOHANG)
            if not found:
                continue
            living.discard(pid)
            if status != 0 and signal.SIGTERM not in due:
                term_s = time.monotonic() + case.grace_s
                due = {signal.SIGTERM: term_s, signal.SIGKILL: min(end_s, term_s + _TERM_S)}
        now_s = time.monotonic()
        for number, at_s in due.items():
            if now_s >= at_s:
                for pid in living:
                    os.kill(pid, number)
        time.sleep(0.002)
    if not is_last and not _have_met(start):
        return _NOT_MET
    if time.monotonic() >= end_s:
        return None
    paths = sorted(start.place.glob("report-[0-9]"))
    return [json.loads(path.read_text("utf-8")) for path in paths]


def play(case: Case, directory: Path, *, healer: HealerName = "healer") -> Result:
    """Play the whole life of a run, in a process that has imported torch and has one thread.

    Args:
        case: the case.
        directory: an absent directory for the run and the logs of the processes.
        healer: the healer, or a control.
    """
    if healer in _REPLACED and not hasattr(healer_module, _REPLACED[healer][0]):
        raise AttributeError(_REPLACED[healer][0])  # otherwise each start would fail
    begin_s = time.monotonic()
    run = directory / "run"
    end, text = "error", ""
    reports: list[dict[str, Any]] = []
    is_late = False
    processes = 0
    while end in ("error", "unfinished") and processes < STARTS and not is_late:
        processes += 1
        place = directory / f"start-{processes:02}"
        told = _run_start(_Start(case=case, run=run, place=place, healer=healer))
        is_late = told is None
        reports = told or []
        ends = {report["end"] for report in reports}
        is_whole = len(reports) == case.world
        done = "done" if is_whole and ends == {"done"} else "error"
        end = next((one for one in ("stopped", "loop") if one in ends), done)
        text = next((one.get("text", "") for one in reports), "killed")
    if not run.is_dir():
        raise RuntimeError(f"{case.describe()}: {processes} starts made no run: {text}")
    skips: tuple[tuple[int, int], ...] = ()
    is_same = False
    if end == "done":
        skips = tuple((begin, after) for begin, after in reports[0]["skips"])
        is_same = _has_bits_of_undisturbed(case, directory, reports)
    return Result(
        processes=processes,
        ended=end == "done",
        stopped=end == "stopped",
        is_loop=end in ("loop", "error") and not is_late,
        is_late=is_late,
        skips=skips,
        is_same=is_same,
        error=text,
        seconds=time.monotonic() - begin_s,
        **_survey(run),
    )


def _has_bits_of_undisturbed(
    case: Case, directory: Path, reports: Sequence[Mapping[str, Any]]
) -> bool:
    """Return whether all processes have the bits of a run without trouble, with the same skips."""
    right = _run_start(
        _Start(
            case=case,
            run=directory / "undisturbed",
            place=directory / "start-undisturbed",
            healer="healer",
            skips=tuple((begin, after) for begin, after in reports[0]["skips"]),
        )
    )
    if right is None or [one["end"] for one in right] != ["done"] * case.world:
        raise RuntimeError(f"{case.describe()}: the undisturbed run failed: {right}")
    keys = ("bits", "skips")
    return all(
        mine[key] == theirs[key]
        for mine, theirs in zip(reports, right, strict=True)
        for key in keys
    )


def _survey(run: Path) -> dict[str, Any]:
    """Return the members of a result that stand in the records of a run."""
    store = open_store(run, writable=False)
    known = read_known_run(store)
    launches = [one for one in list_launches(store, known) if isinstance(one, Launch)]
    savers = {entry.launch for entry in list_checkpoints(store, known, with_labels=False)}
    begun = collections.Counter(
        None if one.resume_from is None else one.resume_from.name
        for one in launches
        if one.launch > 1 or one.launch not in savers
    )
    decisions = [one for _, one in sorted(read_decisions(store).items())]
    failed = collections.Counter(one.step for one in decisions)
    outcome = decisions[-1].outcome if decisions else None
    text = "" if outcome is None else outcome.text
    named = re.search(r"\bon process(?:es)? ([0-9]+(?:, [0-9]+)*)", text)
    return {
        "launches": len(launches),
        "starts": max(begun.values(), default=0),
        "failures": max(failed.values(), default=0),
        "choices": tuple(one.choice for one in decisions),
        "cause": None if outcome is None else outcome.cause,
        "outcome": text,
        "writers": () if named is None else tuple(int(one) for one in named[1].split(",")),
        "texts": tuple(one.text for one in decisions),
    }


# --- many lives -----------------------------------------------------------------------------------


def play_all(
    jobs: Sequence[tuple[Case, HealerName]],
    directory: Path,
    *,
    players: int = 1,
    say: Callable[[int], object] | None = None,
) -> list[Result]:
    """Play many lives, in forks of a process that has imported torch; return the result of each.

    Args:
        jobs: case and healer of each life.
        directory: a directory, in which failed lives leave their runs and logs.
        players: number of lives played at the same time.
        say: function to call with the number of lives that have ended.

    Raises: RuntimeError if a player ends early, or plays one life for too long.
    """
    directory.mkdir(parents=True, exist_ok=True)
    processes = []
    for number in range(players):
        share = [(at, *jobs[at]) for at in range(number, len(jobs), players)]
        told = dict(os.environ), str(directory), number, share
        processes.append(fork(_be_player, *told))
    try:
        return _collect(directory, len(jobs), processes, say)
    finally:
        for process in processes:
            process.join(_TERM_S)
            process.kill()
            process.join()


def _collect(
    directory: Path, count: int, processes: Sequence[Any], say: Callable[[int], object] | None
) -> list[Result]:
    """Wait for all results, and return them in the order of the lives."""
    results: dict[int, Result] = {}
    until_s = time.monotonic() + STARTS * _START_S
    while len(results) < count:
        is_over = not any(process.is_alive() for process in processes)
        before = len(results)
        for path in directory.glob("results-*.jsonl"):
            for line in path.read_text("utf-8").splitlines(keepends=True):
                if line.endswith("\n"):
                    at, told = json.loads(line)
                    results[at] = _parse_result(told)
        if len(results) > before:
            until_s = time.monotonic() + STARTS * _START_S
        if say is not None:
            say(len(results))
        if (is_over or time.monotonic() > until_s) and len(results) < count:
            errors = "".join(path.read_text("utf-8") for path in directory.glob("player-*.log"))
            raise RuntimeError(f"{count - len(results)} lives weren't played: {errors[-4000:]}")
        time.sleep(0.05)
    return [results[at] for at in range(count)]


def _parse_result(told: dict[str, Any]) -> Result:
    lists = {name: tuple(told[name]) for name in ("choices", "writers", "texts")}
    skips = tuple((begin, end) for begin, end in told["skips"])
    return Result(**{**told, **lists, "skips": skips})


def _be_player(
    variables: dict[str, str],
    directory: str,
    number: int,
    jobs: Sequence[tuple[int, Case, HealerName]],
) -> None:
    """Play lives one after the other, in a fork."""
    place = Path(directory)
    settle(variables, str(place / f"player-{number}.log"))
    with (place / f"results-{number}.jsonl").open("a", encoding="utf-8") as file:
        for at, case, healer in jobs:
            life = place / f"life-{at:04}"
            result = play(case, life, healer=healer)
            if expected(case)(result) or healer != "healer":
                shutil.rmtree(life)
            file.write(json.dumps([at, dataclasses.asdict(result)]) + "\n")
            file.flush()
