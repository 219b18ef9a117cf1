"""Streaming: every request once, in few buffers; after an error nothing is under way any more."""

import contextlib
import os
import random
import signal
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfmt.box import Box
from ckptfmt.errors import CkptError, Code, err
from ckptfmt.layout.read_plan import BlockRange, Request
from ckptfmt.read import decoding, streaming
from ckptfmt.read.reader import Checkpoint
from ckptfmt.read.streaming import stream_requests
from ckptfmt.store.memory import MemoryStore
from tests.builders import ATTEMPT, ArraySink, save, snapshot, tensor
from tests.stores.hooked import HookedStore

MIB = 1 << 20


class Waiting(HookedStore):
    """A store whose files come from a device, as the engine is told."""

    def waits(self, path):
        del path
        return True


@pytest.fixture(params=[False, True], ids=["in memory", "waiting"])
def waits(request):
    """Whether what is read has to be waited for."""
    return request.param


def requests_of(sizes, *, waits=False):
    """Return a store and requests that tile its files, each of a few sizes."""
    store = Waiting(MemoryStore()) if waits else MemoryStore()
    requests: list[Request] = []
    for number, nbytes in enumerate(sizes):
        path = f"f{number // 3}"
        begin = sum(request.nbytes for request in requests if request.path == path)
        requests.append(Request(path, begin, nbytes, (BlockRange(path, begin, nbytes, 0, 0),)))
    for path in {request.path for request in requests}:
        total = sum(request.nbytes for request in requests if request.path == path)
        store.create(path, [random.Random(path).randbytes(total)])
    return store, requests


def thread_count(*, waits):
    """Return the largest number of threads, and of buffers."""
    return streaming.thread_count() + (streaming.READER_COUNT if waits else 0)


def content_of(store, request):
    return store.read_range(request.path, request.byte_begin, request.nbytes)


class Opening(HookedStore):
    """Knows how many files are open, and how many were at most."""

    now = most = 0

    def open_ranges(self, path):
        @contextlib.contextmanager
        def opened():
            with super(Opening, self).open_ranges(path) as file:
                self.now += 1
                self.most = max(self.most, self.now)
                try:
                    yield file
                finally:
                    self.now -= 1

        return opened()


@pytest.fixture(autouse=True)
def no_thread_stays():
    yield
    assert not [
        thread
        for thread in threading.enumerate()
        if thread.name == "ckptfmt-read" and not ended(thread)
    ]


def ended(thread):
    thread.join(5)
    return not thread.is_alive()


@given(st.lists(st.integers(0, 400_000), max_size=20), st.booleans())
def test_every_request_is_taken_once_with_its_bytes(sizes, waits):
    store, requests = requests_of(sizes, waits=waits)
    taken = []
    nbytes = stream_requests(
        store, requests, lambda request, content: taken.append((request, bytes(content)))
    )
    assert sorted(taken, key=lambda pair: (pair[0].path, pair[0].byte_begin, pair[0].nbytes)) == [
        (request, content_of(store, request))
        for request in sorted(
            requests, key=lambda request: (request.path, request.byte_begin, request.nbytes)
        )
    ]
    assert nbytes <= thread_count(waits=waits) * (max(sizes, default=0) + 3 * 4096)


