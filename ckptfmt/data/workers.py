"""The number of this process among the workers of a batch, and the number of workers."""

from __future__ import annotations

import os
import sys
from typing import Final

from ckptfmt.errors import Code, err


def check_worker(worker: tuple[int, int], size: int) -> None:
    """Check the number and count of a worker, and that each worker gets some of `size` samples.

    Raises: StateError(ARGUMENT).
    """
    number, count = worker
    if not 0 <= number < count:
        raise err(Code.ARGUMENT, f"there is no worker {number} of {count}")
    if count > size:
        raise err(
            Code.ARGUMENT,
            f"a batch, or micro-batch, of {size} samples can't be spread over {count} workers",
        )


def distributed_worker() -> tuple[int, int]:
    """Return rank and world size of torch.distributed; (0, 1) without torch.distributed.

    Raises: StateError(WRITERS_UNKNOWN) in a launched job without an initialised process group.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    # Otherwise all ranks would silently read the same samples.
    if os.environ.get("WORLD_SIZE", "1") not in ("", "1"):
        detail = (
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, and torch.distributed isn't initialised"
        )
        raise err(
            Code.WRITERS_UNKNOWN,
            detail,
            remedy="Initialise torch.distributed first, or pass worker=(i, n).",
        )
    return 0, 1


#: Number of callers in which the iterator of a DataLoader is searched: samplers may be wrapped.
_CALLERS: Final = 8


def count_primed() -> int:
    """Return how many batches a DataLoader requests before the loop takes the first.

    A DataLoader of torch requests ``prefetch_factor`` batches for each worker process when its
    iterator is made, and then a batch for each batch taken. The DataLoader doesn't inform the
    sampler: the iterator is searched among the callers of the sampler's iterator. Without
    such a caller the result is 0.
    """
    frame = sys._getframe(1)  # noqa: SLF001
    for _ in range(_CALLERS):
        if frame.f_back is None:
            break
        frame = frame.f_back
        attributes = getattr(frame.f_locals.get("self"), "__dict__", {})
        workers = attributes.get("_num_workers")
        factor = attributes.get("_prefetch_factor")
        if isinstance(workers, int):
            return workers * factor if isinstance(factor, int) else 0
    return 0
