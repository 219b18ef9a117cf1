"""What is recorded, in which order, and what a gate can do."""

import threading
from typing import ClassVar

import pytest

from ckptfmt.errors import Code
from ckptfmt.store import LocalStore, MemoryStore
from tests.store.helpers import code_of, no_fd_leak
from tests.stores.hooked import HookedCalls, Operation
from tests.stores.recorder import ACK, Log, Recorder, RecordingCalls


def test_operations_are_recorded_with_contents_outcome_and_actor():
    recorder = Recorder(MemoryStore(), who="w0")
    lower = recorder.at("run")
    lower.create("a", [b"1", b"2"])
    assert code_of(lambda: lower.create("a", [b"3"])) == Code.STORE_EXISTS
    lower.replace("a", b"4")
    lower.read("a", limit_nbytes=1)
    lower.sync("")
    lower.delete("a")
    recorder.log.ack("step 1", who="w0")

    assert [(o.op, o.path, o.data, o.outcome) for o in recorder.log.operations] == [
        ("create", "run/a", b"12", "ok"),
        ("create", "run/a", b"3", "STORE_EXISTS"),
        ("replace", "run/a", b"4", "ok"),
        ("read", "run/a", b"", "ok"),
        ("sync", "run", b"", "ok"),
        ("delete", "run/a", b"", "ok"),
        (ACK, "step 1", b"", "ok"),
    ]
    assert {o.who for o in recorder.log.operations} == {"w0"}


def test_actors_share_a_log():
    log, store = Log(), MemoryStore()
    for who in ("w0", "w1"):
        Recorder(store, log=log, who=who).create(who, [])

    assert [operation.who for operation in log.operations] == ["w0", "w1"]


def test_a_gate_is_asked_before_and_can_refuse():
    store = MemoryStore()

    def gate(operation):
        assert operation == Operation("create", "a", data=b"1", who="w0")
        raise KeyboardInterrupt

    recorder = Recorder(store, who="w0", gate=gate)
    with pytest.raises(KeyboardInterrupt):
        recorder.create("a", [b"1"])

    assert store.snapshot() == {}
    assert recorder.log.operations == ()


def test_a_gate_can_interleave_actors():
    turns = {"w0": threading.Semaphore(1), "w1": threading.Semaphore(0)}
    other = {"w0": "w1", "w1": "w0"}
    log, store = Log(), MemoryStore()

    def wait(turn):
        turn.acquire()

    def act(who):
        recorder = Recorder(store, log=log, who=who, gate=lambda _: wait(turns[who]))
        for number in range(5):
            recorder.create(f"{who}-{number}", [])
            turns[other[who]].release()

    threads = [threading.Thread(target=act, args=(who,)) for who in turns]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert [operation.who for operation in log.operations] == ["w0", "w1"] * 5


def test_system_calls_are_recorded_relative_to_the_base(tmp_path):
    calls = RecordingCalls(tmp_path, who="w0")
    store = LocalStore(tmp_path / "run", writable=True, calls=calls)
    opening_count = len(calls.log.operations)
    store.create("x/a", [b"1"])
    store.sync("x")
    store.delete("x/a")
    store.remove_directory("x")
    assert store.list("") == []

    steps = calls.log.operations[opening_count:]
    assert [(o.op, o.path.replace(steps[1].path, "TMP"), o.to) for o in steps] == [
        ("mkdir", "run/x", ""),
        ("open_new", "TMP", ""),
        ("write", "TMP", ""),
        ("fsync", "TMP", ""),
        ("link", "TMP", "run/x/a"),
        ("unlink", "TMP", ""),
        ("fsync_directory", "run", ""),
        ("fsync_directory", "run/x", ""),
        ("unlink", "run/x/a", ""),
        ("rmdir", "run/x", ""),
    ]
    assert {o.who for o in steps} == {"w0"}
    assert not any(operation.path.startswith("/") for operation in calls.log.operations)


class Stopped(BaseException):
    """An actor is stopped where it stands."""


def test_an_actor_that_is_stopped_at_a_call_makes_no_further_one(tmp_path):
    LocalStore(tmp_path, writable=True)
    for stop_at in range(1, 100):
        seen: list[Operation] = []

        def gate(operation, seen=seen, stop_at=stop_at):
            seen.append(operation)
            if len(seen) >= stop_at:
                raise Stopped

        calls = RecordingCalls(tmp_path, gate=gate)
        store = LocalStore(tmp_path, writable=False, calls=calls)
        store._writable = True
        with no_fd_leak():
            try:
                store.create(f"x/{stop_at}", [b"abc"])
            except Stopped:
                assert len(calls.log.operations) < stop_at
            else:
                break

    assert stop_at > 8


def test_hooks_see_failed_calls_with_their_errno(tmp_path):
    class Watching(HookedCalls):
        outcomes: ClassVar[list[tuple[str, str]]] = []

        def after(self, operation):
            self.outcomes.append((operation.op, operation.outcome))

    store = LocalStore(tmp_path, writable=False, calls=Watching(tmp_path))
    assert code_of(lambda: store.read("a", limit_nbytes=1)) == Code.FILE_MISSING

    assert Watching.outcomes == [("open_root", "ok"), ("open_read", "ENOENT"), ("close", "ok")]
