"""Scenes of two processes that save with torch.distributed.checkpoint: what is sharded there, a conversion joins."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.resharding.stage import Stage


def make_model(seed: int = 0) -> nn.Module:
    """Sizes that two processes can't share evenly, and a layer too small for one of them."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 1))


def fsdp_save(stage: Stage) -> Any:
    """Save an FSDP2 module with its optimizer; rank 0 also saves what it should be, whole."""
    model = make_model()
    mesh = init_device_mesh("cpu", (stage.world_size,))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.arange(10.0).reshape(2, 5)).square().sum().backward()
    optimizer.step()
    found: Any = get_state_dict(model, optimizer)
    weights, state = found
    columns = torch.arange(21.0).reshape(3, 7)
    others = {
        "columns": distribute_tensor(columns, mesh, [Shard(1)]),
        "copied": distribute_tensor(columns + 1, mesh, [Replicate()]),
    }
    save(
        {"model": weights, "optim": state, "others": others, "epoch": 2},
        checkpoint_id=stage.path("dcp"),
    )
    whole = {
        "model": {name: tensor.full_tensor() for name, tensor in weights.items()},
        "moments": {name: row["exp_avg"].full_tensor() for name, row in state["state"].items()},
        "others": {name: tensor.full_tensor() for name, tensor in others.items()},
    }
    if stage.rank == 0:
        torch.save(whole, stage.path("whole.pt"))
    return sorted(whole["model"])
