"""Loops that aren't `steps`: a context around each step, a callback after it, saves by a count of one's own."""

from __future__ import annotations

import itertools
import logging
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import ckptfmt
from ckptfmt.checkpointer import Checkpointer
from ckptfmt.errors import CkptError, Code
from ckptfmt.store.memory import MemoryStore
from tests.builders import code_of
from tests.interface.test_group import Allgather, run_writers
from tests.loop.test_checkpointer import committed
from tests.tiny import Points, Tiny

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


def by_fetching_ahead(checkpointer: Checkpointer, run: Tiny, total: int) -> None:
    """A trainer that fetches the next batch, which draws, before it calls back; a resume fetches it again."""
    batches = run.batches()
    checkpointer.restore_rng()
    batch = next(batches)
    for step in range(checkpointer.step, total):
        run.train(step, batch)
        run.state.rng = ckptfmt.capture_rng()
        batch = next(batches)
        checkpointer.end_step(step + 1)
    checkpointer.save()


LOOPS = [
    by_steps,
    by_context,
    by_context_and_batches_outside,
    by_callback,
    by_fetching_ahead,
    by_saves,
]


def start(store: Any, run: Tiny, loop: Loop, total: int, **options: Any) -> Checkpointer:
    with Checkpointer(
        store, run.state, **{"saver": "inline", "every": 3, **options}
    ) as checkpointer:
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


