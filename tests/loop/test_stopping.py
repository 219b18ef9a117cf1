"""Signals that end a training: noted once, given back, and the step that was done is saved."""

import contextlib
import os
import signal
import threading
import time
from typing import Any

import pytest

from ckptfmt.checkpointer import Checkpointer
from ckptfmt.errors import Code
from ckptfmt.loop.loop import StopSignals
from ckptfmt.store.memory import MemoryStore
from tests.builders import code_of, error_of
from tests.interface.test_group import Allgather, run_writers
from tests.loop.test_checkpointer import Trainer, committed, run
from tests.saver.test_saver import WAIT_S, GateStore
from tests.stores.faults import Fault, FaultStore

#: Signals that nothing else in this process means anything by.
NUMBERS = (signal.SIGTERM, signal.SIGUSR1)


class Before:
    """Who had the signals before, and what came to it."""

    def __init__(self) -> None:
        self.got: list[int] = []
        self.action: Any = lambda: None

    def handle(self, number: int, _frame: object) -> None:
        self.got.append(number)
        self.action()


@pytest.fixture
def before():
    """Catch the signals of these tests, and see that they are given back."""
    owner = Before()
    previous = {number: signal.signal(number, owner.handle) for number in NUMBERS}
    yield owner
    left = {number: signal.signal(number, handler) for number, handler in previous.items()}
    assert left == dict.fromkeys(NUMBERS, owner.handle)


def send(number: int) -> None:
    """Send this process a signal, and let it arrive."""
    os.kill(os.getpid(), number)
    time.sleep(0)


def train_until_signal(checkpointer: Checkpointer, trainer: Trainer) -> float:
    """Train ten steps, with a signal in the second one; return when it was sent."""
    sent_s = 0.0
    for step in checkpointer.steps(10):
        trainer.step(step)
        if step == 1:
            send(signal.SIGTERM)
            sent_s = time.monotonic()
    return sent_s


# --- the signals ----------------------------------------------------------------------------------


def test_first_signal_is_noted_and_the_second_does_what_it_did_before(before) -> None:
    signals = StopSignals(NUMBERS)
    signals.install()
    begin_s = time.monotonic()
    send(signal.SIGTERM)
    assert signals.first_s is not None
    assert begin_s <= signals.first_s <= time.monotonic()
    assert before.got == []
    first_s = signals.first_s
    send(signal.SIGTERM)
    send(signal.SIGUSR1)  # any second one: whoever sends it is impatient
    assert before.got == [signal.SIGTERM, signal.SIGUSR1]
    assert signals.first_s == first_s


def test_signals_are_given_back_once(before) -> None:
    signals = StopSignals(NUMBERS)
    signals.remove()
    for _ in range(2):
        signals.install()
        signals.install()
        assert all(signal.getsignal(number) == signals._note for number in NUMBERS)
        signals.remove()
        assert all(signal.getsignal(number) == before.handle for number in NUMBERS)
    signals.remove()
    assert signals.first_s is None


@pytest.mark.parametrize("previous", [signal.SIG_DFL, signal.SIG_IGN, signal.default_int_handler])
def test_whatever_was_there_is_there_again(before, previous) -> None:
    signal.signal(signal.SIGUSR1, previous)
    signals = StopSignals([signal.SIGUSR1])
    signals.install()
    signals.remove()
    assert signal.getsignal(signal.SIGUSR1) == previous
    signal.signal(signal.SIGUSR1, before.handle)


def test_signal_that_is_named_twice_is_given_back_all_the_same(before) -> None:
    """To its owner, and not to ourselves."""
    signals = StopSignals([signal.SIGUSR1, int(signal.SIGUSR1)])
    signals.install()
    send(signal.SIGUSR1)
    send(signal.SIGUSR1)
    assert before.got == [signal.SIGUSR1]


def test_what_was_set_from_c_is_left_to_the_system(before, monkeypatch) -> None:
    """Python can't set it again."""
    signals = StopSignals([signal.SIGUSR1])
    with monkeypatch.context() as patch:
        patch.setattr(signal, "signal", lambda *_: None)
        signals.install()
    signals.remove()
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
    signal.signal(signal.SIGUSR1, before.handle)


@pytest.mark.parametrize(
    "numbers",
    [
        (0,),
        (999,),
        ("TERM",),
        (None,),
        signal.SIGTERM,
        (signal.SIGKILL,),
        (signal.SIGTERM, signal.SIGSTOP),
    ],
)
def test_what_is_no_signal_to_catch_is_refused_at_once(before, numbers) -> None:
    """Not hours later, when the loop begins; and nothing is caught of it."""
    for action in (
        lambda: StopSignals(numbers),
        lambda: Checkpointer(MemoryStore(), Trainer().state, stop_on=numbers),
    ):
        error = error_of(action)
        assert (error.code, error.where) == (Code.ARGUMENT, "signals=")
    assert signal.getsignal(signal.SIGTERM) == before.handle


