"""Large aligned chunks go past the page cache: the bytes are the same, and so is everything that may go wrong."""

import contextlib
import errno
import fcntl
import itertools
import mmap
import os
import random
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from unittest import mock

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from ckptfmt.errors import Code
from ckptfmt.store import LocalStore, direct
from ckptfmt.store.posix import PosixCalls
from ckptfmt.store.protocol import PAGE_NBYTES
from tests.builders import error_of
from tests.store.helpers import code_of, no_fd_leak, run_python, temporaries
from tests.stores.faults import Fault, FaultCalls
from tests.stores.recorder import RecordingCalls

PAGE = PAGE_NBYTES
REQUEST = 3 * PAGE


def aligned(nbytes, seed=0):
    """Return `nbytes` random bytes that begin at a page of the memory."""
    memory = mmap.mmap(-1, max(nbytes, 1))
    memory[:nbytes] = random.Random(seed).randbytes(nbytes)
    return memoryview(memory)[:nbytes]


@contextlib.contextmanager
def small_sizes():
    """Let a few pages be large, so that a test meets many requests."""
    sizes = {
        "DIRECT_NBYTES": 2 * PAGE,
        "REQUEST_NBYTES": REQUEST,
        "GROWING_NBYTES": 5 * PAGE,
        "ROOM_NBYTES": 7 * PAGE,
    }
    with contextlib.ExitStack() as stack:
        for name, nbytes in sizes.items():
            stack.enter_context(mock.patch.object(direct, name, nbytes))
        yield


@pytest.fixture(name="small")
def _small():
    with small_sizes():
        yield


small = pytest.mark.usefixtures("small")


@pytest.fixture(autouse=True)
def nothing_stays():
    """No thread and no descriptor outlives a test's calls."""
    with no_fd_leak():
        yield
    assert [thread.name for thread in threading.enumerate() if thread.name == "ckptfmt-write"] == []


class WatchedCalls(PosixCalls):
    """Says of each write whether it was direct, and checks what a device or a kernel relies on."""

    def __init__(self):
        self.writes = []
        self.fsync_count = 0
        self.most_in_flight = 0
        self._in_flight = set()
        self._lock = threading.Lock()

    def is_direct(self, fd):
        return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)

    def write(self, fd, data):
        assert not self._in_flight
        assert not self.is_direct(fd)
        self.writes.append(("write", None, len(data)))
        return super().write(fd, data)

    def write_at(self, fd, data, byte_begin):
        key = (byte_begin, len(data))
        is_direct = self.is_direct(fd)
        with self._lock:
            assert is_direct or not self._in_flight, "buffered while direct writes are under way"
            self._in_flight.add(key)
            self.most_in_flight = max(self.most_in_flight, len(self._in_flight))
            self.writes.append(("direct" if is_direct else "write_at", *key))
        try:
            return self.take(fd, data, byte_begin)
        finally:
            with self._lock:
                self._in_flight.discard(key)

    def take(self, fd, data, byte_begin):
        return super().write_at(fd, data, byte_begin)

    def set_direct(self, fd, *, on):
        assert not self._in_flight
        super().set_direct(fd, on=on)

    def fsync(self, fd):
        assert not self._in_flight
        self.fsync_count += 1
        super().fsync(fd)

    def close(self, fd):
        assert not self._in_flight, "a thread may write to whatever gets this number next"
        super().close(fd)

    def kinds(self):
        return {kind for kind, _, _ in self.writes}


@pytest.fixture(scope="module", autouse=True)
def _needs_direct_writing(tmp_path_factory):
    with (tmp_path_factory.mktemp("probe") / "a").open("wb") as file:
        try:
            PosixCalls().set_direct(file.fileno(), on=True)
        except OSError:
            pytest.skip("the file system of the tests has no direct writing")


def create(root, chunks, calls=None):
    """Create a file from `chunks`; return what the system reads back."""
    store = LocalStore(root, writable=True)
    store._calls = calls or PosixCalls()
    store.create("a", iter(chunks))
    assert [entry.name for entry in root.iterdir()] == ["a"]
    return (root / "a").read_bytes()


