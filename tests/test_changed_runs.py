"""A run that goes on with something changed isn't the same run: it says what changed, from what to what."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from ckptfmt.checkpointer import Checkpointer
from ckptfmt.errors import Code
from ckptfmt.restore import LoadReport
from ckptfmt.store.memory import MemoryStore
from tests.builders import code_of
from tests.tiny import Tiny

FIRST, TOTAL = 4, 8


def train(store: Any, run: Tiny, total: int, **options: Any) -> LoadReport | None:
    with Checkpointer(store, run.state, saver="inline", **options) as checkpointer:
        batches = run.batches()
        for step in checkpointer.steps(total):
            run.train(step, next(batches))
        return checkpointer.load_report


def go_on(now: dict[str, Any], *, before: dict[str, Any] | None = None, **options: Any) -> tuple[LoadReport, bool]:
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
def test_nothing_changed_is_t1_and_nothing_is_said(*, scheduler: bool, caplog: pytest.LogCaptureFixture) -> None:
    same = {"scheduler": scheduler}
    report, is_same = go_on(same, before=same)
    assert (report.claim, report.lowered_by, is_same) == ("T1", (), True)
    assert report.notes == ()
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_another_global_batch_is_another_training(caplog: pytest.LogCaptureFixture) -> None:
    """It claimed T1."""
    report, is_same = go_on({"global_batch": 8})
    assert not is_same
    assert (report.claim, report.lowered_by) == ("S1", ("data:: plan/global_batch: saved 4, here 8",))
    assert "lowers the claim: data:: plan/global_batch: saved 4, here 8" in caplog.text


def test_config_that_differs_lowers_the_claim_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """It was collected, and never shown."""
    report, _ = go_on({"config": {"accumulate": 2, "out": "b"}}, before={"config": {"accumulate": 1, "out": "a"}})
    assert report.claim == "S1"
    assert report.lowered_by == ("config:accumulate: saved 1, here 2", "config:out: saved 'a', here 'b'")
    assert "config:accumulate: saved 1, here 2" in caplog.text


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
    assert (report.claim, report.lowered_by) == ("S1", ("config isn't compared",))


def test_many_differences_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    before, now = ({"config": {str(key): value for key in range(100)}} for value in (0, 1))
    report, _ = go_on(now, before=before)
    assert len(report.lowered_by) == 21
    assert report.lowered_by[-1] == "config: 80 more values differ"
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) <= 21


def test_learning_rate_that_differs_is_the_saved_one_and_said(caplog: pytest.LogCaptureFixture) -> None:
    """The saved one won without a word."""
    now: dict[str, Any] = {"lr": 0.01, "config": {"lr": 0.1}}
    report, is_same = go_on(now)
    assert (report.claim, is_same) == ("T1", True)
    assert "lr: 0.01 here, 0.1 as saved, which is taken" in "\n".join(report.notes)
    assert "lr: 0.01 here, 0.1 as saved, which is taken" in caplog.text


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
    report, is_same = go_on(same, before=same, override=["optimizer:extra/scheduler", "group/lr", "group/initial_lr"])
    assert (report.claim, is_same) == ("S1", False)
    assert "optimizer:extra/scheduler stays as it is here: override=" in report.lowered_by


def test_streams_that_are_overridden_stay_and_lower_the_claim() -> None:
    report, is_same = go_on({}, override=["rng:torch.cpu"])
    assert (report.claim, is_same) == ("S1", False)
    assert report.lowered_by == ("rng:torch.cpu stays as it is here: override=",)


def test_override_of_what_was_not_saved_is_refused() -> None:
    store = MemoryStore()
    train(store, Tiny(), FIRST)
    run = Tiny(1)
    assert code_of(lambda: train(store, run, TOTAL, override=["group/learning_rate"])) == Code.LEAF_MISSING
