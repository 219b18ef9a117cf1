"""What an object store is asked: few requests, several at once, and none for what the last answer said already."""

import threading
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptfmt
from ckptfmt.box import Box
from ckptfmt.commit.decision import commit, decide, retire, sweep_attempts
from ckptfmt.documents.manifest import checkpoint_name
from ckptfmt.errors import CkptError, Code, err
from ckptfmt.read import decoding, streaming
from ckptfmt.read.reader import Checkpoint
from ckptfmt.store.memory import MemoryStore
from ckptfmt.store.protocol import CALLS_AT_ONCE, call_each
from ckptfmt.write.writer import write_part
from tests.builders import ArraySink, error_of, leaf, origin, save, snapshot, tensor
from tests.read.test_reader import DTYPES, SHAPES, random_array, random_box, save_tiled
from tests.stores.hooked import HookedStore

#: The request that each call is on an object store; other calls are none.
REQUESTS = {
    "create": "PUT", "replace": "PUT", "read": "GET", "read_range": "GET", "nbytes": "HEAD", "list": "LIST",
    "list_names": "LIST", "delete": "DELETE", "hold": "PUT", "is_held": "GET",
}  # fmt: skip
HANG_S = 30


class Distant(HookedStore):
    """Objects behind a network: counts requests, and lets those of a kind wait until several are under way.

    Attributes:
        counts: how many requests of each kind.
        keys: of each request, its kind and its key.
    """

    is_remote = True

    def __init__(self, inner=None):
        super().__init__(MemoryStore() if inner is None else inner)
        self.counts: Counter[str] = Counter()
        self.keys: list[tuple[str, str]] = []
        self._lock = threading.Lock()
        self._meetings: dict[tuple[str, str], threading.Barrier] = {}

    def waits(self, path):
        del path
        return True

    def meet(self, kind, path_part, count):
        """Let requests of a kind, of keys that have `path_part`, wait until so many of them are under way."""
        self._meetings[kind, path_part] = threading.Barrier(count)

    def before(self, operation):
        kind = REQUESTS.get(operation.op)
        if kind is None:
            return
        with self._lock:
            self.counts[kind] += 1
            self.keys.append((kind, operation.path))
        for (met, path_part), barrier in self._meetings.items():
            if kind == met and path_part in operation.path:
                barrier.wait(HANG_S)

    def forget(self):
        """Count anew."""
        self.counts.clear()
        self.keys.clear()


def save_rows(writer_count, *, rows=8, columns=1024, **members):
    """Save a matrix by rows, so many for each writer, and return store and matrix; a row is a block."""
    array = np.arange(writer_count * rows * columns, dtype=np.float32).reshape(-1, columns)
    boxes = [Box((writer * rows, 0), (rows, columns)) for writer in range(writer_count)]
    store = Distant()
    save(
        store,
        *(snapshot(tensor("w", array, boxes=(box,)), leaves=[leaf("config", 1)]) for box in boxes),
        **members,
    )
    store.forget()
    return store, array


def sink_of(array, box):
    return ArraySink(name="w", dtype="float32", global_shape=array.shape, boxes=(box,))


def taken_by(sink, shape):
    """Return the elements that a sink was given, where they belong."""
    found = np.full(shape, np.nan, np.float32)
    for box, content in sink.taken:
        found[box.relative_to(Box.whole(shape))] = np.frombuffer(content, np.float32).reshape(
            box.shape
        )
    return found


def test_opening_a_checkpoint_takes_a_handful_of_requests():
    """Register and index, each by one request that tells the size as well; and who holds what in the directory."""
    store, _ = save_rows(20)
    ckptfmt.open(store)
    assert store.counts["GET"] == 2
    assert store.counts.total() <= 5
    assert set(store.counts) == {"GET", "LIST"}


@pytest.mark.parametrize("writer_count", [1, 4, 40])
def test_a_whole_load_asks_for_each_part_and_file_once(writer_count):
    store, array = save_rows(writer_count)
    checkpoint = Checkpoint(store)
    sink = sink_of(array, Box.whole(array.shape))
    store.forget()
    report = checkpoint.read_into([sink])
    assert np.array_equal(taken_by(sink, array.shape), array)
    # Of each writer: its part, the header and the size of its file, its rows.
    assert report.request_count == writer_count
    assert store.counts == {"GET": 3 * writer_count, "HEAD": writer_count}


