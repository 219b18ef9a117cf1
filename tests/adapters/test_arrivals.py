"""Loads into device memory: copies from pinned buffers, on a stream that follows the program's, and no buffer filled again too early."""

import gc
import os
import threading
import weakref

import numpy as np
import pytest
import torch

import ckptfmt
import ckptfmt.adapters.torch as side
from ckptfmt.adapters.torch import arrivals
from ckptfmt.adapters.torch.arrivals import plan_arrivals
from ckptfmt.adapters.torch.tensors import sink_of
from ckptfmt.box import Box
from ckptfmt.errors import CkptError, Code
from ckptfmt.read import decoding, sharing, streaming
from ckptfmt.read.reader import Checkpoint
from ckptfmt.store import MemoryStore
from tests.adapters.test_device import FakeCuda
from tests.read.test_sharing import Playground

LATE = ("side",)


class Device(FakeCuda):
    """A device that refuses to unpin memory from which it still has to copy."""

    def unregister(self, address):
        for stream in self.sides.values():
            assert stream.done == len(stream.tasks)
        return super().unregister(address)

    def count(self, call):
        return self.calls.count(call)


@pytest.fixture(name="saved")
def _saved(monkeypatch):
    """Return a store with weights that take several requests, and each buffer several times."""
    monkeypatch.setattr(decoding, "LENT_REQUEST_NBYTES", 8192)
    monkeypatch.setattr(streaming, "THREAD_COUNT", 2)
    monkeypatch.setattr(streaming, "_SMALL_NBYTES", 0)
    return save_weights()


def save_weights(store=None):
    store = MemoryStore() if store is None else store
    weights = {
        "w": torch.randn(64, 300).index_fill_(0, torch.tensor([3]), float("nan")),
        "b": torch.randn(77).to(torch.bfloat16),
        "s": torch.tensor(-0.0),
        "v": torch.randn(99, 200),
    }
    ckptfmt.save(store, ckptfmt.State(weights=weights), step=1, block_nbytes=4096)
    return store, weights


def plan(store, live, cuda, reports):
    """Return a planned read into tensors that count as tensors on a device, and the sinks."""
    sinks = [
        sink_of(
            tensor,
            field="weights",
            name=name,
            scope="global",
            dtype=str(tensor.dtype).removeprefix("torch."),
        )
        for name, tensor in live.items()
    ]
    for sink in sinks:
        sink._address = None  # a tensor on a device has none that this process could write to
    borrow = plan_arrivals(sinks, report=reports.append, cuda=cuda, device_type="cpu")
    return Checkpoint(store).plan_reading(sinks, borrow=borrow), sinks


def fill(store, live, cuda, reports=None):
    reading, _ = plan(store, live, cuda, [] if reports is None else reports)
    return reading.run()


def zeros(weights):
    return {name: torch.zeros_like(tensor) for name, tensor in weights.items()}


def same(live, weights):
    return {name: bits(tensor.contiguous()) for name, tensor in live.items()} == {
        name: bits(tensor) for name, tensor in weights.items()
    }


def bits(tensor):
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("late", [(), LATE, ("current", "side")])
@pytest.mark.parametrize("kind", ["contiguous", "strided", "other dtype"])
def test_every_bit_arrives_and_the_buffers_were_pinned_meanwhile(saved, late, kind, waits):
    store, weights = saved
    store.waits = lambda _: waits
    live = zeros(weights)
    if kind == "strided":
        live["w"] = torch.zeros(300, 64).T
    cuda = Device(late=late)
    reports: list[str] = []
    if kind == "other dtype":
        live["v"] = torch.zeros(99, 200, dtype=torch.float64)
        sinks = [sink_of(live["v"], field="weights", name="v", scope="global", dtype="float32")]
        borrow = plan_arrivals(sinks, report=reports.append, cuda=cuda, device_type="cpu")
        Checkpoint(store).plan_reading(sinks, borrow=borrow).run()
        assert torch.equal(live["v"], weights["v"].double())
    else:
        fill(store, live, cuda, reports)
        assert same(live, weights)
    first, second, *_, last = [call.split()[0] for call in cuda.calls]
    assert (first, second, last) == ("follow", "register", "unregister")
    assert cuda.calls[-1].split()[1] == cuda.calls[1].split()[1]
    assert reports == []


