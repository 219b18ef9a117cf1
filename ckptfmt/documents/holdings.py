"""What a writer holds: boxes of tensors, where they are stored, digests; as columns, and as rows for who wants those.

Spec: REQ-PRT-002 to REQ-PRT-007.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final, overload

import numpy as np

from ckptfmt import limits
from ckptfmt.box import Box
from ckptfmt.digest import DIGEST_NBYTES
from ckptfmt.documents.extents import (
    Extent,
    Extents,
    Files,
    check_smaller,
    make_integers,
    parse_extents,
    place_extents,
    total_of,
)
from ckptfmt.documents.packed import Columns, Integers, Strings, dump_packed, dump_strings, fold
from ckptfmt.documents.tables import TensorKey, TensorTable
from ckptfmt.dtypes import DTYPES
from ckptfmt.errors import CkptError, Code, err
from ckptfmt.features import ENCODINGS

if TYPE_CHECKING:
    from numpy.typing import NDArray

_BOX_KEYS: Final = ("begin", "cut_shape", "replica", "digest_count")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PartBox:
    """A piece that the writer holds.

    Attributes:
        box: which piece, in elements of the tensor.
        replica: declared as a replica by the mesh or by the caller.
        digests: 32 bytes for each block; empty for a declared replica that another writer writes.
        extents: where its blocks are stored; empty for a piece that another writer writes.
    """

    box: Box
    replica: bool
    digests: bytes
    extents: tuple[Extent, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PartTensor:
    """A tensor of which the writer holds pieces; `aliases` are other names of the same storage."""

    field: str
    name: str
    scope: str
    dtype: str
    global_shape: tuple[int, ...]
    storage: str
    aliases: tuple[str, ...]
    boxes: tuple[PartBox, ...]

    @property
    def key(self) -> TensorKey:
        """What the tensor is called."""
        return self.field, self.name, self.scope

    def box_nbytes(self, box: Box) -> int:
        """Return the size of a piece in bytes."""
        return box.element_count * DTYPES[self.dtype].nbytes


def extent_nbytes(tensor: PartTensor, held: PartBox, extent: Extent, block_nbytes: int) -> int:
    """Return the number of bytes that a raw extent stores."""
    total = tensor.box_nbytes(held.box)
    begin = extent.block_begin * block_nbytes
    return min(total, begin + extent.block_count * block_nbytes) - begin


class Holdings(Sequence[PartTensor]):
    """The tensors of a part, with their boxes. Rows are made when they are first asked for.

    Attributes:
        table: what the tensors are.
        box_count: how many boxes of each tensor are held.
        begin: first index of each box, flattened.
        box_shape: extents of each box, flattened.
        replica: of each box, as in `PartBox`.
        digest_count: number of digests of each box.
        digests: of all boxes, one behind the other.
        extents: where boxes are stored.
        written: of each box, whether it has extents.
    """

    __slots__ = (
        "_rows", "begin", "box_count", "box_shape", "digest_count", "digests", "extents", "replica", "table", "written",
    )  # fmt: skip

    def __init__(
        self,
        *,
        table: TensorTable,
        box_count: Integers,
        begin: Integers,
        box_shape: Integers,
        replica: NDArray[np.bool_],
        digest_count: Integers,
        digests: bytes,
        extents: Extents,
        rows: tuple[PartTensor, ...] | None = None,
    ) -> None:
        self.table = table
        self.box_count = box_count
        self.begin = begin
        self.box_shape = box_shape
        self.replica = replica
        self.digest_count = digest_count
        self.digests = digests
        self.extents = extents
        self.written: NDArray[np.bool_] = np.bincount(extents.box, minlength=len(replica)) > 0
        self._rows = rows

    @classmethod
    def of(cls, tensors: Sequence[PartTensor]) -> Holdings:
        """Return the columns of rows."""
        if isinstance(tensors, Holdings):
            return tensors
        boxes = [held for tensor in tensors for held in tensor.boxes]
        extents = [(row, extent) for row, held in enumerate(boxes) for extent in held.extents]
        return cls(
            table=TensorTable.of(tensors),
            box_count=make_integers(len(tensor.boxes) for tensor in tensors),
            begin=make_integers(first for held in boxes for first in held.box.begin),
            box_shape=make_integers(extent for held in boxes for extent in held.box.shape),
            replica=np.array([held.replica for held in boxes], np.bool_),
            digest_count=make_integers(len(held.digests) // DIGEST_NBYTES for held in boxes),
            digests=b"".join(held.digests for held in boxes),
            extents=Extents.of(extents),
            rows=tuple(tensors),
        )

    def refilled(self, digests: bytes, extents: Extents | None = None) -> Holdings:
        """Return the same boxes with other contents.

        Args:
            digests: of all boxes, as many of each as now.
            extents: where they are stored; None for where they are now.
        """
        if len(digests) != len(self.digests):
            raise ValueError(f"{len(digests)} bytes of digests where {len(self.digests)} were")
        return Holdings(
            table=self.table,
            box_count=self.box_count,
            begin=self.begin,
            box_shape=self.box_shape,
            replica=self.replica,
            digest_count=self.digest_count,
            digests=digests,
            extents=self.extents if extents is None else extents,
        )

    def box_columns(
        self, block_nbytes: int, header_nbytes: Sequence[int], encodings: Sequence[str], *, is_delta: bool
    ) -> dict[str, object]:
        """Return the tables of boxes and extents, and the digests, as a part has them.

        Args:
            block_nbytes: size of a block in bytes.
            header_nbytes: size of the header of each file in bytes.
            encodings: those that the part lists.
            is_delta: whether it has the columns and the table of a delta.

        Raises: LayoutError(BOX_BOUNDS) for a box that leaves its tensor; FormatError(FILE_COVERAGE) for extents that
            overlap. Spec: REQ-PRT-004, REQ-PRT-007.
        """
        shapes = _of_boxes(self.table.extents, self.table.ndim, self.box_count)
        if (self.begin < 0).any() or (self.begin + self.box_shape > shapes).any():
            raise err(Code.BOX_BOUNDS, "a box leaves its tensor", requirement="REQ-PRT-004")
        extents, stored = self._extent_columns(block_nbytes, np.array(header_nbytes, np.int64), encodings)
        delta = {name: extents.pop(name) for name in ("reference", "predicted")}
        return {
            "boxes": {
                "begin": dump_packed(self.begin),
                # What isn't cut is 0, and what is, is small: both go well into few bytes.
                "cut_shape": dump_packed(np.where(self.box_shape == shapes, 0, self.box_shape + 1)),
                "replica": dump_packed(self.replica),
                "digest_count": dump_packed(self.digest_count),
            },
            "extents": {**extents, **(delta if is_delta else {})},
            **({"stored": stored} if is_delta else {}),
            "digests": self.digests,
        }

    def encodings(self) -> tuple[str, ...]:
        """Return the encodings that occur, in their order; of a part without extents, raw."""
        numbers = np.unique(self.extents.encoding).tolist()
        return tuple(ENCODINGS[number] for number in numbers) or ("raw",)

    def _extent_columns(
        self, block_nbytes: int, header_nbytes: Integers, encodings: Sequence[str]
    ) -> tuple[dict[str, object], dict[str, object]]:
        found = self.extents
        nbytes = found.stored_nbytes(self.box_nbytes(), block_nbytes)
        nowhere = len(header_nbytes)  # what isn't stored stands behind all files
        files = np.where(found.file < 0, nowhere, found.file)
        order = np.lexsort((found.block_begin, found.box, nbytes > 0, found.byte_begin, files))
        box, file, begin = found.box[order], files[order], found.byte_begin[order]
        ends = np.concatenate([np.zeros(1, np.int64), begin + nbytes[order]])[:-1]
        gap = begin - np.where(np.diff(file, prepend=-1) != 0, np.append(header_nbytes, 0)[file], ends)
        if (gap < 0).any():
            raise err(Code.FILE_COVERAGE, "two extents overlap in a file", requirement="REQ-PRT-007")
        owners = np.repeat(np.arange(len(self.box_count)), self.box_count)[box].tolist()
        names = [self.table.keys[owner][1] for owner in owners]
        keys = [found.key[row] for row in order.tolist()]
        numbers = np.full(len(ENCODINGS), -1, np.int64)
        numbers[[ENCODINGS.index(name) for name in encodings]] = np.arange(len(encodings))
        columns: dict[str, object] = {
            "box": dump_packed(fold(np.diff(box, prepend=-1) - 1)),
            "block_begin": dump_packed(found.block_begin[order]),
            "block_count": dump_packed(found.block_count[order]),
            "file": dump_packed(file),
            "gap_nbytes": dump_packed(gap),
            "encoding": dump_packed(numbers[found.encoding[order]]),
            "key": dump_strings(["" if key == name else key for key, name in zip(keys, names, strict=True)]),
            "reference": dump_packed(found.reference[order]),
            "predicted": dump_packed(found.predicted[order]),
        }
        return columns, found.stored_in(order).columns()

    def box_nbytes(self) -> Integers:
        """Return the size of each box in bytes."""
        elements = _products(self.box_shape, np.repeat(self.table.ndim, self.box_count))
        nbytes: Integers = elements * np.repeat(self.table.element_nbytes, self.box_count)
        return nbytes

    def _made(self) -> tuple[PartTensor, ...]:
        if self._rows is None:
            self._rows = tuple(self._iter_rows())
        return self._rows

    def _iter_rows(self) -> Iterator[PartTensor]:
        table, boxes = self.table, self._iter_boxes()
        for row, count in enumerate(self.box_count.tolist()):
            field, name, scope = table.keys[row]
            yield PartTensor(
                field=field,
                name=name,
                scope=scope,
                dtype=table.dtypes[row],
                global_shape=table.global_shapes[row],
                storage=table.storages[row],
                aliases=table.aliases[row],
                boxes=tuple(next(boxes) for _ in range(count)),
            )

    def _iter_boxes(self) -> Iterator[PartBox]:
        begins, shapes = self.begin.tolist(), self.box_shape.tolist()
        owned: dict[int, list[Extent]] = {}
        for row, extent in self._iter_extents():
            owned.setdefault(row, []).append(extent)
        counts = zip(self.replica.tolist(), self.digest_count.tolist(), strict=True)
        ranks = np.repeat(self.table.ndim, self.box_count).tolist()
        at = digest = 0
        for row, (rank, (replica, count)) in enumerate(zip(ranks, counts, strict=True)):
            yield PartBox(
                box=Box(tuple(begins[at : at + rank]), tuple(shapes[at : at + rank])),
                replica=replica,
                digests=self.digests[digest * DIGEST_NBYTES : (digest + count) * DIGEST_NBYTES],
                extents=tuple(owned.get(row, ())),
            )
            at, digest = at + rank, digest + count

    def _iter_extents(self) -> Iterator[tuple[int, Extent]]:
        found = self.extents
        keys = found.key.tolist() if isinstance(found.key, Strings) else found.key
        owners = np.repeat(np.arange(len(self.box_count)), self.box_count)[found.box].tolist()
        numbers = (found.box, found.block_begin, found.block_count, found.file, found.byte_begin, found.encoding)
        rows = zip(owners, keys, *(column.tolist() for column in numbers), strict=True)
        for row, (owner, key, box, block_begin, blocks, file, byte_begin, encoding) in enumerate(rows):
            extent = Extent(
                block_begin=block_begin,
                block_count=blocks,
                file=file if file >= 0 else None,
                byte_begin=byte_begin,
                key=key or self.table.keys[owner][1],
                **(found.delta_members(row) if encoding else {}),
            )
            yield box, extent

    def __len__(self) -> int:
        return len(self.box_count)

    @overload
    def __getitem__(self, at: int) -> PartTensor: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[PartTensor, ...]: ...
    def __getitem__(self, at: int | slice) -> PartTensor | tuple[PartTensor, ...]:
        return self._made()[at]

    def __iter__(self) -> Iterator[PartTensor]:
        return iter(self._made())

    def __eq__(self, other: object) -> bool:
        return self._made() == tuple(other) if isinstance(other, Holdings | tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._made())

    def __repr__(self) -> str:
        return f"Holdings({len(self)} tensors, {len(self.replica)} boxes)"


def parse_holdings(
    columns: Columns,
    table: TensorTable,
    *,
    box_count: Integers,
    block_nbytes: int,
    files: Files,
    encodings: Sequence[str] = ("raw",),
    reference_count: int | None = None,
) -> Holdings:
    """Return what a part says of boxes, extents and digests.

    Args:
        columns: the part.
        table: its tensors.
        box_count: how many boxes of each tensor it holds.
        block_nbytes: size of a block in bytes.
        encodings: those that the part lists.
        reference_count: how many references it has; None for a part that is no delta's.

    Raises: FormatError(COLUMN_FORM, COLUMN_ORDER, EXTENT_COVERAGE, FILE_COVERAGE); LayoutError(BOX_BOUNDS).
    Spec: REQ-IDX-002, REQ-IDX-003, REQ-PRT-004 to REQ-PRT-007, REQ-DEL-003 to REQ-DEL-007.
    """
    boxes = columns.columns("boxes", _BOX_KEYS)
    count = int(box_count.sum())
    # Before the boxes: those of scalars have no numbers, so that nothing else would bound how many are built.
    replica = boxes.packed("replica", count=count, below=2).astype(np.bool_)
    shapes = _of_boxes(table.extents, table.ndim, box_count)
    begin = boxes.packed("begin", count=len(shapes), below=limits.DIM + 1)
    cut = boxes.packed("cut_shape", count=len(shapes), below=limits.DIM + 1)
    box_shape = np.where(cut == 0, shapes, cut - 1)
    if (cut == shapes + 1).any():
        raise boxes.broken("cut_shape", "the whole extent of a tensor, which is stored as 0", "REQ-PRT-013")
    if (cut > shapes).any() or (begin + box_shape > shapes).any():
        raise err(Code.BOX_BOUNDS, "a box leaves its tensor", where=boxes.place("begin"), requirement="REQ-PRT-004")
    digest_count = boxes.packed("digest_count", count=count)
    digests = columns.any("digests")
    if not isinstance(digests, bytes) or len(digests) != total_of(digest_count) * DIGEST_NBYTES:
        raise columns.broken("digests", f"not {total_of(digest_count)} digests")
    element_nbytes = np.repeat(table.element_nbytes, box_count)
    elements = _products(box_shape, np.repeat(table.ndim, box_count))
    blocks = -(-elements // (block_nbytes // element_nbytes))
    rows = parse_extents(columns, table, box_count, files, encodings=encodings, reference_count=reference_count)
    order = rows.order()
    held = Holdings(
        table=table,
        box_count=box_count,
        begin=begin,
        box_shape=box_shape,
        replica=replica,
        digest_count=digest_count,
        digests=digests,
        extents=rows.take(order),
    )
    _check_blocks(held, blocks, boxes)
    # What is written has a digest for each block, so that its size is far from where an int64 ends.
    check_smaller(rows, elements * element_nbytes, block_nbytes, columns)
    begins = place_extents(rows, rows.stored_nbytes(elements * element_nbytes, block_nbytes), files)
    held.extents = dataclasses.replace(rows, byte_begin=begins).take(order)
    return held


def _check_blocks(held: Holdings, blocks: Integers, table: Columns) -> None:
    """Check digests and extents of each box. Spec: REQ-PRT-005, REQ-PRT-006."""
    unequal = (held.digest_count != blocks) & (held.written | ~held.replica | (held.digest_count > 0))
    if unequal.any():
        row = int(unequal.argmax())
        detail = f"{held.digest_count[row]} digests for the {blocks[row]} blocks of {_name_of(held, row)}"
        raise _uncovered(detail, table.place("digest_count"), "REQ-PRT-005")
    found = held.extents
    first = np.diff(found.box, prepend=-1) != 0
    end = found.block_begin + found.block_count
    expected = np.zeros_like(end)
    expected[1:] = end[:-1]
    expected[first] = 0
    total = blocks[found.box]
    wrong = (found.block_begin != expected) | ((found.block_count == 0) & (total > 0))
    wrong |= np.append(first, True)[1:] & (end != total)
    if wrong.any():
        row = int(found.box[wrong.argmax()])
        detail = f"the extents of {_name_of(held, row)} don't hold each of its {blocks[row]} blocks once"
        raise _uncovered(detail, table.place("begin"), "REQ-PRT-006")


def _uncovered(detail: str, where: str, requirement: str) -> CkptError:
    return err(Code.EXTENT_COVERAGE, detail, where=where, requirement=requirement)


def _name_of(held: Holdings, box: int) -> str:
    owner = int(np.searchsorted(np.cumsum(held.box_count), box, "right"))
    return repr(held.table.keys[owner][1][:64])


def _of_boxes(flattened: Integers, ndim: Integers, box_count: Integers) -> Integers:
    """Return what tensors have for each dimension, for each dimension of each of their boxes."""
    if len(box_count) == 0 or (int(box_count.min()) == 1 == int(box_count.max())):
        return flattened
    rank = np.repeat(ndim, box_count)
    first = np.repeat(np.cumsum(ndim) - ndim, box_count)
    place = np.arange(int(rank.sum())) - np.repeat(np.cumsum(rank) - rank, rank)
    of_boxes: Integers = flattened[np.repeat(first, rank) + place]
    return of_boxes


def _products(flattened: Integers, ndim: Integers) -> Integers:
    """Return the product of the entries of each box; 1 of none."""
    products = np.ones(len(ndim), np.int64)
    offsets = np.cumsum(ndim) - ndim
    for dim in range(int(ndim.max(initial=0))):
        deep = np.flatnonzero(ndim > dim)
        products[deep] *= flattened[offsets[deep] + dim]
    return products