def test_signals_outside_of_the_main_thread_are_refused(before) -> None:
    found = []

    def body() -> None:
        with Checkpointer(
            MemoryStore(), Trainer().state, stop_on=NUMBERS, saver="inline"
        ) as checkpointer:
            found.append(error_of(lambda: list(checkpointer.steps(3))))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join(WAIT_S)
    assert [(error.code, error.where) for error in found] == [(Code.ARGUMENT, "signals=")]
    assert all(signal.getsignal(number) == before.handle for number in NUMBERS)


def test_without_signals_any_thread_will_do() -> None:
    signals = StopSignals(())
    assert not signals
    thread = threading.Thread(target=signals.install)
    thread.start()
    thread.join(WAIT_S)


def test_close_in_another_thread_waits_for_saves_and_leaves_the_signals(before) -> None:
    """Only the main thread can give them back: the next signal does, or the next close."""
    store, trainer = MemoryStore(), Trainer()
    checkpointer = Checkpointer(store, trainer.state, stop_on=NUMBERS, every=1, saver="thread")
    for number in checkpointer.steps(5):
        trainer.step(number)
        if number == 1:
            break
    codes: list[str] = []
    thread = threading.Thread(target=lambda: codes.append(code_of(checkpointer.close)))
    thread.start()
    thread.join(WAIT_S)
    assert codes == ["ok"]
    assert committed(store) == [(1, 1)]
    checkpointer.close()
    assert signal.getsignal(signal.SIGTERM) == before.handle


# --- the loop -------------------------------------------------------------------------------------


@pytest.mark.parametrize("saver", ["thread", "inline"])
@pytest.mark.parametrize("every", [None, 2, 4, "1h"])
@pytest.mark.parametrize("number", NUMBERS)
def test_signal_in_the_middle_of_a_step_saves_that_step_and_stops(
    before, saver, every, number
) -> None:
    store, trainer, done = MemoryStore(), Trainer(), []
    with Checkpointer(
        store, trainer.state, stop_on=NUMBERS, every=every, saver=saver
    ) as checkpointer:
        for step in checkpointer.steps(100):
            if step == 3:
                send(number)
            trainer.step(step)
            done.append(step)
        assert checkpointer.stopped
        # It is over when the loop ends: there may be no time for anything behind it.
        assert committed(store)[-1] == (4, 1)
    assert done == [0, 1, 2, 3]
    assert [step for step, _ in committed(store)] == ([2, 4] if every == 2 else [4])
    assert before.got == []
    resumed, checkpointer, done = run(store, 6, stop_on=NUMBERS, saver=saver)
    assert done == [4, 5]
    assert not checkpointer.stopped
    assert resumed.weights["w"][0] == 21.0


def test_signal_in_the_last_step_changes_nothing(before) -> None:
    store, trainer = MemoryStore(), Trainer()
    with Checkpointer(store, trainer.state, stop_on=NUMBERS, saver="thread") as checkpointer:
        for step in checkpointer.steps(3):
            trainer.step(step)
            if step == 2:
                send(signal.SIGTERM)
    assert committed(store) == [(3, 1)]
    assert before.got == []


def test_signals_are_caught_while_the_loop_runs_and_not_longer(before) -> None:
    trainer = Trainer()
    with Checkpointer(
        MemoryStore(), trainer.state, stop_on=NUMBERS, saver="thread"
    ) as checkpointer:
        assert signal.getsignal(signal.SIGTERM) == before.handle
        for _ in checkpointer.steps(2):
            assert signal.getsignal(signal.SIGTERM) == checkpointer._pace.signals._note
        assert signal.getsignal(signal.SIGTERM) == before.handle


@pytest.mark.parametrize("leave", ["break", "exception"])
def test_loop_that_is_left_gives_the_signals_back(before, leave) -> None:
    def body(_: int) -> None:
        assert signal.getsignal(signal.SIGTERM) != before.handle
        if leave == "exception":
            raise ZeroDivisionError

    checkpointer = Checkpointer(MemoryStore(), Trainer().state, stop_on=NUMBERS, saver="thread")
    with contextlib.suppress(ZeroDivisionError), checkpointer:
        for step in checkpointer.steps(3):
            body(step)
            break
    assert signal.getsignal(signal.SIGTERM) == before.handle


def test_second_signal_ends_even_a_save_that_hangs(before) -> None:
    class Impatient(Exception):  # noqa: N818
        pass

    def leave() -> None:
        raise Impatient

    before.action = leave
    store, trainer = GateStore(MemoryStore(), step=2), Trainer()
    checkpointer = Checkpointer(
        store, trainer.state, stop_on=NUMBERS, saver="thread", stop_deadline_s=WAIT_S
    )

    def insist() -> None:
        assert store.begun.wait(WAIT_S)
        # The system may give a signal to any thread; then it interrupts no wait of the main thread.
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

    insisting = threading.Thread(target=insist)
    insisting.start()
    begin_s = time.monotonic()
    try:
        with pytest.raises(Impatient):
            train_until_signal(checkpointer, trainer)
        assert time.monotonic() - begin_s < WAIT_S / 2
    finally:
        insisting.join(WAIT_S)
        store.gate.set()
    assert checkpointer._handle is not None
    checkpointer._handle.wait(timeout_s=WAIT_S)
    checkpointer.close()