# The bytes

MEMORY = aligned(20 * REQUEST)
SIZES = st.one_of(
    st.builds(
        lambda count, more: max(0, count * PAGE + more), st.integers(0, 8), st.integers(-2, 2)
    ),
    st.sampled_from([0, 1, REQUEST, 2 * REQUEST, 9 * REQUEST, 9 * REQUEST + 1]),
)
CHUNKS = st.lists(
    st.builds(
        lambda begin, nbytes: MEMORY[begin : begin + nbytes],
        st.sampled_from([0, PAGE, 5 * PAGE, 1, 64]),
        SIZES,
    ),
    max_size=8,
)


class RefusingCalls(PosixCalls):
    """A file system without direct writing."""

    def set_direct(self, fd, *, on):
        raise OSError(errno.EINVAL, f"no direct writing, of {fd}, {on}")


@hypothesis.given(CHUNKS)
def test_a_file_is_the_same_written_directly_and_buffered(tmp_path_factory, chunks):
    calls = WatchedCalls()
    with small_sizes(), tempfile.TemporaryDirectory(dir=tmp_path_factory.getbasetemp()) as path:
        root = tmp_path_factory.getbasetemp() / path
        (root / "direct").mkdir()
        (root / "buffered").mkdir()
        written = create(root / "direct", chunks, calls)
        assert written == create(root / "buffered", chunks, RefusingCalls()) == b"".join(chunks)

    assert calls.fsync_count == 1
    for kind, byte_begin, nbytes in calls.writes:
        if kind == "direct":
            assert byte_begin % PAGE == nbytes % PAGE == 0
            assert nbytes <= REQUEST
    pages_of = {kind: _pages(calls.writes, {kind}) for kind in ("direct", "write_at")}
    assert not pages_of["direct"] & pages_of["write_at"]


def _pages(writes, kinds):
    return {
        page
        for kind, byte_begin, nbytes in writes
        if kind in kinds
        for page in range(byte_begin // PAGE, -(-(byte_begin + nbytes) // PAGE))
    }


MIB = 1 << 20
#: How chunks are to be written: those of a list one behind the other.
CASES = {
    "just large enough": ([MIB], {"direct"}),
    "a byte too small": ([MIB - 1], {"write"}),
    "with a tail": ([MIB + 1], {"direct", "write_at"}),
    "several requests": ([direct.REQUEST_NBYTES * 2 + PAGE], {"direct"}),
    "a header and a body": ([PAGE, 3 * MIB, MIB], {"write", "direct"}),
    "a body that isn't aligned": ([100, 3 * MIB], {"write"}),
    "aligned again": ([MIB, 100, MIB, PAGE - 100, 2 * MIB], {"direct", "write_at"}),
    "growing": ([MIB] * 70, {"direct"}),
}


@pytest.mark.parametrize("case", CASES)
def test_large_aligned_chunks_are_written_directly(tmp_path, case):
    sizes, kinds = CASES[case]
    chunks = [aligned(nbytes, seed) for seed, nbytes in enumerate(sizes)]
    calls = WatchedCalls()

    assert create(tmp_path, chunks, calls) == b"".join(chunks)
    assert calls.kinds() == kinds
    assert calls.fsync_count == 1
    assert calls.most_in_flight <= 2


def test_a_chunk_that_is_not_aligned_in_memory_is_buffered(tmp_path):
    chunk = aligned(2 * MIB + 64)[64:]
    calls = WatchedCalls()

    assert create(tmp_path, [chunk], calls) == chunk
    assert calls.kinds() == {"write"}


@small
def test_two_requests_are_under_way_at_once(tmp_path):
    class Meeting(WatchedCalls):
        both = threading.Barrier(2, timeout=20)

        def take(self, fd, data, byte_begin):
            self.both.wait()
            return super().take(fd, data, byte_begin)

    assert create(tmp_path, [MEMORY[: 8 * REQUEST]], Meeting()) == MEMORY[: 8 * REQUEST]


@small
def test_chunks_are_not_drawn_far_ahead_of_what_is_written(tmp_path):
    """Else a writer of many tensors would hold all of them in memory."""
    drawn, done = [], []

    class Slow(WatchedCalls):
        def take(self, fd, data, byte_begin):
            time.sleep(0.001)
            taken = super().take(fd, data, byte_begin)
            done.append(byte_begin)
            return taken

    def chunks():
        for number in range(40):
            drawn.append(number)
            assert len(drawn) - len(done) <= 4
            yield MEMORY[:REQUEST]

    assert create(tmp_path, chunks(), Slow()) == bytes(MEMORY[:REQUEST]) * 40


@pytest.mark.parametrize("count", [1, 5, 6, 12, 13, 14, 21, 27, 28, 29, 60])
@pytest.mark.parametrize("tail", [0, 1])
@small
def test_room_that_was_made_in_advance_is_given_back(tmp_path, count, tail):
    chunks = [MEMORY[: 2 * PAGE]] * count + [MEMORY[:tail]]

    assert create(tmp_path, chunks) == b"".join(chunks)
    assert (tmp_path / "a").stat().st_blocks * 512 <= count * 2 * PAGE + tail + 64 * 1024


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EOPNOTSUPP, errno.ENOSYS, errno.EIO])
@pytest.mark.parametrize("applied", [False, True])
@small
@pytest.mark.parametrize("count", [3, 9])
def test_a_file_system_without_room_to_give_gets_its_bytes_all_the_same(
    tmp_path, number, applied, count
):
    fault = Fault(fail_at=1, sticky=True, applied=applied, operations=frozenset({"preallocate"}))
    calls = FaultCalls(tmp_path, fault, errno_value=number)

    assert create(tmp_path, [MEMORY[:REQUEST]] * count, calls) == bytes(MEMORY[:REQUEST]) * count
    assert fault.fired_count == 1