def test_loop_that_fetches_ahead_and_does_not_capture_the_streams_is_another_run(
    undisturbed: dict[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control."""
    monkeypatch.setattr(ckptfmt, "capture_rng", lambda: None)
    store = MemoryStore()
    first = Tiny()
    start(store, first, by_fetching_ahead, 5)
    second = Tiny(1)
    start(store, second, by_fetching_ahead, 12)
    assert first.losses | second.losses != undisturbed


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
    with (
        Checkpointer(store, Tiny(1).state, saver="inline") as checkpointer,
        caplog.at_level(logging.INFO, "ckptfmt"),
    ):
        before = checkpointer.load_report
        assert before is not None
        assert (before.claim, before.lowered_by) == (
            "S1",
            ("the random-number streams aren't put back yet",),
        )
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
    with Checkpointer(
        store, ckptfmt.State(weights={"w": 1}), saver="inline", every=10
    ) as checkpointer:
        saves = [checkpointer.end_step(step) for step in (4, 8, 12, 16, 20, 24)]
    assert [handle.step for handle in saves if handle is not None] == [12, 20]
    assert committed(store) == [(12, 1), (20, 1)]


def test_loop_that_begins_at_a_step_above_0_has_not_done_those_before() -> None:
    """It took itself for a thousand times as fast as it was, and asked for the time, and for signals, hours later."""
    with Checkpointer(
        MemoryStore(), ckptfmt.State(weights={"w": 1}), saver="inline", every="10s"
    ) as checkpointer:
        began_s = checkpointer._pace.timer.last_s
        checkpointer._pace.clock = lambda: (
            began_s + checkpointer.step - 1000
        )  # a second for each step
        saves = [checkpointer.end_step(step) for step in range(1001, 1101)]
    assert 1010 <= next(handle.step for handle in saves if handle is not None) <= 1012


def test_loop_that_says_where_it_begins_is_not_saved_there() -> None:
    with Checkpointer(
        MemoryStore(), ckptfmt.State(weights={"w": 1}), saver="inline", every=500
    ) as checkpointer:
        checkpointer.step = 1000
        saves = [checkpointer.end_step(step) for step in range(1001, 1501)]
    assert [handle.step for handle in saves if handle is not None] == [1500]


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
        with pytest.raises(CkptError, match="step 1 took 0 batches of the sampler") as caught:
            checkpointer.save(step=2)
    assert caught.value.code is Code.ARGUMENT


@pytest.mark.parametrize("how", ["context", "callback"])
def test_signal_saves_the_step_and_says_stopped(how: str) -> None:
    store = MemoryStore()
    with Checkpointer(
        store, Tiny().state, saver="inline", stop_on=[signal.SIGUSR1]
    ) as checkpointer:
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
        with Checkpointer(
            store, state, saver="inline", every=3, writer=(writer, 2), agree=agree
        ) as checkpointer:
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
        with Checkpointer(
            store, state, saver="inline", writer=(writer, 2), agree=agree
        ) as checkpointer:
            checkpointer.save(step=3)
            with pytest.raises(CkptError) as caught:
                checkpointer.save(step=4 - 2 * writer)
            return caught.value.code

    assert run_writers(2, body) == [Code.PEER_FAILED, Code.ARGUMENT]


class Foreign:
    """A framework's trainer, which calls back: epochs, micro-batches, an evaluation that draws, saves at epochs' ends.

    Args:
        run: what is trained.
        batches_of: makes an epoch's iterator of micro-batches, and is told how many steps of the
            epoch to leave out.
        draws_after_save: it evaluates after the save, and a resume doesn't evaluate again.
        is_undone: what an evaluation drew is undone after it.
        streams_at: "right"; or "late", as where every epoch's iterator is made before the streams
            are put back.
    """

    EPOCH, ACCUMULATED = 5, 2

    def __init__(
        self,
        run: Tiny,
        batches_of: Callable[[Tiny, int, int], Iterator[torch.Tensor]],
        *,
        draws_after_save: bool = False,
        is_undone: bool = False,
        streams_at: str = "right",
    ) -> None:
        self.run, self.batches_of, self.is_undone = run, batches_of, is_undone
        self.draws_after_save, self.streams_at = draws_after_save, streams_at

    def fit(self, checkpointer: Checkpointer, total: int) -> None:
        checkpointer.restore()
        step = checkpointer.step
        while step < total:
            epoch, within = divmod(step, self.EPOCH)
            if within == 0 and self.streams_at == "right":
                checkpointer.restore_rng()  # the undisturbed run saved before it made this epoch's iterator
            batches = self.batches_of(self.run, epoch, within)
            checkpointer.restore_rng()
            while step < min(total, (epoch + 1) * self.EPOCH):
                total_loss = 0.0
                for _ in range(self.ACCUMULATED):
                    loss = self.run.net(next(batches)).square().mean() / self.ACCUMULATED
                    loss.backward()
                    total_loss += loss.item()
                    checkpointer.end_step(
                        step
                    )  # after each micro-batch, with the steps that are done
                self.run.optimizer.step()
                self.run.optimizer.zero_grad()
                self.run.losses[step] = total_loss.hex()
                step += 1
                if not self.draws_after_save:
                    self.evaluate(step)
                checkpointer.end_step(step)
                assert checkpointer.end_step(step) is None  # another of its callbacks says so, too
                if self.draws_after_save:
                    self.evaluate(step)
            checkpointer.save(step=step)  # an epoch's end, or that of the training

    def evaluate(self, step: int) -> None:
        """Every three steps, with an iterator of its own, which draws, and dropout, which draws too."""
        captured = ckptfmt.capture_rng()
        if step % 3 == 0:
            batch = next(iter(torch.utils.data.DataLoader(Points(), batch_size=3, shuffle=True)))
            with torch.no_grad():
                self.run.net(batch)
        if self.is_undone:
            captured.put_back()


def from_sampler(run: Tiny, epoch: int, within: int) -> Iterator[torch.Tensor]:
    """The sampler knows where it stands."""
    del epoch, within
    return run.batches()


def from_own_loader(run: Tiny, epoch: int, within: int) -> Iterator[torch.Tensor]:
    """The framework shuffles by the epoch's number, and fetches what was trained already to leave it out."""
    del run
    data = Points()
    order = torch.utils.data.RandomSampler(data, generator=torch.Generator().manual_seed(epoch))
    batches = iter(torch.utils.data.DataLoader(data, batch_size=3, sampler=order))
    for _ in range(within * Foreign.ACCUMULATED):
        next(batches)  # not lazily: to fetch them draws
    return batches


def start_foreign(
    store: Any, total: int, source: Any, start_number: int = 0, **trainer: Any
) -> Tiny:
    run = Tiny(start_number, micro_batches=Foreign.ACCUMULATED)
    if source is from_own_loader:
        run.state.data = {"framework": 1}
    with Checkpointer(store, run.state, saver="inline", every=2) as checkpointer:
        Foreign(run, source, **trainer).fit(checkpointer, total)
    return run


@pytest.mark.parametrize("source", [from_sampler, from_own_loader])
@pytest.mark.parametrize(
    ("killed_at", "how"),
    [(5, {}), (7, {}), (11, {}), (12, {"draws_after_save": True, "is_undone": True})],
)
def test_foreign_trainer_resumes_bit_by_bit(
    source: Any, killed_at: int, how: dict[str, Any]
) -> None:
    """From an epoch's end (5), and from within an epoch, before an evaluation and after one."""
    undisturbed, store = start_foreign(MemoryStore(), 18, source, **how), MemoryStore()
    first = start_foreign(store, killed_at, source, **how)
    second = start_foreign(store, 18, source, 1, **how)
    assert min(second.losses) == killed_at
    assert first.losses | second.losses == undisturbed.losses


@pytest.mark.parametrize(
    ("killed_at", "wrong"), [(12, {"draws_after_save": True}), (5, {"streams_at": "late"})]
)
def test_foreign_trainer_that_draws_elsewhere_is_another_run(
    killed_at: int, wrong: dict[str, Any]
) -> None:
    """Negative control: an evaluation after the save; streams put back after the iterator that the save preceded."""
    undisturbed, store = start_foreign(MemoryStore(), 18, from_sampler, **wrong), MemoryStore()
    first = start_foreign(store, killed_at, from_sampler, **wrong)
    second = start_foreign(store, 18, from_sampler, 1, **wrong)
    assert first.losses | second.losses != undisturbed.losses
