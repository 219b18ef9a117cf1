"""A resumed run says what was measured of it: its steps are compared with those of the launch before."""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import json
import logging
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ckptfmt
from ckptfmt.__main__ import main
from ckptfmt.adapters.torch import fingerprints
from ckptfmt.checkpointer import Checkpointer
from ckptfmt.loop.step_log import KEPT_LAUNCHES, StepLog, read_steps, read_verdicts
from ckptfmt.loop.witnessing import digest_outside_modules
from ckptfmt.run.witness import verdict_path
from ckptfmt.store import open_store
from ckptfmt.store.memory import MemoryStore
from tests.interface.test_group import Allgather, run_writers

INPUTS: Any = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))


class KilledError(Exception):
    """The end of a launch in the middle of a step."""


class Loop:
    """A training with dropout, shuffled data and a scheduler, all of it in its State.

    Attributes:
        hooks: functions that are called within a step, with the loop and the step's number, before
            the update.
    """

    def __init__(self, *, lr: float = 0.01, config: Any = None, seed: int = 1) -> None:
        torch.manual_seed(seed)
        self.model: Any = nn.Sequential(
            nn.Linear(8, 16), nn.Dropout(0.1), nn.BatchNorm1d(16), nn.Linear(16, 4)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 50)
        self.sampler = ckptfmt.Sampler(64, global_batch=8, worker=(0, 1))
        self.loader = torch.utils.data.DataLoader(INPUTS, batch_sampler=self.sampler)
        self.state = ckptfmt.State(
            weights=self.model,
            optimizer=self.optimizer,
            data=self.sampler,
            config=config or {"width": 16},
            extra={"scheduler": self.scheduler},
        )
        self.hooks: list[Callable[[Loop, int], None]] = []
        self.observes = True

    def train(
        self, run: Any, upto: int, *, dies_at: int | None = None, **options: Any
    ) -> Checkpointer:
        """Train up to a step; where it dies, the launch ends in the step that comes behind so many."""
        checkpointer = Checkpointer(run, self.state, **{"every": 5, "saver": "inline", **options})
        try:
            with checkpointer:
                batches = iter(self.loader)
                for step in checkpointer.steps(upto):
                    if step == dies_at:
                        raise KilledError  # noqa: TRY301
                    batch = next(batches)
                    for hook in self.hooks:
                        hook(self, step)
                    loss = self.model(batch).square().mean()
                    loss.backward()
                    if self.observes:
                        checkpointer.observe(loss=loss, batch=batch)
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                    self.scheduler.step()
        except KilledError:
            pass
        return checkpointer


def resumed(
    run: Any, *hooks: Callable[[Loop, int], None], upto: int = 16, **options: Any
) -> Checkpointer:
    """Train to 13 with saves at 5 and 10, then resume with hooks that do something else from then on."""
    Loop().train(run, 20, dies_at=13)
    loop = Loop(seed=2)
    loop.hooks += hooks
    return loop.train(run, upto, **options)


def first_step(action: Callable[[Loop], Any]) -> Callable[[Loop, int], None]:
    """Return a hook that does something in the first step behind the resume alone."""
    return lambda loop, step: action(loop) if step == 10 else None


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_steps_done_again_are_identical_and_said_to_be(
    tmp_path: pathlib.Path, caplog: Any, capsys: Any
) -> None:
    caplog.set_level(logging.INFO, "ckptfmt")
    checkpointer = resumed(tmp_path)
    report = checkpointer.load_report
    assert report is not None
    assert (report.claim, report.evidence, report.verified_steps) == ("T1", "verified", 3)
    said = [record.getMessage() for record in caplog.records]
    wanted = (
        "steps 11 to 13 done again: identical"
        " (samples, 3 RNG streams, batch, loss, learning rates, weights): T1 verified"
    )
    assert wanted in said
    assert any(line.endswith("claim T1 expected") for line in said)
    assert not warnings_of(caplog)
    assert "verified over 3 steps" in repr(report)
    capsys.readouterr()
    assert main(["log", str(tmp_path)]) == 0
    assert "T1 verified over 3 steps" in capsys.readouterr().out
    assert main(["log", str(tmp_path), "--json"]) == 0
    newest = json.loads(capsys.readouterr().out)["launches"][0]
    assert (newest["witness"]["verdict"], newest["witness"]["last_step"]) == ("verified", 13)
    assert main(["report", str(tmp_path), "--json"]) == 0
    assert (
        json.loads(capsys.readouterr().out)["launches"][1]["verdict"] == "T1 verified over 3 steps"
    )


