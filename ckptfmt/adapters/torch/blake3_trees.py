"""What both programs for BLAKE3 of blocks go by: the words of BLAKE3, and the trees of the chunks of a batch.

Source: BLAKE3, one function, fast everywhere: J. O'Connor, J.-P. Aumasson, S. Neves, Z. Wilcox-O'Hearn, 2020.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Final

import torch

CHUNK_NBYTES: Final = 1024

CHUNK_START: Final = 1
CHUNK_END: Final = 2
PARENT: Final = 4
ROOT: Final = 8

#: The first 32 bits of the fractional parts of the square roots of the first eight primes, as in SHA-256.
IV: Final = (0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19)
#: Word i of the next round's message is word PERMUTATION[i] of this round's.
PERMUTATION: Final = (2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8)


def has_words(content: torch.Tensor) -> bool:
    """Whether bytes can be looked at as words where they lie."""
    return content.data_ptr() % 4 == 0 and content.storage_offset() % 4 == 0


@dataclasses.dataclass(frozen=True, slots=True)
class Level:
    """A level of all trees of a batch: neighbours are compressed in pairs, one that is left over goes up as it is.

    Attributes:
        pairs: how many.
        is_odd: whether one value is left over, the last.
        root_begin: pairs from this one on are roots; `pairs` if none is.
    """

    pairs: int
    is_odd: bool
    root_begin: int


@dataclasses.dataclass(frozen=True, slots=True)
class Forest:
    """The trees of the blocks of a batch. Chunks are counted over all blocks; a block's own begin at 0.

    All blocks but the last hold as many chunks as a power of two, so that pairs of all chunks of the batch never cross
    from one block into the next; that pairing from the left gives BLAKE3's tree in the last, see the tests.

    Attributes:
        nbytes: of the batch.
        chunk_count: of the batch; the last chunk may be short.
        block_chunks: of a block that isn't short.
        last_begin: the first chunk of the last block.
        level_count: how many levels the largest tree has above its chunks.
    """

    nbytes: int
    chunk_count: int
    block_chunks: int
    last_begin: int
    level_count: int

    @classmethod
    def of(cls, nbytes: int, block_nbytes: int) -> Forest:
        """Return that of so many bytes, at least one."""
        chunk_count, block_chunks = -(-nbytes // CHUNK_NBYTES), block_nbytes // CHUNK_NBYTES
        return cls(
            nbytes=nbytes,
            chunk_count=chunk_count,
            block_chunks=block_chunks,
            last_begin=(chunk_count - 1) // block_chunks * block_chunks,
            level_count=(min(chunk_count, block_chunks) - 1).bit_length(),
        )

    @property
    def root_chunk(self) -> int:
        """The chunk that is a whole block, else -1: only the last can be."""
        return self.last_begin if self.last_begin == self.chunk_count - 1 else -1

    def iter_levels(self) -> Iterator[Level]:
        """Yield the levels from the chunks upwards."""
        count, last_begin, block_values = self.chunk_count, self.last_begin, self.block_chunks
        for _ in range(self.level_count):
            pairs = count // 2
            root_begin = 0 if block_values == 2 else pairs - (count - last_begin == 2)
            yield Level(pairs, count % 2 == 1, root_begin)
            count, last_begin, block_values = (count + 1) // 2, last_begin // 2, block_values // 2
