"""What crosses the bus of device tensors that a slot holds already, in part: only the other blocks."""

import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfmt.adapters.torch import device_copies as staging
from ckptfmt.adapters.torch.device_copies import SideStreams, plan_device_copies
from ckptfmt.digest import block_digests
from ckptfmt.write.image import plan_image
from ckptfmt.write.staging import Fillings
from tests.adapters.test_device import FakeCuda, in_a_row
from tests.builders import snapshot, tensor

BLOCK = 4096
#: Of an image only its identity and the size of its blocks are looked at.
IMAGE = plan_image(snapshot(tensor("w", np.zeros(4, np.float32))), block_nbytes=BLOCK)


@pytest.fixture(autouse=True, scope="module")
def small_limits():
    """Sizes at which a few blocks are a large tensor."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging, "SMALL_NBYTES", BLOCK)
        patch.setattr(staging, "GATHER_NBYTES", 4 * BLOCK)
        patch.setattr(staging, "COPY_NBYTES", 8 * BLOCK)
        yield


class Slots:
    """Slots that are filled in turn from the same tensors, and what is known of each."""

    def __init__(self, *tensors, count=1, late=()):
        self.tensors = tensors
        self.cuda = FakeCuda(late=late)
        self.sides = SideStreams(cuda=self.cuda)
        self.pieces = in_a_row(tensors)
        self.slots = [bytearray(self.pieces[-1][3]) for _ in range(count)]
        self.fillings = Fillings()
        self.number = -1

    def start(self, *, was_written=True, image=IMAGE):
        self.number += 1
        slot = self.number % len(self.slots)
        self.slot = self.slots[slot]
        filling = self.fillings.begin(slot, image, was_written=was_written)
        del self.cuda.sent[:]
        copies = plan_device_copies(
            self.pieces, memoryview(self.slot), sides=self.sides, filling=filling
        )
        for copy in copies:
            copy.start()
        return copies

    def fill(self, **options):
        """Fill the next slot; return how many bytes of tensors were sent, and what was found by begin of a piece."""
        copies = self.start(**options)
        for copy in copies:
            copy.finish()
        return self.sent_nbytes(), {seen.begin: seen for copy in copies for seen in copy.seen}

    def sent_nbytes(self):
        """Return how many bytes of the tensors themselves were sent."""
        spans = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in self.tensors]
        return sum(n for at, n in self.cuda.sent if any(begin <= at < end for begin, end in spans))

    def expected(self):
        return b"".join(t.numpy().tobytes() for t in self.tensors)


def words(count, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 1 << 30, count, np.int32))


def test_a_slot_is_filled_once_and_then_only_what_changed_is_sent():
    held = words(10 * BLOCK // 4 + 5)  # the last block is short
    slots = Slots(held)
    assert slots.fill()[0] == held.nbytes
    assert slots.fill()[0] == 0
    held[3 * BLOCK // 4] += 1
    held[7 * BLOCK // 4 - 1] += 1
    held[7 * BLOCK // 4] += 1
    held[-1] += 1
    sent_nbytes, seen = slots.fill()
    assert sent_nbytes == 3 * BLOCK + 20
    assert (
        len([at for at in slots.cuda.sent if at[1] != 32 * 11]) == 3
    )  # of two neighbours, one transfer
    assert bytes(seen[0].kept) == bytes([1, 1, 1, 0, 1, 1, 0, 0, 1, 1, 0])
    assert seen[0].digests == block_digests(memoryview(held.numpy().tobytes()), BLOCK)
    assert slots.slot == slots.expected()


def test_where_the_device_cannot_digest_all_is_sent_each_time(monkeypatch):
    held = words(4 * BLOCK // 4)
    slots = Slots(held)
    slots.fill()
    monkeypatch.setattr(slots.cuda, "digest_blocks", lambda *_: None)

    for _ in range(2):
        held[0] += 1
        sent_nbytes, seen = slots.fill()

        assert (sent_nbytes, seen) == (held.nbytes, {})
        assert slots.slot == slots.expected()


def test_of_two_slots_each_is_compared_with_what_it_holds():
    held = words(6 * BLOCK // 4)
    slots = Slots(held, count=2)
    sent = []
    for number in range(6):
        held[number * BLOCK // 4] += 1
        sent.append(slots.fill()[0] // BLOCK)
        assert slots.slot == slots.expected()
    assert sent == [6, 6, 2, 2, 2, 2]  # what changed since the save before the last


def test_nothing_was_written_after_a_save_that_was_not_written_or_of_another_image():
    held = words(4 * BLOCK // 4)
    slots = Slots(held)
    slots.fill()
    assert slots.fill(was_written=False)[0] == held.nbytes
    assert slots.fill()[0] == 0
    other = plan_image(snapshot(tensor("w", np.zeros(4, np.float32))), block_nbytes=BLOCK)
    assert slots.fill(image=other)[0] == held.nbytes


def test_small_tensors_and_those_that_are_packed_are_always_sent():
    """What is gathered takes one transfer whatever has changed; of what is packed, blocks aren't where they will be."""
    small = words(100)
    rows = words(8 * 2 * BLOCK // 4).reshape(8, 2, BLOCK // 4)[
        :, 0
    ]  # each row by itself follows in memory
    assert rows[0].is_contiguous()
    slots = Slots(small, rows)
    for _ in range(3):
        _, seen = slots.fill()
        assert seen == {}
        assert slots.slot == slots.expected()


