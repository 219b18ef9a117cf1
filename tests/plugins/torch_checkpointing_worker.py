"""Two ranks save and load sharded and own items with the manager of torch_checkpointing's interface.

Usage: torch_checkpointing_worker.py DIRECTORY MEETING_FILE
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch_checkpointing.checkpoint_manager import CheckpointManager
from torch_checkpointing.default_resharder import DefaultResharder
from torch_checkpointing.schema import ItemSpec

from ckptfmt.plugins.torch_checkpointing import CkptfmtCheckpointManager

WHOLE = torch.arange(42.0).reshape(7, 6)


def main(directory: Path, meeting: str) -> None:
    """Save asynchronously, change the values, and load them back."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    items = {"model": ItemSpec(resharder=DefaultResharder())}
    manager = CkptfmtCheckpointManager(CheckpointManager.Config(items=items))
    weight = distribute_tensor(WHOLE.clone(), mesh, [Shard(0)])
    payload = {"model": {"w": weight}, "loader": {"position": 10 + rank}, "step": 7}
    for number in range(2):  # the second save replaces the first
        future = manager.save(str(directory / "both"), payload)
        assert future is not None
        weight.to_local().add_(number)  # after the copy
        future.result(timeout=60)
    weight.to_local().zero_()
    into = {"model": {"w": weight}, "loader": {"position": 0}, "step": 0}
    loaded = manager.load(directory / "both", into=into, strict=True)
    assert loaded["model"]["w"] is weight
    assert torch.equal(weight.full_tensor(), WHOLE)
    assert loaded["loader"] == {"position": 10 + rank}
    assert loaded["step"] == 7

    own = CkptfmtCheckpointManager()
    try:
        own.save(str(directory / "refused"), {"model": {"w": weight}})
    except ValueError as error:
        assert "DefaultResharder" in str(error)
    else:
        raise AssertionError("sharded tensors without a resharder were saved")
    lacking = {"model": {"w": weight}, "other": {f"rank{rank}": 1}, "step": 0}
    try:
        manager.load(directory / "both", into=lacking)
    except KeyError as error:
        assert "other" in str(error)
    else:
        raise AssertionError("an absent item was loaded")
    manager.close()
    own.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
