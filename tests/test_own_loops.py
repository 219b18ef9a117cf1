"""Loops that aren't `steps`: a context around each step, a callback after it, saves by a count of one's own."""

from __future__ import annotations

import itertools
import logging
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

import ckptfmt
from ckptfmt.checkpointer import Checkpointer
from ckptfmt.errors import CkptError, Code
from ckptfmt.store.memory import MemoryStore
from tests.builders import code_of
from tests.test_checkpointer import committed
from tests.test_group import Allgather, run_writers
from tests.tiny import Tiny

Loop = Callable[[Checkpointer, Tiny, int], None]


def by_steps(checkpointer: Checkpointer, run: Tiny, total: int) -> None:
    batches = run.batches()
    for step in checkpointer.steps(total):
        run.train(step, next(batches))


def by_context(checkpointer: Checkpointer, run: Tiny, total: int) -> None:
    batches = run.batches()
    for step in range(checkpointer.step, total):
        with checkpointer.training_step() as number:
            assert number == step
            run.train(step, next(batches))
    checkpointer.save()


def by_context_and_batches_outside(checkpointer: Checkpointer, run: Tiny, total: int) -> None:
    batches = run.batches()
    checkpointer.restore_rng()
    for step in range(checkpointer.step, total):
        batch = next(batches)
        with checkpointer.training_step():
            run.train(step, batch)
    checkpointer.save()


def by_callback(checkpointer: Checkpointer, run: Tiny, total: int) -> None:
    """A framework counts, and calls after each of its batches, whether or not that ended a step."""
    batches = run.batches()
    checkpointer.restore_rng()
    for step in range(checkpointer.step, total):
        checkpointer.end_step(step)
        run.train(step, next(batches))
        checkpointer.end_step(step + 1)
    checkpointer.save()


def by_saves(checkpointer: Checkpointer, run: Tiny, total: int) -> None:
    batches = run.batches()
    checkpointer.restore_rng()
    for step in range(checkpointer.step, total):
        run.train(step, next(batches))
        if step % 2 == 0 or step + 1 == total:
            checkpointer.save(step=step + 1)


LOOPS = [by_steps, by_context, by_context_and_batches_outside, by_callback, by_saves]


def start(store: Any, run: Tiny, loop: Loop, total: int, **options: Any) -> Checkpointer:
    with Checkpointer(store, run.state, **{"saver": "inline", "every": 3, **options}) as checkpointer:
        loop(checkpointer, run, total)
    return checkpointer


@pytest.fixture(scope="module")
def undisturbed() -> dict[int, str]:
    run = Tiny()
    start(MemoryStore(), run, by_steps, 12)
    return run.losses


@pytest.mark.parametrize("loop", LOOPS)
def test_own_loop_resumes_bit_by_bit(loop: Loop, undisturbed: dict[int, str]) -> None:
    store = MemoryStore()
    first = Tiny()
    start(store, first, loop, 5)
    second = Tiny(1)  # only now: a start seeds the process
    resumed = start(store, second, loop, 12)
    assert (min(second.losses), resumed.step, second.sampler.steps_done) == (5, 12, 12)
    assert first.losses | second.losses == undisturbed
    assert resumed.load_report is not None
    assert (resumed.load_report.claim, resumed.load_report.lowered_by) == ("T1", ())


@pytest.mark.parametrize("loop", LOOPS[:-1])
def test_own_loop_saves_at_the_same_steps(loop: Loop) -> None:
    store = MemoryStore()
    start(store, Tiny(), loop, 8)
    assert committed(store) == [(3, 1), (6, 1), (8, 1)]


def test_loop_without_a_count_is_refused_and_not_saved_as_step_0() -> None:
    """It made one checkpoint, labelled step 0, and every later save returned None."""
    store, run = MemoryStore(), Tiny()
    with Checkpointer(store, run.state, saver="inline") as checkpointer:
        batches = run.batches()
        run.train(0, next(batches))
        with pytest.raises(CkptError, match=r"steps aren't counted.*save\(step=") as caught:
            checkpointer.save()
    assert caught.value.code is Code.ARGUMENT
    assert committed(store) == []


def test_resume_whose_streams_nobody_put_back_is_no_run_to_save() -> None:
    """It logged claim T1, and its dropout was another."""
    store = MemoryStore()
    start(store, Tiny(), by_steps, 3)
    run = Tiny(1)
    with Checkpointer(store, run.state, saver="inline") as checkpointer:
        assert checkpointer.save(step=3) is None
        assert checkpointer.end_step(3) is None
        run.train(3, next(run.batches()))
        for count in (checkpointer.save, checkpointer.end_step):
            with pytest.raises(CkptError, match=r"restore_rng\(\)") as caught:
                count(4)
            assert caught.value.code is Code.ARGUMENT
    assert committed(store) == [(3, 1)]
    assert run.sampler.steps_done == 3


