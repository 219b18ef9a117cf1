"""Restore in steps: choose the checkpoint, build what it says, load, put the random-number streams back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ckptfmt
from ckptfmt.checkpointer import Checkpointer
from ckptfmt.documents.run import SAVERS
from ckptfmt.errors import CkptError, Code
from ckptfmt.store.memory import MemoryStore
from tests.builders import code_of
from tests.homes import Home, damage
from tests.interface.test_group import Allgather, run_writers
from tests.loop.test_checkpointer import committed
from tests.tiny import Tiny


def train(store: Any, run: Tiny, total: int, **options: Any) -> Checkpointer:
    with Checkpointer(store, run.state, saver="inline", every=2, **options) as checkpointer:
        batches = run.batches()
        for step in checkpointer.steps(total):
            run.train(step, next(batches))
    return checkpointer


def test_resume_in_steps_is_the_same_run_bit_by_bit(home: Home) -> None:
    """Model, optimizer and iterators come into being one after the other, each once the one before is known."""
    undisturbed, store = Tiny(), home.store()
    train(MemoryStore(), undisturbed, 12)
    first = Tiny()
    train(store, first, 5)
    with Checkpointer(store, saver="inline", every=2) as checkpointer:
        checkpoint = checkpointer.choose()
        assert checkpoint is not None
        assert checkpoint is checkpointer.choose()
        assert (checkpoint.step, checkpoint.leaf("config")) == (5, {"lr": 0.1})
        second = Tiny(1, lr=checkpoint.leaf("config")["lr"])
        assert "0.weight" in checkpoint.weights
        ckptfmt.load(checkpoint.store, ckptfmt.State(weights=second.net))
        saved = torch.from_numpy(checkpoint.weights["0.weight"][...])
        assert torch.equal(second.net[0].weight.detach(), saved)
        report = checkpointer.restore(second.state)
        assert report is not None
        batches = second.batches()
        checkpointer.restore_rng()
        for step in checkpointer.steps(12):
            second.train(step, next(batches))
        assert checkpointer.load_report is not None
        assert checkpointer.load_report.claim == "T1"
    assert first.losses | second.losses == undisturbed.losses


def test_to_choose_changes_nothing_live(home: Home) -> None:
    store = home.store()
    train(store, Tiny(), 4)
    run = Tiny(1)
    before = (
        {name: value.clone() for name, value in run.net.state_dict().items()},
        torch.get_rng_state(),
    )
    checkpointer = Checkpointer(store, run.state, saver="inline")
    assert checkpointer.choose() is not None
    assert all(torch.equal(before[0][name], value) for name, value in run.net.state_dict().items())
    assert torch.equal(before[1], torch.get_rng_state())
    assert (checkpointer.step, run.sampler.steps_done, checkpointer.load_report) == (0, 0, None)
    checkpointer.close()


def test_fresh_start_has_nothing_to_choose(home: Home) -> None:
    store, run = home.store(), Tiny()
    with Checkpointer(store, saver="inline") as checkpointer:
        assert checkpointer.choose() is None
        assert checkpointer.launch is not None
        assert checkpointer.restore(run.state) is None
        batches = run.batches()
        for step in checkpointer.steps(2):
            run.train(step, next(batches))
        assert checkpointer.choose() is None
    assert committed(store) == [(2, 1)]


def test_one_start_takes_one_launch(home: Home) -> None:
    store = home.store()
    train(store, Tiny(), 4)
    with Checkpointer(store, Tiny(1).state, saver="inline") as checkpointer:
        assert checkpointer.choose() is not None
        assert checkpointer.launch is not None
        assert (checkpointer.launch.launch, checkpointer.step) == (2, 4)
    assert store.list_names("launches") == ["0001.json", "0002.json"]


def test_what_was_chosen_is_whole_and_damage_is_passed_over(home: Home) -> None:
    """REQ-RUN-007: before anything is built after it; also that its savers were waited for."""
    store = home.store()
    train(store, Tiny(), 6)
    damage(store, "step-00000006-l0001/weights-")
    with (
        store.hold(f"{SAVERS}/0001-00003-{'a' * 16}"),
        Checkpointer(store, saver="inline", deadline_s=0.02) as checkpointer,
    ):
        checkpoint = checkpointer.choose()
        assert checkpoint is not None
        assert checkpoint.store.name == store.at("step-00000004-l0001").name
        held, damaged = checkpointer.passed_over
    assert held == "the saves of launch 1 (writer 3) weren't committed within 0.01 s"
    assert "step-00000006-l0001" in damaged


def test_all_writers_choose_alike(home: Home) -> None:
    """And take one launch together."""
    store, allgather = home.store(), Allgather(2)
    with Checkpointer(store, ckptfmt.State(weights={"w": 1}), saver="inline") as checkpointer:
        checkpointer.save(step=3)

    def body(writer: int) -> tuple[str, int]:
        with Checkpointer(
            store, saver="inline", writer=(writer, 2), agree=allgather.of(writer)
        ) as checkpointer:
            checkpoint = checkpointer.choose()
            assert checkpoint is not None
            checkpointer.restore(ckptfmt.State(weights={"w": checkpoint.leaf("weights")["w"]}))
            return checkpoint.digest, checkpointer.step

    [(first, step), (second, other)] = run_writers(2, body)
    assert first == second
    assert (step, other) == (3, 3)
    assert len(store.list_names("launches")) == 2


def test_state_that_nobody_gave_is_asked_for_by_name(home: Home) -> None:
    store = home.store()
    checkpointer = Checkpointer(store, saver="inline")
    actions = (
        checkpointer.restore,
        checkpointer.restore_rng,
        checkpointer.prepare,
        lambda: checkpointer.end_step(1),
    )
    for action in actions:
        with pytest.raises(CkptError, match="no state") as caught:
            action()
        assert caught.value.code is Code.ARGUMENT
    assert store.list_names("launches") == []
    state = ckptfmt.State(weights={"w": 1})
    checkpointer.restore(state)
    checkpointer.restore(state)
    assert code_of(lambda: checkpointer.restore(ckptfmt.State(weights={"w": 1}))) == Code.ARGUMENT
    checkpointer.close()


def test_chosen_checkpoint_is_not_asked_for_once_the_run_goes_on(home: Home) -> None:
    """None would say that the run began afresh."""
    store = home.store()
    train(store, Tiny(), 4)
    with Checkpointer(store, Tiny(1).state, saver="inline") as checkpointer:
        checkpointer.restore_rng()
        with pytest.raises(CkptError, match=r"launch\.resume_from") as caught:
            checkpointer.choose()
    assert caught.value.code is Code.ARGUMENT


def test_choice_that_failed_may_be_made_again(home: Home) -> None:
    """Nothing live was changed: unlike a load that failed, it is no reason to start the process again."""
    store = home.store()
    train(store, Tiny(), 2)
    content = damage(store, "step-00000002-l0001/index-", lambda _: b"")
    checkpointer = Checkpointer(store, Tiny(1).state, saver="inline")
    assert code_of(checkpointer.choose) == Code.NO_VALID_CHECKPOINT
    damage(store, "step-00000002-l0001/index-", lambda _: content)
    checkpoint = checkpointer.choose()
    assert checkpoint is not None
    assert checkpoint.step == 2
    checkpointer.restore()
    checkpointer.close()