def test_another_layout_reads_the_parts_and_the_blocks_that_it_needs():
    store, array = save_rows(10)
    checkpoint = Checkpoint(store)
    store.forget()
    box = Box((20, 100), (9, 50))  # of the rows of writers 2 and 3
    sink = sink_of(array, box)
    report = checkpoint.read_into([sink])
    assert np.array_equal(taken_by(sink, array.shape)[20:29, 100:150], array[20:29, 100:150])
    assert report.verified_nbytes == report.read_nbytes == 9 * 4096
    assert report.request_count == 2
    assert store.counts == {"GET": 6, "HEAD": 2}
    assert {key.rpartition("-")[2].partition(".")[0] for _, key in store.keys} == {"00002", "00003"}


@settings(max_examples=60)
@given(
    SHAPES,
    st.sampled_from(DTYPES),
    st.randoms(use_true_random=False),
    st.sampled_from([8 << 20, 8192, 4096]),
)
def test_any_box_of_any_tiling_is_read_from_afar(shape, dtype, rng, request_nbytes):
    """REQ-OPN-005: bit for bit, each block in one request of the longest that is allowed, or several of it together."""
    array = random_array(shape, dtype, rng)
    store = Distant(save_tiled(array, dtype, rng))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoding, "REMOTE_REQUEST_NBYTES", request_nbytes)
        checkpoint = Checkpoint(store)
        for box in (Box.whole(shape), random_box(shape, rng)):
            found = checkpoint.read("weights", "w", box=box)
            assert found.tobytes() == array[box.relative_to(Box.whole(shape))].tobytes()


def test_requests_are_long_and_buffers_bounded(monkeypatch):
    """REQ-OPN-008: 8 MiB are asked for at once, and there is memory for so many bytes at most."""
    array = np.arange(20 << 18, dtype=np.float32).reshape(20, -1)  # rows of a MiB
    store = Distant()
    save(store, snapshot(tensor("w", array)), block_nbytes=1 << 20)
    for request_nbytes, request_count, buffer_nbytes in (
        (8 << 20, 3, 25 << 20),
        (1 << 20, 20, 4 << 20),
    ):
        monkeypatch.setattr(decoding, "REMOTE_REQUEST_NBYTES", request_nbytes)
        sink = sink_of(array, Box.whole(array.shape))
        report = Checkpoint(store).read_into([sink])
        assert report.request_count == request_count
        assert report.buffer_nbytes <= buffer_nbytes
        assert np.array_equal(taken_by(sink, array.shape), array)
        monkeypatch.setattr(streaming, "REMOTE_IN_FLIGHT_NBYTES", 4 << 20)


def test_no_whole_block_is_read_that_nobody_wants():
    """A gap that is read to save a request is shorter than a block of the usual size."""
    array = np.arange(6 << 19, dtype=np.float32).reshape(6, -1)  # rows of two blocks
    store = Distant()
    save(store, snapshot(tensor("w", array)), block_nbytes=1 << 20)
    box = Box((0, 0), (6, 10))
    report = Checkpoint(store).read_into([sink_of(array, box)])
    assert report.read_nbytes == report.verified_nbytes == 6 << 20
    assert report.request_count == 6


@pytest.mark.parametrize(
    ("kind", "path_part"), [("GET", "parts/"), ("HEAD", ".safetensors"), ("GET", ".safetensors")]
)
def test_a_load_asks_for_several_files_at_once(kind, path_part):
    """It would hang here if it asked for one behind the other."""
    store, array = save_rows(6)
    store.meet(kind, path_part, 6)
    sink = sink_of(array, Box.whole(array.shape))
    Checkpoint(store).read_into([sink])
    assert np.array_equal(taken_by(sink, array.shape), array)


@pytest.mark.parametrize(
    ("kind", "path_part"), [("GET", "parts/"), ("HEAD", ".safetensors"), ("DELETE", "0123456789")]
)
def test_a_commit_and_a_clean_up_ask_several_things_at_once(kind, path_part):
    store = Distant()
    made = origin(writer_count=6)
    for writer in range(6):
        write_part(
            store,
            snapshot(tensor("w", np.ones(6), boxes=(Box((writer,), (1,)),))),
            made,
            writer=writer,
        )
    store.meet(kind, path_part, 6 if kind != "DELETE" else 13)
    retire(store, commit(store, made, deadline_s=1))
    assert store.list("") == ["manifest.json"]


