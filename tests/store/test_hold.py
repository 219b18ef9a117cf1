"""Holding a file: seen by every process, over when the holder dies, and without a trace."""

import contextlib
import errno
import itertools
import os
import signal

import pytest

from ckptfmt.errors import CkptError, Code
from ckptfmt.store import LocalStore, MemoryStore, local, posix
from ckptfmt.store.posix import PosixCalls
from tests.store.helpers import code_of, no_fd_leak, python
from tests.store.interrupted import Interrupted
from tests.stores.faults import Fault, FaultCalls, FaultStore
from tests.stores.recorder import Recorder


@pytest.fixture
def store(tmp_path):
    return LocalStore(tmp_path, writable=True)


def hold_briefly(store, path):
    with store.hold(path):
        pass


HOLD = """
import os, sys, time
from ckptfmt.store import LocalStore

root, mode = sys.argv[1:]
with LocalStore(root, writable=True).hold("savers/a"):
    is_child = mode == "fork" and not os.fork()
    if is_child or mode != "fork":  # a child is ready once it has let go of what its parent holds
        print("ready", flush=True)
    if is_child:
        time.sleep(60)
    sys.stdin.readline()
"""


@contextlib.contextmanager
def holder(root, mode="plain"):
    """Yield a process that holds savers/a."""
    with python(HOLD, root, mode) as process:
        assert process.stdout.readline() == "ready\n", process.communicate()[1]
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()


def test_another_process_holds_until_it_ends(store, tmp_path):
    with holder(tmp_path) as process:
        assert store.is_held("savers/a")
        assert LocalStore(tmp_path / "savers", writable=False).is_held("a")
        process.communicate("go\n", timeout=60)

        assert process.returncode == 0
        assert not store.is_held("savers/a")
        assert store.list("") == []


def test_a_killed_process_holds_no_more_and_its_file_does_no_harm(store, tmp_path):
    """REQ-STO-008."""
    with holder(tmp_path) as process:
        process.kill()
        process.wait(timeout=60)

    assert store.list("") == ["savers/a"]
    assert not store.is_held("savers/a")
    with store.hold("savers/a"):
        assert store.is_held("savers/a")
    assert store.list("") == []


def test_a_forked_child_does_not_hold_on_for_its_killed_parent(store, tmp_path):
    with python(HOLD, tmp_path, "fork") as process:
        assert process.stdout.readline() == "ready\n"
        children = (f"/proc/{process.pid}/task/{process.pid}/children",)
        with open(*children) as file:  # noqa: PTH123
            (child,) = map(int, file.read().split())
        try:
            process.kill()
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            os.kill(child, 0)
            assert not store.is_held("savers/a")
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_forked_childs_end_ends_nothing(store):
    with store.hold("a"):
        child = os.fork()
        if not child:
            # The child leaves the context as its parent will.
            os._exit(0)
        os.waitpid(child, 0)
        assert store.is_held("a")
    assert not store.is_held("a")


FORKED_END = """
import os, sys
from ckptfmt.store import LocalStore

store = LocalStore(sys.argv[1], writable=True)
with store.hold("a"):
    child = os.fork()
    parent = bool(child)
    if parent:
        assert os.waitpid(child, 0)[1] == 0
        assert store.is_held("a")
        assert os.listdir(sys.argv[1]) == ["a"]
assert store.is_held("a") != parent
assert os.listdir(sys.argv[1]) == ([] if parent else ["a"])
"""


def test_a_forked_child_that_leaves_the_context_leaves_the_parents_hold_alone(tmp_path):
    with python(FORKED_END, tmp_path) as process:
        _, errors = process.communicate(timeout=60)

    assert process.returncode == 0, errors


def test_of_several_holders_the_last_one_removes_the_file(store, tmp_path):
    with holder(tmp_path) as process:
        with store.hold("savers/a"):
            process.communicate("go\n", timeout=60)
            assert store.is_held("savers/a")
        assert not store.is_held("savers/a")
        assert store.list("") == []

        with store.hold("b"), store.hold("c"), store.hold("b"):
            assert store.is_held("b")
        assert store.list("") == []