def test_claim_is_expected_before_a_step_was_compared(tmp_path: pathlib.Path) -> None:
    Loop().train(tmp_path, 20, dies_at=13)
    loop = Loop(seed=2)
    with Checkpointer(tmp_path, loop.state, saver="inline") as checkpointer:
        checkpointer.restore_rng()
        report = checkpointer.load_report
        assert report is not None
        assert (report.claim, report.evidence) == ("T1", "expected")
        assert "expected" in repr(report)


def draw(_loop: Loop) -> None:
    torch.rand(1)


def scale(loop: Loop) -> None:
    with torch.no_grad():
        loop.model[0].weight[0, 0] += 1


def move(loop: Loop) -> None:
    for state in loop.optimizer.state.values():
        state["exp_avg"].mul_(1.01)


@pytest.mark.parametrize(
    ("action", "what", "told"),
    [
        (draw, "loss", "a state that isn't in State"),
        (scale, "loss", "a state that isn't in State"),
        (move, "weights", "the state of an optimizer that isn't in State"),
        (
            lambda loop: loop.optimizer.param_groups[0].update(weight_decay=0.5),
            "options",
            "a scheduler that isn't in State",
        ),
    ],
    ids=["draw", "weights", "moments", "rate"],
)
def test_cause_of_a_difference_is_named_as_far_as_it_shows(
    action: Any, what: str, told: str, tmp_path: pathlib.Path, caplog: Any
) -> None:
    checkpointer = resumed(tmp_path, first_step(action))
    report = checkpointer.load_report
    assert report is not None
    assert (report.claim, report.evidence) == ("refuted", "refuted")
    verdict = read_verdicts(open_store(tmp_path, writable=False))[2]
    assert verdict.difference is not None
    assert (verdict.verdict, verdict.difference.step, verdict.difference.what) == (
        "refuted",
        11,
        what,
    )
    assert told in verdict.difference.text
    sentence = f"NOT the same trajectory: {verdict.difference.text}"
    assert sentence in checkpointer.reports
    assert warnings_of(caplog)[0] == sentence
    assert "isn't the same trajectory" in warnings_of(caplog)[-1]  # once more, at the exit


def own_loop(
    run: Any, *, dies_at: int, says_when: bool, behind: Callable[[Loop], Any]
) -> Checkpointer:
    """Train with a loop of the program's own, which does something behind the save of step 10."""
    loop = Loop()
    checkpointer = Checkpointer(run, loop.state, every=5, saver="inline")
    with pytest.raises(KilledError), checkpointer:  # noqa: PT012
        batches = iter(loop.loader)
        if says_when:
            checkpointer.restore_rng()
        for step in range(20):
            if step == dies_at:
                raise KilledError
            with checkpointer.training_step():
                batch = next(batches)
                loss = loop.model(batch).square().mean()
                loss.backward()
                checkpointer.observe(loss=loss, batch=batch)
                loop.optimizer.step()
                loop.optimizer.zero_grad()
                loop.scheduler.step()
            if step == 9:
                behind(loop)
    return checkpointer


def test_numbers_drawn_behind_the_save_are_named_as_the_cause(tmp_path: pathlib.Path) -> None:
    assert not own_loop(tmp_path, dies_at=13, says_when=True, behind=draw).reports
    report = Loop(seed=2).train(tmp_path, 16).load_report
    assert report is not None
    assert report.refuted_by == (
        "step 11 had the same samples, but the RNG stream torch.cpu differs before the step:"
        " something drew random numbers after the save (an evaluation, the iterator of a loader,"
        " a prefetched batch)"
    )


