"""Which source each position of a mixture has, and the draws of a source.

The draws are its endless order, less what skips remove, cut or filled up at the end of each epoch.

Draw k is what the source gives when it is asked for the k-th time. Between two skips that remove something, draws are
a closed form of k; so the way is a short list of stretches, and any draw is found without those before it.
"""

from __future__ import annotations

import dataclasses
import functools
import struct
from bisect import bisect_right
from collections.abc import Iterator, Sequence

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from ckptfmt.data.shuffle import positions_of, sample_indices, samples_at
from ckptfmt.documents.cursor import BatchPlan, Mixture

#: Draws at a time: scratch arrays stay in the cache.
_CHUNK = 1 << 14
_NONE = np.empty(0, np.int64)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """Draws of one epoch that follow each other; those that only fill a batch are `is_padding`."""

    epoch: int
    samples: NDArray[np.int64]
    is_padding: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Stretch:
    """From draw `first` on: `drawn` positions of `epoch` are behind, `place` is where its order goes on."""

    first: int
    epoch: int
    drawn: int
    place: int
    #: Samples that are removed, ascending.
    removed: NDArray[np.int64]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Epoch:
    """One epoch of a stretch, and a draw in it.

    Attributes:
        behind: positions of the epoch before the stretch.
        first_kept: number of the first sample, among those that are not removed.
        kept: how many samples it has.
        positions: how many draws it has.
        at: the draw, counted in it.
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
        #: The places of removed samples, by epoch and how many are removed: that grows with each stretch.
        self._places: dict[tuple[int, int], NDArray[np.int64]] = {}

    def remove(self, draw: int, samples: NDArray[np.int64]) -> None:
        """Take samples out of the order from a draw on; draws of earlier calls are not later than this one."""
        removed = np.union1d(self._stretches[-1].removed, samples)
        self._stretches.append(dataclasses.replace(self._stretch_at(draw), first=draw, removed=removed))

    def jump(self, draw: int, count: int) -> None:
        """Let draw `draw` be what draw ``draw + count`` was, and so on; as to `draw`, see `remove`."""
        self._stretches.append(dataclasses.replace(self._stretch_at(draw + count), first=draw))

    def epoch_at(self, draw: int) -> tuple[int, int]:
        """Return the epoch that a draw lies in, and how many draws of the epoch lie before it."""
        _, epoch = self._find(draw)
        return epoch.epoch, epoch.behind + epoch.at

    def draws(self, begin: int, end: int) -> Iterator[Draws]:
        """Yield the draws ``[begin, end)``."""
        while begin < end:
            number, epoch = self._find(begin)
            later = self._stretches[number + 1].first if number + 1 < len(self._stretches) else end
            is_padding = epoch.at >= epoch.kept
            last = epoch.positions if is_padding else min(epoch.kept, epoch.positions)
            count = min(end - begin, later - begin, last - epoch.at, _CHUNK)
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
        """Return the number of a draw's stretch, and its epoch."""
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
        return number, _Epoch(epoch=epoch, behind=0, first_kept=0, kept=whole, positions=length, at=at)

    def _stretch_at(self, draw: int) -> _Stretch:
        """Return the last stretch as it stands at a draw of it."""
        _, epoch = self._find(draw)
        removed = self._stretches[-1].removed
        place = self._n
        if epoch.at < epoch.kept:
            kept = np.array([epoch.first_kept + epoch.at])
            place = int(_skip_over(self._removed_places(removed, epoch.epoch), kept)[0])
        return _Stretch(first=draw, epoch=epoch.epoch, drawn=epoch.behind + epoch.at, place=place, removed=removed)

    def _removed_places(self, removed: NDArray[np.int64], epoch: int) -> NDArray[np.int64]:
        """Return where in an epoch the removed samples stand, ascending."""
        if not len(removed):
            return _NONE
        key = (epoch, len(removed))
        if key not in self._places:
            if len(self._places) >= 4:
                self._places.pop(next(iter(self._places)))
            self._places[key] = np.sort(positions_of(self._n, seed=self._seed, epoch=epoch, samples=removed))
        return self._places[key]


def _skip_over(removed: NDArray[np.int64], kept: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the places of the samples of these numbers, counted among those that are not removed."""
    if not len(removed):
        return kept
    gaps = removed - np.arange(len(removed))
    return kept + np.searchsorted(gaps, kept, side="right")


def source_seed(seed: int, source_id: str) -> int:
    """Return the seed of a source's own order in a mixture.

    >>> source_seed(7, "books") == source_seed(7, "code")
    False
    """
    digest = blake3(b"ckptfmt/source-v1" + struct.pack("<Q", seed) + source_id.encode()).digest(length=8)
    (own,) = struct.unpack("<Q", digest)
    return int(own)


@dataclasses.dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of a mixture, ``block-det-v1``: `counts` are those of each stage, in the order of the sources.

    Each block has exactly its counts, in an order of its own, and what a source has given before a position is a prefix
    of the source's order: one number says it.

    Spec: page 60. Source: mixtures by integer counts per block, as in Levanter's `MixtureDataset`.

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
            counts=tuple(tuple(stage.counts[name] for name in source_ids) for stage in mixture.stages),
        )

    def sources_between(self, begin: int, end: int) -> NDArray[np.int64]:
        """Return the number of the source at each of the positions ``[begin, end)``."""
        parts = [np.empty(0, np.int64)]
        while begin < end:
            number, at = divmod(begin, self.block)
            count = min(end - begin, self.block - at)
            parts.append(self._sources(number)[at : at + count])
            begin += count
        return np.concatenate(parts)

    def draws_before(self, position: int) -> tuple[int, ...]:
        """Return how many draws each source has made before a position."""
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
def _sources_of_block(block: int, seed: int, number: int, counts: tuple[int, ...]) -> NDArray[np.int64]:
    places = sample_indices(block, seed=seed, begin=number * block, end=(number + 1) * block)
    sources = np.searchsorted(np.cumsum(counts), places, side="right").astype(np.int64)
    sources.flags.writeable = False
    return sources