# Refusals and short writes


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
@pytest.mark.parametrize("op", ["set_direct", "write_at"])
@pytest.mark.parametrize("fail_at", [1, 2, 3, 5])
@pytest.mark.parametrize("sticky", [False, True])
@small
def test_a_file_system_that_refuses_direct_writing_gets_all_buffered(
    tmp_path, op, fail_at, number, sticky
):
    class Refusing(WatchedCalls):
        count = 0

        def refuse(self, which):
            with self._lock:
                self.count += which == op
                if which == op and (self.count == fail_at or (sticky and self.count > fail_at)):
                    raise OSError(number, os.strerror(number))

        def take(self, fd, data, byte_begin):
            if self.is_direct(fd):
                self.refuse("write_at")
            return super().take(fd, data, byte_begin)

        def set_direct(self, fd, *, on):
            if on:
                self.refuse("set_direct")
            super().set_direct(fd, on=on)

    calls = Refusing()
    chunks = [MEMORY[: 8 * REQUEST], MEMORY[1:99], MEMORY[: PAGE - 98], MEMORY[: 4 * REQUEST]] * 3

    assert create(tmp_path, chunks, calls) == b"".join(chunks)
    assert calls.fsync_count == 1
    # Once refused, it isn't tried again: what was under way by then, and the one who told.
    assert calls.count <= fail_at + (0 if op == "set_direct" else 8)


