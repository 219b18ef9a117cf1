"""Failures that come back, healed in one process: decisions, samples that stay left out, bits."""

from __future__ import annotations

import dataclasses
import json
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfmt
from ckptfmt.__main__ import main

STEPS = 40


class _Training:
    """A training over 1,000 samples, four in a step, with NaN in the batches of some steps.

    Args:
        path: the run.
        bad: numbers of the steps, from 0, with a damaged sample.
        action: the action of the triggers; None for a training without triggers and healer.
        left_out: steps with samples left out from the start.
    """

    def __init__(
        self,
        path: Path,
        *,
        bad: Sequence[int] = (),
        action: Any = "rewind",
        left_out: Sequence[int] = (),
        quarantine: int = 100,
    ) -> None:
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1)
        )
        self.optimizer = torch.optim.AdamW(self.net.parameters())
        self.inputs = torch.randn(1000, 8, generator=torch.Generator().manual_seed(0))
        self.sampler = ckptfmt.Sampler(1000, global_batch=4, seed=0)
        order = ckptfmt.Sampler(1000, global_batch=4, seed=0)
        for step in bad:
            self.inputs[order.indices(step)[1]] = float("nan")
        for step in left_out:
            self.sampler.skip(positions=order.positions_of(step), policy="shift")
        state = ckptfmt.State(
            weights=self.net, optimizer=self.optimizer, data=self.sampler, config={}
        )
        self.triggers = None if action is None else ckptfmt.Triggers(action)
        healer = None if action is None else ckptfmt.Healer(quarantine=quarantine)
        self.checkpointer = ckptfmt.Checkpointer(
            path,
            state,
            every=10,
            saving=ckptfmt.Saving(saver="inline"),
            stop=ckptfmt.Stop(triggers=self.triggers, healer=healer, signals=[signal.SIGTERM]),
        )

    def run(self, after: Callable[[_Training, int], object] = lambda *_: None) -> _Training:
        """Train, and call a function of the training in the body of each step."""
        sampler: Any = self.sampler
        inputs: Any = self.inputs
        loader: Any = torch.utils.data.DataLoader(inputs, batch_sampler=sampler)
        with self.checkpointer as checkpointer:
            batches = iter(loader)
            for step in checkpointer.steps(STEPS):
                loss = self.net(next(batches)).square().mean()
                loss.backward()
                if self.triggers is not None:
                    self.triggers.feed(loss=loss)
                checkpointer.observe(loss=loss)
                self.optimizer.step()
                self.optimizer.zero_grad()
                after(self, step)
        return self

    def bits(self) -> list[bytes]:
        """Return the raw bytes of the weights, the moments and the RNG stream."""
        tensors = [*self.net.parameters()]
        tensors += [
            self.optimizer.state[one][name] for one in tensors for name in ("exp_avg", "exp_avg_sq")
        ]
        return [one.detach().numpy().tobytes() for one in (*tensors, torch.get_rng_state())]  # fmt: skip


def choices(path: Path) -> list[str]:
    return [decision.choice for decision in ckptfmt.Run(path).decisions()]


def test_a_bad_batch_is_left_out_and_the_run_is_the_run_without_the_batch(tmp_path: Path) -> None:
    """Spec: REQ-RUN-063."""
    told: list[Any] = []
    training = _Training(tmp_path / "healed", bad=[25])
    healing = training.checkpointer._healing
    assert healing is not None
    healing._healer = dataclasses.replace(healing._healer, on_decision=told.append)
    healed = training.run().bits()
    assert healed == _Training(tmp_path / "never", action=None, left_out=[25]).run().bits()
    assert choices(tmp_path / "healed") == ["retry", "skip"]
    last = ckptfmt.Run(tmp_path / "healed").decisions()[-1]
    assert (last.sample_count, last.skip) == (4, (26, 26))
    assert last.outcome is not None
    assert (last.outcome.launch, last.outcome.cause) == (3, "data")
    assert [one.outcome is None for one in told] == [True, True, False]


