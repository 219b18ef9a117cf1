"""Snapshots in a device's spare memory, on a simulated device: every bit, the moment, the memory, and all orders of work."""

import functools
import random
import threading
import time

import numpy as np
import pytest
import torch

import ckptfmt
from ckptfmt.adapters import torch_side
from ckptfmt.adapters.torch import device_copies, device_snapshot
from ckptfmt.adapters.torch.device_copies import DeviceCopy, Moment, SideStreams, plan_device_copies
from ckptfmt.adapters.torch.device_snapshot import take_snapshot
from ckptfmt.adapters.torch.devices import Devices
from ckptfmt.adapters.torch.tensors import TORCH_DTYPES
from ckptfmt.write.image import plan_image
from ckptfmt.write.staging import Fillings
from tests.adapters.test_device import LAYOUTS, FakeCuda, in_a_row, noise
from tests.builders import snapshot
from tests.builders import tensor as tensor_of

DEVICE = torch.device("cuda", 0)
GIB = 1 << 30


@pytest.fixture(autouse=True)
def small_limits(monkeypatch):
    """Sizes at which a few hundred bytes are several buffers and several copies."""
    monkeypatch.setattr(device_snapshot, "BUFFER_NBYTES", 1024)
    monkeypatch.setattr(device_copies, "COPY_NBYTES", 512)
    monkeypatch.setattr(device_copies, "SMALL_NBYTES", 256)


def rows_of(tensors, *, begin=0, gap=0):
    """Return rows as an image has them: wide elements first, so that all are aligned."""
    order = sorted(tensors, key=lambda tensor: -tensor.element_size())
    return [row for row in in_a_row(order, begin=begin, gap=gap) if row[3] > row[2]], order


def take(rows, cuda, *, sides=None, slot=None):
    slot = bytearray(b"\xaa" * (rows[-1][3] + 64)) if slot is None else slot
    sides = SideStreams(cuda=cuda) if sides is None else sides
    return slot, take_snapshot(rows, memoryview(slot), sides=sides)


def content_of(rows):
    return b"".join(np.ascontiguousarray(_records(tensor)).tobytes() for _, tensor, _, _ in rows)


def _records(tensor):
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy()


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("late", [(), ("side", "current")])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_every_bit_arrives(dtype, layout, late):
    shape, view = LAYOUTS[layout]
    tensor, records = noise(shape, dtype)
    neighbour, others = noise((3,), dtype)
    rows = [row for row in in_a_row([view(tensor), neighbour], begin=16) if row[3] > row[2]]

    slot, copies = take(rows, FakeCuda(late=late))
    for copy in copies:
        copy.start()
    for copy in copies:
        copy.finish()

    expected = view(records).tobytes() + others.tobytes()
    assert slot[:16] == b"\xaa" * 16
    assert slot[16 : 16 + len(expected)] == expected
    assert slot[16 + len(expected) :] == b"\xaa" * 64


@pytest.mark.parametrize("gap", [0, 64])
def test_buffers_and_copies_are_of_bounded_size_and_a_large_tensor_has_its_own(gap):
    sizes = [5, 40, 300, 7, 7, 900, 1, 64]
    rows, _ = rows_of([torch.arange(size, dtype=torch.int32) for size in sizes], gap=gap)
    cuda = FakeCuda()

    slot, copies = take(rows, cuda)
    for copy in copies:
        copy.finish()

    made = [int(call.split()[1]) for call in cuda.calls if call.startswith("empty")]
    assert max(made) <= 3600 + 512
    assert sum(made) <= rows[-1][3] + 512 * len(made)
    assert max(copy.end - copy.begin for copy in copies) <= 512
    for _, tensor, begin, end in rows:
        assert slot[begin:end] == tensor.numpy().tobytes()


