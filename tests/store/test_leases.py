"""Leases: whoever lives holds, whoever is dead or stopped for a term doesn't, and only the store's clock counts."""

import contextlib
import itertools
import logging
import os
import threading

import pytest

from ckptfmt.commit.waiting import poll
from ckptfmt.errors import CkptError, Code, err
from ckptfmt.store import MemoryStore, leases
from ckptfmt.store.leases import FOLDER, TERM_S, Leases
from tests.store.helpers import code_of
from tests.store.interrupted import Interrupted

WAIT_S = 60


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self, now_s=0.0):
        self.now_s = now_s

    def __call__(self):
        return self.now_s


class Objects:
    """An object store that counts requests, whose answers can be lost, and which can be stopped within a put."""

    def __init__(self, clock):
        self.clock = clock
        self.times_s = {}
        self.requests = []
        self.problem: Exception | None = None
        self.entered = threading.Event()
        self.gate: threading.Event | None = None

    def put(self, key):
        self.requests.append("put")
        if self.gate is not None:
            self.entered.set()
            assert self.gate.wait(WAIT_S)
        if self.problem is None:
            self.times_s[key] = int(self.clock())  # rounded down, as S3 does
        if self.problem is not None:
            raise self.problem

    def delete(self, key):
        self.requests.append("delete")
        self.times_s.pop(key, None)

    def list_modified(self, directory):
        self.requests.append("list")
        return [entry for entry in self.times_s.items() if entry[0].startswith(f"{directory}/")]


class Process:
    """A process that has leases in a store: its clock starts anywhere."""

    def __init__(self, objects, *, writable=True, began_s=0.0):
        self.objects = objects
        clock = objects.clock
        self.leases = Leases(objects, writable=writable, local_s=lambda: clock() + began_s)

    @property
    def thread(self):
        """The thread that renews, while there is one."""
        thread = self.leases._thread
        assert thread is not None
        return thread

    def die(self):
        """Hold nothing any more, without a word to the store."""
        self.leases._reset()

    def go_on(self):
        """Let the thread look at the clock, and wait until it has renewed what is due."""
        leases = self.leases
        with leases._changed:
            leases._changed.notify_all()
        now_s = leases._local_s()
        assert any(self._is_idle(now_s) for _ in poll(WAIT_S))

    def _is_idle(self, now_s):
        with self.leases._changed:
            return not self.leases._renewing and all(
                one.due_s > now_s for one in self.leases._leases
            )


@pytest.fixture
def objects():
    return Objects(Clock(1e9))


def pass_time(process, seconds):
    """Let time pass while a process lives: it renews what is due."""
    for _ in range(int(seconds / 10)):
        process.objects.clock.now_s += 10.001
        process.go_on()


def test_a_living_process_holds_for_as_long_as_it_wants(objects):
    """REQ-STO-009: by renewing; and no thread is left behind."""
    holder, asker = Process(objects), Process(objects)
    with holder.leases.hold("run/savers/a"):
        thread = holder.thread
        assert thread.name == "ckptfmt-lease"
        for _ in range(3):
            pass_time(holder, TERM_S)
            assert asker.leases.list_held("run/savers") == ["a"]

    assert not thread.is_alive()
    assert asker.leases.list_held("run/savers") == []
    assert objects.times_s == {}


def test_an_interrupt_at_any_moment_holds_for_a_term_and_no_longer(objects):
    """A KeyboardInterrupt as a hold ends left a lease that was renewed for as long as the process lived."""
    for moment in itertools.count(1):
        holder, asker = Process(objects), Process(objects)
        interrupted = Interrupted(moment, (leases,))
        with interrupted, contextlib.suppress(KeyboardInterrupt), holder.leases.hold("savers/a"):
            pass
        if not interrupted.place:
            break
        for _ in range(6):
            objects.clock.now_s += TERM_S / 4
            holder.go_on()
        assert asker.leases.list_held("savers") == [], interrupted.place
    assert moment > 30


def test_a_dead_process_holds_for_a_term_and_no_longer(objects):
    """REQ-STO-008."""
    holder, asker = Process(objects), Process(objects)
    with holder.leases.hold("savers/a"):
        holder.die()
    objects.clock.now_s += TERM_S - 2
    assert asker.leases.list_held("savers") == ["a"]
    objects.clock.now_s += 3

    assert asker.leases.list_held("savers") == []
    assert len(objects.times_s) == 1