STRESS = """
import sys
from ckptfmt.store import LocalStore

store = LocalStore(sys.argv[1], writable=True)
print("ready", flush=True)
sys.stdin.readline()
for _ in range(300):
    with store.hold("a"):
        assert store.is_held("a")
    store.is_held("a")
"""


@pytest.mark.dist
def test_a_name_that_goes_while_another_begins_to_hold_it_is_made_anew(fast_path):
    processes = [python(STRESS, fast_path) for _ in range(4)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    errors = [process.communicate("go\n", timeout=120)[1] for process in processes]

    assert errors == [""] * 4
    assert not LocalStore(fast_path, writable=False).is_held("a")


@pytest.mark.parametrize("moment", ["open_lock", "lock_shared"])
@pytest.mark.parametrize("then", ["gone", "another's"])
def test_a_file_that_is_removed_just_before_it_is_locked_is_not_taken_for_held(
    store, tmp_path, moment, then
):
    class Removing(PosixCalls):
        removals = 2

        def remove(self, op):
            if op == moment and self.removals:
                self.removals -= 1
                (tmp_path / "a").unlink()
                if then == "another's":
                    (tmp_path / "new").touch()
                    (tmp_path / "new").rename(tmp_path / "a")

        def open_lock(self, name, directory_fd):
            self.remove("open_lock")
            return super().open_lock(name, directory_fd)

        def lock_shared(self, fd):
            self.remove("lock_shared")
            super().lock_shared(fd)

    watched = store.at("")
    watched._calls = Removing()
    with no_fd_leak():
        with watched.hold("a"):
            assert store.is_held("a")
        assert not store.is_held("a")
    assert list(tmp_path.iterdir()) == []


def test_who_only_looks_makes_nothing_and_may_look_into_what_it_cannot_change(store, tmp_path):
    reader = LocalStore(tmp_path, writable=False)

    assert not reader.is_held("no/such/file")
    assert list(tmp_path.iterdir()) == []
    assert code_of(lambda: hold_briefly(reader, "a")) == Code.STORE_ACCESS
    with store.hold("a"):
        assert reader.is_held("a")

        class NotOurs(PosixCalls):
            def open_lock(self, name, _):
                raise PermissionError(errno.EACCES, "read only", name)

        reader._calls = NotOurs()
        assert reader.is_held("a")


def test_asking_changes_nothing(store, tmp_path):
    """REQ-STO-008: neither what is held nor what a killed process left."""
    (tmp_path / "left").write_bytes(b"x")
    with store.hold("held"):
        for _ in range(2):
            assert (store.is_held("held"), store.is_held("left"), store.is_held("nowhere")) == (
                True,
                False,
                False,
            )
            assert {path.name for path in tmp_path.iterdir()} == {"held", "left"}
    assert (tmp_path / "left").read_bytes() == b"x"


def test_somebody_who_looks_at_the_same_moment_is_not_taken_for_a_holder(store, tmp_path):
    class Busy(PosixCalls):
        refusals = 2

        def try_lock(self, fd):
            if self.refusals:
                self.refusals -= 1
                return False
            return super().try_lock(fd)

    (tmp_path / "a").touch()
    store._calls = Busy()
    assert not store.is_held("a")
    store._calls = Busy()
    hold_briefly(store, "a")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS], ids=errno.errorcode.get
)
def test_without_locks_nothing_is_held_and_nothing_is_left(tmp_path, number):
    class NoLocks(PosixCalls):
        def lock_shared(self, _):
            raise OSError(number, os.strerror(number))

        def try_lock(self, _):
            raise OSError(number, os.strerror(number))

    store = LocalStore(tmp_path, writable=True, calls=NoLocks())
    with no_fd_leak(), store.hold("x/a"):
        assert not store.is_held("x/a")
        (tmp_path / "x" / "a").touch()
        assert not store.is_held("x/a")


def test_what_is_held_is_not_inherited_by_started_programs(store):
    with store.hold("a"):
        fds = [int(name) for name in os.listdir("/proc/self/fd")]  # noqa: PTH208
        links = {}
        for fd in fds:
            with contextlib.suppress(OSError):
                links[os.readlink(f"/proc/self/fd/{fd}")] = fd  # noqa: PTH115
        fd = links[f"{store.name}/a"]
        assert not os.get_inheritable(fd)


