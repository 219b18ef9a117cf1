"""Kills trainings of a small GPT anywhere, and compares each step of each launch with those of an undisturbed run.

A process of its own, with one thread, so that it may fork: a launch costs no import of torch.

    python -m tests.crash.witnessed --kills 100 --seed 1 --writers 2

The witness of each launch is held to the truth: the bits of losses, and of the last checkpoint, say
whether the killed run is the same run. With ``--faulty`` the training warms up its learning rate
after each start, outside of its State.
"""

from __future__ import annotations

import argparse
import collections
import ctypes
import dataclasses
import json
import logging
import math
import mmap
import os
import pathlib
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any, ClassVar, Final

import jsonschema  # noqa: F401
import ml_dtypes  # noqa: F401
import numpy as np
import torch
import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.fsdp
from torch import nn

import ckptfmt
import ckptfmt.adapters.torch
from ckptfmt.checkpointer import Checkpointer
from ckptfmt.loop.step_log import read_verdicts
from ckptfmt.loop.witnessing import Witness
from ckptfmt.store import open_store
from tests.store.helpers import FAST_DIRECTORY

#: The phases of a training; the place of each is what a process writes into the memory that it
#: shares.
PHASES: Final = ("start", "open", "step", "witness", "save")
#: The number of kills of one run, before the run comes to its end and is compared.
_KILLS_PER_RUN: Final = 20
#: The number of steps of the last launch of a run.
_LAST_STEPS: Final = 15
_PATIENCE_S: Final = 120.0
#: The number of steps at most that a launch takes before the phase in which it is killed is waited
#: for.
_LIFE_STEPS: Final = 25
#: The begins of warnings that are none of a fault: a new optimizer has another learning rate than
#: the schedule set by hand; a saver in a process of its own outlives its training, and a part of a
#: save may be lost with another process.
_EXPECTED: Final = (
    "changed by the load: lr:",
    "waiting at most",
    "passed over: the saves of launch",
)
_BLOCK: Final = 16
_BATCH: Final = 4
_MICRO: Final = 2


@dataclasses.dataclass(slots=True)
class Report:
    """The work of a campaign, and the differences that were found.

    Attributes:
        kill_count: processes killed, of a launch with several the first one.
        kills_in: kills by the phase of the process.
        launch_count: launches, those included that came to an end.
        resume_count: launches that resumed from a checkpoint.
        repeated_count: steps, by process, that some launch did again.
        verified_launches: launches whose verdict is "verified".
        verified_steps: steps that these launches verified.
        refuted: sentences of the witness on steps that differ.
        differing: steps whose losses differ from those of the undisturbed run, and members of last
            checkpoints.
        violations: other faults.
    """

    kill_count: int = 0
    kills_in: dict[str, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(PHASES, 0))
    launch_count: int = 0
    resume_count: int = 0
    repeated_count: int = 0
    verified_launches: int = 0
    verified_steps: int = 0
    refuted: list[str] = dataclasses.field(default_factory=list)
    differing: list[str] = dataclasses.field(default_factory=list)
    violations: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of a campaign.

    Attributes:
        writers: the number of processes of a launch.
        saver: as of a `Checkpointer`.
        is_faulty: whether the learning rate depends on the steps since the start of the process.
    """

    writers: int
    saver: Any
    is_faulty: bool


# --- the training ---------------------------------------------------------------------------------


class _Model(nn.Module):
    """A transformer of one block, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(64, 16)
        self.wpe = nn.Embedding(_BLOCK, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, 64)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        mask = torch.full((_BLOCK, _BLOCK), -torch.inf).triu(1)
        h = self.block(self.wte(x) + self.wpe.weight, src_mask=mask)
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


