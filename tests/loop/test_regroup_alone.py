"""Regroups of writers that a token connects, as threads of one process: errors, and files."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfmt
from ckptfmt.errors import CkptError, Code, err
from ckptfmt.run.lineage import check_not_fenced
from ckptfmt.store import open_store

INLINE = ckptfmt.Saving(saver="inline")


class Writer:
    """One writer of a job, with an array that counts the steps."""

    def __init__(
        self, run: Path, number: int, token: str, *, count: int = 2, deadline_s: float = 20.0
    ) -> None:
        self.number = number
        self.count = count
        self.array = np.zeros(4)
        self.checkpointer = ckptfmt.Checkpointer(
            run,
            ckptfmt.State(weights={"array": self.array}, rng=False),
            saving=INLINE,
            job=self.job(token, deadline_s),
            checks=ckptfmt.Checks(witness=False),
        )

    def job(self, token: str, deadline_s: float = 20.0) -> ckptfmt.Job:
        return ckptfmt.Job(writer=(self.number, self.count), agree=token, deadline_s=deadline_s)

    def restore(self) -> None:
        self.checkpointer.restore()
        self.checkpointer.restore_rng()

    def train(self, step: int) -> None:
        self.array[:] = step
        self.checkpointer.end_step(step)

    def begin(self) -> None:
        """Train and save two steps, and train a third step."""
        self.restore()
        self.train(1)
        self.train(2)
        self.checkpointer.save()
        self.train(3)

    def regroup(self, token: str) -> Any:
        found = self.checkpointer.regroup(self.job(token))
        self.checkpointer.restore_rng()
        return found


def together(*actions: Any) -> list[Any]:
    with ThreadPoolExecutor(len(actions)) as threads:
        return [one.result() for one in [threads.submit(action) for action in actions]]


def code_of(action: Any) -> Code:
    with pytest.raises(CkptError) as caught:
        action()
    return Code[caught.value.code]


def test_a_replacement_joins(tmp_path: Path) -> None:
    first, lost = Writer(tmp_path, 0, "a"), Writer(tmp_path, 1, "a")
    together(first.begin, lost.begin)
    replacement = Writer(tmp_path, 1, "b")
    together(lambda: first.regroup("b"), replacement.restore)
    for writer in (first, replacement):
        assert (writer.checkpointer.step, writer.array[0]) == (2, 2)
        assert writer.checkpointer.launch is not None
        assert writer.checkpointer.launch.launch == 2
    assert (first.checkpointer.rewinds, replacement.checkpointer.rewinds) == (1, 0)
    together(lambda: first.train(3), lambda: replacement.train(3))
    together(first.checkpointer.save, replacement.checkpointer.save)
    assert [one.launch for one in ckptfmt.Run(tmp_path).list()] == [1, 2]
    together(first.checkpointer.close, replacement.checkpointer.close)
    # The lost process may live: no save of its launch can be committed any more.
    store = open_store(tmp_path, writable=False)
    assert code_of(lambda: check_not_fenced(store, 1)) == Code.FENCED


def test_without_a_replacement_the_wait_ends_and_another_call_succeeds(tmp_path: Path) -> None:
    first, lost = Writer(tmp_path, 0, "a"), Writer(tmp_path, 1, "a")
    together(first.begin, lost.begin)
    begun_s = time.monotonic()
    impatient = ckptfmt.Job(writer=(0, 2), agree="b", deadline_s=0.5)
    assert code_of(lambda: first.checkpointer.regroup(impatient)) == Code.WRITERS_MISSING
    assert time.monotonic() - begun_s < 15
    assert code_of(lambda: first.train(4)) == Code.ARGUMENT  # the state may be partly loaded
    replacement = Writer(tmp_path, 1, "c")
    together(lambda: first.regroup("c"), replacement.restore)
    assert first.array[0] == replacement.array[0] == 2


def test_a_process_that_failed_to_start_joins_the_next_group(tmp_path: Path) -> None:
    first, lost = Writer(tmp_path, 0, "a"), Writer(tmp_path, 1, "a")
    together(first.begin, lost.begin)
    replacement = Writer(tmp_path, 1, "b", deadline_s=0.5)
    assert code_of(replacement.restore) == Code.WRITERS_MISSING
    together(lambda: first.regroup("c"), lambda: replacement.regroup("c"))
    assert first.array[0] == replacement.array[0] == 2


@pytest.fixture
def alone(tmp_path: Path) -> Writer:
    writer = Writer(tmp_path, 0, "a", count=1)
    writer.begin()
    return writer


def test_another_number_is_refused(alone: Writer) -> None:
    job = ckptfmt.Job(writer=(0, 2), agree="b")
    assert code_of(lambda: alone.checkpointer.regroup(job)) == Code.ARGUMENT
    alone.train(4)  # nothing has changed


def test_a_launch_of_others_is_not_taken_back(alone: Writer, tmp_path: Path) -> None:
    Writer(tmp_path, 0, "b", count=1).restore()
    assert code_of(lambda: alone.regroup("c")) == Code.FENCED


def test_a_rewind_of_one_process(alone: Writer) -> None:
    assert alone.regroup("b").step == 2
    assert alone.array[0] == 2
    alone.train(3)
    alone.checkpointer.close()
    assert code_of(lambda: alone.regroup("c")) == Code.ARGUMENT


def test_without_a_save_there_is_nothing_to_go_back_to(tmp_path: Path) -> None:
    writer = Writer(tmp_path, 0, "a", count=1)
    writer.restore()
    writer.train(1)
    assert code_of(lambda: writer.regroup("b")) == Code.NOT_COMMITTED


def test_within_the_body_of_a_step(alone: Writer) -> None:
    checkpointer = alone.checkpointer
    seen = []
    for step in checkpointer.steps(6):
        seen.append((step, alone.array[0]))
        if step == 4 and not checkpointer.rewinds:
            checkpointer.regroup(alone.job("b"))
            continue
        alone.array[:] = step + 1
    assert seen == [(3, 3), (4, 4), (2, 2), (3, 3), (4, 4), (5, 5)]
    checkpointer.close()


def test_a_healer_counts_the_deaths(tmp_path: Path) -> None:
    """A death leaves no record of an end: the same steps are done again, at most `starts` times."""
    array = np.zeros(4)
    healer = ckptfmt.Healer(starts=3)
    checkpointer = ckptfmt.Checkpointer(
        tmp_path,
        ckptfmt.State(weights={"array": array}, rng=False),
        saving=INLINE,
        job=ckptfmt.Job(writer=(0, 1)),
        stop=ckptfmt.Stop(healer=healer),
    )
    checkpointer.restore_rng()
    checkpointer.end_step(1)
    checkpointer.save()
    codes: list[str] = []
    for _ in range(4):
        checkpointer.end_step(2)
        try:
            checkpointer.regroup()
        except CkptError as error:
            codes.append(error.code)
            break
        codes.append("")
        checkpointer.restore_rng()
    assert codes == ["", "", Code.HEALING_STOPPED]


def test_a_training_without_losses_imports_nothing_of_this(tmp_path: Path) -> None:
    program = f"""
