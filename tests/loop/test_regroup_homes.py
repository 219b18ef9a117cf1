"""Regroups of a run with three homes, of which one hangs or goes away; writers are threads here."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfmt
from ckptfmt.commit.decision import read_register
from ckptfmt.documents.manifest import Manifest
from ckptfmt.errors import CkptError, Code, err
from ckptfmt.run import homes as run_homes
from ckptfmt.run.elections import RunHomes
from ckptfmt.run.votes import list_vote_numbers
from ckptfmt.saving.home_copies import HomeCopies
from ckptfmt.store import LocalStore
from ckptfmt.store.protocol import Store
from tests.interface.test_group import Allgather
from tests.loop.test_homes import (
    NAMES,
    STEPS,
    Directories,
    Switched,
    checkpointer_of,
    have,
    wait_until,
)
from tests.loop.test_rewind import Training, undisturbed
from tests.stores.hooked import Operation

JOB = ckptfmt.Job(deadline_s=8.0)


class Hanging(Switched):
    """A home that accepts requests and never answers while its switch is off, until the test ends.

    Args:
        hangs: switches the first home off, once it isn't empty, at a request of a thread.
        thread: name of the thread.
    """

    is_over = threading.Event()

    def __init__(
        self, inner: Store, name: str, off: set[str], *, hangs: list[bool], thread: str
    ) -> None:
        super().__init__(inner, name, off)
        self.hangs = hangs
        self.thread = thread

    def before(self, operation: Operation) -> None:
        if self.place == "a" and self.hangs and threading.current_thread().name == self.thread:
            self.off.add("a")
        while self.place in self.off and not self.is_over.wait(0.02):
            pass
        if self.is_over.is_set():
            super().before(operation)


@pytest.fixture
def homes(tmp_path: Path) -> Iterator[Directories]:
    Hanging.is_over = threading.Event()
    yield Directories(tmp_path)
    Hanging.is_over.set()
    run_homes._OPENED.clear()


def hanging(
    homes: Directories, off: set[str], *, hangs: list[bool] | None = None, thread: str = ""
) -> list[Any]:
    return [
        Hanging(store, name, off, hangs=[] if hangs is None else hangs, thread=thread)
        for name, store in zip(NAMES, homes.stores, strict=True)
    ]


def train_until(checkpointer: ckptfmt.Checkpointer, training: Training, last: int) -> None:
    """Train from where the run is; `last` is the number of the last step."""
    batches = training.batches()
    for step in checkpointer.steps(STEPS):
        if step > last:
            return
        training.train(step, next(batches))


@pytest.mark.parametrize("options", [{}, {"ledger": True}], ids=["", "ledger"])
def test_a_home_that_hangs_holds_nobody_up(homes: Directories, options: dict[str, Any]) -> None:
    """The last entry of the ledger was written to the former home, without end."""
    off: set[str] = set()
    training = Training()
    checkpointer = checkpointer_of(hanging(homes, off), training, every=3, job=JOB, **options)
    train_until(checkpointer, training, 7)
    wait_until(lambda: have(homes.paths, 6))
    off.add("a")
    checkpointer.regroup()
    assert repr(str(homes.paths[1])) in repr(checkpointer)
    train_until(checkpointer, training, STEPS)
    wait_until(lambda: have(homes.paths[1:], STEPS))
    assert training.bits() == undisturbed().bits()
    off.clear()
    checkpointer.close()


def test_a_home_hangs_during_a_save_of_two_writers(homes: Directories) -> None:
    """The failure of the save was reported at the former home, without end."""
    off: set[str] = set()
    hangs: list[bool] = []

    for path in homes.paths:
        path.mkdir(exist_ok=True)
    first, second = Allgather(2, timeout_s=60), Allgather(2, timeout_s=60)
    arrays = [np.zeros(4), np.zeros(4)]

    def make(writer: int) -> ckptfmt.Checkpointer:
        here, *others = hanging(homes, off, hangs=hangs, thread="ckptfmt-saver")
        return ckptfmt.Checkpointer(
            here,
            ckptfmt.State(weights={"array": arrays[writer]}, rng=False),
            saving=ckptfmt.Saving(saver="thread"),
            copies=[ckptfmt.Homes(others, away_after_s=0.5)],
            job=ckptfmt.Job(writer=(writer, 2), agree=first.of(writer), deadline_s=8.0),
            checks=ckptfmt.Checks(witness=False),
        )

    def live(writer: int) -> tuple[int, str]:
        checkpointer = make(writer)
        checkpointer.restore()
        checkpointer.restore_rng()
        for step in range(1, 5):
            arrays[writer][:] = step
            checkpointer.end_step(step)
            if step == 2:
                checkpointer.save()
                wait_until(lambda: have(homes.paths, 2))
            if step == 4:
                hangs.append(True)
                checkpointer.save()
        wait_until(lambda: bool(off))
        job = ckptfmt.Job(writer=(writer, 2), agree=second.of(writer), deadline_s=8.0)
        checkpointer.regroup(job)
        return checkpointer.step, repr(checkpointer)

    with ThreadPoolExecutor(2) as threads:
        found = [one.result(60) for one in [threads.submit(live, writer) for writer in (0, 1)]]
    assert [step for step, _ in found] == [2, 2]
    assert all(repr(str(homes.paths[1])) in text for _, text in found)
    assert [array[0] for array in arrays] == [2, 2]


def test_a_save_that_is_given_up_waits_for_no_copy(homes: Directories) -> None:
    """The save would have waited until its deadline, and a regroup for the save."""
    off: set[str] = set()
    events: list[Any] = []

    class Uncopied(Switched):
        is_blocked = False

        def before(self, operation: Operation) -> None:
            super().before(operation)
            if self.is_blocked and threading.current_thread().name == "ckptfmt-mirror":
                raise err(Code.STORE_NO_ANSWER, "no copies in this test", where=operation.path)

    training = Training()
    places = [Uncopied(store, name, off) for name, store in zip(NAMES, homes.stores, strict=True)]
    checkpointer = checkpointer_of(places, training, every=3, job=JOB, on_save=events.append)
    batches = training.batches()
    for step in checkpointer.steps(STEPS):
        if step == 10:
            break
        training.train(step, next(batches))
        if step == 4:
            wait_until(lambda: have(homes.paths, 3))
            Uncopied.is_blocked = True
    checkpointer.regroup()
    assert checkpointer.step == 6
    (failed,) = [event for event in events if event.kind == "failed"]
    assert failed.step == 9
    assert failed.error.code == Code.HOME_BEHIND
    assert "isn't at another home yet" in failed.error.detail
    Uncopied.is_blocked = False
    train_until(checkpointer, training, STEPS)
    checkpointer.close()
    assert training.bits() == undisturbed().bits()


def test_a_launch_that_begins_during_a_regroup_goes_on(
    homes: Directories, monkeypatch: Any
) -> None:
    """REQ-RUN-004: the regroup's vote ended the newer launch, and both launches were refused."""
    training, newer = Training(), Training()
    old = checkpointer_of(homes.of_job(set()), training, every=3, job=JOB)
    train_until(old, training, 6)
    new = checkpointer_of(homes.of_job(set()), newer, every=3, job=JOB)
    wait_for_savers = RunHomes._wait_for_savers

    def wait(self: RunHomes, *arguments: Any) -> list[str]:
        found = wait_for_savers(self, *arguments)
        if self is old._homes and new.launch is None:
            new.restore()
        return found

    monkeypatch.setattr(RunHomes, "_wait_for_savers", wait)
    with pytest.raises(CkptError) as caught:
        old.regroup()
    assert caught.value.code == Code.FENCED
    assert list_vote_numbers(homes.stores[1]) == [1, 2]
    with new:
        batches = newer.batches()
        for step in new.steps(STEPS):
            newer.train(step, next(batches))
    assert newer.bits() == undisturbed().bits()
    with contextlib.suppress(CkptError):
        old.close()


