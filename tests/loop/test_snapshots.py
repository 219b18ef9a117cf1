"""Snapshots between saves: they stay in memory, and become saves where the training would lose steps."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import ckptfmt
from ckptfmt.errors import CkptError, Code
from ckptfmt.run.lineage import read_known_run
from ckptfmt.run.spent_time import read_entries
from ckptfmt.store import open_store
from ckptfmt.write.staging import Staging
from tests.loop.test_rewind import STEPS, Training, undisturbed
from tests.store.helpers import ROOT

SAVERS = ["process", "thread"]


def saving_of(saver: Any, *, every: int = 1, **options: Any) -> ckptfmt.Saving:
    return ckptfmt.Saving(saver=saver, snapshot_every=every, **options)


def steps_of(run: Path) -> list[int]:
    return [entry.step for entry in ckptfmt.Run(run).list() if entry.state == "committed"]


def wait_for_end(saver: int) -> None:
    """Wait until the saver of a process that was killed has ended."""
    status = Path(f"/proc/{saver}/status")
    end_s = time.monotonic() + 60
    with contextlib.suppress(FileNotFoundError):
        while "zombie" not in status.read_text():
            assert time.monotonic() < end_s
            time.sleep(0.02)


def count_full(background: Any) -> int:
    return sum(place.handle is not None for place in background._places)


def steps_of_training(checkpointer: Any) -> Iterator[int]:
    """Yield the steps of a training, each once a slot is free: without a slot, a snapshot is skipped."""
    for step in checkpointer.steps(STEPS):
        background = checkpointer._saves._background
        end_s = time.monotonic() + 60
        while background is not None and count_full(background) > len(background._held[-1:]):
            assert time.monotonic() < end_s
            time.sleep(0.002)
        yield step


@pytest.mark.parametrize("saver", SAVERS)
@pytest.mark.parametrize("delta", ["off", "auto"])
def test_a_rewind_goes_back_to_a_step_that_was_never_saved(
    tmp_path: Path, saver: str, delta: Any
) -> None:
    right = undisturbed()
    training = Training()
    saving = saving_of(saver, every=3, delta=delta)
    moments = [4, 17]
    with ckptfmt.Checkpointer(tmp_path, training.state, every=10, saving=saving) as checkpointer:
        batches = training.batches()
        for step in steps_of_training(checkpointer):
            training.train(step, next(batches))
            if moments and step == moments[0]:
                moments.pop(0)
                report = checkpointer.rewind()
                assert report.step == step // 3 * 3
                assert report.reads.memory_nbytes == report.reads.needed_nbytes > 0
                continue
    assert checkpointer.rewinds == 2
    assert checkpointer.load_report is not None
    assert (checkpointer.load_report.claim, checkpointer.load_report.evidence) == ("T1", "verified")
    assert training.bits() == right.bits()
    assert training.rows == right.rows
    assert sorted(steps_of(tmp_path)) == [3, 10, 15, 20, STEPS]


@pytest.mark.parametrize("saver", SAVERS)
def test_snapshots_leave_nothing_in_the_run(tmp_path: Path, saver: str) -> None:
    training = Training()
    events: list[Any] = []
    with ckptfmt.Checkpointer(
        tmp_path, training.state, every=10, saving=saving_of(saver), on_save=events.append
    ) as checkpointer:
        batches = training.batches()
        for step in steps_of_training(checkpointer):
            training.train(step, next(batches))
    assert sorted(one.name[:13] for one in tmp_path.glob("step-*")) == [
        f"step-{step:08d}" for step in (10, 20, STEPS)
    ]
    kinds = [(event.step, event.kind) for event in events]
    assert sorted(kinds) == [
        (step, kind) for step in (10, 20, STEPS) for kind in ("committed", "staged")
    ]
    assert ckptfmt.validate(tmp_path).violations == []


def test_a_snapshot_goes_through_the_cache_to_home_and_mirror(tmp_path: Path) -> None:
    training = Training()
    moments = [4, 17]
    with ckptfmt.Checkpointer(
        tmp_path / "run",
        training.state,
        every=10,
        saving=saving_of("process", every=3, delta="auto"),
        copies=[ckptfmt.Cache(tmp_path / "cache"), ckptfmt.Mirror(tmp_path / "mirror")],
    ) as checkpointer:
        batches = training.batches()
        for step in steps_of_training(checkpointer):
            training.train(step, next(batches))
            if moments and step == moments[0]:
                moments.pop(0)
                report = checkpointer.rewind()
                assert report.step == step // 3 * 3
                assert report.reads.memory_nbytes == report.reads.needed_nbytes > 0
                continue
    assert training.bits() == undisturbed().bits()
    for place in ("run", "mirror"):
        assert sorted(steps_of(tmp_path / place)) == [3, 10, 15, 20, STEPS]
        assert ckptfmt.validate(tmp_path / place).violations == []


def test_to_an_older_save_drops_the_snapshot(tmp_path: Path) -> None:
    training = Training()
    with ckptfmt.Checkpointer(
        tmp_path, training.state, every=5, saving=saving_of("process")
    ) as checkpointer:
        batches = training.batches()
        for step in steps_of_training(checkpointer):
            training.train(step, next(batches))
            if step == 9 and not checkpointer.rewinds:
                assert checkpointer.rewind(to=7).step == 5
                continue
    assert sorted(steps_of(tmp_path)) == [5, 10, 15, 20, STEPS]
    assert training.bits() == undisturbed().bits()


def hand_over(checkpointer: Any) -> None:
    """Wait until the saver has the newest snapshot."""
    background = checkpointer._saves._background
    background._held[-1].handle.wait_copied(60)
    end_s = time.monotonic() + 60
    while not background._link._outgoing.empty():
        assert time.monotonic() < end_s
        time.sleep(0.01)
    time.sleep(0.3)  # for the message that was taken out last


TRAINING = """
import os, signal, sys
from pathlib import Path
import ckptfmt
from tests.loop.test_rewind import Training
from tests.loop.test_snapshots import hand_over

