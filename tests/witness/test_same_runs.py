"""Runs that are the same are never refuted, whatever a program does with its tensors, steps and observations."""

from __future__ import annotations

import contextlib
import pathlib
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ckptfmt
from ckptfmt.checkpointer import Checkpointer
from ckptfmt.loop.repeated_steps import RepeatedSteps
from ckptfmt.loop.step_log import StepLog
from ckptfmt.run.witness import StepRecord, StepsHeader, steps_path
from ckptfmt_tools.cli.judging import judge

INPUTS: Any = torch.randn(100, 8, generator=torch.Generator().manual_seed(0))


class KilledError(Exception):
    """The end of a launch in the middle of a step."""


class Mean(nn.Module):
    """A module that puts a new tensor into a buffer's place in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, batch: torch.Tensor) -> Any:
        mean: Any = getattr(self, "mean")  # noqa: B009
        self.mean = mean * 0.9 + batch.mean(0) * 0.1
        return self.linear(batch - self.mean)


class Program:
    """A training whose step may be changed by a function of the program and the step."""

    def __init__(self, change: Callable[[Program, int], Any] = lambda *_: None) -> None:
        torch.manual_seed(0)
        self.model: Any = Mean()
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.sampler = ckptfmt.Sampler(100, global_batch=4, seed=0, worker=(0, 1))
        self.average = {
            name: value.detach().clone() for name, value in self.model.named_parameters()
        }
        self.state = ckptfmt.State(
            weights=self.model,
            optimizer=self.optimizer,
            data=self.sampler,
            config={"a": 1},
            extra={"average": self.average},
        )
        self.change = change

    def train(
        self, run: pathlib.Path, upto: int, *, every: int = 10, dies_at: int | None = None
    ) -> Any:
        with (
            contextlib.suppress(KilledError),
            Checkpointer(run, self.state, every=every, saver="inline") as checkpointer,
        ):
            batches = iter(self.sampler)
            while checkpointer.step < upto:
                with checkpointer.training_step() as step:
                    loss = self.model(INPUTS[next(batches)]).square().mean()
                    checkpointer.observe(loss=loss)
                    loss.backward()
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                    self.change(self, step)
                if checkpointer.step % 10 == 0 and dies_at is not None:
                    checkpointer.observe(loss=0.5)  # of an evaluation between steps
                if checkpointer.step == dies_at:
                    raise KilledError
        return checkpointer.load_report


def put_average(program: Program, _step: int) -> None:
    for name, value in program.model.named_parameters():
        program.average[name] = program.average[name] * 0.9 + value.detach() * 0.1


def put_parameter(program: Program, step: int) -> None:
    if step == 12:
        linear, optimizer = program.model.linear, program.optimizer
        before = linear.bias
        linear.bias = nn.Parameter(before.detach() + 1)
        optimizer.param_groups[0]["params"] = [linear.weight, linear.bias]
        optimizer.state[linear.bias] = optimizer.state.pop(before)


@pytest.mark.parametrize(
    "change", [lambda *_: None, put_average, put_parameter], ids=["buffer", "mapping", "parameter"]
)
@pytest.mark.parametrize("every", [10, 3])
def test_tensors_that_are_replaced_in_each_step_are_compared_as_they_are(
    change: Callable[[Program, int], Any], every: int, tmp_path: pathlib.Path
) -> None:
    """Launches look their tensors up at different steps, and may save at different ones."""
    Program(change).train(tmp_path, 40, dies_at=17)
    report = Program(change).train(tmp_path, 20, every=every)
    assert (report.claim, report.evidence, report.verified_steps) == ("T1", "verified", 7)
    assert {"loss", "weights"} <= set(report.compared)


def test_memory_that_a_program_gives_up_is_free(tmp_path: pathlib.Path) -> None:
    """A tensor over an array of numpy keeps the array alive as long as any view of its memory is."""
    arrays: list[weakref.ref[Any]] = []
    alive: list[int] = []

    def move(program: Program, _step: int) -> None:
        alive.append(sum(reference() is not None for reference in arrays))
        for parameter in program.model.parameters():
            array = parameter.detach().numpy().copy()
            arrays.append(weakref.ref(array))
            parameter.data = torch.from_numpy(array)

    Program(move).train(tmp_path, 9)
    assert alive == [0] + [2] * 8


def test_state_of_which_nothing_is_compared_is_not_verified(tmp_path: pathlib.Path) -> None:
    """A run that differs in arrays of numpy alone, and shows no loss."""

    def train(upto: int, factor: float) -> Checkpointer:
        weights = {"w": np.ones(8)}
        sampler = ckptfmt.Sampler(100, global_batch=4, worker=(0, 1))
        state = ckptfmt.State(
            weights=weights, optimizer={"moment": 0}, data=sampler, config={"a": 1}
        )
        with (
            contextlib.suppress(KilledError),
            Checkpointer(tmp_path, state, every=10, saver="inline") as checkpointer,
        ):
            for step in checkpointer.steps(40):
                sampler.indices(step)
                weights["w"] *= factor
                if step == upto:
                    raise KilledError
        return checkpointer

    train(17, 1.01)
    report = train(20, 1.02).load_report
    assert report is not None
    assert (report.claim, report.evidence) == ("T1", "expected")


def test_step_that_is_tried_again_is_observed_once(tmp_path: pathlib.Path) -> None:
    def train(upto: int, *, fails: bool) -> Any:
        program = Program()
        with (
            contextlib.suppress(KilledError),
            Checkpointer(tmp_path, program.state, every=10, saver="inline") as checkpointer,
        ):
            while checkpointer.step < 20:
                for is_again in (False, True):
                    with contextlib.suppress(RuntimeError), checkpointer.training_step() as step:
                        loss = program.model.linear(INPUTS[program.sampler.indices(step)]).mean()
                        checkpointer.observe(loss=loss)
                        if fails and step == 12 and not is_again:
                            raise RuntimeError("no memory")
                        loss.backward()
                        program.optimizer.step()
                        program.optimizer.zero_grad()
                        break
                if checkpointer.step == upto:
                    raise KilledError
        return checkpointer.load_report

    train(17, fails=True)
    report = train(20, fails=False)
    assert (report.claim, report.verified_steps) == ("T1", 7)


def repeated(writer: int, records: list[StepRecord]) -> RepeatedSteps:
    group: Any = SimpleNamespace(writer=writer, writer_count=2)
    launch: Any = SimpleNamespace(run_id="a" * 32, launch=2, resume_from=None)
    found = RepeatedSteps(group, launch, "T1")
    found.expect(records, HEADER)
    return found


HEADER = StepsHeader(
    run_id="a" * 32,
    launch=1,
    writer=0,
    writer_count=2,
    first_step=0,
    resumed=None,
    expected=None,
    streams=(),
    tensors="",
)


def test_samples_that_another_process_skipped_are_no_refutation() -> None:
    found = repeated(0, [StepRecord(step=21, position=84, samples=1, loss=1, weights=1)])
    found.compare(
        StepRecord(step=21, position=84, samples=1, loss=1, weights=2), HEADER, has_new_skips=True
    )
    assert found.record.verdict == "expected"
    assert not found.reports


def test_cause_on_one_process_stands_above_its_consequence_on_another() -> None:
    both = [repeated(writer, [StepRecord(step=21, batch=1, weights=1)]) for writer in range(2)]
    for writer, found in enumerate(both):
        found.compare(StepRecord(step=21, batch=1 + writer, weights=2), HEADER, has_new_skips=False)
    told = [found.answer() for found in both]
    for found in both:
        found.hear(told)
        assert found.record.difference is not None
        assert (found.record.difference.writer, found.record.difference.what) == (1, "batch")
        assert len(found.reports) == 1


def test_steps_that_were_not_compared_are_not_counted(tmp_path: pathlib.Path) -> None:
    """A loop that counts by tens has one record for ten steps."""

    def train(upto: int, saves: set[int]) -> Checkpointer:
        torch.manual_seed(0)
        model = nn.Linear(8, 8)
        state = ckptfmt.State(weights=model, config={"a": 1})
        with Checkpointer(tmp_path, state, saver="inline") as checkpointer:
            checkpointer.restore_rng()
            for step in range(checkpointer.step + 10, upto + 1, 10):
                with torch.no_grad():
                    model.weight.add_(step)
                if step in saves:
                    checkpointer.save(step=step)
                else:
                    checkpointer.step = step
        return checkpointer

    train(50, {20})
    report = train(60, {60}).load_report
    assert report is not None
    assert (report.evidence, report.verified_steps) == ("verified", 3)


def log(
    folder: pathlib.Path, launch: int, place: tuple[int, int], steps: range, *, value: int = 0
) -> None:
    writer, writer_count = place
    header = StepsHeader(
        run_id="a" * 32,
        launch=launch,
        writer=writer,
        writer_count=writer_count,
        first_step=steps.start - 1,
        resumed=None if launch == 1 else "d",
        expected=None if launch == 1 else "S1",
        streams=("torch.cpu",),
        tensors="",
    )
    records = StepLog(folder / "run-1" / steps_path(launch, writer), header)
    for step in steps:
        records.put(
            StepRecord(
                step=step, samples=step, loss=value + step, weights=value + step, streams=(step,)
            )
        )
    assert records.close(30)


def test_launch_behind_one_of_another_size_is_not_compared_with_the_undisturbed_run(
    tmp_path: pathlib.Path,
) -> None:
    """Two processes, one, and two again: one process sums in another order."""
    for writer in range(2):
        log(tmp_path / "calm", 1, (writer, 2), range(1, 25))
        log(tmp_path / "killed", 1, (writer, 2), range(1, 13))
        log(tmp_path / "killed", 3, (writer, 2), range(16, 25), value=1000)
    log(tmp_path / "killed", 2, (0, 1), range(11, 19), value=1000)
    outcome = judge(tmp_path, [12, 18])
    assert (outcome.verdict, outcome.difference) == ("unknown", None)
