"""What the processes of a gang do for the tests of the reference trainer."""

import os
from pathlib import Path

import torch

from ckptfmt_conformance.elastic import Plan, TreeSum
from ckptfmt_conformance.trajectories.gang_world import world
from ckptfmt_conformance.trajectories.ring import NaiveRing


def leaf(worker):
    draw = torch.Generator().manual_seed(worker)
    return torch.randn(257, generator=draw) * 10.0**worker, torch.randint(
        1 << 40, (3,), generator=draw
    )


def sum_everywhere(rank, directory, name, workers):
    """Sum in worlds of every size, and return the bits of the sums by world size."""
    reduction = TreeSum() if name == "tree" else NaiveRing()
    plan = Plan(workers=workers, microbatch=1)
    sums = {}
    for world_size in range(1, workers + 1):
        if rank < world_size:
            with world(rank, world_size, Path(directory) / f"{name}-{workers}-{world_size}"):
                floats, wholes = reduction(leaf, plan, like=leaf(0))
            sums[world_size] = floats.numpy().tobytes(), wholes.numpy().tobytes()
    return sums


class Dies:
    """Checkpointing whose second process dies as it saves."""

    def save(self, path, state, step):
        del path, state, step
        if torch.distributed.get_rank() == 1:
            os._exit(3)
        torch.distributed.barrier()

    def load(self, path, state):
        raise AssertionError(path, state)


class Crashes:
    """Checkpointing that raises."""

    def save(self, path, state, step):
        raise OSError("no space left") from ValueError(path, state, step)

    def load(self, path, state):
        raise AssertionError(path, state)
