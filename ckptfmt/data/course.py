"""The course of a run through its data: what each position has, as a pure function of what a cursor says of the order.

A position has a sample of a source, or, past a skip, nothing; and the sample counts, or has weight zero. The course
knows of no rank, world size, worker process or fetched batch: whoever asks for the same positions is told the same.

Spec: REQ-CUR-012, REQ-CUR-013, REQ-CUR-016, REQ-CUR-018.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from ckptfmt.data.draws import Blocks, Draws, Walk, source_seed
from ckptfmt.data.shuffle import mix64
from ckptfmt.documents.cursor import BatchPlan, Ledger, Mixture, Source, check_rules
from ckptfmt.documents.cursor_map import PosSkip, SampleSkip, ShardSkip, Skip

#: The ledger of no samples.
EMPTY: Final = Ledger(count=0, set_digest="0" * 64)

_LANES: Final = "<4Q"
_MASK: Final = (1 << 64) - 1


def ledger_of_samples(source_id: str, epoch: int, samples: NDArray[np.integer]) -> Ledger:
    """Return the ledger of samples of one epoch, in whatever order they were consumed.

    Its digest is ``mix64-add4-v1``: those of disjoint or repeated ranges add up, in any order and however they were
    cut, so that each worker may count its own. It finds mistakes; who wants to can make two multisets of one digest.

    Shapes: `samples` is (count,); one that comes twice counts twice.
    Spec: REQ-CUR-008. Source: incremental hashing by addition: M. Bellare, D. Micciancio, EUROCRYPT 1997.

    >>> once = ledger_of_samples("books", 0, np.array([3, 1, 2]))
    >>> once == ledger_of_samples("books", 0, np.array([1, 2, 3])), once == ledger_of_samples("books", 0, np.arange(3))
    (True, False)
    """
    key = blake3(b"ckptfmt/ledger-v1" + struct.pack("<Q", epoch) + source_id.encode()).digest()
    values = samples.astype(np.uint64)
    sums = [int(mix64(values + np.uint64(word)).sum(dtype=np.uint64)) for word in struct.unpack(_LANES, key)]
    return Ledger(count=len(values), set_digest=struct.pack(_LANES, *sums).hex())


def add_ledgers(first: Ledger, second: Ledger) -> Ledger:
    """Return the ledger of both multisets together."""
    words = zip(*(struct.unpack(_LANES, bytes.fromhex(one.set_digest)) for one in (first, second)), strict=True)
    sums = [(a + b) & _MASK for a, b in words]
    return Ledger(count=first.count + second.count, set_digest=struct.pack(_LANES, *sums).hex())


#: What is made of the sample at a position: it counts, it has weight zero, or it isn't there.
COUNTS: Final = 1
MASKED: Final = 0
HOLE: Final = -1

#: Positions at a time: bounds the memory of long ranges.
_CHUNK: Final = 1 << 16


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """What positions that follow each other have, in arrays of one row for each.

    Attributes:
        sources: number of the source, in the order of the course's.
        epochs: of the source.
        samples: of the source.
        uses: `COUNTS`, `MASKED` or `HOLE`.
    """

    sources: NDArray[np.int64]
    epochs: NDArray[np.uint64]
    samples: NDArray[np.int64]
    uses: NDArray[np.int8]

    @classmethod
    def empty(cls, count: int) -> Stretch:
        """Return a stretch of the first source's first sample, `count` times: to be filled."""
        return cls(
            sources=np.zeros(count, np.int64),
            epochs=np.zeros(count, np.uint64),
            samples=np.zeros(count, np.int64),
            uses=np.full(count, COUNTS, np.int8),
        )


