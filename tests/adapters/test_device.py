"""Copies from CUDA tensors, on a simulated device: CPU memory, and streams that run as late as they are allowed to."""

import ctypes
import itertools
import mmap
import threading
import weakref
from typing import Any
from unittest.mock import Mock, call, create_autospec

import numpy as np
import pytest
import torch

from ckptfmt.adapters.torch import device_copies as staging
from ckptfmt.adapters.torch.device_copies import Cuda, SideStreams, pin, plan_device_copies, unpin
from ckptfmt.adapters.torch.tensors import TORCH_DTYPES
from ckptfmt.digest import DIGEST_NBYTES, block_digests
from ckptfmt.dtypes import DTYPES

MIB = 1 << 20


class Stream:
    """What was enqueued, in order. A late one runs only when somebody waits for it, any other at once."""

    def __init__(self, *, late):
        self.late = late
        self.tasks = []
        self.done = 0

    def enqueue(self, task):
        self.tasks.append(task)
        if not self.late:
            self.run_to(len(self.tasks))

    def run_to(self, count):
        while self.done < count:
            task, self.tasks[self.done] = self.tasks[self.done], None
            self.done += 1
            task()

    def mark(self):
        """Return an event: to call it is to wait for all that was enqueued before it."""
        count = len(self.tasks)
        return lambda: self.run_to(count)


class FakeCuda(Cuda):
    """Devices of which nothing is real but the order of work; `calls` and `sent` tell what was asked of them."""

    def __init__(self, *, late=()):
        self.late = late
        self.current = {}
        self.sides = {}
        self.devices = {}
        self.calls = []
        self.sent = []
        self.status = 0
        self.free = {}
        self.spare = (64 << 30, 80 << 30)
        # A device does one thing after the other, whoever waits for it.
        self.working = threading.RLock()

    def put(self, tensor, index):
        self.devices[tensor.untyped_storage().data_ptr()] = index

    def device_of(self, tensor):
        return torch.device("cuda", self.devices.get(tensor.untyped_storage().data_ptr(), 0))

    def current_of(self, device):
        return self.current.setdefault(device, Stream(late="current" in self.late))

    def launch(self, work, index=0):
        """Enqueue something on the current stream, as training does."""
        self.calls.append("launch")
        self.current_of(torch.device("cuda", index)).enqueue(work)

    def make_stream(self, device):
        assert device not in self.sides
        self.sides[device] = Stream(late="side" in self.late)
        return self.sides[device]

    def follow_current(self, stream, device):
        assert stream is self.sides[device]
        self.calls.append("follow")
        stream.enqueue(self.current_of(device).mark())

    def record_current(self, device):
        self.calls.append("moment")
        return self.current_of(device).mark()

    def follow(self, stream, event):
        self.calls.append("follow")
        with self.working:
            stream.enqueue(event)

    def copy_on_device(self, target, sources):
        self.calls.append(f"copy {len(sources)}")
        device = self.device_of(sources[0])
        assert {self.device_of(source) for source in sources} == {device}
        assert {source.dtype for source in sources} == {target.dtype}

        def work():
            torch.cat(sources, out=target)

        with self.working:
            self.current_of(device).enqueue(work)

    def spare_nbytes(self, device):
        assert device in self.sides
        return self.spare

    def run_on(self, stream, work):
        self.calls.append("run")
        with self.working:
            stream.enqueue(work)

    def copy_to_host(self, target, source):
        assert target.dtype == source.dtype == torch.uint8
        assert target.shape == source.shape
        assert target.ndim == 1
        assert source.is_contiguous()
        self.sent.append((source.data_ptr(), source.nbytes))
        target.copy_(source)

    def empty(self, nbytes, stream, device):
        assert stream is self.sides[device]
        self.calls.append(f"empty {nbytes}")
        return torch.full((nbytes,), 0xEE, dtype=torch.uint8)

    def make_pool(self, device):
        return f"pool of {device}"

    def empty_for_both(self, nbytes, pool, stream, device):
        """Give freed memory out again once both streams have done what they had to do then."""
        assert pool == f"pool of {device}"
        assert stream is self.sides[device]
        self.calls.append(f"empty {nbytes}")
        current = self.current_of(device)
        free = self.free.setdefault((device, nbytes), [])
        ready = next(
            (row for row in free if row[1] <= current.done and row[2] <= stream.done), None
        )
        if ready is not None:
            free.remove(ready)
        block = bytearray(b"\xee" * nbytes) if ready is None else ready[0]
        array = np.frombuffer(block, np.uint8)
        weakref.finalize(
            array, lambda: free.append((block, len(current.tasks), len(stream.tasks)))
        ).atexit = False
        return torch.from_numpy(array)

    def empty_on_host(self, nbytes):
        return torch.full((nbytes,), 0xEE, dtype=torch.uint8)

    def digest_blocks(self, content, block_nbytes):
        digests = block_digests(memoryview(content.numpy()), block_nbytes)
        return torch.frombuffer(bytearray(digests), dtype=torch.uint8).reshape(-1, DIGEST_NBYTES)

    def record(self, stream):
        self.calls.append("record")
        return stream.mark()

    def synchronize(self, event):
        self.calls.append("synchronize")
        with self.working:
            event()

    def hold_current(self, event, device):
        self.calls.append("hold")
        with self.working:
            self.current_of(device).enqueue(event)

    def has_digests(self, device):
        assert isinstance(device, torch.device)
        return True

    def register(self, address, nbytes):
        self.calls.append(f"register {address} {nbytes}")
        return self.status

    def unregister(self, address):
        self.calls.append(f"unregister {address}")
        return self.status

    def explain(self, status):
        return f"because ({status})"

    def forget_error(self):
        self.calls.append("forget")


