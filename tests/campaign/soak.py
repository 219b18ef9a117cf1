"""A day of a training in time-lapse: saves, rewinds, kills, checks and a compaction; nothing grows, no bit differs.

A day at a save each minute has 1,440 saves. In its first half one process lives on, and goes back
once an hour. In its second half the process and its saver are killed twice an hour. Each hour the
run is validated beside the training. A last launch makes a few saves, so that its clean-ups come
after every kill. The command prints what was counted, and its status is 1 if something grew, a check
failed, or the end isn't the undisturbed training's.

    python -m tests.campaign.soak --hours 24
"""

# ruff: noqa: T201 - a command that prints

import argparse
import contextlib
import dataclasses
import json
import multiprocessing
import os
import pathlib
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import torch

import ckptfmt
from ckptfmt import api
from tests.store.helpers import FAST_DIRECTORY

#: Saves of an hour.
HOUR: Final = 60
_KEEP: Final = 5
#: Room for a dozen saves: a cache with more fills up, each save with a lock, while the training goes
#: faster than its home.
_CACHE_NBYTES: Final = 12 << 20
#: A wait that takes so long has failed, in seconds.
_PATIENCE_S: Final = 300.0


#: Saves of a process after which nothing may grow.
_WARM: Final = 60
#: How much greater a figure of the last quarter may be. Deltas, the checkpoints that are kept for
#: them, and the saves that wait in the cache differ from moment to moment.
_BOUNDS: Final = {
    "rss_nbytes": 1.05,
    "slot_nbytes": 1.0,
    "threads": 1.0,
    "descriptors": 1.25,
    "run_nbytes": 1.2,
    "run_files": 1.5,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Usage:
    """What a training held when a save was committed.

    Attributes:
        saves: number of the saves of its process.
        rss_nbytes: memory of the training and of its saver.
        slot_nbytes: shared memory of the slots.
        threads, descriptors: of the training and of its saver.
        run_nbytes, run_files: of the run on the disk, without manifests: each retired checkpoint
            leaves a small one. The mirror keeps what the run retires.
        save_s: seconds from the call of a save to the commit.
    """

    saves: int
    rss_nbytes: int
    slot_nbytes: int
    threads: int
    descriptors: int
    run_nbytes: int
    run_files: int
    save_s: float


class Training:
    """A small training whose every bit depends on every step before."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(32, 256), torch.nn.Dropout(0.1), torch.nn.Linear(256, 256)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.inputs = torch.randn(5_000, 32, generator=torch.Generator().manual_seed(0))
        self.sampler = ckptfmt.Sampler(len(self.inputs), global_batch=8, seed=0)
        self.state = ckptfmt.State(
            weights=self.model, optimizer=self.optimizer, data=self.sampler, config={}
        )

    def step(self, batch: Any) -> None:
        """Train one step on the samples of these numbers."""
        self.model(self.inputs[batch]).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> dict[str, bytes]:
        """Return the bytes of the weights by name."""
        return {name: held.numpy().tobytes() for name, held in self.model.state_dict().items()}


def undisturbed(steps: int) -> dict[str, bytes]:
    """Return the weights after a training that nothing disturbs."""
    training = Training()
    batches = iter(training.sampler)
    for _ in range(steps):
        training.step(next(batches))
    return training.weights()


def train(place: pathlib.Path, last: int, rewind_every: int) -> None:
    """Train up to a step, with a save each step; tell what each save left in ``usage.jsonl``."""
    torch.set_num_threads(1)
    training = Training()
    copies: list[ckptfmt.Cache | ckptfmt.Mirror] = [
        ckptfmt.Cache(place / "cache", limit_nbytes=_CACHE_NBYTES),
        ckptfmt.Mirror(place / "mirror"),
    ]
    with (
        ckptfmt.Checkpointer(
            place / "run",
            training.state,
            every=1,
            keep=_KEEP,
            copies=copies,
            saving=ckptfmt.Saving(delta="auto", saver="process"),
        ) as checkpointer,
        (place / "usage.jsonl").open("a", buffering=1) as told,
    ):
        batches = iter(training.sampler)
        saves, gone_back = 0, 0
        begin_s = time.monotonic()
        for step in checkpointer.steps(last):
            if rewind_every and step % rewind_every == 0 and step > gone_back:
                gone_back = step
                checkpointer.rewind()
                continue
            training.step(next(batches))
            saves += 1
            if saves % 10 == 0:
                save_s, begin_s = (time.monotonic() - begin_s) / 10, time.monotonic()
                told.write(f"{json.dumps(dataclasses.asdict(look(place, saves, save_s)))}\n")


def look(place: pathlib.Path, saves: int, save_s: float) -> Usage:
    """Return what this process, its saver and the disk hold."""
    pids = [os.getpid(), *_children(os.getpid())]
    files = [nbytes for path, nbytes in _iter_files(place / "run") if path.name != "manifest.json"]
    return Usage(
        saves=saves,
        rss_nbytes=sum(_status(pid, "VmRSS") << 10 for pid in pids),
        slot_nbytes=_slots_nbytes(),
        threads=sum(_status(pid, "Threads") for pid in pids),
        descriptors=sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids),  # noqa: PTH208
        run_nbytes=sum(files),
        run_files=len(files),
        save_s=save_s,
    )


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has ended
            found += map(int, (task / "children").read_text().split())
    return found


def _status(pid: int, name: str) -> int:
    lines = pathlib.Path(f"/proc/{pid}/status").read_text("utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def _slots_nbytes() -> int:
    found: dict[int, int] = {}
    for link in pathlib.Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if str(link.readlink()).startswith("/memfd:"):
                found[link.stat().st_ino] = link.stat().st_size
    return sum(found.values())


def _iter_files(place: pathlib.Path) -> Iterator[tuple[pathlib.Path, int]]:
    """Yield the files below a directory with their sizes; files may go meanwhile."""
    for folder, _, names in os.walk(place):
        for name in names:
            path = pathlib.Path(folder, name)
            with contextlib.suppress(OSError):
                yield path, path.stat().st_size


# --- the day --------------------------------------------------------------------------------------


class Soak:
    """A day of a training in a directory.

    Attributes:
        problems: a sentence for each rule that was broken.
        counts: numbers of saves, rewinds, kills and checks.
    """

    def __init__(self, place: pathlib.Path, hours: int, *, hour: int = HOUR) -> None:
        self.problems: list[str] = []
        self.counts = {"saves": hours * hour + _KEEP, "rewinds": 0, "kills": 0, "checks": 0}
        self._place = place
        self._hour = hour
        self._half, self._end = hours // 2 * hour, hours * hour + _KEEP
        self._context = multiprocessing.get_context("spawn")

    def run(self) -> None:
        """Live the day."""
        self._live(self._half, rewind_every=self._hour)
        self.counts["rewinds"] = self._half // self._hour - 1
        api.compact(self._place / "run", take_over=True)
        day_end = self._end - _KEEP
        for step in range(self._half + self._hour // 2, day_end, self._hour // 2):
            self._live(day_end, kill_at=step)
        self._live(self._end)
        self._check_end()
        self.problems += find_growth(self.usage()[: self._half // 10])

    def _live(self, last: int, *, kill_at: int = 0, rewind_every: int = 0) -> None:
        """Let a process train; kill it and its saver once the run has this step."""
        process = self._context.Process(target=train, args=(self._place, last, rewind_every))
        process.start()
        assert process.pid is not None
        checked = self._newest() // self._hour
        end_s = time.monotonic() + _PATIENCE_S
        newest = self._newest()
        while process.is_alive() and not (kill_at and newest >= kill_at):
            time.sleep(0.02)
            if self._newest() > newest:
                newest, end_s = self._newest(), time.monotonic() + _PATIENCE_S
            if newest // self._hour > checked:
                checked = newest // self._hour
                self._check("run")
            if time.monotonic() > end_s:
                self.problems.append(f"no save after step {newest} in {_PATIENCE_S:g} s")
                break
        if kill_at or process.is_alive():
            for pid in (process.pid, *_children(process.pid)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.counts["kills"] += 1
        process.join(_PATIENCE_S)
        if not kill_at and process.exitcode != 0:
            self.problems.append(f"a training ended with {process.exitcode}")

    def _newest(self) -> int:
        """Return the newest committed step."""
        steps = [
            int(path.parent.name.split("-")[1])
            for path in self._place.glob("run/step-*/manifest.json")
        ]
        return max(steps, default=0)

    def _check(self, name: str) -> None:
        self.counts["checks"] += 1
        report = ckptfmt.validate(self._place / name)
        self.problems += [f"{name}: {violation}" for violation in report.violations]

    def _check_end(self) -> None:
        """Compare what is left with the undisturbed training, and look for what is left over."""
        for name in ("run", "mirror"):
            self._check(name)
            with ckptfmt.open(self._place / name) as checkpoint:
                found = {
                    key: np.ascontiguousarray(checkpoint.weights[key][...]).tobytes()
                    for key in checkpoint.weights
                }
            if found != undisturbed(self._end):
                self.problems.append(f"{name}: the weights aren't the undisturbed training's")
        kept = {
            self._place / "run" / one.name
            for one in ckptfmt.Run(self._place / "run").list()
            if one.state == "committed"
        }
        # The condemnation by a killed cleaner is empty, and stays as long as its checkpoint.
        self.problems += [
            f"left over: {path}"
            for path, nbytes in _iter_files(self._place)
            if path.name.startswith(".tmp-") and (nbytes or path.parent not in kept)
        ]
        if len(kept) > 4 * _KEEP:  # those that deltas read from stay, too
            self.problems.append(f"{len(kept)} checkpoints are kept, with keep={_KEEP}")

    def usage(self) -> list[Usage]:
        """Return what was told, in the order of time."""
        lines = (self._place / "usage.jsonl").read_text("utf-8").splitlines()
        return [Usage(**json.loads(line)) for line in lines if line.endswith("}")]


def quarters(usage: Sequence[Usage], name: str) -> tuple[float, float]:
    """Return the medians of a figure over the first and over the last quarter."""
    values = [getattr(one, name) for one in usage]
    count = max(len(values) // 4, 1)
    return statistics.median(values[:count]), statistics.median(values[-count:])


def find_growth(usage: Sequence[Usage]) -> list[str]:
    """Return a sentence for each figure that grew while one process lived, its first saves aside."""
    lived = [one for one in usage if one.saves > _WARM]
    found = []
    for name, bound in _BOUNDS.items():
        first, last = quarters(lived, name) if lived else (0, 0)
        if last > first * bound:
            found.append(f"{name} grew from {first} to {last}")
    return found


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hours", type=int, default=24, help="an even number")
    hours = parser.parse_args().hours
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=FAST_DIRECTORY, prefix="ckptfmt-soak-") as directory:
        soak = Soak(pathlib.Path(directory), hours)
        begin_s = time.monotonic()
        soak.run()
        usage = soak.usage()
    for name, value in soak.counts.items():
        print(f"{name}: {value}")
    lived = usage[: hours // 2 * HOUR // 10]
    for name in (*_BOUNDS, "save_s"):
        first, last = quarters(lived, name)
        print(f"{name}, first and last quarter of a process: {first:.6g}, {last:.6g}")
    print(f"seconds: {time.monotonic() - begin_s:.0f}")
    for problem in soak.problems:
        print(problem)
    return int(bool(soak.problems))


if __name__ == "__main__":
    sys.exit(main())
