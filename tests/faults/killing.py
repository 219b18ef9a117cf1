"""Kills trainers that save beside the training, at random moments; remembers what they had seen STAGED or COMMITTED.

A process of its own, with one thread, so that it may fork: a killed trainer costs a few
milliseconds, and its saver, which must outlive it, an interpreter's start.

    CKPTFMT_FAULTS_MARK=me python -m tests.faults.killing --kills 100 --seed 1 --torch
"""

import argparse
import dataclasses
import itertools
import json
import mmap
import os
import pathlib
import random
import signal
import sys
import tempfile
import time
import traceback
from typing import Final

from ckptfmt.checkpointer import Checkpointer
from ckptfmt.commit.decision import read_register
from ckptfmt.documents.manifest import Manifest, Tombstone, checkpoint_name
from ckptfmt.saving.handle import STATES, SaveHandle
from ckptfmt.store import open_store
from tests.faults.driver import MARK, PATIENCE_S, TorchToy, Toy, problems, resume, savers, until
from tests.store.helpers import FAST_DIRECTORY

#: What a trainer is doing: it launches and gets ready; it is in `save`; the save isn't STAGED; it
#: is; it is COMMITTED.
PHASES: Final = ("starting", "saving", "staging", "staged", "committed")
#: Kills in one run, before the next is begun.
_KILLS_PER_RUN: Final = 10
_NBYTES: Final = (1 << 20, 5 << 20, 15 << 20)
#: How often a trainer waits for a state, and how often the next one is started only when all is
#: judged.
_WAIT_CHANCE: Final = 0.6
_JUDGE_CHANCE: Final = 0.3


@dataclasses.dataclass(slots=True)
class Report:
    """What was done, and what was found.

    Attributes:
        kill_count: trainers killed; `group_count`: with their process group.
        kills_in: how many of them in each phase.
        staged_count: saves that a trainer saw STAGED.
        rescued_count: those of them that weren't committed yet when a trainer was killed.
        resumed_count: launches that went on from what an earlier one had saved.
        violations: what was found.
    """

    kill_count: int = 0
    group_count: int = 0
    kills_in: dict[str, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(PHASES, 0))
    staged_count: int = 0
    rescued_count: int = 0
    resumed_count: int = 0
    violations: list[str] = dataclasses.field(default_factory=list)


