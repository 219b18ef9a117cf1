"""Read once, share: with processes played by threads, that nothing is read twice and that nobody is left waiting."""

import queue
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfmt.box import Box
from ckptfmt.errors import CkptError, Code
from ckptfmt.read import decoding, sharing
from ckptfmt.read.reader import Checkpoint
from ckptfmt.store.memory import MemoryStore
from tests.builders import ATTEMPT, ArraySink, save, snapshot, tensor
from tests.read.test_reader import Counting, random_array, random_box, save_tiled

SHAPE = (64, 4096)  # of float32: a row is four blocks
ARRAY = np.arange(SHAPE[0] * SHAPE[1], dtype=np.float32).reshape(SHAPE)


class Playground:
    """Peers that are threads of this process."""

    def __init__(self, count):
        self.count = count
        self.told: list[object] = [None] * count
        self.barrier = threading.Barrier(count)
        self.pipes: dict[tuple[int, int], queue.Queue[bytes]] = {
            (a, b): queue.Queue() for a in range(count) for b in range(count)
        }

    def run(self, work):
        """Call `work(peers)` for each process; return what each returned or raised."""
        outcomes: list[Any] = [None] * self.count

        def one(number):
            try:
                outcomes[number] = work(Peer(self, number))
            except CkptError as error:
                outcomes[number] = error

        threads = [threading.Thread(target=one, args=(number,)) for number in range(self.count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
        return outcomes


class Peer:
    def __init__(self, playground, number):
        self.playground = playground
        self.number = number
        self.count = playground.count

    def all_gather(self, value):
        self.playground.told[self.number] = value
        self.playground.barrier.wait(30)
        told = list(self.playground.told)
        self.playground.barrier.wait(30)
        return told

    def exchange(self, outgoing, incoming):
        for peer, content in outgoing:
            self.playground.pipes[self.number, peer].put(bytes(content))
        for peer, content in incoming:
            content[:] = self.playground.pipes[peer, self.number].get(timeout=30)


@pytest.fixture(autouse=True)
def share_what_is_small(monkeypatch):
    monkeypatch.setattr(sharing, "LEAST_NBYTES", 1)
    monkeypatch.setattr(sharing, "PARCEL_NBYTES", 20_000)
    monkeypatch.setattr(decoding, "REQUEST_NBYTES", 20_000)
    monkeypatch.setattr(decoding, "GAP_NBYTES", 0)


def load(store, boxes_of_each):
    """Load boxes of ``w`` on as many processes; return their reports, sinks and stores."""
    loads = [
        (Counting(store), ArraySink(name="w", dtype="float32", global_shape=SHAPE, boxes=boxes))
        for boxes in boxes_of_each
    ]

    def work(peers):
        counting, sink = loads[peers.number]
        reading = Checkpoint(counting).plan_reading([sink])
        reading.share(peers)
        return reading.run()

    return Playground(len(loads)).run(work), loads


def saved():
    store = MemoryStore()
    save(store, snapshot(tensor("w", ARRAY)))
    return store


def check(loads):
    for _, sink in loads:
        seen = np.zeros(SHAPE, int)
        for piece, content in sink.taken:
            assert content == ARRAY[piece.relative_to(Box.whole(SHAPE))].tobytes()
            seen[piece.relative_to(Box.whole(SHAPE))] += 1
        expected = np.zeros(SHAPE, int)
        for box in sink.boxes:
            expected[box.relative_to(Box.whole(SHAPE))] = 1
        assert (seen == expected).all()


@pytest.mark.parametrize("count", [2, 3, 4])
def test_replicas_are_read_once(count):
    """REQ-OPN-005, REQ-OPN-006: all of it reaches everybody, verified by each."""
    reports, loads = load(saved(), [(Box.whole(SHAPE),)] * count)
    check(loads)
    assert sum(report.read_nbytes for report in reports) == ARRAY.nbytes
    assert all(report.needed_nbytes == report.verified_nbytes == ARRAY.nbytes for report in reports)
    assert all(report.read_nbytes + report.received_nbytes == ARRAY.nbytes for report in reports)
    assert max(report.read_nbytes for report in reports) <= ARRAY.nbytes / count + 20_000


def test_halves_of_rows_share_the_blocks_that_both_want():
    """Each wants 1.5 of 4 blocks of a row, and one of them both."""
    halves = [(Box((0, 0), (64, 2048 + 100)),), (Box((0, 2048 - 100), (64, 2048 + 100)),)]
    reports, loads = load(saved(), halves)
    check(loads)
    assert sum(report.read_nbytes for report in reports) == ARRAY.nbytes
    assert [report.verified_nbytes for report in reports] == [ARRAY.nbytes * 3 // 4] * 2


def test_who_wants_nothing_and_what_nobody_shares():
    reports, loads = load(saved(), [(Box((0, 0), (8, 4096)),), (), (Box((8, 0), (8, 4096)),)])
    check(loads)
    assert [report.read_nbytes for report in reports] == [8 * 4096 * 4, 0, 8 * 4096 * 4]
    assert [report.received_nbytes for report in reports] == [0, 0, 0]


def test_it_takes_several_rounds_and_no_more_memory(monkeypatch):
    """REQ-OPN-008."""
    monkeypatch.setattr(sharing, "ROUND_NBYTES", 100_000)
    reports, loads = load(saved(), [(Box.whole(SHAPE),)] * 2)
    check(loads)
    assert all(report.buffer_nbytes < 100_000 + 100 + 4 * (20_000 + 3 * 4096) for report in reports)


@pytest.mark.parametrize("at", [0, 500_000, ARRAY.nbytes - 1])
def test_damage_fails_everybody_and_nobody_waits(at, monkeypatch):
    """REQ-OPN-006: who reads it says which block; the others, that they weren't sent it. The rest goes on."""
    monkeypatch.setattr(sharing, "ROUND_NBYTES", 100_000)
    store = saved()
    path = f"weights-{ATTEMPT}-00000.safetensors"
    files = store.snapshot()
    damaged = bytearray(files[path])
    damaged[len(damaged) - ARRAY.nbytes + at] ^= 1
    outcomes, loads = load(
        MemoryStore.from_snapshot({**files, path: bytes(damaged)}), [(Box.whole(SHAPE),)] * 3
    )
    assert sorted(str(error.code) for error in outcomes) == [
        "BLOCK_DIGEST",
        "PEER_FAILED",
        "PEER_FAILED",
    ]
    block = at // 4096 * 1024
    for _, sink in loads:
        for piece, content in sink.taken:
            first = piece.begin[0] * SHAPE[1] + piece.begin[1]
            assert not first <= block < first + len(content) // 4


def test_what_changes_on_the_way_is_found_by_who_receives_it(monkeypatch):
    """REQ-OPN-006: a block is compared with its digest by everybody who hands on bytes of it."""

    def damage(self, outgoing, incoming):
        exchange(self, outgoing, incoming)
        for _, content in incoming:
            content[7] ^= 1

    exchange = Peer.exchange
    monkeypatch.setattr(Peer, "exchange", damage)
    outcomes, _ = load(saved(), [(Box.whole(SHAPE),)] * 2)
    assert {error.code for error in outcomes} == {Code.BLOCK_DIGEST}


def test_a_process_that_does_not_share_is_found_out():
    store = saved()

    def work(peers):
        if peers.number == 0:
            peers.all_gather({"error": None, "value": None})
            return None
        reading = Checkpoint(store).plan_reading([])
        reading.share(peers)
        return reading.run()

    assert Playground(2).run(work)[1].code == Code.WRITERS_DIVERGED


@settings(max_examples=30)
@given(
    st.sampled_from(["float32", "int8", "bfloat16", "complex128"]),
    st.integers(2, 4),
    st.sampled_from([4096, 20_000, 1 << 20]),
    st.randoms(use_true_random=False),
)
def test_any_boxes_of_any_tiling_on_any_number_of_processes(dtype, count, parcel_nbytes, rng):
    """REQ-OPN-005: bit for bit what was saved, and no shared byte is read twice."""
    shape = (rng.randint(1, 40), rng.randint(1, 300))
    array = random_array(shape, dtype, rng)
    store = save_tiled(array, dtype, rng)
    sinks = [
        ArraySink(name="w", dtype=dtype, global_shape=shape, boxes=(random_box(shape, rng),))
        for _ in range(count)
    ]

    def work(peers):
        reading = Checkpoint(store).plan_reading([sinks[peers.number]])
        reading.share(peers)
        return reading.run()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharing, "PARCEL_NBYTES", parcel_nbytes)
        reports = Playground(count).run(work)
    for sink, report in zip(sinks, reports, strict=True):
        (box,) = sink.boxes
        seen = np.zeros(shape, int)
        for piece, content in sink.taken:
            assert content == array[piece.relative_to(Box.whole(shape))].tobytes()
            seen[piece.relative_to(Box.whole(shape))] += 1
        assert seen.sum() == seen[box.relative_to(Box.whole(shape))].sum() == box.element_count
        assert report.needed_nbytes == box.element_count * array.itemsize
