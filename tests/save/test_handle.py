"""What the caller of a save sees of it: states that only go on, waits that end, a report when there is one."""

import functools
import itertools
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfmt.errors import CkptError, Code, CommitError, err
from ckptfmt.saving.handle import STATES, Callbacks, SaveHandle, SaveReport
from tests.builders import code_of, error_of

REPORT = SaveReport(
    path="run/step-00000003-l0001", digest="blake3:00", step=3, nbytes=24, writer_count=1
)
FULL = err(Code.NO_SPACE, "the disk is full", where="weights")


def make(state="STAGING"):
    return SaveHandle(step=3, path=REPORT.path, begin_s=time.monotonic(), state=state)


def at(state):
    """Return a handle that has gone the usual way to a state."""
    handle = make()
    for reached in STATES[1 : STATES.index(state) + 1]:
        handle.tell_state(reached, REPORT if reached == "COMMITTED" else None)
    return handle


TELLS = {
    "copied": lambda handle: handle.tell_copied(),
    "STAGED": lambda handle: handle.tell_state("STAGED"),
    "WRITTEN": lambda handle: handle.tell_state("WRITTEN"),
    "COMMITTED": lambda handle: handle.tell_state("COMMITTED", REPORT),
    "over": lambda handle: handle.tell_over(("step-00000001-l0001",)),
    "failed": lambda handle: handle.tell_failed(FULL),
}


@given(st.lists(st.sampled_from(sorted(TELLS)), max_size=10))
def test_whatever_is_told_in_whatever_order_it_goes_on_only(told) -> None:
    """A message may come late, twice, or after the trainer has given the save up."""
    handle, copied, over, failed, reached = make(), False, False, False, 0
    for what in told:
        TELLS[what](handle)
        if what in STATES and not failed:
            reached = max(reached, STATES.index(what))
        failed |= what == "failed" and STATES[reached] != "COMMITTED"
        copied |= what == "copied"
        over |= what in ("over", "failed")
        assert handle.state == ("FAILED" if failed else STATES[reached])
        assert (handle.error is FULL) == failed
        assert (handle.report is not None) == (handle.state == "COMMITTED")
        assert handle.is_through == (copied and (failed or reached >= STATES.index("WRITTEN")))
        assert handle.is_over == (copied and over) == handle.wait_over(0)
        assert [handle.times[state] for state in STATES if state in handle.times] == sorted(
            handle.times.values()
        )
        assert handle.times.keys() <= set(STATES)


@pytest.mark.parametrize(("reached", "state"), list(itertools.product(STATES, STATES)))
def test_wait_returns_if_the_state_is_reached_and_else_says_that_it_is_pending(
    reached, state
) -> None:
    handle = at(reached)
    if STATES.index(state) <= STATES.index(reached):
        assert handle.wait(state, timeout_s=0) == (REPORT if reached == "COMMITTED" else None)
        assert handle.wait(state) == handle.report
        return
    error = error_of(lambda: handle.wait(state, timeout_s=0.01))
    assert (error.code, type(error), error.where) == (Code.SAVE_PENDING, CommitError, handle.path)
    assert reached in error.detail
    assert state in error.detail
    assert handle.state == reached


@pytest.mark.parametrize("state", STATES[1:])
def test_whoever_waits_is_woken(state) -> None:
    handle = make()
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(handle.wait, state, timeout_s) for timeout_s in (None, 20, 20.0)]
        time.sleep(0.02)
        assert not any(found.done() for found in waiting)
        handle.tell_state("COMMITTED", REPORT)  # whatever came before it was lost, or overtaken
        assert [found.result(20) for found in waiting] == [REPORT] * 3


def test_failure_wakes_whoever_waits() -> None:
    handle = make()
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(code_of, action) for action in (handle.wait, handle.wait_staged)]
        over = pool.submit(handle.wait_over)
        time.sleep(0.02)
        assert handle.tell_failed(FULL)
        assert [found.result(20) for found in waiting] == [Code.NO_SPACE] * 2
        time.sleep(0.02)
        assert not over.done()  # a thread may still fill its slot
        handle.tell_copied()
        assert over.result(20)


