"""Boxes from a device mesh and placements: the pieces of a tensor on each rank, global and local.

The rules are the rules by which torch.distributed.tensor makes local tensors, stated on intervals
instead of tensors. Each dimension is a list of intervals of the global tensor, in local order; at
first a list of one interval, the whole dimension.

* `Shard` cuts the list into as many chunks as the mesh dimension has ranks, of ``ceil(count /
  ranks)`` elements each. The last non-empty chunk may be shorter, and further chunks are empty (the
  rule of ``torch.chunk``). Rank i takes chunk i.
* `StridedShard` cuts the list into ``split_factor`` chunks, and each chunk into as many subchunks
  as there are ranks. Rank i takes the i-th subchunk of every chunk, concatenated.
* `Replicate` takes everything.

Placements are applied in the order of the mesh dimensions, except for FSDP2: FSDP2 applies a plain
`Shard` to the result of tensor parallelism, then declares the placements as ``(StridedShard(0, tp),
Shard(0))``. Both readings agree if the dimension divides evenly. They differ in some uneven cases:
with 16 rows on 4 by 3 ranks, the last row is on rank (3, 2) or, by the mesh's order, on rank (3,
0). `local_boxes` therefore uses the local shape to choose the reading.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import TypeAlias

from ckptfmt.box import Box
from ckptfmt.errors import Code, err


@dataclasses.dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank along the mesh dimension holds the same pieces."""


@dataclasses.dataclass(frozen=True, slots=True)
class Shard:
    """The tensor's dimension `dim` is cut along the mesh dimension."""

    dim: int


@dataclasses.dataclass(frozen=True, slots=True)
class StridedShard:
    """The tensor's dimension `dim` is cut into `split_factor` chunks, then along the mesh."""

    dim: int
    split_factor: int


Placement: TypeAlias = Replicate | Shard | StridedShard

#: Non-empty half-open intervals of one dimension of the global tensor, in local order. Adjacent
#: intervals are merged.
_Intervals: TypeAlias = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class LocalPiece:
    """A rank's piece of a tensor: the box in the global tensor, and in the rank's local tensor."""

    box: Box
    local_box: Box


def boxes_of(
    global_shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...],
    placements: tuple[Placement, ...],
    *,
    fsdp2: bool = False,
) -> tuple[LocalPiece, ...]:
    """Return the pieces held by the rank at `coordinate` of a mesh, in C order of the local tensor.

    A contiguous shard is one piece. An empty shard, or a shard of a tensor without elements, has no
    pieces.

    Args:
        global_shape: the tensor's shape, in elements.
        mesh_shape: number of ranks along each mesh dimension.
        coordinate: the rank's coordinate in the mesh.
        placements: the placement of each mesh dimension.
        fsdp2: whether to read a strided shard whose factor is the number of shards to its right as
            a plain shard applied after them, as FSDP2 makes its local tensors.

    Raises: ARGUMENT when mesh, coordinate, placements and shape don't fit together.
    Source: ``Shard`` and ``_StridedShard._split_tensor`` of
        torch.distributed.tensor.placement_types, torch 2.13.

    >>> placements = (StridedShard(0, split_factor=2), Shard(0))
    >>> [str(piece.box.begin) for piece in boxes_of((8, 3), (2, 2), (0, 1), placements)]
    ['(4, 0)']
    >>> [piece.box.begin for piece in boxes_of((8,), (2,), (0,), (StridedShard(0,
    ...     split_factor=2),))]
    [(0,), (4,)]
    """
    _check(global_shape, mesh_shape, coordinate, placements)
    intervals: list[_Intervals] = [((0, extent),) if extent else () for extent in global_shape]
    for mesh_dim, shard in _steps(mesh_shape, placements, fsdp2=fsdp2):
        held = intervals[shard.dim]
        intervals[shard.dim] = _shard(held, shard, mesh_shape[mesh_dim], coordinate[mesh_dim])
    return _pieces(intervals)


def local_boxes(
    global_shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...],
    placements: tuple[Placement, ...],
    local_shape: tuple[int, ...],
) -> tuple[LocalPiece, ...]:
    """Return the pieces of a local tensor, by the reading of placements that fits its shape.

    Args:
        global_shape, mesh_shape, coordinate, placements: see `boxes_of`.
        local_shape: shape of the tensor on the rank.

    Raises: STATE_UNSUPPORTED when no reading has this shape, or both have this shape with different
        pieces; ARGUMENT.
    """
    both = (
        boxes_of(global_shape, mesh_shape, coordinate, placements, fsdp2=fsdp2)
        for fsdp2 in (False, True)
    )
    readings = {pieces for pieces in both if _fits(pieces, local_shape)}
    if len(readings) != 1:
        detail = (
            f"a local tensor of shape {local_shape} at {coordinate} of a mesh of {mesh_shape} fits"
            f" {len(readings)} readings of {placements} for the shape {global_shape}; exactly one"
            " is needed"
        )
        raise err(
            Code.STATE_UNSUPPORTED,
            detail,
            remedy="Shard the dimension evenly, or in the mesh's order.",
        )
    return readings.pop()