def test_lazy_conjugates_and_negatives_are_resolved():
    values = torch.complex(torch.arange(6.0), torch.arange(1.0, 7.0)).reshape(2, 3)
    rows = in_a_row([values.conj(), values.conj().T, values.conj().imag])
    assert rows[2][1].is_neg()

    slot, copies = take(rows, FakeCuda())
    for copy in copies:
        copy.finish()

    assert slot[: rows[-1][3]] == content_of(rows)


def test_the_training_thread_copies_within_the_device_and_waits_for_nothing():
    tensors = [torch.full((60 + i % 3,), float(i)) for i in range(648)]
    rows, _ = rows_of(tensors)
    cuda = FakeCuda(late=("side", "current"))

    slot, copies = take(rows, cuda)
    for copy in copies:
        copy.start()
    for tensor in tensors:  # the optimizer
        cuda.launch(lambda tensor=tensor: tensor.zero_())

    asked = [call.split()[0] for call in cuda.calls if call.split()[0] not in ("empty", "launch")]
    assert asked == ["copy"] * (len(asked) - 1) + ["moment"]
    assert cuda.sent == []
    expected = content_of(rows)
    for copy in copies:
        copy.finish()
    assert slot[: rows[-1][3]] == expected


def test_two_copies_at_most_are_enqueued_at_a_time():
    rows, _ = rows_of([torch.arange(4000, dtype=torch.int64)])
    cuda = FakeCuda(late=("side",))
    _, copies = take(rows, cuda)

    for number, copy in enumerate(copies):
        copy.finish()
        assert cuda.calls.count("run") == min(number + 2, len(copies))


@pytest.mark.parametrize("spare", [(GIB - 1, 8 * GIB), (4 * GIB, 80 * GIB)])
def test_without_spare_memory_nothing_is_copied_and_the_memory_is_free_again(spare):
    rows, _ = rows_of([torch.ones(100)])
    cuda = FakeCuda()
    cuda.spare = spare

    slot, copies = take(rows, cuda)

    assert copies is None
    assert cuda.calls == []
    slot.clear()  # not exported


def test_memory_that_an_earlier_snapshot_left_counts_as_room():
    rows, _ = rows_of([torch.ones(100)])
    cuda = FakeCuda()
    sides = SideStreams(cuda=cuda)
    cuda.spare = (GIB + 512, 8 * GIB)
    _, copies = take(rows, cuda, sides=sides)
    for copy in copies:
        copy.finish()
    cuda.spare = (GIB, 8 * GIB)  # the first snapshot's memory is in the pool
    assert take(rows, cuda, sides=sides)[1] is not None
    larger, _ = rows_of([torch.ones(1000)])
    assert take(larger, cuda, sides=sides)[1] is None


def test_out_of_memory_is_no_failure(monkeypatch):
    rows, _ = rows_of([torch.ones(100), torch.ones(300)])
    cuda = FakeCuda()
    empty = cuda.empty_for_both

    def refuse_second(*arguments):
        if cuda.free or any(call.startswith("empty") for call in cuda.calls):
            raise torch.OutOfMemoryError("none left")
        return empty(*arguments)

    monkeypatch.setattr(cuda, "empty_for_both", refuse_second)
    monkeypatch.setattr(device_snapshot, "BUFFER_NBYTES", 512)
    sides = SideStreams(cuda=cuda)
    assert take(rows, cuda, sides=sides)[1] is None
    assert [len(free) for free in cuda.free.values()] == [1]
    del cuda.calls[:]
    assert take(rows, cuda, sides=sides)[1] is None
    assert cuda.calls == []  # no second try


def test_memory_goes_back_while_the_bytes_cross_the_bus_and_is_used_again():
    rows, _ = rows_of([torch.arange(120, dtype=torch.int64) for _ in range(6)])
    cuda = FakeCuda()
    sides = SideStreams(cuda=cuda)
    free = []
    for _ in range(2):
        _, copies = take(rows, cuda, sides=sides)
        while copies:
            copies[0].finish()
            copies = copies[1:]
            free.append(sum(map(len, cuda.free.values())))
    assert len([call for call in cuda.calls if call.startswith("empty")]) == 12
    assert sum(map(len, cuda.free.values())) == 6  # the second snapshot took the first's memory
    assert free[0] < free[5]