@pytest.mark.parametrize("state", STATES)
def test_failed_save_raises_its_error_at_each_wait(state) -> None:
    handle = at("WRITTEN")
    assert handle.tell_failed(FULL)
    for _ in range(2):
        assert error_of(lambda: handle.wait(state, timeout_s=0)) is FULL
    assert (handle.state, handle.report) == ("FAILED", None)


def test_what_is_committed_cannot_fail_any_more() -> None:
    """A saver that dies while it cleans up takes no checkpoint with it."""
    handle = at("COMMITTED")
    assert not handle.tell_failed(FULL)
    assert (handle.state, handle.error) == ("COMMITTED", None)
    assert handle.wait() == REPORT


def test_only_the_first_failure_is_told() -> None:
    handle = make()
    assert handle.tell_failed(FULL)
    assert not handle.tell_failed(err(Code.SAVER_LOST, "it ended"))
    assert handle.error is FULL


def test_clean_up_is_part_of_the_report() -> None:
    handle = at("COMMITTED")
    assert handle.report is not None
    assert handle.report.removed == ()
    handle.tell_over(("step-00000001-l0001",))
    report = handle.wait()
    assert report is not None
    assert report.removed == ("step-00000001-l0001",)


def test_staged_is_one_thing_and_copied_another() -> None:
    """Tensors may be changed once they are copied; they are safe from our death once the saver has said so."""
    handle = make()
    assert code_of(lambda: handle.wait_copied(0.01)) == Code.SAVE_PENDING
    handle.tell_copied()
    handle.wait_copied(0)
    assert code_of(lambda: handle.wait("STAGED", 0.01)) == Code.SAVE_PENDING
    assert code_of(lambda: handle.wait_staged(0.01)) == Code.SAVE_PENDING
    handle.tell_state("STAGED")
    assert handle.wait("STAGED", 0) is None
    handle.wait_staged(0)


def test_written_is_no_reason_to_change_what_is_being_copied() -> None:
    handle = make()
    handle.tell_state("WRITTEN")
    for wait in (handle.wait_copied, handle.wait_staged):
        assert code_of(functools.partial(wait, 0.01)) == Code.SAVE_PENDING
    assert not handle.is_through


def test_skipped_save_is_over_at_once_and_no_error() -> None:
    handle = make("SKIPPED")
    assert handle.wait() is handle.wait("STAGED", 0) is None
    handle.wait_staged(0)
    assert handle.wait_over(0)
    assert not handle.tell_failed(FULL)
    handle.tell_state("COMMITTED", REPORT)
    assert (handle.state, handle.report, handle.error, handle.times) == ("SKIPPED", None, None, {})


@pytest.mark.parametrize("state", ["", "DONE", "FAILED", "committed", "SKIPPED"])
def test_state_that_cannot_be_waited_for_is_refused(state) -> None:
    error = error_of(lambda: make().wait(state, timeout_s=0))
    assert error.code == Code.ARGUMENT
    assert "COMMITTED" in error.detail


def test_timeout_is_kept() -> None:
    """Also where other states wake the waiter meanwhile."""
    handle, stop = make(), threading.Event()

    def tell():
        while not stop.wait(0.001):
            handle.tell_copied()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(tell)
        begin_s = time.monotonic()
        with pytest.raises(CkptError, match=r"after 0\.1 s"):
            handle.wait(timeout_s=0.1)
        elapsed_s = time.monotonic() - begin_s
        stop.set()
    assert 0.1 <= elapsed_s < 10


def test_times_begin_with_the_call() -> None:
    handle = SaveHandle(step=3, path="", begin_s=time.monotonic() - 5)
    handle.tell_state("STAGED")
    handle.tell_state("STAGED")
    assert 5 <= handle.times["STAGED"] < 15
    assert handle.times.keys() == {"STAGED"}


def test_it_says_what_it_is() -> None:
    assert repr(make()) == "SaveHandle(step=3, state='STAGING', path='run/step-00000003-l0001')"