@pytest.mark.parametrize(
    ("action", "told"),
    [
        (
            draw,
            "the RNG stream torch.cpu was drawn from between the save of step 10 and the next step",
        ),
        (lambda _: random.random(), "the RNG stream python was drawn from"),
        (lambda _: np.random.bytes(4), "the RNG stream numpy was drawn from"),  # noqa: NPY002
        (
            lambda loop: loop.scheduler.step(),
            "optimizer:extra/scheduler changed between the save of step 10",
        ),
    ],
    ids=["torch", "python", "numpy", "scheduler"],
)
def test_change_behind_a_save_is_said_before_anything_is_lost(
    action: Any, told: str, tmp_path: pathlib.Path
) -> None:
    """The streams are put back as the first step begins: so a resume can't have them as they are here."""
    checkpointer = own_loop(tmp_path, dies_at=13, says_when=False, behind=action)
    assert len(checkpointer.reports) == 1
    assert checkpointer.reports[0].startswith(told)


def test_modules_outside_of_the_state_are_digested_by_name() -> None:
    """A module of the State, and one within another, isn't among them; every element of a small one counts."""
    loop = Loop()
    loop.model.__class__ = type("Held", (nn.Sequential,), {})
    average = torch.optim.swa_utils.AveragedModel(loop.model)

    def digests() -> list[int]:
        return [
            one
            for name, ones in digest_outside_modules(loop.state).items()
            for one in ones
            if "Averaged" in name
        ]

    (before,) = digests()
    assert digests() == [before]
    average.update_parameters(loop.model)
    (after,) = digests()
    assert after != before
    loop.state.extra = {"average": average}
    assert not digests()
    assert not any(name.startswith("Held") for name in digest_outside_modules(loop.state))


def test_samples_that_the_program_skips_are_no_refutation(
    tmp_path: pathlib.Path, caplog: Any
) -> None:
    """A run that heals itself leaves out what made it fail: another trajectory is meant."""
    caplog.set_level(logging.INFO, "ckptfmt")
    Loop().train(tmp_path, 20, dies_at=13)
    loop = Loop(seed=2)
    with Checkpointer(tmp_path, loop.state, every=5, saver="inline") as checkpointer:
        loop.sampler.skip(samples=range(60))
        for step in checkpointer.steps(12):
            loop.sampler.indices(step)
    report = checkpointer.load_report
    assert report is not None
    assert report.evidence == "expected"
    assert not any("NOT the same" in text for text in caplog.messages)


class Many(nn.Module):
    """More tensors than one step looks at, of several dtypes and layouts, none of which is trained."""

    def __init__(self) -> None:
        super().__init__()
        dtypes = [
            torch.float32,
            torch.bfloat16,
            torch.float64,
            torch.uint8,
            torch.bool,
            torch.complex64,
        ]
        shapes = [(), (3,), (50, 7), (2, 3, 5)]
        self.register_buffer("empty", torch.zeros(0, 3))
        for number in range(36):
            self.register_buffer(
                f"b{number}", torch.zeros(shapes[number % 4]).to(dtypes[number % 6])
            )
        self.register_buffer("transposed", torch.zeros(6, 40).t())
        self.register_buffer("strided", torch.zeros(20, 20)[::2, ::3])
        self.register_buffer("wide", torch.zeros(4, dtype=torch.complex128))
        self.weight = nn.Parameter(torch.zeros(3))


def train_many(run: Any, change: Callable[[Many], Any] | None) -> None:
    """Train twelve steps from a checkpoint of step 0, which the first launch saves."""
    model = Many()
    state = ckptfmt.State(weights=model, rng=False)
    with (
        contextlib.suppress(KilledError),
        Checkpointer(run, state, every=20, saver="inline") as checkpointer,
    ):
        if change is None:
            checkpointer.save(step=0)
        for step in checkpointer.steps(20):
            if step == 0 and change is not None:
                change(model)
            if step == 12:
                raise KilledError


