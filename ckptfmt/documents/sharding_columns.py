"""The table `shardings` of an index: two forms of shardings, each in few columns. Spec: REQ-IDX-009, REQ-IDX-012."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Final

import numpy as np

from ckptfmt import limits
from ckptfmt.documents.packed import Columns, Integers, dump_packed, fold, join_integers, unfold
from ckptfmt.documents.sharding import Sharding, rows_increase
from ckptfmt.errors import CkptError, Code, err

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_KEYS: Final = ("ndim", "form", "box_count", "grid_shape", "extent", "begin", "box_shape", "part")
_BOXES: Final = 0
_GRID: Final = 1


def sharding_columns(shardings: Sequence[Sharding], part_count: int) -> dict[str, object]:
    """Return the columns of shardings that are different from each other."""
    axes = [extents for sharding in shardings for extents in sharding.extents or ()]
    boxes = [sharding for sharding in shardings if sharding.extents is None]
    parts = join_integers([sharding.part for sharding in shardings])
    return {
        "ndim": dump_packed([sharding.ndim for sharding in shardings]),
        "form": dump_packed([_BOXES if sharding.extents is None else _GRID for sharding in shardings]),
        "box_count": dump_packed([len(sharding) for sharding in shardings]),
        "grid_shape": dump_packed([len(extents) for extents in axes]),
        "extent": dump_packed(join_integers(axes)),
        "begin": dump_packed(fold(join_integers([_steps(one.begin, one.box_shape) for one in boxes]))),
        "box_shape": dump_packed(join_integers([one.box_shape.T.reshape(-1) for one in boxes])),
        # Where boxes come in the order of their writers, which is usual, every entry is 0.
        "part": dump_packed((np.diff(parts, prepend=-1) - 1) % part_count),
    }


def parse_shardings(columns: Columns, part_count: int) -> list[Sharding]:
    """Return the shardings of an index.

    Raises: FormatError(COLUMN_FORM, COLUMN_ORDER, LIMIT_EXCEEDED).
    Spec: REQ-IDX-002, REQ-IDX-003, REQ-IDX-009, REQ-IDX-012.
    """
    table = columns.columns("shardings", _KEYS)
    ndim = table.packed("ndim", below=limits.NDIM + 1)
    forms = table.packed("form", count=len(ndim), below=_GRID + 1)
    counts = table.packed("box_count", count=len(ndim), below=limits.BOXES + 1)
    total = int(counts.sum())
    # Before there is anything that has as many entries as there are boxes: compressed, they may be few bytes.
    if total > limits.BOXES:
        raise err(Code.LIMIT_EXCEEDED, f"{total} boxes", where=table.place("box_count"), requirement="REQ-LIM-001")
    parts = _parse_parts(table, total, part_count)
    is_grid = forms == _GRID
    grids = _iter_grids(table, ndim[is_grid].tolist(), counts[is_grid].tolist())
    boxes = _iter_boxes(table, ndim[~is_grid].tolist(), counts[~is_grid].tolist())
    shardings, at = [], 0
    for form, count in zip(forms.tolist(), counts.tolist(), strict=True):
        part = parts[at : at + count]
        shardings.append(Sharding.grid(next(grids), part) if form == _GRID else Sharding.boxes(*next(boxes), part))
        if form == _BOXES and shardings[-1].extents is not None:
            raise columns.unsorted("shardings", "a grid is listed box by box", "REQ-IDX-012")
        at += count
    if len(set(shardings)) != len(shardings):
        raise columns.unsorted("shardings", "two shardings are equal", "REQ-IDX-009")
    return shardings


def _parse_parts(table: Columns, count: int, part_count: int) -> Integers:
    """Return the part of each box; in place, since there may be ten million."""
    parts = table.packed("part", count=count, below=part_count)
    parts += 1
    np.cumsum(parts, out=parts)
    parts -= 1
    parts %= part_count
    return parts


def _iter_grids(table: Columns, ndim: list[int], counts: list[int]) -> Iterator[list[Integers]]:
    """Yield the intervals of each dimension of each grid; all are checked before the first."""
    table.take("grid_shape", extents=sum(ndim))
    lengths = table.packed("grid_shape", count=sum(ndim), below=limits.BOXES + 1)
    extents = table.packed("extent", count=int(lengths.sum()), below=limits.DIM + 1)
    if not lengths.all() or not extents.all():
        raise table.broken("extent", "a dimension without intervals, or an interval without elements")
    ends = np.cumsum(lengths).tolist()
    axes = [extents[begin:end] for begin, end in itertools.pairwise([0, *ends])]
    grids, at = [], 0
    for rank, count in zip(ndim, counts, strict=True):
        grid = axes[at : at + rank]
        _check_box_count(table, grid, count)
        grids.append(grid)
        at += rank
    return iter(grids)


def _check_box_count(table: Columns, grid: list[Integers], count: int) -> None:
    product = 1
    for axis in grid:
        product *= len(axis)
        if product > count:  # of many dimensions, the product may be a number of many digits
            break
    if product != count:
        raise table.broken("box_count", f"{count} boxes where the intervals make {product} or more")
    if any(axis.sum(dtype=np.float64) > limits.DIM for axis in grid):  # exact as far as it matters, and never wraps
        raise table.broken("extent", f"intervals of more than {limits.DIM} elements in one dimension")


def _iter_boxes(table: Columns, ndim: list[int], counts: list[int]) -> Iterator[tuple[Integers, Integers]]:
    """Yield begin and shape of the boxes of each sharding that isn't a grid; all are checked before the first."""
    sizes = [rank * count for rank, count in zip(ndim, counts, strict=True)]
    table.take("begin", extents=sum(sizes))
    steps = unfold(table.packed("begin", count=sum(sizes), below=2 * limits.DIM + 1))
    extents = table.packed("box_shape", count=sum(sizes), below=limits.DIM + 1)
    found, at = [], 0
    for rank, count, size in zip(ndim, counts, sizes, strict=True):
        if (rank == 0) != (count == 0):
            raise _unlike(table, rank, count)
        box_shape = extents[at : at + size].reshape(rank, count).T
        begin = _begins(steps[at : at + size].reshape(rank, count).T, box_shape)
        if size and not (int(begin.min()) >= 0 and int(begin.max()) <= limits.DIM):
            raise table.broken("begin", f"a box that begins before 0, or behind {limits.DIM}")
        if count and not rows_increase([*begin.T, *box_shape.T]):
            raise table.unsorted("begin")
        found.append((begin, box_shape))
        at += size
    return iter(found)


def _unlike(table: Columns, rank: int, count: int) -> CkptError:
    if count:
        # Of no dimensions, two boxes would be equal, and a single one is a grid.
        return table.unsorted("begin", "boxes of no dimensions", "REQ-IDX-012")
    return table.broken("ndim", f"{rank} dimensions of no boxes")


def _steps(begin: Integers, box_shape: Integers) -> Integers:
    """Return where boxes begin as steps, one dimension after the other. Shapes: (n, ndim) to (n * ndim,).

    They count from where the box before begins, or in the last dimension from where that ends: most are small.
    """
    steps = np.diff(begin, axis=0, prepend=0)
    steps[1:, -1:] -= box_shape[:-1, -1:]
    joined: Integers = steps.T.reshape(-1)
    return joined


def _begins(steps: Integers, box_shape: Integers) -> Integers:
    """Return where boxes begin. Shapes: (n, ndim) to (n, ndim)."""
    steps = steps.copy()
    steps[1:, -1:] += box_shape[:-1, -1:]
    begin: Integers = np.cumsum(steps, axis=0)
    return begin