def is_replica(mesh_shape: tuple[int, ...], placements: tuple[Placement, ...]) -> bool:
    """Return whether the mesh declares that several ranks hold the same pieces.

    >>> is_replica((2, 3), (Replicate(), Shard(0))), is_replica((1, 3), (Replicate(), Shard(0)))
    (True, False)
    """
    return any(
        count > 1 and isinstance(placement, Replicate)
        for count, placement in zip(mesh_shape, placements, strict=True)
    )


def _steps(
    mesh_shape: tuple[int, ...], placements: tuple[Placement, ...], *, fsdp2: bool
) -> list[tuple[int, Shard | StridedShard]]:
    """Return the cuts in the order of their application, each with its mesh dimension."""
    cuts = [
        (i, placement)
        for i, placement in enumerate(placements)
        if not isinstance(placement, Replicate)
    ]
    if not fsdp2:
        return cuts
    first: list[tuple[int, Shard | StridedShard]] = []
    after: list[tuple[int, Shard | StridedShard]] = []
    for i, shard in cuts:
        right = math.prod(mesh_shape[j] for j, other in cuts if j > i and other.dim == shard.dim)
        if isinstance(shard, StridedShard) and shard.split_factor == right:
            after.insert(0, (i, Shard(shard.dim)))
        else:
            first.append((i, shard))
    return first + after


def _shard(
    intervals: _Intervals, placement: Shard | StridedShard, rank_count: int, rank: int
) -> _Intervals:
    factor = placement.split_factor if isinstance(placement, StridedShard) else 1
    taken: list[tuple[int, int]] = []
    for chunk in range(factor):
        for begin, end in _chunk(_chunk(intervals, factor, chunk), rank_count, rank):
            if taken and taken[-1][1] == begin:
                taken[-1] = (taken[-1][0], end)
            else:
                taken.append((begin, end))
    return tuple(taken)


def _chunk(intervals: _Intervals, chunk_count: int, chunk: int) -> _Intervals:
    """Return one chunk of the intervals, by the rule of torch.chunk."""
    count = sum(end - begin for begin, end in intervals)
    extent = -(-count // chunk_count)
    low = extent * chunk
    high = extent * (chunk + 1)
    taken = []
    for begin, end in intervals:
        first = begin + max(low, 0)
        last = min(begin + high, end)
        if first < last:
            taken.append((first, last))
        low = low - (end - begin)
        high = high - (end - begin)
    return tuple(taken)


def _pieces(intervals: list[_Intervals]) -> tuple[LocalPiece, ...]:
    placed = []
    for dimension in intervals:
        ends = list(itertools.accumulate((end - begin for begin, end in dimension), initial=0))
        placed.append(
            [
                (begin, at, end - begin)
                for (begin, end), at in zip(dimension, ends[:-1], strict=True)
            ]
        )
    pieces = []
    for choice in itertools.product(*placed):
        shape = tuple(extent for _, _, extent in choice)
        begin = tuple(begin for begin, _, _ in choice)
        local_begin = tuple(at for _, at, _ in choice)
        pieces.append(LocalPiece(Box(begin, shape), Box(local_begin, shape)))
    return tuple(pieces)


def _fits(pieces: tuple[LocalPiece, ...], local_shape: tuple[int, ...]) -> bool:
    if not pieces:
        return 0 in local_shape
    whole = tuple(
        max(ends) for ends in zip(*(piece.local_box.end for piece in pieces), strict=True)
    )
    return whole == local_shape


def _check(
    global_shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...],
    placements: tuple[Placement, ...],
) -> None:
    if not len(mesh_shape) == len(coordinate) == len(placements):
        detail = (
            f"mesh {mesh_shape}, coordinate {coordinate} and {len(placements)} placements"
            " differ in length"
        )
        raise err(Code.ARGUMENT, detail)
    if not all(0 <= at < count for at, count in zip(coordinate, mesh_shape, strict=True)):
        raise err(Code.ARGUMENT, f"coordinate {coordinate} is not in the mesh of {mesh_shape}")
    if any(extent < 0 for extent in global_shape):
        raise err(Code.ARGUMENT, f"a shape has no negative extent: {global_shape}")
    for placement in placements:
        if isinstance(placement, Replicate):
            continue
        if not 0 <= placement.dim < len(global_shape):
            raise err(
                Code.ARGUMENT, f"{placement} doesn't name a dimension of the shape {global_shape}"
            )
        if isinstance(placement, StridedShard) and placement.split_factor < 1:
            raise err(Code.ARGUMENT, f"{placement}: split_factor is at least 1")
