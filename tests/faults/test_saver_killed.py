"""The saver dies, by the OOM killer's hand or an operator's: the training hears of it once, and goes on."""

import contextlib
import os
import pathlib
import signal
import threading
from typing import Any

import pytest

from ckptfmt.checkpointer import Checkpointer
from ckptfmt.errors import CkptError
from tests.faults.driver import (
    PATIENCE_S,
    Toy,
    code_of,
    committed,
    outcome_of,
    problems,
    save_and_stop,
    savers,
    send,
    until,
)


def background_of(checkpointer) -> Any:
    """What a checkpointer has of its saver."""
    return checkpointer._saves._background


def kill_saver():
    (pid,) = savers()
    os.kill(pid, signal.SIGKILL)
    return pid


def wait_noticed(checkpointer, pid):
    """Wait until the trainer knows of the end of a saver, or has another one already."""
    assert until(lambda: getattr(background_of(checkpointer)._link, "pid", None) != pid)


def kill_noticed_saver(checkpointer):
    """Kill the saver, and wait until the trainer knows."""
    wait_noticed(checkpointer, kill_saver())


def held():
    """How many descriptors, threads and children there are, the dead that nobody asked for among them."""
    tasks = pathlib.Path("/proc/self/task")
    children = []
    for task in tasks.iterdir():
        with contextlib.suppress(
            FileNotFoundError, ProcessLookupError
        ):  # a thread that has ended meanwhile
            children += (task / "children").read_text().split()
    return (
        len(list(pathlib.Path("/proc/self/fd").iterdir())),
        len(list(tasks.iterdir())),
        len(children),
    )


def receivers():
    """How many threads of this process listen to a saver."""
    return sum(thread.name == "ckptfmt-receive" for thread in threading.enumerate())


@pytest.mark.parametrize("slots", [1, 2])
def test_saver_killed_amid_a_save_is_raised_once_and_the_next_save_has_a_new_one(run, slots):
    """REQ-CMT-030: as what it is, for it may have been committed."""
    toy = Toy(32 << 20)
    with Checkpointer(run, toy.state, slots=slots) as checkpointer:
        handle = save_and_stop(checkpointer, toy)
        kill_saver()
        assert outcome_of(handle) == "SAVER_LOST"
        assert handle.state == "FAILED"
        with pytest.raises(CkptError) as caught:
            toy.save(checkpointer)
        assert caught.value.code == "SAVER_LOST"
        assert caught.value.where == handle.path
        for _ in range(3):
            toy.save(checkpointer).wait("COMMITTED", PATIENCE_S)
    assert handle.step not in committed(run)
    assert committed(run)[-3:] == [handle.step + 2, handle.step + 3, handle.step + 4]
    assert problems(run) == []


def test_saver_killed_amid_a_save_is_raised_by_close(run):
    toy = Toy(32 << 20)
    checkpointer = Checkpointer(run, toy.state)
    handle = save_and_stop(checkpointer, toy)
    kill_saver()
    assert outcome_of(handle) == "SAVER_LOST"
    assert code_of(checkpointer.close) == "SAVER_LOST"
    assert code_of(checkpointer.close) == "ok"
    assert problems(run) == []


def test_failed_step_can_be_saved_again(run):
    toy = Toy(32 << 20)
    with Checkpointer(run, toy.state) as checkpointer:
        handle = save_and_stop(checkpointer, toy)
        kill_saver()
        assert until(lambda: handle.state == "FAILED")
        assert code_of(checkpointer.save) == "SAVER_LOST"
        again = checkpointer.save()
        assert again is not None
        again.wait("COMMITTED", PATIENCE_S)
    assert handle.step in committed(run)
    assert problems(run) == []


def test_saver_killed_between_saves_costs_nothing(run):
    toy = Toy()
    with Checkpointer(run, toy.state) as checkpointer:
        for _ in range(3):
            toy.save(checkpointer).wait("COMMITTED", PATIENCE_S)
            kill_noticed_saver(checkpointer)
    assert committed(run) == [1, 2, 3]
    assert problems(run) == []


def test_saver_killed_while_the_next_save_begins_fails_that_one_at_most(run):
    """Whatever the moment: a handle ends, the failure is raised, the save after it works."""
    toy = Toy(8 << 20)
    seen = set()
    with Checkpointer(run, toy.state) as checkpointer:
        toy.save(checkpointer).wait("COMMITTED", PATIENCE_S)
        for number in range(12):
            (pid,) = savers()
            timer = threading.Timer(number * 0.002, os.kill, (pid, signal.SIGKILL))
            timer.start()
            handle = toy.save(checkpointer)
            seen.add(outcome_of(handle))
            timer.join()
            if handle.error is not None:
                assert code_of(checkpointer.save) == "SAVER_LOST"
            wait_noticed(checkpointer, pid)
            toy.save(checkpointer).wait("COMMITTED", PATIENCE_S)
    assert seen <= {"ok", "SAVER_LOST"}
    assert problems(run) == []


def test_savers_that_died_leave_nothing_in_the_trainer(run):
    toy = Toy()
    with Checkpointer(run, toy.state) as checkpointer:
        toy.save(checkpointer).wait("COMMITTED", PATIENCE_S)
        before = held()
        for _ in range(3):
            kill_noticed_saver(checkpointer)
            toy.save(checkpointer).wait("COMMITTED", PATIENCE_S)
            assert until(lambda: held() == before), (
                f"{held()} descriptors, threads, children: {before}"
            )


def test_saver_that_fails_by_itself_says_why_and_finishes_what_is_staged(run, monkeypatch):
    toy = Toy(32 << 20)
    with Checkpointer(run, toy.state) as checkpointer:
        staged = save_and_stop(checkpointer, toy)
        link = background_of(checkpointer)._link
        send_as_it_is = link.send
        nonsense = {"type": "save", "number": 99}
        monkeypatch.setattr(
            link,
            "send",
            lambda message: send_as_it_is(nonsense if message["type"] == "staged" else message),
        )
        unstaged = toy.save(checkpointer)
        (pid,) = savers()
        send(pid, signal.SIGCONT)
        with pytest.raises(CkptError, match="KeyError"):
            unstaged.wait(timeout_s=PATIENCE_S)
        assert outcome_of(staged) == "ok"
        wait_noticed(checkpointer, pid)
        with contextlib.suppress(ProcessLookupError):
            send(pid, signal.SIGSTOP)  # amid its end, which is nothing to the next one
        assert code_of(checkpointer.save) == "PEER_FAILED"
        toy.save(checkpointer).wait("COMMITTED", PATIENCE_S)
        with contextlib.suppress(ProcessLookupError):
            send(pid, signal.SIGCONT)
        assert until(lambda: pid not in savers())
        assert until(lambda: receivers() == 1), "the trainer has heard of its end"
        toy.save(checkpointer).wait("COMMITTED", PATIENCE_S)
        assert len(savers()) == 1
        assert unstaged.step not in committed(run)
    assert problems(run) == []


def test_saver_that_was_stopped_amid_a_save_goes_on(run):
    toy = Toy(32 << 20)
    with Checkpointer(run, toy.state) as checkpointer:
        handle = save_and_stop(checkpointer, toy)
        (pid,) = savers()
        send(pid, signal.SIGCONT)
        assert handle.wait(timeout_s=PATIENCE_S) is not None
    assert problems(run) == []