# --- callbacks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["COMMITTED", "FAILED", "SKIPPED"])
@pytest.mark.parametrize("asked", ["before", "after"])
def test_callback_of_the_end_is_called_once_whenever_it_is_asked_for(end, asked) -> None:
    callbacks, called = Callbacks(), list[Any]()
    handle = SaveHandle(
        step=3,
        path=REPORT.path,
        begin_s=0.0,
        callbacks=callbacks,
        state="SKIPPED" if end == "SKIPPED" else "STAGING",
    )

    def ask():
        handle.on_committed(lambda report: called.append(("committed", report)))
        handle.on_failed(lambda error: called.append(("failed", error)))

    if asked == "before":
        ask()
    handle.tell_copied()
    handle.tell_state("STAGED")
    assert callbacks.wait(0.0)
    if end == "COMMITTED":
        handle.tell_state("COMMITTED", REPORT)
    else:
        handle.tell_failed(FULL)
    handle.tell_over()
    handle.tell_failed(FULL)
    if asked == "after":
        ask()
    assert callbacks.wait(60)
    assert (
        called
        == {"COMMITTED": [("committed", REPORT)], "FAILED": [("failed", FULL)], "SKIPPED": []}[end]
    )
    assert handle.is_failure_taken
    assert not [thread for thread in threading.enumerate() if thread.name == "ckptfmt-callbacks"]


def test_callback_that_raises_is_logged_and_hides_no_other(caplog) -> None:
    callbacks, called = Callbacks(), list[Any]()

    def leave(_report):
        raise SystemExit(3)

    def fail(_report):
        raise ZeroDivisionError

    handle = SaveHandle(step=3, path=REPORT.path, begin_s=0.0, callbacks=callbacks)
    handle.on_committed(leave).on_committed(fail).on_committed(called.append)
    handle.tell_state("COMMITTED", REPORT)
    assert callbacks.wait(60)
    assert called == [REPORT]
    assert "ZeroDivisionError" in caplog.text
    assert "SystemExit" in caplog.text


def test_callback_that_blocks_holds_up_nobody_else() -> None:
    """It may also ask the handle, and end what waits for callbacks: no lock is held."""
    callbacks, gate, order = Callbacks(), threading.Event(), list[Any]()
    handles = [
        SaveHandle(step=n, path=REPORT.path, begin_s=0.0, callbacks=callbacks) for n in (1, 2)
    ]
    handles[0].on_committed(lambda _: gate.wait(60))

    def ask(handle, _report):
        order.append((handle.step, handle.wait(), callbacks.wait(0.0)))

    for handle in handles:
        handle.on_committed(functools.partial(ask, handle))
        handle.tell_copied()
        handle.tell_state("COMMITTED", REPORT)
        handle.tell_over()
        assert handle.wait(timeout_s=0) == REPORT
        assert handle.wait_over(0)
    assert not callbacks.wait(0.01)
    gate.set()
    assert callbacks.wait(60)
    assert order == [(1, REPORT, True), (2, REPORT, True)]


def test_no_thread_for_callbacks_is_no_end_of_the_saver(monkeypatch, caplog) -> None:
    """Whoever tells of the end isn't told of it; whoever waits for the callbacks has them called."""
    callbacks, called = Callbacks(), list[Any]()
    handle = SaveHandle(step=3, path=REPORT.path, begin_s=0.0, callbacks=callbacks).on_committed(
        called.append
    )
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", _refuse)
        handle.tell_state("COMMITTED", REPORT)
        assert not callbacks.wait(0.0)
    assert "no more threads" in caplog.text
    assert callbacks.wait(60)
    assert called == [REPORT]


def _refuse(_thread):
    raise RuntimeError("no more threads")


def test_fork_calls_nothing_that_was_asked_for_before() -> None:
    callbacks, gate, called = Callbacks(), threading.Event(), list[Any]()
    callbacks.add(lambda _: gate.wait(60), None)
    callbacks.add(called.append, "parent's")
    pid = os.fork()
    if pid == 0:
        callbacks.add(called.append, "own")
        os._exit(not (callbacks.wait(60) and called == ["own"]))
    gate.set()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert callbacks.wait(60)
    assert called == ["parent's"]
