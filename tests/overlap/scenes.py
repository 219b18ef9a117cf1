"""Scenes of several processes: what is sharded or averaged over them is copied beside the training as well."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ckptfmt import State
from tests.overlap.watching import Late, Spy, Trainer
from tests.resharding.stage import Stage


def data_parallel(stage: Stage) -> Any:
    net = DistributedDataParallel(_module(nn.BatchNorm1d(7)))
    return _train(stage, "data-parallel", net)


def sharded(stage: Stage) -> Any:
    net = _module(nn.LayerNorm(7))
    mesh = init_device_mesh("cpu", (stage.world_size,))
    fully_shard(net[0], mesh=mesh)
    fully_shard(net, mesh=mesh, reshard_after_forward=False)
    return _train(stage, "sharded", net)


def _module(norm: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 7), norm, nn.Linear(7, 3))


def _train(stage: Stage, name: str, net: nn.Module) -> Any:
    """Train and save; after each save comes an evaluation, which leaves FSDP2's parameters gathered."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    with pytest.MonkeyPatch.context() as patch:
        late, spy = Late(patch), Spy(patch)
        state = State(weights=net, optimizer=optimizer)
        writer = (stage.rank, stage.world_size)
        with Trainer(state, late, path=stage.path(name), writer=writer, deadline_s=60.0) as trainer:
            for number in range(5):
                values = torch.randn(
                    4, 6, generator=torch.Generator().manual_seed(10 * number + stage.rank)
                )
                optimizer.zero_grad()
                net(values).square().mean().backward()
                optimizer.step()
                trainer.save()
                net.eval()
                with torch.no_grad():
                    net(values)
                net.train()
            optimizer.step()
            torn = trainer.torn()
        return {"torn": torn, "overlapped": sorted(spy.overlapped[-1])}
