"""Arithmetic whose order doesn't follow the number of processes: the norm of a gradient; and one thread for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

__all__ = ["BLOCK_ELEMENTS", "grad_norm", "pin_arithmetic"]

#: Elements of a tensor whose squares are summed by one kernel.
BLOCK_ELEMENTS: Final = 1 << 16


def grad_norm(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the Euclidean norm of all gradients together, float32 from sums in float64.

    Each tensor's elements are cut into fixed blocks by their flat index; the sums of the blocks are added one after
    another. Whoever holds only some blocks can compute theirs, and the sum is the same.

    >>> grad_norm([torch.tensor([3.0]), torch.tensor([[4.0]])])
    tensor(5.)
    """
    total = torch.zeros((), dtype=torch.float64, device=gradients[0].device if gradients else None)
    for gradient in gradients:
        for block in torch.split(gradient.reshape(-1), BLOCK_ELEMENTS):
            total = total + block.double().square().sum()
    return total.sqrt().float()


def pin_arithmetic() -> None:
    """Use one thread and deterministic kernels in this process; call it first, with any number of processes.

    A launcher sets one thread only where it starts several processes, and sums depend on how many threads share them.
    """
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode=True)
