"""``block-det-v1``: which source each position of a mixture has, as a pure function of the mixture and the position.

The normative text, in the words of ``feistel-v1`` (`ckptfmt.data.shuffle`):

    Positions are cut into blocks of B. Block b has the positions [b * B, (b + 1) * B), and the counts of the last
    stage whose from_pos is at most b * B. Sources have the order of the cursor's list.

    1. q is the sample at position P mod B of epoch P div B of the order feistel-v1 of B samples, by the mixture's seed.
    2. The source at P is the first one for which the sum of its count and the counts before it is greater than q.
    3. What the source gives there is its draw k, where k is how often steps 1 and 2 give the source for the positions
       before P.

    The draws of a source are the positions of its own endless order, whose seed is the first LE64 of the BLAKE3 digest
    of the 17 ASCII bytes ``ckptfmt/source-v1``, LE64(seed of the order) and the source's id in UTF-8.

So each block has exactly its counts, in an order of its own, and what a source has given before a position is a prefix
of the source's order: one number says it.

Source: mixtures by integer counts per block, as in Levanter's `MixtureDataset`.
"""

from __future__ import annotations

import dataclasses
import functools
import struct
from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from ckptfmt.data.shuffle import sample_indices
from ckptfmt.documents.cursor import Mixture


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
    """The blocks of a mixture: `counts` are those of each stage, in the order of the sources.

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
