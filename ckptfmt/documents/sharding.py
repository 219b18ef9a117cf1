"""Shardings: the boxes into which a tensor is cut, and the part that stores each box.

A million boxes are columns of integers, not a million objects. A `Box` is made only on request.

Spec: REQ-IDX-003, REQ-IDX-009, REQ-IDX-012.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, Self, overload

import numpy as np

from ckptfmt import limits
from ckptfmt.box import Box
from ckptfmt.documents.packed import Columns, Integers, dump_packed, fold, join_integers, unfold
from ckptfmt.errors import CkptError, Code, err

#: Number of boxes that an iteration makes at once.
_AT_ONCE: Final = 1 << 14

#: Largest number of a grid's boxes that are made without arrays.
_FEW: Final = 64


class Sharding(Sequence[tuple[Box, int]]):
    """The pieces of a tensor, each with the number of its part, sorted by begin, then by shape.

    Two shardings are equal if they have the same pieces in the same parts. Boxes that form a grid
    are always stored as a grid.

    Attributes:
        ndim: number of dimensions; 0 for a sharding without boxes.
        extents: for a grid, the lengths of the intervals of each dimension; None for other boxes.
        part: the part of each box.

    >>> Sharding.of([(Box((2,), (3,)), 1), (Box((0,), (2,)), 0)])
    Sharding(2 boxes, grid of (2,))
    """

    __slots__ = (
        "_begin",
        "_box_shape",
        "_edges",
        "_end",
        "_full",
        "_hash",
        "_whole",
        "extents",
        "ndim",
        "part",
    )

    ndim: int
    extents: tuple[Integers, ...] | None
    part: Integers

    def __init__(
        self,
        extents: tuple[Integers, ...] | None,
        begin: Integers | None,
        box_shape: Integers | None,
        part: Integers,
    ) -> None:
        self.extents = extents
        self.part = part
        self._begin = begin
        self._box_shape = box_shape
        self._edges: tuple[Integers, ...] | None = None
        self._end: tuple[int, ...] | None = None
        self._full: Integers | slice | None = None
        self._hash: int | None = None
        self._whole: tuple[Box, int] | None = None
        self.ndim = (
            len(extents)
            if extents is not None
            else begin.shape[1]
            if begin is not None and len(begin)
            else 0
        )
        for array in (*(extents or ()), begin, box_shape, part):
            if array is not None:
                array.flags.writeable = False

    @classmethod
    def grid(cls, extents: Sequence[Integers], part: Integers) -> Self:
        """Return the grid of all products of the intervals, in C order.

        Args:
            extents: for each dimension, the lengths of its intervals, all positive.
            part: the part of each box.
        """
        return cls(tuple(extents), None, None, part)

    @classmethod
    def boxes(cls, begin: Integers, box_shape: Integers, part: Integers) -> Self:
        """Return the sharding of sorted boxes, as a grid if they form a grid.

        Shapes: `begin` and `box_shape` are (n, ndim), `part` is (n,).
        """
        extents = _find_extents(begin, box_shape)
        return (
            cls(None, begin, box_shape, part) if extents is None else cls(extents, None, None, part)
        )

    @classmethod
    def of(cls, pieces: Iterable[tuple[Box, int]]) -> Self:
        """Return the sharding of some boxes, in any order."""
        rows = sorted(pieces)
        shape = len(rows), len(rows[0][0].begin) if rows else 0
        return cls.boxes(
            np.array([box.begin for box, _ in rows], np.int64).reshape(shape),
            np.array([box.shape for box, _ in rows], np.int64).reshape(shape),
            np.array([part for _, part in rows], np.int64),
        )

    @property
    def begin(self) -> Integers:
        """First index of each box, of shape (n, ndim)."""
        if self._begin is None:
            return self._spread([edges[:-1] for edges in self._cuts()])
        return self._begin

    @property
    def box_shape(self) -> Integers:
        """Extents of each box, of shape (n, ndim)."""
        if self._box_shape is None:
            return self._spread(self.extents or ())
        return self._box_shape

    def _cuts(self) -> tuple[Integers, ...]:
        """Return each dimension's cuts: begins of the intervals, and the end of the last one."""
        if self._edges is None:
            self._edges = tuple(map(_edges_of, self.extents or ()))
        return self._edges

    def _spread(self, columns: Sequence[Integers]) -> Integers:
        grid = np.meshgrid(*columns, indexing="ij")
        return (
            np.stack([axis.reshape(-1) for axis in grid], axis=1)
            if grid
            else np.zeros((len(self), 0), np.int64)
        )

    def __len__(self) -> int:
        return len(self.part)

    @overload
    def __getitem__(self, at: int) -> tuple[Box, int]: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[tuple[Box, int], ...]: ...
    def __getitem__(self, at: int | slice) -> tuple[Box, int] | tuple[tuple[Box, int], ...]:
        if isinstance(at, slice):
            return tuple(self)[at]
        row = range(len(self))[at]
        if self.extents is None:
            (piece,) = _pieces(
                self.begin[row : row + 1], self.box_shape[row : row + 1], self.part[row : row + 1]
            )
            return piece
        place = np.unravel_index(row, tuple(map(len, self.extents)))
        begin = (edges[i] for edges, i in zip(self._cuts(), place, strict=True))
        shape = (extents[i] for extents, i in zip(self.extents, place, strict=True))
        return Box(tuple(map(int, begin)), tuple(map(int, shape))), int(self.part[row])

    def __iter__(self) -> Iterator[tuple[Box, int]]:
        if self._is_whole():
            yield self._only()
        else:
            for at in range(0, len(self), _AT_ONCE):
                yield from self._make(np.arange(at, min(at + _AT_ONCE, len(self))))

    def iter_rows(self, rows: Integers) -> Iterator[tuple[Box, int]]:
        """Yield the pieces with the given numbers."""
        for at in range(0, len(rows), _AT_ONCE):
            yield from self._make(rows[at : at + _AT_ONCE])

    def _make(self, rows: Integers) -> list[tuple[Box, int]]:
        """Return the pieces with the given numbers, without expanding the rest of a grid."""
        if self._is_whole():
            return [self._only()] * len(rows)
        if self.extents is None:
            return _pieces(self.begin[rows], self.box_shape[rows], self.part[rows])
        places = np.unravel_index(rows, tuple(map(len, self.extents)))
        begin = np.stack(
            [edges[place] for edges, place in zip(self._cuts(), places, strict=True)], axis=1
        )
        shape = np.stack(
            [extents[place] for extents, place in zip(self.extents, places, strict=True)], axis=1
        )
        return _pieces(begin, shape, self.part[rows])

    @property
    def end(self) -> tuple[int, ...]:
        """The end of the boxes in each dimension, including empty boxes."""
        if self._end is None:
            if self.extents is not None:
                self._end = tuple(int(edges[-1]) for edges in self._cuts())
            else:
                self._end = tuple((self.begin + self.box_shape).max(axis=0, initial=0).tolist())
        return self._end

    def iter_common(self, wanted: Box) -> Iterator[tuple[Box, int]]:
        """Yield the pieces that have an element in common with `wanted`, in order.

        For a grid, two binary searches in each dimension find them; for other boxes, one pass over
        all non-empty boxes.
        """
        if not len(self) or 0 in wanted.shape:
            return
        if self._is_whole():
            piece = self._only()
            if piece[0].intersect(wanted) is not None:
                yield piece
        elif self.extents is not None:
            yield from self._iter_common_of_grid(wanted)
        else:
            full = self._find_full()
            begin = self.begin[full]
            box_shape = self.box_shape[full]
            low = np.maximum(begin, wanted.begin)
            rows = np.flatnonzero((low < np.minimum(begin + box_shape, wanted.end)).all(axis=1))
            yield from self.iter_rows(rows if isinstance(full, slice) else full[rows])

    def part_of(self, box: Box) -> int | None:
        """Return the part of a box; None if no piece equals the box."""
        if self.extents is not None or not len(self):
            return next((part for held, part in self.iter_common(box) if held == box), None)
        low = 0
        high = len(self)
        for column, value in zip(
            (*self.begin.T, *self.box_shape.T), (*box.begin, *box.shape), strict=True
        ):
            among = column[low:high]
            low, high = (
                low + int(among.searchsorted(value, "left")),
                low + int(among.searchsorted(value, "right")),
            )
        return int(self.part[low]) if low < high else None

    def _find_full(self) -> Integers | slice:
        """Return the rows of the non-empty boxes, usually all."""
        if self._full is None:
            rows = np.flatnonzero(self.box_shape.all(axis=1))
            self._full = slice(None) if len(rows) == len(self) else rows
        return self._full

    def _is_whole(self) -> bool:
        """Return whether the tensor is uncut.

        Most tensors are, and arrays of one entry are slow.
        """
        return self.extents is not None and len(self.part) == 1

    def _only(self) -> tuple[Box, int]:
        """Return the piece of an uncut tensor: one object for all tensors with this sharding."""
        if self._whole is None:
            self._whole = (
                Box.whole(tuple(int(extents[0]) for extents in self.extents or ())),
                int(self.part[0]),
            )
        return self._whole

    def _iter_common_of_grid(self, wanted: Box) -> Iterator[tuple[Box, int]]:
        cuts = self._cuts()
        low = [
            max(0, int(edges.searchsorted(at, "right")) - 1)
            for edges, at in zip(cuts, wanted.begin, strict=True)
        ]
        high = [
            min(len(edges) - 1, int(edges.searchsorted(at, "left")))
            for edges, at in zip(cuts, wanted.end, strict=True)
        ]
        shape = tuple(max(0, end - begin) for begin, end in zip(low, high, strict=True))
        count = math.prod(shape)
        if count <= _FEW:
            yield from self._make_few(low, high)
            return
        # In chunks: there may be ten million boxes, and already the first box may be an error for
        # the caller.
        grid_shape = tuple(len(edges) - 1 for edges in cuts)
        for at in range(0, count, _AT_ONCE):
            places = np.unravel_index(np.arange(at, min(at + _AT_ONCE, count)), shape)
            shifted = tuple(place + first for place, first in zip(places, low, strict=True))
            yield from self._make(np.ravel_multi_index(shifted, grid_shape))

    def _make_few(self, low: list[int], high: list[int]) -> Iterator[tuple[Box, int]]:
        """Yield the pieces of a range of a grid.

        For one piece, arrays would take three times as long.
        """
        found: list[list[tuple[int, int, int]]] = []
        stride = len(self)
        for edges, first, end in zip(self._cuts(), low, high, strict=True):
            stride //= len(edges) - 1
            pairs = itertools.pairwise(edges[first : end + 1].tolist())
            found.append([(i * stride, a, b - a) for i, (a, b) in enumerate(pairs, start=first)])
        for axes in itertools.product(*found):
            box = Box(tuple(a for _, a, _ in axes), tuple(n for _, _, n in axes))
            yield box, int(self.part[sum(i for i, _, _ in axes)])

    def _content(self) -> tuple[Integers, ...]:
        if self.extents is not None:
            return (self.part, *self.extents)
        assert self._begin is not None  # noqa: S101
        assert self._box_shape is not None  # noqa: S101
        return (self.part, self._begin, self._box_shape)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sharding):
            return NotImplemented
        if self is other:
            return True
        if hash(self) != hash(other) or (self.extents is None) != (other.extents is None):
            return False
        # Most shardings have few boxes: NumPy's comparison of small arrays takes ten times as long.
        pairs = zip(self._content(), other._content(), strict=True)
        return self.ndim == other.ndim and all(
            own.tobytes() == theirs.tobytes() for own, theirs in pairs
        )

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash(
                (self.ndim, self.extents is None, *(array.tobytes() for array in self._content()))
            )
        return self._hash

    def __repr__(self) -> str:
        form = "" if self.extents is None else f", grid of {tuple(map(len, self.extents))}"
        return f"Sharding({len(self)} boxes{form})"