@pytest.mark.usefixtures("before")
def test_deadline_of_a_stop_is_kept_and_the_save_left_to_the_saver() -> None:
    inner = MemoryStore()
    store, trainer = GateStore(inner, step=2), Trainer()
    checkpointer = Checkpointer(
        store, trainer.state, stop_on=NUMBERS, saver="thread", stop_deadline_s=0.2
    )
    begin_s = train_until_signal(checkpointer, trainer)
    assert time.monotonic() - begin_s < WAIT_S / 2
    assert (checkpointer.stopped, checkpointer.step) == (True, 2)
    handle = checkpointer._handle
    assert handle is not None
    assert handle.step == 2
    assert handle.state == "STAGED"
    begin_s = time.monotonic()
    assert error_of(checkpointer.close).code == Code.SAVE_PENDING  # no more time for that either
    assert time.monotonic() - begin_s < WAIT_S / 2
    store.gate.set()
    assert handle.wait(timeout_s=WAIT_S) is not None
    assert committed(inner) == [(2, 1)]


@pytest.mark.usefixtures("before")
def test_stop_without_a_free_slot_ends_without_its_save(caplog) -> None:
    """The save of step 1 never gets on; that of step 2 finds no slot."""
    inner = MemoryStore()
    store, trainer = GateStore(inner, step=1), Trainer()
    checkpointer = Checkpointer(
        store, trainer.state, every=1, slots=1, stop_on=NUMBERS, saver="thread"
    )
    checkpointer._pace.signals.deadline_s = 0.2
    train_until_signal(checkpointer, trainer)
    assert (checkpointer.stopped, checkpointer.step) == (True, 2)
    assert "stopping at step 2 without its save" in caplog.text
    store.gate.set()
    assert checkpointer._handle is not None
    checkpointer._handle.wait(timeout_s=WAIT_S)
    assert committed(inner) == [(1, 1)]
    assert code_of(checkpointer.close) in ("ok", Code.SAVE_PENDING)


@pytest.mark.usefixtures("before")
@pytest.mark.parametrize("saver", ["thread", "inline"])
def test_failure_of_the_last_save_is_raised(saver) -> None:
    """Only what takes too long is left; what fails is told."""
    inner, trainer = MemoryStore(), Trainer()
    store = FaultStore(inner, Fault(fail_at=1, path_end=".safetensors"), code=Code.NO_SPACE)
    checkpointer = Checkpointer(store, trainer.state, stop_on=NUMBERS, saver=saver)
    assert code_of(lambda: train_until_signal(checkpointer, trainer)) == Code.NO_SPACE
    assert committed(inner) == []
    code_of(checkpointer.close)


# --- several processes ----------------------------------------------------------------------------


@pytest.mark.parametrize("per_step_s", [2.0, 1.0, 0.25])
@pytest.mark.parametrize("who", [0, 2])
@pytest.mark.parametrize("every", [None, 4, "1h"])
def test_all_stop_at_the_same_step_whoever_gets_the_signal(
    monkeypatch, per_step_s, who, every
) -> None:
    """REQ-CMT-001: saved once, and nobody goes on alone."""
    monkeypatch.setattr(
        StopSignals, "install", lambda _: None
    )  # threads can't; the signal is noted by hand
    store, allgather = MemoryStore(), Allgather(3)

    def body(writer: int) -> tuple[list[int], bool]:
        trainer, done = Trainer(), []
        checkpointer = Checkpointer(
            store,
            trainer.state,
            every=every,
            stop_on=NUMBERS,
            saver="thread",
            writer=(writer, 3),
            agree=allgather.of(writer),
            deadline_s=WAIT_S,
        )
        checkpointer._pace.clock = lambda: checkpointer.step * per_step_s
        with checkpointer:
            for step in checkpointer.steps(100):
                trainer.step(step)
                done.append(step)
                if step == 10 and writer == who:
                    checkpointer._pace.signals.first_s = time.monotonic()
        return done, checkpointer.stopped

    found = run_writers(3, body)
    assert found[0] == found[1] == found[2]
    done, stopped = found[0]
    assert stopped
    # One second at most until it is asked for, by the clock of the test.
    assert 11 <= len(done) <= 11 + 1 / per_step_s + 1
    expected = {*range(4, len(done), 4), len(done)} if every == 4 else {len(done)}
    assert committed(store) == [(step, 1) for step in sorted(expected)]
