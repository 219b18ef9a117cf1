"""Which bytes to read for which elements. Pure. Spec: REQ-OPN-005, REQ-OPN-006."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from ckptfmt.box import Box

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptfmt.documents.index import Sharding

__all__ = ["BlockRange", "PieceRead", "iter_chunks", "plan_blocks", "plan_pieces", "strides_of"]


@dataclasses.dataclass(frozen=True, slots=True)
class PieceRead:
    """Elements wanted from one stored piece.

    Attributes:
        stored: the piece as it is stored.
        part: number of the part that stores it.
        wanted: what is wanted of it.
    """

    stored: Box
    part: int
    wanted: Box


@dataclasses.dataclass(frozen=True, slots=True)
class BlockRange:
    """A run of blocks of one stored piece, and the bytes of the piece that it covers."""

    block_begin: int
    block_end: int
    byte_begin: int
    byte_end: int


def plan_pieces(sharding: Sharding, wanted: Box) -> tuple[PieceRead, ...]:
    """Return what to read of which stored piece so that `wanted` is filled exactly."""
    found = ((stored, part, stored.intersect(wanted)) for stored, part in sharding)
    return tuple(PieceRead(stored, part, common) for stored, part, common in found if common is not None)


def iter_chunks(wanted: Box, element_nbytes: int, chunk_nbytes: int) -> Iterator[Box]:
    """Yield boxes that tile `wanted`, in C order, each of at most `chunk_nbytes` where elements are that small.

    >>> [chunk.shape for chunk in iter_chunks(Box((0, 0), (5, 4)), 1, 8)]
    [(2, 4), (2, 4), (1, 4)]
    """
    axis = next((axis for axis, extent in enumerate(wanted.shape) if extent > 1), None)
    if axis is None or wanted.element_count * element_nbytes <= chunk_nbytes:
        yield wanted
        return
    extent = wanted.shape[axis]
    step = max(1, chunk_nbytes * extent // (wanted.element_count * element_nbytes))
    for begin in range(0, extent, step):
        piece = Box(
            (*wanted.begin[:axis], wanted.begin[axis] + begin, *wanted.begin[axis + 1 :]),
            (*wanted.shape[:axis], min(step, extent - begin), *wanted.shape[axis + 1 :]),
        )
        yield from iter_chunks(piece, element_nbytes, chunk_nbytes)


def strides_of(shape: tuple[int, ...], element_nbytes: int) -> tuple[int, ...]:
    """Return the distance in bytes from element to element along each dimension, in C order."""
    return tuple(math.prod(shape[axis + 1 :]) * element_nbytes for axis in range(len(shape)))


def plan_blocks(stored: Box, wanted: Box, element_nbytes: int, block_nbytes: int) -> BlockRange:
    """Return the blocks of a stored piece from the first to the last that has an element of `wanted`.

    Args:
        wanted: not empty, within `stored`.
    """
    strides = strides_of(stored.shape, element_nbytes)
    offsets = [begin - base for begin, base in zip(wanted.begin, stored.begin, strict=True)]
    first = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    last = first + sum((extent - 1) * stride for extent, stride in zip(wanted.shape, strides, strict=True))
    block_begin, block_end = first // block_nbytes, (last + element_nbytes - 1) // block_nbytes + 1
    total = stored.element_count * element_nbytes
    return BlockRange(block_begin, block_end, block_begin * block_nbytes, min(total, block_end * block_nbytes))
