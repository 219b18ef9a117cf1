"""The control of the reference trainer: the usual sum within each process, then around a ring."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ckptfmt_conformance.elastic.plan import Plan
from ckptfmt_conformance.elastic.tree import Leaf, Sums, add, place

__all__ = ["NaiveRing"]


class NaiveRing:
    """A sum in an order that depends on the number of processes.

    The sum is correct and fast, but its bits differ for each number.
    """

    # Part of `Reduction`'s signature.
    def __call__(self, leaf: Leaf, plan: Plan, *, like: Sums) -> Sums:  # noqa: ARG002
        """Return the sum of `leaf` over all logical workers, on every process."""
        rank, world_size = place()
        first, *others = plan.owned(rank, world_size)
        own = leaf(first)
        for worker in others:
            own = add(own, leaf(worker))
        return own if world_size == 1 else (_ring(own[0]), _ring(own[1]))


def _ring(vector: torch.Tensor) -> torch.Tensor:
    """Reduce and scatter around the ring, then gather.

    Each part's sum begins at another process.
    """
    rank, world_size = place()
    parts = list(torch.tensor_split(vector.clone(), world_size))
    for turn in range(2 * (world_size - 1)):
        sent = parts[(rank - turn) % world_size]
        taken = parts[(rank - turn - 1) % world_size]
        received = _pass_on(sent, torch.empty_like(taken))
        if turn < world_size - 1:
            taken += received
        else:
            taken.copy_(received)
    return torch.cat(parts)


def _pass_on(sent: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
    """Send a part to the next process, and return the part of the preceding process."""
    rank, world_size = place()
    after = (rank + 1) % world_size
    before = (rank - 1) % world_size
    sending = dist.isend(sent.clone(), dst=after)
    dist.recv(received, src=before)
    if sending is not None:
        sending.wait()
    return received