def key_of(number):
    return ("weights", str(number), "global")


def in_a_row(tensors, *, begin=0, gap=0):
    pieces = []
    for number, tensor in enumerate(tensors):
        pieces.append((key_of(number), tensor, begin, begin + tensor.nbytes))
        begin += tensor.nbytes + gap
    return pieces


def plan(pieces, cuda, *, sides=None):
    slot = bytearray(b"\xaa" * (pieces[-1][3] + 64))
    return slot, plan_device_copies(pieces, memoryview(slot), sides=sides or SideStreams(cuda=cuda))


def copy(pieces, cuda):
    slot, copies = plan(pieces, cuda)
    for each in copies:
        each.start()
    for each in copies:
        each.finish()
    return bytes(slot), copies


def noise(shape, dtype):
    """Return a tensor of random bits, NaNs and all, and an array of the same elements as opaque records."""
    size = DTYPES[dtype].nbytes
    raw = np.random.default_rng(0).integers(0, 256, (int(np.prod(shape)) * size,), np.uint8)
    tensor = torch.from_numpy(raw.copy()).view(TORCH_DTYPES[dtype]).reshape(shape)
    return tensor, raw.view(f"V{size}").reshape(shape)


LAYOUTS = {
    "contiguous": ((4, 6), lambda x: x),
    "scalar": ((1,), lambda x: x.reshape(())),
    "strided scalar": ((6,), lambda x: x[3]),
    "empty": ((2, 3), lambda x: x[:0]),
    "one of a stride": ((6,), lambda x: x[::6]),
    "offset": ((4, 6), lambda x: x[1:]),
    "transposed": ((4, 6), lambda x: x.T),
    "stepped": ((9, 7), lambda x: x[::2, 1::3]),
    "columns": ((5, 4, 6), lambda x: x[:, 1:3]),
}


