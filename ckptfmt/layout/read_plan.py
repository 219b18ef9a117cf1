"""Plan reads: from wanted elements to byte ranges of files. Pure.

Spec: REQ-OPN-005, REQ-OPN-006, REQ-OPN-008.

From wanted boxes to requests in four steps:

1. `iter_stored_boxes`: find the stored boxes that overlap a wanted box. A part stores each of its
   boxes as a unit.
2. `find_blocks`: find the blocks of a stored box that contain a wanted element; a column slice of
   long rows skips blocks.
3. `plan_requests`: combine ranges of blocks, from any number of boxes, into few and long requests.
   Each block is in one request, even if several readers want the block.
4. `cut_range`: cut the bytes of a range into boxes after the read.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from ckptfmt.box import Box
from ckptfmt.documents.sharding import Sharding


@dataclasses.dataclass(frozen=True, slots=True)
class BlockRange:
    """Consecutive blocks of one stored box, consecutive in the file as well; or one encoded block.

    Attributes:
        path: the file's path.
        byte_begin: first byte in the file.
        nbytes: size in bytes.
        box: the caller's number of the box.
        box_byte_begin: first byte of the range in the box; a block begins here.
    """

    path: str
    byte_begin: int
    nbytes: int
    box: int
    box_byte_begin: int

    @property
    def byte_end(self) -> int:
        """The first byte after the range, in the file."""
        return self.byte_begin + self.nbytes


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """A range of a file to read at once, and the block ranges in it, in the order of the file."""

    path: str
    byte_begin: int
    nbytes: int
    ranges: tuple[BlockRange, ...]


def iter_stored_boxes(sharding: Sharding, wanted: Box) -> Iterator[tuple[Box, int, Box]]:
    """Yield the reads that fill `wanted` exactly: stored box, number of the part, box to read.

    The result is lazy: an index may claim millions of boxes absent from all parts, and the first
    such box is an error.
    """
    for stored, part in sharding.iter_common(wanted):
        common = stored.intersect(wanted)
        if common is not None:
            yield stored, part, common


def strides_of(shape: tuple[int, ...], element_nbytes: int) -> tuple[int, ...]:
    """Return the distance in bytes between elements along each dimension, in C order."""
    return tuple(math.prod(shape[axis + 1 :]) * element_nbytes for axis in range(len(shape)))


def find_blocks(
    stored: Box, wanted: Iterable[Box], element_nbytes: int, block_nbytes: int
) -> tuple[tuple[int, int], ...]:
    """Return the blocks of a stored box with an element of `wanted`, as ranges ``[begin, end)``.

    Args:
        wanted: non-empty boxes within `stored`.

    >>> stored = Box((0, 0), (4, 100))
    >>> find_blocks(stored, [Box((0, 0), (4, 5))], 1, 10)  # of each row the first five bytes
    ((0, 1), (10, 11), (20, 21), (30, 31))
    """
    wanted = list(wanted)
    if stored in wanted:  # the usual case: the layout is the same
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
    """Return the blocks with an element of a box, as rows of first block and end block."""
    strides = strides_of(stored.shape, element_nbytes)
    offsets = [begin - base for begin, base in zip(wanted.begin, stored.begin, strict=True)]
    starts = np.array(
        [sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))], np.int64
    )
    # From the innermost dimension outwards. Two stretches with a gap of less than a block have no
    # unwanted block between them and are merged. So there are never more stretches than blocks.
    span = element_nbytes
    outer: list[tuple[int, int]] = []
    for extent, stride in zip(reversed(wanted.shape), reversed(strides), strict=True):
        if stride - span < block_nbytes or extent == 1:
            span += (extent - 1) * stride
        else:
            outer.append((extent, stride))
    for extent, stride in outer:
        starts = (starts[None, :] + (np.arange(extent, dtype=np.int64) * stride)[:, None]).reshape(
            -1
        )
    return np.stack([starts // block_nbytes, (starts + span - 1) // block_nbytes + 1], axis=1)


def plan_requests(
    ranges: Iterable[BlockRange], *, block_nbytes: int, request_nbytes: int, gap_nbytes: int
) -> tuple[Request, ...]:
    """Return the requests that read `ranges`, by file and offset.

    Args:
        ranges: disjoint ranges; each begins and ends at a block boundary.
        block_nbytes: size of a block in bytes. A range is cut only between blocks, so that each
            request can be verified by itself.
        request_nbytes: largest size of a request with more than one block.
        gap_nbytes: largest number of unwanted bytes read to save a request.
    """
    requests: list[Request] = []
    step = max(1, request_nbytes // block_nbytes) * block_nbytes
    group: list[BlockRange] = []
    path = ""
    begin = end = 0
    for blocks in sorted(ranges, key=lambda blocks: (blocks.path, blocks.byte_begin)):
        for part in _split(blocks, step):
            part_end = part.byte_begin + part.nbytes
            if not (
                group
                and path == part.path
                and part.byte_begin - end <= gap_nbytes
                and part_end - begin <= request_nbytes
            ):
                if group:
                    requests.append(Request(path, begin, end - begin, tuple(group)))
                group = []
                path = part.path
                begin = part.byte_begin
            group.append(part)
            end = part_end
    if group:
        requests.append(Request(path, begin, end - begin, tuple(group)))
    return tuple(requests)


def _split(blocks: BlockRange, step: int) -> Sequence[BlockRange]:
    if blocks.nbytes <= step:
        return (blocks,)
    path = blocks.path
    begin = blocks.byte_begin
    nbytes = blocks.nbytes
    box = blocks.box
    box_begin = blocks.box_byte_begin
    return [
        BlockRange(path, begin + at, min(step, nbytes - at), box, box_begin + at)
        for at in range(0, nbytes, step)
    ]


def cut_range(
    stored: Box, byte_begin: int, byte_end: int, element_nbytes: int
) -> tuple[tuple[int, Box], ...]:
    """Return the boxes in bytes ``[byte_begin, byte_end)`` of a stored box, with first bytes.

    The result is in order and has at most ``2 * ndim - 1`` boxes: whole rows in the middle, and for
    each dimension a rest before and after.

    Args:
        byte_begin, byte_end: offsets of elements within the box.

    >>> cut_range(Box((5, 0), (3, 4)), 2, 9, 1)
    ((2, Box(begin=(5, 2), shape=(1, 2))), (4, Box(begin=(6, 0), shape=(1, 4))), (8, Box(begin=(7,
    0), shape=(1, 1))))
    """
    counts = [math.prod(stored.shape[axis:]) for axis in range(len(stored.shape) + 1)]
    found: list[tuple[int, Box]] = []
    at = byte_begin // element_nbytes
    end = byte_end // element_nbytes
    while at < end:
        # The outermost dimension with a whole row that begins here and fits.
        axis = next(
            axis
            for axis in range(len(counts))
            if at % counts[axis] == 0 and at + counts[axis] <= end
        )
        index = [
            at // counts[inner + 1] % stored.shape[inner] for inner in range(len(stored.shape))
        ]
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
    """Return the offset of `inner` in `outer` in elements; None if `inner` isn't contiguous.

    Args:
        inner: a non-empty box within `outer`.

    >>> (find_stretch(Box((0, 0), (9, 4)), Box((2, 0), (3, 4))),
    ...  find_stretch(Box((0, 0), (9, 4)), Box((2, 1), (3, 2))))
    (8, None)
    """
    if inner == outer:  # the usual case, of whole tensors
        return 0
    first = 0
    count = 1
    is_cut = False
    for base, outer_extent, begin, extent in zip(
        reversed(outer.begin),
        reversed(outer.shape),
        reversed(inner.begin),
        reversed(inner.shape),
        strict=True,
    ):
        if is_cut and extent > 1:
            return None
        is_cut = is_cut or extent < outer_extent
        first += (begin - base) * count
        count *= outer_extent
    return first


def iter_chunks(wanted: Box, element_nbytes: int, chunk_nbytes: int) -> Iterator[Box]:
    """Yield boxes that tile `wanted`, in C order.

    Each has at most `chunk_nbytes`, or is one element.

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
