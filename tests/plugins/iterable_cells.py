"""Trainings on iterable data sets, killed and undisturbed; run by test_iterables.py.

A process of its own, which forks each launch: a launch costs no import of torch and datasets.

Usage: iterable_cells.py FOLDER CELLS

CELLS is a list of cells in JSON. The output is a line of JSON for each cell: its differences from
the undisturbed training, the claims of its resumes, and the reports of its first launch.
"""

import collections
import dataclasses
import hashlib
import io
import itertools
import json
import os
import random
import signal
import sys
import tarfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
import webdataset
from torchdata import nodes
from torchdata.stateful_dataloader import StatefulDataLoader

import ckptfmt
from ckptfmt.store.memory import MemoryStore

DataLoader: Any = torch.utils.data.DataLoader
SAMPLES = 24
BATCH = 4
EPOCHS = 3
#: A save every two steps; an epoch has six.
EVERY = 2
#: Steps after which a launch is killed: within the first epoch, after the save at its end, within
#: the second.
ENDS = (3, 7, 9)
STEPS = EPOCHS * SAMPLES // BATCH


class Numbers(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    """Numbers with noise, divided between the worker processes."""

    is_noisy = False

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        first, stride = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for number in range(first, SAMPLES, stride):
            yield {"x": number + (int(torch.randint(1000, ())) * 100 if self.is_noisy else 0)}


class ExactNumbers(Numbers):
    """Numbers that declare their order."""

    ckptfmt_exact = True


class NoisyNumbers(ExactNumbers):
    """Numbers with random numbers of the process that reads them."""

    is_noisy = True


class Positioned(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    """Numbers in another order in each epoch, with a position in the state_dict."""

    def __init__(self):
        self.epoch = self.at = 0

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        first, stride = (0, 1) if worker is None else (worker.id, worker.num_workers)
        order = random.Random(self.epoch).sample(range(SAMPLES), SAMPLES)[first::stride]
        while self.at < len(order):
            self.at += 1
            yield {"x": order[self.at - 1]}
        self.epoch += 1
        self.at = 0

    def state_dict(self):
        return {"epoch": self.epoch, "at": self.at}

    def load_state_dict(self, state):
        self.epoch = state["epoch"]
        self.at = state["at"]


def write_files(folder: Path) -> None:
    """Write the samples as four JSON files and four tar files."""
    folder.mkdir()
    for shard in range(4):
        numbers = range(shard * 6, shard * 6 + 6)
        lines = "".join(json.dumps({"x": number}) + "\n" for number in numbers)
        (folder / f"{shard}.jsonl").write_text(lines)
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for number in numbers:
                content = json.dumps(number).encode()
                entry = tarfile.TarInfo(f"{number:03}.json")
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))


def plus_hundred(sample):
    return {"x": sample["x"] + 100}


def make_web(files: Path) -> Any:
    urls = [str(files / f"{shard}.tar") for shard in range(4)]
    web = webdataset.WebDataset(urls, shardshuffle=False).decode().to_tuple("json")
    return web.map(lambda sample: {"x": sample[0]})


def load_files(files: Path) -> Any:
    paths = [str(files / f"{shard}.jsonl") for shard in range(4)]
    return datasets.load_dataset("json", data_files=paths, split="train", streaming=True)


def make_rows() -> Any:
    return datasets.Dataset.from_dict({"x": list(range(SAMPLES))}).to_iterable_dataset(num_shards=4)


#: Data sets, as programs make them from the folder with the files.
SETS: dict[str, Any] = {
    "numbers": lambda _: Numbers(),
    "exact numbers": lambda _: ExactNumbers(),
    "noisy numbers": lambda _: NoisyNumbers(),
    "positioned": lambda _: Positioned(),
    "webdataset": make_web,
    "files": load_files,
    "rows": lambda _: make_rows(),
    "batched map": lambda _: make_rows().map(plus_hundred_each, batched=True, batch_size=5),
    "arrow map": lambda _: (
        make_rows()
        .with_format("arrow")
        .map(lambda table: table, batched=True, batch_size=5)
        .with_format("torch")
    ),
    "shards": lambda files: load_files(files).map(plus_hundred).shuffle(seed=3, buffer_size=1),
    "row shards": lambda _: make_rows().shuffle(seed=3, buffer_size=1),
    "buffer": lambda _: make_rows().shuffle(seed=3, buffer_size=8),
    "unseeded": lambda _: make_rows().shuffle(buffer_size=1),
}


