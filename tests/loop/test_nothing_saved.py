"""A training around which nothing is saved is told so, while it runs and when it ends."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from torch.optim import optimizer as torch_optimizer

import ckptfmt
from ckptfmt.checkpointer import Checkpointer
from ckptfmt.store.memory import MemoryStore
from tests.tiny import Tiny


def told(checkpointer: Checkpointer) -> list[str]:
    return [report for report in checkpointer.reports if report.startswith("NOTHING_SAVED")]


@pytest.mark.parametrize("every", [1, 5])
def test_a_plain_loop_is_told_while_it_runs(every: int, caplog: pytest.LogCaptureFixture) -> None:
    """`with Checkpointer(every=5)` around a loop that calls nothing: it saved nothing, in silence."""
    run = Tiny(worker=(0, 1))
    when: list[int] = []
    with (
        caplog.at_level(logging.WARNING, "ckptfmt"),
        Checkpointer(MemoryStore(), run.state, every=every) as checkpointer,
    ):
        batches = run.batches()
        for step in range(20):
            run.train(step, next(batches))
            if told(checkpointer) and not when:
                when.append(step)
    assert when == [9]
    (report,) = told(checkpointer)
    assert f"no step was counted, so that every={every} saves nothing" in report
    assert "checkpointer.steps(total)" in report
    assert report in caplog.text


@pytest.mark.parametrize("every", [None, "5min", 1000, "auto"])
def test_a_plain_loop_is_told_when_it_ends(every: Any) -> None:
    run = Tiny(worker=(0, 1))
    with Checkpointer(MemoryStore(), run.state, every=every) as checkpointer:
        batches = run.batches()
        for step in range(3):
            run.train(step, next(batches))
        assert told(checkpointer) == []
    (report,) = told(checkpointer)
    assert "3 optimizer steps are done" in report


def test_steps_without_every_are_told_before_their_end(caplog: pytest.LogCaptureFixture) -> None:
    """`every=None` with a long `steps()` saves once, at the end."""
    state = ckptfmt.State(weights={"w": 1})
    with (
        caplog.at_level(logging.WARNING, "ckptfmt"),
        Checkpointer(MemoryStore(), state, saver="inline") as checkpointer,
    ):
        when = [step for step in checkpointer.steps(150) if told(checkpointer)]
    assert when == list(range(100, 150))
    assert "every=None saves at the end of steps()" in caplog.text
    assert len(told(checkpointer)) == 1


def test_counted_steps_that_nobody_saved_are_told_at_the_exit() -> None:
    with Checkpointer(
        MemoryStore(), ckptfmt.State(weights={"w": 1}), saver="inline"
    ) as checkpointer:
        for _ in range(3):
            with checkpointer.training_step():
                pass
    (report,) = told(checkpointer)
    assert "3 steps were counted" in report
    assert "checkpointer.save()" in report


def by_steps(checkpointer: Checkpointer, run: Tiny) -> None:
    batches = run.batches()
    for step in checkpointer.steps(12):
        for _ in range(15):  # an inner optimization of many updates
            run.optimizer.step()
        run.train(step, next(batches))


def by_callback_after_five_updates(checkpointer: Checkpointer, run: Tiny) -> None:
    batches = run.batches()
    for step in range(12):
        for _ in range(4):  # a critic's
            run.optimizer.step()
        run.train(step, next(batches))
        checkpointer.end_step(step + 1)


def by_saves(checkpointer: Checkpointer, run: Tiny) -> None:
    batches = run.batches()
    for step in range(12):
        run.train(step, next(batches))
        if step % 4 == 3:
            checkpointer.save(step=step + 1)


def restores_alone(checkpointer: Checkpointer, run: Tiny) -> None:
    """As an evaluation does, with the constructor of the training."""
    checkpointer.restore()
    run.net(next(run.batches()))


def fails(checkpointer: Checkpointer, run: Tiny) -> None:
    """The error says what went wrong."""
    assert checkpointer.step == 0
    run.train(0, next(run.batches()))
    raise ZeroDivisionError


RIGHT: list[tuple[Callable[[Checkpointer, Tiny], None], Any]] = [
    (by_steps, 1),
    (by_steps, "1h"),
    (by_steps, None),
    (by_callback_after_five_updates, 1),
    (by_saves, None),
    (by_saves, 5),
    (restores_alone, 5),
    (fails, 5),
]


@pytest.mark.parametrize(("loop", "every"), RIGHT)
def test_trainings_that_are_saved_are_told_nothing(loop: Any, every: Any) -> None:
    run = Tiny(worker=(0, 1))
    checkpointer = Checkpointer(MemoryStore(), run.state, every=every, saver="inline")
    try:
        with checkpointer:
            loop(checkpointer, run)
    except ZeroDivisionError:
        pass
    assert told(checkpointer) == []


def test_the_hook_of_optimizers_ends_with_the_first_step_and_with_the_checkpointer() -> None:
    hooks = torch_optimizer._global_optimizer_post_hooks
    before = len(hooks)
    for loop in (restores_alone, by_saves):
        run = Tiny(worker=(0, 1))
        with Checkpointer(MemoryStore(), run.state, saver="inline") as checkpointer:
            assert len(hooks) == before + 1
            loop(checkpointer, run)
        assert len(hooks) == before
    run = Tiny(worker=(0, 1))
    left = Checkpointer(MemoryStore(), run.state, saver="inline")
    left.restore()
    assert len(hooks) == before + 1
    del left
    assert len(hooks) == before


def test_a_program_without_torch_that_counts_nothing_is_told_at_the_exit(tmp_path: Any) -> None:
    program = (
        "import sys, numpy, ckptfmt\n"
        "state = ckptfmt.State(weights={'w': numpy.zeros(3)})\n"
        f"with ckptfmt.Checkpointer({str(tmp_path / 'run')!r}, state, every=5):\n"
        "    pass\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert "NOTHING_SAVED: the checkpointer was closed, and no step was counted" in done.stderr