def rows_increase(columns: Iterable[Integers]) -> bool:
    """Return whether the rows of some columns increase strictly in lexicographic order."""
    tied: Any = None
    for column in columns:
        step = np.diff(column)
        if (step < 0).any() if tied is None else (step[tied] < 0).any():
            return False
        tied = step == 0 if tied is None else tied & (step == 0)
        if not tied.any():
            return True
    return tied is not None and not tied.any()


def _edges_of(extents: Integers) -> Integers:
    edges: Integers = np.concatenate([np.zeros(1, np.int64), np.cumsum(extents)])
    return edges


def _pieces(begin: Integers, box_shape: Integers, part: Integers) -> list[tuple[Box, int]]:
    rows = zip(begin.tolist(), box_shape.tolist(), part.tolist(), strict=True)
    return [(Box(tuple(first), tuple(extents)), number) for first, extents, number in rows]


def _find_extents(begin: Integers, box_shape: Integers) -> tuple[Integers, ...] | None:
    """Return the intervals of each dimension if sorted boxes form a grid; else None."""
    count, ndim = begin.shape
    if not count or not box_shape.all():
        return None
    if count == 1:  # an uncut tensor, as most tensors of a single worker are
        return None if begin.any() else tuple(box_shape.reshape(ndim, 1))
    extents: list[Integers] = []
    run = count  # number of boxes for one interval of all dimensions so far
    for dim in range(ndim):
        low = begin[:run, dim]
        intervals = 1 + int(np.count_nonzero(low[1:] != low[:-1]))
        run, rest = divmod(run, intervals)
        found = box_shape[: run * intervals : run, dim]
        if rest or not np.array_equal(low[::run], np.cumsum(found) - found):
            return None
        extents.append(found)
    grid = [len(found) for found in extents]
    if math.prod(grid) != count:
        return None
    for dim, found in enumerate(extents):
        shape = [1] * ndim
        shape[dim] = -1
        for column, expected in ((begin, np.cumsum(found) - found), (box_shape, found)):
            if not (column[:, dim].reshape(grid) == expected.reshape(shape)).all():
                return None
    return tuple(np.ascontiguousarray(found) for found in extents)


