"""Arithmetic in an order independent of the number of processes: gradient norm, and one thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

__all__ = ["BLOCK_ELEMENTS", "grad_norm", "pin_arithmetic"]

#: The number of elements of a tensor whose squares are summed by one kernel.
BLOCK_ELEMENTS: Final = 1 << 16


def grad_norm(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the Euclidean norm of all gradients together, as float32 from sums in float64.

    The elements of each tensor are cut into fixed blocks by their flat index. The sums of the
    blocks are added one after another. A process with only some blocks can compute the sums of
    these, and the total is the same.

    >>> grad_norm([torch.tensor([3.0]), torch.tensor([[4.0]])])
    tensor(5.)
    """
    total = torch.zeros((), dtype=torch.float64, device=gradients[0].device if gradients else None)
    for gradient in gradients:
        for block in torch.split(gradient.reshape(-1), BLOCK_ELEMENTS):
            total = total + block.double().square().sum()
    return total.sqrt().float()


def pin_arithmetic() -> None:
    """Set one thread and deterministic kernels for this process. Call this function first.

    The call is needed for one process too: a launcher sets one thread only where several processes
    start, and sums depend on the number of threads.
    """
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode=True)