def count_calls(store, weights, cuda):
    """Load, and return the numbers of copies, of waits and of filled buffers, and the runs of a tensor in a buffer."""
    reading, _ = plan(store, zeros(weights), cuda, [])
    live = [sink.local for sink in _]
    requests = reading.library.plan_requests(reading.ranges, is_lent=True)
    report = reading.run()
    assert all(torch.equal(one, other) for one, other in zip(live, weights.values(), strict=True))
    assert report.request_count == len(requests)
    runs = sum(len({blocks.box for blocks in request.ranges}) for request in requests)
    return cuda.count("run"), cuda.count("synchronize"), len(requests), runs


@pytest.mark.parametrize("waits", [False, True])
def test_a_copy_for_each_tensor_in_a_buffer_and_a_wait_for_each_use(waits):
    """216 MiB in 160 tensors took 554 copies, each with a wait."""
    store = MemoryStore()
    vars(store)["waits"] = lambda _: waits
    weights = {
        f"{number:03}": torch.full((216 * 2**20 // 160 // 4,), float(number))
        for number in range(160)
    }
    ckptfmt.save(store, ckptfmt.State(weights=weights), step=1)
    cuda = Device(late=LATE)
    copies, waited, fills, runs = count_calls(store, weights, cuda)
    assert copies == runs < 160 + fills
    assert waited <= fills <= 160 // 2
    assert cuda.count("record") <= fills + 1
    pinned = [int(call.split()[2]) for call in cuda.calls if call.startswith("register")]
    assert len(pinned) == 1
    assert pinned[0] <= streaming.LENT_IN_FLIGHT_NBYTES


def test_few_buffers_take_no_more_waits(saved):
    store, weights = saved
    del weights["w"]
    copies, waited, fills, runs = count_calls(store, weights, Device(late=LATE))
    assert copies == runs
    assert 1 < waited <= fills


def drop(*_):
    pass


@pytest.mark.parametrize("name", ["wait", "mark", "wait_all"])
def test_without_one_of_the_waits_other_bytes_arrive(saved, name, monkeypatch):
    """The late device shows each missing wait: buffers are filled while it still has to copy from them."""
    store, weights = saved
    cuda = FakeCuda(late=LATE)
    monkeypatch.setattr(arrivals._Loan, name, drop)
    live = zeros(weights)
    fill(store, live, cuda)
    assert not same(live, weights)


def test_without_the_last_wait_memory_is_unpinned_too_early(saved, monkeypatch):
    store, weights = saved
    wait_all = arrivals._Loan.wait_all

    def pretend(self):
        self.is_in_use = False
        wait_all(self)

    monkeypatch.setattr(arrivals._Loan, "wait_all", pretend)
    with pytest.raises(AssertionError):
        fill(store, zeros(weights), Device(late=LATE))


def test_autograd_learns_of_the_change(saved):
    store, weights = saved
    live = zeros(weights)
    before = live["w"]._version
    fill(store, live, Device())
    assert live["w"]._version > before


def test_tensors_are_freed_with_their_sinks(saved):
    """The copies' owner keeps no tensor: a cycle would keep a model until the next collection."""
    store, weights = saved
    live = zeros(weights)
    reading, sinks = plan(store, live, Device(), [])
    reading.run()
    found = weakref.ref(live["w"])
    gc.disable()
    try:
        del sinks, reading, live
        assert found() is None
    finally:
        gc.enable()


# --- failures -------------------------------------------------------------------------------------


@pytest.fixture(name="lent")
def _lent(monkeypatch):
    """Return a list of weak references to the memory that is lent."""
    found = []
    init = arrivals._Loan.__init__

    def note(self, memory, *rest):
        found.append(weakref.ref(memory))
        init(self, memory, *rest)

    monkeypatch.setattr(arrivals._Loan, "__init__", note)
    return found


def fail_with(store, live, cuda):
    """Load, and return the type, the text, the notes and the code of the error, without its frames."""
    try:
        fill(store, live, cuda)
    except Exception as error:  # noqa: BLE001
        return type(error), str(error), getattr(error, "__notes__", []), getattr(error, "code", "")
    raise AssertionError("no error")


@pytest.mark.parametrize("at", [0, 5, 9])
@pytest.mark.parametrize("waits", [False, True])
def test_a_copy_that_fails_is_raised_after_all_others(saved, lent, at, waits):
    store, weights = saved
    store.waits = lambda _: waits
    cuda = Device(late=LATE)
    count = iter(range(1000))
    run_on = cuda.run_on

    def run(stream, work):
        if next(count) == at:
            raise RuntimeError("CUDA error: an illegal memory access")
        run_on(stream, work)

    vars(cuda)["run_on"] = run
    kind, text, notes, _ = fail_with(store, zeros(weights), cuda)
    assert (kind, text) == (RuntimeError, "CUDA error: an illegal memory access")
    assert notes == ["ckptfmt: raised by the load's copies to cuda:0"]
    assert cuda.calls[-1].startswith("unregister")
    gc.collect()
    assert [memory() for memory in lent] == [None]
    assert not [thread for thread in threading.enumerate() if thread.name == "ckptfmt-read"]


@pytest.mark.parametrize("call", ["synchronize", "record"])
@pytest.mark.parametrize("at", [0, 3])
def test_memory_that_a_lost_device_may_read_stays(saved, lent, call, at):
    """Its copies are never known to have ended: the memory is neither unpinned nor freed nor filled again."""
    store, weights = saved
    cuda = FakeCuda(late=LATE)
    count = iter(range(1000))
    inner = getattr(cuda, call)

    def lose(argument):
        if next(count) >= at:
            raise RuntimeError("CUDA error: device lost")
        return inner(argument)

    setattr(cuda, call, lose)
    kind, text, notes, _ = fail_with(store, zeros(weights), cuda)
    assert (kind, text) == (RuntimeError, "CUDA error: device lost")
    assert notes
    assert set(notes) == {"ckptfmt: raised by the load's copies to cuda:0"}
    assert not [one for one in cuda.calls if one.startswith("unregister")]
    gc.collect()
    assert [memory() is None for memory in lent] == [False]


def test_a_full_device_is_named(saved):
    store, weights = saved
    cuda = Device()

    def run(*_):
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    vars(cuda)["run_on"] = run
    kind, text, _, code = fail_with(store, zeros(weights), cuda)
    assert issubclass(kind, CkptError)
    assert code == Code.LOAD_MEMORY
    assert "cuda:0" in text


@pytest.mark.parametrize("at", [0, 50_000, 100_000])
def test_damage_is_raised_after_the_copies_of_the_good_blocks(saved, lent, at):
    """No byte of a damaged block reaches the device, and nothing is in progress after the error."""
    store, weights = saved
    files = store.snapshot()
    (path,) = [name for name in files if name.endswith("safetensors")]
    damaged = bytearray(files[path])
    damaged[-1 - at] ^= 255
    live = zeros(weights)
    cuda = Device(late=LATE)
    store = MemoryStore.from_snapshot({**files, path: bytes(damaged)})
    assert fail_with(store, live, cuda)[3] == Code.BLOCK_DIGEST
    assert cuda.calls[-1].startswith("unregister")
    for name, tensor in live.items():
        found, wanted = bits(tensor), bits(weights[name])
        assert all(one in (0, other) for one, other in zip(found, wanted, strict=True))
    gc.collect()
    assert [memory() for memory in lent] == [None]


def test_an_interruption_is_raised_after_all_copies(saved):
    store, weights = saved
    cuda = Device(late=LATE)
    count = iter(range(1000))
    synchronize = cuda.synchronize

    def interrupt(event):
        if next(count) == 0:
            raise KeyboardInterrupt
        synchronize(event)

    vars(cuda)["synchronize"] = interrupt
    with pytest.raises(KeyboardInterrupt):
        fill(store, zeros(weights), cuda)
    assert cuda.calls[-1].startswith("unregister")


# --- shared loads, resumes ------------------------------------------------------------------------


def share(weights, store, cudas):
    lives = [zeros(weights) for _ in cudas]

    def work(peers):
        reading, _ = plan(store, lives[peers.number], cudas[peers.number], [])
        reading.share(peers)
        return reading.run()

    outcomes = Playground(len(cudas)).run(work)
    return lives, outcomes


@pytest.fixture(name="small_rounds")
def _small_rounds(monkeypatch):
    monkeypatch.setattr(sharing, "LEAST_NBYTES", 1)
    monkeypatch.setattr(sharing, "PARCEL_NBYTES", 8192)
    monkeypatch.setattr(sharing, "ROUND_NBYTES", 20_000)


@pytest.mark.usefixtures("small_rounds")
def test_shared_reads_arrive_and_memory_is_pinned_once(saved):
    store, weights = saved
    cudas = [Device(late=LATE) for _ in range(2)]
    lives, reports = share(weights, store, cudas)
    assert all(same(live, weights) for live in lives)
    assert all(report.received_nbytes > 0 for report in reports)
    for cuda in cudas:
        pinned = [call.split()[1] for call in cuda.calls if call.startswith("register")]
        unpinned = [call.split()[1] for call in cuda.calls if call.startswith("unregister")]
        assert len(pinned) == 2  # the buffers of reads, and the buffer of a round
        assert sorted(pinned) == sorted(unpinned)
        assert cuda.count("synchronize") < cuda.count("run")


@pytest.mark.usefixtures("small_rounds")
def test_without_the_wait_for_a_round_other_bytes_arrive(saved, monkeypatch):
    store, weights = saved
    run = sharing.Rounds.run

    def run_without(self, read, take, settle):
        del settle
        run(self, read, take)

    monkeypatch.setattr(sharing.Rounds, "run", run_without)
    lives, _ = share(weights, store, [FakeCuda(late=LATE) for _ in range(2)])
    assert not all(same(live, weights) for live in lives)


@pytest.mark.usefixtures("small_rounds")
def test_nobody_waits_for_a_process_whose_device_is_lost(saved):
    """The process reads nothing more, since its buffers may still be in use."""
    store, weights = saved
    cudas = [FakeCuda(late=LATE), Device(late=LATE)]

    def lose(_):
        raise CkptError(Code.LOAD_MEMORY, "lost")

    vars(cudas[0])["synchronize"] = lose
    _, (lost, other) = share(weights, store, cudas)
    assert (lost.code, other.code) == (Code.LOAD_MEMORY, Code.PEER_FAILED)
    assert not [one for one in cudas[0].calls if one.startswith("unregister")]
    assert cudas[1].calls[-1].startswith("unregister")


def test_a_resume_copies_while_it_reads(tmp_path, monkeypatch):
    """The loads of `ckptfmt.load` and of a Checkpointer go through the same buffers."""
    monkeypatch.setattr(streaming, "_SMALL_NBYTES", 0)
    cuda = Device(late=LATE)

    def planned(sinks, *, report):
        for sink in sinks:
            sink._address = None
        return plan_arrivals(sinks, report=report, cuda=cuda, device_type="cpu")

    weights = {"w": torch.randn(600, 1000), "v": torch.randn(3, 7)}
    with ckptfmt.Checkpointer(tmp_path / "run", ckptfmt.State(weights=weights)) as saver:
        handle = saver.save(1)
        assert handle is not None
        handle.wait()
    live = zeros(weights)
    monkeypatch.setattr(side, "plan_arrivals", planned)
    with ckptfmt.Checkpointer(tmp_path / "run", ckptfmt.State(weights=live)) as resumed:
        assert resumed.step == 1
    assert same(live, weights)
    assert cuda.count("run") == 2
    assert cuda.calls[-1].startswith("unregister")


@pytest.mark.parametrize(
    ("own", "launcher", "trainers", "expected"),
    [
        (8, 8, None, 8),
        (8, 8, "2", 4),
        (64, 64, "8", 8),
        (8, 64, "8", 8),  # bound by the launcher to its own processors
        (2, 2, "8", 1),
        (99, 99, "1", 16),
        (4, 4, "many", 4),
    ],
)
def test_trainers_share_the_processors_of_their_node(
    own, launcher, trainers, expected, monkeypatch
):
    def affinity(pid):
        return set(range(own if pid == 0 else launcher))

    monkeypatch.setattr(os, "sched_getaffinity", affinity)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if trainers is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", trainers)
    assert streaming.thread_count() == expected


def test_what_the_program_still_reads_is_filled_behind_it(saved):
    """A kernel that was enqueued before the load sees the tensor as it was then."""
    store, weights = saved
    live = zeros(weights)
    cuda, seen = FakeCuda(late=("current", "side")), []
    cuda.launch(lambda: seen.append(live["w"].clone()))
    fill(store, live, cuda)
    assert not seen[0].any()
    assert bits(live["w"]) == bits(weights["w"])


def test_memory_that_cannot_be_pinned_is_told(saved):
    store, weights = saved
    live = zeros(weights)
    cuda = FakeCuda()
    reports: list[str] = []
    cuda.status = 2
    fill(store, live, cuda, reports)
    assert bits(live["w"]) == bits(weights["w"])
    assert len(reports) == 1
    assert "because (2)" in reports[0]
    assert not [call for call in cuda.calls if call.startswith("unregister")]


def test_host_tensors_take_no_device(saved):
    _, weights = saved
    sinks = [sink_of(weights["w"], field="weights", name="w", scope="global", dtype="float32")]
    assert plan_arrivals(sinks, report=pytest.fail) is None
    assert plan_arrivals([], report=pytest.fail) is None


@pytest.mark.parametrize("kind", ["contiguous", "strided", "other dtype"])
def test_a_fill_counts_as_a_change(kind):
    """As torch's own operations do: what autograd saved of it, and a save that is under way, must find out."""
    tensor = torch.zeros(4, 6, dtype=torch.float64 if kind == "other dtype" else torch.float32)
    if kind == "strided":
        tensor = torch.zeros(6, 4).T
    sink = sink_of(tensor, field="weights", name="w", scope="global", dtype="float32")
    before = tensor._version
    sink.copy_from(Box((1, 0), (2, 6)), memoryview(np.arange(12, dtype=np.float32).tobytes()))
    assert tensor._version > before
    assert tensor[1:3].reshape(-1).tolist() == list(range(12))
    assert not tensor[0].any()


@pytest.mark.cuda
def test_on_a_real_device(tmp_path):
    weights = {"w": torch.randn(3000, 1000), "t": torch.randn(500, 400)}
    ckptfmt.save(tmp_path / "c", ckptfmt.State(weights=weights), step=1)
    live = {
        "w": torch.zeros(3000, 1000, device="cuda"),
        "t": torch.zeros(400, 500, device="cuda").T,
    }
    report = ckptfmt.load(tmp_path / "c", ckptfmt.State(weights=live))
    assert report.notes == ()
    for name, tensor in live.items():
        assert np.array_equal(tensor.cpu().numpy(), weights[name].numpy())
