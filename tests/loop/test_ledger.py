"""The ledger of a run: what launches record of their time, and what `Run.goodput` and `ckptfmt goodput` say of it."""

import dataclasses
import json
import os
import pathlib
import signal
import time
from typing import Any

import pytest

import ckptfmt
from ckptfmt.__main__ import main
from ckptfmt.checkpointer import Checkpointer
from ckptfmt.commit.waiting import list_held, poll
from ckptfmt.run.ledger import LedgerEntry
from ckptfmt.run.ledger_writer import put_entry
from ckptfmt.store import open_store
from ckptfmt.store.memory import MemoryStore
from ckptfmt_tools.cli.goodput_table import simulate_line
from ckptfmt_tools.cli.waste import seconds_text
from tests.homes import files_of
from tests.interface.test_group import Allgather, run_writers
from tests.loop.test_checkpointer import Trainer

#: How long a saver may take on a busy machine, in seconds.
WAIT_S = 600.0


class Clock:
    """A clock of the steps and the ledger: steps of a second, saves that cost what they are told to."""

    def __init__(self, checkpointer: Checkpointer, save_s: float) -> None:
        self.now_s = 1000.0
        self.save_s = save_s
        keeper = checkpointer._pace.meters.keeper
        assert keeper is not None
        checkpointer._pace.clock = keeper._clock = lambda: self.now_s
        keeper._started_s = self.now_s - 5
        save = checkpointer._saves.save

        def slowly(*arguments: Any, **options: Any) -> Any:
            self.now_s += self.save_s
            return save(*arguments, **options)

        checkpointer._saves.save = slowly  # type: ignore[method-assign]


def train(
    store: Any, steps: int, *, save_s: float = 2.0, every: int = 10, **options: Any
) -> Checkpointer:
    """Train so many steps of a second each, with saves that cost `save_s`, in a process that began 5 s ago."""
    trainer = Trainer()
    checkpointer = Checkpointer(
        store, trainer.state, every=every, saver="inline", ledger=True, **options
    )
    clock = Clock(checkpointer, save_s)
    with checkpointer:
        first = checkpointer.step
        for number in checkpointer.steps(10**6):
            clock.now_s += 1
            trainer.step(number)
            if number == first + steps - 1:
                break
    return checkpointer


def entry_of(store: Any, launch: int) -> LedgerEntry:
    path = f"ledger/{launch:04d}.json"
    return LedgerEntry.parse(store.read(path, limit_nbytes=1 << 20), where=path)


def test_an_entry_says_where_the_time_of_its_launch_went() -> None:
    store = MemoryStore()
    train(store, 36)
    entry = entry_of(store, 1)
    times = entry.times
    # The body that `break` leaves isn't a step; its second counts all the same. What saves blocked
    # is the test's own.
    assert (entry.first_step, entry.step, entry.save_count) == (0, 35, 3)
    assert times.initialising + times.restoring == pytest.approx(5000, abs=1)
    assert times.lost + times.blocked == pytest.approx(6000, abs=100)
    assert times.training == pytest.approx(36000, abs=100)
    assert entry.ended_unix_ms == entry.measured_unix_ms
    assert entry.measured_unix_ms - entry.started_unix_ms == pytest.approx(47000, abs=1)
    assert entry.commit_count == 3


def test_the_entry_of_a_save_is_there_once_it_is_committed() -> None:
    """A process that is killed leaves the times up to its last save, without an end where nobody saw it."""
    store = MemoryStore()
    trainer = Trainer()
    checkpointer = Checkpointer(store, trainer.state, every=10, saver="inline", ledger=True)
    clock = Clock(checkpointer, 2.0)
    checkpointer.restore()
    steps = checkpointer.steps(100)
    for number in steps:
        entry = entry_of(store, 1)  # from the first step on
        assert entry.step == number // 10 * 10
        assert entry.ended_unix_ms is None
        clock.now_s += 1
        trainer.step(number)
        if number == 24:
            break
    assert entry.times.in_training == pytest.approx((20 + 2) * 1000, abs=100)
    checkpointer.close()


def test_goodput_of_a_run_that_went_on_twice() -> None:
    store = MemoryStore()
    for _ in range(3):
        train(
            store, 36
        )  # saved at 10, 20 and 30; 5 steps, and one that was left half-way, are thrown away
    found = ckptfmt.Run(store).goodput()
    # The last launch may still go on from where it is: nobody threw anything away.
    assert found.training_s == pytest.approx(30 + 30 + 36, rel=0.05)
    assert found.redone_s == pytest.approx(6 + 6, abs=3)
    assert found.goodput is not None
    assert found.launch_count == 3
    assert found.save_count == 9


def test_an_entry_of_before_does_not_take_the_place_of_a_later_one() -> None:
    """A save that is committed behind the end of its trainer brings the entry of its begin."""
    store = MemoryStore()
    train(store, 36)
    last = entry_of(store, 1)
    assert last.ended_unix_ms is not None
    earlier = dataclasses.replace(
        last, measured_unix_ms=last.measured_unix_ms - 1000, ended_unix_ms=None
    )
    put_entry(store, 1, earlier.dump())
    assert entry_of(store, 1) == last
    later = dataclasses.replace(earlier, measured_unix_ms=last.measured_unix_ms + 1000)
    put_entry(store, 1, later.dump())
    assert entry_of(store, 1) == later
    put_entry(store, 2, dataclasses.replace(later, launch=2).dump())
    assert entry_of(store, 2).launch == 2


