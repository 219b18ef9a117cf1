"""A disk that is full, or a store that is away, for a while: the training goes on, says so, and ends at a limit."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import pytest

import ckptfmt
from ckptfmt.checkpointer import Checkpointer
from ckptfmt.errors import CkptError, Code, err
from ckptfmt.store.memory import MemoryStore
from ckptfmt.store.protocol import Store
from tests.builders import code_of
from tests.interface.test_group import Allgather, run_writers
from tests.loop.test_checkpointer import committed
from tests.stores.hooked import HookedStore, Operation
from tests.tiny import Tiny

WAIT_S = 60.0


class Outage:
    """Whether the storage is out of order just now, and with which code."""

    def __init__(
        self, code: Code, *, operations: frozenset[str] | None = None, path_end: str = ""
    ) -> None:
        self.code, self.operations, self.path_end, self.is_on = code, operations, path_end, False


class FailingStore(HookedStore):
    """A store whose operations fail during an outage."""

    def __init__(self, inner: Store, outage: Outage) -> None:
        super().__init__(inner)
        self.outage = outage

    def before(self, operation: Operation) -> None:
        """Fail an operation of the kind that is out of order."""
        outage = self.outage
        is_meant = outage.operations is None or operation.op in outage.operations
        if outage.is_on and is_meant and operation.path.endswith(outage.path_end):
            raise err(outage.code, f"injected into {operation.op}", where=operation.path)


#: A full disk, which can be read; a store that answers nothing.
FULL = (Code.NO_SPACE, frozenset({"create"}))
AWAY = (Code.STORE_NO_ANSWER, None)


def train(
    store: Any, outage: Outage, out: range, *, total: int = 12, every: int = 2, **options: Any
) -> tuple[Checkpointer, Tiny]:
    """Train, and save every two steps, each save over before the next step; the storage fails in the steps of `out`."""
    run = Tiny(worker=(0, 1))
    with Checkpointer(
        store, run.state, saver=options.pop("saver", "thread"), **options
    ) as checkpointer:
        checkpointer.restore_rng()
        batches = run.batches()
        try:
            for step in range(checkpointer.step, total):
                run.train(step, next(batches))
                if (step + 1) % every == 0:
                    outage.is_on = step + 1 in out
                    handle = checkpointer.save(step=step + 1)
                    assert handle is not None
                    handle.wait_over(WAIT_S)
                    assert handle.state == ("FAILED" if outage.is_on else "COMMITTED")
                else:
                    checkpointer.end_step(step + 1)
        finally:
            outage.is_on = False
    return checkpointer, run


@pytest.mark.parametrize("saver", ["thread", "inline"])
@pytest.mark.parametrize("kind", [FULL, AWAY])
def test_a_run_outlives_an_outage_of_its_storage(
    saver: str, kind: tuple[Code, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """The next save raised what the one before had met, and ended the training."""
    inner, outage = MemoryStore(), Outage(kind[0], operations=kind[1])
    with caplog.at_level(logging.WARNING, "ckptfmt"):
        checkpointer, run = train(FailingStore(inner, outage), outage, range(4, 9), saver=saver)
    assert committed(inner) == [(2, 1), (10, 1), (12, 1)]
    assert sorted(run.losses) == list(range(12))
    (report,) = checkpointer.reports
    assert report.startswith("SAVE_FAILED: a checkpoint is missing, and the training goes on")
    assert kind[0] in report
    assert "step-00000008-l0001" in report or "it is 3 now" in report
    assert report in caplog.text
    resumed, again = train(inner, outage, range(0), total=14)
    assert (resumed.load_report and resumed.load_report.claim, min(again.losses)) == ("T1", 12)


@pytest.mark.parametrize("saver", ["thread", "inline"])
def test_the_run_ends_when_too_many_saves_in_a_row_have_failed(saver: str) -> None:
    inner, outage = MemoryStore(), Outage(Code.NO_SPACE, operations=frozenset({"create"}))
    with pytest.raises(CkptError) as caught:
        train(
            FailingStore(inner, outage), outage, range(4, 99), total=40, saver=saver, failed_saves=3
        )
    assert caught.value.code is Code.NO_SPACE
    assert committed(inner) == [(2, 1)]


def test_a_save_that_succeeds_begins_the_count_anew() -> None:
    inner, outage = MemoryStore(), Outage(Code.STORE_IO, operations=frozenset({"create"}))
    store = FailingStore(inner, outage)
    run = Tiny(worker=(0, 1))
    with Checkpointer(store, run.state, saver="thread", failed_saves=1) as checkpointer:
        for step in range(1, 11):
            outage.is_on = step % 2 == 0
            handle = checkpointer.save(step=step)
            assert handle is not None
            handle.wait_over(WAIT_S)
        outage.is_on = False
        checkpointer.save(step=11)
    assert [step for step, _ in committed(inner)] == [1, 3, 5, 7, 9, 11]


@pytest.mark.parametrize("saver", ["thread", "inline"])
def test_failed_saves_0_ends_the_run_at_the_first(saver: str) -> None:
    inner, outage = MemoryStore(), Outage(Code.NO_SPACE, operations=frozenset({"create"}))
    with pytest.raises(CkptError) as caught:
        train(FailingStore(inner, outage), outage, range(4, 99), saver=saver, failed_saves=0)
    assert caught.value.code is Code.NO_SPACE


@pytest.mark.parametrize("saver", ["thread", "inline"])
def test_the_last_save_of_a_run_is_told_by_close(saver: str) -> None:
    """No later save takes its place: the training's end would be lost without a word."""
    inner, outage = MemoryStore(), Outage(Code.NO_SPACE, operations=frozenset({"create"}))
    with pytest.raises(CkptError) as caught:
        train(FailingStore(inner, outage), outage, range(12, 13), saver=saver)
    assert caught.value.code is Code.NO_SPACE