def test_devices_have_moments_of_their_own():
    tensors = [torch.zeros(8) for _ in range(4)]
    cuda = FakeCuda(late=("side", "current"))
    for index, tensor in enumerate(tensors):
        cuda.put(tensor, index // 2)
    for index, tensor in enumerate(tensors):
        cuda.launch(lambda tensor=tensor: tensor.fill_(1), index // 2)
    slot, copies = take(in_a_row(tensors), cuda)
    for index, tensor in enumerate(tensors):
        cuda.launch(lambda tensor=tensor: tensor.fill_(2), index // 2)
    for copy in copies:
        copy.finish()
    assert set(np.frombuffer(slot[:128], "f4")) == {1}


# --- all orders -----------------------------------------------------------------------------------


class Scene:
    """A training, a thread of copies and two streams, which take turns in an order drawn at random.

    The training changes its tensors on the current stream, saves twice into two slots, and goes on.
    """

    def __init__(self, seed, *, apart, cuda):
        self.random = random.Random(seed)
        self.cuda = cuda
        self.sides = SideStreams(cuda=cuda)
        self.apart = apart
        self.tensors = [torch.zeros(size, dtype=torch.int32) for size in (30, 200, 90, 400)]
        self.rows, _ = rows_of(self.tensors)
        self.slots = [bytearray(b"\xaa" * self.rows[-1][3]) for _ in range(2)]
        self.stager = []
        self.failed = set()
        self.expected = {}
        self.copies = []
        self.is_right = True
        self.value = 0

    def change(self):
        """Let the device add one to each tensor, in small pieces of work."""
        self.value += 1
        for tensor in self.tensors:
            self.cuda.launch(lambda tensor=tensor: tensor.add_(1))

    def save(self, number):
        """Start a save, whose copies the other thread finishes; the optimizer's hook comes later."""
        slot = self.slots[number]
        if self.apart:
            copies = take_snapshot(self.rows, memoryview(slot), sides=self.sides)
            assert copies is not None
        else:
            copies = plan_device_copies(
                self.rows, memoryview(slot), sides=self.sides, is_later=True
            )
        for copy in copies:
            copy.start()
        self.copies.append(copies)
        self.stager += [(number, copy) for copy in copies]
        self.expected[number] = self.value
        return copies

    def training(self):
        """Yield after each call of the training thread."""
        self.change()
        yield
        for number in range(2):
            copies = self.save(number)
            yield
            self.cuda.launch(lambda: None)  # a forward pass
            yield
            for copy in () if self.apart else copies:
                copy.guard()
                yield
            self.change()  # the optimizer, or a replayed graph
            yield

    def finish_next(self):
        number, copy = self.stager.pop(0)
        if number in self.failed:
            return  # the save has failed: its copies are dropped
        try:
            copy.finish()
        except RuntimeError:
            for copy in self.copies[number]:
                copy.settle()
            self.failed.add(number)
            self.slots[number][:] = b"\x55" * len(self.slots[number])  # the slot is used again
        else:
            arrived = np.frombuffer(self.slots[number][copy.begin : copy.end], np.int32)
            self.is_right &= set(arrived) == {self.expected[number]}

    def run(self):
        """Take turns until all is done, and return whether each slot held its moment throughout."""
        training = self.training()
        is_training = True
        streams = lambda: [  # noqa: E731
            stream
            for stream in (*self.cuda.current.values(), *self.cuda.sides.values())
            if stream.done < len(stream.tasks)
        ]
        while is_training or self.stager:
            turns = [*streams()] * 2 + ["training"] * is_training + ["stager"] * bool(self.stager)
            turn = self.random.choice(turns)
            if turn == "training":
                is_training = next(training, self) is not self
            elif turn == "stager":
                self.finish_next()
            else:
                turn.run_to(turn.done + 1)
        found = [bytes(slot) for slot in self.slots]
        while found_streams := streams():
            found_streams[0].run_to(len(found_streams[0].tasks))
        # Nothing is written into a slot once its copies are over.
        return self.is_right and all(
            content == bytes(slot)
            and (
                content == b"\x55" * len(content)
                if number in self.failed
                else set(np.frombuffer(content, np.int32)) == {self.expected[number]}
            )
            for number, (content, slot) in enumerate(zip(found, self.slots, strict=True))
        )


class Failing(FakeCuda):
    """A device that takes some work, chosen by its number, and then reports an error."""

    refused = -1

    def run_on(self, stream, work):
        super().run_on(stream, work)
        if self.calls.count("run") == self.refused:
            raise RuntimeError("an error of the device")


def explore(count, *, apart, fails=False):
    """Return how many of some random orders of work end in a wrong slot."""
    wrong = 0
    for seed in range(count):
        cuda = Failing(late=("side", "current"))
        cuda.refused = seed % 4 + 1 if fails else -1
        try:
            wrong += not Scene(seed, apart=apart, cuda=cuda).run()
        except AssertionError:  # the work of a copy that was released
            wrong += 1
    return wrong


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("apart", [False, True], ids=["from the tensors", "apart"])
def test_in_every_order_of_work_a_slot_holds_its_moment(apart, fails):
    assert explore(400, apart=apart, fails=fails) == 0


def drop(owner, name):
    def mutate(monkeypatch):
        monkeypatch.setattr(owner, name, lambda *_: None)

    return mutate


def mark_before_the_copy(monkeypatch):
    copy = FakeCuda.copy_on_device

    def copy_later(self, target, sources):
        device = self.device_of(sources[0])
        self.early = getattr(self, "early", None) or self.current_of(device).mark()
        copy(self, target, sources)

    monkeypatch.setattr(FakeCuda, "copy_on_device", copy_later)
    monkeypatch.setattr(
        Moment, "mark", lambda self: setattr(self, "event", getattr(self.cuda, "early", None))
    )


@pytest.mark.parametrize(
    ("mutate", "apart", "fails"),
    [
        (drop(FakeCuda, "follow"), True, False),
        (drop(FakeCuda, "follow"), False, False),
        (drop(FakeCuda, "hold_current"), False, False),
        (drop(FakeCuda, "synchronize"), True, False),
        (drop(FakeCuda, "synchronize"), False, False),
        (drop(DeviceCopy, "guard"), False, False),
        (drop(DeviceCopy, "settle"), True, True),
        (drop(DeviceCopy, "settle"), False, True),
        (mark_before_the_copy, True, False),
    ],
    ids=[
        "apart: no wait for the moment",
        "no wait for the moment",
        "the optimizer doesn't wait",
        "apart: no wait for the bytes",
        "no wait for the bytes",
        "no guard",
        "apart: no wait after a failure",
        "no wait after a failure",
        "apart: a moment before the copy",
    ],
)
def test_a_dropped_event_or_wait_is_found(monkeypatch, mutate, apart, fails):
    mutate(monkeypatch)
    assert explore(400, apart=apart, fails=fails) > 0


def hold_first_call(monkeypatch, owner, name, entered, released):
    """Let the first call wait for another thread, and fail."""
    inner = getattr(owner, name)
    calls = []

    def wait(*arguments):
        calls.append(name)
        if len(calls) > 1:
            return inner(*arguments)
        entered.set()
        assert released.wait(10)
        raise torch.OutOfMemoryError("no memory for it")

    monkeypatch.setattr(owner, name, wait)


@pytest.mark.parametrize("is_delta", [False, True], ids=["enqueue", "send changed blocks"])
def test_what_fails_in_the_guard_fails_the_copy_in_the_other_thread(monkeypatch, is_delta):
    """The copy's thread waits for the guard's lock meanwhile, and takes nothing for done."""
    cuda = FakeCuda()
    sides = SideStreams(cuda=cuda)
    tensor = torch.zeros(4096, dtype=torch.uint8)
    slot = memoryview(bytearray(4096))
    fillings = Fillings()
    image = plan_image(snapshot(tensor_of("w", np.zeros(4, np.float32))), block_nbytes=1024)

    def plan():
        filling = fillings.begin(0, image, was_written=True) if is_delta else None
        return plan_device_copies(
            in_a_row([tensor]), slot, sides=sides, filling=filling, is_later=True
        )

    for copy in plan() if is_delta else ():
        copy.start()
        copy.finish()
    tensor += 1
    (only,) = plan()
    only.start()
    if is_delta:
        only.try_enqueue()
    entered, released = threading.Event(), threading.Event()
    hold_first_call(monkeypatch, cuda, "run_on", entered, released)
    guarding = threading.Thread(target=only.guard)
    guarding.start()
    assert entered.wait(10)
    outcome = []

    def finish():
        try:
            only.finish()
        except torch.OutOfMemoryError as error:
            outcome.append(error)

    finishing = threading.Thread(target=finish)
    finishing.start()
    time.sleep(0.05)  # it waits for the lock
    released.set()
    guarding.join(10)
    finishing.join(10)
    assert len(outcome) == 1
    only.settle()


# --- through a Checkpointer -----------------------------------------------------------------------


class Run:
    def __init__(self, seed=0):
        torch.manual_seed(seed)
        self.module = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(4)])
        self.optimizer = torch.optim.Adam(self.module.parameters())
        self.state = ckptfmt.State(weights=self.module, optimizer=self.optimizer)

    def step(self):
        self.module(torch.ones(2, 16)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def bits(self):
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        return [_records(t).tobytes() for t in (*self.module.parameters(), *moments)]


@pytest.fixture
def cuda(monkeypatch):
    fake = FakeCuda(late=("side",))
    monkeypatch.setattr(
        torch_side(), "Devices", functools.partial(Devices, cuda=fake, device_type="cpu")
    )
    return fake


@pytest.mark.parametrize("has_room", [True, False])
@pytest.mark.parametrize("saver", ["thread", "process"])
def test_saves_beside_training_hold_the_step_at_which_they_were_called(
    tmp_path, cuda, saver, has_room
):
    run = Run()
    cuda.spare = (64 * GIB if has_room else 0, 80 * GIB)
    saved = {}
    with ckptfmt.Checkpointer(
        tmp_path, run.state, every=1, saving=ckptfmt.Saving(saver=saver), keep=20
    ) as checkpointer:
        for step in checkpointer.steps(8):
            run.step()
            saved[step + 1] = run.bits()
    assert any(call.startswith("copy") for call in cuda.calls) == has_room
    for step, bits in saved.items():
        other = Run(seed=1)
        other.step()
        ckptfmt.load(tmp_path / f"step-{step:08}-l0001", other.state)
        assert other.bits() == bits


def test_before_an_optimizer_has_stepped_no_spare_memory_is_taken(tmp_path, cuda):
    """The training hasn't reserved its own memory yet."""
    run = Run()
    with ckptfmt.Checkpointer(tmp_path, run.state) as checkpointer:
        checkpointer.step = 0
        handle = checkpointer.save()
        assert handle is not None
        handle.wait()
    assert not any(call.startswith("copy") for call in cuda.calls)


def test_without_overlap_no_spare_memory_is_taken(tmp_path, cuda):
    run = Run()
    with ckptfmt.Checkpointer(
        tmp_path, run.state, every=1, saving=ckptfmt.Saving(overlap=False)
    ) as checkpointer:
        for _ in checkpointer.steps(3):
            run.step()
    assert not any(call.startswith("copy") for call in cuda.calls)