def test_what_is_wrong_with_parts_that_are_read_at_once_is_said_of_the_first():
    store, array = save_rows(6)
    paths = [path for path in store.list("parts") if path.endswith(("2.msgpack", "4.msgpack"))]
    for path in paths:
        store.delete(path)
    error = error_of(lambda: Checkpoint(store).read_into([sink_of(array, Box.whole(array.shape))]))
    assert (error.code, error.where) == (Code.FILE_MISSING, paths[0])
    report = ckptfmt.validate(store)
    assert {violation.where for violation in report.violations} >= set(paths)


@pytest.mark.parametrize("item_count", [0, 1, 5, 200])
def test_calls_are_made_once_each_and_answered_in_order(item_count):
    now, most, lock, called = 0, 0, threading.Lock(), []

    def call(item):
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
            called.append(item)
        try:
            return -item
        finally:
            with lock:
                now -= 1

    assert call_each(Distant(), call, iter(range(item_count))) == [
        -item for item in range(item_count)
    ]
    assert sorted(called) == list(range(item_count))
    assert most <= CALLS_AT_ONCE


def test_calls_of_a_store_at_hand_are_made_by_this_thread():
    """One behind the other: what explorers schedule, and quickest."""
    assert (
        call_each(MemoryStore(), lambda _: threading.get_ident(), range(5))
        == [threading.get_ident()] * 5
    )


def test_the_first_error_is_raised_when_all_that_was_begun_has_ended():
    begun, ended = [], []
    meeting = threading.Barrier(CALLS_AT_ONCE)

    def call(item):
        begun.append(item)
        try:
            if item < CALLS_AT_ONCE:
                meeting.wait(HANG_S)
            if item >= 3:
                raise err(Code.STORE_IO, str(item))
        finally:
            ended.append(item)

    with pytest.raises(CkptError) as caught:
        call_each(Distant(), call, range(1000))
    assert caught.value.detail == "3"
    assert sorted(begun) == sorted(ended)
    assert len(begun) <= 2 * CALLS_AT_ONCE


def test_without_threads_calls_are_made_by_this_one(monkeypatch):
    """As it is where there are too many, or the interpreter is about to end: a save is committed all the same."""

    def refuse(*_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert call_each(Distant(), lambda item: item + 1, range(5)) == [1, 2, 3, 4, 5]


def test_the_only_writer_of_a_run_commits_without_a_listing():
    """It knows that its part is there; what others left is listed once, behind the commit, by who isn't waited for."""
    store, made = Distant(), origin(run_id="ab" * 16, launch=1)
    write_part(store, snapshot(tensor("w", np.zeros(2048, np.float32))), made, writer=0)
    store.forget()
    decide(store, made, writer=0, deadline_s=1)
    assert store.counts["LIST"] == 0
    store.forget()
    sweep_attempts(store, made)
    assert store.counts == {"LIST": 1, "GET": 1}


def test_a_save_asks_as_much_however_many_checkpoints_were_retired():
    """What is aborted or retired stays so: it is read once by a saver, and looked for leftovers once."""
    store = Distant()
    with ckptfmt.Checkpointer(
        store, ckptfmt.State(weights={"w": np.zeros(8)}), saver="inline", keep=2
    ) as checkpointer:
        checkpointer.restore_rng()
        counts = []
        for step in range(1, 13):
            store.forget()
            checkpointer.save(step=step)
            counts.append(dict(store.counts))
    assert counts[5] == counts[8] == counts[11]
    assert counts[11]["GET"] < 20


def test_the_first_clean_up_of_a_launch_looks_into_many_retired_checkpoints_by_one_listing():
    """It asks for the register of each, and not for the files of each; what was left in one of them is removed."""
    store = Distant()
    lists = []
    for launch in (1, 2, 3):
        with ckptfmt.Checkpointer(
            store, ckptfmt.State(weights={"w": np.zeros(8)}), saver="inline", keep=1
        ) as run:
            run.restore()
            run.restore_rng()
            if launch > 1:
                left = f"{checkpoint_name(100, 1)}/shard"
                store.create(left, [b"what a killed clean-up left"])
            store.forget()
            run.save(step=launch * 100)
            lists.append(store.counts["LIST"])
            assert launch == 1 or ("DELETE", left) in store.keys
            for step in range(launch * 100 + 1, launch * 100 + 2 * CALLS_AT_ONCE):
                run.save(step=step)
    assert lists[1] == lists[2] <= lists[0] + 8
