"""Loops over epochs of a plain DataLoader: killed or stopped anywhere, and gone on with bit for bit."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfmt
from ckptfmt.errors import CkptError, Code
from ckptfmt.store.memory import MemoryStore
from tests.house.sources import ROOT
from tests.loop.epoch_loops import misread

AXES: dict[str, tuple[Any, ...]] = {
    "kind": (
        "shuffle",
        "sequential",
        "generator",
        "distributed",
        "weighted",
        "own sampler",
        "own batches",
    ),
    "workers": ("0", "2", "persistent"),
    "how": ("killed", "stopped"),
    "loop": ("epochs", "own"),
    "processes": (1, 2),
}
PRODUCT = [dict(zip(AXES, one, strict=True)) for one in itertools.product(*AXES.values())]


def pairs_of(cell: dict[str, Any]) -> set[Any]:
    return set(itertools.combinations(cell.items(), 2))


#: Number of cells in `make test`. All pairs of values need twice as many.
SAMPLE = 11


def pairwise() -> list[dict[str, Any]]:
    """Return the cells with most pairs of values of two axes; the same cells each time."""
    left = set().union(*map(pairs_of, PRODUCT))
    cells = random.Random(0).sample(PRODUCT, len(PRODUCT))
    chosen: list[dict[str, Any]] = []
    while left and len(chosen) < SAMPLE:
        best = max(cells, key=lambda cell: (len(pairs_of(cell) & left), -cell["processes"]))
        chosen.append(best)
        left -= pairs_of(best)
    return chosen


def play(folder: Path, cells: list[dict[str, Any]]) -> list[Any]:
    """Return each cell that differs from its undisturbed training, with the differences.

    Each cell has a resume within the first epoch, within a later epoch and at the end of an epoch;
    the clock decides at which step two processes hear of a signal.
    """
    done = subprocess.run(
        [sys.executable, "-m", "tests.loop.epoch_loops", folder, json.dumps(cells)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=3000,
        check=False,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert (len(lines), done.returncode) == (len(cells), 0), done.stderr[-3000:]
    places = {"epoch 0", "epoch 1", "end"}
    for cell, found, resumes in lines:
        if not found and (cell["how"], cell["processes"]) != ("stopped", 2):
            assert resumes.keys() == places, cell
    return [line[:2] for line in lines if line[1]]


@pytest.mark.slow
def test_killed_or_stopped_trainings_go_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    """In an epoch and at the end of one: samples, losses, weights, and no skipped sample is read."""
    assert play(tmp_path, pairwise()) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", AXES["kind"])
def test_all_loaders_loops_and_ends_go_on_as_if_nothing_had_been(tmp_path: Path, kind: str) -> None:
    cells = [{**cell, "loop": loop} for cell in PRODUCT for loop in ("epochs", "own", "steps")
             if cell["kind"] == kind and cell["loop"] == "epochs"]  # fmt: skip
    # The loop of steps ends within an epoch of these loaders, where batches are read ahead.
    if kind in ("own sampler", "own batches"):
        cells = [cell for cell in cells if cell["loop"] != "steps"]
    assert play(tmp_path, cells) == []


@pytest.mark.parametrize(
    ("workers", "reads", "found"),
    [
        ("0", [5, 6], []),
        ("0", [1, 5, 6], ["read and not trained: {1: 1}"]),
        ("0", [5, 6, 7], ["read and not trained: {7: 1}"]),
        ("2", [6, 5, 7], []),
        ("2", [1, 5, 6], ["read and not trained: {1: 1}"]),
        ("2", [5, 6, 9], ["read and not trained: {9: 1}"]),
        ("persistent", [5], ["trained and not read: {6: 1}"]),
    ],
)
def test_a_sample_that_is_read_and_not_trained_is_seen(
    tmp_path: Path, workers: str, reads: list[int], found: list[str]
) -> None:
    """Worker processes may read ahead within the epoch, and no skipped sample."""
    right = {step: [step, step // 4, samples, "", ""]
             for step, samples in enumerate([[0], [1, 2], [5, 6], [7, 8], [9]])}  # fmt: skip
    (tmp_path / "journal-2-0").write_text(json.dumps(right[2]) + "\n")
    (tmp_path / "reads-2-0").write_text("".join(f"{number}\n" for number in reads))
    cell = {"kind": "shuffle", "workers": workers}
    assert misread(cell, tmp_path, 2, 0, right) == found


def test_a_resume_that_begins_the_data_anew_is_seen() -> None:
    """The control: without the loader's position, the samples are other ones."""
    right = train(MemoryStore(), 20)
    for override in (None, "data:*"):
        store = MemoryStore()
        ours = train(store, 7)
        assert ours == right[:7]
        rest = train(store, 20, override=override)
        assert (rest == right[7:]) is (override is None)


def loader_of(count: int = 20, **options: Any) -> Any:
    inputs: Any = torch.arange(float(count)).reshape(-1, 1)
    return torch.utils.data.DataLoader(inputs, **{"batch_size": 2, "shuffle": True, **options})


