"""A world of torch.distributed that lives for one leg of a cell: processes stay, and meet anew in another number."""

from __future__ import annotations

import contextlib
import datetime as dt
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch.distributed as dist

__all__ = ["DEADLINE_S", "world"]

#: How long one process waits for the others, in seconds.
DEADLINE_S: Final = 30.0


@contextlib.contextmanager
def world(rank: int, world_size: int, meeting: Path, *, wrapped: bool = False) -> Iterator[None]:
    """Be one process of a world. What was made in it must be let go by the end of it.

    Args:
        meeting: a file that doesn't exist yet, the same for all processes and for no other world.
        wrapped: whether models are wrapped by DDP or FSDP2 in it. Those hold on to the process group, in cycles; if one
            is freed after the group was destroyed, the last hold on the group's threads goes with it, and the process
            may wait forever: for a thread that waits for the interpreter's lock.
    """
    timeout = dt.timedelta(seconds=DEADLINE_S)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=world_size, timeout=timeout
    )  # fmt: skip
    try:
        yield
        dist.barrier()  # nobody leaves while another still waits for what he sent
        if wrapped:
            gc.collect()
    finally:
        dist.destroy_process_group()