class Course:
    """What each position has.

    Args:
        sources: of the cursor.
        seed: of the order.
        plan: of the cursor.
        mixture: of the cursor; None for one source.
        skips: of the cursor.

    Raises: CURSOR_FORM when no order can be made of these.

    >>> books = Source(id="books", fingerprint=None, n=10)
    >>> skip = SampleSkip(policy="shift", from_pos=2, reason="corrupt", source="books", ids=(4,))
    >>> course = Course([books], seed=0, plan=BatchPlan(global_batch=4), skips=[skip])
    >>> course.stretch(0, 9).samples.tolist()
    [3, 1, 2, 8, 5, 9, 6, 0, 7]
    >>> course.epoch_at(9)
    (1, 0)
    """

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        seed: int,
        plan: BatchPlan,
        mixture: Mixture | None = None,
        skips: Sequence[Skip] = (),
    ) -> None:
        check_rules(plan, tuple(sources), mixture, tuple(skips), "cursor")
        self._ids = tuple(source.id for source in sources)
        self._blocks = None if mixture is None else Blocks.of(mixture, self._ids)
        seeds = [seed if mixture is None else source_seed(seed, source.id) for source in sources]
        self._walks = [Walk(source.n, seed=own, plan=plan) for source, own in zip(sources, seeds, strict=True)]
        self._skips = [skip for skip in skips if skip.policy != "shift"]
        named = (skip for skip in self._skips if isinstance(skip, SampleSkip))
        self._named = {id(skip): np.array(skip.ids, np.int64) for skip in named}  # they ascend
        for skip in sorted((skip for skip in skips if skip.policy == "shift"), key=lambda skip: skip.begin):
            self._shift(skip)

    def draws_before(self, position: int) -> tuple[int, ...]:
        """Return how many draws each source has made before a position."""
        return (position,) if self._blocks is None else self._blocks.draws_before(position)

    def epoch_at(self, position: int) -> tuple[int, int]:
        """Return the first source's epoch at a position, and how many draws of the epoch lie before it."""
        return self._walks[0].epoch_at(self.draws_before(position)[0])

    def sample_at(self, position: int) -> tuple[str, int]:
        """Return source and sample at a position, whether or not it counts."""
        stretch = self._draw(position, position + 1)
        return self._ids[int(stretch.sources[0])], int(stretch.samples[0])

    def stretch(self, begin: int, end: int) -> Stretch:
        """Return what the positions ``[begin, end)`` have."""
        stretch = self._draw(begin, end)
        for policy, use in (("mask", MASKED), ("hole", HOLE)):
            for skip in self._skips:
                if skip.policy == policy and skip.begin < end:
                    self._use(stretch, skip, begin, use)
        return stretch

    def ledger(self, begin: int, end: int) -> Ledger:
        """Return the ledger of the samples that count at the positions ``[begin, end)``. Spec: REQ-CUR-021."""
        total = EMPTY
        for at in range(begin, end, _CHUNK):
            stretch = self.stretch(at, min(end, at + _CHUNK))
            for source, epoch, samples in _groups(stretch):
                total = add_ledgers(total, ledger_of_samples(self._ids[source], epoch, samples))
        return total

    def _draw(self, begin: int, end: int) -> Stretch:
        stretch = Stretch.empty(end - begin)
        if self._blocks is None:
            _fill(stretch, np.arange(end - begin), self._walks[0].draws(begin, end))
            return stretch
        stretch.sources[:] = self._blocks.sources_between(begin, end)
        for source, first in enumerate(self._blocks.draws_before(begin)):
            rows = np.flatnonzero(stretch.sources == source)
            _fill(stretch, rows, self._walks[source].draws(first, first + len(rows)))
        return stretch

    def _shift(self, skip: Skip) -> None:
        before = self.draws_before(skip.begin)
        if isinstance(skip, PosSkip):
            after = self.draws_before(skip.range[1])
            for walk, draw, until in zip(self._walks, before, after, strict=True):
                walk.jump(draw, until - draw)
            return
        source = self._ids.index(skip.source)
        samples = np.concatenate([np.arange(begin, end, dtype=np.int64) for begin, end in skip.ranges()])
        self._walks[source].remove(before[source], samples)

    def _use(self, stretch: Stretch, skip: Skip, begin: int, use: int) -> None:
        first = max(0, skip.begin - begin)
        if isinstance(skip, PosSkip):
            stretch.uses[first : max(0, skip.range[1] - begin)] = use
            return
        samples = stretch.samples[first:]
        named = stretch.sources[first:] == self._ids.index(skip.source)
        stretch.uses[first:][named & self._are_in(skip, samples)] = use

    def _are_in(self, skip: SampleSkip | ShardSkip, samples: NDArray[np.int64]) -> NDArray[np.bool_]:
        if isinstance(skip, ShardSkip):
            return (samples >= skip.range[0]) & (samples < skip.range[1])
        ids = self._named[id(skip)]
        found: NDArray[np.bool_] = ids[np.minimum(np.searchsorted(ids, samples), len(ids) - 1)] == samples
        return found


def _fill(stretch: Stretch, rows: NDArray[np.int64], draws: Iterator[Draws]) -> None:
    done = 0
    for some in draws:
        at = rows[done : done + len(some.samples)]
        stretch.epochs[at] = some.epoch
        stretch.samples[at] = some.samples
        if some.is_padding:
            stretch.uses[at] = MASKED
        done += len(some.samples)


def _groups(stretch: Stretch) -> Iterator[tuple[int, int, NDArray[np.int64]]]:
    """Yield the samples that count, by source and epoch."""
    counting = stretch.uses == COUNTS
    for source in np.unique(stretch.sources).tolist():
        rows = np.flatnonzero(counting & (stretch.sources == source))
        # The epochs of a source ascend.
        epochs = stretch.epochs[rows]
        edges = np.flatnonzero(epochs[1:] != epochs[:-1]) + 1
        for part in np.split(rows, edges) if len(rows) else []:
            yield source, int(stretch.epochs[part[0]]), stretch.samples[part]
