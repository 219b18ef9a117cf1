"""One rank: save or load sharded tensors through torch.distributed.checkpoint.

Usage: dcp_worker.py save|async|load|fail CHECKPOINT MEETING_FILE
"""

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader as dcp_load
from torch.distributed.checkpoint import state_dict_saver as dcp_save
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ckptfmt.plugins.dcp import CkptfmtReader, CkptfmtWriter


class Opaque:
    """An object that is no plain value."""


def main(how: str, path: str, meeting: str) -> None:
    """Do as asked, as one rank of WORLD_SIZE."""
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=count)
    mesh = init_device_mesh("cpu", (count,))
    whole = torch.arange(42.0).reshape(7, 6)
    sharded = distribute_tensor(whole if how != "load" else torch.zeros(7, 6), mesh, [Shard(0)])
    replicated = distribute_tensor(torch.arange(3.0) if how != "load" else torch.zeros(3), mesh, [Replicate()])
    state: dict[str, Any] = {"model": {"w": sharded, "r": replicated}, "rank0": {"plain": [1, "two"]}}
    if how == "load":
        dcp_load.load(state, storage_reader=CkptfmtReader(path))
        for name, expected in (("w", whole), ("r", torch.arange(3.0))):
            held: DTensor = state["model"][name]
            assert held.full_tensor().numpy().tobytes() == expected.numpy().tobytes(), name
    elif how == "async":
        dcp_save.async_save(state, storage_writer=CkptfmtWriter(path)).result()  # type: ignore[union-attr]
    elif how == "fail":
        if rank == 1:
            state["mine"] = Opaque()
        try:
            dcp_save.save(state, storage_writer=CkptfmtWriter(path))
        except CheckpointException as error:
            assert "mine is no plain value" in str(error), error
            sys.stdout.write("refused\n")
    else:
        dcp_save.save(state, storage_writer=CkptfmtWriter(path))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
