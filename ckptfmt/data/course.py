"""The course of a run through its data: the sample at each position, as a pure function.

The inputs are a cursor's description of the order. Each position has a sample of a source, or no
sample where a skip left a hole. The sample counts, or has weight zero. The course doesn't depend on
rank, world size, worker process or fetched batches: equal positions give equal results.

The draws of a source are its endless order, without the samples that skips remove, and cut or
filled up at the end of each epoch. Draw k is the source's k-th sample, from 0. Between two skips
that remove samples, draws are a closed form of k. The course is therefore a short list of
stretches, and any draw is computed without the draws before it.

Spec: REQ-CUR-012, REQ-CUR-013, REQ-CUR-016, REQ-CUR-018.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import struct
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from ckptfmt.data.cursor import BatchPlan, Cursor, Ledger, Mixture, Source, check_rules
from ckptfmt.data.cursor_map import PosSkip, SampleSkip, ShardSkip, Skip
from ckptfmt.data.shuffle import mix64, positions_of, sample_indices, samples_at
from ckptfmt.errors import Code, err

#: Number of draws computed at once: small enough for scratch arrays to stay in the cache.
_DRAWS: Final = 1 << 14
_NONE = np.empty(0, np.int64)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """Consecutive draws of one epoch; `is_padding` marks draws that only fill up a batch."""

    epoch: int
    samples: NDArray[np.int64]
    is_padding: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Stretch:
    """The state of a source from draw `first` on.

    Attributes:
        first: first draw of the stretch.
        epoch: epoch of that draw.
        drawn: number of the epoch's positions before that draw.
        place: place in the epoch's order at which the stretch goes on.
        removed: removed samples, ascending.
    """

    first: int
    epoch: int
    drawn: int
    place: int
    #: Samples that are removed, ascending.
    removed: NDArray[np.int64]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Epoch:
    """An epoch of a stretch, and a draw in the epoch.

    Attributes:
        behind: number of the epoch's positions before the stretch.
        first_kept: number of the first sample, counted among the samples that aren't removed.
        kept: number of samples.
        positions: number of draws.
        at: number of the draw within the epoch's draws.
    """

    epoch: int
    behind: int
    first_kept: int
    kept: int
    positions: int
    at: int


class Walk:
    """The draws of a source of `n` samples.

    >>> walk = Walk(10, seed=0, plan=BatchPlan(global_batch=4, tail="drop"))
    >>> [(draws.epoch, draws.samples.tolist()) for draws in walk.draws(6, 10)]
    [(0, [9, 6]), (1, [4, 9])]
    >>> walk.remove(8, np.array([4]))
    >>> [(draws.epoch, draws.samples.tolist()) for draws in walk.draws(6, 10)]
    [(0, [9, 6]), (1, [9, 6])]
    """

    def __init__(self, n: int, *, seed: int, plan: BatchPlan) -> None:
        self._n = n
        self._seed = seed
        self._plan = plan
        self._stretches = [_Stretch(first=0, epoch=0, drawn=0, place=0, removed=_NONE)]
        #: Places of the removed samples, by epoch and number of removed samples, which grows with
        #: each stretch.
        self._places: dict[tuple[int, int], NDArray[np.int64]] = {}

    def remove(self, draw: int, samples: NDArray[np.int64]) -> None:
        """Remove samples from the order from a draw on.

        `draw` must not be smaller than in earlier calls of `remove` and `jump`.
        """
        removed = np.union1d(self._stretches[-1].removed, samples)
        self._stretches.append(
            dataclasses.replace(self._stretch_at(draw), first=draw, removed=removed)
        )

    def jump(self, draw: int, count: int) -> None:
        """Move the draws from ``draw + count`` on to `draw`; call order as for `remove`."""
        self._stretches.append(dataclasses.replace(self._stretch_at(draw + count), first=draw))

    def epoch_at(self, draw: int) -> tuple[int, int]:
        """Return the epoch of a draw, and the number of the epoch's draws before it."""
        _, epoch = self._find(draw)
        return epoch.epoch, epoch.behind + epoch.at

    def draws(self, begin: int, end: int) -> Iterator[Draws]:
        """Yield the draws ``[begin, end)``, in order."""
        while begin < end:
            number, epoch = self._find(begin)
            later = self._stretches[number + 1].first if number + 1 < len(self._stretches) else end
            is_padding = epoch.at >= epoch.kept
            last = epoch.positions if is_padding else min(epoch.kept, epoch.positions)
            count = min(end - begin, later - begin, last - epoch.at, _DRAWS)
            kept = np.arange(epoch.at, epoch.at + count)
            removed = self._stretches[number].removed
            if is_padding:
                kept = (kept - epoch.kept) % (self._n - len(removed))
            else:
                kept += epoch.first_kept
            places = _skip_over(self._removed_places(removed, epoch.epoch), kept)
            samples = samples_at(self._n, seed=self._seed, epoch=epoch.epoch, positions=places)
            yield Draws(epoch=epoch.epoch, samples=samples, is_padding=is_padding)
            begin += count

    def _find(self, draw: int) -> tuple[int, _Epoch]:
        """Return the number of a draw's stretch, and the draw's epoch."""
        number = bisect_right([stretch.first for stretch in self._stretches], draw) - 1
        stretch = self._stretches[number]
        at = draw - stretch.first
        removed = self._removed_places(stretch.removed, stretch.epoch)
        gone = int(np.searchsorted(removed, stretch.place))
        kept = self._n - stretch.place - (len(removed) - gone)
        positions = max(0, self._plan.epoch_positions(stretch.drawn + kept) - stretch.drawn)
        if at < positions:
            return number, _Epoch(
                epoch=stretch.epoch,
                behind=stretch.drawn,
                first_kept=stretch.place - gone,
                kept=kept,
                positions=positions,
                at=at,
            )
        whole = self._n - len(stretch.removed)
        length = self._plan.epoch_positions(whole)
        epochs, at = divmod(at - positions, length)
        epoch = stretch.epoch + 1 + epochs
        return number, _Epoch(
            epoch=epoch, behind=0, first_kept=0, kept=whole, positions=length, at=at
        )

    def _stretch_at(self, draw: int) -> _Stretch:
        """Return the state of the last stretch at one of its draws."""
        _, epoch = self._find(draw)
        removed = self._stretches[-1].removed
        place = self._n
        if epoch.at < epoch.kept:
            kept = np.array([epoch.first_kept + epoch.at])
            place = int(_skip_over(self._removed_places(removed, epoch.epoch), kept)[0])
        return _Stretch(
            first=draw,
            epoch=epoch.epoch,
            drawn=epoch.behind + epoch.at,
            place=place,
            removed=removed,
        )

    def _removed_places(self, removed: NDArray[np.int64], epoch: int) -> NDArray[np.int64]:
        """Return the places of the removed samples in an epoch, ascending."""
        if not len(removed):
            return _NONE
        key = (epoch, len(removed))
        if key not in self._places:
            if len(self._places) >= 4:
                self._places.pop(next(iter(self._places)))
            self._places[key] = np.sort(
                positions_of(self._n, seed=self._seed, epoch=epoch, samples=removed)
            )
        return self._places[key]


