"""Trainings over plain DataLoaders, disturbed and undisturbed; played by test_epochs.py.

A process of its own, with one thread, so that it may fork: a launch costs no import of torch.

Usage: epoch_loops.py FOLDER CELLS

CELLS is a list of cells in JSON. The output is a line of JSON for each cell: the differences from
the undisturbed training, and the resumes by their place: within the first epoch ("epoch 0"), at
the end of an epoch ("end"), within a later epoch ("epoch 1").
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import ckptfmt
from ckptfmt.store.memory import MemoryStore

SAMPLES = 22
BATCH = 4
EPOCHS = 3
#: A save every two steps.
EVERY = 2
#: Steps of an epoch: six, the last with two samples, unless the loader makes other batches.
EPOCH_STEPS = {"own sampler": 5, "own batches": 8}
#: Number of batches that two worker processes fetch ahead at most, and the batch under way.
AHEAD = 5


class Samples(torch.utils.data.Dataset[Any]):
    """Numbers with noise from all streams; each access is written down."""

    def __init__(self, reads: Path, count: int) -> None:
        self.reads = reads
        self.count = count
        self.own = np.random.default_rng(3)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> Any:
        with self.reads.open("a") as file:
            file.write(f"{int(number)}\n")
        noise = torch.rand(4) + random.random() + np.random.random() + self.own.random()  # noqa: NPY002
        return int(number), noise.float() + number / 10


class OwnSampler(torch.utils.data.Sampler[int]):
    """Counts its epochs itself, and draws within the epoch from a generator of its own."""

    def __init__(self) -> None:
        self.epoch = 0
        self.rng = random.Random(5)

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        left = list(range(SAMPLES))
        while left:
            yield left.pop(self.rng.randrange(len(left)) * self.epoch % len(left))


class OwnBatches(torch.utils.data.Sampler[list[int]]):
    """Batches of changing sizes, in an order from Python's global stream."""

    def __iter__(self) -> Iterator[list[int]]:
        order = list(range(SAMPLES))
        random.shuffle(order)
        at = 0
        while at < SAMPLES:
            count = 2 + at % 3
            yield order[at : at + count]
            at += count


def ends_of(cell: dict[str, Any]) -> tuple[int, int, int]:
    """Return the steps at which a disturbed training ends.

    The training resumes from a save within the first epoch, from a save at the end of an epoch and
    from a save within a later epoch. A killed training ends in the step behind the save. A stopped
    training saves at the step itself, or two processes at the step behind, when each process knows
    of the signal.
    """
    steps = epoch_steps(cell)
    if cell["how"] == "stopped":
        behind = cell["processes"] - 1
        return 3 - behind, steps - behind, steps + 4 - behind
    end = steps if steps % EVERY == 0 else 2 * steps  # the first end of an epoch with a save
    places = sorted((EVERY, end, end - 4 if end > steps else end + 4))
    return places[0] + 1, places[1] + 1, places[2] + 1


def epoch_steps(cell: dict[str, Any]) -> int:
    return EPOCH_STEPS.get(cell["kind"], 6)


def make_loader(kind: str, workers: str, reads: Path, writer: tuple[int, int]) -> Any:
    """Return a DataLoader, as programs make them."""
    data = Samples(reads, SAMPLES * (writer[1] if kind == "distributed" else 1))
    count = 0 if workers == "0" else 2
    options: dict[str, Any] = {
        "batch_size": BATCH,
        "num_workers": count,
        "persistent_workers": workers == "persistent",
    }
    match kind:
        case "shuffle":
            options["shuffle"] = True
        case "generator":
            options["generator"] = torch.Generator().manual_seed(4)
            options["shuffle"] = True
        case "distributed":
            options["sampler"] = torch.utils.data.DistributedSampler(
                data, num_replicas=writer[1], rank=writer[0], seed=6
            )
        case "weighted":
            options["sampler"] = torch.utils.data.WeightedRandomSampler(
                [0.1 + number for number in range(SAMPLES)], SAMPLES
            )
        case "own sampler":
            options["sampler"] = OwnSampler()
            options["drop_last"] = True
        case "own batches":
            del options["batch_size"]
            options["batch_sampler"] = OwnBatches()
    return torch.utils.data.DataLoader(data, **options)