def test_what_a_writer_knows_of_a_home_says_nothing_of_another(
    homes: Directories, monkeypatch: Any
) -> None:
    """A clean-up swept the files of a committed checkpoint, which was retired at the former home."""
    monkeypatch.setattr(HomeCopies, "_tidy", lambda *_: "")  # retires nothing at the other homes
    off: set[str] = set()
    fails: list[bool] = []

    class Failing(Switched):
        def before(self, operation: Operation) -> None:
            super().before(operation)
            is_clean_up = operation.op == "create" and "condemned" in operation.path
            if self.place == "a" and fails and is_clean_up:
                off.add("a")
                super().before(operation)

    training = Training()
    places = [Failing(store, name, off) for name, store in zip(NAMES, homes.stores, strict=True)]
    checkpointer = checkpointer_of(
        places, training, every=3, keep=1, saving=ckptfmt.Saving(saver="inline"), job=JOB
    )
    batches = training.batches()
    for step in checkpointer.steps(STEPS):
        if step == 10:
            break
        training.train(step, next(batches))
        if step == 7:
            fails.append(True)
    assert off
    checkpointer.regroup()
    train_until(checkpointer, training, 12)
    for path in homes.paths[1:]:
        store = LocalStore(path / "step-00000003-l0001", writable=False)
        if isinstance(read_register(store), Manifest):
            assert ckptfmt.validate(store), path
    off.clear()
    checkpointer.close()


def test_a_mirror_is_copied_from_the_home_of_the_launch(homes: Directories, tmp_path: Path) -> None:
    """A copy that hangs at the former home kept all later ones from the mirror."""
    off: set[str] = set()
    hangs: list[bool] = []

    mirror = tmp_path / "mirror"
    training = Training()
    here, *others = hanging(homes, off, hangs=hangs, thread="ckptfmt-mirror")
    checkpointer = ckptfmt.Checkpointer(
        here,
        training.state,
        copies=[ckptfmt.Homes(others, away_after_s=1.0), ckptfmt.Mirror(mirror)],
        every=3,
        saving=ckptfmt.Saving(saver="thread"),
        job=JOB,
    )
    train_until(checkpointer, training, 7)
    wait_until(lambda: have([*homes.paths, mirror], 6))
    hangs.append(True)
    train_until(checkpointer, training, 10)
    wait_until(lambda: bool(off))
    checkpointer.regroup()
    train_until(checkpointer, training, STEPS)
    wait_until(lambda: have([mirror], STEPS))
    off.clear()
    hangs.clear()
    checkpointer.close()
    assert training.bits() == undisturbed().bits()


def test_a_token_is_refused(homes: Directories) -> None:
    training = Training()
    with checkpointer_of(homes.paths, training) as checkpointer:
        with pytest.raises(CkptError) as caught:
            checkpointer.regroup(ckptfmt.Job(writer=(0, 1), agree="token"))
        assert caught.value.code == Code.ARGUMENT