def _skip_over(removed: NDArray[np.int64], kept: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the places of samples, given their numbers among the samples that aren't removed."""
    if not len(removed):
        return kept
    gaps = removed - np.arange(len(removed))
    return kept + np.searchsorted(gaps, kept, side="right")


def source_seed(seed: int, source_id: str) -> int:
    """Return the seed of a source's own order in a mixture.

    >>> source_seed(7, "books") == source_seed(7, "code")
    False
    """
    digest = blake3(b"ckptfmt/source-v1" + struct.pack("<Q", seed) + source_id.encode()).digest(
        length=8
    )
    (own,) = struct.unpack("<Q", digest)
    return int(own)


@dataclasses.dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of a mixture, ``block-det-v1``.

    Each block contains exactly the counts of its stage, in an order of its own. The draws of a
    source before a position are a prefix of the source's order, so that a single number describes
    them.

    Attributes:
        block: number of positions in a block.
        seed: seed of the orders within blocks.
        begins: first position of each stage.
        counts: counts per block of each stage, in the order of the sources.

    Spec: page 63. Source: mixtures by integer counts per block, as in Levanter's `MixtureDataset`.

    >>> blocks = Blocks(block=4, seed=0, begins=(0, 8), counts=((3, 1), (2, 2)))
    >>> blocks.sources_between(0, 12).tolist()
    [0, 0, 1, 0, 0, 0, 1, 0, 1, 1, 0, 0]
    >>> blocks.draws_before(12)
    (8, 4)
    """

    block: int
    seed: int
    begins: tuple[int, ...]
    counts: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, mixture: Mixture, source_ids: Sequence[str]) -> Blocks:
        """Return the blocks of a cursor's mixture."""
        return cls(
            block=mixture.block,
            seed=mixture.seed,
            begins=tuple(stage.from_pos for stage in mixture.stages),
            counts=tuple(
                tuple(stage.counts[name] for name in source_ids) for stage in mixture.stages
            ),
        )

    def sources_between(self, begin: int, end: int) -> NDArray[np.int64]:
        """Return the source's number at each of the positions ``[begin, end)``."""
        parts = [np.empty(0, np.int64)]
        while begin < end:
            number, at = divmod(begin, self.block)
            count = min(end - begin, self.block - at)
            parts.append(self._sources(number)[at : at + count])
            begin += count
        return np.concatenate(parts)

    def draws_before(self, position: int) -> tuple[int, ...]:
        """Return the number of each source's draws before a position."""
        draws = [0] * len(self.counts[0])
        whole = position // self.block * self.block
        for i, (begin, counts) in enumerate(zip(self.begins, self.counts, strict=True)):
            end = min(whole, self.begins[i + 1]) if i + 1 < len(self.begins) else whole
            blocks = max(0, end - begin) // self.block
            draws = [drawn + blocks * count for drawn, count in zip(draws, counts, strict=True)]
        rest = np.bincount(self.sources_between(whole, position), minlength=len(draws))
        return tuple(drawn + int(more) for drawn, more in zip(draws, rest, strict=True))

    def _sources(self, number: int) -> NDArray[np.int64]:
        stage = bisect_right(self.begins, number * self.block) - 1
        return _sources_of_block(self.block, self.seed, number, self.counts[stage])


@functools.lru_cache(maxsize=16)
def _sources_of_block(
    block: int, seed: int, number: int, counts: tuple[int, ...]
) -> NDArray[np.int64]:
    places = sample_indices(block, seed=seed, begin=number * block, end=(number + 1) * block)
    sources = np.searchsorted(np.cumsum(counts), places, side="right").astype(np.int64)
    sources.flags.writeable = False
    return sources


#: The ledger of no samples.
EMPTY: Final = Ledger(count=0, set_digest="0" * 64)

_LANES: Final = "<4Q"
_MASK: Final = (1 << 64) - 1


def ledger_of_samples(source_id: str, epoch: int, samples: NDArray[np.integer]) -> Ledger:
    """Return the ledger of samples of one epoch, independent of their order.

    The digest is ``mix64-add4-v1``: digests of parts add up, in any order and for any partition,
    and repeated samples count each time. So each worker can count its own part. The digest detects
    mistakes, not attacks: two multisets with equal digests can be constructed on purpose.

    Shapes: `samples` is (count,); a repeated sample counts each time.
    Spec: REQ-CUR-008.
    Source: incremental hashing by addition: M. Bellare, D. Micciancio, EUROCRYPT 1997.

    >>> once = ledger_of_samples("books", 0, np.array([3, 1, 2]))
    >>> (once == ledger_of_samples("books", 0, np.array([1, 2, 3])),
    ...  once == ledger_of_samples("books", 0, np.arange(3)))
    (True, False)
    """
    key = blake3(b"ckptfmt/ledger-v1" + struct.pack("<Q", epoch) + source_id.encode()).digest()
    values = samples.astype(np.uint64)
    sums = [
        int(mix64(values + np.uint64(word)).sum(dtype=np.uint64))
        for word in struct.unpack(_LANES, key)
    ]
    return Ledger(count=len(values), set_digest=struct.pack(_LANES, *sums).hex())


def add_ledgers(first: Ledger, second: Ledger) -> Ledger:
    """Return the ledger of the union of two multisets, with repetitions."""
    words = zip(
        *(struct.unpack(_LANES, bytes.fromhex(one.set_digest)) for one in (first, second)),
        strict=True,
    )
    sums = [(a + b) & _MASK for a, b in words]
    return Ledger(count=first.count + second.count, set_digest=struct.pack(_LANES, *sums).hex())


#: Use of the sample at a position: the sample counts, has weight zero, or is missing.
COUNTS: Final = 1
MASKED: Final = 0
HOLE: Final = -1

#: Number of positions computed at once, to bound the memory of long ranges.
_CHUNK: Final = 1 << 16
#: Largest gap between positions computed in one range.
_GAP: Final = 64
#: Most positions of such a range.
_RUN: Final = 1 << 12


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Consecutive positions, as arrays with a row for each position.

    Attributes:
        sources: number of the source, in the order of the course's sources.
        epochs: epoch of the source.
        samples: number of the sample in the source.
        uses: `COUNTS`, `MASKED` or `HOLE`.
    """

    sources: NDArray[np.int64]
    epochs: NDArray[np.uint64]
    samples: NDArray[np.int64]
    uses: NDArray[np.int8]

    @classmethod
    def empty(cls, count: int) -> Stretch:
        """Return a stretch of `count` rows to fill, all with sample 0 of source 0 in epoch 0."""
        return cls(
            sources=np.zeros(count, np.int64),
            epochs=np.zeros(count, np.uint64),
            samples=np.zeros(count, np.int64),
            uses=np.full(count, COUNTS, np.int8),
        )

    @classmethod
    def join(cls, parts: Sequence[Stretch]) -> Stretch:
        """Return the rows of several stretches."""
        return cls(
            sources=np.concatenate([part.sources for part in parts]),
            epochs=np.concatenate([part.epochs for part in parts]),
            samples=np.concatenate([part.samples for part in parts]),
            uses=np.concatenate([part.uses for part in parts]),
        )

    def take(self, rows: NDArray[np.int64]) -> Stretch:
        """Return some rows."""
        return Stretch(
            sources=self.sources[rows],
            epochs=self.epochs[rows],
            samples=self.samples[rows],
            uses=self.uses[rows],
        )


class Course:
    """The sample at each position of a run.

    Args:
        sources: sources of the cursor.
        seed: seed of the order.
        plan: batch plan of the cursor.
        mixture: mixture of the cursor; None for one source.
        skips: skips of the cursor.

    Raises: CURSOR_FORM if these arguments describe no order.

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
        self._walks = [
            Walk(source.n, seed=own, plan=plan) for source, own in zip(sources, seeds, strict=True)
        ]
        self._skips = [skip for skip in skips if skip.policy != "shift"]
        named = (skip for skip in self._skips if isinstance(skip, SampleSkip))
        self._named = {id(skip): np.array(skip.ids, np.int64) for skip in named}  # ascending
        for skip in sorted(
            (skip for skip in skips if skip.policy == "shift"), key=lambda skip: skip.begin
        ):
            self._shift(skip)

    def draws_before(self, position: int) -> tuple[int, ...]:
        """Return the number of each source's draws before a position."""
        return (position,) if self._blocks is None else self._blocks.draws_before(position)

    def epoch_at(self, position: int) -> tuple[int, int]:
        """Return the first source's epoch at a position, and the number of earlier draws."""
        return self._walks[0].epoch_at(self.draws_before(position)[0])

    def sample_at(self, position: int) -> tuple[str, int]:
        """Return source and sample at a position, even if a skip leaves the sample out."""
        stretch = self._draw(position, position + 1)
        return self._ids[int(stretch.sources[0])], int(stretch.samples[0])

    def stretch(self, begin: int, end: int) -> Stretch:
        """Return the sources, epochs, samples and uses of the positions ``[begin, end)``."""
        stretch = self._draw(begin, end)
        for policy, use in (("mask", MASKED), ("hole", HOLE)):
            for skip in self._skips:
                if skip.policy == policy and skip.begin < end:
                    self._use(stretch, skip, begin, use)
        return stretch

    def at(self, positions: Sequence[int]) -> Stretch:
        """Return the sources, epochs, samples and uses of ascending positions."""
        parts = [Stretch.empty(0)]
        edges = [
            i
            for i, (before, after) in enumerate(itertools.pairwise(positions), 1)
            if after - before > _GAP
        ]
        for first, last in itertools.pairwise([0, *edges, len(positions)]):
            for begin in range(first, last, _RUN):
                some = positions[begin : min(last, begin + _RUN)]
                rows = np.array([position - some[0] for position in some], np.int64)
                parts.append(self.stretch(some[0], some[-1] + 1).take(rows))
        return Stretch.join(parts)

    def ledger(self, begin: int, end: int) -> Ledger:
        """Return the ledger of the counting samples in ``[begin, end)``. Spec: REQ-CUR-021."""
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
        samples = np.concatenate(
            [np.arange(begin, end, dtype=np.int64) for begin, end in skip.ranges()]
        )
        self._walks[source].remove(before[source], samples)

    def _use(self, stretch: Stretch, skip: Skip, begin: int, use: int) -> None:
        first = max(0, skip.begin - begin)
        if isinstance(skip, PosSkip):
            stretch.uses[first : max(0, skip.range[1] - begin)] = use
            return
        samples = stretch.samples[first:]
        named = stretch.sources[first:] == self._ids.index(skip.source)
        stretch.uses[first:][named & self._are_in(skip, samples)] = use

    def _are_in(
        self, skip: SampleSkip | ShardSkip, samples: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        if isinstance(skip, ShardSkip):
            return (samples >= skip.range[0]) & (samples < skip.range[1])
        ids = self._named[id(skip)]
        found: NDArray[np.bool_] = (
            ids[np.minimum(np.searchsorted(ids, samples), len(ids) - 1)] == samples
        )
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
    """Yield source, epoch and samples, for the samples that count."""
    counting = stretch.uses == COUNTS
    for source in np.unique(stretch.sources).tolist():
        rows = np.flatnonzero(counting & (stretch.sources == source))
        # The epochs of a source ascend.
        epochs = stretch.epochs[rows]
        edges = np.flatnonzero(epochs[1:] != epochs[:-1]) + 1
        for part in np.split(rows, edges) if len(rows) else []:
            yield source, int(stretch.epochs[part[0]]), stretch.samples[part]


def check_order(cursor: Cursor) -> None:
    """Check a cursor's order: its positions and its check sample must be those computed here.

    Raises: FormatError(CURSOR_FORM).
    """
    course = Course(
        cursor.sources,
        seed=cursor.order.seed,
        plan=cursor.plan,
        mixture=cursor.mixture,
        skips=cursor.skips,
    )
    _check_vector(cursor, course)
    _check_stand(cursor, course)
    _check_open(cursor, course)


def _check_vector(cursor: Cursor, course: Course) -> None:
    """Check the sample that a cursor names at a position. Spec: REQ-CUR-006."""
    vector = cursor.order.vector_check
    source, sample = course.sample_at(vector.pos)
    if sample != vector.id or vector.source not in (None, source):
        detail = (
            f"the order has sample {sample} of {source!r} at position {vector.pos}, the"
            f" cursor says {vector.id}"
        )
        raise err(
            Code.CURSOR_FORM, detail, where="cursor/order/vector_check", requirement="REQ-CUR-006"
        )


def _check_open(cursor: Cursor, course: Course) -> None:
    """Check that each open position has a sample that counts. Spec: REQ-PIP-004."""
    positions = [] if cursor.pipeline is None else list_positions(cursor.pipeline.open)
    lacking = np.flatnonzero(course.at(positions).uses != COUNTS)
    if len(lacking):
        detail = f"position {positions[int(lacking[0])]} is open, but has no sample that counts"
        raise err(Code.CURSOR_FORM, detail, where="cursor/pipeline/open", requirement="REQ-PIP-004")


def list_positions(bounds: Sequence[int]) -> list[int]:
    """Return the positions in ranges, given as begins and ends, alternately.

    >>> list_positions([2, 4, 7, 8])
    [2, 3, 7]
    """
    return [
        position
        for begin, end in zip(bounds[::2], bounds[1::2], strict=True)
        for position in range(begin, end)
    ]


def list_bounds(positions: Sequence[int]) -> list[int]:
    """Return begins and ends of the ranges of ascending positions, alternately.

    >>> list_bounds([2, 3, 7])
    [2, 4, 7, 8]
    """
    bounds: list[int] = []
    for position in positions:
        if bounds and bounds[-1] == position:
            bounds[-1] = position + 1
        else:
            bounds += (position, position + 1)
    return bounds


def _check_stand(cursor: Cursor, course: Course) -> None:
    """Check the positions that a cursor names for its sources. Spec: REQ-CUR-014."""
    commit = cursor.commit
    if cursor.mixture is None:
        said: object = (commit.epoch, commit.pos_in_epoch)
        computed: object = course.epoch_at(commit.global_pos)
    else:
        said = tuple(one.pos for one in cursor.sources)
        computed = course.draws_before(commit.global_pos)
    if said != computed:
        detail = (
            f"at position {commit.global_pos} the sources stand at {computed}, the cursor"
            f" says {said}"
        )
        raise err(Code.CURSOR_FORM, detail, where="cursor/commit", requirement="REQ-CUR-014")
