"""Trainings on CUDA as users have them: every save beside them holds the bits of its step. Some also run on a stand-in."""

import functools
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ckptfmt
from ckptfmt.adapters import torch_side
from ckptfmt.adapters.torch.devices import Devices
from ckptfmt.errors import Code
from tests.adapters.test_device import FakeCuda
from tests.builders import code_of
from tests.house.sources import ROOT

STEPS = 6


def bits_of(tensor: torch.Tensor) -> bytes:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    host = local.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return host.reshape(-1).view(torch.uint8).numpy().tobytes()


class Training:
    """A small model on a device with its optimizer; subclasses train it in their own way."""

    def __init__(self, device: str, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.device = torch.device(device)
        self.model: Any = torch.nn.Sequential(
            torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(64, 32)
        ).to(self.device)
        self.rows = torch.randn(8, 32).to(self.device)
        self.place()
        self.optimizer = self.make_optimizer()
        self.extra: dict[str, Any] = {}
        self.begin()

    def place(self) -> None:
        """Put the model where it belongs."""

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def begin(self) -> None:
        """Do what comes before the first step."""

    def loss(self) -> torch.Tensor:
        loss: torch.Tensor = self.model(self.rows).square().mean()
        return loss

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.loss().backward()
        self.optimizer.step()

    @property
    def state(self) -> ckptfmt.State:
        return ckptfmt.State(weights=self.model, optimizer=self.optimizer, extra=self.extra)

    def bits(self) -> list[bytes]:
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        tensors = [*self.model.parameters(), *moments]
        return [bits_of(tensor) for tensor in tensors]


class Fused(Training):
    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)


class Scaled(Training):
    """A gradient scaler, which may skip an optimizer's step."""

    def begin(self) -> None:
        self.scaler = torch.amp.GradScaler(self.device.type, init_scale=2.0**40)
        self.extra = {"scaler": self.scaler}

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.scaler.scale(self.loss()).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()


class Offloaded(Training):
    """Parameters of one layer on the host."""

    def place(self) -> None:
        self.model[3] = torch.nn.Linear(64, 32)

    def loss(self) -> torch.Tensor:
        loss: torch.Tensor = self.model[3](self.model[:3](self.rows).cpu()).square().mean()
        return loss


class Compiled(Training):
    def begin(self) -> None:
        self.forward = torch.compile(self.model)

    def loss(self) -> torch.Tensor:
        loss: torch.Tensor = self.forward(self.rows).square().mean()
        return loss


class Graphed(Training):
    """A CUDA graph of the whole step, whose replays call no hook of the optimizer."""

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=1e-2, capturable=True)

    def begin(self) -> None:
        self.model[2].p = 0.0
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.optimizer.zero_grad(set_to_none=True)
                self.loss().backward()
                self.optimizer.step()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.cuda.graph(self.graph):
            self.loss().backward()
            self.optimizer.step()

    def step(self) -> None:
        self.graph.replay()


class Sharded(Training):
    """FSDP2 on NCCL, with the only device as the mesh."""

    def place(self) -> None:
        from torch.distributed.fsdp import fully_shard  # noqa: PLC0415

        fully_shard(self.model)


ON_HOSTS = {"plain": Training, "fused": Fused, "scaler": Scaled, "offloaded": Offloaded}
ON_DEVICES = {**ON_HOSTS, "compiled": Compiled, "graph": Graphed, "fsdp2": Sharded}
SAVINGS = {
    "full": ckptfmt.Saving(),
    "deltas": ckptfmt.Saving(delta="smallest"),
    "no overlap": ckptfmt.Saving(overlap=False),
}


def check(training: Training, make: Any, run: Any, saving: ckptfmt.Saving) -> None:
    """Save each step beside the training, and compare each checkpoint with the bits of its step."""
    expected = {}
    with ckptfmt.Checkpointer(run, training.state, every=1, keep=50, saving=saving) as checkpointer:
        for step in checkpointer.steps(STEPS):
            training.step()
            expected[step + 1] = training.bits()
        assert not [report for report in checkpointer.reports if "FAILED" in report]
    for step, bits in expected.items():
        other = make(training.device.type, seed=1)
        other.step()
        ckptfmt.load(run / f"step-{step:08}-l0001", other.state, allow=["streams"])
        assert other.bits() == bits


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Let tensors of the host lie on a device whose copies are late."""
    fake = FakeCuda(late=("side",))
    monkeypatch.setattr(
        torch_side(), "Devices", functools.partial(Devices, cuda=fake, device_type="cpu")
    )
    return fake


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("saving", SAVINGS.values(), ids=SAVINGS)
@pytest.mark.parametrize("make", ON_HOSTS.values(), ids=ON_HOSTS)
def test_every_save_beside_a_training_on_a_stand_in_is_of_its_step(
    tmp_path: Any, make: Any, saving: ckptfmt.Saving
) -> None:
    check(make("cpu"), make, tmp_path, saving)


def test_a_device_lost_in_mid_copy_fails_the_save_by_name_and_keeps_the_others(
    tmp_path: Any, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training("cpu")

    def lose(*_: object) -> None:
        raise RuntimeError("CUDA error: the launch timed out and was terminated")

    checkpointer = ckptfmt.Checkpointer(tmp_path, training.state, keep=50)
    with checkpointer:
        for step in (1, 2):
            training.step()
            checkpointer.step = step
            handle = checkpointer.save()
            assert handle is not None
            handle.wait()
        with monkeypatch.context() as patch:
            patch.setattr(cuda, "copy_to_host", lose)
            training.step()
            checkpointer.step = 3
            lost = checkpointer.save()
            assert lost is not None
            assert code_of(lost.wait) == Code.STATE_CHANGED
        assert "the launch timed out" in str(lost.error)
        assert code_of(checkpointer.save) == Code.STATE_CHANGED
    found = ckptfmt.validate(tmp_path)
    assert found.valid
    states = [(found.step, found.state) for found in ckptfmt.Run(tmp_path).list()]
    assert states[:2] == [(1, "committed"), (2, "committed")]
    assert "committed" not in dict(states[2:]).values()


@pytest.mark.cuda
@pytest.mark.parametrize("saving", SAVINGS.values(), ids=SAVINGS)
@pytest.mark.parametrize("make", ON_DEVICES.values(), ids=ON_DEVICES)
def test_every_save_beside_a_training_on_a_device_is_of_its_step(
    tmp_path: Any, make: Any, saving: ckptfmt.Saving
) -> None:
    if make is not Sharded:
        check(make("cuda"), make, tmp_path / "run", saving)
        return
    place = f"file://{tmp_path}/store"
    dist.init_process_group("nccl", init_method=place, rank=0, world_size=1)
    try:
        check(make("cuda"), make, tmp_path / "run", saving)
    finally:
        dist.destroy_process_group()


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_state_on_two_devices(tmp_path: Any) -> None:
    class Split(Training):
        def place(self) -> None:
            self.model[3].to("cuda:1")

        def loss(self) -> torch.Tensor:
            loss: torch.Tensor = self.model[3](self.model[:3](self.rows).to("cuda:1")).sum()
            return loss

    check(Split("cuda"), Split, tmp_path, ckptfmt.Saving())


@pytest.mark.cuda
def test_expandable_segments() -> None:
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    environment |= {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    name = "test_every_save_beside_a_training_on_a_device_is_of_its_step[plain-full]"
    command = [sys.executable, "-m", "pytest", "-q", "-m", "cuda", f"{__file__}::{name}"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