@pytest.fixture
def small_limits(monkeypatch):
    """Sizes at which everything is cut, gathered and joined."""
    monkeypatch.setattr(staging, "SMALL_NBYTES", 64)
    monkeypatch.setattr(staging, "GATHER_NBYTES", 128)
    monkeypatch.setattr(staging, "COPY_NBYTES", 300)


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_every_bit_arrives(dtype, layout):
    shape, view = LAYOUTS[layout]
    tensor, records = noise(shape, dtype)
    neighbour, others = noise((3,), dtype)
    pieces = in_a_row([view(tensor), neighbour], begin=16)

    slot, _ = copy(pieces, FakeCuda())

    expected = view(records).tobytes() + others.tobytes()
    assert slot[:16] == b"\xaa" * 16
    assert slot[16 : 16 + len(expected)] == expected
    assert slot[16 + len(expected) :] == b"\xaa" * 64


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize("late", [(), ("side",), ("current",), ("side", "current")])
def test_tensors_of_all_sizes_side_by_side(late):
    shapes = [(3,), (64,), (5, 40), (), (7, 9, 11), (2, 100), (1,), (1,), (33, 2), (600,)]
    made = [noise(shape, dtype) for shape in shapes for dtype in ("float32", "uint8", "complex128")]
    views = [(t.T, r.T) if t.ndim == 2 and i % 2 else (t, r) for i, (t, r) in enumerate(made)]
    views += [(t.permute(2, 0, 1), r.transpose(2, 0, 1)) for t, r in made if t.ndim == 3]
    lazy = torch.complex(torch.arange(99.0), torch.arange(99.0) + 1).conj()
    views.append((lazy, lazy.resolve_conj().numpy()))
    views.insert(5, (made[0][0][:0], made[0][1][:0]))
    cuda = FakeCuda(late=late)

    pieces = in_a_row([t for t, _ in views])
    slot, copies = copy(pieces, cuda)

    expected = b"".join(r.tobytes() for _, r in views)
    assert slot[: len(expected)] == expected
    assert [(c.begin, c.end) for c in copies[1:]] == [
        (b.end, c.end) for b, c in itertools.pairwise(copies)
    ]
    assert (copies[0].begin, copies[-1].end) == (0, len(expected))
    for each in copies:
        overlapping = [
            key
            for key, t, begin, end in pieces
            if t.numel() and begin < each.end and each.begin < end
        ]
        assert list(each.keys) == overlapping
    own = {t.data_ptr() for t, _ in views}
    assert max(nbytes for address, nbytes in cuda.sent if address not in own) <= 128


def test_conjugates_and_negatives_are_resolved():
    values = torch.complex(torch.arange(6.0), torch.arange(1.0, 7.0)).reshape(2, 3)
    lazy = [values.conj(), values.conj().imag, values.conj().T]
    assert lazy[1].is_neg()

    slot, _ = copy(in_a_row(lazy), FakeCuda())

    plain = values.numpy()
    expected = plain.conj().tobytes() + (-plain.imag).tobytes() + plain.conj().T.tobytes()
    assert slot[: len(expected)] == expected


def test_an_expanded_tensor_is_written_in_full():
    slot, _ = copy(in_a_row([torch.arange(3, dtype=torch.int16).expand(4, 3)]), FakeCuda())

    assert slot[:24] == np.tile(np.arange(3, dtype="<i2"), 4).tobytes()


def test_nothing_to_copy():
    assert plan_device_copies([], memoryview(b""), sides=SideStreams(cuda=FakeCuda())) == ()
    assert plan([(key_of(0), torch.empty(0), 8, 8)], FakeCuda())[1] == ()


def test_a_thousand_small_tensors_cross_the_bus_together():
    cuda = FakeCuda()
    tensors = [
        torch.full((10_000 + i % 7,), float(i)) for i in range(1000)
    ]  # 40 MB: one buffer and a little

    slot, copies = copy(in_a_row(tensors), cuda)

    assert slot[:-64] == b"".join(t.numpy().tobytes() for t in tensors)
    assert len(cuda.sent) == 2
    assert len(copies) == 1
    assert [call for call in cuda.calls if call.startswith("empty")] == [f"empty {32 * MIB}"]