@pytest.mark.parametrize("late", [(), ("side",), ("current",), ("side", "current")])
def test_the_values_are_those_of_the_call(late):
    """Also of what is sent when the digests are there: the guard sends it before the optimizer may go on."""
    first, second = words(4 * BLOCK // 4), words(6 * BLOCK // 4, seed=1)
    slots = Slots(first, second, late=late)
    slots.fill()
    slots.cuda.launch(lambda: [first[: BLOCK // 2].add_(1), second[-5:].add_(1)])
    copies = slots.start()
    expected = []
    slots.cuda.launch(lambda: expected.append(slots.expected()))
    for copy in copies:
        copy.guard()
    slots.cuda.launch(lambda: [first.zero_(), second.zero_()])  # the optimizer
    for copy in copies:
        copy.finish()
    slots.cuda.current_of(torch.device("cuda", 0)).mark()()
    assert [bytes(slots.slot)] == expected
    assert slots.sent_nbytes() == 3 * BLOCK


def test_finish_and_guard_send_what_changed_once_whoever_comes_first():
    held = words(64 * BLOCK // 4)
    for _ in range(20):
        slots = Slots(held)
        slots.fill()
        held[:: 2 * BLOCK // 4] += 1
        copies = slots.start()
        threads = [threading.Thread(target=copy.finish) for copy in copies]
        for thread in threads:
            thread.start()
        for copy in copies:
            copy.guard()
        for thread in threads:
            thread.join()
        assert slots.slot == slots.expected()
        assert slots.sent_nbytes() == held.nbytes // 2


def test_a_tensor_that_changes_everywhere_is_soon_only_copied(monkeypatch):
    """Digesting it costs the device time, and gains nothing; now and then it is looked at again."""
    monkeypatch.setattr("ckptfmt.write.staging._LONGEST_PAUSE", 4)
    held = words(4 * BLOCK // 4)
    slots = Slots(held)
    looked = []
    for _ in range(24):
        held += 1
        sent_nbytes, seen = slots.fill()
        assert sent_nbytes == held.nbytes
        looked.append(bool(seen))
    assert "".join("x" if each else "." for each in looked) == "xx.xx..xx....xx....xx..."
    # From then on it is frozen: once it was looked at twice, nothing is sent any more.
    sent = [slots.fill()[0] for _ in range(6)]
    assert sent == [held.nbytes] * 2 + [0] * 4


def test_a_start_that_fails_leaves_nothing_known(monkeypatch):
    held = words(4 * BLOCK // 4)
    slots = Slots(held)
    slots.fill()

    def fail(*_):
        raise torch.OutOfMemoryError("no page for it")

    with monkeypatch.context() as patch:
        patch.setattr(slots.cuda, "digest_blocks", fail)
        with pytest.raises(torch.OutOfMemoryError):
            slots.start()
    held[0] += 1
    assert slots.fill(was_written=False)[0] == held.nbytes
    assert slots.slot == slots.expected()


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(1, 5 * BLOCK // 4), min_size=1, max_size=5),
    st.lists(st.lists(st.floats(0, 1, exclude_max=True), max_size=4), min_size=1, max_size=6),
    st.integers(1, 2),
    st.sampled_from([(), ("side",), ("side", "current")]),
)
def test_a_slot_always_holds_the_whole_snapshot(sizes, changes, count, late):
    tensors = [words(size, seed=number) for number, size in enumerate(sizes)]
    slots = Slots(*tensors, count=count, late=late)
    flat = [(t, at) for t in tensors for at in range(t.numel())]
    for places in changes:
        for place in places:
            held, at = flat[int(place * len(flat))]
            held[at] += 1
        _, seen = slots.fill()
        assert slots.slot == slots.expected()
        for _, held, begin, _ in slots.pieces:
            if begin in seen:
                assert seen[begin].digests == block_digests(
                    memoryview(held.numpy().tobytes()), BLOCK
                )
