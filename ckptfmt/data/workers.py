"""Which of how many workers this process is, where its samples are dealt out."""

from __future__ import annotations

import os
import sys
from typing import Final

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


#: How many callers up the iterator of a DataLoader is looked for: samplers may be wrapped.
_CALLERS: Final = 8


def count_primed() -> int:
    """Return how many batches the DataLoader that iterates in the calling frames requests before the first is taken.

    A DataLoader of torch requests ``prefetch_factor`` batches for each worker process as its iterator is made, and from
    then on one for each batch that is taken. Its iterator is found among the callers of the sampler's iterator, since
    the DataLoader doesn't tell its sampler. Where there is none, no batch is requested ahead.
    """
    frame = sys._getframe(1)  # noqa: SLF001 - the way to the callers that inspect.currentframe takes
    for _ in range(_CALLERS):
        if frame.f_back is None:
            break
        frame = frame.f_back
        attributes = getattr(frame.f_locals.get("self"), "__dict__", {})
        workers, factor = attributes.get("_num_workers"), attributes.get("_prefetch_factor")
        if isinstance(workers, int):
            return workers * factor if isinstance(factor, int) else 0
    return 0