def train(cell: dict[str, Any], folder: Path, launch: int, end: int | None, rank: int) -> None:
    """Be one process of one launch.

    Args:
        cell: the cell.
        folder: place of the run and the journals.
        launch: number of the launch.
        end: number of steps after which the launch ends, by the cell's ``how``; None to the end.
        rank: number of this process.
    """
    torch.set_num_threads(1)
    seed = launch * 100 + rank if launch > 1 else rank  # a resumed launch begins anywhere
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    writer = (rank, cell["processes"])
    reads = folder / f"reads-{launch}-{rank}"
    reads.touch()
    loader = make_loader(cell["kind"], cell["workers"], reads, writer)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    each: Any = ckptfmt.PerWorker if writer[1] > 1 else lambda value: value
    state = ckptfmt.State(
        weights=each(model), optimizer=each(optimizer), data=loader, config={"width": 8}
    )
    journal = (folder / f"journal-{launch}-{rank}").open("w")
    checkpointer = ckptfmt.Checkpointer(
        folder / "run",
        state,
        every=EVERY,
        saving=ckptfmt.Saving(saver="inline"),
        job=ckptfmt.Job(writer=writer, agree=f"{folder.name}-{launch}", deadline_s=120),
        stop=ckptfmt.Stop(signals=[signal.SIGTERM]),
    )

    def step_on(epoch: int, batch: Any) -> None:
        step = checkpointer.step
        ids, inputs = batch
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        content = [tensor.detach().numpy().tobytes() for tensor in model.parameters()]
        digest = hashlib.sha256(b"".join(content)).hexdigest()
        row = [step, epoch, ids.tolist(), loss.item().hex(), digest]
        journal.write(json.dumps(row) + "\n")
        journal.flush()
        if step + 1 == end:
            os.kill(os.getpid(), signal.SIGKILL if cell["how"] == "killed" else signal.SIGTERM)

    with checkpointer:
        report = checkpointer.load_report
        LOOPS[cell["loop"]](checkpointer, loader, step_on)
        report = checkpointer.load_report
        claim = "" if report is None else f"{report.claim} {report.lowered_by}"
        (folder / f"claim-{launch}-{rank}").write_text(claim)


def set_epoch(loader: Any, epoch: int) -> None:
    if hasattr(loader.sampler, "set_epoch"):
        loader.sampler.set_epoch(epoch)


def evaluate() -> None:
    """Draw random numbers at the end of an epoch."""
    torch.rand(3)


def loop_epochs(checkpointer: Any, loader: Any, step_on: Any) -> None:
    for epoch in checkpointer.epochs(EPOCHS):
        set_epoch(loader, epoch)
        for batch in loader:
            step_on(epoch, batch)
        evaluate()


def loop_own(checkpointer: Any, loader: Any, step_on: Any) -> None:
    checkpointer.restore_rng()
    for epoch in range(checkpointer.epoch, EPOCHS):
        set_epoch(loader, epoch)
        for batch in loader:
            with checkpointer.training_step():
                step_on(epoch, batch)
            if checkpointer.stopped:
                return
        evaluate()
    checkpointer.save()


def loop_steps(checkpointer: Any, loader: Any, step_on: Any) -> None:
    def iter_batches() -> Iterator[Any]:
        while True:
            epoch = checkpointer.epoch
            set_epoch(loader, epoch)
            for batch in loader:
                yield epoch, batch

    batches = iter_batches()
    for _ in checkpointer.steps(EPOCHS * 6):
        step_on(*next(batches))


LOOPS = {"epochs": loop_epochs, "own": loop_own, "steps": loop_steps}


def play(cell: dict[str, Any], folder: Path, ends: tuple[int | None, ...]) -> list[int]:
    """Play launches of a cell; return the exit statuses of all processes."""
    statuses = []
    for number, end in enumerate(ends, 1):
        pids = []
        for rank in range(cell["processes"]):
            pid = os.fork()
            if not pid:
                status = 1
                os.setpgid(0, 0)
                try:
                    with (folder / f"log-{number}-{rank}").open("w") as log:
                        os.dup2(log.fileno(), 2)
                    train(cell, folder, number, end, rank)
                    status = 0
                except BaseException:  # noqa: BLE001 - the parent reads the log
                    traceback.print_exc()
                finally:
                    os._exit(status)
            pids.append(pid)
        for pid in pids:
            statuses.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            # A worker process of torch that begins after the death of its loader's process stays.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
    return statuses


def rows_of(folder: Path, launch: int, rank: int) -> list[list[Any]]:
    text = (folder / f"journal-{launch}-{rank}").read_text()
    return [json.loads(line) for line in text.splitlines()]


