"""The samples of each step of a plan, computed draw by draw: an oracle without implementations.

The oracle is written from spec/context/64-cursor.md and spec/companions/63-mixtures.md alone, in
plain Python, and prefers simplicity to speed.
"""

from __future__ import annotations

import functools
import itertools
import math
import struct
from collections.abc import Iterator
from typing import NamedTuple

from blake3 import blake3

from ckptfmt_conformance.trajectories.plans import DataPlan, Skip

__all__ = ["Drawn", "ledger_of", "order_of_epoch", "steps_of"]

_WORD = 1 << 64


class Drawn(NamedTuple):
    """The content of a position.

    Attributes:
        source: the name of the source.
        sample: the number of the sample in the source.
        weight: the weight of its loss; None where the position has no sample.
        epoch: the epoch of the source.
    """

    source: str
    sample: int
    weight: int | None
    epoch: int


def _mix(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % _WORD
    x = (x ^ x >> 27) * 0x94D049BB133111EB % _WORD
    return x ^ x >> 31


@functools.lru_cache(maxsize=256)
def order_of_epoch(n: int, seed: int, epoch: int) -> tuple[int, ...]:
    """Return an epoch of the order ``feistel-v1``.

    >>> order_of_epoch(10, 0, 0)
    (3, 1, 4, 2, 8, 5, 9, 6, 0, 7)
    """
    high = math.isqrt(n - 1) + 1
    low = -(-n // high)
    content = blake3(b"ckptfmt/feistel-v1" + struct.pack("<QQ", seed, epoch)).digest(length=64)
    keys = struct.unpack("<8Q", content)

    def move(place: int) -> int:
        left, right = divmod(place, low)
        for at, key in enumerate(keys):
            if at % 2:
                right = (right + ((_mix((left + key) % _WORD) >> 24) * low >> 40)) % low
            else:
                left = (left + ((_mix((right + key) % _WORD) >> 24) * high >> 40)) % high
        return left * low + right

    def settle(place: int) -> int:
        while (place := move(place)) >= n:
            pass
        return place

    return tuple(settle(place) for place in range(n))


class _Source:
    """A source, drawn sample by sample. Samples in `removed` at the time of a draw are left out."""

    def __init__(self, name: str, n: int, plan: DataPlan) -> None:
        self.removed: set[int] = set()
        seed = plan.seed
        if plan.stages:
            own = blake3(b"ckptfmt/source-v1" + struct.pack("<Q", seed) + name.encode()).digest(
                length=8
            )
            seed = int.from_bytes(own, "little")
        self.draws = self._play(name, n, seed, plan)

    def _play(self, name: str, n: int, seed: int, plan: DataPlan) -> Iterator[Drawn]:
        for epoch in itertools.count():
            order = order_of_epoch(n, seed, epoch)
            count = 0
            for at, sample in enumerate(order):
                if (
                    plan.tail == "drop"
                    and count % plan.batch == 0
                    and self._left(order[at:]) < plan.batch
                ):
                    break
                if sample not in self.removed:
                    count += 1
                    yield Drawn(name, sample, 1, epoch)
            if plan.tail == "pad_masked":
                kept = [sample for sample in order if sample not in self.removed]
                for sample in itertools.islice(itertools.cycle(kept), -count % plan.batch):
                    yield Drawn(name, sample, 0, epoch)

    def _left(self, rest: tuple[int, ...]) -> int:
        return sum(sample not in self.removed for sample in rest)


def steps_of(plan: DataPlan, count: int) -> list[list[Drawn]]:
    """Return the content of the first steps of a plan, position by position.

    >>> from ckptfmt_conformance.trajectories.plans import DataPlan
    >>> (step,) = steps_of(DataPlan(sources=(("data", 10),), batch=4, seed=0), 1)
    >>> [drawn.sample for drawn in step]
    [3, 1, 4, 2]
    """
    sources = {name: _Source(name, n, plan) for name, n in plan.sources}
    drawn = []
    for position in range(count * plan.batch):
        for skip in plan.skips:
            if skip.policy == "shift" and _begin_of(skip, plan) == position:
                _shift(skip, plan, sources)
        drawn.append(_after_skips(next(sources[_source_at(plan, position)].draws), position, plan))
    return [drawn[at : at + plan.batch] for at in range(0, len(drawn), plan.batch)]


def _source_at(plan: DataPlan, position: int) -> str:
    if not plan.stages:
        return plan.sources[0][0]
    block = sum(plan.stages[0][1])
    number, within = divmod(position, block)
    counts = [counts for begin, counts in plan.stages if begin <= number * block][-1]
    rank = order_of_epoch(block, plan.seed, number)[within]
    for (name, _), total in zip(plan.sources, itertools.accumulate(counts), strict=True):
        if total > rank:
            return name
    raise AssertionError(f"the counts {counts} don't fill a block of {block}")


def _begin_of(skip: Skip, plan: DataPlan) -> int:
    return skip.said * plan.batch if skip.positions is None else skip.positions[0]


def _shift(skip: Skip, plan: DataPlan, sources: dict[str, _Source]) -> None:
    if skip.positions is None:
        sources[skip.source].removed |= _members(skip)
        return
    for position in range(*skip.positions):
        next(sources[_source_at(plan, position)].draws)


def _members(skip: Skip) -> set[int]:
    return set(skip.samples if skip.shard is None else range(skip.shard[1], skip.shard[2]))


def _after_skips(drawn: Drawn, position: int, plan: DataPlan) -> Drawn:
    """Return a draw after the skips that apply to its position."""
    policies = set()
    for skip in plan.skips:
        if skip.positions is not None:
            applies = skip.positions[0] <= position < skip.positions[1]
        else:
            begun = position >= _begin_of(skip, plan)
            applies = begun and drawn.source == skip.source and drawn.sample in _members(skip)
        if applies:
            policies.add(skip.policy)
    if "hole" in policies:
        return drawn._replace(weight=None)
    return drawn._replace(weight=0) if "mask" in policies else drawn


def ledger_of(steps: list[list[Drawn]]) -> tuple[int, str]:
    """Return count and digest, ``mix64-add4-v1``, of the consumed samples with a weight above 0.

    >>> ledger_of([])
    (0, '0000000000000000000000000000000000000000000000000000000000000000')
    """
    members = [drawn for step in steps for drawn in step if drawn.weight]
    sums = [0, 0, 0, 0]
    for drawn in members:
        content = b"ckptfmt/ledger-v1" + struct.pack("<Q", drawn.epoch) + drawn.source.encode()
        keys = struct.unpack("<4Q", blake3(content).digest())
        sums = [
            (total + _mix((drawn.sample + key) % _WORD)) % _WORD
            for total, key in zip(sums, keys, strict=True)
        ]
    return len(members), struct.pack("<4Q", *sums).hex()
