"""Loads into device memory: pinned buffers, a stream that follows the program's, and no buffer used again too early."""

import numpy as np
import pytest
import torch

import ckptfmt
from ckptfmt.adapters.torch.device_copies import plan_arrivals
from ckptfmt.adapters.torch.tensors import sink_of
from ckptfmt.box import Box
from ckptfmt.read import decoding, streaming
from ckptfmt.read.reader import Checkpoint
from ckptfmt.store import MemoryStore
from tests.adapters.test_device import FakeCuda


@pytest.fixture(name="saved")
def _saved(monkeypatch):
    """Return a store with weights that take several requests."""
    monkeypatch.setattr(decoding, "REQUEST_NBYTES", 8192)
    monkeypatch.setattr(streaming, "_SMALL_NBYTES", 0)
    store = MemoryStore()
    weights = {
        "w": torch.randn(64, 300).index_fill_(0, torch.tensor([3]), float("nan")),
        "b": torch.randn(77).to(torch.bfloat16),
        "s": torch.tensor(-0.0),
    }
    ckptfmt.save(store, ckptfmt.State(weights=weights), step=1, block_nbytes=4096)
    return store, weights


def fill(store, live, cuda, reports):
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
    Checkpoint(store).plan_reading(sinks, borrow=borrow).run()
    return sinks


def bits(tensor):
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("late", [(), ("side",), ("current", "side")])
@pytest.mark.parametrize("kind", ["contiguous", "strided"])
def test_every_bit_arrives_and_the_buffers_were_pinned_meanwhile(saved, late, kind):
    store, weights = saved
    live = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    if kind == "strided":
        live["w"] = torch.zeros(300, 64).T
    cuda = FakeCuda(late=late)
    reports: list[str] = []
    sinks = fill(store, live, cuda, reports)
    assert {name: bits(tensor.contiguous()) for name, tensor in live.items()} == {
        name: bits(tensor) for name, tensor in weights.items()
    }
    first, *_, last = [call.split()[0] for call in cuda.calls]
    assert (first, last) == ("follow", "unregister")
    assert cuda.calls[1].startswith("register ")
    assert cuda.calls[-1].split()[1] == cuda.calls[1].split()[1]
    assert cuda.calls.count("run") == cuda.calls.count("synchronize") > 5
    assert reports == []
    assert all(sink.arrive is None for sink in sinks)


def test_what_the_program_still_reads_is_filled_behind_it(saved):
    """A kernel that was enqueued before the load sees the tensor as it was then."""
    store, weights = saved
    live = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    cuda, seen = FakeCuda(late=("current", "side")), []
    cuda.launch(lambda: seen.append(live["w"].clone()))
    fill(store, live, cuda, [])
    assert not seen[0].any()
    assert bits(live["w"]) == bits(weights["w"])


def test_memory_that_cannot_be_pinned_is_told(saved):
    store, weights = saved
    live = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
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