def test_t1_is_claimed_once_the_streams_are_put_back(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    start(store, Tiny(), by_steps, 3)
    with Checkpointer(store, Tiny(1).state, saver="inline") as checkpointer, caplog.at_level(logging.INFO, "ckptfmt"):
        before = checkpointer.load_report
        assert before is not None
        assert (before.claim, before.lowered_by) == ("S1", ("the random-number streams aren't put back yet",))
        assert "T1" not in caplog.text
        checkpointer.restore_rng()
        assert checkpointer.load_report is not None
        assert checkpointer.load_report.claim == "T1"
        assert "claim T1" in caplog.text


@pytest.mark.parametrize("step", [2, -1, True, 1.5, "3", None])
def test_count_that_goes_back_or_is_none_is_refused(step: Any) -> None:
    store = MemoryStore()
    start(store, Tiny(), by_steps, 3)
    with Checkpointer(store, Tiny(1).state, saver="inline") as checkpointer:
        checkpointer.restore_rng()
        checkpointer.end_step(3)
        assert code_of(lambda: checkpointer.end_step(step)) == Code.ARGUMENT
        if step is not None:
            assert code_of(lambda: checkpointer.save(step=step)) == Code.ARGUMENT
        assert checkpointer.step == 3


def test_step_that_an_exception_ends_is_none() -> None:
    store, run = MemoryStore(), Tiny()
    with Checkpointer(store, run.state, saver="inline") as checkpointer:
        batches = run.batches()
        with checkpointer.training_step():
            run.train(0, next(batches))
        with pytest.raises(ZeroDivisionError), checkpointer.training_step():
            raise ZeroDivisionError
        assert (checkpointer.step, run.sampler.steps_done) == (1, 1)
        with pytest.raises(CkptError, match="half-way") as caught:
            checkpointer.save()
        assert caught.value.code is Code.ARGUMENT
        assert checkpointer.save(step=1) is not None
    assert committed(store) == [(1, 1)]


def test_counts_within_a_step_are_refused() -> None:
    with Checkpointer(MemoryStore(), Tiny().state, saver="inline") as checkpointer:
        for _ in checkpointer.steps(1):
            assert code_of(lambda: checkpointer.save(step=1)) == Code.ARGUMENT
            assert code_of(lambda: checkpointer.end_step(1)) == Code.ARGUMENT
            assert code_of(lambda: checkpointer.training_step().__enter__()) == Code.ARGUMENT
            assert checkpointer.save() is None
        assert checkpointer.step == 1


def test_save_within_the_context_is_taken_when_the_step_is_over() -> None:
    store = MemoryStore()
    with Checkpointer(store, Tiny().state, saver="inline") as checkpointer:
        for step in range(3):
            with checkpointer.training_step():
                if step == 1:
                    assert checkpointer.save() is None
    assert committed(store) == [(2, 1)]


def test_count_with_gaps_saves_where_it_passes_what_is_due() -> None:
    store = MemoryStore()
    with Checkpointer(store, ckptfmt.State(weights={"w": 1}), saver="inline", every=10) as checkpointer:
        saves = [checkpointer.end_step(step) for step in (4, 8, 12, 16, 20, 24)]
    assert [handle.step for handle in saves if handle is not None] == [12, 20]
    assert committed(store) == [(12, 1), (20, 1)]


def test_batches_of_which_a_step_takes_several_are_not_its_count() -> None:
    """Gradient accumulation out of a sampler of micro-batches: the cursor would be ever further behind."""
    run = Tiny()
    with Checkpointer(MemoryStore(), run.state, saver="inline") as checkpointer:
        order = iter(run.sampler)

        def accumulate() -> None:
            for step in range(1, 1000):
                list(itertools.islice(order, 4))
                checkpointer.end_step(step)

        with pytest.raises(CkptError, match="global_batch") as caught:
            accumulate()
    assert caught.value.code is Code.ARGUMENT


def test_steps_whose_batches_nobody_fetched_are_not_counted() -> None:
    """A sampler for evaluation, in the same state, isn't trained by each step."""
    run = Tiny()
    with Checkpointer(MemoryStore(), run.state, saver="inline") as checkpointer:
        next(iter(run.sampler))
        checkpointer.end_step(1)
        with pytest.raises(CkptError, match="2 steps are said to be done, and the batches of 1 were fetched") as caught:
            checkpointer.save(step=2)
    assert caught.value.code is Code.ARGUMENT


@pytest.mark.parametrize("how", ["context", "callback"])
def test_signal_saves_the_step_and_says_stopped(how: str) -> None:
    store = MemoryStore()
    with Checkpointer(store, Tiny().state, saver="inline", stop_on=[signal.SIGUSR1]) as checkpointer:
        checkpointer.restore_rng()
        for step in range(10):
            if step == 2:
                os.kill(os.getpid(), signal.SIGUSR1)
            if how == "callback":
                checkpointer.end_step(step + 1)
            else:
                with checkpointer.training_step():
                    pass
            if checkpointer.stopped:
                break
        assert checkpointer.step == 3
        checkpointer.end_step(4)  # who goes on all the same isn't saved at each step from now on
    assert committed(store) == [(3, 1)]


@pytest.mark.parametrize("how", ["save", "callback"])
def test_writers_that_count_differently_are_refused_on_all(how: str) -> None:
    """REQ-CMT-001: by name, and nobody waits."""
    store, allgather = MemoryStore(), Allgather(2)

    def body(writer: int) -> Code:
        state = ckptfmt.State(weights={"w": 1})
        agree = allgather.of(writer)
        with Checkpointer(store, state, saver="inline", every=3, writer=(writer, 2), agree=agree) as checkpointer:
            if how == "save":
                checkpointer.save(step=3)
            # The step of one is saved already; that of the other is not.
            count = checkpointer.save if how == "save" else checkpointer.end_step
            with pytest.raises(CkptError) as caught:
                count(3 + writer)
            return caught.value.code

    assert run_writers(2, body) == [Code.WRITERS_DIVERGED, Code.WRITERS_DIVERGED]


def test_count_that_one_writer_refuses_is_refused_on_all() -> None:
    store, allgather = MemoryStore(), Allgather(2)

    def body(writer: int) -> Code:
        state, agree = ckptfmt.State(weights={"w": 1}), allgather.of(writer)
        with Checkpointer(store, state, saver="inline", writer=(writer, 2), agree=agree) as checkpointer:
            checkpointer.save(step=3)
            with pytest.raises(CkptError) as caught:
                checkpointer.save(step=4 - 2 * writer)
            return caught.value.code

    assert run_writers(2, body) == [Code.PEER_FAILED, Code.ARGUMENT]
