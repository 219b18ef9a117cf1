"""The tables common to index and parts, and the index itself; spec/core/40-index-and-parts.md."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from conformance.generate.plans import FIELDS, Box, Leaf, Plan, Stream, Tensor
from conformance.generate.wire import FORMAT_VERSION, Folded, Packed, Strings

__all__ = [
    "base_document",
    "index_of",
    "leaf_rows",
    "sharding_tables",
    "stream_rows",
    "tensor_rows",
]

#: The boxes of a tensor with their writers, and the number of dimensions.
Sharding = tuple[tuple[tuple[Box, int], ...], int]


def base_document(kind: str, plan: Plan) -> dict[str, Any]:
    """Return the first members of every document of an attempt."""
    return {
        "type": kind,
        "format_version": FORMAT_VERSION,
        "features": {"reader": [], "writer": []},
        **plan.origin(),
        "saved_unix_s": plan.saved_unix_s,
    }


def scopes_of(*rows: Iterable[Tensor | Leaf | Stream]) -> list[str]:
    """Return the scopes that occur, sorted."""
    return sorted({one.scope for one in itertools.chain(*rows)})


def tensor_rows(tensors: Sequence[Tensor], scopes: list[str], dtypes: list[str]) -> dict[str, Any]:
    """Return the columns of tensors common to index and parts."""
    return {
        "field": Packed(FIELDS.index(one.field) for one in tensors),
        "name": Strings(one.name for one in tensors),
        "scope": Packed(scopes.index(one.scope) for one in tensors),
        "dtype": Packed(dtypes.index(one.dtype) for one in tensors),
        "ndim": Packed(len(one.shape) for one in tensors),
        "global_shape": Packed(extent for one in tensors for extent in one.shape),
        "storage": Packed(one.storage for one in tensors),
    }


def alias_rows(tensors: Sequence[Tensor]) -> dict[str, Any]:
    """Return the table of aliases."""
    rows = [
        (number, name)
        for number, one in enumerate(tensors)
        for name in sorted(one.aliases, key=str.encode)
    ]
    return {
        "tensor": Packed(number for number, _ in rows),
        "name": Strings(name for _, name in rows),
    }


def stream_rows(streams: Sequence[Stream], scopes: list[str]) -> dict[str, Any]:
    """Return the columns of streams common to index and parts."""
    return {
        "name": Strings(one.name for one in streams),
        "scope": Packed(scopes.index(one.scope) for one in streams),
        "kind": Strings(one.kind for one in streams),
    }


def leaf_rows(leaves: Sequence[Leaf], scopes: list[str]) -> dict[str, Any]:
    """Return the columns of leaves common to index and parts."""
    return {
        "field": Packed(FIELDS.index(one.field) for one in leaves),
        "name": Strings(one.name for one in leaves),
        "scope": Packed(scopes.index(one.scope) for one in leaves),
    }


def index_of(plan: Plan, parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the index that a committer makes from the parts of a plan."""
    tensors = sorted(plan.tensors, key=lambda one: one.order)
    leaves = sorted(plan.leaves, key=lambda one: one.order)
    streams = sorted(plan.streams, key=lambda one: one.order)
    scopes = scopes_of(tensors, leaves, streams)
    dtypes = sorted({one.dtype for one in tensors})
    shardings: dict[Sharding, int] = {}
    numbers = [shardings.setdefault(_sharding_of(one), len(shardings)) for one in tensors]
    return {
        **base_document("index", plan),
        "scopes": scopes,
        "dtypes": dtypes,
        "parts": {"nbytes": Packed([0] * len(parts)), "digest": bytes(32 * len(parts))},
        "tensors": {**tensor_rows(tensors, scopes, dtypes), "sharding": Packed(numbers)},
        "aliases": alias_rows(tensors),
        "shardings": sharding_tables(list(shardings), plan.writer_count),
        "streams": {
            **stream_rows(streams, scopes),
            "part": Packed(min(one.writers) for one in streams),
        },
        "leaves": {**leaf_rows(leaves, scopes), "part": Packed(min(one.writers) for one in leaves)},
        "absent": plan.reasons(),
    }


def _sharding_of(tensor: Tensor) -> Sharding:
    """Return the boxes of a tensor, sorted, each with the lowest of its writers."""
    found: dict[Box, int] = {}
    for piece in tensor.pieces:
        has_room = 0 in tensor.shape or 0 not in piece.shape
        if piece.written and not piece.ghost and has_room:
            box = piece.begin, piece.shape
            found[box] = min(found.get(box, piece.writer), piece.writer)
    return tuple(sorted(found.items())), len(tensor.shape) if found else 0


def _grid_of(boxes: Sequence[Box], ndim: int) -> list[list[int]] | None:
    """Return the lengths of the intervals along each dimension, if the boxes are a grid."""
    if not boxes or any(not extent for _, shape in boxes for extent in shape):
        return None
    axes = [sorted({(begin[axis], shape[axis]) for begin, shape in boxes}) for axis in range(ndim)]
    for axis in axes:
        if [begin for begin, _ in axis] != list(
            itertools.accumulate((n for _, n in axis), initial=0)
        )[:-1]:
            return None
    product = {
        (tuple(b for b, _ in box), tuple(n for _, n in box)) for box in itertools.product(*axes)
    }
    return [[extent for _, extent in axis] for axis in axes] if product == set(boxes) else None


def sharding_tables(shardings: Sequence[Sharding], writer_count: int) -> dict[str, Any]:
    """Return the tables of shardings."""
    table: dict[str, Any] = {
        key: Packed()
        for key in ("ndim", "form", "box_count", "grid_shape", "extent", "box_shape", "part")
    }
    table["begin"] = Folded()
    before = -1
    for rows, ndim in shardings:
        boxes = [box for box, _ in rows]
        grid = _grid_of(boxes, ndim)
        table["ndim"].append(ndim)
        table["form"].append(int(grid is not None))
        table["box_count"].append(len(boxes))
        if grid is not None:
            table["grid_shape"] += [len(axis) for axis in grid]
            table["extent"] += [extent for axis in grid for extent in axis]
        else:
            _add_other_boxes(table, boxes, ndim)
        for _, writer in rows:
            table["part"].append((writer - before - 1) % writer_count)
            before = writer
    return table


def _add_other_boxes(table: dict[str, Any], boxes: Sequence[Box], ndim: int) -> None:
    for axis in range(ndim):
        end = 0
        for begin, shape in boxes:
            table["begin"].append(begin[axis] - end)
            end = begin[axis] + (shape[axis] if axis == ndim - 1 else 0)
        table["box_shape"] += [shape[axis] for _, shape in boxes]
