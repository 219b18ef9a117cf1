"""`Checkpointer(rehearse=k)`: steps behind the first save are done twice in one process, and compared."""

from __future__ import annotations

import copy
import logging
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ckptfmt
from ckptfmt.checkpointer import Checkpointer
from ckptfmt.errors import CkptError
from ckptfmt.loop.step_log import read_verdicts
from ckptfmt.store import open_store
from tests.interface.test_group import Allgather, run_writers

INPUTS: Any = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))


class Training:
    """A training whose loop holds an iterator of a loader, with averaged weights beside it.

    Args:
        has_average: whether the averaged weights are in the State.
        workers: the number of the loader's worker processes.
    """

    def __init__(
        self, *, has_average: bool = True, workers: int = 0, worker: tuple[int, int] = (0, 1)
    ) -> None:
        torch.manual_seed(1)
        self.model: Any = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 4))
        self.average = copy.deepcopy(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.sampler = ckptfmt.Sampler(64, global_batch=8, worker=worker)
        self.loader = torch.utils.data.DataLoader(
            INPUTS, batch_sampler=self.sampler, num_workers=workers
        )
        self.state = ckptfmt.State(
            weights={"model": self.model, "average": self.average} if has_average else self.model,
            optimizer=self.optimizer,
            data=self.sampler,
            config={"width": 16},
        )
        self.count = 0

    def step(self, batch: Any) -> Any:
        loss = self.model(batch).square().mean()
        with torch.no_grad():
            for mean, value in zip(self.average.parameters(), self.model.parameters(), strict=True):
                mean.lerp_(value, 0.5)
            loss_of_average = self.average(batch).square().mean()
        (loss + loss_of_average * loss).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.count += 1
        return loss + loss_of_average

    def train(self, run: pathlib.Path, steps: int, **options: Any) -> Checkpointer:
        with Checkpointer(run, self.state, every=5, saver="inline", **options) as checkpointer:
            batches = iter(self.loader)
            for _ in checkpointer.steps(steps):
                checkpointer.observe(loss=self.step(next(batches)))
        return checkpointer

    def weights(self) -> list[bytes]:
        return [value.detach().numpy().tobytes() for value in self.model.parameters()]


def verdict(run: pathlib.Path) -> str:
    return read_verdicts(open_store(run, writable=False))[1].verdict


def test_steps_behind_the_first_save_are_done_twice_and_are_identical(
    tmp_path: pathlib.Path, caplog: Any
) -> None:
    caplog.set_level(logging.INFO, "ckptfmt")
    training = Training()
    checkpointer = training.train(tmp_path / "one", 20, rehearse=3)
    undisturbed = Training()
    undisturbed.train(tmp_path / "other", 20)
    assert (
        "rehearsal: back from step 8 to step 5, to do the steps between again: claim T1 expected"
        in caplog.messages
    )
    assert any(
        text.startswith("steps 6 to 8 done again: identical (samples, 3 RNG")
        for text in caplog.messages
    )
    assert (training.count, undisturbed.count) == (23, 20)
    assert training.weights() == undisturbed.weights()
    assert not checkpointer.reports
    assert verdict(tmp_path / "one") == "verified"
    assert (tmp_path / "one" / "step-00000020-l0001" / "manifest.json").exists()
    resumed = Training().train(
        tmp_path / "one", 25, rehearse=3
    )  # what a kill leaves is compared, and nothing else
    assert resumed.load_report is not None
    assert resumed.load_report.evidence == "expected"


@pytest.mark.parametrize("every", [5, "1h"])
def test_state_outside_of_state_is_found(every: Any, tmp_path: pathlib.Path) -> None:
    training = Training(has_average=False)
    with Checkpointer(
        tmp_path, training.state, every=every, saver="inline", rehearse=2
    ) as checkpointer:
        batches = iter(training.loader)
        for step in checkpointer.steps(9):
            checkpointer.observe(loss=training.step(next(batches)))
            if step == 3 and every == "1h":
                checkpointer.save()
    first = 6 if every == 5 else 5
    (report,) = checkpointer.reports
    assert report.startswith(
        f"NOT the same trajectory: step {first} had the same samples and RNG streams, but its loss"
    )
    assert "a state that isn't in State" in report
    assert verdict(tmp_path) == "refuted"


def fetch_ahead(training: Training, run: pathlib.Path) -> Checkpointer:
    with Checkpointer(run, training.state, every=5, saver="inline", rehearse=2) as checkpointer:
        batches = iter(training.loader)
        batch = next(batches)
        for _ in checkpointer.steps(9):
            training.step(batch)
            batch = next(batches)
    return checkpointer


@pytest.mark.parametrize(
    ("train", "told"),
    [
        (lambda run: Training(workers=1).train(run, 9, rehearse=2), "a batch is fetched ahead"),
        (lambda run: fetch_ahead(Training(), run), "a batch is fetched ahead"),
        (lambda run: Training().train(run, 9, rehearse=2, witness=False), "no step is recorded"),
    ],
    ids=["workers", "ahead", "no witness"],
)
def test_training_that_can_not_go_back_goes_on_and_says_so(
    train: Callable[[pathlib.Path], Checkpointer], told: str, tmp_path: pathlib.Path
) -> None:
    checkpointer = train(tmp_path)
    assert checkpointer.step == 9
    (report,) = [text for text in checkpointer.reports if text.startswith("NOT_REHEARSED: ")]
    assert told in report


def test_save_between_calls_the_rehearsal_off(tmp_path: pathlib.Path) -> None:
    training = Training()
    with Checkpointer(
        tmp_path, training.state, every=5, saver="inline", rehearse=3
    ) as checkpointer:
        for step in checkpointer.steps(12):
            training.step(INPUTS[training.sampler.indices(step)])
            if step == 6:
                checkpointer.save()
    assert training.count == 12
    assert checkpointer.reports == ("NOT_REHEARSED: step 7 was saved before the steps to repeat",)


def test_position_that_no_sampler_holds_is_left_alone(tmp_path: pathlib.Path) -> None:
    """Its value would go back, and a generator that began from the value would not."""
    training = Training()
    training.state.data = position = {"next": 0}
    with Checkpointer(
        tmp_path, training.state, every=5, saver="inline", rehearse=3
    ) as checkpointer:
        for _ in checkpointer.steps(12):
            training.step(INPUTS[torch.arange(position["next"], position["next"] + 8) % 64])
            position["next"] += 8
    assert training.count == 12
    assert any(text.startswith("NOT_REHEARSED: data") for text in checkpointer.reports)


def test_training_that_stops_does_not_go_back(tmp_path: pathlib.Path) -> None:
    training = Training()
    alerts = [None] * 7 + ["bad"] * 99
    triggers = ckptfmt.Triggers("stop", alert=lambda: alerts.pop(0))
    options: Any = {"saver": "inline", "rehearse": 3, "triggers": triggers}
    with Checkpointer(tmp_path, training.state, every=5, **options) as checkpointer:
        for step in checkpointer.steps(20):
            training.step(INPUTS[training.sampler.indices(step)])
    assert checkpointer.stopped
    assert checkpointer.step == training.count


@pytest.mark.parametrize("count", [5, 7, -1])
def test_steps_must_lie_between_two_saves(count: int, tmp_path: pathlib.Path) -> None:
    with pytest.raises(CkptError) as caught:
        Checkpointer(tmp_path, Training().state, every=5, rehearse=count)
    assert caught.value.code == "ARGUMENT"
    assert not list(tmp_path.iterdir())


def test_two_processes_go_back_together(tmp_path: pathlib.Path) -> None:
    """One of them sees another loss the second time. Processes are threads here, whose steps draw no random numbers."""
    gather = Allgather(2)
    trainings = [Training(worker=(number, 2)) for number in range(2)]

    def train(number: int) -> Checkpointer:
        training = trainings[number]
        state, agree = training.state, gather.of(number)
        with Checkpointer(
            tmp_path, state, every=5, saver="inline", writer=(number, 2), agree=agree, rehearse=3
        ) as one:
            for step in one.steps(11):
                training.sampler.indices(step)
                training.count += 1
                one.observe(loss=float(training.count if number and step == 6 else 0))
        return one

    checkpointers = run_writers(2, train)
    assert verdict(tmp_path) == "refuted"
    assert all("process 1: step 7" in one.reports[-1] for one in checkpointers)