def test_a_negative_control_without_quarantine_stops(tmp_path: Path) -> None:
    training = _Training(tmp_path, bad=[25], quarantine=0).run()
    assert (training.checkpointer.step, training.checkpointer.stopped) == (26, True)
    assert choices(tmp_path) == ["retry", "back", "stop"]
    with pytest.raises(ckptfmt.CkptError, match="HEALING_STOPPED") as caught:
        _Training(tmp_path, bad=[25], quarantine=0).run()
    assert "Healer(quarantine=) is 0" in str(caught.value)


def test_samples_stay_left_out_after_a_load_of_an_older_save(tmp_path: Path) -> None:
    def go_back(training: _Training, step: int) -> None:
        if step == 33 and training.checkpointer.rewinds == 2:
            training.checkpointer.rewind(to=20)

    healed = _Training(tmp_path / "healed", bad=[25]).run(go_back)
    assert healed.checkpointer.rewinds == 3
    assert choices(tmp_path / "healed") == ["retry", "skip"]
    never = _Training(tmp_path / "never", action=None, left_out=[25]).run()
    assert healed.bits() == never.bits()


def test_a_second_bad_batch_soon_after_is_another_failure(tmp_path: Path) -> None:
    healed = _Training(tmp_path / "healed", bad=[25, 29]).run()
    assert choices(tmp_path / "healed") == ["retry", "skip", "retry", "skip"]
    never = _Training(tmp_path / "never", action=None, left_out=[25, 28]).run()
    assert healed.bits() == never.bits()


def test_launches_without_a_healer_do_not_count(tmp_path: Path) -> None:
    for _ in range(4):
        training = _Training(tmp_path, bad=[25], action=None)
        training.triggers = ckptfmt.Triggers("back")
        with pytest.raises(RuntimeError):
            training.run(_fail)
    _Training(tmp_path, bad=[25]).run()
    assert choices(tmp_path) == ["retry", "skip"]


def _fail(training: _Training, step: int) -> None:
    if step == 25 and training.triggers is not None and training.triggers.reason:
        raise RuntimeError(training.triggers.reason)


@pytest.mark.parametrize("error", [IndexError("token 7"), OSError("image file is truncated")])
def test_the_same_exception_after_the_same_steps_leaves_the_samples_out(
    tmp_path: Path, error: Exception
) -> None:
    def fail(training: _Training, step: int) -> None:
        if not torch.isfinite(training.inputs[training.sampler.indices(step)]).all():
            raise error

    for _ in range(2):
        training = _Training(tmp_path, bad=[25], action="save")
        training.triggers = None
        with pytest.raises(type(error)):
            training.run(fail)
    training = _Training(tmp_path, bad=[25], action="save").run(fail)
    assert training.checkpointer.step == STEPS
    assert choices(tmp_path) == ["retry", "skip"]


def test_a_stop_by_a_signal_and_an_exit_code_are_no_failure(tmp_path: Path) -> None:
    def stop(_training: _Training, step: int) -> None:
        if step == 15:
            signal.raise_signal(signal.SIGTERM)

    _Training(tmp_path).run(stop)
    assert _Training(tmp_path).run().checkpointer.step == STEPS
    assert choices(tmp_path) == []


def test_the_log_shows_each_decision_with_evidence_and_outcome(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _Training(tmp_path, bad=[25]).run()
    capsys.readouterr()
    assert main(["log", str(tmp_path)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "healer launch 2 failed in step 26 (loss is nan): the samples of step 26 are" in text
    assert "launch 2 beside launch 1: 6 steps with the same results" in text
    assert "data: launch 3 passed step 26, without the samples that were left out" in text
    assert main(["log", "--json", str(tmp_path)]) == 0
    launches = json.loads(capsys.readouterr().out)["launches"]
    assert [launch["healing"] and launch["healing"]["choice"] for launch in launches] == [
        None,
        "skip",
        "retry",
    ]


def test_without_a_healer_nothing_is_recorded(tmp_path: Path) -> None:
    _Training(tmp_path, action=None).run()
    assert not (tmp_path / "healing").exists()
    header = next(tmp_path.glob("witness/0001/*.steps")).read_bytes()[:8192]
    assert b'"follows": null' in header
    assert b'"node": ""' in header
