"""The copies into a slot, and what the saver is told of them: never more than is there."""

import dataclasses
import functools
import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfmt.adapters.numpy import ArraySource
from ckptfmt.box import Box
from ckptfmt.documents.tables import TensorKey
from ckptfmt.write import staging
from ckptfmt.write.image import plan_image
from ckptfmt.write.staging import Filling, Fillings, HostCopy, Seen, Staging
from tests.builders import snapshot, tensor
from tests.write.test_image import fill


@dataclasses.dataclass(kw_only=True)
class BytesCopy:
    """A copy of given bytes, that does something before it writes them."""

    begin: int
    content: bytes
    view: memoryview
    before: Callable[[], object] = lambda: None
    keys: tuple[TensorKey, ...] = ()
    seen: tuple[Seen, ...] = ()

    @property
    def end(self) -> int:
        return self.begin + len(self.content)

    def start(self) -> None:
        """Nothing."""

    def finish(self) -> None:
        self.before()
        self.view[self.begin : self.end] = self.content

    def guard(self) -> None:
        """Nothing."""

    def settle(self) -> None:
        """Nothing."""


class Filled:
    """A slot of tensors of the given sizes, some of them only digested, and what is told of it as it is filled."""

    def __init__(self, *sizes_nbytes: int) -> None:
        arrays = [
            np.full(nbytes, 1 + number % 200, np.uint8)
            for number, nbytes in enumerate(sizes_nbytes)
        ]
        fields = itertools.cycle(["weights", "optimizer", "weights"])
        made = snapshot(
            *(
                tensor(f"{n:03}", array, field=field)
                for (n, array), field in zip(enumerate(arrays), fields, strict=False)
            )
        )
        written = frozenset(
            ((source.field, source.name, source.scope), source.boxes[0])
            for number, source in enumerate(made.tensors)
            if number % 4 != 3
        )
        self.image = plan_image(made, written=written, block_nbytes=4096)
        self.expected = fill(self.image, made)
        self.view = memoryview(bytearray(b"\xee" * self.image.nbytes))
        self.copies = [
            BytesCopy(
                begin=piece.begin,
                content=bytes(self.expected[piece.begin : piece.end]),
                view=self.view,
            )
            for piece in self.image.pieces
            if piece.end > piece.begin
        ]
        self.told: list[int] = []
        self.seen: list[tuple[int, Seen]] = []
        self.wrong: list[int] = []
        self.staging = Staging(self.image, self.copies, self.view, self.tell)

    def tell(self, nbytes: int, seen: Sequence[Seen]) -> None:
        self.told.append(nbytes)
        self.seen += [(nbytes, one) for one in seen]
        if not self.is_there(nbytes):
            self.wrong.append(nbytes)

    def is_there(self, nbytes: int) -> bool:
        """Say whether headers and tensors are there up to a byte; what lies between them is nobody's."""
        spans = [(shard.begin, shard.begin + len(shard.header)) for shard in self.image.shards]
        spans += [(copy.begin, copy.end) for copy in self.copies]
        return all(
            self.view[begin : min(end, nbytes)] == self.expected[begin : min(end, nbytes)]
            for begin, end in spans
            if begin < nbytes
        )


