"""A process group of torch.distributed for one leg of a cell. The processes outlive the group."""

from __future__ import annotations

import contextlib
import datetime as dt
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch.distributed as dist

__all__ = ["DEADLINE_S", "world"]

#: The time limit of each wait for other processes, in seconds.
DEADLINE_S: Final = 30.0


@contextlib.contextmanager
def world(rank: int, world_size: int, meeting: Path, *, wrapped: bool = False) -> Iterator[None]:
    """Join a process group for the duration of the context.

    Objects of the group must be released in it.

    Args:
        meeting: a new file path, the same for all processes of the group, and different for each
            group.
        wrapped: whether DDP or FSDP2 wraps models in the group. Such models refer to the process
            group in reference cycles. If a model is freed after the group's destruction, the last
            reference to the group's threads goes with it. The process may then deadlock with a
            thread that waits for the interpreter's lock.
    """
    timeout = dt.timedelta(seconds=DEADLINE_S)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=world_size, timeout=timeout
    )  # fmt: skip
    try:
        yield
        dist.barrier()  # no process leaves while another still waits for its data
        if wrapped:
            gc.collect()
    finally:
        dist.destroy_process_group()
