"""The way to the saver breaks: the saves that it had fail by name, in bounded time, and the next one has another."""

import os
import signal
import threading
from typing import Any

import numpy as np
import pytest

from ckptfmt.checkpointer import Checkpointer
from ckptfmt.errors import CkptError, error_from_json
from ckptfmt.saving import links
from ckptfmt.saving.background import Background
from ckptfmt.saving.handle import SaveHandle
from ckptfmt.saving.saver import Saver
from ckptfmt.write.helper_process import start_helper
from ckptfmt.write.staging import HostCopy
from tests.builders import error_of
from tests.faults.driver import (
    PATIENCE_S,
    Toy,
    code_of,
    committed,
    outcome_of,
    problems,
    savers,
    until,
)


def background_of(checkpointer) -> Any:
    """What a checkpointer has of its saver."""
    return checkpointer._saves._background


def lose_saver(checkpointer):
    """Kill the saver, and wait until the trainer knows."""
    (pid,) = savers()
    os.kill(pid, signal.SIGKILL)
    assert until(lambda: getattr(background_of(checkpointer)._link, "pid", None) != pid)


def test_saver_dies_and_then_the_state_grows(run):
    """The next saver was sent slots that were closed before they were sent, and nothing after them."""
    toy = Toy()
    weights: Any = toy.state.weights
    with Checkpointer(run, toy.state, deadline_s=PATIENCE_S / 3) as checkpointer:
        toy.save(checkpointer).wait("COMMITTED", PATIENCE_S)
        for number in range(2):
            lose_saver(checkpointer)
            weights[f"grown{number}"] = np.full(500_000, toy.data["step"])
            toy.arrays.append(weights[f"grown{number}"])
            toy.save(checkpointer).wait("COMMITTED", PATIENCE_S)
    assert committed(run) == [1, 2, 3]
    assert problems(run) == []


def test_saver_that_never_gets_ready_is_given_up_and_the_next_save_starts_another(run, monkeypatch):
    """The remedy said so, and the next save waited for the same one."""
    stopped = []

    def start_stopped(module):
        process, channel = start_helper(module)
        os.kill(process.pid, signal.SIGSTOP)
        stopped.append(process.pid)
        return process, channel

    toy = Toy()
    with Checkpointer(run, toy.state, deadline_s=1.0) as checkpointer:
        with monkeypatch.context() as patch:
            patch.setattr("ckptfmt.saving.links.start_helper", start_stopped)
            error = error_of(lambda: toy.save(checkpointer))
        assert (error.code, "isn't ready" in error.detail) == ("SAVER_LOST", True)
        background_of(checkpointer)._deadline_s = PATIENCE_S
        toy.save(checkpointer).wait("COMMITTED", PATIENCE_S)
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
        assert until(lambda: not set(stopped) & set(savers()))
        toy.save(checkpointer).wait("COMMITTED", PATIENCE_S)
    assert committed(run) == [2, 3]


def test_failure_that_comes_while_the_next_save_begins_ends_no_thread(run, monkeypatch):
    """A save that was over was forgotten between being looked up and being failed: KeyError in the receiving thread."""
    toy, begun, heard = Toy(), threading.Event(), threading.Event()
    begin, finish = Background._begin, HostCopy.finish
    failing = [True]

    def wait_for_begin(told):
        if threading.current_thread() is not threading.main_thread():
            heard.set()
            assert begun.wait(PATIENCE_S)
        return error_from_json(told)

    def begin_and_tell(background, *args, **options):
        lent = begin(background, *args, **options)
        if heard.is_set():
            begun.set()
        return lent

    def fail_once(copy):
        if failing:
            failing.clear()
            raise MemoryError
        finish(copy)

    monkeypatch.setattr("ckptfmt.saving.background.error_from_json", wait_for_begin)
    monkeypatch.setattr(Background, "_begin", begin_and_tell)
    monkeypatch.setattr(HostCopy, "finish", fail_once)
    with Checkpointer(run, toy.state, saver="thread", deadline_s=PATIENCE_S / 3) as checkpointer:
        with pytest.raises(MemoryError):
            toy.save(checkpointer)
        assert heard.wait(PATIENCE_S)
        assert outcome_of(toy.save(checkpointer)) == "ok"
    assert committed(run) == [2]


