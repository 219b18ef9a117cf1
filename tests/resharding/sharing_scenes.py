"""Scenes of loads in which each block is read by one process and sent to the others."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import ckptfmt
from ckptfmt import State
from tests.resharding.stage import Stage, attempt

SHAPE = (512, 2048)  # of float32: 4 MiB


def _weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(SHAPE, generator=generator) for name in ("a", "b", "c")}


def _local_bytes(tensor: torch.Tensor) -> bytes:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.contiguous().view(torch.uint8).numpy().tobytes()


def shared(stage: Stage) -> dict[str, Any]:
    """Load what one process saved: replicas, halves of columns, halves of rows; with and without sharing."""
    saved = _weights(1)
    if stage.rank == 0:
        ckptfmt.save(stage.path("shared"), State(weights=saved), step=1, writer=(0, 1))
    dist.barrier()
    mesh = init_device_mesh("cpu", (stage.world_size,))
    placements: dict[str, list[Placement]] = {"a": [Replicate()], "b": [Shard(1)], "c": [Shard(0)]}
    expected = {
        name: _local_bytes(distribute_tensor(saved[name], mesh, placements[name])) for name in saved
    }
    said: dict[str, Any] = {}
    for share in (False, True):
        live = {
            name: distribute_tensor(torch.zeros(SHAPE), mesh, placements[name]) for name in saved
        }
        report = ckptfmt.load(stage.path("shared"), State(weights=live), share=share)
        said[str(share)] = {
            "same": {name: _local_bytes(live[name]) == expected[name] for name in live},
            "needed_nbytes": report.reads.needed_nbytes,
            "read_nbytes": report.reads.read_nbytes,
            "received_nbytes": report.reads.received_nbytes,
        }
    return said


def damaged(stage: Stage) -> dict[str, Any]:
    """Load a checkpoint with a damaged block, shared: nobody waits for ever, and all fail."""
    if stage.rank == 0:
        path = stage.path("damaged")
        ckptfmt.save(path, State(weights=_weights(1)), step=1, writer=(0, 1))
        (file,) = (stage.scratch / "damaged").glob("*.safetensors")
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    dist.barrier()
    live = {name: torch.zeros(SHAPE) for name in "abc"}
    return attempt(lambda: ckptfmt.load(stage.path("damaged"), State(weights=live), share=True))
