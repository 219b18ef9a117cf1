"""Kills trainers, with saver and uploader, whose saves go home by way of caches; and holds them to what they told.

A process of its own, with one thread, so that it may fork.

    python -m tests.crash.cached --kills 100 --seed 1 --writers 2
"""

import argparse
import dataclasses
import json
import os
import pathlib
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from typing import Final

import numpy as np

import ckptfmt
from ckptfmt.documents.manifest import Manifest
from ckptfmt.read.reader import Checkpoint
from ckptfmt.run.lineage import list_checkpoints
from ckptfmt.store.local import LocalStore
from ckptfmt.trainer.handle import SaveHandle
from tests.store.helpers import FAST_DIRECTORY
from tests.stores.hooked import HookedStore, Operation
from tests.test_group import Allgather, run_writers

_DEADLINE_S: Final = 60.0
#: How long a killed trainer lives at most, in seconds, once it has told what was waited for.
_LIFE_S: Final = 0.2
#: What is waited for: nothing, so that it is killed while it finishes what another left; or that it has come so far.
_TARGETS: Final = ("", "resumed", "written", "written", "committed")
#: How long the creation of a file at home takes at most, in seconds: longer than in a cache.
_DELAY_S: Final = 0.02


@dataclasses.dataclass(slots=True)
class Report:
    """What was done, and what was found.

    Attributes:
        kill_count: trainers killed.
        written_count: saves that all writers told to be written.
        finished_count: launches that resumed from a step that no killed trainer had told to be committed.
        lost: launches that resumed from an older step than all writers told to be written.
        violations: what else was found.
    """

    kill_count: int = 0
    written_count: int = 0
    finished_count: int = 0
    lost: list[str] = dataclasses.field(default_factory=list)
    violations: list[str] = dataclasses.field(default_factory=list)


class _Slow(HookedStore):
    """A home that takes longer than a cache."""

    def before(self, operation: Operation) -> None:
        if operation.op == "create":
            time.sleep(random.uniform(0, _DELAY_S))


def train(root: pathlib.Path, caches: list[pathlib.Path], told_fd: int, *, save_count: int | None) -> None:
    """Resume, then save step after step, until killed or so many times; each line that is told has a word first."""
    gather = Allgather(len(caches))

    def tell(*words: object) -> None:
        os.write(told_fd, (" ".join(map(str, words)) + "\n").encode())

    def body(writer: int) -> None:
        weights = {"w": np.zeros(20_000, np.int64), "v": np.zeros(10_000, np.int64)}
        with ckptfmt.Checkpointer(
            _Slow(LocalStore(root, writable=True)),
            ckptfmt.State(weights=weights, rng=False),
            cache=caches[writer],
            keep=3,
            saver="thread",
            writer=(writer, len(caches)),
            agree=gather.of(writer),
            deadline_s=_DEADLINE_S,
        ) as checkpointer:
            begin = checkpointer.step
            tell("resumed", writer, begin, all((array == begin).all() for array in weights.values()))
            checkpointer.restore_rng()
            handles: list[SaveHandle] = []
            for step in range(begin + 1, sys.maxsize if save_count is None else begin + 1 + save_count):
                checkpointer.step = step
                for array in weights.values():
                    array[...] = step
                handle = checkpointer.save()
                assert handle is not None
                handles.append(handle)
                for one in list(handles):
                    if one.state == "COMMITTED":
                        tell("committed", writer, one.step)
                        handles.remove(one)
                    elif one.state == "WRITTEN":
                        tell("written", writer, one.step)

    for found in run_writers(len(caches), body):
        if found is not None:
            raise found