def drift(begun: pathlib.Path, run: pathlib.Path, change: Callable[[Many], Any]) -> str | None:
    """Resume a copy of a run with a change in its first step, and return the member that differs first."""
    shutil.copytree(begun, run)
    train_many(run, change)
    verdict = read_verdicts(open_store(run, writable=False))[2]
    return None if verdict.difference is None else verdict.difference.what


def fill(model: Many, *, name: str) -> None:
    getattr(model, name).data.fill_(1)


def test_each_tensor_convicts_by_itself(tmp_path: pathlib.Path) -> None:
    """A fingerprint that misses one tensor calls runs identical that aren't."""
    tensors = dict([*Many().named_buffers(), *Many().named_parameters()])
    train_many(tmp_path / "begun", None)
    missed = [
        name
        for name, tensor in tensors.items()
        if tensor.numel()
        and not drift(tmp_path / "begun", tmp_path / name, functools.partial(fill, name=name))
    ]
    assert not missed
    assert drift(tmp_path / "begun", tmp_path / "none", lambda _: None) is None


def test_tensor_that_was_replaced_is_looked_at_anew(tmp_path: pathlib.Path) -> None:
    """A view of the old memory would go on showing the old weights."""

    def replace(model: Many) -> None:
        model.weight.data = torch.ones(3)

    train_many(tmp_path / "begun", None)
    assert drift(tmp_path / "begun", tmp_path / "run", replace) == "weights"


def test_other_claims_are_compared_and_nothing_is_refuted(
    tmp_path: pathlib.Path, caplog: Any
) -> None:
    caplog.set_level(logging.INFO, "ckptfmt")
    Loop().train(tmp_path, 20, dies_at=13)
    checkpointer = Loop(seed=2, config={"width": 17}).train(tmp_path, 16)
    report = checkpointer.load_report
    assert report is not None
    assert (report.claim, report.evidence, report.verified_steps) == ("S1", "verified", 3)
    assert any(text.endswith("claim S1 all the same, see load_report") for text in caplog.messages)
    loop = Loop(seed=2, config={"width": 18})
    loop.hooks.append(lambda _, step: draw(loop) if step == 16 else None)
    loop.train(tmp_path, 20)
    assert not any("NOT the same" in text for text in caplog.messages)


def test_rollback_by_hand_is_compared_with_the_steps_that_it_does_again(
    tmp_path: pathlib.Path,
) -> None:
    Loop().train(tmp_path, 20, dies_at=13)
    checkpointer = Loop(seed=2).train(tmp_path, 8, resume="step-00000005-l0001")
    assert checkpointer.load_report is not None
    assert checkpointer.load_report.verified_steps == 3


def test_third_launch_is_compared_with_those_that_went_on_from_the_same_checkpoint(
    tmp_path: pathlib.Path,
) -> None:
    Loop().train(tmp_path, 20, dies_at=12)
    Loop(seed=2).train(tmp_path, 20, dies_at=14)
    checkpointer = Loop(seed=3).train(tmp_path, 15)
    assert checkpointer.load_report is not None
    assert checkpointer.load_report.verified_steps == 4


def test_fresh_start_is_compared_with_nothing(tmp_path: pathlib.Path) -> None:
    Loop().train(tmp_path, 20, dies_at=3)
    checkpointer = Loop(seed=2).train(tmp_path, 4)
    assert checkpointer.load_report is None
    assert not checkpointer.reports
    assert not read_verdicts(open_store(tmp_path, writable=False))


