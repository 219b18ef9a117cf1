"""The sample at each position of a cursor: mixture, skips and tail, played step by step.

The code follows spec/context/64-cursor.md and spec/companions/63-mixtures.md in plain Python and
without a closed form: slow and simple. The vectors are made by this code, and the tests compare the
library with its results.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from blake3 import blake3

from conformance.generate.order import ledger_keys, mix, sample_at

__all__ = ["Place", "course", "ledger_of", "positions", "worker_part"]


@dataclass(frozen=True, slots=True)
class Place:
    """The content of a position.

    `use` is ``counts``, ``masked`` or ``hole``; `drawn` counts the epoch's draws before the
    position.
    """

    source: str
    epoch: int
    sample: int
    use: str
    drawn: int = field(default=0, compare=False)


@dataclass(slots=True)
class _Source:
    """A source that yields one sample after another."""

    name: str
    n: int
    seed: int
    batch: int
    tail: str
    epoch: int = -1
    drawn: int = 0
    padded: int = 0
    waiting: list[int] = field(default_factory=list)
    removed: set[int] = field(default_factory=set)

    def order(self) -> tuple[int, ...]:
        return _order(self.n, self.seed, self.epoch)

    def is_over(self) -> bool:
        at_step = self.drawn % self.batch == 0
        if self.epoch < 0:
            return True
        if self.tail == "drop":
            return at_step and len(self.waiting) < self.batch
        return not self.waiting and (self.tail == "carry" or at_step)

    def draw(self) -> tuple[int, int, str]:
        self.waiting = [sample for sample in self.waiting if sample not in self.removed]
        while self.is_over():
            self.epoch = self.epoch + 1
            self.drawn = 0
            self.padded = 0
            self.waiting = [sample for sample in self.order() if sample not in self.removed]
        self.drawn += 1
        if self.waiting:
            return self.epoch, self.waiting.pop(0), "counts"
        kept = [sample for sample in self.order() if sample not in self.removed]
        self.padded += 1
        return self.epoch, kept[(self.padded - 1) % len(kept)], "masked"


def course(cursor: Mapping[str, Any], count: int) -> Iterator[Place]:
    """Yield the content of the first `count` positions of a cursor."""
    sources = _sources(cursor)
    skips: Sequence[Mapping[str, Any]] = cursor["skips"]
    for position in range(count):
        for skip in skips:
            if skip["policy"] == "shift" and _begin(skip) == position:
                _shift(cursor, sources, skip)
        source = sources[_source_at(cursor, position)]
        epoch, sample, use = source.draw()
        policies = {skip["policy"] for skip in skips if _meets(skip, position, source.name, sample)}
        use = "hole" if "hole" in policies else "masked" if "mask" in policies else use
        yield Place(source.name, epoch, sample, use, source.drawn - 1)


def positions(cursor: Mapping[str, Any], count: int) -> dict[str, int]:
    """Return the number of the first `count` positions per source."""
    found = [_source_at(cursor, position) for position in range(count)]
    return {source["id"]: found.count(source["id"]) for source in cursor["sources"]}


def worker_part(places: Sequence[Place], worker: int, workers: int) -> list[Place]:
    """Return a worker's share of the positions of a step."""
    size = len(places)
    return [
        place
        for place in places[worker * size // workers : (worker + 1) * size // workers]
        if place.use != "hole"
    ]


def ledger_of(places: Sequence[Place]) -> dict[str, Any]:
    """Return the ledger of the counted samples."""
    sums = [0] * 4
    members = [place for place in places if place.use == "counts"]
    for place in members:
        keys = ledger_keys(place.source, place.epoch)
        sums = [
            (total + mix((place.sample + key) % 2**64)) % 2**64
            for total, key in zip(sums, keys, strict=True)
        ]
    return {
        "alg": "mix64-add4-v1",
        "count": len(members),
        "set_digest": struct.pack("<4Q", *sums).hex(),
    }


@functools.lru_cache(maxsize=4096)
def _order(n: int, seed: int, epoch: int) -> tuple[int, ...]:
    return tuple(sample_at(n, seed, epoch * n + p) for p in range(n))


def _sources(cursor: Mapping[str, Any]) -> dict[str, _Source]:
    plan = cursor["plan"]
    seed = cursor["order"]["seed"]
    found = {}
    for source in cursor["sources"]:
        name = source["id"]
        own = seed
        if "mixture" in cursor:
            digest = blake3(b"ckptfmt/source-v1" + struct.pack("<Q", seed) + name.encode()).digest()
            own = int.from_bytes(digest[:8], "little")
        found[name] = _Source(name, source["n"], own, plan["global_batch"], plan["tail"])
    return found


def _source_at(cursor: Mapping[str, Any], position: int) -> str:
    mixture = cursor.get("mixture")
    if mixture is None:
        return str(cursor["sources"][0]["id"])
    block = mixture["block"]
    begin = position - position % block
    counts = [stage for stage in mixture["stages"] if stage["from_pos"] <= begin][-1]["counts"]
    names = [source["id"] for source in cursor["sources"] for _ in range(counts[source["id"]])]
    return str(names[_order(block, mixture["seed"], position // block)[position % block]])


def _begin(skip: Mapping[str, Any]) -> int:
    return int(skip["range"][0] if skip["scope"] == "pos" else skip["from_pos"])


def _shift(
    cursor: Mapping[str, Any], sources: Mapping[str, _Source], skip: Mapping[str, Any]
) -> None:
    if skip["scope"] == "pos":
        for position in range(*skip["range"]):
            sources[_source_at(cursor, position)].draw()
    else:
        sources[skip["source"]].removed |= set(
            range(*skip["range"]) if skip["scope"] == "shard" else skip["ids"]
        )


def _meets(skip: Mapping[str, Any], position: int, source: str, sample: int) -> bool:
    if skip["scope"] == "pos":
        return bool(skip["range"][0] <= position < skip["range"][1])
    if skip["source"] != source or position < skip["from_pos"]:
        return False
    return sample in (range(*skip["range"]) if skip["scope"] == "shard" else skip["ids"])
