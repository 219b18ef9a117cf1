"""Sums in a fixed order: over the logical workers of all processes, and over a step's microbatches.

Both sums use the same tree, ``binary-v1``: a node of n leaves is split after the largest power of
two below n, and its value is the left part plus the right part. Communication only copies values.
Every addition is done here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist

from ckptfmt_conformance.elastic.plan import Plan, split_node

__all__ = ["Leaf", "Reduction", "Sums", "TreeSum", "WindowSum"]

#: The summands: a vector of fractions and a vector of integers.
Sums: TypeAlias = tuple[torch.Tensor, torch.Tensor]
#: Computes the contribution of a logical worker; called once for each own worker, in order.
Leaf: TypeAlias = Callable[[int], Sums]


class Reduction(Protocol):
    """A sum over all logical workers. Every process calls the sum, and gets the same bits."""

    def __call__(self, leaf: Leaf, plan: Plan, *, like: Sums) -> Sums:
        """Return the sum of `leaf` over all logical workers; `like` has the shapes and dtypes."""


def add(left: Sums, right: Sums) -> Sums:
    """Return the sum of two nodes. The order of the operands decides the sign of a NaN."""
    return left[0] + right[0], left[1] + right[1]


def place() -> tuple[int, int]:
    """Return this process's rank and the number of processes; (0, 1) without torch.distributed."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


class TreeSum:
    """A sum over the logical workers on the fixed tree, which all processes receive.

    A node belongs to the process that owns its leftmost leaf. All processes walk the tree in the
    same order, left before right, so each send meets its receive. A process skips nodes without
    leaves of its own. The number of vectors in memory is at most the depth of the tree.

    >>> leaf = lambda worker: (torch.tensor([1.0 * worker]), torch.tensor([1]))
    >>> TreeSum()(leaf, Plan(workers=8, microbatch=1), like=leaf(0))
    (tensor([28.]), tensor([8]))
    """

    def __call__(self, leaf: Leaf, plan: Plan, *, like: Sums) -> Sums:
        """Return the sum of `leaf` over all logical workers, on every process."""
        rank, world_size = place()
        root = self._node(0, plan.workers, leaf, plan, like)
        if world_size > 1:
            root = root if root is not None else empty_like(like)
            for vector in root:
                dist.broadcast(vector, src=plan.owner(0, world_size))
        if root is None:
            raise ValueError(f"rank {rank} of {world_size} has no part in the tree")
        return root

    def _node(self, begin: int, end: int, leaf: Leaf, plan: Plan, like: Sums) -> Sums | None:
        """Return the sum of leaves `begin` to `end` on the node's owner; None elsewhere."""
        rank, world_size = place()
        owned = plan.owned(rank, world_size)
        if owned.start >= end or owned.stop <= begin:
            return None
        if end - begin == 1:
            return leaf(begin)
        middle = split_node(begin, end)
        left = self._node(begin, middle, leaf, plan, like)
        right = self._node(middle, end, leaf, plan, like)
        to = plan.owner(begin, world_size)
        source = plan.owner(middle, world_size)
        if to != source:
            right = _hand_over(right, to, source, like)
        return None if left is None or right is None or rank != to else add(left, right)


def _hand_over(node: Sums | None, to: int, source: int, like: Sums) -> Sums | None:
    """Move a node from one process to another. Other processes return without communication."""
    rank = dist.get_rank()
    if rank == source and node is not None:
        for vector in node:
            dist.send(vector, dst=to)
    elif rank == to:
        node = empty_like(like)
        for vector in node:
            dist.recv(vector, src=source)
    return node


def empty_like(like: Sums) -> Sums:
    """Return vectors to receive into."""
    return torch.empty_like(like[0]), torch.empty_like(like[1])


class WindowSum:
    """A running sum over the microbatches of a step, on the same tree, with a state to save.

    The slots work like a binary counter: slot k holds the sum of 2**k microbatches where bit k of
    the count is set. So the sums of an incomplete window are a state of the run, the same on every
    process.

    >>> window = WindowSum()
    >>> for value in (1.0, 2.0, 4.0):
    ...     window.push((torch.tensor([value]), torch.tensor([1])))
    >>> window.count, sorted(window.slots), window.total()
    (3, [0, 1], (tensor([7.]), tensor([3])))
    """

    def __init__(self) -> None:
        self.count = 0
        self.slots: dict[int, Sums] = {}

    def push(self, sums: Sums) -> None:
        """Add a microbatch."""
        slot = 0
        while slot in self.slots:
            sums = add(self.slots.pop(slot), sums)
            slot += 1
        self.slots[slot] = sums
        self.count += 1

    def total(self) -> Sums:
        """Return the sum of all microbatches. The window is unchanged.

        Raises: ValueError where the window is empty.
        """
        if not self.slots:
            raise ValueError("there is nothing to sum")
        first, *others = (self.slots[slot] for slot in sorted(self.slots))
        total = first
        for sums in others:
            total = add(sums, total)
        return total

    def clear(self) -> None:
        """Begin a new window."""
        self.count = 0
        self.slots = {}

    def state_dict(self) -> dict[str, object]:
        """Return the number of microbatches, and the slots in use."""
        slots = {str(slot): list(sums) for slot, sums in sorted(self.slots.items())}
        return {"count": self.count, "slots": slots}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with a saved window.

        Raises: ValueError where the slots contradict the number of microbatches.
        """
        count = state["count"]
        slots = state["slots"]
        loaded = {
            int(slot): (floats.clone(), wholes.clone()) for slot, (floats, wholes) in slots.items()
        }
        if sum(1 << slot for slot in loaded) != count:
            raise ValueError(f"slots {sorted(loaded)} aren't those of {count} microbatches")
        self.count = count
        self.slots = loaded
