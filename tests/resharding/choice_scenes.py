"""Scenes of every optimizer of torch under FSDP2, of conversions between layouts, and of loads into other names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import ckptfmt
from ckptfmt import State
from ckptfmt.loading.load_report import LoadReport
from tests.resharding.stage import (
    Stage,
    attempt,
    bits,
    gather_on,
    optimizer_bits,
    steps_without_model,
    weight_bits,
)

#: Makers by name. LBFGS wants a closure and SparseAdam sparse gradients: they are tested without
#: shards.
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "Adam-fused": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
    "Adam-tensor-lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1)),
    "Adam-foreach": lambda p: torch.optim.Adam(p, lr=0.1, foreach=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.01),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1, t0=1.0),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Muon": lambda p: torch.optim.Muon(p, lr=0.1),
}
if not hasattr(torch.optim, "Muon"):  # came with torch 2.9
    del OPTIMIZERS["Muon"]


class Layers(nn.Module):
    """Rows that no number of ranks divides, and some that are fewer."""

    def __init__(self, seed: int, *, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up = nn.Linear(3, 7, bias=bias)
        self.down = nn.Linear(7, 2, bias=bias)


def _all(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    options = [
        {k: bits(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups
    ]
    return {
        "weights": weight_bits(module),
        "state": optimizer_bits(optimizer, module),
        "options": options,
    }


def _load(
    path: str, module: nn.Module, optimizer: torch.optim.Optimizer, **how: Any
) -> dict[str, Any]:
    ckptfmt.load(path, State(weights=module, optimizer=optimizer), **how)
    return _all(module, optimizer)


def every_optimizer(stage: Stage) -> Any:
    """FSDP2 on all ranks to one rank without sharding and to FSDP2 on three, and from one to FSDP2 on all."""
    four, three = init_device_mesh("cpu", (stage.world_size,)), DeviceMesh("cpu", [0, 1, 2])
    gather = gather_on([0, 1, 2])
    return {name: _one_optimizer(stage, name, four, three, gather) for name in OPTIMIZERS}


def _one_optimizer(
    stage: Stage,
    name: str,
    four: DeviceMesh,
    three: DeviceMesh,
    gather: Callable[[bytes], list[bytes]],
) -> Any:
    def make(seed: int, mesh: DeviceMesh | None) -> tuple[nn.Module, torch.optim.Optimizer]:
        module = Layers(seed, bias=name != "Muon")
        if mesh is not None:
            fully_shard(module, mesh=mesh)
        return module, OPTIMIZERS[name](module.parameters())

    module, optimizer = make(1, four)
    try:
        steps_without_model(module, optimizer, range(2))
    except Exception as error:  # noqa: BLE001
        return {"unsupported": f"{type(error).__name__}: {error}"[:200]}
    path = stage.path(f"optimizer-{name}")
    ckptfmt.save(path, State(weights=module, optimizer=optimizer), step=2)
    said: dict[str, Any] = {"saved": _all(module, optimizer)}
    steps_without_model(module, optimizer, range(2, 4))
    said["later"] = _all(module, optimizer)
    again = make(2, four)
    said["same"] = _load(path, *again)
    steps_without_model(*again, range(2, 4))
    said["again"] = _all(*again)
    if stage.rank < 3:
        how: dict[str, Any] = {"writer": (stage.rank, 3), "agree": gather}
        said["three"] = _load(path, *make(3, three), **how)
    plain = make(4, None)
    said["plain"] = _load(path, *plain, writer=(0, 1))
    # On each rank alone, and from there back into shards.
    steps_without_model(*plain, range(2, 3))
    lone = stage.path(f"optimizer-{name}-plain")
    if stage.rank == 0:
        ckptfmt.save(lone, State(weights=plain[0], optimizer=plain[1]), step=3, writer=(0, 1))
    dist.barrier()
    said["from_plain"] = [_load(lone, *make(5, four)), _all(*plain)]
    return said


def converted(stage: Stage) -> Any:
    """float32 by rows of four, into bfloat16 by columns of a two by two mesh; its optimizer goes along."""
    module = Layers(1)
    fully_shard(module, mesh=init_device_mesh("cpu", (stage.world_size,)))
    optimizer = torch.optim.AdamW(module.parameters())
    steps_without_model(module, optimizer, range(2))
    path = stage.path("converted")
    ckptfmt.save(path, State(weights=module, optimizer=optimizer), step=2)

    def halved(value: Any) -> Any:
        return (
            bits(value.full_tensor().bfloat16()) if hasattr(value, "full_tensor") else bits(value)
        )

    named = dict(module.named_parameters())
    expected = {
        "weights": {name: halved(value) for name, value in named.items()},
        "state": {
            name: {k: halved(v) for k, v in optimizer.state[p].items()}
            for name, p in sorted(named.items())
        },
    }
    mesh = init_device_mesh("cpu", (2, 2))
    other = Layers(2).bfloat16()
    for layer in (other.up, other.down):
        for key, parameter in list(layer.named_parameters()):
            whole = distribute_tensor(
                parameter.detach(), mesh, [Shard(parameter.ndim - 1), Replicate()]
            )
            setattr(layer, key, nn.Parameter(whole))
    again = torch.optim.AdamW(other.parameters())
    report = ckptfmt.load(path, State(weights=other, optimizer=again), allow="dtype")
    assert isinstance(report, LoadReport)
    found = {"weights": weight_bits(other), "state": optimizer_bits(again, other)}
    steps_without_model_in(other, again)
    return {"expected": expected, "found": found, "downgrades": report.downgrades}


def steps_without_model_in(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Step once, in the parameters' own dtype."""
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def chosen(stage: Stage) -> Any:
    """Stages of a pipeline: each rank has a layer of its own, and other names for it than when it was saved."""
    layers = [nn.Linear(2, 3) for _ in range(stage.world_size)]
    mine = str(stage.rank)
    path = stage.path("stages")
    ckptfmt.save(path, State(weights=nn.ModuleDict({mine: layers[stage.rank]})), step=1)

    def load(**how: Any) -> Any:
        module = nn.ModuleDict({f"stage{mine}": nn.Linear(2, 3)})
        before = weight_bits(module)
        reports: list[Any] = []
        ended = attempt(lambda: reports.append(ckptfmt.load(path, State(weights=module), **how)))
        report = reports[0] if reports else None
        return {
            "code": ended["code"], "text": ended["text"], "before": before, "after": weight_bits(module),
            "renamed": report and report.renamed, "left_count": report and report.left_count,
        }  # fmt: skip

    every = {f"stage{rank}": str(rank) for rank in range(stage.world_size)}
    alone = {name: torch.zeros(3, 2) for name in ("0.weight", "1.weight")}
    ckptfmt.load(path, State(weights=alone), only=["0.weight", "1.weight"], writer=(0, 1))
    return {
        "saved": weight_bits(layers[stage.rank]),
        "alone": bits(alone),
        "every": load(rename=every),
        "some": load(rename=every, only=["1", "2"]),
        "unknown": load(rename={**every, "stage9": "9"}),
        "differently": load(rename=lambda name: name.removeprefix("stage") if stage.rank else name),
    }
