"""A run that goes on with something changed isn't the same run: it says what changed, from what to what."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ckptfmt.adapters.data_loaders import ForeignLoader
from ckptfmt.checkpointer import Checkpointer
from ckptfmt.errors import Code
from ckptfmt.loading.load_report import LoadReport
from ckptfmt.state import State
from ckptfmt.store.memory import MemoryStore
from tests.builders import code_of
from tests.interface.test_group import Allgather, run_writers
from tests.tiny import Tiny

FIRST, TOTAL = 4, 8


def train(store: Any, run: Tiny, total: int, **options: Any) -> LoadReport | None:
    with Checkpointer(store, run.state, saver="inline", **options) as checkpointer:
        batches = run.batches()
        for step in checkpointer.steps(total):
            run.train(step, next(batches))
        return checkpointer.load_report


def go_on(
    now: dict[str, Any], *, before: dict[str, Any] | None = None, **options: Any
) -> tuple[LoadReport, bool]:
    """Resume a run with other arguments; return the report, and whether the losses are those of an undisturbed run."""
    first = before or {}
    whole = Tiny(**first)
    train(MemoryStore(), whole, TOTAL)
    store = MemoryStore()
    train(store, Tiny(**first), FIRST)
    run = Tiny(1, **now)
    report = train(store, run, TOTAL, **options)
    assert report is not None
    return report, all(whole.losses[step] == run.losses[step] for step in range(FIRST, TOTAL))


@pytest.mark.parametrize("scheduler", [False, True])
def test_nothing_changed_is_t1_and_nothing_is_said(
    *, scheduler: bool, caplog: pytest.LogCaptureFixture
) -> None:
    same = {"scheduler": scheduler}
    report, is_same = go_on(same, before=same)
    assert (report.claim, report.lowered_by, is_same) == ("T1", (), True)
    assert report.notes == ()
    assert [
        record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING
    ] == []


def test_another_global_batch_is_another_training(caplog: pytest.LogCaptureFixture) -> None:
    """It claimed T1."""
    report, is_same = go_on({"global_batch": 8})
    assert not is_same
    assert (report.claim, report.lowered_by) == (
        "S1",
        ("data: plan/global_batch: saved 4, here 8",),
    )
    assert "claim S1 expected, lowered by: data: plan/global_batch: saved 4, here 8" in caplog.text


def test_config_that_differs_lowers_the_claim_and_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It was collected, and never shown."""
    report, _ = go_on(
        {"config": {"accumulate": 2, "out": "b"}}, before={"config": {"accumulate": 1, "out": "a"}}
    )
    assert report.claim == "S1"
    assert report.lowered_by == (
        "config:accumulate: saved 1, here 2",
        "config:out: saved 'a', here 'b'",
    )
    assert "claim S1 expected; config: accumulate 1 -> 2; out 'a' -> 'b'" in caplog.text


def test_config_that_the_caller_calls_harmless_lowers_nothing() -> None:
    now = {"config": {"lr": 0.1, "log": {"every": 5, "dir": "b"}}, "harmless": ("log",)}
    report, is_same = go_on(now, before={"config": {"lr": 0.1, "log": {"every": 1, "dir": "a"}}})
    assert (report.claim, report.lowered_by, is_same) == ("T1", (), True)
    assert report.config_differences == (("log/every", 1, 5), ("log/dir", "a", "b"))


def test_config_that_is_saved_and_not_given_is_not_compared() -> None:
    store = MemoryStore()
    train(store, Tiny(), FIRST)
    run = Tiny(1)
    run.state.config = None
    report = train(store, run, TOTAL)
    assert report is not None
    assert (report.claim, report.lowered_by) == ("S1", ("not in State: config",))


def test_many_differences_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    before, now = ({"config": {str(key): value for key in range(100)}} for value in (0, 1))
    report, _ = go_on(now, before=before)
    assert len(report.lowered_by) == 21
    assert report.lowered_by[-1] == "config: 80 more values differ"
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) <= 21