def judge(cell: dict[str, Any], calm: Path, folder: Path, statuses: list[int]) -> list[str]:
    """Return the differences of a disturbed training from the undisturbed one."""
    found = []
    killed = [-signal.SIGKILL if cell["how"] == "killed" else 0] * cell["processes"]
    launches = len(ends_of(cell)) + 1
    wanted = killed * (launches - 1) + [0] * cell["processes"]
    if statuses != wanted:
        logs = "".join(path.read_text()[-1500:] for path in sorted(folder.glob("log-*")))
        return [f"ended with {statuses}: {logs}"]
    for rank in range(cell["processes"]):
        right = {row[0]: row for row in rows_of(calm, 1, rank)}
        done: list[int] = []
        for launch in range(1, launches + 1):
            rows = rows_of(folder, launch, rank)
            found += [f"launch {launch}: {row} for {right.get(row[0])}" for row in rows
                      if row != right.get(row[0])]  # fmt: skip
            done += [row[0] for row in rows]
            found += [
                f"launch {launch}: {line}" for line in misread(cell, folder, launch, rank, right)
            ]
            closed = cell["how"] == "stopped" or launch == launches
            claim = (folder / f"claim-{launch}-{rank}").read_text() if closed else ""
            if launch > 1 and closed and not claim.startswith("T1 "):
                found.append(f"launch {launch}: {claim}")
        if sorted(set(done)) != sorted(right):
            found.append(f"steps {sorted(set(done))}")
        if cell["how"] == "stopped" and len(done) != len(right):
            found.append(f"steps done again: {done}")
    return found


def misread(
    cell: dict[str, Any], folder: Path, launch: int, rank: int, right: dict[int, list[Any]]
) -> list[str]:
    """Return what a launch read besides the samples that the launch trained.

    Worker processes read ahead: within the epoch, the batches behind the last trained one.
    """
    rows = rows_of(folder, launch, rank)
    reads = collections.Counter(map(int, (folder / f"reads-{launch}-{rank}").read_text().split()))
    trained = samples_of(rows)
    allowed = collections.Counter(trained)
    last = rows[-1]
    if cell["workers"] != "0":
        ahead = [right[step] for step in range(last[0] + 1, last[0] + 1 + AHEAD) if step in right]
        allowed += samples_of([row for row in ahead if row[1] == last[1]])
    found = []
    if reads - allowed:
        found.append(f"read and not trained: {dict(reads - allowed)}")
    if trained - reads:
        found.append(f"trained and not read: {dict(trained - reads)}")
    return found


def samples_of(rows: list[list[Any]]) -> collections.Counter[int]:
    return collections.Counter(number for row in rows for number in row[2])


def resumes_of(cell: dict[str, Any], folder: Path) -> dict[str, int]:
    """Return the number of resumes from each kind of place."""
    places: collections.Counter[str] = collections.Counter()
    for launch in range(2, len(ends_of(cell)) + 2):
        for rank in range(cell["processes"]):
            begin = rows_of(folder, launch, rank)[0][0]
            epoch, taken = divmod(begin, epoch_steps(cell))
            places[f"epoch {min(epoch, 1)}" if taken else "end"] += 1
    return dict(places)


def warm_up() -> None:
    """Import all that a launch imports, once for all forks."""
    model = torch.nn.Linear(1, 1)
    state = ckptfmt.State(weights=model, optimizer=torch.optim.AdamW(model.parameters()), config={})
    with ckptfmt.Checkpointer(
        MemoryStore(), state, saving=ckptfmt.Saving(saver="inline")
    ) as checkpointer:
        for _ in checkpointer.steps(1):
            model(torch.ones(1, 1)).sum().backward()
            state.optimizer.step()  # type: ignore[attr-defined]


def main(folder: Path, cells: list[dict[str, Any]]) -> None:
    """Play cells, and print a line for each."""
    warm_up()
    calm_runs: dict[str, Path] = {}
    for number, cell in enumerate(cells):
        key = json.dumps([cell[name] for name in ("kind", "workers", "loop", "processes")])
        if key not in calm_runs:
            calm_runs[key] = folder / f"calm-{number}"
            calm_runs[key].mkdir(parents=True)
            statuses = play(cell, calm_runs[key], (None,))
            if any(statuses):
                log = (calm_runs[key] / "log-1-0").read_text()[-2000:]
                sys.stdout.write(json.dumps([cell, [log], {}]) + "\n")
                continue
        here = folder / f"disturbed-{number}"
        here.mkdir()
        found = judge(cell, calm_runs[key], here, play(cell, here, (*ends_of(cell), None)))
        resumes = {} if found else resumes_of(cell, here)
        sys.stdout.write(json.dumps([cell, found, resumes]) + "\n")
        sys.stdout.flush()
        if not found:
            shutil.rmtree(here)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