def train(store: MemoryStore, end: int, *, override: str | None = None) -> list[Any]:
    """Train two epochs of ten steps, or up to a step; return the samples and losses of each step."""
    torch.manual_seed(1)
    loader = loader_of()
    model = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Dropout(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    state = ckptfmt.State(weights=model, optimizer=optimizer, data=loader, config={})
    loading = ckptfmt.Loading(override=(override,) if override else ())
    rows: list[Any] = []
    with ckptfmt.Checkpointer(
        store, state, every=1, loading=loading, saving=ckptfmt.Saving(saver="inline")
    ) as checkpointer:
        for epoch in checkpointer.epochs(2):
            for batch in loader:
                if rows and checkpointer.step == end:
                    return rows
                loss = model(batch).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                rows.append((epoch, checkpointer.step, batch.flatten().tolist(), loss.item().hex()))
    return rows


class Run:
    """A training of steps that do nothing, in a store of its own."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.counter = {"evaluated": 0}

    def start(self, loader: Any, **options: Any) -> Any:
        state = ckptfmt.State(
            weights=torch.nn.Linear(1, 1), data=loader, config={}, extra={"counter": self.counter}
        )
        saving = ckptfmt.Saving(saver="inline")
        return ckptfmt.Checkpointer(self.store, state, saving=saving, **options)


def test_the_end_of_an_epoch_belongs_to_its_last_step() -> None:
    """An evaluation and a scheduler's step are saved with this step, and a resume doesn't repeat them."""
    run = Run()
    seen = []
    for launch in (1, 2):
        run.counter = {"evaluated": 0}
        loader = loader_of(6)
        with run.start(loader, every=3) as checkpointer:
            for epoch in checkpointer.epochs(4):
                for _ in loader:
                    if launch == 1 and checkpointer.step == 6:
                        break
                if launch == 1 and checkpointer.step == 6:
                    break
                run.counter["evaluated"] += 1
                seen.append((launch, epoch, run.counter["evaluated"]))
    assert seen == [(1, 0, 1), (1, 1, 2), (2, 2, 3), (2, 3, 4)]
    with run.start(loader_of(6)) as checkpointer:
        assert (checkpointer.epoch, checkpointer.step) == (4, 12)
        assert list(checkpointer.epochs(4)) == []


def test_an_epoch_that_is_left_early_is_over() -> None:
    run = Run()
    loader = loader_of()
    with run.start(loader, every=2) as checkpointer:
        for _ in checkpointer.epochs(2):
            for number, _ in enumerate(loader):
                if number == 3:
                    break
        assert (checkpointer.step, checkpointer.epoch) == (8, 2)
    with run.start(loader_of()) as checkpointer:
        assert (checkpointer.step, checkpointer.epoch) == (8, 2)


def test_a_look_at_a_batch_before_the_loop_is_no_epoch() -> None:
    """`next(iter(loader))` for the shape of the inputs, at each start."""
    assert epoch_rows(looks=True) == epoch_rows()


def epoch_rows(*, looks: bool = False) -> list[Any]:
    run = Run()
    rows: list[Any] = []
    for end in (5, 13, 30):
        torch.manual_seed(2)
        loader = loader_of()
        with run.start(loader, every=1) as checkpointer:
            if looks and end > 5:
                next(iter(loader))
            for epoch in checkpointer.epochs(3):
                for batch in loader:
                    if checkpointer.step == end:
                        break
                    rows.append((epoch, checkpointer.step, batch.flatten().tolist()))
                if checkpointer.step == end:
                    break
    return rows


def test_an_iterator_that_is_left_behind_a_resume_ends_its_epoch() -> None:
    """`zip` takes a batch of the longer loader before it finds the end of the shorter loader."""
    assert zipped_rows(ends=[8, 16]) == zipped_rows(ends=[16])


def zipped_rows(ends: list[int]) -> dict[int, Any]:
    rows: dict[int, Any] = {}
    store = MemoryStore()
    for end in ends:
        torch.manual_seed(2)
        loaders = [loader_of(14), loader_of(8)]
        state = ckptfmt.State(weights=torch.nn.Linear(1, 1), data=loaders, config={})
        saving = ckptfmt.Saving(saver="inline")
        with ckptfmt.Checkpointer(store, state, every=8, saving=saving) as checkpointer:
            batches = itertools.chain.from_iterable(
                zip(*loaders, strict=False) for _ in itertools.count()
            )
            for step in checkpointer.steps(end):
                rows[step] = [batch.tolist() for batch in next(batches)]
    return rows


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (lambda _: None, "looped over the State's DataLoader 0 times, not once"),
        (lambda loader: [list(loader), list(loader)], "2 times, not once"),
    ],
)
def test_an_epoch_loops_over_the_loader_once(body: Callable[[Any], object], said: str) -> None:
    run = Run()
    loader = loader_of()

    def loop() -> None:
        with run.start(loader) as checkpointer:
            for _ in checkpointer.epochs(2):
                body(loader)

    with pytest.raises(CkptError, match="DataLoader") as caught:
        loop()
    assert caught.value.code == Code.ARGUMENT
    assert said in str(caught.value)


def test_epochs_need_a_loader_and_say_which() -> None:
    for data, said in (
        (None, "the State has 0 DataLoaders"),
        ({"a": loader_of(), "b": loader_of()}, "epochs(total, loader=train_loader)"),
    ):
        checkpointer = ckptfmt.Checkpointer(
            MemoryStore(), ckptfmt.State(weights=torch.nn.Linear(1, 1), data=data)
        )
        with pytest.raises(CkptError) as caught:
            list(checkpointer.epochs(1))
        assert said in str(caught.value)
    two = {"a": loader_of(), "b": loader_of()}
    run = Run()
    with run.start(two) as checkpointer:
        for _ in checkpointer.epochs(1, loader=two["b"]):
            for _ in two["b"]:
                list(two["a"])
    assert checkpointer.step == 10


def test_a_loader_that_no_step_reads_claims_no_t1() -> None:
    run = Run()
    with run.start(loader_of()) as checkpointer:
        for _ in checkpointer.steps(2):
            pass
    with run.start(loader_of()) as checkpointer:
        for _ in checkpointer.steps(3):
            pass
    assert checkpointer.load_report is not None
    assert any("DataLoader in State" in one for one in checkpointer.load_report.lowered_by)


def test_another_number_of_processes_is_refused(tmp_path: Path) -> None:
    """REQ-CUR-023: and `allow` begins the data anew."""
    attempt = ckptfmt.SaveAttempt.begin(step=1, writer_count=2)
    states = [ckptfmt.State(data=loader_of(), rng=False) for _ in range(2)]
    records = [
        attempt.write_part(tmp_path / "c", state, writer=number)
        for number, state in enumerate(states)
    ]
    attempt.commit(tmp_path / "c", records)
    state = ckptfmt.State(data=loader_of(), rng=False)
    with pytest.raises(CkptError) as caught:
        ckptfmt.load(tmp_path / "c", state)
    assert caught.value.code == Code.LOADER_NOT_ELASTIC
    assert "2 workers, and 1 workers load it" in str(caught.value)
    report = ckptfmt.load(tmp_path / "c", state, allow=("loader",))
    assert report.claim == "S0"


@pytest.mark.parametrize("before", [int, lambda: torch.rand(1)], ids=["nothing", "draw"])
def test_the_numbers_of_an_iterator_are_no_change_behind_a_save(
    before: Callable[[], object], tmp_path: Path
) -> None:
    """A resumed run draws the numbers again. Numbers that the program draws before are lost."""
    loader = loader_of(6)
    model = torch.nn.Linear(1, 1)
    state = ckptfmt.State(weights=model, data=loader, config={})
    with ckptfmt.Checkpointer(tmp_path / "run", state, every=3) as checkpointer:
        for _ in checkpointer.epochs(2):
            before()
            for batch in loader:
                model(batch)
    told = "the RNG stream torch.cpu was drawn from between the save of step 3 and the next step"
    assert [report[: len(told)] for report in checkpointer.reports] == [told] * (before is not int)


def one_batch_ahead(loader: Any) -> Any:
    """Yield each batch after the next batch was taken, as a prefetcher does."""
    batches = iter(loader)
    waiting = next(batches)
    for batch in batches:
        yield waiting
        waiting = batch
    yield waiting


def through_epochs(run: Path, loop: Any, *, skips: bool = False, accumulates: int = 1) -> Any:
    """Train two epochs of six batches; return the Checkpointer."""
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    data: Any = torch.arange(12.0)
    loader = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True)
    state = ckptfmt.State(weights=model, optimizer=optimizer, data=loader, config={})
    with ckptfmt.Checkpointer(
        run, state, every=1, saving=ckptfmt.Saving(saver="inline")
    ) as checkpointer:
        for _ in checkpointer.epochs(2):
            for number, batch in enumerate(loop(loader)):
                model(batch[:, None]).sum().backward()
                if (number + 1) % accumulates == 0 and not (skips and number == 0):
                    optimizer.step()
                    optimizer.zero_grad()
    return checkpointer


def test_a_wrapper_that_takes_batches_ahead_is_reported_and_claims_no_t1(tmp_path: Path) -> None:
    checkpointer = through_epochs(tmp_path, one_batch_ahead)
    assert any(report.startswith("LOADER_AHEAD: ") for report in checkpointer.reports)
    lowered = ckptfmt.load(tmp_path, ckptfmt.State(config={}), allow=("unexpected",)).lowered_by
    assert any("takes batches ahead" in reason for reason in lowered)


@pytest.mark.parametrize("options", [{}, {"skips": True}, {"accumulates": 3}])
def test_a_loop_without_look_ahead_is_not_reported(tmp_path: Path, options: Any) -> None:
    checkpointer = through_epochs(tmp_path, iter, **options)
    assert not any(report.startswith("LOADER_AHEAD") for report in checkpointer.reports)