@pytest.mark.parametrize("years", [-30, 0, 30])
def test_clocks_of_machines_mean_nothing_to_who_may_write(objects, monkeypatch, years):
    """REQ-STO-010."""
    skew_s = years * 365 * 86400.0
    monkeypatch.setattr("time.time", lambda: objects.clock() + skew_s)
    holder, asker = Process(objects, began_s=-skew_s), Process(objects, began_s=skew_s)
    with holder.leases.hold("savers/a"):
        assert asker.leases.list_held("savers") == ["a"]
        pass_time(holder, 2 * TERM_S)
        assert asker.leases.list_held("savers") == ["a"]
        holder.die()
    objects.clock.now_s += TERM_S + 1
    assert asker.leases.list_held("savers") == []


@pytest.mark.parametrize(
    ("skew_s", "seen"), [(-1e6, ["a"]), (-30, ["a"]), (0, ["a"]), (30, ["a"]), (1e6, [])]
)
def test_a_reader_goes_by_its_own_clock_and_writes_nothing(objects, monkeypatch, skew_s, seen):
    """REQ-STO-010."""
    monkeypatch.setattr("time.time", lambda: objects.clock() + skew_s)
    holder, reader = Process(objects), Process(objects, writable=False)
    with holder.leases.hold("savers/a"):
        objects.requests.clear()
        assert reader.leases.list_held("savers") == seen
        assert objects.requests == ["list"]


def test_an_answer_that_takes_long_makes_no_living_holder_dead(objects):
    """What is learnt of the store's clock is never ahead of it."""
    holder, asker = Process(objects), Process(objects)
    with holder.leases.hold("savers/a"):
        pass_time(holder, TERM_S)
        right, waits_s = objects.put, [5 * TERM_S]

        def put_slowly(key):
            right(key)
            if waits_s:
                pass_time(holder, waits_s.pop())

        objects.put = put_slowly
        assert asker.leases.list_held("savers") == ["a"]
        assert asker.leases.list_held("savers") == ["a"]
        holder.die()
    objects.clock.now_s += TERM_S + 1
    assert asker.leases.list_held("savers") == []


def test_asking_takes_one_request_for_any_number_of_holders(objects):
    """But for three in ten minutes, where there are holders, to read the store's clock."""
    holder, asker = Process(objects), Process(objects)
    assert asker.leases.list_held("savers") == []
    assert objects.requests == ["list"]

    holds = [holder.leases.hold(f"savers/{number:03d}") for number in range(100)]
    for hold in holds:
        hold.__enter__()
    asked = []
    for _ in range(3):
        objects.requests.clear()
        assert len(asker.leases.list_held("savers")) == 100
        asked.append(list(objects.requests))
    assert asked == [["list", "put", "list", "delete"], ["list"], ["list"]]

    pass_time(holder, 9 * TERM_S)
    objects.requests.clear()
    assert len(asker.leases.list_held("savers")) == 100
    assert objects.requests == ["list"]
    for hold in holds:
        hold.__exit__(None, None, None)
    assert objects.times_s == {}


def test_asking_leaves_nothing_and_no_lease_is_taken_for_that_of_another_file(objects):
    """REQ-STO-008."""
    holder, asker = Process(objects), Process(objects)
    with (
        holder.leases.hold("x/a"),
        holder.leases.hold("x/a-0123456789abcdef"),
        holder.leases.hold("a"),
    ):
        before = dict(objects.times_s)
        for _ in range(2):
            assert asker.leases.list_held("x") == ["a", "a-0123456789abcdef"]
            assert asker.leases.list_held("") == ["a"]
            assert objects.times_s == before
    assert sorted(key.rpartition("-")[0] for key in before) == sorted(
        [f"{FOLDER}/a", f"x/{FOLDER}/a", f"x/{FOLDER}/a-0123456789abcdef"]
    )


def test_renewals_that_fail_are_repeated(objects, caplog):
    """REQ-STO-009: the thread goes on, and who renews late is waited for again."""
    holder, asker = Process(objects), Process(objects)
    with caplog.at_level(logging.WARNING, "ckptfmt"), holder.leases.hold("savers/a"):
        thread = holder.thread
        objects.problem = ZeroDivisionError("no network")
        pass_time(holder, TERM_S / 2)
        assert caplog.messages == []
        pass_time(holder, TERM_S)
        assert len(caplog.messages) == 1
        assert "no network" in caplog.messages[0]
        objects.problem = None
        assert asker.leases.list_held("savers") == []

        pass_time(holder, 10)
        assert asker.leases.list_held("savers") == ["a"]
        assert holder.thread is thread
        assert len(caplog.messages) == 1
    assert objects.times_s == {}


def renew_behind_a_gate(holder):
    """Begin a renewal which the store answers when its gate is opened; return the thread that waits for it."""
    objects, thread = holder.objects, holder.thread
    objects.gate = threading.Event()
    objects.clock.now_s += 11
    with holder.leases._changed:
        holder.leases._changed.notify_all()
    assert objects.entered.wait(WAIT_S)
    return thread