@pytest.mark.parametrize("taken_nbytes", [PAGE, 2 * PAGE, PAGE + 100, 2 * PAGE - 1])
@small
def test_short_direct_writes_are_continued(tmp_path, taken_nbytes):
    class Short(WatchedCalls):
        def take(self, fd, data, byte_begin):
            whole_nbytes = -(-taken_nbytes // PAGE) * PAGE if self.is_direct(fd) else taken_nbytes
            return min(taken_nbytes, super().take(fd, data[:whole_nbytes], byte_begin))

    calls = Short()
    chunks = [MEMORY[: 5 * REQUEST], MEMORY[: REQUEST + 7]]

    assert create(tmp_path, chunks, calls) == b"".join(chunks)
    assert {nbytes for kind, _, nbytes in calls.writes if kind == "direct"} >= {PAGE, REQUEST}


@pytest.mark.parametrize("taken_nbytes", [0, 1, PAGE - 1])
@small
def test_a_direct_write_that_takes_less_than_a_page_is_done_buffered(tmp_path, taken_nbytes):
    class Tiny(WatchedCalls):
        def take(self, fd, data, byte_begin):
            if self.is_direct(fd):
                os.pwrite(fd, data[:PAGE], byte_begin)
                return taken_nbytes
            return super().take(fd, data, byte_begin)

    assert create(tmp_path, [MEMORY[: 5 * REQUEST]], Tiny()) == MEMORY[: 5 * REQUEST]


@small
def test_without_threads_the_bytes_are_written_all_the_same(tmp_path, monkeypatch):
    def start(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)

    assert create(tmp_path, [MEMORY[: 8 * REQUEST]] * 3) == bytes(MEMORY[: 8 * REQUEST]) * 3


# Failures


def large_chunks():
    yield MEMORY[: 4 * REQUEST]
    yield MEMORY[: REQUEST + 5]
    yield MEMORY[: PAGE - 5]
    yield MEMORY[:REQUEST]


WHOLE = b"".join(large_chunks())


@pytest.mark.parametrize("mode", ["once", "sticky", "applied once", "applied sticky"])
@pytest.mark.parametrize(
    "number", [errno.EIO, errno.ENOSPC, errno.ETIMEDOUT], ids=errno.errorcode.get
)
@small
def test_every_failing_call_gives_a_named_error_and_a_whole_file_or_none(fast_path, number, mode):
    for fail_at in itertools.count(1):
        root = fast_path / str(fail_at)
        fault = Fault(fail_at=fail_at, sticky="sticky" in mode, applied="applied" in mode)
        store = LocalStore(root, writable=True)
        store._calls = FaultCalls(root, fault, errno_value=number, inner=WatchedCalls())
        with no_fd_leak():
            code = code_of(lambda: store.create("a", large_chunks()))  # noqa: B023

        names = {path.name for path in root.iterdir()} - set(temporaries(root))
        assert names <= {"a"}
        if names:
            assert (root / "a").read_bytes() == WHOLE
        assert (names == {"a"}) == (code == "ok") or code == Code.STORE_NO_ANSWER
        assert len(temporaries(root)) <= 1  # one, if the call that failed was to remove it
        if not fault.fired_count:
            break

    assert fail_at > 20


@pytest.mark.parametrize("op", ["write_at", "fsync", "truncate", "set_direct"])
@pytest.mark.parametrize(
    ("number", "code"),
    [
        (errno.ENOSPC, Code.NO_SPACE),
        (errno.EDQUOT, Code.NO_SPACE),
        (errno.EIO, Code.STORE_IO),
        (errno.EROFS, Code.STORE_ACCESS),
        (errno.ETIMEDOUT, Code.STORE_NO_ANSWER),
    ],
)
@pytest.mark.parametrize("fail_at", [1, 2, 4])
@small
def test_an_error_in_a_thread_comes_out_by_its_name_and_nothing_is_left(
    tmp_path, op, number, code, fail_at
):
    fault = Fault(fail_at=1 if op in ("fsync", "truncate") else fail_at, operations=frozenset({op}))
    store = LocalStore(tmp_path, writable=True)
    store._calls = FaultCalls(tmp_path, fault, errno_value=number, inner=WatchedCalls())

    def chunks():
        for _ in range(3):
            yield MEMORY[: 4 * REQUEST]
            yield MEMORY[:PAGE]
        yield MEMORY[:REQUEST]

    assert code_of(lambda: store.create("a", chunks())) == code
    assert list(tmp_path.iterdir()) == []


@small
def test_after_an_error_no_further_chunk_is_written(tmp_path):
    fault = Fault(fail_at=2, operations=frozenset({"write_at"}))
    calls = FaultCalls(tmp_path, fault, errno_value=errno.EIO)
    drawn = []

    def chunks():
        for number in range(100):
            drawn.append(number)
            yield MEMORY[:REQUEST]

    store = LocalStore(tmp_path, writable=True)
    store._calls = calls

    assert code_of(lambda: store.create("a", chunks())) == Code.STORE_IO
    assert len(drawn) < 10


class Unexpected(BaseException):
    """Whatever a caller's code may raise."""


@pytest.mark.parametrize(
    "error", [ZeroDivisionError(), Unexpected(), KeyboardInterrupt()], ids=repr
)
@pytest.mark.parametrize("count", [1, 2, 3, 7])
@small
def test_what_the_chunks_raise_comes_through_when_all_threads_are_done(tmp_path, error, count):
    class Slow(WatchedCalls):
        def take(self, fd, data, byte_begin):
            time.sleep(0.02)
            return super().take(fd, data, byte_begin)

    def chunks():
        yield from [MEMORY[:REQUEST]] * count
        raise error

    with pytest.raises(type(error)):
        create(tmp_path, chunks(), Slow())

    assert list(tmp_path.iterdir()) == []


@small
def test_the_error_of_a_thread_does_not_hide_the_chunks_own(tmp_path):
    def chunks():
        yield MEMORY[:REQUEST]
        raise ZeroDivisionError

    fault = Fault(fail_at=1, operations=frozenset({"write_at"}))

    with pytest.raises(ZeroDivisionError):
        create(tmp_path, chunks(), FaultCalls(tmp_path, fault, errno_value=errno.EIO))


@small
def test_an_interruption_waits_until_the_descriptor_is_free(tmp_path):
    """A thread that still wrote would write to the file that gets the number next."""

    class Slow(WatchedCalls):
        def take(self, fd, data, byte_begin):
            time.sleep(0.3 if byte_begin else 0.8)
            return super().take(fd, data, byte_begin)

    def interrupt(*_):
        raise KeyboardInterrupt

    def chunks():
        yield from [MEMORY[:REQUEST]] * 2
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        raise ZeroDivisionError

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            create(tmp_path, chunks(), Slow())
    finally:
        signal.signal(signal.SIGALRM, before)

    assert list(tmp_path.iterdir()) == []


@small
def test_a_chunk_is_let_go_when_it_is_written(tmp_path):
    """A writer that makes each chunk anew needs memory for a few of them, also while the next one takes long."""
    released = []

    def chunks():
        earlier = mmap.mmap(-1, REQUEST)
        for number in range(6):
            memory = mmap.mmap(-1, REQUEST)
            yield memoryview(memory)
            time.sleep(0.05)
            earlier.close()  # raises BufferError while anybody looks at it
            earlier = memory
            released.append(number)

    create(tmp_path, chunks())

    assert released == list(range(6))


@small
def test_all_is_recorded_with_its_place(tmp_path):
    calls = RecordingCalls(tmp_path)

    assert create(tmp_path, large_chunks(), calls) == WHOLE

    content = bytearray()
    for operation in calls.log.operations:
        if operation.op == "write_at":
            content.extend(bytes(max(0, operation.byte_begin + len(operation.data) - len(content))))
            content[operation.byte_begin : operation.byte_begin + len(operation.data)] = (
                operation.data
            )
    assert content == WHOLE
    assert [
        operation.op for operation in calls.log.operations if operation.op in ("fsync", "link")
    ] == [
        "fsync",
        "link",
    ]


FULL = """
import mmap, os, subprocess, sys
from ckptfmt.errors import CkptError
from ckptfmt.store import LocalStore

root = sys.argv[1]
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "none", root], check=True)
store = LocalStore(root, writable=True)
chunk = memoryview(mmap.mmap(-1, 2 << 20))
try:
    store.create("a", [chunk] * 5)
except CkptError as error:
    print(error.code)
assert os.listdir(root) == []
store.create("a", [chunk] * 2)
"""


def test_a_full_disk_is_named_and_nothing_is_left(tmp_path):
    prefix = ["unshare", "-Urm"]
    if (
        not shutil.which("unshare")
        or subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("no user namespaces here, so no file system of our own to fill")

    assert run_python(FULL, tmp_path, prefix=prefix).split() == ["NO_SPACE"]


# Reading


class Cold(PosixCalls):
    """Calls that find nothing in the page cache, and note what is read past it."""

    def __init__(self, *, cached=False, refuse=None):
        self.cached = cached
        self.refuse = refuse
        self.direct_fds = set()
        self.direct_reads = []

    def cached_page_count(self, fd, byte_begin, nbytes):
        del fd, byte_begin
        return -(-nbytes // PAGE) if self.cached else 0

    def set_direct(self, fd, *, on):
        if on and self.refuse == "at once":
            raise OSError(errno.EINVAL, "no direct reads here")
        super().set_direct(fd, on=on)
        self.direct_fds = self.direct_fds | {fd} if on else self.direct_fds - {fd}

    def read_into_at(self, fd, buffer, byte_begin):
        if fd in self.direct_fds:
            if self.refuse == "at a read":
                raise OSError(errno.EINVAL, "not of this alignment")
            self.direct_reads.append((byte_begin, len(buffer)))
        return super().read_into_at(fd, buffer, byte_begin)


def read_pieces(store, ranges, path="a"):
    buffer = aligned(20 * PAGE)
    with store.open_ranges(path) as file:
        return [bytes(file.read_into(begin, nbytes, buffer)) for begin, nbytes in ranges]


@small
@pytest.mark.parametrize("refuse", [None, "at once", "at a read"])
@pytest.mark.parametrize("cached", [False, True])
@hypothesis.given(data=st.data())
@hypothesis.settings(
    max_examples=25, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
def test_ranges_are_the_file_s_bytes_whichever_way_they_are_read(tmp_path, cached, refuse, data):
    content = random.Random(1).randbytes(data.draw(st.integers(2 * PAGE, 12 * PAGE)))
    begins = st.integers(0, len(content))
    ranges = data.draw(st.lists(st.tuples(begins, begins).map(sorted), min_size=1, max_size=4))
    ranges = [(begin, end - begin) for begin, end in ranges]
    root = tempfile.mkdtemp(dir=tmp_path)
    LocalStore(root, writable=True).create("a", [content])
    calls = Cold(cached=cached, refuse=refuse)

    found = read_pieces(LocalStore(root, writable=False, calls=calls), ranges)

    assert found == [content[begin : begin + nbytes] for begin, nbytes in ranges]
    assert bool(calls.direct_reads) == (not cached and refuse is None)
    assert all(begin % PAGE == nbytes % PAGE == 0 for begin, nbytes in calls.direct_reads)


def test_a_small_file_is_never_read_directly(tmp_path):
    LocalStore(tmp_path, writable=True).create("a", [bytes(100)])
    calls = Cold()
    read_pieces(LocalStore(tmp_path, writable=False, calls=calls), [(0, 100)])
    assert calls.direct_reads == []


@small
@pytest.mark.parametrize(
    "buffer", [aligned(4 * PAGE)[64:], aligned(PAGE)], ids=["unaligned", "short"]
)
def test_a_buffer_that_direct_reads_cannot_use_is_refused(tmp_path, buffer):
    """It is the caller's mistake, and says nothing of the storage."""
    LocalStore(tmp_path, writable=True).create("a", [bytes(8 * PAGE)])
    with (
        LocalStore(tmp_path, writable=False, calls=Cold()).open_ranges("a") as file,
        pytest.raises(ValueError),
    ):
        file.read_into(5, PAGE, buffer)


@small
@pytest.mark.parametrize("cached", [False, True])
def test_a_file_that_shrinks_while_it_is_read_is_a_named_error(tmp_path, cached):
    """REQ-CKP-003."""
    LocalStore(tmp_path, writable=True).create("a", [bytes(8 * PAGE)])
    store = LocalStore(tmp_path, writable=False, calls=Cold(cached=cached))
    with store.open_ranges("a") as file:
        os.truncate(tmp_path / "a", 3 * PAGE + 5)
        assert (
            code_of(lambda: file.read_into(PAGE, 4 * PAGE, aligned(10 * PAGE))) == Code.FILE_NBYTES
        )
        assert bytes(file.read_into(PAGE, PAGE, aligned(10 * PAGE))) == bytes(PAGE)


class Failing(Cold):
    """Calls of a device whose first page can't be read, so often."""

    def __init__(self, *, number, times):
        super().__init__()
        self.number = number
        self.left = times

    def fail(self, byte_begin):
        if byte_begin < PAGE and self.left:
            self.left -= 1
            raise OSError(self.number, os.strerror(self.number))

    def read_at(self, fd, nbytes, byte_begin):
        self.fail(byte_begin)
        return super().read_at(fd, nbytes, byte_begin)

    def read_into_at(self, fd, buffer, byte_begin):
        self.fail(byte_begin)
        return super().read_into_at(fd, buffer, byte_begin)


@small
def test_a_first_page_that_cannot_be_read_is_a_named_error_of_its_reader_alone(tmp_path):
    """Found in an upload from a cache: it was taken for an error of home, and tried again without end."""
    content = random.Random(1).randbytes(8 * PAGE)
    LocalStore(tmp_path, writable=True).create("a", [content])
    store = LocalStore(tmp_path, writable=False, calls=Failing(number=errno.EIO, times=99))
    with store.open_ranges("a") as file:
        error = error_of(lambda: file.read_into(5, PAGE, aligned(10 * PAGE)))
        assert (error.code, error.where) == (Code.STORE_IO, "a")
        assert bytes(file.read_into(PAGE, PAGE, aligned(10 * PAGE))) == content[PAGE : 2 * PAGE]


@small
@pytest.mark.parametrize(("times", "code"), [(1, "ok"), (2, "ok"), (9, Code.STORE_IO)])
def test_a_range_behind_a_stale_handle_is_looked_up_again(tmp_path, times, code):
    content = random.Random(1).randbytes(8 * PAGE)
    LocalStore(tmp_path, writable=True).create("a", [content])
    store = LocalStore(tmp_path, writable=False, calls=Failing(number=errno.ESTALE, times=times))
    assert code_of(lambda: read_pieces(store, [(5, PAGE)])) == code
    if code == "ok":
        assert read_pieces(store, [(5, PAGE)]) == [content[5 : 5 + PAGE]]


def test_only_what_is_not_in_the_page_cache_is_read_past_it(tmp_path):
    """What was just written is; what was dropped from it isn't, where the kernel can tell."""

    class Noting(PosixCalls):
        def __init__(self):
            self.direct_count = 0

        def set_direct(self, fd, *, on):
            super().set_direct(fd, on=on)
            self.direct_count += on

    (tmp_path / "a").write_bytes(bytes(1 << 20))
    calls = Noting()
    store = LocalStore(tmp_path, writable=False, calls=calls)
    assert not store.waits("a")
    with store.open_ranges("a"):
        assert calls.direct_count == 0
    with (tmp_path / "a").open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        try:
            if calls.cached_page_count(file.fileno(), 0, 1 << 20):
                pytest.skip("this file system drops nothing")
        except OSError:
            pytest.skip("this kernel has no cachestat")
    assert store.waits("a")
    with store.open_ranges("a"):
        assert calls.direct_count == 1


@hypothesis.given(sizes=st.lists(st.integers(0, 3 << 20), max_size=8), seed=st.integers(0, 9))
@hypothesis.settings(max_examples=30)
def test_pieces_of_any_size_come_in_whole_pages_of_memory_that_stays(sizes, seed):
    """A file takes all but its end past the page cache; a piece's own memory may be used again at once."""
    pieces = [random.Random(seed + number).randbytes(nbytes) for number, nbytes in enumerate(sizes)]
    scratch = bytearray(max(sizes, default=0))

    def one_memory():
        for piece in pieces:
            scratch[: len(piece)] = piece
            yield memoryview(scratch)[: len(piece)]

    chunks = list(direct.in_pages(one_memory()))
    assert b"".join(chunks) == b"".join(pieces)
    assert all(np.frombuffer(chunk, np.uint8).ctypes.data % PAGE == 0 for chunk in chunks)
    assert all(
        chunk.nbytes % PAGE == 0 and chunk.nbytes >= direct.DIRECT_NBYTES for chunk in chunks[:-1]
    )