def test_without_the_option_there_is_nothing() -> None:
    store, trainer = MemoryStore(), Trainer()
    with Checkpointer(store, trainer.state, every=2, saver="inline") as checkpointer:
        for number in checkpointer.steps(6):
            trainer.step(number)
    assert checkpointer._pace.meters.keeper is None
    assert not [path for path in files_of(store) if path.startswith("ledger")]
    found = ckptfmt.Run(store).goodput()
    assert "1 of 1 launches have no ledger entry (1)" in found.doubts[0]
    assert found.down_s == found.redone_s == 0


def test_process_0_alone_writes_it() -> None:
    store, allgather = MemoryStore(), Allgather(2)

    def body(writer: int) -> None:
        trainer = Trainer()
        options: Any = {"writer": (writer, 2), "agree": allgather.of(writer)}
        with Checkpointer(
            store, trainer.state, every=2, saver="inline", ledger=True, **options
        ) as checkpointer:
            assert (checkpointer._pace.meters.keeper is None) == (writer == 1)
            for number in checkpointer.steps(4):
                trainer.step(number)

    run_writers(2, body)
    assert [path for path in files_of(store) if path.startswith("ledger")] == ["ledger/0001.json"]


@pytest.mark.parametrize("content", [b"", b"{}", b'{"digest":"x","signed":{}}'])
def test_an_entry_that_can_not_be_read_stops_nothing(content: bytes) -> None:
    """Spec: REQ-RUN-044."""
    store = MemoryStore()
    train(store, 36)
    store.replace("ledger/0001.json", content)
    assert train(store, 5).step == 34
    assert ckptfmt.validate(store).valid
    assert any("can't be read" in doubt for doubt in ckptfmt.Run(store).goodput().doubts)


def test_an_entry_of_another_run_says_nothing() -> None:
    """Spec: REQ-RUN-043."""
    store, other = MemoryStore(), MemoryStore()
    train(store, 12)
    train(other, 12)
    store.replace("ledger/0001.json", other.read("ledger/0001.json", limit_nbytes=1 << 20))
    assert any("it belongs to run" in doubt for doubt in ckptfmt.Run(store).goodput().doubts)


def test_a_ledger_that_can_not_be_written_ends_no_training(
    tmp_path: pathlib.Path, caplog: Any
) -> None:
    (tmp_path / "ledger").write_bytes(b"in the way")
    trainer = Trainer()
    with Checkpointer(
        tmp_path, trainer.state, every=2, saver="inline", ledger=True
    ) as checkpointer:
        for number in checkpointer.steps(4):
            trainer.step(number)
    assert checkpointer.step == 4
    assert [line for line in caplog.messages if "can't be written" in line]


def killed_training(path: pathlib.Path) -> None:
    """Train in this process with a saver of its own, and be killed five steps behind a commit."""
    trainer = Trainer()
    checkpointer = Checkpointer(path, trainer.state, ledger=True)
    checkpointer.restore()
    for number in checkpointer.steps(100):
        trainer.step(number)
        if number == 10:
            handle = checkpointer.save()
            assert handle is None  # it is taken when the step is over
        if number == 12:
            assert checkpointer._handle is not None
            checkpointer._handle.wait()
        if number == 17:
            os.kill(os.getpid(), signal.SIGKILL)


def test_the_saver_says_when_a_killed_trainer_was_gone(tmp_path: pathlib.Path, capsys: Any) -> None:
    before_ms = time.time_ns() // 1_000_000
    pid = os.fork()
    if pid == 0:
        try:
            killed_training(tmp_path)
        finally:
            os._exit(3)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    store = open_store(tmp_path, writable=False)
    entry = wait_for_end(store)
    assert entry.step == 11
    assert entry.ended_unix_ms is not None
    assert (
        before_ms - 1000
        <= entry.measured_unix_ms
        <= entry.ended_unix_ms
        <= time.time_ns() // 1_000_000 + 1000
    )
    trainer = Trainer()
    with Checkpointer(tmp_path, trainer.state, ledger=True) as checkpointer:
        assert checkpointer.step == 11
        for number in checkpointer.steps(14):
            trainer.step(number)
    found = ckptfmt.Run(tmp_path).goodput()
    assert found.redone_s > 0
    assert found.unknown_s == 0
    assert found.doubts == ()
    assert main(["goodput", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["times_s"] == pytest.approx(found.times_s)
    assert main(["goodput", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "training that was thrown away" in text
    assert simulate_line(found) in text
    page = tmp_path.with_suffix(".html")
    assert main(["report", str(tmp_path), "--html", str(page), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["durations"] == {
        "training_s": found.costs.lost_s,
        "commit_s": found.costs.commit_s,
    }
    assert found.costs.commit_s is not None
    assert seconds_text(found.costs.commit_s) in page.read_text("utf-8")
    assert "not recorded" not in page.read_text("utf-8")


def wait_for_end(store: Any) -> LedgerEntry:
    """Wait until the saver of a killed trainer has ended."""
    for _ in poll(WAIT_S):
        entry = entry_of(store, 1)
        if entry.ended_unix_ms is not None and not list_held(store):
            return entry
    raise AssertionError(f"the saver of a killed trainer said nothing for {WAIT_S:g} s")
