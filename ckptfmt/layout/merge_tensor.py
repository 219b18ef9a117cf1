"""What the writers hold of one tensor, merged into its sharding. Spec: REQ-CMT-012 to REQ-CMT-016, REQ-PRT-011.

Everything is columns, with a row for each box of each writer: replicas are rows that are equal.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptfmt.box import Box
from ckptfmt.digest import DIGEST_NBYTES
from ckptfmt.documents.packed import join_integers
from ckptfmt.documents.sharding import Sharding, rows_increase
from ckptfmt.documents.tables import title_of
from ckptfmt.errors import CkptError, Code, err

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ckptfmt.documents.holdings import Holdings
    from ckptfmt.documents.packed import Integers
    from ckptfmt.documents.tables import TensorTable


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pieces:
    """The boxes that writers hold of one tensor, in the order of the writers.

    Attributes:
        begin: first index of each box: (n, ndim).
        box_shape: extents of each box: (n, ndim).
        writer: who holds it.
        replica: whether its holder declares that it is a replica.
        written: whether its holder wrote it.
        digest_begin: number of its first digest, among those of its holder.
        digest_count: number of its digests.
        digests: of each writer.
    """

    begin: Integers
    box_shape: Integers
    writer: Integers
    replica: NDArray[np.bool_]
    written: NDArray[np.bool_]
    digest_begin: Integers
    digest_count: Integers
    digests: Sequence[bytes]

    def take(self, rows: NDArray[np.intp]) -> Pieces:
        """Return some of the rows, in another order."""
        columns = (field.name for field in dataclasses.fields(self) if field.name != "digests")
        return Pieces(digests=self.digests, **{name: getattr(self, name)[rows] for name in columns})

    def box(self, row: int) -> Box:
        """Return the box of a row."""
        return Box(tuple(self.begin[row].tolist()), tuple(self.box_shape[row].tolist()))

    def digests_of(self, row: int) -> bytes:
        """Return the digests of a row."""
        begin, count = int(self.digest_begin[row]), int(self.digest_count[row])
        return self.digests[int(self.writer[row])][begin * DIGEST_NBYTES : (begin + count) * DIGEST_NBYTES]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Gathered:
    """The boxes that writers hold of all tensors, by tensor, each tensor's in the order of the writers.

    Attributes:
        ndim: number of dimensions of each tensor.
        end: of each tensor, the row behind its last.
        begin, box_shape: of all boxes in the order of their writers, flattened.
        place: of each row, where its numbers begin in those.
        columns: the other columns of `Pieces`.
        digests: of each writer.
    """

    ndim: Integers
    end: Integers
    begin: Integers
    box_shape: Integers
    place: Integers
    columns: dict[str, NDArray[Any]]
    digests: Sequence[bytes]

    def of(self, tensor: int) -> Pieces:
        """Return the rows of one tensor."""
        rows = slice(int(self.end[tensor - 1]) if tensor else 0, int(self.end[tensor]))
        place = self.place[rows, None] + np.arange(self.ndim[tensor])
        own = {name: column[rows] for name, column in self.columns.items()}
        return Pieces(begin=self.begin[place], box_shape=self.box_shape[place], digests=self.digests, **own)

    def merge_alone(self) -> dict[int, Sharding]:
        """Return the shardings of tensors of which one box is held, with elements, by who wrote it: most have no other.

        Equal ones are one object.
        """
        alone = np.flatnonzero(np.diff(self.end, prepend=0) == 1)
        alone = alone[self.columns["written"][self.end[alone] - 1]]
        found: dict[int, Sharding] = {}
        for rank in np.unique(self.ndim[alone]).tolist():
            tensors = alone[self.ndim[alone] == rank]
            rows = self.end[tensors] - 1
            place = self.place[rows, None] + np.arange(rank)
            begin, box_shape, writer = self.begin[place], self.box_shape[place], self.columns["writer"][rows]
            full = box_shape.all(axis=1)
            described = np.column_stack([writer, begin, box_shape])[full]
            _, first, kinds = np.unique(described, axis=0, return_index=True, return_inverse=True)
            shardings = [
                Sharding.boxes(row[None, 1 : 1 + rank], row[None, 1 + rank :], row[:1]) for row in described[first]
            ]
            found.update(zip(tensors[full].tolist(), (shardings[kind] for kind in kinds.ravel().tolist()), strict=True))
        return found


def merge_all_pieces(
    held: Sequence[Holdings], numbers: Sequence[Integers], tensors: TensorTable, block_nbytes: int
) -> list[Sharding]:
    """Return the sharding of each tensor, after comparing all copies of a box that have digests. Equal ones are one.

    Args:
        held: what each writer holds.
        numbers: for each writer, the number of the tensor of each of its rows.
        tensors: of all writers.

    Raises: as `merge_pieces`.
    """
    gathered = _gather(held, numbers, tensors.ndim)
    alone = gathered.merge_alone()
    known = {sharding: sharding for sharding in alone.values()}
    shardings = []
    for number, (key, global_shape) in enumerate(zip(tensors.keys, tensors.global_shapes, strict=True)):
        sharding = alone.get(number)
        if sharding is None:
            merged = merge_pieces(gathered.of(number), global_shape, block_nbytes, where=title_of(key))
            sharding = known.setdefault(merged, merged)
        shardings.append(sharding)
    return shardings


def _gather(held: Sequence[Holdings], numbers: Sequence[Integers], ndim: Integers) -> _Gathered:
    tensor = join_integers([np.repeat(of, holdings.box_count) for of, holdings in zip(numbers, held, strict=True)])
    # Numbers of two bytes are sorted by counting, ten times as fast; parts come in order, and equal rows stay in it.
    order = np.argsort(tensor.astype(np.uint16) if len(ndim) <= 1 << 16 else tensor, kind="stable")
    rank = ndim[tensor]
    return _Gathered(
        ndim=ndim,
        end=np.cumsum(np.bincount(tensor, minlength=len(ndim))),
        begin=join_integers([one.begin for one in held]),
        box_shape=join_integers([one.box_shape for one in held]),
        place=(np.cumsum(rank) - rank)[order],
        columns={
            "writer": np.repeat(np.arange(len(held)), [len(one.replica) for one in held])[order],
            "replica": np.concatenate([one.replica for one in held])[order],
            "written": np.concatenate([one.written for one in held])[order],
            "digest_begin": join_integers([np.cumsum(one.digest_count) - one.digest_count for one in held])[order],
            "digest_count": join_integers([one.digest_count for one in held])[order],
        },
        digests=[one.digests for one in held],
    )


def merge_pieces(held: Pieces, global_shape: tuple[int, ...], block_nbytes: int, *, where: str) -> Sharding:
    """Return the sharding of a tensor, after comparing all copies of a box that have digests.

    Args:
        where: the tensor's name, for messages.

    Raises: LayoutError(TILING_OVERLAP, REPLICA_DIVERGED, HELD_NOT_WRITTEN).
    Spec: REQ-CMT-012, REQ-CMT-013, REQ-CMT-016, REQ-PRT-011.
    """
    if 0 not in global_shape:
        full = held.box_shape.all(axis=1)
        held = held if full.all() else held.take(np.flatnonzero(full))
    if not len(held.writer):
        return Sharding.of(())
    if len(held.writer) == 1 and held.written[0]:
        return Sharding.boxes(held.begin, held.box_shape, held.writer)
    held, first = _sort(held, global_shape)
    if len(first) == len(held.writer) and held.written.all():
        return Sharding.boxes(held.begin, held.box_shape, held.writer)
    _check_listed_once(held, first, where)
    _check_replicas(held, first, block_nbytes, where)
    nobody = np.iinfo(np.int64).max
    part = np.minimum.reduceat(np.where(held.written, held.writer, nobody), first)
    return Sharding.boxes(held.begin[first], held.box_shape[first], part)


def _sort(held: Pieces, global_shape: tuple[int, ...]) -> tuple[Pieces, NDArray[np.intp]]:
    """Return the rows sorted by box, holders of one box by writer, and the first row of each box."""
    ndim = len(global_shape)
    # Most often, where boxes begin in C order sorts them already; whether it did is looked at, not believed.
    strides = [math.prod(global_shape[dim + 1 :]) for dim in range(ndim)]
    place = held.begin @ np.array(strides, np.int64) if 0 not in global_shape else np.zeros(len(held.writer), np.int64)
    found = held.take(np.argsort(place, kind="stable"))
    if rows_increase([*found.begin.T, *found.box_shape.T]):
        return found, np.arange(len(held.writer))
    columns = [*held.begin.T, *held.box_shape.T]
    found = held.take(np.lexsort(columns[::-1])) if columns else held
    new = (np.diff(found.begin, axis=0) != 0).any(axis=1) | (np.diff(found.box_shape, axis=0) != 0).any(axis=1)
    return found, np.concatenate([np.zeros(1, np.intp), np.flatnonzero(new) + 1])


def _check_listed_once(held: Pieces, first: NDArray[np.intp], where: str) -> None:
    again = held.writer[1:] == held.writer[:-1]
    again[first[1:] - 1] = False
    if again.any():
        row = int(again.argmax())
        raise err(
            Code.TILING_OVERLAP,
            f"writer {held.writer[row]} lists {held.box(row)} twice",
            where=where,
            requirement="REQ-PRT-011",
        )


def _check_replicas(held: Pieces, first: NDArray[np.intp], block_nbytes: int, where: str) -> None:
    """Raise for the first box that its holders don't agree about, or that none of them wrote."""
    holders = np.diff(first, append=len(held.writer))
    known = np.add.reduceat((held.digest_count > 0).astype(np.int64), first)
    wrong = (holders > 1) & ~np.logical_and.reduceat(held.replica, first) & (known != 0) & (known != holders)
    silent = wrong.copy()
    wrong |= ~np.logical_or.reduceat(held.written, first)
    for box in np.flatnonzero(known > 1).tolist():
        if wrong[box]:
            continue
        rows = range(int(first[box]), int(first[box] + holders[box]))
        wrong[box] = _find_different(held, rows) is not None
    if wrong.any():
        box = int(wrong.argmax())
        rows = range(int(first[box]), int(first[box] + holders[box]))
        raise _describe_wrong(held, rows, block_nbytes, where, silent=bool(silent[box]))