def _batch_at(source: torch.Tensor, offsets: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.stack([source[i : i + _BLOCK] for i in offsets])
    return x, torch.stack([source[i + 1 : i + 1 + _BLOCK] for i in offsets])


def train(
    run: str,
    options: Options,
    *,
    upto: int,
    note: Callable[[str], None],
    enter: Callable[[str], None],
) -> None:
    """Train like nanoGPT from where the run stands up to a step.

    Args:
        note: called with a line on each step and on the load.
        enter: called with the name of each phase that begins.
    """
    random.seed(1337)
    np.random.seed(1337)  # noqa: NPY002
    torch.manual_seed(1337)
    text = torch.randint(64, (2000,), generator=torch.Generator().manual_seed(1))
    bare = _Model()
    model: Any = bare if options.writers == 1 else nn.parallel.DistributedDataParallel(bare)
    decay = [p for p in bare.parameters() if p.dim() >= 2]
    rest = [p for p in bare.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    )
    sampler = ckptfmt.Sampler(
        1800 - _BLOCK, global_batch=_BATCH * _MICRO * 2, seed=0, micro_batches=_MICRO
    )
    best = {"loss": math.inf}
    state = ckptfmt.State(
        weights=model, optimizer=optimizer, data=sampler, config={"block": 16}, extra={"best": best}
    )
    enter("open")
    with Checkpointer(
        run, state, every=5, keep=3, saver=options.saver, deadline_s=_PATIENCE_S
    ) as checkpointer:
        _enter_phases(checkpointer, enter)
        micro_batches = iter(sampler)
        begin = checkpointer.step
        for step in checkpointer.steps(upto):
            enter("step")
            if step == begin and checkpointer.load_report is not None:
                note(f"resumed {begin} {checkpointer.load_report.claim}")
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 * (1.1 + math.cos(step / 10))
                if options.is_faulty:
                    group["lr"] *= min(1.0, (step - begin + 1) / 4)
            if step % 8 == 0:
                offsets = torch.randint(180, (_BATCH,)).tolist()
                with torch.no_grad():
                    best["loss"] = min(best["loss"], bare(*_batch_at(text[1800:], offsets)).item())
            total = 0.0
            for _ in range(_MICRO):
                batch = _batch_at(text, next(micro_batches))
                loss = model(*batch) / _MICRO
                loss.backward()
                checkpointer.observe(batch=batch)
                total += loss.item()
            norm = nn.utils.clip_grad_norm_(bare.parameters(), 1.0)
            checkpointer.observe(loss=total, grad_norm=norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            note(f"step {step + 1} {total.hex()}")


def _enter_phases(checkpointer: Checkpointer, enter: Callable[[str], None]) -> None:
    """Let the checkpointer tell of its phases: a record of the witness, and a save."""

    def told(method: Callable[..., Any], phase: str) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            enter(phase)
            try:
                return method(*arguments, **named)
            finally:
                enter("step")

        return call

    witness: Any = checkpointer._witness
    for name in ("begin", "end_step", "note_saved", "hear"):
        setattr(witness, name, told(getattr(Witness, name).__get__(witness), "witness"))
    saves: Any = checkpointer._saves
    saves.save = told(saves.save, "save")


class _Progress(ctypes.Structure):
    """The progress of a process, in memory that it shares with the oracle.

    Attributes:
        phase: the place of its phase in `PHASES`.
        steps: the number of times that the phase "step" began.
    """

    _fields_: ClassVar[list[tuple[str, type]]] = [
        ("phase", ctypes.c_uint32),
        ("steps", ctypes.c_uint32),
    ]


class _Warnings(logging.Handler):
    """Notes each warning of the package."""

    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._note = note

    def emit(self, record: logging.LogRecord) -> None:
        self._note(f"warned {record.getMessage()}")


def _be_writer(
    run: str, place: pathlib.Path, options: Options, shared: _Progress, *, writer: int, upto: int
) -> None:
    """Be one process of a launch, from the fork on; the process ends here."""
    with (place / f"{writer}.err").open("wb") as errors:
        os.dup2(errors.fileno(), 1)
        os.dup2(errors.fileno(), 2)
    notes_fd = os.open(place / f"{writer}.notes", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(line: str) -> None:
        os.write(notes_fd, f"{line}\n".encode())

    def enter(phase: str) -> None:
        shared.steps += phase == "step" and PHASES[shared.phase] != "step"
        shared.phase = PHASES.index(phase)

    code = 0
    try:
        torch.set_num_threads(1)
        logging.getLogger("ckptfmt").addHandler(_Warnings(note))
        if options.writers > 1:
            meeting = f"file://{place / 'meeting'}"
            torch.distributed.init_process_group(
                "gloo", init_method=meeting, rank=writer, world_size=options.writers
            )
        train(run, options, upto=upto, note=note, enter=enter)
        if options.writers > 1:
            torch.distributed.destroy_process_group()
    except BaseException:  # noqa: BLE001
        note(f"failed {json.dumps(traceback.format_exc())}")
        code = 1
    os._exit(code)


# --- the oracle -----------------------------------------------------------------------------------


class _Run:
    """A run that is killed, then compared with an undisturbed one."""

    def __init__(
        self, root: pathlib.Path, report: Report, rng: random.Random, options: Options
    ) -> None:
        self._root = root
        self._report = report
        self._rng = rng
        self._options = options
        self._launches: list[pathlib.Path] = []
        memory = mmap.mmap(-1, options.writers * ctypes.sizeof(_Progress))
        self._shared = [
            _Progress.from_buffer(memory, writer * ctypes.sizeof(_Progress))
            for writer in range(options.writers)
        ]
        self._last_step = 0

    def kill_one(self) -> None:
        """Start a launch, kill it at a moment that chance has chosen, and take its notes."""
        pids = self._start("killed", upto=1 << 30)
        victim = self._rng.randrange(len(pids))
        self._wait_for_a_moment(victim)
        phase = PHASES[self._shared[victim].phase]
        os.kill(pids[victim], signal.SIGKILL)
        # A launcher notices the end of one process, and ends the others.
        time.sleep(self._rng.choice((0.0, self._rng.uniform(0, 0.05))))
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        self._report.kill_count += codes[victim] == -signal.SIGKILL
        self._report.kills_in[phase] += 1
        self._take_notes(is_killed=True, codes=codes)

    def finish(self) -> None:
        """Let one launch come to its end, then an undisturbed run, and compare both."""
        upto = self._last_step + _LAST_STEPS
        for name in ("killed", "calm"):
            codes = [
                os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                for pid in self._start(name, upto=upto)
            ]
            self._take_notes(is_killed=False, codes=codes)
        *killed, calm = self._launches
        self._compare_losses(killed, calm)
        self._compare_checkpoints()
        verdicts = read_verdicts(open_store(str(self._root / "killed"), writable=False))
        for launch, verdict in sorted(verdicts.items()):
            if verdict.verdict == "refuted":
                self._report.refuted.append(f"verdict on launch {launch}: {verdict.difference}")
            elif verdict.verdict == "verified":
                self._report.verified_launches += 1
                self._report.verified_steps += verdict.step_count

    def _start(self, run: str, *, upto: int) -> list[int]:
        place = self._root / "launches" / f"{len(self._launches) + 1:04d}"
        place.mkdir(parents=True)
        self._launches.append(place)
        self._report.launch_count += 1
        for progress in self._shared:
            progress.phase = progress.steps = 0
        pids = []
        for writer, progress in enumerate(self._shared):
            pid = os.fork()
            if pid == 0:
                _be_writer(
                    str(self._root / run), place, self._options, progress, writer=writer, upto=upto
                )
            pids.append(pid)
        return pids

    def _wait_for_a_moment(self, victim: int) -> None:
        """Wait until a process is in a phase that chance has chosen, and a little longer."""
        target = self._rng.choice(("open", "step", "step", "witness", "save"))
        if target != "open":
            steps = self._rng.randint(1, _LIFE_STEPS)
            self._wait_until(lambda: self._shared[victim].steps >= steps)
        self._wait_until(lambda: PHASES[self._shared[victim].phase] == target)
        time.sleep(
            self._rng.choice((0.0, self._rng.uniform(0, 0.0005), self._rng.uniform(0, 0.01)))
        )

    def _wait_until(self, is_there: Callable[[], bool]) -> None:
        end_s = time.monotonic() + _PATIENCE_S
        while not is_there():
            if time.monotonic() > end_s:
                self._report.violations.append(
                    f"{self._launches[-1].name} didn't go on within {_PATIENCE_S:g} s"
                )
                return
            time.sleep(0.00002)

    def _take_notes(self, *, is_killed: bool, codes: list[int]) -> None:
        """Take the notes of the newest launch."""
        place = self._launches[-1]
        for writer in range(self._options.writers):
            for line in _notes_of(place, writer):
                word, _, rest = line.partition(" ")
                if word == "step":
                    self._last_step = max(self._last_step, int(rest.split()[0]))
                elif word == "resumed":
                    self._report.resume_count += writer == 0
                    if not rest.endswith(" T1"):
                        self._report.violations.append(f"{place.name}, process {writer}: {line}")
                elif word == "warned" and not rest.startswith(_EXPECTED):
                    named = (
                        self._report.refuted
                        if "same trajectory" in rest
                        else self._report.violations
                    )
                    named.append(f"{place.name}, process {writer}: {rest}")
                elif word == "failed" and not is_killed:
                    self._report.violations.append(f"{place.name}, process {writer}: {rest}")
        if not is_killed and any(codes):
            errors = (place / "0.err").read_text("utf-8", "replace")[-2000:]
            self._report.violations.append(f"{place.name} ended with {codes}: {errors}")

    def _compare_losses(self, killed: list[pathlib.Path], calm: pathlib.Path) -> None:
        for writer in range(self._options.writers):
            right = dict(_losses_of(calm, writer))
            done: collections.Counter[str] = collections.Counter()
            for place in killed:
                losses = _losses_of(place, writer)
                done.update(step for step, _ in losses)
                wrong = [step for step, loss in losses if right.get(step) != loss]
                if wrong:
                    self._report.differing.append(
                        f"{place.name}, process {writer}: losses from step {wrong[0]} on"
                    )
            self._report.repeated_count += sum(count > 1 for count in done.values())
            if set(done) != set(right):
                self._report.violations.append(
                    f"process {writer}: other steps than those of the undisturbed run"
                )

    def _compare_checkpoints(self) -> None:
        killed, calm = (_contents(self._root / name) for name in ("killed", "calm"))
        names = sorted(name for name in {*killed, *calm} if killed.get(name) != calm.get(name))
        if names:
            self._report.differing.append(
                f"last checkpoint of {self._root.name}: {names[0]} and {len(names) - 1} more"
            )


def _notes_of(place: pathlib.Path, writer: int) -> list[str]:
    """Return the notes of a process of a launch, without a line that the kill cut."""
    path = place / f"{writer}.notes"
    return path.read_text("utf-8").split("\n")[:-1] if path.exists() else []


def _losses_of(place: pathlib.Path, writer: int) -> list[tuple[str, str]]:
    words = [line.split() for line in _notes_of(place, writer)]
    return [(line[1], line[2]) for line in words if line[0] == "step"]


def _contents(path: pathlib.Path) -> dict[str, Any]:
    """Return the bits of the newest checkpoint of a run: tensors, values and RNG streams."""
    with ckptfmt.open(path) as checkpoint:
        found: dict[str, Any] = {
            f"{key}": checkpoint.read(*key).tobytes() for key in checkpoint.tensors
        }
        fields = ("data", "optimizer", "extra")
        found |= {
            f"{key}": repr(checkpoint.leaf(*key)) for key in checkpoint.leaves if key[0] in fields
        }
        found |= {f"rng {key}": repr(checkpoint.stream(*key)) for key in checkpoint.streams}
        found["step"] = checkpoint.step
    return found


def kill_many(kill_count: int, seed: int, options: Options, *, seconds: float = math.inf) -> Report:
    """Kill so many trainings, in runs of `_KILLS_PER_RUN`, each of which is then compared with an undisturbed run.

    Args:
        seconds: the time after which no launch is started any more but the last one of a run.
    """
    report = Report()
    rng = random.Random(seed)
    end_s = time.monotonic() + seconds
    while report.kill_count < kill_count and not report.violations and time.monotonic() < end_s:
        with tempfile.TemporaryDirectory(dir=FAST_DIRECTORY, prefix="ckptfmt-kill-") as directory:
            run = _Run(pathlib.Path(directory), report, rng, options)
            for _ in range(min(_KILLS_PER_RUN, kill_count - report.kill_count)):
                if not report.violations and time.monotonic() < end_s:
                    run.kill_one()
            run.finish()
    return report


def main() -> None:
    """Run from the command line; the report is one JSON object."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--writers", type=int, default=1)
    parser.add_argument("--saver", choices=("process", "thread", "inline"), default="thread")
    parser.add_argument("--faulty", action="store_true")
    parser.add_argument("--seconds", type=float, default=math.inf)
    given = parser.parse_args()
    options = Options(writers=given.writers, saver=given.saver, is_faulty=given.faulty)
    report = kill_many(given.kills, given.seed, options, seconds=given.seconds)
    json.dump(dataclasses.asdict(report), sys.stdout)


if __name__ == "__main__":
    main()