class _Run:
    """One run with its caches, and what its trainers told."""

    def __init__(self, root: pathlib.Path, report: Report, rng: random.Random, writers: int, *, forget: bool) -> None:
        self._root, self._report, self._rng, self._forget = root / "home", report, rng, forget
        self._caches = [root / f"cache-{number}" for number in range(writers)]
        self._written = self._committed = 0

    def train(self, *, save_count: int | None = None) -> None:
        """Start a trainer, kill it or let it end, and judge what it resumed from."""
        if self._forget:
            for cache in self._caches:
                shutil.rmtree(cache, ignore_errors=True)
        self._rng.shuffle(self._caches)  # the processes have other numbers now
        told_fd, write_fd = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, 0)
            try:
                train(self._root, self._caches, write_fd, save_count=save_count)
            except BaseException:  # noqa: BLE001 - told to the oracle, whatever it is
                os.write(write_fd, f"failed {json.dumps(traceback.format_exc())}\n".encode())
                os._exit(1)
            os._exit(0)
        os.close(write_fd)
        lines: list[str] = []
        with os.fdopen(told_fd) as told:
            if save_count is None:
                target = self._rng.choice(_TARGETS)
                while target and (line := told.readline()):
                    lines.append(line)
                    if line.startswith((target, "failed")):
                        break
                time.sleep(self._rng.uniform(0, _LIFE_S))
                os.kill(pid, signal.SIGKILL)
                self._report.kill_count += 1
            lines += told.readlines()
        _, status = os.waitpid(pid, 0)
        if save_count is not None and status:
            self._report.violations.append(f"the last trainer ended with status {status}")
        self._judge(lines)

    def _judge(self, lines: list[str]) -> None:
        written: dict[int, int] = {}
        for line in lines:
            word, *rest = line.split(maxsplit=1 if line.startswith("failed") else -1)
            if word == "failed":
                self._report.violations.append(rest[0])
            elif word == "resumed":
                _, step, exact = rest
                if int(step) < self._written:
                    self._report.lost.append(f"step {self._written} was written, and step {step} is what is there")
                if int(step) < self._committed or exact != "True":
                    self._report.violations.append(f"step {self._committed} was committed: {line}")
                self._report.finished_count += rest[0] == "0" and int(step) > self._committed
                self._written = self._committed = int(step)
            elif word == "committed":
                self._committed = max(self._committed, int(rest[1]))
            else:
                written[int(rest[0])] = int(rest[1])
        if len(written) == len(self._caches):
            self._report.written_count += 1
            self._written = max(self._written, min(written.values()))
        self._written = max(self._written, self._committed)

    def judge_end(self) -> None:
        """Find what is left when the last trainer has ended: whole checkpoints, and nothing that waits in a cache."""
        home = LocalStore(self._root, writable=False)
        for entry in list_checkpoints(home):
            if entry.register is None:
                self._report.violations.append(f"{entry.name} is undecided")
            if isinstance(entry.register, Manifest):
                with Checkpoint(home.at(entry.name)) as checkpoint:
                    for item in checkpoint.index.tensors:
                        if not (checkpoint.read(*item.key) == entry.step).all():
                            self._report.violations.append(f"{entry.name} isn't of its step")
        for cache in self._caches:
            parts = {path.with_suffix("") for path in cache.rglob("parts/*.msgpack")}
            settled = {path.with_suffix("") for path in cache.rglob("parts/*.settled")}
            self._report.violations += [f"{path} waits for nobody" for path in sorted(parts ^ settled)]


def kill_many(kill_count: int, seed: int, writers: int, *, forget: bool = False) -> Report:
    """Kill so many trainers of one run, then let one come to its end.

    Args:
        forget: whether the caches are deleted behind each kill: then saves that were written are lost.
    """
    report, rng = Report(), random.Random(seed)
    with tempfile.TemporaryDirectory(dir=FAST_DIRECTORY, prefix="ckptfmt-kill-") as directory:
        run = _Run(pathlib.Path(directory), report, rng, writers, forget=forget)
        while report.kill_count < kill_count and not report.violations:
            run.train()
        run.train(save_count=2)
        run.judge_end()
    return report


def main() -> None:
    """Run from the command line; the report is one JSON object."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--writers", type=int, default=1)
    parser.add_argument("--forget", action="store_true")
    given = parser.parse_args()
    report = kill_many(given.kills, given.seed, given.writers, forget=given.forget)
    json.dump(dataclasses.asdict(report), sys.stdout)


if __name__ == "__main__":
    main()