def test_buffers_are_few_and_so_are_open_files(waits):
    """REQ-OPN-008: both are bounded, however much there is to read."""
    store, requests = requests_of([MIB] * 60, waits=waits)
    opening = Opening(store)
    places, threads = set(), set()

    def take(_, content):
        places.add(np.frombuffer(content, np.uint8).ctypes.data // MIB)
        threads.add(threading.get_ident())
        time.sleep(0.001)

    nbytes = stream_requests(opening, requests, take)
    count = thread_count(waits=waits)
    assert nbytes <= (count + 1) * MIB
    assert min(2, len(os.sched_getaffinity(0))) <= len(threads) <= count
    assert len(places) <= 2 * count
    assert (opening.most <= count, opening.now) == (True, 0)


def test_reads_that_wait_have_more_threads_than_processors():
    """So that the queue of the storage is full, whatever checking and placing take."""
    store, requests = requests_of([MIB] * 60, waits=True)
    readers: set[int] = set()

    class Noting(Waiting):
        def before(self, operation):
            if operation.op == "read_range":
                readers.add(threading.get_ident())
                time.sleep(0.01)

    stream_requests(Noting(store), requests, lambda *_: None)
    assert len(readers) == thread_count(waits=True)


def test_large_blocks_take_fewer_buffers(waits):
    """REQ-OPN-008: the limit on bytes in flight holds, but for one request."""
    store, requests = requests_of([20 * MIB] * 3, waits=waits)
    assert stream_requests(store, requests, lambda *_: None) == 20 * MIB + 2 * 4096


@pytest.mark.parametrize("failing", [{0}, {7}, {5, 6, 7, 8}, {19}, set(range(20))])
def test_the_first_error_is_raised_and_no_more_is_begun(failing, waits):
    """Which one that is doesn't depend on the threads; all that was begun has ended."""
    for _ in range(5):
        store, requests = requests_of([MIB] * 20, waits=waits)
        opening = Opening(store)
        begun: list[int] = []
        ended: list[int] = []

        def take(request, _, begun=begun, ended=ended, requests=requests):
            number = requests.index(request)
            begun.append(number)
            if number in failing:
                # At once: as long as nobody knows of an error, others go on.
                ended.append(number)
                raise err(Code.BLOCK_DIGEST, str(number))
            time.sleep(random.uniform(0.002, 0.004))
            ended.append(number)

        with pytest.raises(CkptError) as caught:
            stream_requests(opening, requests, take)
        assert caught.value.detail == str(min(failing))
        assert sorted(begun) == sorted(ended)
        most = 2 * thread_count(waits=waits)
        assert max(begun) <= max(min(failing) + most, *failing & set(begun))
        assert opening.now == 0


def test_an_interruption_waits_for_what_is_under_way():
    """The destination must not change once the caller goes on."""
    store, requests = requests_of([MIB] * 20)
    under_way = set()
    main = threading.get_ident()

    def take(request, _):
        if threading.get_ident() == main:
            raise KeyboardInterrupt
        under_way.add(request)
        time.sleep(0.05)
        under_way.remove(request)

    with pytest.raises(KeyboardInterrupt):
        stream_requests(store, requests, take)
    assert not under_way


@pytest.mark.parametrize("failing", [{0}, {7}, {5, 6}, {19}])
def test_an_error_of_a_read_is_raised_too(failing, waits):
    """The first one, again; and nothing that comes after it is handed on when it is known."""
    store, requests = requests_of([MIB] * 20, waits=waits)

    failed = {(requests[number].path, requests[number].byte_begin) for number in failing}

    class Bad:
        def __init__(self, path, file):
            self.path, self.file = path, file

        def read_into(self, byte_begin, nbytes, buffer):
            if (self.path, byte_begin) in failed:
                raise err(Code.STORE_IO, f"{self.path}:{byte_begin}")
            return self.file.read_into(byte_begin, nbytes, buffer)

    @contextlib.contextmanager
    def open_ranges(path, inner=store.open_ranges):
        with inner(path) as file:
            yield Bad(path, file)

    store.open_ranges = open_ranges
    with pytest.raises(CkptError) as caught:
        stream_requests(store, requests, lambda *_: None)
    first = requests[min(failing)]
    assert caught.value.detail == f"{first.path}:{first.byte_begin}"


def test_ctrl_c_ends_all():
    """The calling thread, which is interrupted wherever it is, goes on only when the others have ended."""
    store, requests = requests_of([MIB] * 200, waits=True)
    under_way: set[Request] = set()
    taken: list[Request] = []

    def take(request, _):
        under_way.add(request)
        try:
            time.sleep(0.02)
            if len(taken) == 5:
                os.kill(os.getpid(), signal.SIGINT)
            taken.append(request)
        finally:
            under_way.remove(request)

    with pytest.raises(KeyboardInterrupt):
        stream_requests(store, requests, take)
    assert not under_way
    assert len(taken) < 50


def test_without_threads_one_does_it_all(monkeypatch, waits):
    """Where no thread can be started, the load goes on in this one."""

    def refuse(*_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    store, requests = requests_of([MIB] * 9, waits=waits)
    taken = []
    stream_requests(
        store, requests, lambda request, content: taken.append((request, bytes(content)))
    )
    assert taken == [(request, content_of(store, request)) for request in requests]


def test_a_report_counts_what_was_read():
    """Each block once, whoever wants it: two sinks of one tensor, and one that wants a row of it twice."""
    array = np.arange(64 * 1024, dtype=np.float32).reshape(64, 1024)  # a row is a block
    store = MemoryStore()
    save(store, snapshot(tensor("w", array), tensor("v", array)))
    checkpoint = Checkpoint(store)
    whole = ArraySink(
        name="w", dtype="float32", global_shape=(64, 1024), boxes=(Box((8, 0), (4, 1024)),)
    )
    rows = ArraySink(
        name="w",
        dtype="float32",
        global_shape=(64, 1024),
        boxes=(Box((9, 0), (1, 10)), Box((9, 100), (1, 10))),
    )
    report = checkpoint.read_into([whole, rows])
    assert report.needed_nbytes == 4 * 4096 + 2 * 40
    assert report.read_nbytes == report.verified_nbytes == 4 * 4096
    assert (report.request_count, report.received_nbytes) == (1, 0)
    file = Checkpoint(store).read_part(0).files[0]
    index = checkpoint.manifest.index_nbytes + len(
        store.read("manifest.json", limit_nbytes=1 << 20)
    )
    assert report.metadata_nbytes == index + checkpoint.index.parts[0].nbytes + file.header_nbytes
    assert {bytes(content) for _, content in rows.taken} == {
        array[9, :10].tobytes(),
        array[9, 100:110].tobytes(),
    }


def test_columns_skip_the_blocks_between_them():
    """REQ-OPN-005: a column of rows that are longer than a block reads a block of each row."""
    array = np.arange(8 * 4096, dtype=np.float32).reshape(8, 4096)  # a row is four blocks
    store = MemoryStore()
    save(store, snapshot(tensor("w", array)))
    box = Box((0, 1000), (8, 100))  # within the first block and the second
    sink = ArraySink(name="w", dtype="float32", global_shape=(8, 4096), boxes=(box,))
    report = Checkpoint(store).read_into([sink])
    assert report.verified_nbytes == 8 * 2 * 4096
    assert report.needed_nbytes == 8 * 400


def test_a_gap_that_nobody_wants_may_be_read_but_is_not_verified(monkeypatch):
    array = np.arange(8 * 4096, dtype=np.float32).reshape(8, 4096)
    store = MemoryStore()
    save(store, snapshot(tensor("w", array)))
    sink = ArraySink(
        name="w", dtype="float32", global_shape=(8, 4096), boxes=(Box((0, 0), (8, 100)),)
    )
    monkeypatch.setattr(decoding, "GAP_NBYTES", 3 * 4096)
    report = Checkpoint(store).read_into([sink])
    assert (report.request_count, report.verified_nbytes, report.read_nbytes) == (
        1,
        8 * 4096,
        29 * 4096,
    )
    monkeypatch.setattr(decoding, "GAP_NBYTES", 3 * 4096 - 1)
    report = Checkpoint(store).read_into([sink])
    assert (report.request_count, report.read_nbytes) == (8, 8 * 4096)


def test_many_small_tensors_are_few_requests():
    """What lies side by side in a file is read at once."""
    store = MemoryStore()
    save(
        store,
        snapshot(*(tensor(f"t{number}", np.full(10, number, np.int32)) for number in range(500))),
    )
    sinks = [
        ArraySink(name=f"t{number}", dtype="int32", global_shape=(10,), boxes=(Box((0,), (10,)),))
        for number in range(500)
    ]
    assert Checkpoint(store).read_into(sinks).request_count == 1
    assert all(
        sink.taken[0][1] == np.full(10, n, np.int32).tobytes() for n, sink in enumerate(sinks)
    )


def test_damage_in_a_gap_does_no_harm(monkeypatch):
    """Nobody is given it: what isn't wanted needn't be right."""
    array = np.arange(8 * 4096, dtype=np.float32).reshape(8, 4096)
    store = MemoryStore()
    save(store, snapshot(tensor("w", array)))
    path = f"weights-{ATTEMPT}-00000.safetensors"
    files = store.snapshot()
    damaged = bytearray(files[path])
    damaged[len(damaged) - array.nbytes + 2 * 4096] ^= 1  # of the third block, in the first row
    monkeypatch.setattr(decoding, "GAP_NBYTES", 1 << 20)
    checkpoint = Checkpoint(MemoryStore.from_snapshot({**files, path: bytes(damaged)}))
    assert (
        checkpoint.read("weights", "w", box=Box((0, 0), (8, 10))).tobytes()
        == array[:, :10].tobytes()
    )