def _find_different(held: Pieces, rows: range) -> tuple[int, int] | None:
    """Return the first two rows that have digests, and different ones."""
    known = [row for row in rows if held.digest_count[row]]
    digests = held.digests_of(known[0]) if known else b""
    return next(((known[0], row) for row in known[1:] if held.digests_of(row) != digests), None)


def _describe_wrong(held: Pieces, rows: range, block_nbytes: int, where: str, *, silent: bool) -> CkptError:
    if silent:
        writer = next(int(held.writer[row]) for row in rows if not held.digest_count[row])
        detail = f"writer {writer} gives no digest of what it holds, and not every holder says that it is a replica"
        return err(Code.REPLICA_DIVERGED, detail, where=where, requirement="REQ-CMT-012")
    pair = _find_different(held, rows)
    if pair is None:
        writers = ", ".join(str(held.writer[row]) for row in rows[:8])
        detail = f"writers {writers} hold {held.box(rows[0])}; none wrote it"
        return err(Code.HELD_NOT_WRITTEN, detail, where=where, requirement="REQ-CMT-013")
    one, other = (held.digests_of(row) for row in pair)
    different = itertools.zip_longest(_split(one), _split(other))
    block = next(number for number, (a, b) in enumerate(different) if a != b)
    writers = " and ".join(str(held.writer[row]) for row in pair)
    detail = (
        f"block {block} (from byte {block * block_nbytes}) of {held.box(rows[0])} differs between writers {writers}"
    )
    return err(Code.REPLICA_DIVERGED, detail, where=where, requirement="REQ-CMT-012")


def _split(digests: bytes) -> list[bytes]:
    return [digests[begin : begin + DIGEST_NBYTES] for begin in range(0, len(digests), DIGEST_NBYTES)]