@pytest.fixture(autouse=True, scope="module")
def every_byte_is_told():
    """Tell after every byte, so that what is told can be wrong by one; and look at every byte."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging, "_TELL_NBYTES", 1)
        patch.setattr(staging, "_LEAST_LOOKED_AT_NBYTES", 1)
        yield


def test_headers_are_there_before_anything_is_copied() -> None:
    filled = Filled(100, 5000, 3)
    assert len(filled.image.shards) == 2
    for shard in filled.image.shards:
        assert filled.view[shard.begin :][: len(shard.header)] == shard.header


@given(
    st.lists(st.integers(0, 9000), max_size=12),
    st.randoms(use_true_random=False),
    st.integers(1, 4),
)
def test_what_is_told_is_there_whatever_ends_first(sizes, shuffle, run_count) -> None:
    filled = Filled(*sizes)
    shuffled = list(filled.copies)
    shuffle.shuffle(shuffled)
    for turn in range(run_count):
        filled.staging.run(shuffled[turn::run_count])
    assert filled.wrong == []
    assert filled.told == sorted(set(filled.told))
    assert filled.told[-1:] == [filled.image.nbytes] * bool(filled.copies)
    assert filled.is_there(filled.image.nbytes)


@given(st.lists(st.integers(1, 20_000), max_size=30), st.integers(1, 4))
def test_several_threads_copy_everything_once(sizes, thread_count) -> None:
    filled = Filled(*sizes)
    done: list[int] = []
    for copy in filled.copies:
        copy.before = functools.partial(done.append, copy.begin)
    with ThreadPoolExecutor(3) as threads:
        filled.staging.run(filled.copies, threads=threads, thread_count=thread_count)
    assert sorted(done) == [copy.begin for copy in filled.copies]
    assert filled.wrong == []
    assert filled.told == sorted(set(filled.told))
    assert filled.is_there(filled.image.nbytes)


def test_nothing_is_told_before_the_first_is_there() -> None:
    """However much of what lies behind it is."""
    filled = Filled(1000, 2000, 3000, 4000, 5000)
    at_last, told_before = threading.Event(), []

    def wait() -> None:
        assert at_last.wait(20)
        told_before.extend(filled.told)

    filled.copies[0].before = wait
    filled.copies[-1].before = at_last.set  # by the other thread, which has done all between
    with ThreadPoolExecutor(1) as threads:
        filled.staging.run(filled.copies, threads=threads, thread_count=2)
    assert max(told_before, default=0) <= filled.copies[0].begin
    assert filled.told[-1] == filled.image.nbytes
    assert filled.wrong == []


@given(st.lists(st.integers(1, 9000), min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_what_devices_found_is_told_once_and_in_time(sizes, shuffle) -> None:
    """Whoever waits for a prefix knows what was found of it."""
    filled = Filled(*sizes)
    for copy in filled.copies:
        copy.seen = (Seen(begin=copy.begin, digests=b"", kept=b""),)
    shuffled = list(filled.copies)
    shuffle.shuffle(shuffled)
    filled.staging.run(shuffled)
    assert sorted(one.begin for _, one in filled.seen) == [copy.begin for copy in filled.copies]
    for copy in filled.copies:
        first = next(nbytes for nbytes in filled.told if nbytes >= copy.end)
        assert any(one.begin == copy.begin for nbytes, one in filled.seen if nbytes <= first)


def test_little_is_told_of_many_small_tensors(monkeypatch) -> None:
    """Each message costs more than a small copy."""
    monkeypatch.setattr(staging, "_TELL_NBYTES", 4096)
    filled = Filled(*[64] * 400)
    filled.staging.run(filled.copies)
    assert filled.told[-1] == filled.image.nbytes
    assert len(filled.told) <= filled.image.nbytes // 4096 + 1


def test_what_is_copied_later_is_told_later() -> None:
    filled = Filled(1000, 2000, 3000, 4000)
    first, *between, last = filled.copies
    filled.staging.run(between)
    assert max(filled.told) <= first.begin
    filled.staging.run([first, last])
    assert filled.told[-2:] == [last.begin, filled.image.nbytes]


@pytest.mark.parametrize("thread_count", [1, 2, 4])
@pytest.mark.parametrize("failing", [0, 3, 6])
def test_copy_that_fails_is_raised_and_never_told(thread_count, failing) -> None:
    filled = Filled(*[1000] * 7)

    def fail() -> None:
        raise MemoryError("no page for it")

    filled.copies[failing].before = fail
    with ThreadPoolExecutor(4) as threads, pytest.raises(MemoryError, match="no page"):
        filled.staging.run(filled.copies, threads=threads, thread_count=thread_count)
    assert max(filled.told, default=0) <= filled.copies[failing].begin
    assert filled.wrong == []
    # What others copy afterwards doesn't hide it.
    filled.staging.run(filled.copies[:failing] + filled.copies[failing + 1 :])
    assert max(filled.told, default=0) <= filled.copies[failing].begin


@pytest.mark.parametrize("failing", [0, 1])
def test_nothing_is_copied_any_more_once_a_failure_is_raised(failing) -> None:
    """Whoever gets the error may change tensors, and give the slot away."""
    filled = Filled(1000, 2000)
    both, ended = threading.Barrier(2, timeout=20), threading.Event()

    def fail() -> None:
        both.wait()
        raise MemoryError("no page for it")

    def be_slow() -> None:
        both.wait()
        ended.wait(0.2)
        ended.set()

    filled.copies[failing].before = fail
    filled.copies[1 - failing].before = be_slow
    with ThreadPoolExecutor(1) as threads:
        with pytest.raises(MemoryError):
            filled.staging.run(filled.copies, threads=threads, thread_count=2)
        assert ended.is_set()
        slow = filled.copies[1 - failing]
        assert filled.view[slow.begin : slow.end] == slow.content


def test_without_copies_there_is_nothing_to_tell() -> None:
    filled = Filled()
    filled.staging.run([])
    with ThreadPoolExecutor(1) as threads:
        filled.staging.run([], threads=threads, thread_count=4)
    assert filled.told == []


def copy_of(array: np.ndarray, view: memoryview, filling: Filling | None) -> HostCopy:
    """Return the copy of a whole array into the middle of a slot."""
    source = ArraySource.of(array, field="weights", name="w", scope="global")
    box = Box.whole(array.shape)
    return HostCopy(
        source=source, box=box, keys=(), begin=8, end=8 + array.nbytes, view=view, filling=filling
    )


def filled_twice(array: np.ndarray, *, looks: bool = True) -> HostCopy:
    """Return the copy of an array into a slot that had it by the same way before."""
    image = plan_image(snapshot(), block_nbytes=4096)
    slot, fillings = memoryview(bytearray(array.nbytes + 16)), Fillings()
    for was_written in (False, True):
        filling = fillings.begin(0, image, was_written=was_written) if looks else None
        copy = copy_of(array, slot, filling)
        copy.finish()
        assert slot[8:-8] == array.tobytes()
        assert bytes(slot[:8]) == bytes(slot[-8:]) == bytes(8)
    return copy


def test_the_host_tells_what_the_slot_had() -> None:
    array = np.arange(5000, dtype=np.int32).reshape(50, 100)
    assert filled_twice(array).seen == (Seen(begin=8, digests=b"", kept=b"\1" * 5),)


def test_the_host_looks_at_nothing_that_lies_apart_or_that_nobody_asked_about() -> None:
    array = np.arange(5000, dtype=np.int32).reshape(50, 100)
    assert filled_twice(array.T).seen == ()
    assert filled_twice(array, looks=False).seen == ()


def test_the_host_looks_at_nothing_small(monkeypatch) -> None:
    monkeypatch.setattr(staging, "_LEAST_LOOKED_AT_NBYTES", 256)
    for count in (63, 64):
        array = np.arange(count, dtype=np.int32)
        assert filled_twice(array).seen == (
            (Seen(begin=8, digests=b"", kept=b"\1"),) if count == 64 else ()
        )


def test_memory_that_has_another_size_by_now_is_not_read() -> None:
    filling = Fillings().begin(0, plan_image(snapshot(), block_nbytes=4096), was_written=False)
    copy = copy_of(np.zeros(8, np.float32), memoryview(bytearray(64)), filling)
    copy.end -= 4
    with pytest.raises(ValueError, match="32 bytes don't fill 28"):
        copy.finish()
