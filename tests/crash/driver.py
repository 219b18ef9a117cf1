"""Kills trainers at random moments, and remembers what they had promised: the oracle that outlives them all.

A process of its own, with one thread, so that it may fork: a killed trainer costs a few
milliseconds.

    python -m tests.crash.driver --kills 300 --seed 1
"""

import argparse
import dataclasses
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

from ckptfmt.store.local import LocalStore
from tests.crash.trainer import PHASES, train
from tests.explorer import content
from tests.explorer.crashes import scan
from tests.explorer.judge import Judge, Promises, by_checkpoint
from tests.store.helpers import FAST_DIRECTORY

#: Kills in one run, before the next is begun: retired checkpoints leave their tombstones, and
#: listing them takes time.
_KILLS_PER_RUN: Final = 20
_PATIENCE_S: Final = 60.0
_TARGETS: Final = ("resume", "save", "retirement")


@dataclasses.dataclass(slots=True)
class Report:
    """What was done, and what was found.

    Attributes:
        kill_count: trainers killed.
        kills_in: how many of them in each phase.
        checked_count: checkpoints found committed after a kill, and loaded.
        acknowledged_count: saves that a trainer was told are durable.
        torn_count: kills that left an undecided checkpoint directory.
        violations: what was found.
    """

    kill_count: int = 0
    kills_in: dict[str, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(PHASES, 0))
    checked_count: int = 0
    acknowledged_count: int = 0
    torn_count: int = 0
    violations: list[str] = dataclasses.field(default_factory=list)


class _Run:
    """One run's directory with its oracle."""

    def __init__(self, root: pathlib.Path, report: Report, rng: random.Random) -> None:
        self._root = root
        self._report = report
        self._rng = rng
        self._judge = Judge()
        self._promises = Promises()
        self._phase = mmap.mmap(-1, 1)

    def kill_one(self) -> None:
        """Start a trainer, kill it with everything that it started, and judge what is left."""
        pid, told_fd = self._start(save_count=None)
        self._wait_for_a_moment()
        os.killpg(pid, signal.SIGKILL)
        self._end(pid, told_fd)
        self._report.kill_count += 1
        self._report.kills_in[PHASES[self._phase[0]]] += 1
        self._judge_state()

    def let_one_live(self) -> None:
        """Start a trainer that comes to its end: after all these kills, without anybody's help."""
        pid, told_fd = self._start(save_count=2)
        status = self._end(pid, told_fd)
        if status != 0:
            self._report.violations.append(
                f"the trainer that wasn't killed ended with status {status}"
            )
        self._judge_state()

    def _start(self, *, save_count: int | None) -> tuple[int, int]:
        read_fd, write_fd = os.pipe()
        self._phase[0] = 0
        seed = self._rng.getrandbits(32)
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, 0)
            try:
                train(
                    str(self._root),
                    seed=seed,
                    told_fd=write_fd,
                    phase=self._phase,
                    save_count=save_count,
                )
            except BaseException:  # noqa: BLE001
                os.write(write_fd, f"failed {json.dumps(traceback.format_exc())}\n".encode())
                os._exit(1)
            os._exit(0)
        os.setpgid(pid, pid)  # here, too: whoever comes first, there is a group to kill
        os.close(write_fd)
        return pid, read_fd

    def _wait_for_a_moment(self) -> None:
        """Wait until the trainer is in a phase chosen by chance, and a little longer."""
        target = PHASES.index(self._rng.choice(_TARGETS))
        end = time.monotonic() + _PATIENCE_S
        while self._phase[0] != target and time.monotonic() < end:
            time.sleep(0.0002)
        time.sleep(self._rng.choice((0.0, self._rng.uniform(0, 0.004), self._rng.uniform(0, 0.02))))

    def _end(self, pid: int, told_fd: int) -> int:
        """Take what the trainer told, until everybody who could tell is dead; return its exit status."""
        with os.fdopen(told_fd) as told:
            lines = told.read().splitlines()
        _, status = os.waitpid(pid, 0)
        for line in lines:
            if line.startswith("failed"):
                self._report.violations.append(line)
            else:
                self._promises = self._promises.after(line)
                self._report.acknowledged_count += line.startswith("saved")
        return os.waitstatus_to_exitcode(status)

    def _judge_state(self) -> None:
        """Judge the directory by what was promised, recovery of a copy in memory included; read it in place, too."""
        files = scan(self._root).files
        found = self._judge.judge(files, self._promises)
        self._report.violations += [f"{violation.rule}: {violation.detail}" for violation in found]
        store = LocalStore(self._root, writable=False)
        for name, digest in self._promises.saved.items():
            if not content.load(store.at(name), digest=digest).exact:
                self._report.violations.append(f"silent: {name}, read in place")
        directories = by_checkpoint(files)
        self._report.torn_count += any(f"{name}/manifest.json" not in files for name in directories)
        self._report.checked_count += sum(
            isinstance(self._judge.load(own, name), content.Loaded)
            for name, own in directories.items()
        )


def kill_many(kill_count: int, seed: int) -> Report:
    """Kill so many trainers, in runs of `_KILLS_PER_RUN`, each of which then comes to a good end."""
    report = Report()
    rng = random.Random(seed)
    while report.kill_count < kill_count and not report.violations:
        with tempfile.TemporaryDirectory(dir=FAST_DIRECTORY, prefix="ckptfmt-kill-") as directory:
            run = _Run(pathlib.Path(directory) / "run", report, rng)
            for _ in range(min(_KILLS_PER_RUN, kill_count - report.kill_count)):
                run.kill_one()
            run.let_one_live()
    return report


def main() -> None:
    """Run from the command line; the report is one JSON object."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    arguments = parser.parse_args()
    with content.remembering():
        report = kill_many(arguments.kills, arguments.seed)
    json.dump(dataclasses.asdict(report), sys.stdout)


if __name__ == "__main__":
    main()