def test_message_that_nobody_understands_is_told_by_every_wait(run, monkeypatch):
    """One without a time-out among them."""
    toy, on_state = Toy(), Background._on_state
    broken = [True]

    def fail_once(background, message):
        if message["state"] == "WRITTEN" and broken:
            broken.clear()
            raise KeyError(message["state"])
        on_state(background, message)

    monkeypatch.setattr(Background, "_on_state", fail_once)
    with Checkpointer(run, toy.state, deadline_s=PATIENCE_S / 3) as checkpointer:
        handle = toy.save(checkpointer)
        error = error_of(handle.wait)
        assert (error.code, error.where) == ("SAVER_LOST", handle.path)
        assert "KeyError: 'WRITTEN'" in error.detail
        assert isinstance(error.__cause__, KeyError)
        assert code_of(checkpointer.save) == "SAVER_LOST"
        toy.save(checkpointer).wait("COMMITTED", PATIENCE_S)
    assert problems(run) == []


@pytest.mark.parametrize("who", ["messages", "saver"])
def test_thread_that_ends_without_a_word_is_found_by_who_waits(run, monkeypatch, who):
    toy, complete = Toy(), threading.Event()
    handle_message, end = Saver.handle, [True]

    def end_at_completion(saver, message):
        if message["type"] == "complete" and end:
            end.clear()
            complete.set()
            if who == "saver":  # the save waits for its snapshot, and then there is no thread
                saver._thread.is_alive = lambda: False
            return
        handle_message(saver, message)

    monkeypatch.setattr(Saver, "handle", end_at_completion)
    with Checkpointer(run, toy.state, saver="thread", deadline_s=PATIENCE_S / 3) as checkpointer:
        handle = toy.save(checkpointer)
        assert complete.wait(PATIENCE_S)
        link = background_of(checkpointer)._link
        assert isinstance(link, links.ThreadLink)
        if who == "messages":
            link._incoming.put(None)
        assert code_of(handle.wait) == "SAVER_LOST"
        assert code_of(checkpointer.save) == "SAVER_LOST"
        toy.save(checkpointer).wait("COMMITTED", PATIENCE_S)
    assert problems(run) == []


@pytest.mark.parametrize("saver", ["thread", "process"])
def test_run_whose_path_is_not_text_is_saved(tmp_path, saver):
    """Its saver was never told where it is."""
    run = tmp_path / os.fsdecode(b"r\xff\xfeun")
    toy = Toy()
    with Checkpointer(run, toy.state, saver=saver, deadline_s=PATIENCE_S / 3) as checkpointer:
        toy.save(checkpointer).wait("COMMITTED", PATIENCE_S)
        (run / "step-00000002-l0001").mkdir()
        (run / "step-00000002-l0001" / "manifest.json").write_text("{")
        assert outcome_of(toy.save(checkpointer)) != "ok", "and what goes wrong there is told"
        with pytest.raises(CkptError):
            checkpointer.save()
        toy.save(checkpointer).wait("COMMITTED", PATIENCE_S)
    assert 3 in committed(run)


@pytest.mark.parametrize("where", ["behind begin", "in the copies", "in their end"])
@pytest.mark.parametrize("saver", ["thread", "process"])
def test_interrupted_save_is_finished_or_given_up(run, monkeypatch, where, saver):
    """Between begin and stage, or at the end of the copies, Ctrl-C left a save that nobody finished."""
    toy = Toy()
    kind, name = {
        "behind begin": (Background, "_begin"),
        "in the copies": (HostCopy, "finish"),
        "in their end": (SaveHandle, "tell_copied"),
    }[where]
    inner, left = getattr(kind, name), [True]

    def interrupt_once(*args, **options):
        result = inner(*args, **options)
        if left and threading.current_thread() is threading.main_thread():
            left.clear()
            raise KeyboardInterrupt
        return result

    with Checkpointer(
        run, toy.state, saver=saver, slots=1, deadline_s=PATIENCE_S / 3
    ) as checkpointer:
        toy.save(checkpointer).wait("COMMITTED", PATIENCE_S)
        with monkeypatch.context() as patch:
            patch.setattr(kind, name, interrupt_once)
            with pytest.raises(KeyboardInterrupt):
                toy.save(checkpointer)
        toy.save(checkpointer).wait("COMMITTED", PATIENCE_S)
    assert committed(run) == ([1, 2, 3] if where == "in their end" else [1, 3])
    assert problems(run) == []