@pytest.mark.parametrize(
    "error", [ZeroDivisionError("theirs"), OSError(errno.EIO, "theirs")], ids=repr
)
def test_what_the_context_raises_comes_through_as_it_is(store, tmp_path, error):
    with pytest.raises(type(error), match="theirs"), store.hold("a"):
        raise error

    assert list(tmp_path.iterdir()) == []


def test_what_has_taken_the_name_meanwhile_stays(store, tmp_path):
    with store.hold("a"):
        (tmp_path / "a").unlink()
        (tmp_path / "a").write_bytes(b"somebody else's")

    assert (tmp_path / "a").read_bytes() == b"somebody else's"


def test_a_directory_that_goes_meanwhile_is_no_error(store, tmp_path):
    with no_fd_leak(), store.hold("x/a"):
        (tmp_path / "x" / "a").unlink()
        (tmp_path / "x").rmdir()

    assert not store.is_held("x/a")


@pytest.mark.parametrize("sticky", [False, True])
@pytest.mark.parametrize("applied", [False, True])
@pytest.mark.parametrize("operation", ["hold", "is_held"])
def test_every_failing_call_gives_a_named_error_and_nothing_stays_held(
    fast_path, operation, applied, sticky
):
    codes = set()
    for fail_at in itertools.count(1):
        root = fast_path / str(fail_at)
        healthy = LocalStore(root, writable=True)
        fault = Fault(fail_at=fail_at, sticky=sticky, applied=applied)
        store = healthy.at("")
        store._calls = FaultCalls(root, fault, errno_value=errno.EIO)
        with no_fd_leak(), healthy.hold("held"):
            if operation == "hold":
                codes.add(code_of(lambda: hold_briefly(store, "x/a")))  # noqa: B023
            else:
                codes.add(code_of(lambda: store.is_held("held")))  # noqa: B023
        assert not healthy.is_held("x/a")
        if not fault.fired_count:
            break

    assert codes == {"ok", Code.STORE_IO}
    assert fail_at > 4


# Interrupts


def test_an_interrupt_at_any_moment_leaves_nothing_held(store):
    """A KeyboardInterrupt behind the lock and before the context left the file locked as long as the process lived."""
    for moment in itertools.count(1):
        with (
            Interrupted(moment, (posix, local)) as interrupted,
            contextlib.suppress(KeyboardInterrupt),
        ):
            hold_briefly(store, f"x/{moment}")
        if not interrupted.place:
            break
        assert not store.is_held(f"x/{moment}"), interrupted.place
    assert moment > 50


def test_an_interrupt_of_who_looks_leaves_nothing_held(store, tmp_path):
    """A look locks the file for an instant; a KeyboardInterrupt left it locked as long as the process lived."""
    for moment in itertools.count(1):
        (tmp_path / f"{moment}").touch()  # of a process that was killed
        with (
            Interrupted(moment, (posix, local)) as interrupted,
            contextlib.suppress(KeyboardInterrupt),
        ):
            store.is_held(f"{moment}")
        if not interrupted.place:
            break
        assert not store.is_held(f"{moment}"), interrupted.place
    assert moment > 15


# Stores around stores


def test_holds_are_recorded_and_can_fail():
    recorder = Recorder(MemoryStore())
    lower = recorder.at("x")
    with lower.hold("a"):
        assert recorder.is_held("x/a")
    assert not lower.is_held("a")

    assert [(o.op, o.path, o.outcome) for o in recorder.log.operations] == [
        ("hold", "x/a", "ok"),
        ("is_held", "x/a", "ok"),
        ("is_held", "x/a", "ok"),
    ]


@pytest.mark.parametrize("applied", [False, True])
def test_a_hold_that_fails_holds_nothing(applied):
    inner = MemoryStore()
    store = FaultStore(inner, Fault(fail_at=1, applied=applied, operations=frozenset({"hold"})))

    with pytest.raises(CkptError):
        hold_briefly(store, "a")

    assert not inner.is_held("a")