def test_a_process_may_end_behind_a_hold_that_ended_while_it_was_renewed(objects):
    """A launch right after a normal end waited a term for a dead process: the renewal had come last."""
    holder = Process(objects)
    with holder.leases.hold("savers/a"):
        renew_behind_a_gate(holder)
        objects.requests.clear()
        threading.Timer(0.2, objects.gate.set).start()
    assert objects.times_s == {}
    assert objects.requests == ["delete"]  # by whoever renewed it, and by nobody else


def test_a_hold_that_ends_while_a_renewal_gets_no_answer_leaves_no_lease(objects, monkeypatch):
    """And doesn't wait for the store for long."""
    monkeypatch.setattr(leases, "_LAST_RENEWAL_S", 0.05)
    holder = Process(objects)
    with holder.leases.hold("savers/a"):
        thread = renew_behind_a_gate(holder)
    assert len(objects.times_s) == 1
    objects.gate.set()
    thread.join(WAIT_S)

    assert not thread.is_alive()
    assert objects.times_s == {}


@pytest.mark.parametrize("applied", [False, True])
def test_a_hold_that_cannot_begin_holds_nothing(objects, applied):
    holder = Process(objects)
    right = objects.put

    def put(key):
        if applied:
            right(key)
        raise err(Code.STORE_NO_ANSWER, "lost")

    objects.put = put
    with pytest.raises(CkptError) as caught, holder.leases.hold("savers/a"):
        pass

    assert caught.value.code == Code.STORE_NO_ANSWER
    assert objects.times_s == {}
    assert holder.leases._thread is None


def test_a_store_that_does_not_answer_for_a_while_costs_no_hold_and_the_lease_counts_from_the_last_try(
    objects,
):
    holder, asker = Process(objects), Process(objects)
    right, lost = objects.put, iter(range(3))

    def put(key):
        if next(lost, None) is not None:
            objects.clock.now_s += 16
            raise err(Code.STORE_NO_ANSWER, "lost")
        right(key)

    objects.put = put
    with holder.leases.hold("savers/a"):
        assert asker.leases.list_held("savers") == ["a"]
        pass_time(holder, seconds=120)
        assert asker.leases.list_held("savers") == ["a"]


def test_a_lease_that_cannot_be_deleted_is_no_error(objects):
    holder, asker = Process(objects), Process(objects)

    def fail(_):
        raise err(Code.STORE_IO, "no")

    with holder.leases.hold("savers/a"):
        objects.delete = fail
    assert asker.leases.list_held("savers") == ["a"]
    objects.clock.now_s += TERM_S + 1
    assert asker.leases.list_held("savers") == []


def test_only_leases_that_have_run_out_are_cleaned_up_and_a_stopped_holder_writes_its_own_again(
    objects,
):
    holder, dead, stopped, cleaner = (Process(objects) for _ in range(4))
    with dead.leases.hold("savers/dead"):
        dead.die()
    objects.times_s[f"savers/{FOLDER}/-0123456789abcdef"] = objects.clock()  # of a killed asker
    with stopped.leases.hold("savers/stopped"), holder.leases.hold("savers/a"):
        pass_time(holder, 2 * TERM_S)  # the others' threads aren't told of it
        with holder.leases.hold("savers/new"):
            cleaner.leases.delete_ended("savers")
            assert cleaner.leases.list_held("savers") == ["a", "new"]
            assert len(objects.times_s) == 2
            stopped.go_on()
            assert cleaner.leases.list_held("savers") == ["a", "new", "stopped"]
    assert objects.times_s == {}


def test_a_forked_child_holds_nothing_and_ends_nothing(objects):
    """REQ-STO-008."""
    holder = Process(objects)
    hold = holder.leases.hold("savers/a")
    with hold:
        child = os.fork()
        if not child:
            ended = code_of(lambda: hold.__exit__(None, None, None))
            is_right = ended == "ok" and len(objects.times_s) == 1 and not holder.leases._leases
            with holder.leases.hold("savers/b"):  # its own
                is_right = is_right and holder.thread.is_alive()
            os._exit(not is_right)
        assert os.waitpid(child, 0)[1] == 0


def test_a_view_of_a_store_in_memory_shares_its_leases_and_lists_none():
    clock = Clock()
    store = MemoryStore(clock=clock)
    run = store.at("run")
    with run.hold("savers/a"):
        assert (
            store.list_held("run/savers")
            == run.list_held("savers")
            == run.at("savers").list_held("")
            == ["a"]
        )
        assert run.list_held("savers", lambda name: name != "a") == []
        assert store.list("") == store.list_names("run") == []
        run._leases._reset()
    clock.now_s += TERM_S + 1
    assert not run.is_held("savers/a")
    assert store._bucket.leases
    run.delete_leftovers("savers")
    assert not store._bucket.leases