training = Training()
saving = ckptfmt.Saving(snapshot_every=4)
with ckptfmt.Checkpointer(Path(sys.argv[1]), training.state, every=10, saving=saving) as checkpointer:
    batches = training.batches()
    for step in checkpointer.steps(24):
        training.train(step, next(batches))
        if step == 19 and sys.argv[2] == "kill":
            hand_over(checkpointer)
            print(checkpointer._saves._background._link.pid, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if step == 19 and sys.argv[2] == "raise":
            raise RuntimeError("a fault of the training")
"""


@pytest.mark.parametrize("end", ["kill", "raise"])
def test_the_next_launch_goes_on_from_the_snapshot_of_a_training_that_died(
    tmp_path: Path, end: str
) -> None:
    """Step 10 was saved; the saver, or the end of the `with` block, writes the snapshot of step 16."""
    died = subprocess.run(
        [sys.executable, "-c", TRAINING, str(tmp_path), end],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert died.returncode == (-signal.SIGKILL if end == "kill" else 1), died.stderr
    if end == "kill":
        wait_for_end(int(died.stdout))
    assert sorted(steps_of(tmp_path)) == [10, 16]
    training = Training()
    with ckptfmt.Checkpointer(
        tmp_path, training.state, every=10, saving=ckptfmt.Saving(saver="inline")
    ) as checkpointer:
        assert checkpointer.step == 16
        batches = training.batches()
        for step in steps_of_training(checkpointer):
            training.train(step, next(batches))
    assert training.bits() == undisturbed().bits()


STALLED = """
import os, signal, sys
import ckptfmt, torch
from tests.loop.test_snapshots import hand_over

class Large:  # a request that fills the channel to a saver that doesn't read
    def state_dict(self):
        return {"texts": [f"{number:040d}" for number in range(20_000)]}
    def load_state_dict(self, state):
        pass

model = torch.nn.Module()
model.register_buffer("values", torch.zeros(500_000))
state = ckptfmt.State(weights=model, extra={"large": Large()}, rng=False)
saving = ckptfmt.Saving(snapshot_every=1, slots=int(sys.argv[2]), overlap=False)
checkpointer = ckptfmt.Checkpointer(sys.argv[1], state, every=1000, saving=saving)
checkpointer.__enter__()
for step in checkpointer.steps(100):
    model.values.fill_(step + 1)
    if step == 5:
        background = checkpointer._saves._background
        hand_over(checkpointer)
        print(background._link.pid, flush=True)
        os.kill(background._link.pid, signal.SIGSTOP)
    if step == 8:
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_a_stalled_saver_never_writes_a_slot_that_was_filled_again(
    tmp_path: Path, slots: int
) -> None:
    """Each checkpoint has the values of its own step, if the training dies with requests unread."""
    run = tmp_path / "run"
    died = subprocess.run(
        [sys.executable, "-c", STALLED, str(run), str(slots)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert died.returncode == -signal.SIGKILL, died.stderr
    saver = int(died.stdout)
    os.kill(saver, signal.SIGCONT)
    wait_for_end(saver)
    # With one slot the snapshot is dropped before the next one, which gets no slot.
    assert steps_of(run) == ([] if slots == 1 else [5])
    for step in steps_of(run):
        with ckptfmt.open(run) as checkpoint:
            assert set(checkpoint.weights["values"][...].tolist()) == {float(step)}


def test_an_alarm_keeps_the_snapshot_before_the_suspect_save(tmp_path: Path) -> None:
    triggers = ckptfmt.Triggers("save")
    training = Training()
    with ckptfmt.Checkpointer(
        tmp_path,
        training.state,
        every=10,
        saving=saving_of("process"),
        stop=ckptfmt.Stop(triggers=triggers),
    ) as checkpointer:
        batches = training.batches()
        for step in steps_of_training(checkpointer):
            loss = training.train(step, next(batches))
            triggers.feed(loss=float("nan") if step == 17 else loss)
    assert sorted(steps_of(tmp_path)) == [10, 17, 18]
    with ckptfmt.open(tmp_path) as checkpoint:
        assert checkpoint.step == 17


def test_a_snapshot_without_slots_is_no_save(tmp_path: Path) -> None:
    """A state that grows, without memory for new slots."""
    training = Training()
    with ckptfmt.Checkpointer(
        tmp_path, training.state, every=10, saving=saving_of("process")
    ) as checkpointer:
        batches = training.batches()
        for step in steps_of_training(checkpointer):
            training.train(step, next(batches))
            if step == 13:
                training.model.register_buffer("more", torch.ones(1000))
                short = mock.patch("ckptfmt.saving.background.plan_slots", return_value=0)
                short.start()
    mock.patch.stopall()
    assert sorted(steps_of(tmp_path)) == [10, 20, STEPS]


def test_a_training_that_ends_by_break_was_saved(tmp_path: Path) -> None:
    training = Training()
    with ckptfmt.Checkpointer(
        tmp_path, training.state, every=10, saving=saving_of("process", every=3)
    ) as checkpointer:
        batches = training.batches()
        for step in steps_of_training(checkpointer):
            training.train(step, next(batches))
            if step == 8:
                break
    assert steps_of(tmp_path) == [6]
    assert not [text for text in checkpointer.reports if text.startswith("NOTHING_SAVED")]


def test_a_saver_that_dies_with_a_snapshot_ends_no_training(tmp_path: Path) -> None:
    training = Training()
    with ckptfmt.Checkpointer(
        tmp_path, training.state, every=10, saving=saving_of("process")
    ) as checkpointer:
        batches = training.batches()
        for step in steps_of_training(checkpointer):
            training.train(step, next(batches))
            if step == 14:
                held: Any = checkpointer._saves._background._held[-1]  # type: ignore[union-attr]
                assert checkpointer._handle is not None
                assert checkpointer._handle.wait_over(60)  # the save of step 10
                os.kill(checkpointer._saves._background._link.pid, signal.SIGKILL)  # type: ignore[union-attr]
                with pytest.raises(CkptError, match=str(Code.SAVER_LOST)):
                    held.handle.wait("WRITTEN", 60)
            if step == 15 and not checkpointer.rewinds:
                # A new saver has the snapshot of step 15.
                assert checkpointer.rewind().step == 15
    assert training.bits() == undisturbed().bits()
    assert sorted(steps_of(tmp_path)) == [10, 15, 20, STEPS]


def test_a_rewind_without_a_usable_snapshot_goes_back_to_the_save(tmp_path: Path) -> None:
    training = Training()
    with ckptfmt.Checkpointer(
        tmp_path, training.state, every=10, saving=saving_of("process")
    ) as checkpointer:
        batches = training.batches()
        for step in steps_of_training(checkpointer):
            training.train(step, next(batches))
            if step == 15 and not checkpointer.rewinds:
                held: Any = checkpointer._saves._background._held[-1]  # type: ignore[union-attr]
                assert checkpointer._handle is not None
                assert checkpointer._handle.wait_over(60)  # the save of step 10
                os.kill(checkpointer._saves._background._link.pid, signal.SIGKILL)  # type: ignore[union-attr]
                with pytest.raises(CkptError, match=str(Code.SAVER_LOST)):
                    held.handle.wait("WRITTEN", 60)
                assert checkpointer.rewind().step == 10
    assert training.bits() == undisturbed().bits()


def test_an_alarm_goes_back_to_the_snapshot_before_it(tmp_path: Path) -> None:
    """The step with the NaN isn't kept."""
    triggers = ckptfmt.Triggers("rewind")
    training = Training()
    came = []
    with ckptfmt.Checkpointer(
        tmp_path,
        training.state,
        every=10,
        saving=saving_of("process"),
        stop=ckptfmt.Stop(triggers=triggers),
    ) as checkpointer:
        batches = training.batches()
        for step in steps_of_training(checkpointer):
            came.append(step)
            loss = training.train(step, next(batches))
            triggers.feed(loss=float("nan") if step == 17 and came.count(17) == 1 else loss)
    assert checkpointer.rewinds == 1
    assert came == [*range(18), *range(17, STEPS)]
    assert sorted(steps_of(tmp_path)) == [10, 17, 20, STEPS]
    skips = training.sampler.state_dict()["skips"]
    assert [skip["range"] for skip in skips] == [[68, 72]]  # four samples of one step


def test_a_snapshot_without_a_free_slot_is_skipped(tmp_path: Path) -> None:
    """A saver that is stopped doesn't free the slot of a snapshot; saves may be skipped here, too."""
    training = Training()
    checkpointer = ckptfmt.Checkpointer(
        tmp_path, training.state, every=10, saving=saving_of("process", slots=1, when_busy="skip")
    )
    with checkpointer:
        batches = training.batches()
        pid = 0
        for step in checkpointer.steps(19):
            training.train(step, next(batches))
            if step == 9:
                pid = checkpointer._saves._background._link.pid  # type: ignore[union-attr]
                os.kill(pid, signal.SIGSTOP)
            if step == 13:
                assert not checkpointer._saves._background._held  # type: ignore[union-attr]
                os.kill(pid, signal.SIGCONT)
    assert sorted(steps_of(tmp_path)) == [19]


def test_a_snapshot_stays_until_the_next_one_is_complete(tmp_path: Path) -> None:
    """A copy that fails, or a kill in the middle of a copy, loses the new snapshot and not the old."""
    training = Training()
    saving = saving_of("process", every=5, overlap=False)

    def train() -> None:
        with ckptfmt.Checkpointer(tmp_path, training.state, saving=saving) as checkpointer:
            batches = training.batches()
            for step in checkpointer.steps(STEPS):
                training.train(step, next(batches))
                if step == 9:
                    mock.patch.object(Staging, "run", side_effect=RuntimeError("no copy")).start()

    with pytest.raises(RuntimeError, match="no copy"):
        train()
    mock.patch.stopall()
    assert steps_of(tmp_path) == [5]


@pytest.mark.parametrize("saver", SAVERS)
def test_a_state_that_grows_gets_new_slots(tmp_path: Path, saver: Any) -> None:
    training = Training()
    with ckptfmt.Checkpointer(
        tmp_path, training.state, every=10, saving=saving_of(saver)
    ) as checkpointer:
        batches = training.batches()
        for step in steps_of_training(checkpointer):
            training.train(step, next(batches))
            if step == 14:
                training.model.register_buffer("more", torch.ones(1000))
    assert sorted(steps_of(tmp_path)) == [10, 20, STEPS]


def test_the_ledger_counts_the_snapshots_that_were_written_and_the_time_of_all(
    tmp_path: Path,
) -> None:
    """The time in memory isn't a part of the time to the commit."""
    training = Training()
    events: list[Any] = []
    rewind_s = 0.0
    with ckptfmt.Checkpointer(
        tmp_path,
        training.state,
        every=10,
        ledger=True,
        saving=saving_of("process", overlap=False),
        on_save=events.append,
    ) as checkpointer:
        batches = training.batches()
        for step in steps_of_training(checkpointer):
            training.train(step, next(batches))
            if step == 17 and not checkpointer.rewinds:
                time.sleep(0.5)
                begin_s = time.monotonic()
                checkpointer.rewind()
                rewind_s = time.monotonic() - begin_s
                continue
    (written,) = [one for one in events if (one.step, one.kind) == (17, "committed")]
    assert written.seconds["COMMITTED"] <= rewind_s
    store = open_store(tmp_path, writable=False)
    first, second = read_entries(store, read_known_run(store))[0].values()
    assert (first.save_count, first.commit_count) == (2, 2)  # steps 10 and 17
    assert (second.save_count, second.commit_count) == (2, 2)
    assert first.times.blocked > 0


@pytest.mark.parametrize("every", [0, -1, True, 1.5, "10"])
def test_the_number_of_steps_is_checked(every: Any) -> None:
    with pytest.raises(CkptError, match="isn't a number of steps"):
        ckptfmt.Saving(snapshot_every=every)


def test_an_inline_saver_keeps_no_snapshots() -> None:
    with pytest.raises(CkptError, match="can't keep snapshots") as caught:
        ckptfmt.Saving(saver="inline", snapshot_every=5)
    assert caught.value.code == Code.ARGUMENT