class _Trainer:
    """What a forked process does until it is killed: save every step, and tell what it sees."""

    def __init__(
        self, root: pathlib.Path, *, told: pathlib.Path, phase: mmap.mmap, seed: int
    ) -> None:
        self._root = root
        self._told_fd = os.open(told, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._phase = phase
        self._rng = random.Random(seed)
        self._pending: dict[SaveHandle, str] = {}

    def run(self, toy: Toy, *, keep: int, save_count: int | None) -> None:
        """Go on until killed, or for so many saves; a failure is told, too."""
        try:
            with Checkpointer(
                self._root, toy.state, keep=keep, deadline_s=PATIENCE_S
            ) as checkpointer:
                self._train(checkpointer, toy, save_count)
        except BaseException:  # noqa: BLE001
            self._tell("failed", json.dumps(traceback.format_exc()))
            os._exit(1)
        os._exit(0)

    def _train(self, checkpointer: Checkpointer, toy: Toy, save_count: int | None) -> None:
        assert checkpointer.launch is not None
        launch, first = checkpointer.launch.launch, checkpointer.step
        toy.check(first)
        self._tell("resumed", launch, first)
        checkpointer.restore_rng()
        checkpointer.prepare()
        while save_count is None or checkpointer.step < first + save_count:
            self._tell("asked", launch, checkpointer.step + 1)
            self._enter("saving")
            handle = toy.save(checkpointer)
            self._enter("staging")
            self._phase[1] = min(255, self._phase[1] + 1)
            self._pending[handle] = "STAGING"
            # Or don't: then it is copied beside the next step, and written beside the next save.
            for state in ("STAGED", "COMMITTED"):
                if self._rng.random() < _WAIT_CHANCE:
                    handle.wait(state)
                    self._enter(state.lower())
                    self._tell_states(launch)
                    time.sleep(self._rng.uniform(0, 0.005))
            self._tell_states(launch)

    def _tell_states(self, launch: int) -> None:
        for handle, known in list(self._pending.items()):
            state = handle.state
            assert state in STATES, handle.error
            for reached in STATES[STATES.index(known) + 1 : STATES.index(state) + 1]:
                self._tell(reached.lower(), launch, handle.step)
            self._pending[handle] = state
            if state == "COMMITTED":
                del self._pending[handle]

    def _enter(self, name: str) -> None:
        self._phase[0] = PHASES.index(name)

    def _tell(self, *words: object) -> None:
        """Write a line at once: the file keeps it, whoever dies."""
        os.write(self._told_fd, f"{' '.join(map(str, words))}\n".encode())


class _Run:
    """One run's directory with its oracle."""

    def __init__(
        self, root: pathlib.Path, report: Report, rng: random.Random, toy: type[Toy]
    ) -> None:
        self._root = root
        self._told = root.with_name("told")
        self._told.touch()
        self._report = report
        self._rng = rng
        self._toy = toy
        self._nbytes = rng.choice(_NBYTES)
        self._keep = rng.choice((2, 4))
        self._phase = mmap.mmap(-1, 2)  # a place in PHASES, and how many saves were begun
        self._line_count = 0
        self._staged: list[tuple[int, int]] = []
        self._unsure: set[tuple[int, int]] = set()
        self._asked = 0

    def kill_some(self, kill_count: int) -> None:
        """Kill trainers one after the other, until a violation is found; the last one lives."""
        for _ in range(kill_count):
            self._kill_one()
            if self._report.violations:
                return
        self._let_one_live()

    def _kill_one(self) -> None:
        """Start a trainer, kill it, and judge what is left, at once or when the next one resumes from it."""
        pid = self._start(save_count=None)
        self._wait_for_a_moment(pid)
        if group := self._rng.random() < 0.5:
            os.killpg(pid, signal.SIGKILL)  # as torchrun does
        else:
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        self._report.kill_count += 1
        self._report.group_count += group
        self._report.kills_in[PHASES[self._phase[0]]] += 1
        self._listen()
        if self._rng.random() < _JUDGE_CHANCE:
            self._judge()

    def _let_one_live(self) -> None:
        """Start a trainer that comes to its end: after all these kills, without anybody's help."""
        _, status = os.waitpid(self._start(save_count=2), 0)
        if status != 0:
            self._report.violations.append(
                f"the trainer that wasn't killed ended with status {status}"
            )
        self._listen()
        self._judge()

    def _start(self, *, save_count: int | None) -> int:
        self._phase[:] = bytes(2)
        seed = self._rng.getrandbits(32)
        pid = os.fork()
        if pid == 0:
            os.setsid()
            trainer = _Trainer(self._root, told=self._told, phase=self._phase, seed=seed)
            trainer.run(self._toy(self._nbytes), keep=self._keep, save_count=save_count)
        until(
            lambda: os.getpgid(pid) == pid, every_s=0.0005
        )  # before that there is no group to kill
        return pid

    def _wait_for_a_moment(self, pid: int) -> None:
        """Wait until the trainer is in a phase chosen by chance, and a little longer; not if it has failed."""
        target = self._rng.randrange(len(PHASES))
        # From the second save on an optimizer's tensors are copied beside the training.
        after = self._rng.choice((0, 0, 2)) if target else 0
        ended = os.WEXITED | os.WNOHANG | os.WNOWAIT
        until(
            lambda: (
                (self._phase[0] == target and self._phase[1] >= after)
                or os.waitid(os.P_PID, pid, ended)
            ),
            every_s=0.0005,
        )
        time.sleep(self._rng.uniform(0, (0.5, 0.004, 0.004, 0.02, 0.004)[target]))

    def _listen(self) -> None:
        """Take what the trainers told, the last of whom is dead."""
        lines = self._told.read_text().splitlines()
        committed = set()
        for line in lines[self._line_count :]:
            word, *rest = line.split(" ", 2)
            if word == "failed":
                self._report.violations.append(line)
                continue
            launch, step = map(int, rest)
            if word == "resumed":
                self._check_resumed(step)
            elif word == "asked":
                self._asked = max(self._asked, step)
            elif word == "staged":
                self._report.staged_count += 1
                self._staged.append((launch, step))
                self._unsure.add((launch, step))
            elif word == "committed":
                committed.add((launch, step))
        self._line_count = len(lines)
        self._unsure = {place for place in self._unsure if not self._is_committed(*place)}
        self._report.rescued_count += len(self._unsure)
        self._report.violations += [
            f"lost: {place} was COMMITTED" for place in committed & self._unsure
        ]

    def _check_resumed(self, step: int) -> None:
        self._report.resumed_count += step > 0
        newest = max((step for _, step in self._staged), default=0)
        if not newest <= step <= self._asked:
            found = (
                f"a launch resumed from step {step}; {newest} was STAGED, {self._asked} asked for"
            )
            self._report.violations.append(f"older: {found}")

    def _is_committed(self, launch: int, step: int) -> bool:
        register = read_register(
            open_store(self._root, writable=False).at(checkpoint_name(step, launch))
        )
        return isinstance(register, Manifest | Tombstone)

    def _judge(self) -> None:
        """Wait until the orphaned saver has ended; then everything that was staged is committed, and all is valid."""
        if not until(lambda: not savers(), PATIENCE_S / 2):
            self._report.violations.append("a saver doesn't end")
        lost = [place for place in self._staged if not self._is_committed(*place)]
        self._report.violations += [f"lost: {place} was STAGED" for place in lost]
        self._report.violations += problems(self._root)
        self._unsure = set()


def kill_many(kill_count: int, seed: int, toys: list[type[Toy]]) -> Report:
    """Kill so many trainers, in runs of `_KILLS_PER_RUN`, each of which then comes to a good end."""
    report = Report()
    rng, kinds = random.Random(seed), itertools.cycle(toys)
    while report.kill_count < kill_count and not report.violations:
        # In memory, or on the disk, where a save takes longer.
        with tempfile.TemporaryDirectory(
            dir=rng.choice((FAST_DIRECTORY, None)), prefix="ckptfmt-faults-"
        ) as directory:
            run = _Run(pathlib.Path(directory) / "run", report, rng, next(kinds))
            try:
                run.kill_some(min(_KILLS_PER_RUN, kill_count - report.kill_count))
            finally:
                _end_savers()
    return report


def _end_savers() -> None:
    """Kill what still writes where a violation was found: the directory is about to go."""
    for pid in savers():
        os.kill(pid, signal.SIGKILL)
    until(lambda: not savers())


def _warm_up(toys: list[type[Toy]]) -> None:
    """Import, here and not in each trainer, what a launch, a save and a check import."""
    with tempfile.TemporaryDirectory(dir=FAST_DIRECTORY, prefix="ckptfmt-faults-") as directory:
        for kind in toys:
            root = pathlib.Path(directory, kind.__name__)
            toy = kind()
            with Checkpointer(root, toy.state, saver="inline") as checkpointer:
                toy.save(checkpointer)
            resume(root, kind())
            assert problems(root) == []


def main() -> None:
    """Run from the command line; the report is one JSON object."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--torch", action="store_true")
    arguments = parser.parse_args()
    # Apart from those who kill beside this one.
    os.environ[MARK] += f"-{arguments.seed}"
    toys: list[type[Toy]] = [Toy, TorchToy] if arguments.torch else [Toy]
    _warm_up(toys)
    report = kill_many(arguments.kills, arguments.seed, toys)
    json.dump(dataclasses.asdict(report), sys.stdout)


if __name__ == "__main__":
    main()