import sys, numpy as np, ckptfmt
state = ckptfmt.State(weights=[np.zeros(3)], rng=False)
for _ in range(2):
    with ckptfmt.Checkpointer({str(tmp_path / "run")!r}, state) as checkpointer:
        for _ in checkpointer.steps(checkpointer.step + 2):
            pass
assert checkpointer.load_report and "ckptfmt.read.lending" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr


def codes_of(*actions: Any) -> list[Any]:
    """The results of actions at the same time; the code in the place of an error."""

    def result_of(action: Any) -> Any:
        try:
            return action()
        except CkptError as error:
            return Code[error.code]

    return together(*[lambda action=action: result_of(action) for action in actions])


def test_a_launch_begun_by_a_replacement_that_lost_its_peer_is_known_to_the_next_group(
    tmp_path: Path,
) -> None:
    """The replacement of process 0 creates the record; another process dies before it hears so."""
    writers = [Writer(tmp_path, number, "a", count=3) for number in range(3)]
    together(*[writer.begin for writer in writers])
    replacement = Writer(tmp_path, 0, "b", count=3, deadline_s=3.0)
    exchanges = 0
    gather = (
        writers[2]
        .checkpointer._make_group(
            writers[2].job("b", 3.0), writers[2].checkpointer._pace.signals.end_s
        )
        ._gather
    )

    def dying(value: bytes) -> Any:
        nonlocal exchanges
        exchanges += 1
        if exchanges == 4:
            raise SystemExit
        return gather(value)

    def die() -> str:
        job = ckptfmt.Job(writer=(2, 3), agree=dying, deadline_s=3.0)
        with pytest.raises(SystemExit):
            writers[2].checkpointer.regroup(job)
        return "lost"

    told = codes_of(
        replacement.restore,
        lambda: writers[1].checkpointer.regroup(writers[1].job("b", 3.0)),
        die,
    )
    assert told == [Code.WRITERS_MISSING, Code.WRITERS_MISSING, "lost"]
    assert (tmp_path / "launches" / "0002.json").is_file()

    last = Writer(tmp_path, 2, "c", count=3)
    together(lambda: replacement.regroup("c"), lambda: writers[1].regroup("c"), last.restore)
    for writer in (replacement, writers[1], last):
        assert writer.checkpointer.launch is not None
        assert (writer.checkpointer.launch.launch, writer.array[0]) == (3, 2)


def test_a_survivor_that_has_met_a_signal_leaves_no_step_to_the_others_alone(
    tmp_path: Path,
) -> None:
    """It ended its loop at once, and the replacement waited for it."""
    first, lost = Writer(tmp_path, 0, "a"), Writer(tmp_path, 1, "a")
    together(first.begin, lost.begin)
    first.checkpointer._pace.signals._note(signal.SIGTERM, None)
    replacement = Writer(tmp_path, 1, "b")
    together(lambda: first.regroup("b"), replacement.restore)

    steps = together(
        lambda: list(first.checkpointer.steps(9)), lambda: list(replacement.checkpointer.steps(9))
    )
    assert steps[0] == steps[1] != []
    assert first.checkpointer.stopped == replacement.checkpointer.stopped


def test_an_error_of_one_survivor_reaches_all_processes_before_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, lost = Writer(tmp_path, 0, "a"), Writer(tmp_path, 1, "a")
    together(first.begin, lost.begin)

    def is_copying(_timeout_s: float) -> Any:
        raise err(Code.SAVE_PENDING, "a snapshot isn't copied")

    monkeypatch.setattr(first.checkpointer._saves, "regroup", is_copying)
    replacement = Writer(tmp_path, 1, "b")
    begin_s = time.monotonic()

    told = codes_of(lambda: first.regroup("b"), replacement.restore)

    assert told == [Code.SAVE_PENDING, Code.SAVE_PENDING]
    assert time.monotonic() - begin_s < 15  # the deadline is 20 s


def test_a_token_is_given_anew(tmp_path: Path) -> None:
    first, lost = Writer(tmp_path, 0, "a"), Writer(tmp_path, 1, "a")
    together(first.begin, lost.begin)

    assert code_of(first.checkpointer.regroup) == Code.ARGUMENT