@pytest.mark.parametrize("saver", ["thread", "inline"])
def test_a_fault_of_the_program_ends_the_run_as_ever(saver: str) -> None:
    run = Tiny(worker=(0, 1))
    with Checkpointer(MemoryStore(), run.state, saver=saver) as checkpointer:  # type: ignore[arg-type]
        checkpointer.save(step=1)
        run.state.extra = {"socket": object()}
        assert code_of(lambda: checkpointer.save(step=2)) == Code.STATE_UNSUPPORTED


@pytest.mark.parametrize("saver", ["thread", "inline"])
@pytest.mark.parametrize("who", [0, 1])
def test_all_processes_go_on_and_end_together(saver: Any, who: int) -> None:
    """The disk of one node is full; the others hear of it, and count as it does."""
    inner, allgather = MemoryStore(), Allgather(2)
    outages = [
        Outage(Code.NO_SPACE, path_end="msgpack") for _ in range(2)
    ]  # records of failures fit in

    def body(writer: int) -> tuple[int, list[str]]:
        outage = outages[writer]
        store = FailingStore(inner, outage) if writer == who else inner
        state = ckptfmt.State(weights={"w": 1}, extra={"own": ckptfmt.PerWorker(writer)})
        options: Any = {
            "saver": saver,
            "writer": (writer, 2),
            "agree": allgather.of(writer),
            "deadline_s": WAIT_S,
        }
        with contextlib.ExitStack() as stack:
            checkpointer = stack.enter_context(
                Checkpointer(store, state, failed_saves=2, **options)
            )
            saved = 0
            try:
                for step in range(1, 20):
                    outage.is_on = writer == who and (step in (2, 3) or step > 5)
                    handle = checkpointer.save(step=step)
                    assert handle is not None
                    handle.wait_over(WAIT_S)
                    saved = step
            except CkptError as error:
                outage.is_on = False
                assert error.code in (Code.NO_SPACE, Code.WRITER_FAILED)
            reports = list(checkpointer.reports)
        return saved, reports

    found = run_writers(2, body)
    # Steps 6, 7 and 8 fail, and the save of step 9 hears of the third.
    assert [saved for saved, _ in found] == [8, 8]
    assert all(len(reports) == 1 and "NO_SPACE" in reports[0] for _, reports in found)
    assert [step for step, _ in committed(inner)] == [1, 4, 5]


@pytest.mark.parametrize("number", [-1, 1.5, True, "3"])
def test_a_limit_that_is_no_number_is_refused(number: Any) -> None:
    with pytest.raises(CkptError, match="failed_saves=") as caught:
        Checkpointer(MemoryStore(), failed_saves=number)
    assert caught.value.code is Code.ARGUMENT
