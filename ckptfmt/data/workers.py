"""Which of how many workers this process is, where its samples are dealt out."""

from __future__ import annotations

import os
import sys

from ckptfmt.errors import Code, err


def check_worker(worker: tuple[int, int], size: int) -> None:
    """Check the number and the count of a worker, and that each has something of `size` samples.

    Raises: StateError(ARGUMENT).
    """
    number, count = worker
    if not 0 <= number < count:
        raise err(Code.ARGUMENT, f"there is no worker {number} of {count}")
    if count > size:
        raise err(Code.ARGUMENT, f"a batch, or micro-batch, of {size} samples can't be spread over {count} workers")


def distributed_worker() -> tuple[int, int]:
    """Return rank and world size of torch.distributed; who didn't import it is alone."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    # Every rank of a launcher would read the same samples, and nothing would say so.
    if os.environ.get("WORLD_SIZE", "1") not in ("", "1"):
        detail = f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, and torch.distributed isn't initialised"
        raise err(Code.WRITERS_UNKNOWN, detail, remedy="Initialise torch.distributed first, or pass worker=(i, n).")
    return 0, 1