# --- the columns of an index ----------------------------------------------------------------------

_KEYS: Final = ("ndim", "form", "box_count", "grid_shape", "extent", "begin", "box_shape", "part")
_BOXES: Final = 0
_GRID: Final = 1


def sharding_columns(shardings: Sequence[Sharding], part_count: int) -> dict[str, object]:
    """Return the columns of distinct shardings."""
    axes = [extents for sharding in shardings for extents in sharding.extents or ()]
    boxes = [sharding for sharding in shardings if sharding.extents is None]
    parts = join_integers([sharding.part for sharding in shardings])
    return {
        "ndim": dump_packed([sharding.ndim for sharding in shardings]),
        "form": dump_packed(
            [_BOXES if sharding.extents is None else _GRID for sharding in shardings]
        ),
        "box_count": dump_packed([len(sharding) for sharding in shardings]),
        "grid_shape": dump_packed([len(extents) for extents in axes]),
        "extent": dump_packed(join_integers(axes)),
        "begin": dump_packed(
            fold(join_integers([_steps(one.begin, one.box_shape) for one in boxes]))
        ),
        "box_shape": dump_packed(join_integers([one.box_shape.T.reshape(-1) for one in boxes])),
        # Usually boxes have the order of their writers, and every entry is 0.
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
    # Checked before any array with an entry for each box is allocated: such arrays may compress to
    # a few bytes.
    if total > limits.BOXES:
        raise err(
            Code.LIMIT_EXCEEDED,
            f"{total} boxes",
            where=table.place("box_count"),
            requirement="REQ-LIM-001",
        )
    parts = _parse_parts(table, total, part_count)
    is_grid = forms == _GRID
    grids = _iter_grids(table, ndim[is_grid].tolist(), counts[is_grid].tolist())
    boxes = _iter_boxes(table, ndim[~is_grid].tolist(), counts[~is_grid].tolist())
    shardings = []
    at = 0
    for form, count in zip(forms.tolist(), counts.tolist(), strict=True):
        part = parts[at : at + count]
        shardings.append(
            Sharding.grid(next(grids), part)
            if form == _GRID
            else Sharding.boxes(*next(boxes), part)
        )
        if form == _BOXES and shardings[-1].extents is not None:
            raise columns.unsorted("shardings", "a grid is listed box by box", "REQ-IDX-012")
        at += count
    if len(set(shardings)) != len(shardings):
        raise columns.unsorted("shardings", "two shardings are equal", "REQ-IDX-009")
    return shardings


def _parse_parts(table: Columns, count: int, part_count: int) -> Integers:
    """Return the part of each box. Computed in place, because there may be ten million boxes."""
    parts = table.packed("part", count=count, below=part_count)
    parts += 1
    np.cumsum(parts, out=parts)
    parts -= 1
    parts %= part_count
    return parts


def _iter_grids(table: Columns, ndim: list[int], counts: list[int]) -> Iterator[list[Integers]]:
    """Check all grids, then yield the intervals of each dimension of each grid."""
    table.take("grid_shape", extents=sum(ndim))
    lengths = table.packed("grid_shape", count=sum(ndim), below=limits.BOXES + 1)
    extents = table.packed("extent", count=int(lengths.sum()), below=limits.DIM + 1)
    if not lengths.all() or not extents.all():
        raise table.broken(
            "extent", "a dimension without intervals, or an interval without elements"
        )
    ends = np.cumsum(lengths).tolist()
    axes = [extents[begin:end] for begin, end in itertools.pairwise([0, *ends])]
    grids = []
    at = 0
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
        if product > count:  # for many dimensions, the product may be a huge integer
            break
    if product != count:
        raise table.broken("box_count", f"{count} boxes where the intervals make {product} or more")
    # Exact up to the limit, and without overflow.
    if any(axis.sum(dtype=np.float64) > limits.DIM for axis in grid):
        raise table.broken(
            "extent", f"intervals of more than {limits.DIM} elements in one dimension"
        )


def _iter_boxes(
    table: Columns, ndim: list[int], counts: list[int]
) -> Iterator[tuple[Integers, Integers]]:
    """Check all other shardings, then yield begin and shape of the boxes of each."""
    sizes = [rank * count for rank, count in zip(ndim, counts, strict=True)]
    table.take("begin", extents=sum(sizes))
    steps = unfold(table.packed("begin", count=sum(sizes), below=2 * limits.DIM + 1))
    extents = table.packed("box_shape", count=sum(sizes), below=limits.DIM + 1)
    found = []
    at = 0
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
        # Without dimensions, two boxes would be equal, and a single box is a grid.
        return table.unsorted("begin", "boxes of no dimensions", "REQ-IDX-012")
    return table.broken("ndim", f"{rank} dimensions of no boxes")


def _steps(begin: Integers, box_shape: Integers) -> Integers:
    """Return the begins of boxes as differences, dimension by dimension.

    Shapes: (n, ndim) to (n * ndim,).

    A difference is taken from the previous box's begin, or in the last dimension from its end, so
    most are small.
    """
    steps = np.diff(begin, axis=0, prepend=0)
    steps[1:, -1:] -= box_shape[:-1, -1:]
    joined: Integers = steps.T.reshape(-1)
    return joined


def _begins(steps: Integers, box_shape: Integers) -> Integers:
    """Return the begins of boxes from differences. Shapes: (n, ndim) to (n, ndim)."""
    steps = steps.copy()
    steps[1:, -1:] += box_shape[:-1, -1:]
    begin: Integers = np.cumsum(steps, axis=0)
    return begin