@pytest.mark.parametrize("harm", ["cut", "noise", "gone", "header"])
def test_damaged_log_of_an_earlier_launch_costs_the_comparison_alone(
    harm: str, tmp_path: pathlib.Path
) -> None:
    """Spec: REQ-RUN-062."""
    Loop().train(tmp_path, 20, dies_at=13)
    log = tmp_path / "witness" / "0001" / "00000.steps"
    content = log.read_bytes()
    noise = content[:8192] + bytes(byte ^ 1 for byte in content[8192:])
    log.write_bytes(
        {"cut": content[:9000], "noise": noise, "gone": b"", "header": b"x" + content[1:]}[harm]
    )
    checkpointer = Loop(seed=2).train(tmp_path, 16)
    assert checkpointer.load_report is not None
    assert (checkpointer.load_report.claim, checkpointer.load_report.evidence) == ("T1", "expected")
    assert not checkpointer.reports


def test_verdict_that_can_not_be_read_stops_nothing(tmp_path: pathlib.Path) -> None:
    """Spec: REQ-RUN-062."""
    resumed(tmp_path)
    (tmp_path / verdict_path(2)).write_bytes(b"{")
    assert main(["log", str(tmp_path)]) == 0
    assert main(["report", str(tmp_path), "--json"]) == 0
    assert Loop(seed=3).train(tmp_path, 17).step == 17


def test_witness_that_can_not_write_is_off_and_says_so(tmp_path: pathlib.Path) -> None:
    (tmp_path / "witness").write_bytes(b"in the way")
    checkpointer = Loop().train(tmp_path, 6)
    assert checkpointer.step == 6
    assert [text.partition(":")[0] for text in checkpointer.reports] == ["WITNESS_OFF"]


def test_witness_that_fails_ends_no_training(tmp_path: pathlib.Path, monkeypatch: Any) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a tensor of a kind that can't be looked at")

    monkeypatch.setattr(fingerprints.Fingerprint, "start", fail)
    checkpointer = Loop().train(tmp_path, 6)
    assert checkpointer.step == 6
    assert checkpointer.reports == (
        (
            "WITNESS_OFF: steps aren't recorded any more: RuntimeError: a tensor of a kind that"
            " can't"
            " be looked at"
        ),
    )


@pytest.mark.parametrize(
    "value",
    [torch.ones(4), torch.zeros(0), np.ones(2), "0.5 and more"],
    ids=["4", "0", "2", "text"],
)
def test_loss_that_is_no_number_is_refused_by_name(value: Any, tmp_path: pathlib.Path) -> None:
    state = ckptfmt.State(weights={"w": torch.zeros(4)}, rng=False)
    with Checkpointer(tmp_path, state, saver="inline") as checkpointer:
        checkpointer.restore_rng()
        with pytest.raises(ckptfmt.CkptError) as caught:
            checkpointer.observe(loss=value)
    assert (caught.value.code, caught.value.where) == ("ARGUMENT", "observe()")
    assert "loss.mean()" in str(caught.value)


def test_no_witness_where_none_is_wanted(tmp_path: pathlib.Path) -> None:
    checkpointer = Loop().train(tmp_path, 6, witness=False)
    checkpointer.observe(loss=1.0)
    assert not (tmp_path / "witness").exists()
    assert not Loop().train(MemoryStore(), 6).reports


def counted(
    run: Any, upto: int, *, dies_at: int, says: Callable[[Checkpointer, int], Any], **options: Any
) -> Checkpointer:
    """Train with a loop that counts its steps by itself, and shows a loss of each."""
    loop = Loop()
    checkpointer = Checkpointer(run, loop.state, saver="inline", **options)
    with contextlib.suppress(KilledError), checkpointer:
        batches = iter(loop.loader)
        checkpointer.restore_rng()
        for step in range(checkpointer.step, upto):
            if step == dies_at:
                raise KilledError
            loss = loop.model(next(batches)).square().mean()
            loss.backward()
            checkpointer.observe(loss=loss)
            loop.optimizer.step()
            loop.optimizer.zero_grad()
            loop.scheduler.step()
            says(checkpointer, step + 1)
    return checkpointer


def save_or_count(checkpointer: Checkpointer, step: int) -> None:
    if step % 5 == 0:
        checkpointer.save(step)
    else:
        checkpointer.end_step(step)


