"""Every system call of every operation fails once, from then on, or after it was carried out."""

import errno
import itertools
import mmap

import pytest

from ckptfmt.errors import CkptError, Code
from ckptfmt.store import LocalStore, MemoryStore
from ckptfmt.store.protocol import PAGE_NBYTES
from tests.store.helpers import NoLinkCalls, code_of, no_fd_leak, temporaries
from tests.stores.faults import Fault, FaultCalls, FaultStore


def read_ranges(store):
    with store.open_ranges("run/old") as file:
        file.read_into(1, 2, memoryview(mmap.mmap(-1, 4 * PAGE_NBYTES)))


OPERATIONS = {
    "create": lambda store: store.create("run/new", [b"new", b"er"]),
    "create deep": lambda store: store.create("a/b/new", [b"newer"]),
    "create taken": lambda store: store.create("run/old", [b"newer"]),
    "replace": lambda store: store.replace("run/old", b"newer"),
    "read": lambda store: store.read("run/old", limit_nbytes=9),
    "read_range": lambda store: store.read_range("run/old", 1, 2),
    "open_ranges": read_ranges,
    "nbytes": lambda store: store.nbytes("run/old"),
    "list": lambda store: store.list(""),
    "list_names": lambda store: store.list_names("run"),
    "delete": lambda store: store.delete("run/old"),
    "delete_leftovers": lambda store: store.delete_leftovers(""),
    "remove_directory": lambda store: store.remove_directory("empty"),
    "sync": lambda store: store.sync("run"),
}
WHOLE = {b"old", b"newer"}


def contents(root):
    """Return the contents of all files by their paths, read without the store."""
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file()
    }


def fault_run(root, inner, fault, number, operation):
    """Do `operation` with a fault in it; return its code."""
    root.mkdir()
    healthy = LocalStore(root, writable=True, calls=inner)
    healthy.create("run/old", [b"old"])
    healthy.create("empty/a", [])
    healthy.delete("empty/a")
    store = healthy.at("")
    store._calls = FaultCalls(root, fault, errno_value=number, inner=inner)
    with no_fd_leak():
        return healthy, code_of(lambda: OPERATIONS[operation](store))


@pytest.mark.parametrize("kind", ["link", "rename"])
@pytest.mark.parametrize("mode", ["once", "sticky", "applied once", "applied sticky"])
@pytest.mark.parametrize(
    "number", [errno.EIO, errno.ENOSPC, errno.ETIMEDOUT], ids=errno.errorcode.get
)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_failing_call_gives_a_named_error_and_whole_files(
    fast_path, operation, number, mode, kind
):
    inner = None if kind == "link" else NoLinkCalls()
    for fail_at in itertools.count(1):
        root = fast_path / str(fail_at)
        fault = Fault(fail_at=fail_at, sticky="sticky" in mode, applied="applied" in mode)
        healthy, code = fault_run(root, inner, fault, number, operation)

        after = contents(root)
        assert {data for path, data in after.items() if ".tmp-" not in path} <= WHOLE
        if operation.startswith("create") and code not in ("ok", Code.STORE_NO_ANSWER):
            assert not {"run/new", "a/b/new"} & after.keys(), code
        if operation.startswith("create") and code == "ok":
            assert {"run/new", "a/b/new"} & after.keys()
        assert len(temporaries(root)) <= 1  # one, if the call that failed was to remove it
        assert code_of(lambda: OPERATIONS[operation](healthy)) in (  # noqa: B023
            "ok",
            Code.STORE_EXISTS,
            Code.FILE_MISSING,
        )
        for place in ("", "run", "empty", "a", "a/b"):
            healthy.delete_leftovers(place)
        assert temporaries(root) == []
        if not fault.fired_count:
            break

    assert fail_at > 3


