"""Objects as frameworks wrap them, of the real packages: saved by the names of what they wrap, loaded into either."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import ckptfmt  # noqa: E402 - the framework's signature

Objects = tuple[Any, Any, Any]


def make(seed: int) -> Objects:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)


def by_accelerate(model: Any, optimizer: Any, scheduler: Any) -> Objects:
    accelerate = pytest.importorskip("accelerate")
    prepared: Objects = accelerate.Accelerator(cpu=True).prepare(model, optimizer, scheduler)
    return prepared


def by_fabric(model: Any, optimizer: Any, scheduler: Any) -> Objects:
    fabric = pytest.importorskip("lightning.fabric").Fabric(accelerator="cpu", devices=1)
    model, optimizer = fabric.setup(model, optimizer)
    return model, optimizer, scheduler


def by_lightning(model: Any, optimizer: Any, scheduler: Any) -> Objects:
    wrappers = pytest.importorskip("lightning.pytorch.core.optimizer")
    return model, wrappers.LightningOptimizer(optimizer), scheduler


def by_compile(model: Any, optimizer: Any, scheduler: Any) -> Objects:
    return torch.compile(model, backend="eager"), optimizer, scheduler


def state_of(objects: Objects) -> ckptfmt.State:
    model, optimizer, scheduler = objects
    return ckptfmt.State(
        weights=model, optimizer=optimizer, extra={"scheduler": scheduler}, rng=False
    )


@pytest.mark.parametrize("wrap", [by_accelerate, by_fabric, by_lightning, by_compile])
@pytest.mark.filterwarnings("ignore")  # of the frameworks
def test_wrapped_objects_are_saved_as_what_they_wrap(
    wrap: Callable[[Any, Any, Any], Objects], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = make(1)
    model, optimizer, scheduler = plain
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    scheduler.step()
    ckptfmt.save(tmp_path / "plain", state_of(plain), step=1)
    ckptfmt.save(tmp_path / "wrapped", state_of(wrap(*plain)), step=1)
    assert "SAVED_BY_POSITION" not in caplog.text
    with ckptfmt.open(tmp_path / "plain") as one, ckptfmt.open(tmp_path / "wrapped") as other:
        assert one.tensors.keys() == other.tensors.keys()
        assert [name for _, name, _ in one.tensors if "module" in name or "orig_mod" in name] == []
    for source in ("plain", "wrapped"):
        inner = make(2)
        ckptfmt.load(tmp_path / source, state_of(wrap(*inner)))
        for mine, theirs in zip(
            plain[0].state_dict().values(), inner[0].state_dict().values(), strict=True
        ):
            assert torch.equal(mine, theirs)
        saved, loaded = optimizer.state_dict(), inner[1].state_dict()
        assert saved["param_groups"] == loaded["param_groups"]
        for mine, theirs in zip(saved["state"].values(), loaded["state"].values(), strict=True):
            assert all(torch.equal(mine[key], theirs[key]) for key in mine)
        assert scheduler.state_dict() == inner[2].state_dict()