def assign_and_save(checkpointer: Checkpointer, step: int) -> None:
    checkpointer.step = step
    if step % 5 == 0:
        checkpointer.save()


@pytest.mark.parametrize("says", [save_or_count, assign_and_save])
def test_step_that_save_counts_is_recorded_with_its_loss(says: Any, tmp_path: pathlib.Path) -> None:
    """The loss of a saved step was taken for a part of the next one's, which a resume hasn't seen: a false alarm."""
    counted(tmp_path, 20, dies_at=13, says=says)
    report = counted(tmp_path, 16, dies_at=20, says=says).load_report
    assert report is not None
    assert (report.evidence, report.verified_steps, "loss" in report.compared) == (
        "verified",
        3,
        True,
    )
    run_id = json.loads((tmp_path / "run.json").read_bytes())["signed"]["run_id"]
    steps = read_steps(open_store(tmp_path, writable=False), run_id, 1, 0)
    assert steps is not None
    assert sorted(steps.records) == list(range(1, 14))
    assert all(
        record.loss is not None and not record.is_several for record in steps.records.values()
    )


def test_losses_of_steps_that_are_counted_together_are_not_compared(tmp_path: pathlib.Path) -> None:
    """A loop that saves by the clock counts the same steps in other groups each time."""

    def save_at(*steps: int) -> Callable[[Checkpointer, int], Any]:
        return lambda checkpointer, step: checkpointer.save(step) if step in steps else None

    counted(tmp_path, 20, dies_at=17, says=save_at(8, 16))
    first = "step-00000008-l0001"
    report = counted(tmp_path, 17, dies_at=20, says=save_at(12, 16), resume=first).load_report
    assert report is not None
    assert (report.evidence, report.verified_steps, "loss" in report.compared) == (
        "verified",
        1,
        False,
    )


def count_kept() -> int:
    gc.collect()
    return sum(isinstance(kept, fingerprints.Pending) for kept in gc.get_objects())


@pytest.mark.parametrize("store", ["memory", "directory"])
def test_numbers_are_not_kept_where_no_step_is_recorded(store: str, tmp_path: pathlib.Path) -> None:
    """A run in memory kept all of them; so did one that hadn't begun."""
    batch, before = torch.zeros(4), count_kept()
    run: Any = MemoryStore() if store == "memory" else tmp_path
    with Checkpointer(
        run, ckptfmt.State(weights={"w": torch.zeros(4)}, rng=False), saver="inline"
    ) as checkpointer:
        if store == "memory":
            checkpointer.restore_rng()
        for _ in range(20):
            checkpointer.observe(loss=1.0, batch=batch)
        assert count_kept() <= before


def test_logs_of_old_launches_go(tmp_path: pathlib.Path) -> None:
    for launch in range(KEPT_LAUNCHES + 2):
        Loop().train(tmp_path, launch + 1, every=None)
    kept = sorted(path.name for path in (tmp_path / "witness").iterdir() if path.is_dir())
    assert kept == [f"{launch:04d}" for launch in range(2, KEPT_LAUNCHES + 3)]


def wait_for_record(run: pathlib.Path, step: int) -> list[int]:
    """Return the recorded steps of launch 1 once they include `step`, or after half a minute."""
    run_id = json.loads((run / "run.json").read_bytes())["signed"]["run_id"]
    end_s = time.monotonic() + 30
    while True:
        steps = read_steps(open_store(run, writable=False), run_id, 1, 0)
        found = [] if steps is None else sorted(steps.records)
        if step in found or time.monotonic() > end_s:
            return found
        time.sleep(0.001)


def test_record_of_a_step_is_in_the_file_while_the_launch_goes_on(tmp_path: pathlib.Path) -> None:
    """Spec: REQ-RUN-061."""

    def look(_loop: Loop, step: int) -> None:
        if step:
            assert wait_for_record(tmp_path, step) == list(range(1, step + 1))

    loop = Loop()
    loop.hooks.append(look)
    loop.train(tmp_path, 4)


