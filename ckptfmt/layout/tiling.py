"""Check that boxes tile a tensor exactly, by sums of signed corners.

Each box has the sign ``+1`` at the corner where it begins, and the sign changes for every
coordinate that is an end. The sum of all boxes' corners marks the places where the number of boxes
above an element changes. Boxes tile a tensor if and only if this sum equals the corners of the
whole tensor. The first corner (in C order) at which the two differ is the first element in no box
or in more than one box: all smaller elements have the right count, so the change at this corner is
the wrong count itself.

Boxes cut in d dimensions have ``boxes * 2**d`` corners. The corners aren't computed one by one:
sums of random products find the first difference, at the cost of sorting ``boxes * d`` integers.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ckptfmt import limits
from ckptfmt.documents.sharding import Sharding
from ckptfmt.errors import Code, err

#: An array of shape (n, ndim), in elements, of any integer dtype.
Rows: TypeAlias = NDArray[Any]
_Ints: TypeAlias = NDArray[np.int64]

_REQUIREMENT: Final = "REQ-IDX-004"

#: A prime below 2^31. A product of two remainders fits into 62 bits, a sum of 2^32 remainders into
#: 63.
_PRIME: Final = (1 << 31) - 1
#: Number of random draws. A draw misses a difference in eight dimensions with probability 2^-28,
#: all three with 2^-84.
_DRAWS: Final = 3


def check_sharding(sharding: Sharding, global_shape: tuple[int, ...], *, where: str) -> None:
    """Check that the boxes of a sharding tile ``[0, global_shape)``.

    For a grid, the extents of each dimension only have to add up to the tensor's extent.

    Raises: the errors of `check_tiling`. Spec: REQ-IDX-004, REQ-LIM-001.
    """
    if sharding.extents is None:
        # Tensors without elements may share a sharding and differ in shape. A comparison with the
        # sharding's end avoids a check of all boxes for each of them.
        if 0 in global_shape and all(
            end <= extent for end, extent in zip(sharding.end, global_shape, strict=False)
        ):
            return
        rows = (len(sharding), len(global_shape))
        check_tiling(
            global_shape,
            sharding.begin.reshape(rows),
            sharding.box_shape.reshape(rows),
            where=where,
        )
        return
    _check_cuts(len(sharding), sum(len(extents) > 1 for extents in sharding.extents), where)
    sums = [int(extents.sum()) for extents in sharding.extents]
    for dim, (total, extent) in enumerate(zip(sums, global_shape, strict=True)):
        if total > extent:
            detail = f"boxes up to {total} leave the tensor's {global_shape} in dimension {dim}"
            raise err(Code.BOX_BOUNDS, detail, where=where, requirement=_REQUIREMENT)
    short = [dim for dim, extent in enumerate(global_shape) if sums[dim] < extent]
    if short:
        # In C order, the first uncovered element lies at the end of the last dimension with too
        # small a sum.
        point = tuple(sums[dim] if dim == short[-1] else 0 for dim in range(len(global_shape)))
        detail = f"element {point} is in no box of the {len(sharding)}"
        raise err(Code.TILING_GAP, detail, where=where, requirement=_REQUIREMENT)


def _check_cuts(box_count: int, split_ndim: int, where: str) -> None:
    if split_ndim > limits.SPLIT_NDIM:
        detail = f"cut in {split_ndim} dimensions; at most {limits.SPLIT_NDIM} are allowed"
        raise err(Code.LIMIT_EXCEEDED, detail, where=where, requirement="REQ-LIM-001")
    if box_count << split_ndim > limits.CORNERS:
        detail = (
            f"{box_count} boxes cut in {split_ndim} dimensions; at most {limits.CORNERS}"
            " corners are allowed"
        )
        raise err(Code.LIMIT_EXCEEDED, detail, where=where, requirement="REQ-LIM-001")


def check_tiling(
    global_shape: tuple[int, ...], begin: Rows, box_shape: Rows, *, where: str
) -> None:
    """Check that boxes tile ``[0, global_shape)``: every element is in exactly one box.

    Empty boxes are ignored, so a tensor without elements needs no box.

    Args:
        global_shape: the tensor's shape, in elements.
        begin: first index of each box.
        box_shape: extent of each box.
        where: the tensor's name or place in a document, for the error.

    Shapes: `begin` and `box_shape` are (n, ndim), of any integer dtype.
    Raises: BOX_BOUNDS, TILING_GAP, TILING_OVERLAP; LIMIT_EXCEEDED when the tensor is too large, or
        cut in more than `limits.SPLIT_NDIM` dimensions; ARGUMENT when the arrays don't fit the
        tensor.
    Spec: REQ-IDX-004, REQ-LIM-001.
    Source: summed-area tables, F. C. Crow, SIGGRAPH 1984, in reverse.

    >>> check_tiling((4, 6), np.array([[0, 0], [0, 2]]), np.array([[4, 2], [4, 4]]), where="w")
    >>> check_tiling((4, 6), np.array([[0, 0], [0, 2]]), np.array([[4, 2], [3, 4]]), where="w")
    Traceback (most recent call last):
    ckptfmt.errors.LayoutError: TILING_GAP at w: element (3, 2) is in no box of the 2 [REQ-IDX-004].
        Remedy: ...
    """
    check_bounds(global_shape, begin, box_shape, where=where)
    held = (box_shape > 0).all(axis=1)
    begin = begin[held].astype(np.int64)
    end = begin + box_shape[held].astype(np.int64)
    if 0 in global_shape:
        return
    split = [
        j
        for j, extent in enumerate(global_shape)
        if (begin[:, j] > 0).any() or (end[:, j] < extent).any()
    ]
    _check_cuts(len(begin), len(split), where)
    wrong = _first_wrong(tuple(global_shape[j] for j in split), begin[:, split], end[:, split])
    if wrong is None:
        return
    point = np.zeros(len(global_shape), np.int64)
    point[split] = wrong
    raise _tiling_error(point, begin, end, where)


def check_bounds(
    global_shape: tuple[int, ...], begin: Rows, box_shape: Rows, *, where: str
) -> None:
    """Check that each box, even an empty box, lies within the tensor.

    Shapes: `begin` and `box_shape` are (n, ndim), of any integer dtype, in elements.
    Raises: BOX_BOUNDS; LIMIT_EXCEEDED when the tensor is too large; ARGUMENT when the arrays don't
        fit the tensor.
    Spec: REQ-IDX-004, REQ-LIM-001.

    >>> check_bounds((4,), np.array([[3]]), np.array([[2]]), where="w")
    Traceback (most recent call last):
    ckptfmt.errors.LayoutError: BOX_BOUNDS at w: box 0, begin (3,) and shape (2,), leaves the
        tensor's (4,) ...
    """
    ndim = len(global_shape)
    if ndim > limits.NDIM or any(not 0 <= extent <= limits.DIM for extent in global_shape):
        detail = (
            f"shape {global_shape}: at most {limits.NDIM} dimensions of at most {limits.DIM}"
            " elements are allowed"
        )
        raise err(Code.LIMIT_EXCEEDED, detail, where=where, requirement="REQ-LIM-001")
    if begin.ndim != 2 or begin.shape != box_shape.shape or begin.shape[1] != ndim:
        detail = (
            f"arrays of {begin.shape} and {box_shape.shape} don't hold boxes of {ndim} dimensions"
        )
        raise err(Code.ARGUMENT, detail, where=where)
    for j, extent in enumerate(global_shape):
        low = begin[:, j]
        count = box_shape[:, j]
        outside = (low < 0) | (count < 0) | (low > extent) | (count > extent)
        # Only small values are added, and in int64: a sum in the array's own dtype may overflow.
        outside |= (
            np.where(outside, 0, low).astype(np.int64)
            + np.where(outside, 0, count).astype(np.int64)
            > extent
        )
        if outside.any():
            row = int(outside.argmax())
            detail = (
                f"box {row}, begin {_ints(begin[row])} and shape {_ints(box_shape[row])}, leaves"
                " the tensor's"
                f" {global_shape} in dimension {j}"
            )
            raise err(Code.BOX_BOUNDS, detail, where=where, requirement=_REQUIREMENT)


def _first_wrong(shape: tuple[int, ...], begin: _Ints, end: _Ints) -> _Ints | None:
    """Return the first point of `shape` in no box or in several; None if there is no such point.

    Each coordinate has a random factor. A box contributes the product of ``factor(begin) -
    factor(end)`` over all dimensions, in which each corner is one term. Different sums prove that
    the corners differ. Different corners give different sums except with probability 2^-84: d / p
    for each of `_DRAWS` draws, which can't be predicted.
    """
    if not shape:
        return None if len(begin) == 1 else np.zeros(0, np.int64)
    # The whole tensor is added as a box of the opposite sign: then all corners of a tiling cancel
    # out.
    begin = np.concatenate([begin, np.zeros((1, len(shape)), np.int64)])
    end = np.concatenate([end, np.array([shape], np.int64)])
    sign = np.ones(len(begin), np.int64)
    sign[-1] = -1
    wrong = np.zeros(len(shape), np.int64)
    for dim in range(len(shape)):
        coordinate = _first_unequal(begin[:, dim:], end[:, dim:], sign)
        while coordinate is None:
            if dim == 0:
                return None
            # Draw again: a difference exists.
            coordinate = _first_unequal(begin[:, dim:], end[:, dim:], sign)
        wrong[dim] = coordinate
        begins = begin[:, dim] == coordinate
        rows = np.flatnonzero(begins | (end[:, dim] == coordinate))
        sign = np.where(begins[rows], sign[rows], -sign[rows])
        begin = begin[rows]
        end = end[rows]
    return wrong


def _first_unequal(begin: _Ints, end: _Ints, sign: _Ints) -> int | None:
    """Return the smallest first coordinate with corners that don't cancel out; None if all do."""
    places, rank = np.unique(np.concatenate([begin[:, 0], end[:, 0]]), return_inverse=True)
    rank = rank.reshape(2, -1)
    # Seeded by the operating system: unpredictable for the writer of a checkpoint.
    random = np.random.default_rng()
    unequal = np.zeros(len(places), np.bool_)
    products = [sign % _PRIME for _ in range(_DRAWS)]
    for dim in range(1, begin.shape[1]):
        ranks, count = _ranks(np.concatenate([begin[:, dim], end[:, dim]]))
        low, high = ranks.reshape(2, -1)
        for draw in range(_DRAWS):
            factor = random.integers(_PRIME, size=count)
            products[draw] = products[draw] * ((factor[low] - factor[high]) % _PRIME) % _PRIME
    for product in products:
        total = np.zeros(len(places), np.int64)
        np.add.at(total, rank[0], product)
        np.subtract.at(total, rank[1], product)
        unequal |= total % _PRIME != 0
    return int(places[unequal.argmax()]) if unequal.any() else None


def _ranks(values: _Ints) -> tuple[_Ints, int]:
    """Return each value's rank among the distinct values, and the number of distinct values."""
    different, rank = np.unique(values, return_inverse=True)
    return rank.reshape(-1).astype(np.int64), len(different)


def _tiling_error(point: _Ints, begin: _Ints, end: _Ints, where: str) -> Exception:
    owners = np.flatnonzero(((begin <= point) & (point < end)).all(axis=1))
    if not len(owners):
        detail = f"element {_ints(point)} is in no box of the {len(begin)}"
        return err(Code.TILING_GAP, detail, where=where, requirement=_REQUIREMENT)
    first, second = (f"{_ints(begin[row])} to {_ints(end[row])}" for row in owners[:2])
    detail = f"element {_ints(point)} is in {len(owners)} boxes, among them {first} and {second}"
    return err(Code.TILING_OVERLAP, detail, where=where, requirement=_REQUIREMENT)


def _ints(values: Rows) -> tuple[int, ...]:
    return tuple(int(value) for value in values)