@pytest.mark.parametrize("sticky", [False, True])
@pytest.mark.parametrize("applied", [False, True])
@pytest.mark.parametrize(
    "op", ["write", "fsync", "close", "link", "rename", "open_new", "mkdir", "fsync_directory"]
)
@pytest.mark.parametrize("operation", ["create", "create deep", "replace"])
def test_no_temporary_is_left_as_long_as_names_can_be_removed(
    fast_path, operation, op, applied, sticky
):
    for fail_at in itertools.count(1):
        root = fast_path / str(fail_at)
        fault = Fault(fail_at=fail_at, sticky=sticky, applied=applied, operations=frozenset({op}))
        fault_run(root, None, fault, errno.EIO, operation)

        assert temporaries(root) == []
        if not fault.fired_count:
            break


@pytest.mark.parametrize(
    ("operation", "op"), [("create", "fsync"), ("replace", "fsync"), ("sync", "fsync_directory")]
)
def test_an_fsync_that_fails_is_not_tried_again(tmp_path, operation, op):
    """REQ-STO-007."""
    fault = Fault(fail_at=1, operations=frozenset({op}))
    _, code = fault_run(tmp_path / "root", None, fault, errno.EIO, operation)

    assert code == Code.STORE_IO
    assert fault._seen_count == 1


@pytest.mark.parametrize("operation", ["create", "replace", "sync"])
def test_a_file_system_that_does_not_answer_leaves_it_unknown(fast_path, operation):
    """REQ-STO-003: and says nothing else, whichever call it was."""
    codes = set()
    for fail_at in itertools.count(1):
        fault = Fault(fail_at=fail_at)
        codes.add(fault_run(fast_path / str(fail_at), None, fault, errno.ETIMEDOUT, operation)[1])
        if not fault.fired_count:
            break

    assert codes == {Code.STORE_NO_ANSWER, "ok"}


def test_only_operations_that_are_meant_count():
    fault = Fault(fail_at=2, operations=frozenset({"create"}), path_end=".json")
    store = FaultStore(MemoryStore(), fault, code=Code.NO_SPACE)

    store.create("a", [])
    store.create("a.json", [])
    store.replace("a.json", b"")
    assert code_of(lambda: store.at("lower").create("b.json", [])) == Code.NO_SPACE
    store.create("c.json", [])

    assert fault.fired_count == 1
    assert store.list("") == ["a", "a.json", "c.json"]


def test_a_sticky_fault_goes_on_in_all_views_of_a_store():
    store = FaultStore(MemoryStore(), Fault(fail_at=1, sticky=True))

    assert code_of(lambda: store.at("a").create("b", [])) == Code.STORE_IO
    assert code_of(lambda: store.list("")) == Code.STORE_IO


def test_an_applied_fault_loses_the_answer_only():
    inner = MemoryStore()
    store = FaultStore(inner, Fault(fail_at=1, applied=True), code=Code.STORE_NO_ANSWER)

    with pytest.raises(CkptError) as caught:
        store.create("a", [b"1"])

    assert caught.value.code == Code.STORE_NO_ANSWER
    assert inner.snapshot() == {"a": b"1"}


@pytest.mark.parametrize("sticky", [False, True])
@pytest.mark.parametrize("applied", [False, True])
def test_every_failing_call_while_opening_gives_a_named_error(fast_path, applied, sticky):
    for fail_at in itertools.count(1):
        root = fast_path / str(fail_at) / "run"
        fault = Fault(fail_at=fail_at, sticky=sticky, applied=applied)
        calls = FaultCalls(root, fault, errno_value=errno.EIO)
        with no_fd_leak():
            code = code_of(lambda: LocalStore(root, writable=True, calls=calls))  # noqa: B023

        assert code in ("ok", Code.STORE_IO)
        for place in ("", "run", "a", "a/b"):
            LocalStore(root, writable=True).delete_leftovers(place)
        assert list(root.iterdir()) == []
        if not fault.fired_count:
            break

    assert fail_at > 10