def test_loop_that_counts_by_number_is_recorded_from_its_first_step(tmp_path: pathlib.Path) -> None:
    state = ckptfmt.State(weights={"w": torch.zeros(4)}, rng=False)
    with Checkpointer(tmp_path, state, saver="inline") as checkpointer:
        checkpointer.save(1)
        checkpointer.step = 2
        assert wait_for_record(tmp_path, 2) == [1, 2]


def test_disk_without_room_ends_the_records_and_no_training(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def look(_loop: Loop, step: int) -> None:
        if step == 2:
            assert wait_for_record(tmp_path, 2) == [1, 2]
            monkeypatch.setattr(StepLog, "_write", refuse)

    loop = Loop()
    loop.hooks.append(look)
    checkpointer = loop.train(tmp_path, 6)
    assert checkpointer.step == 6
    assert [report for report in checkpointer.reports if "No space left" in report]


def test_step_log_survives_sigkill(tmp_path: pathlib.Path) -> None:
    """Spec: REQ-RUN-061."""
    program = """
import os, pathlib, signal, sys
from tests.witness.test_witness import Loop, wait_for_record
loop = Loop()
if sys.argv[2] == "killed":
    def kill(_, step):
        if step == 12:
            wait_for_record(pathlib.Path(sys.argv[1]), 12)
            os.kill(os.getpid(), signal.SIGKILL)
    loop.hooks.append(kill)
    loop.train(sys.argv[1], 20)
else:
    report = loop.train(sys.argv[1], 14).load_report
    print(report.claim, report.verified_steps)
"""

    def train(word: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", program, str(tmp_path), word]
        return subprocess.run(
            command, cwd=pathlib.Path.cwd(), check=False, stdout=subprocess.PIPE, text=True
        )

    assert train("killed").returncode == -signal.SIGKILL
    run_id = json.loads((tmp_path / "run.json").read_bytes())["signed"]["run_id"]
    steps = read_steps(open_store(tmp_path, writable=False), run_id, 1, 0)
    assert steps is not None
    assert sorted(steps.records) == list(range(1, 13))
    assert train("again").stdout.split() == ["T1", "2"]


def pair(
    run: Any, upto: int, *, dies_at: int, change: float = 0, writer: int | None = None
) -> list[Checkpointer]:
    """Train with two processes, threads here; from step 12 on, one of them may see another loss."""
    gather = Allgather(2)

    def train(number: int) -> Checkpointer:
        state = ckptfmt.State(weights={"w": torch.zeros(4)}, rng=False)
        checkpointer = Checkpointer(
            run,
            state,
            every=5,
            saver="inline",
            writer=(number, 2),
            agree=gather.of(number),
            deadline_s=30,
        )
        with contextlib.suppress(KilledError), checkpointer:
            for step in checkpointer.steps(upto):
                if step == dies_at:
                    raise KilledError
                checkpointer.observe(loss=step + (change if step >= 11 and number == writer else 0))
        return checkpointer

    return run_writers(2, train)


@pytest.mark.parametrize("writer", [None, 0, 1])
def test_processes_hear_of_each_other_with_the_next_save(
    writer: int | None, tmp_path: pathlib.Path
) -> None:
    pair(tmp_path, 20, dies_at=13)
    found = pair(tmp_path, 16, dies_at=20, change=0.5, writer=writer)
    verdict = read_verdicts(open_store(tmp_path, writable=False))[2]
    if writer is None:
        assert (verdict.verdict, verdict.first_step, verdict.last_step) == ("verified", 11, 13)
        evidence = [
            checkpointer.load_report and checkpointer.load_report.evidence for checkpointer in found
        ]
        assert evidence == ["verified", "verified"]
    else:
        assert verdict.difference is not None
        assert (verdict.difference.writer, verdict.difference.step) == (writer, 12)
        assert (verdict.difference.what, verdict.expected) == ("loss", "S0")