def test_learning_rate_that_differs_is_the_saved_one_and_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The saved one won without a word."""
    now: dict[str, Any] = {"lr": 0.01, "config": {"lr": 0.1}}
    report, is_same = go_on(now)
    assert (report.claim, is_same) == ("T1", True)
    assert "lr: 0.01 here, 0.1 as saved" in "\n".join(report.notes)
    assert "lr: 0.01 here, 0.1 as saved" in caplog.text


@pytest.mark.parametrize("override", [("optimizer:group/lr",), ("group/*",), "group/lr"])
def test_learning_rate_that_is_overridden_stays_and_lowers_the_claim(
    override: Any, caplog: pytest.LogCaptureFixture
) -> None:
    now: dict[str, Any] = {"lr": 0.01, "config": {"lr": 0.1}}
    report, is_same = go_on(now, override=override)
    assert (report.claim, is_same) == ("S1", False)
    assert "lr: saved 0.1, here 0.01 stays: override=" in "\n".join(report.lowered_by)
    assert "lr: saved 0.1, here 0.01 stays: override=" in caplog.text


def test_scheduler_that_is_overridden_stays() -> None:
    same = {"scheduler": True}
    report, is_same = go_on(
        same, before=same, override=["extra:scheduler", "group/lr", "group/initial_lr"]
    )
    assert (report.claim, is_same) == ("S1", False)
    assert "extra:scheduler stays as it is here: override=" in report.lowered_by


def test_streams_that_are_overridden_stay_and_lower_the_claim() -> None:
    report, is_same = go_on({}, override=["rng:torch.cpu"])
    assert (report.claim, is_same) == ("S1", False)
    assert report.lowered_by == ("rng:torch.cpu stays as it is here: override=",)


class DrawingLoader:
    """A loader as torchdata's: its iterator draws from torch's stream as it is made, its position is a count."""

    def __init__(self) -> None:
        self.count = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        torch.empty((), dtype=torch.int64).random_()
        return self._iterate()

    def _iterate(self) -> Iterator[torch.Tensor]:
        while True:
            self.count += 1
            yield torch.full((4, 4), self.count / 100) + 0.01 * torch.randn(4, 4)

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


@pytest.mark.parametrize("moment", ["before the first step", "within the first step"])
def test_loader_whose_iterator_draws_goes_on_bit_by_bit(moment: str) -> None:
    """Its iterator was made with the first batch, after the streams had been put back."""
    losses: list[dict[int, str]] = []
    for totals in ([TOTAL], [FIRST, TOTAL]):
        store = MemoryStore()
        seen: dict[int, str] = {}
        for number, total in enumerate(totals):
            loader = ForeignLoader(DrawingLoader(), lib="torchdata", worker_count=1)
            run = Tiny(number, data=loader)
            with Checkpointer(store, run.state, saver="inline") as checkpointer:
                batches = iter(loader) if number == 0 or moment == "before the first step" else None
                for step in checkpointer.steps(total):
                    batches = batches or iter(loader)
                    run.train(step, next(batches))
            seen |= run.losses
        losses.append(seen)
    assert checkpointer.load_report is not None
    assert (checkpointer.load_report.claim, checkpointer.load_report.lowered_by) == ("T1", ())
    assert losses[0] == losses[1]


@pytest.fixture
def _forget_compilers() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("_forget_compilers")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("compiles", ["both", "saved", "load", "after the load"])
def test_compiled_here_and_not_there_is_another_run(compiles: str) -> None:
    """A compiled module rounds differently: it claimed T1, and losses differed."""
    store, first = MemoryStore(), Tiny()
    if compiles in ("both", "saved"):
        torch.compile(first.net, backend="eager")
    train(store, first, FIRST)
    if compiles == "saved":
        torch.compiler.reset()
    run = Tiny(1)
    if compiles == "load":
        torch.compile(run.net, backend="eager")
    with Checkpointer(store, run.state, saver="inline") as checkpointer:
        if compiles == "after the load":
            torch.compile(run.net, backend="eager")
        checkpointer.restore_rng()
    report = checkpointer.load_report
    assert report is not None
    assert report.claim == ("T1" if compiles == "both" else "S1")
    assert all(reason.startswith("compile") for reason in report.lowered_by)


def test_flag_that_is_set_after_the_load_lowers_the_claim(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    train(store, Tiny(), FIRST)
    with Checkpointer(store, Tiny(1).state, saver="inline") as checkpointer:
        torch.use_deterministic_algorithms(mode=True)
        try:
            checkpointer.restore_rng()
        finally:
            torch.use_deterministic_algorithms(mode=False)
    assert checkpointer.load_report is not None
    assert checkpointer.load_report.claim == "S1"
    assert "are_deterministic_algorithms_enabled: saved False, here True" in caplog.text


def test_what_lowers_the_claim_of_one_process_lowers_it_on_all() -> None:
    """Topology of the machine is compared by process 0 alone; the other one claimed T1."""
    store = MemoryStore()

    def start(total: int) -> list[Any]:
        allgather = Allgather(2)

        def body(writer: int) -> Any:
            data = {"at": 0}
            state = State(weights={"w": 1}, optimizer={"m": 1}, data=data, config={"a": 1})
            options: dict[str, Any] = {"writer": (writer, 2), "agree": allgather.of(writer)}
            with Checkpointer(store, state, saver="inline", **options) as checkpointer:
                for step in checkpointer.steps(total):
                    data["at"] = step + 1
                return checkpointer.load_report

        return run_writers(2, body)

    start(2)
    thread_count = torch.get_num_threads()
    torch.set_num_threads(thread_count + 1)
    try:
        first, second = start(3)
    finally:
        torch.set_num_threads(thread_count)
    reason = f"num_threads: saved {thread_count}, here {thread_count + 1}"
    assert (first.claim, first.lowered_by) == ("S0", (reason,))
    assert (second.claim, second.lowered_by) == ("S0", (f"process 0: {reason}",))


def test_override_of_what_was_not_saved_is_refused() -> None:
    store = MemoryStore()
    train(store, Tiny(), FIRST)
    run = Tiny(1)
    assert (
        code_of(lambda: train(store, run, TOTAL, override=["group/learning_rate"])) == Code.ARGUMENT
    )