def plus_hundred_each(samples):
    return {"x": [number + 100 for number in samples["x"]]}


def make_loader(cell: dict[str, Any], files: Path) -> tuple[Any, Any, Any]:
    """Return the value for State(data=), the object of the loop, and the data set."""
    if cell["loader"] == "nodes":
        source = nodes.SamplerWrapper(torch.utils.data.SequentialSampler(range(SAMPLES)))
        data = None
        if cell["kind"] == "wrapper":
            source = nodes.IterableWrapper(range(SAMPLES))
        if cell["kind"] in SETS:
            data = SETS[cell["kind"]](files)
            source = nodes.IterableWrapper(data)
        rows = nodes.Mapper(source, lambda row: row if isinstance(row, dict) else {"x": row})
        batches = nodes.Batcher(rows, BATCH)
        if cell["workers"]:
            batches = nodes.ParallelMapper(batches, list, num_workers=2, method="thread")
        collated = nodes.Mapper(batches, torch.utils.data.default_collate)
        loader = nodes.Loader(nodes.Prefetcher(collated, 2))
        return loader, loader, data
    data = SETS[cell["kind"]](files)
    for name, value in cell.get("set", {}).items():
        setattr(data, name, value)
    options: dict[str, Any] = {"batch_size": BATCH, "num_workers": cell["workers"]}
    if cell.get("persistent"):
        options["persistent_workers"] = True
    match cell["loader"]:
        case "stateful":
            loader = StatefulDataLoader(data, **options)
        case "plain":
            loader = DataLoader(data, **options)
        case "web":
            web = webdataset.WebLoader(data, **options)
            return web.pipeline[0], web, data
        case "alone":
            return data, data.batch(BATCH) if cell.get("batch") else data, data
    return loader, loader, data


def batches_of(cell: dict[str, Any], loader: Any, data: Any) -> Any:
    """Yield batches, one epoch after the other."""
    while True:
        if cell["loader"] == "alone":
            yield from group(loader)
        else:
            yield from loader
        if cell["loop"] == "set_epoch":
            data.set_epoch(data.epoch + 1)


def group(samples: Any) -> Any:
    """Yield batches of an iterable of samples."""
    samples = iter(samples)
    while rows := list(itertools.islice(samples, BATCH)):
        yield {"x": torch.tensor([row["x"] for row in rows])}


def train(cell: dict[str, Any], folder: Path, launch: int, end: int | None) -> None:
    """Be one launch.

    Args:
        cell: the cell.
        folder: place of the run and the journals.
        launch: number of the launch.
        end: number of steps after which the launch is killed; None to the end.
    """
    torch.set_num_threads(1)
    seed = 7 if launch == 1 else launch * 100  # a resumed launch begins anywhere
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - the framework's signature
    value, loader, data = make_loader(cell, folder.parent.parent / "files")
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if cell.get("lose"):
        value = None
    state = ckptfmt.State(weights=model, optimizer=optimizer, data=value, config={"width": 8})
    journal = (folder / f"journal-{launch}").open("w")

    def learn(step: int, batch: Any) -> None:
        numbers = batch["x"]
        loss = model(numbers.float().repeat(4, 1).T.contiguous() / 50).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        content = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
        journal.write(
            json.dumps([step + 1, numbers.tolist(), hashlib.blake2b(content).hexdigest()[:16]])
            + "\n"
        )
        journal.flush()
        if step + 1 == end:
            os.kill(os.getpid(), signal.SIGKILL)

    every = None if cell["loop"] == "after" else EVERY
    progress = {"epoch": 0}
    if cell["loop"] == "after":
        state.extra = {"progress": progress}
    loop = LOOPS.get(cell["loop"], loop_over_steps)
    with ckptfmt.Checkpointer(folder / "run", state, every=every, saver="inline") as checkpointer:
        loop(Training(cell, checkpointer, loader, data, learn, progress))
        report = checkpointer.load_report
        told = [None if report is None else [report.claim, report.lowered_by], checkpointer.reports]
    (folder / f"told-{launch}").write_text(json.dumps(told))


@dataclasses.dataclass
class Training:
    """What a loop needs."""

    cell: dict[str, Any]
    checkpointer: ckptfmt.Checkpointer
    loader: Any
    data: Any
    learn: Callable[[int, Any], None]
    progress: dict[str, int]