def test_a_large_tensor_is_sent_from_where_it_is():
    cuda = FakeCuda()
    tensors = [torch.ones(nbytes, dtype=torch.uint8) for nbytes in (8, MIB, 3 * MIB, 8)]

    _, copies = copy(in_a_row(tensors), cuda)

    assert cuda.sent == [(tensor.data_ptr(), tensor.nbytes) for tensor in tensors]
    assert len(copies) == 1
    assert not any(call.startswith("empty") for call in cuda.calls)


def test_copies_are_steps_of_bounded_size():
    large = [torch.empty(20 * MIB, dtype=torch.uint8) for _ in range(7)]

    _, copies = plan(in_a_row(large), FakeCuda())

    assert [(c.begin // MIB, c.end // MIB) for c in copies] == [(0, 60), (60, 120), (120, 140)]


def test_what_lies_between_pieces_is_left_alone():
    cuda = FakeCuda()
    pieces = in_a_row(
        [torch.zeros(3), torch.zeros(2, dtype=torch.uint8), torch.zeros(5)], begin=8, gap=4
    )

    slot, copies = copy(pieces, cuda)

    assert [(c.begin, c.end) for c in copies] == [(begin, end) for _, _, begin, end in pieces]
    written = {at for _, _, begin, end in pieces for at in range(begin, end)}
    assert all(slot[at] == (0 if at in written else 0xAA) for at in range(len(slot)))


def test_a_piece_of_another_size_than_its_place_is_refused():
    with pytest.raises(AssertionError):
        plan([(key_of(0), torch.zeros(4), 0, 12)], FakeCuda())


def test_start_only_enqueues():
    cuda = FakeCuda(late=("side",))
    slot, (only,) = plan(in_a_row([torch.zeros(4)]), cuda)

    only.start()
    only.guard()

    assert cuda.calls == ["moment", "follow", "run", "record", "hold"]
    only.finish()
    assert cuda.calls[5:] == ["synchronize"]
    assert slot[:16] == bytes(16)


@pytest.mark.parametrize("shape", [(8,), (MIB,)], ids=["gathered", "direct"])
@pytest.mark.parametrize("late", [("side",), ("current",), ("side", "current")])
def test_the_values_are_those_of_the_call(late, shape):
    cuda = FakeCuda(late=late)
    tensors = [torch.zeros(shape), torch.zeros(shape)]
    slot, copies = plan(in_a_row(tensors), cuda)

    cuda.launch(lambda: [t.fill_(1) for t in tensors])  # the step before
    for each in copies:
        each.start()
    for each in copies:
        each.guard()
    cuda.launch(lambda: [t.fill_(2) for t in tensors])  # the optimizer
    for each in copies:
        each.finish()

    assert set(np.frombuffer(slot[:-64], "f4")) == {1}


def test_without_the_guard_the_optimizer_is_seen():
    cuda = FakeCuda(late=("side",))
    tensor = torch.ones(8)
    slot, (only,) = plan(in_a_row([tensor]), cuda)

    only.start()
    cuda.launch(lambda: tensor.fill_(2))
    only.finish()

    assert set(np.frombuffer(slot[:32], "f4")) == {2}


def test_without_waiting_for_the_current_stream_the_past_is_seen():
    class Hasty(FakeCuda):
        def follow(self, stream, event):
            pass

    cuda = Hasty(late=("current",))
    tensor = torch.zeros(8)
    slot, (only,) = plan(in_a_row([tensor]), cuda)

    cuda.launch(lambda: tensor.fill_(1))
    only.start()
    only.finish()

    assert set(np.frombuffer(slot[:32], "f4")) == {0}


@pytest.mark.parametrize("late", [(), ("side",)])
@pytest.mark.parametrize("view", [lambda x: x, lambda x: x.T], ids=["direct", "packed"])
def test_sources_live_until_their_event_and_no_longer(late, view):
    memory = np.ones((512, 1024), np.float32)
    alive = weakref.ref(memory)
    parameter = torch.nn.Parameter(torch.from_numpy(memory))
    slot, (only,) = plan(in_a_row([view(parameter)]), FakeCuda(late=late))

    only.start()
    parameter.data = torch.zeros(512, 1024)
    del memory
    assert alive() is not None
    only.guard()
    assert alive() is not None

    only.finish()
    assert alive() is None
    assert set(np.frombuffer(slot[:-64], "f4")) == {1}
    slot.clear()  # not exported any more: the slot can be unmapped


def test_each_device_has_one_stream_that_follows_its_own():
    cuda = FakeCuda(late=("side", "current"))
    tensors = [torch.zeros(8) for _ in range(4)]
    for index, tensor in enumerate(tensors):
        cuda.put(tensor, index // 2)
    sides = SideStreams(cuda=cuda)

    for value in (1, 2):
        for index, tensor in enumerate(tensors):
            cuda.launch(lambda tensor=tensor, value=value: tensor.fill_(value), index // 2)
        slot, copies = plan(in_a_row(tensors), cuda, sides=sides)
        for each in copies:
            each.start()
        for each in copies:
            each.guard()
        for index, tensor in enumerate(tensors):
            cuda.launch(lambda tensor=tensor: tensor.fill_(9), index // 2)
        for each in copies:
            each.finish()

        assert [(c.begin, c.end) for c in copies] == [(0, 64), (64, 128)]
        assert set(np.frombuffer(slot[:128], "f4")) == {value}
    assert len(cuda.sides) == 2
    assert cuda.calls.count(f"empty {32 * MIB}") == 2


def test_a_start_that_fails_can_still_be_waited_for(monkeypatch):
    cuda = FakeCuda()
    _, (only,) = plan(in_a_row([torch.zeros(MIB), torch.zeros(8).expand(3, 8)]), cuda)

    def out_of_memory(_part):
        raise torch.OutOfMemoryError("no memory")

    bytes_of = staging._bytes_of
    monkeypatch.setattr(
        staging,
        "_bytes_of",
        lambda part: bytes_of(part) if part.nbytes > 96 else out_of_memory(part),
    )
    with pytest.raises(torch.OutOfMemoryError):
        only.start()

    only.guard()
    with pytest.raises(torch.OutOfMemoryError):
        only.finish()
    only.settle()
    assert cuda.calls[-3:] == ["record", "hold", "synchronize"]


def test_a_copy_that_was_never_started_is_dropped():
    cuda = FakeCuda()
    slot, (only,) = plan(in_a_row([torch.zeros(8)]), cuda)

    only.guard()
    only.finish()

    assert cuda.calls == []
    assert set(slot) == {0xAA}
    slot.clear()


def test_a_slot_is_pinned_and_unpinned():
    cuda = FakeCuda()

    assert pin(4096, 8192, cuda=cuda) is None
    assert unpin(4096, cuda=cuda) is None
    assert cuda.calls == ["register 4096 8192", "unregister 4096"]


def test_a_refusal_is_told_and_not_left_behind():
    cuda = FakeCuda()
    cuda.status = 2

    assert pin(4096, 8192, cuda=cuda) == "because (2)"
    assert unpin(4096, cuda=cuda) == "because (2)"
    assert cuda.calls == ["register 4096 8192", "forget", "unregister 4096", "forget"]


def test_the_seam_calls_what_torch_has(monkeypatch):
    current: Any = create_autospec(torch.cuda.Stream, instance=True)
    side: Any = create_autospec(torch.cuda.Stream, instance=True)
    event: Any = create_autospec(torch.cuda.Event, instance=True)
    make_event = create_autospec(torch.cuda.Event, return_value=event)
    cudart = Mock(
        spec_set=["cudaHostRegister", "cudaHostUnregister", "cudaGetErrorString", "cudaError"]
    )
    cudart.cudaHostRegister.return_value = 0
    cudart.cudaHostUnregister.return_value = 713
    cudart.cudaError = hex
    cudart.cudaGetErrorString = "error of {}".format
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: {torch.device("cuda", 1): current}[device]
    )
    monkeypatch.setattr(torch.cuda, "Event", make_event)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    cuda, device = Cuda(), torch.device("cuda", 1)

    cuda.follow_current(side, device)
    recorded = cuda.record(side)
    cuda.hold_current(event, device)
    cuda.synchronize(event)
    moment: Any = cuda.record_current(device)
    cuda.follow(side, event)

    side.wait_event.assert_called_once_with(event)
    assert moment is event
    side.wait_stream.assert_called_once_with(current)
    assert make_event.mock_calls[0] == call(blocking=True)
    assert event.record.mock_calls == [call(side), call(current)]
    current.wait_event.assert_called_once_with(event)
    event.synchronize.assert_called_once_with()
    assert recorded is event
    assert pin(4096, 8192, cuda=cuda) is None
    error = getattr(
        torch, "AcceleratorError", RuntimeError
    )  # torch 2.7 has no error of its own for it
    monkeypatch.setattr(
        torch, "ones", create_autospec(torch.ones, side_effect=error("left behind"))
    )
    assert unpin(4096, cuda=cuda) == "error of 0x2c9 (713)"
    cudart.cudaHostRegister.assert_called_once_with(4096, 8192, 1)
    cudart.cudaHostUnregister.assert_called_once_with(4096)


@pytest.mark.cuda
def test_on_a_real_device():
    device, cuda = torch.device("cuda", 0), Cuda()
    with torch.no_grad():
        tensors = [torch.randn(300 + i, device=device) for i in range(500)]
        tensors += [torch.randn(4 * MIB, device=device), torch.randn(4096, 4096, device=device).T]
        tensors += [
            torch.randn(9, 7, device=device, dtype=torch.complex64).conj(),
            torch.tensor(3.0, device=device),
        ]
        tensors += [
            torch.randn(1001, device=device).bfloat16(),
            torch.randn(1001, device=device) > 0,
        ]
    pieces = in_a_row(tensors, begin=4096)
    nbytes = -(-pieces[-1][3] // 4096) * 4096
    slot = mmap.mmap(-1, nbytes)
    slot.write(bytes(nbytes))
    address = ctypes.addressof(ctypes.c_char.from_buffer(slot))
    assert pin(address, nbytes, cuda=cuda) is None
    assert "(712)" in str(pin(address, nbytes, cuda=cuda))  # cudaErrorHostMemoryAlreadyRegistered
    tensors[0].add_(1)  # a kernel: the refusal isn't raised here

    sides = SideStreams(cuda=cuda)
    for warm in (False, False, True):
        copies = plan_device_copies(pieces, memoryview(slot), sides=sides)
        torch.cuda.synchronize()
        torch.cuda._sleep(200_000_000)  # about 0.1 s: what follows is enqueued long before it runs
        for tensor in tensors:
            tensor.logical_not_() if tensor.dtype is torch.bool else tensor.mul_(-2)
        expected = [tensor.clone() for tensor in tensors]
        for each in copies:
            each.start()
        first: Any = copies[0].event
        assert (
            not warm or not first.query()
        )  # nobody waited, once kernels are loaded and memory is cached
        for each in copies:
            each.guard()
        for tensor in tensors:
            tensor.zero_()
        assert not warm or not first.query()
        for each in copies:
            each.finish()
        for (_, _, begin, end), tensor in zip(pieces, expected, strict=True):
            host = tensor.cpu().resolve_conj().contiguous().reshape(-1).view(torch.uint8)
            assert slot[begin:end] == host.numpy().tobytes()
        with torch.no_grad():
            for tensor, old in zip(tensors, expected, strict=True):
                tensor.copy_(old)
        del expected, old
    assert unpin(address, cuda=cuda) is None
