"""Plain values as the position in the data: those that stand still, or lie beside a shuffling loader, claim no T1."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import ckptfmt
from ckptfmt.adapters import torch as torch_side
from ckptfmt.checkpointer import Checkpointer
from ckptfmt.store.memory import MemoryStore

#: What a loop does with its data before each step: given the State and the step.
Loop = Callable[[ckptfmt.State, int], None]


def start(store: Any, data: Any, loop: Loop, total: int, *, every: int = 2) -> Checkpointer:
    state = ckptfmt.State(weights={"w": 1}, optimizer={"m": 0}, data=data, config={})
    with Checkpointer(store, state, every=every, saver="inline") as checkpointer:
        for step in checkpointer.steps(total):
            loop(state, step)
    return checkpointer


def claims(
    data: Callable[[], Any], loop: Loop, *, first: int = 4, every: int = 2
) -> tuple[str, str, str]:
    """Return what a training reports, what its resume claims, and why."""
    store = MemoryStore()
    saving = start(store, data(), loop, first, every=every)
    resumed = start(store, data(), loop, first, every=every)
    assert resumed.load_report is not None
    return (
        " ".join(saving.reports),
        resumed.load_report.claim,
        " ".join(resumed.load_report.lowered_by),
    )


def nothing(_state: ckptfmt.State, _step: int) -> None:
    """Train, and leave the position as it is: it is another variable of the program that counts."""


@pytest.fixture(autouse=True)
def no_shuffling_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests' loaders, alive in this process, are none of these trainings'."""
    monkeypatch.setattr(torch_side, "_SHUFFLING", (OwnShuffle,))


class OwnShuffle(torch.utils.data.RandomSampler):
    """The sampler of shuffle=True, known to be of this test."""


def shuffling_loader() -> Any:
    points: Any = torch.arange(8.0)
    return torch.utils.data.DataLoader(points, sampler=OwnShuffle(points))


@pytest.mark.parametrize(
    "data",
    [
        lambda: {"position": 24},
        dict,
        lambda: {"order": "torch.randint"},
        lambda: [1, 2],
        lambda: {"at": np.int64(3), "order": np.arange(5)},
        lambda: {"order": torch.arange(5)},
    ],
)
def test_a_position_that_does_not_move_is_reported_and_claims_no_t1(
    data: Callable[[], Any], caplog: pytest.LogCaptureFixture
) -> None:
    """`data={"position": position}`, whose integer is rebound by the loop: the resume claimed T1."""
    with caplog.at_level(logging.WARNING, "ckptfmt"):
        reported, claim, reasons = claims(data, nothing)
    assert "DATA_UNCHANGED: data is the same at the saves of steps 2 and 4" in reported
    assert "state.data['position'] = position" in reported
    assert "DATA_UNCHANGED" in caplog.text
    assert claim == "S0"
    assert "doesn't move with the training" in reasons


def test_one_save_in_which_nothing_has_moved_claims_no_t1_either() -> None:
    """Whether it is a mistake isn't known yet: the counter of epochs may be of the epoch that ends here."""
    reported, claim, reasons = claims(lambda: {"position": 24}, nothing, first=2)
    assert (reported, claim) == ("", "S0")
    assert "doesn't move with the training" in reasons


def count(state: ckptfmt.State, step: int) -> None:
    position: Any = state.data
    position["position"] = (step + 1) * 8


def replace(state: ckptfmt.State, step: int) -> None:
    state.data = {"position": (step + 1) * 8}


def count_epochs(state: ckptfmt.State, step: int) -> None:
    position: Any = state.data
    position["epoch"] = step // 2


def count_in_an_array(state: ckptfmt.State, step: int) -> None:
    position: Any = state.data
    position["position"][0] = step + 1


@pytest.mark.parametrize(
    ("data", "loop"),
    [
        (lambda: {"position": 0, "name": "books"}, count),
        (lambda: {"position": 0}, replace),
        (lambda: {"epoch": 0}, count_epochs),
        (lambda: {"position": np.zeros(1)}, count_in_an_array),
        (lambda: {"position": torch.zeros(1)}, count_in_an_array),
    ],
)
def test_a_position_that_moves_from_save_to_save_claims_t1(
    data: Callable[[], Any], loop: Loop
) -> None:
    assert claims(data, loop) == ("", "T1", "")


def test_a_counter_of_epochs_with_saves_within_them_claims_no_t1() -> None:
    """From the first such save on, for the rest of the launch."""
    store = MemoryStore()
    saving = start(store, {"epoch": 0}, lambda state, step: count_by(state, step // 5), 12, every=2)
    assert any(
        "DATA_UNCHANGED: data is the same at the saves of steps 2 and 4" in one
        for one in saving.reports
    )
    resumed = start(store, {"epoch": 0}, nothing, 12)
    assert resumed.load_report is not None
    assert resumed.load_report.claim == "S0"
    assert len([one for one in saving.reports if "DATA_UNCHANGED" in one]) == 1


def count_by(state: ckptfmt.State, epoch: int) -> None:
    position: Any = state.data
    position["epoch"] = epoch


def test_plain_values_beside_a_loader_that_shuffles_claim_no_t1() -> None:
    loader = shuffling_loader()
    reported, claim, reasons = claims(lambda: {"position": 0}, count)
    assert "DATA_SHUFFLED" in reported
    assert claim == "S0"
    assert "shuffle=True" in reasons
    del loader


def test_a_sampler_beside_a_loader_that_shuffles_an_evaluation_claims_t1() -> None:
    loader = shuffling_loader()
    store = MemoryStore()

    def run(total: int) -> Checkpointer:
        sampler = ckptfmt.Sampler(40, global_batch=4, worker=(0, 1))
        batches = iter(sampler)

        def take(_state: ckptfmt.State, _step: int) -> None:
            next(batches)

        return start(store, sampler, take, total)

    assert run(4).reports == ()
    report = run(6).load_report
    assert report is not None
    assert report.claim == "T1"
    del loader


def test_a_failed_or_repeated_save_of_one_step_is_no_second_step() -> None:
    store = MemoryStore()
    state = ckptfmt.State(weights={"w": 1}, optimizer={"m": 0}, data={"position": 1}, config={})
    with Checkpointer(store, state, saver="inline") as checkpointer:
        checkpointer.save(step=3)
        assert checkpointer.save(step=3) is None
        assert checkpointer.reports == ()


def test_the_doubt_is_in_the_checkpoint_and_a_later_launch_that_counts_is_free_of_it() -> None:
    store = MemoryStore()
    start(store, {"position": 0}, nothing, 4)
    second = start(store, {"position": 0}, count, 8)
    assert second.reports == ()
    third = start(store, {"position": 0}, count, 8)
    assert third.load_report is not None
    assert third.load_report.claim == "T1"
