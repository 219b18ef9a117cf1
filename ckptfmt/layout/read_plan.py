"""Which bytes to read for which elements. Pure. Spec: REQ-OPN-005, REQ-OPN-006, REQ-OPN-008.

From wanted boxes to requests in four steps:

1. `iter_stored_boxes`: which stored boxes have something of a wanted box (a part stores each of its boxes as one).
2. `find_blocks`: which blocks of a stored box have something that is wanted; a column slice of long rows skips blocks.
3. `plan_requests`: ranges of blocks, wherever they come from, made into few requests that are as long as allowed; each
   block is in one request, whoever wants it.
4. `cut_range`: which boxes the bytes of such a range are, once they are there.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator

import numpy as np

from ckptfmt.box import Box
from ckptfmt.documents.sharding import Sharding


@dataclasses.dataclass(frozen=True, slots=True)
class BlockRange:
    """Blocks of one stored box that follow each other, in a file as in the box; or one encoded block.

    Attributes:
        path: of the file.
        byte_begin: first byte in the file.
        nbytes: how many bytes.
        box: number of the box, of the caller's.
        box_byte_begin: first byte of its content in the box; a block begins here.
    """

    path: str
    byte_begin: int
    nbytes: int
    box: int
    box_byte_begin: int

    @property
    def byte_end(self) -> int:
        """The first byte behind it, in the file."""
        return self.byte_begin + self.nbytes


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """A range of a file to read at once, and the ranges in it, in the order of the file."""

    path: str
    byte_begin: int
    nbytes: int
    ranges: tuple[BlockRange, ...]


def iter_stored_boxes(sharding: Sharding, wanted: Box) -> Iterator[tuple[Box, int, Box]]:
    """Yield what to read so that `wanted` is filled exactly: a stored box, the number of its part, what to read of it.

    One by one: an index may claim millions of boxes which no part stores, and the first of them is refused.
    """
    for stored, part in sharding.iter_common(wanted):
        common = stored.intersect(wanted)
        if common is not None:
            yield stored, part, common


def strides_of(shape: tuple[int, ...], element_nbytes: int) -> tuple[int, ...]:
    """Return the distance in bytes from element to element along each dimension, in C order."""
    return tuple(math.prod(shape[axis + 1 :]) * element_nbytes for axis in range(len(shape)))


def find_blocks(
    stored: Box, wanted: Iterable[Box], element_nbytes: int, block_nbytes: int
) -> tuple[tuple[int, int], ...]:
    """Return the blocks of a stored box that have an element of any box of `wanted`, as ranges ``[begin, end)``.

    Args:
        wanted: none of them empty, each within `stored`.

    >>> stored = Box((0, 0), (4, 100))
    >>> find_blocks(stored, [Box((0, 0), (4, 5))], 1, 10)  # of each row the first five bytes
    ((0, 1), (10, 11), (20, 21), (30, 31))
    """
    wanted = list(wanted)
    if stored in wanted:  # the same layout, most often
        return ((0, -(-stored.element_count * element_nbytes // block_nbytes)),)
    found = [_blocks_of(stored, box, element_nbytes, block_nbytes) for box in wanted]
    blocks = np.concatenate([np.empty((0, 2), np.int64), *found])
    blocks = blocks[np.lexsort((blocks[:, 1], blocks[:, 0]))]
    merged: list[list[int]] = []
    for begin, end in blocks.tolist():
        if merged and begin <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([begin, end])
    return tuple((begin, end) for begin, end in merged)


def _blocks_of(
    stored: Box, wanted: Box, element_nbytes: int, block_nbytes: int
) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """Return the blocks that have an element of one box: rows of first block and first block behind."""
    strides = strides_of(stored.shape, element_nbytes)
    offsets = [begin - base for begin, base in zip(wanted.begin, stored.begin, strict=True)]
    starts = np.array([sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))], np.int64)
    # From the innermost dimension out. Where the next stretch begins less than a block behind the last one's end, no
    # block lies between them: they count as one stretch. So there are never more stretches than blocks.
    span = element_nbytes
    outer: list[tuple[int, int]] = []
    for extent, stride in zip(reversed(wanted.shape), reversed(strides), strict=True):
        if stride - span < block_nbytes or extent == 1:
            span += (extent - 1) * stride
        else:
            outer.append((extent, stride))
    for extent, stride in outer:
        starts = (starts[None, :] + (np.arange(extent, dtype=np.int64) * stride)[:, None]).reshape(-1)
    return np.stack([starts // block_nbytes, (starts + span - 1) // block_nbytes + 1], axis=1)


def plan_requests(
    ranges: Iterable[BlockRange], *, block_nbytes: int, request_nbytes: int, gap_nbytes: int
) -> tuple[Request, ...]:
    """Return the requests that read `ranges`, file after file, each from its begin to its end.

    Args:
        ranges: disjoint; each begins at a block's begin and ends at a block's end.
        block_nbytes: a range is only cut between blocks, so that whoever has a request can check all of it.
        request_nbytes: longest request, but for a single block.
        gap_nbytes: how many bytes that nobody wants are read at most, so as to save a request.
    """
    requests: list[list[BlockRange]] = []
    step = max(1, request_nbytes // block_nbytes) * block_nbytes
    for blocks in sorted(ranges, key=lambda blocks: (blocks.path, blocks.byte_begin)):
        for part in _split(blocks, step):
            first, last = (requests[-1][0], requests[-1][-1]) if requests else (None, None)
            if (
                first is not None
                and last is not None
                and first.path == part.path
                and part.byte_begin - last.byte_end <= gap_nbytes
                and part.byte_end - first.byte_begin <= request_nbytes
            ):
                requests[-1].append(part)
            else:
                requests.append([part])
    return tuple(
        Request(group[0].path, group[0].byte_begin, group[-1].byte_end - group[0].byte_begin, tuple(group))
        for group in requests
    )


def _split(blocks: BlockRange, step: int) -> Iterator[BlockRange]:
    for at in range(0, max(1, blocks.nbytes), step):
        nbytes = min(step, blocks.nbytes - at)
        yield (
            blocks
            if nbytes == blocks.nbytes
            else BlockRange(blocks.path, blocks.byte_begin + at, nbytes, blocks.box, blocks.box_byte_begin + at)
        )


def cut_range(stored: Box, byte_begin: int, byte_end: int, element_nbytes: int) -> tuple[tuple[int, Box], ...]:
    """Return the boxes that ``[byte_begin, byte_end)`` of a stored box are, in order, each with its first byte.

    They are at most ``2 * ndim - 1``: whole rows in the middle, and what is left of each dimension before and behind.

    Args:
        byte_begin, byte_end: at elements' begins, within the box.

    >>> cut_range(Box((5, 0), (3, 4)), 2, 9, 1)
    ((2, Box(begin=(5, 2), shape=(1, 2))), (4, Box(begin=(6, 0), shape=(1, 4))), (8, Box(begin=(7, 0), shape=(1, 1))))
    """
    counts = [math.prod(stored.shape[axis:]) for axis in range(len(stored.shape) + 1)]
    found: list[tuple[int, Box]] = []
    at, end = byte_begin // element_nbytes, byte_end // element_nbytes
    while at < end:
        # The outermost dimension of which whole rows begin here and end in time.
        axis = next(axis for axis in range(len(counts)) if at % counts[axis] == 0 and at + counts[axis] <= end)
        index = [at // counts[inner + 1] % stored.shape[inner] for inner in range(len(stored.shape))]
        shape = [1] * axis + list(stored.shape[axis:])
        row_count = 1
        if axis > 0:
            row_count = min((end - at) // counts[axis], stored.shape[axis - 1] - index[axis - 1])
            shape[axis - 1] = row_count
        begin = tuple(base + offset for base, offset in zip(stored.begin, index, strict=True))
        found.append((at * element_nbytes, Box(begin, tuple(shape))))
        at += row_count * counts[axis]
    return tuple(found)


def find_stretch(outer: Box, inner: Box) -> int | None:
    """Return which element of `outer`, in C order, `inner` begins with, if its elements follow each other there.

    Args:
        inner: not empty, within `outer`.

    >>> find_stretch(Box((0, 0), (9, 4)), Box((2, 0), (3, 4))), find_stretch(Box((0, 0), (9, 4)), Box((2, 1), (3, 2)))
    (8, None)
    """
    first, count = 0, 1
    is_cut = False
    for base, outer_extent, begin, extent in zip(
        reversed(outer.begin), reversed(outer.shape), reversed(inner.begin), reversed(inner.shape), strict=True
    ):
        if is_cut and extent > 1:
            return None
        is_cut = is_cut or extent < outer_extent
        first += (begin - base) * count
        count *= outer_extent
    return first


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
        chunk = Box(
            (*wanted.begin[:axis], wanted.begin[axis] + begin, *wanted.begin[axis + 1 :]),
            (*wanted.shape[:axis], min(step, extent - begin), *wanted.shape[axis + 1 :]),
        )
        yield from iter_chunks(chunk, element_nbytes, chunk_nbytes)
