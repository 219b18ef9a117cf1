"""The fixed shape of a run, independent of the number of processes: `Plan`."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Final

__all__ = ["TREE", "Plan", "split_node"]

#: The version of the shape of the summation tree: see `split_node`.
TREE: Final = "binary-v1"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The logical shape of a run: logical workers, their samples, and their random numbers.

    Attributes:
        workers: the number of logical workers, and the greatest number of processes.
        microbatch: the number of samples of a logical worker in a microbatch.
        accumulate: the number of microbatches of each logical worker in a step.
        seed: the seed of all random-number streams.

    Raises: ValueError.

    >>> plan = Plan(workers=8, microbatch=2, accumulate=2)
    >>> plan.global_batch, [list(plan.owned(rank, 3)) for rank in range(3)]
    (32, [[0, 1], [2, 3, 4], [5, 6, 7]])
    >>> plan.samples(step=1, micro=0, worker=3)
    range(38, 40)
    """

    workers: int
    microbatch: int
    accumulate: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("workers", "microbatch", "accumulate"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it's at least 1")

    @property
    def global_batch(self) -> int:
        """The number of samples in a step, over all logical workers."""
        return self.workers * self.microbatch * self.accumulate

    def owned(self, rank: int, world_size: int) -> range:
        """Return the logical workers of a process.

        They are neighbours, so most sums of the tree need no other process.

        Raises: ValueError for more processes than logical workers.
        """
        if not 0 <= rank < world_size <= self.workers:
            raise ValueError(
                f"rank {rank} of {world_size} can't share {self.workers} logical workers"
            )
        return range(rank * self.workers // world_size, (rank + 1) * self.workers // world_size)

    def owner(self, worker: int, world_size: int) -> int:
        """Return the rank of the process that owns a logical worker.

        >>> plan = Plan(workers=8, microbatch=1)
        >>> [plan.owner(worker, 3) for worker in range(8)]
        [0, 0, 1, 1, 1, 2, 2, 2]
        """
        return ((worker + 1) * world_size - 1) // self.workers

    def samples(self, *, step: int, micro: int, worker: int) -> range:
        """Return the positions, in the order of the data, of a logical worker's microbatch.

        Successive microbatches take successive positions, so the consumed samples are always a
        prefix of the data.
        """
        begin = ((step * self.accumulate + micro) * self.workers + worker) * self.microbatch
        return range(begin, begin + self.microbatch)

    def stream_seed(self, *, step: int, micro: int, worker: int) -> int:
        """Return the seed, of 63 bits, of a logical worker's random numbers in a microbatch.

        The seed follows from the plan alone. So no stream has to be saved, and a new process lacks
        none.

        >>> Plan(workers=2, microbatch=1, seed=7).stream_seed(step=0, micro=0, worker=1)
        7877775670117797738
        """
        name = f"elastic-rng-v1 {self.seed} {step} {micro} {worker}"
        return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") >> 1

    def as_tree(self) -> dict[str, int | str]:
        """Return the plan, with the version of its summation tree, as a tree to save."""
        return {**dataclasses.asdict(self), "tree": TREE}

    def check_same(self, saved: Mapping[str, object]) -> None:
        """Check that a saved run has the same plan. A different plan would make a different run.

        Raises: ValueError.
        """
        ours = self.as_tree()
        for key in sorted(ours.keys() | saved.keys()):
            if saved.get(key) != ours.get(key):
                raise ValueError(
                    f"the saved run has {key} {saved.get(key)!r}, this one {ours.get(key)!r}: "
                    "make the trainer with the plan that the run began with"
                )


def split_node(begin: int, end: int) -> int:
    """Return the split position of a tree node.

    The left part is the largest power of two below the node's size.

    >>> split_node(0, 8), split_node(0, 7), split_node(4, 7)
    (4, 4, 6)
    """
    return begin + (1 << (end - begin - 1).bit_length() - 1)