def loop_over_steps(training: Training) -> None:
    batches = batches_of(training.cell, training.loader, training.data)
    for step in training.checkpointer.steps(STEPS):
        training.learn(step, next(batches))


def loop_over_epochs(training: Training) -> None:
    for epoch in training.checkpointer.epochs(EPOCHS):
        if hasattr(training.data, "set_epoch"):
            training.data.set_epoch(epoch)
        for batch in training.loader:
            training.learn(training.checkpointer.step, batch)


def loop_over_a_range(training: Training) -> None:
    training.checkpointer.restore()
    for epoch in range(training.data.epoch, EPOCHS):
        training.data.set_epoch(epoch)
        batches = iter(training.loader)
        training.checkpointer.restore_rng()
        for batch in batches:
            with training.checkpointer.training_step() as step:
                training.learn(step, batch)


def save_after_epochs(training: Training) -> None:
    training.checkpointer.restore_rng()
    while training.progress["epoch"] < EPOCHS:
        if training.cell.get("numbered"):
            training.data.set_epoch(training.progress["epoch"])
        for batch in training.loader:
            with training.checkpointer.training_step() as step:
                training.learn(step, batch)
        training.progress["epoch"] += 1
        training.checkpointer.save()


LOOPS = {"epochs": loop_over_epochs, "range": loop_over_a_range, "after": save_after_epochs}


def launch_once(cell: dict[str, Any], folder: Path, launch: int, end: int | None) -> str:
    """Fork a launch, and return what went wrong."""
    log = folder / f"log-{launch}"
    pid = os.fork()
    if not pid:
        code = 1
        try:
            with log.open("w") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            signal.alarm(20)
            train(cell, folder, launch, end)
            code = 0
        except BaseException:  # noqa: BLE001 - the parent reads the log
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    if code == (0 if end is None else -signal.SIGKILL):
        return ""
    lines = log.read_text().strip().splitlines()
    return f"launch {launch} ended with {code}: {lines[-1][:600] if lines else ''}"


def play(cell: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the differences between a killed training and an undisturbed one."""
    places = {}
    all_ends = (7, 13) if cell["loop"] == "after" else ENDS
    for name, ends in (("right", (None,)), ("killed", (*all_ends, None))):
        places[name] = place = folder / name
        place.mkdir(parents=True)
        for launch, end in enumerate(ends, 1):
            if fault := launch_once(cell, place, launch, end):
                return {"wrong": [f"{name}: {fault}"], "claim": ["none"], "reports": []}
    right = {row[0]: row for row in read(places["right"], 1)}
    wrong = [] if sorted(right) == list(range(1, STEPS + 1)) else [f"steps {sorted(right)}"]
    begins = []
    done: collections.Counter[int] = collections.Counter()
    for launch in range(1, len(all_ends) + 2):
        rows = read(places["killed"], launch)
        begins.append(rows[0][0] if rows else None)
        done.update(row[0] for row in rows)
        wrong += [
            f"launch {launch}, step {row[0]}: {row[1:]}, not {right.get(row[0], [0])[1:]}"
            for row in rows
            if row != right.get(row[0])
        ]
    wrong += [f"step {step} is missing" for step in right if not done[step]]
    if begins != ([1, 7, 13] if cell["loop"] == "after" else [1, 3, 7, 9]):
        wrong.append(f"the launches began at the steps {begins}")
    claim, _ = json.loads((places["killed"] / f"told-{len(all_ends) + 1}").read_text())
    _, reports = json.loads((places["right"] / "told-1").read_text())
    return {"wrong": wrong, "claim": claim, "reports": reports}


def read(place: Path, launch: int) -> list[Any]:
    return [json.loads(line) for line in (place / f"journal-{launch}").read_text().splitlines()]


def warm_up() -> None:
    """Import all that a launch imports, once for all forks."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    state = ckptfmt.State(weights=model, optimizer=optimizer, config={})
    with ckptfmt.Checkpointer(MemoryStore(), state, saver="inline") as checkpointer:
        for _ in checkpointer.steps(1):
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()


def main(folder: Path, cells: list[dict[str, Any]]) -> None:
    torch.set_num_threads(1)
    datasets.disable_progress_bars()
    warm_up()
    write_files(folder / "files")
    for number, cell in enumerate(cells):
        sys.stdout.write(json.dumps([cell, play(cell, folder / str(number))]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
