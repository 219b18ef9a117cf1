"""The holdings of a writer, as columns: boxes of tensors, their places in files, and digests.

Spec: REQ-PRT-002 to REQ-PRT-007.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ckptfmt import limits
from ckptfmt.box import Box
from ckptfmt.digest import DIGEST_NBYTES
from ckptfmt.documents.extents import Extents, Files, check_smaller, parse_extents, place_extents
from ckptfmt.documents.msgpk import dump_packed_document, parse_packed_document
from ckptfmt.documents.packed import (
    Columns,
    Integers,
    Strings,
    dump_packed,
    dump_strings,
    fold,
    spread,
    total_of,
)
from ckptfmt.documents.tables import TABLE_KEYS, TensorKey, TensorTable, dump_table, parse_table
from ckptfmt.errors import CkptError, Code, err
from ckptfmt.features import ENCODINGS

_BOX_KEYS: Final = ("begin", "cut_shape", "replica", "digest_count")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Boxes:
    """Boxes of tensors, one row for each, grouped by tensor.

    Attributes:
        table: the tensors, sorted by key.
        box_count: number of boxes of each tensor.
        begin: first index of each box, flattened.
        box_shape: extents of each box, flattened.
    """

    table: TensorTable
    box_count: Integers
    begin: Integers
    box_shape: Integers

    @functools.cached_property
    def owner(self) -> Integers:
        """For each box, the number of its tensor."""
        return np.repeat(np.arange(len(self.box_count)), self.box_count)

    @functools.cached_property
    def _box_end(self) -> Integers:
        return np.cumsum(self.box_count)

    @functools.cached_property
    def _dim_begin(self) -> Integers:
        """For each box, the offset of its numbers in the flattened columns."""
        ndim = self.table.ndim[self.owner]
        return np.cumsum(ndim) - ndim

    def rows_of(self, tensor: int) -> range:
        """Return the rows of a tensor's boxes."""
        end = int(self._box_end[tensor])
        return range(end - int(self.box_count[tensor]), end)

    def box(self, row: int) -> Box:
        """Return a box."""
        first = int(self._dim_begin[row])
        dims = slice(first, first + int(self.table.ndim[self.owner[row]]))
        return Box(tuple(self.begin[dims].tolist()), tuple(self.box_shape[dims].tolist()))

    def list_boxes(self) -> list[Box]:
        """Return all boxes."""
        begins = iter(self.begin.tolist())
        shapes = iter(self.box_shape.tolist())
        return [
            Box(tuple(itertools.islice(begins, ndim)), tuple(itertools.islice(shapes, ndim)))
            for ndim in self.table.ndim[self.owner].tolist()
        ]

    def box_nbytes(self) -> Integers:
        """Return the size of each box in bytes."""
        nbytes: Integers = (
            products(self.box_shape, self.table.ndim[self.owner])
            * self.table.element_nbytes[self.owner]
        )
        return nbytes

    def members(self) -> dict[str, Any]:
        """Return the columns by name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(Boxes)}

    def as_dict(self) -> dict[str, Any]:
        """Return the boxes as columns of a document of their own, for `parse_boxes`."""
        members = dump_table(self.table)
        members["tensors"]["box_count"] = dump_packed(self.box_count)
        return {
            **members,
            "boxes": {"begin": dump_packed(self.begin), "box_shape": dump_packed(self.box_shape)},
        }


def parse_boxes(
    columns: Columns, *more: str, known: dict[bytes, TensorTable] | None = None
) -> tuple[Boxes, Columns]:
    """Return the boxes from the columns of `Boxes.as_dict`, and the columns of the tensors.

    Args:
        more: names of further columns of the tensors.
        known: see `tables.parse_tensor_table`.

    Raises: FormatError.
    """
    table, rows = parse_table(columns, "box_count", *more, known=known)
    box_count = rows.packed("box_count", count=len(table.keys), below=limits.BOXES + 1)
    number_count = int((box_count * table.ndim).sum())
    boxes = columns.columns("boxes", ("begin", "box_shape"))
    found = Boxes(
        table=table,
        box_count=box_count,
        begin=boxes.packed("begin", count=number_count, below=limits.DIM + 1),
        box_shape=boxes.packed("box_shape", count=number_count, below=limits.DIM + 1),
    )
    return found, rows


#: The members of `Boxes.as_dict`.
BOXES_KEYS: Final = (*TABLE_KEYS, "boxes")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Holdings(Boxes):
    """The tensors of a part, with their boxes.

    Attributes:
        replica: for each box, whether mesh or caller declare the box a replica.
        digest_count: number of digests of each box: one for each block; none for a declared replica
            of another writer.
        digests: concatenated digests of all boxes.
        extents: places of the boxes; a box of another writer has none.
    """

    replica: NDArray[np.bool_]
    digest_count: Integers
    digests: bytes
    extents: Extents

    @functools.cached_property
    def written(self) -> NDArray[np.bool_]:
        """For each box, whether it has extents."""
        return np.bincount(self.extents.box, minlength=len(self.replica)) > 0

    @functools.cached_property
    def _digest_begin(self) -> Integers:
        return np.cumsum(self.digest_count) - self.digest_count

    def digests_of(self, row: int) -> bytes:
        """Return the digests of a box."""
        begin = int(self._digest_begin[row])
        count = int(self.digest_count[row])
        return self.digests[begin * DIGEST_NBYTES : (begin + count) * DIGEST_NBYTES]

    def box_columns(
        self,
        block_nbytes: int,
        header_nbytes: Sequence[int],
        encodings: Sequence[str],
        *,
        is_delta: bool,
    ) -> dict[str, object]:
        """Return the tables of boxes and extents, and the digests, for a part.

        Args:
            block_nbytes: size of a block in bytes.
            header_nbytes: size of each file's header in bytes.
            encodings: the encodings that the part lists.
            is_delta: whether the part has the columns and the table of a delta.

        Raises: LayoutError(BOX_BOUNDS) for a box that leaves its tensor; FormatError(FILE_COVERAGE)
            for overlapping extents.
        Spec: REQ-PRT-004, REQ-PRT-007.
        """
        shapes = _of_boxes(self.table.extents, self.table.ndim, self.box_count)
        if (self.begin < 0).any() or (self.begin + self.box_shape > shapes).any():
            raise err(Code.BOX_BOUNDS, "a box leaves its tensor", requirement="REQ-PRT-004")
        extents, stored = self._extent_columns(
            block_nbytes, np.array(header_nbytes, np.int64), encodings
        )
        delta = {name: extents.pop(name) for name in ("reference", "predicted")}
        return {
            "boxes": {
                "begin": dump_packed(self.begin),
                # 0 for an uncut dimension; other values are small. Both compress well.
                "cut_shape": dump_packed(np.where(self.box_shape == shapes, 0, self.box_shape + 1)),
                "replica": dump_packed(self.replica),
                "digest_count": dump_packed(self.digest_count),
            },
            "extents": {**extents, **(delta if is_delta else {})},
            **({"stored": stored} if is_delta else {}),
            "digests": self.digests,
        }

    def encodings(self) -> tuple[str, ...]:
        """Return the extents' encodings in the registry's order; raw if there are no extents."""
        numbers = np.unique(self.extents.encoding).tolist()
        return tuple(ENCODINGS[number] for number in numbers) or ("raw",)

    def _extent_columns(
        self, block_nbytes: int, header_nbytes: Integers, encodings: Sequence[str]
    ) -> tuple[dict[str, object], dict[str, object]]:
        found = self.extents
        nbytes = found.stored_nbytes(self.box_nbytes(), block_nbytes)
        nowhere = len(header_nbytes)  # blocks without a file get a number after all files
        files = np.where(found.file < 0, nowhere, found.file)
        order = np.lexsort((found.block_begin, found.box, nbytes > 0, found.byte_begin, files))
        box = found.box[order]
        file = files[order]
        begin = found.byte_begin[order]
        ends = np.concatenate([np.zeros(1, np.int64), begin + nbytes[order]])[:-1]
        gap = begin - np.where(
            np.diff(file, prepend=-1) != 0, np.append(header_nbytes, 0)[file], ends
        )
        if (gap < 0).any():
            raise err(
                Code.FILE_COVERAGE, "two extents overlap in a file", requirement="REQ-PRT-007"
            )
        numbers = np.full(len(ENCODINGS), -1, np.int64)
        numbers[[ENCODINGS.index(name) for name in encodings]] = np.arange(len(encodings))
        columns: dict[str, object] = {
            "box": dump_packed(fold(np.diff(box, prepend=-1) - 1)),
            "block_begin": dump_packed(found.block_begin[order]),
            "block_count": dump_packed(found.block_count[order]),
            "file": dump_packed(file),
            "gap_nbytes": dump_packed(gap),
            "encoding": dump_packed(numbers[found.encoding[order]]),
            "key": dump_strings(found.key.take(order).tolist()),
            "reference": dump_packed(found.reference[order]),
            "predicted": dump_packed(found.predicted[order]),
        }
        return columns, found.stored_in(order).columns()


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
    """Return boxes, extents and digests of a part.

    Args:
        columns: the part.
        table: the part's tensors.
        box_count: number of boxes of each tensor.
        block_nbytes: size of a block in bytes.
        files: the part's files.
        encodings: the encodings that the part lists.
        reference_count: number of the part's references; None for a part of a full checkpoint.

    Raises: FormatError(COLUMN_FORM, COLUMN_ORDER, EXTENT_COVERAGE, FILE_COVERAGE);
        LayoutError(BOX_BOUNDS).
    Spec: REQ-IDX-002, REQ-IDX-003, REQ-PRT-004 to REQ-PRT-007, REQ-DEL-003 to REQ-DEL-007.
    """
    boxes = columns.columns("boxes", _BOX_KEYS)
    count = int(box_count.sum())
    # Parsed before the boxes, to bound their number: boxes of scalars have no entries in the other
    # columns.
    replica = boxes.packed("replica", count=count, below=2).astype(np.bool_)
    shapes = _of_boxes(table.extents, table.ndim, box_count)
    begin = boxes.packed("begin", count=len(shapes), below=limits.DIM + 1)
    cut = boxes.packed("cut_shape", count=len(shapes), below=limits.DIM + 1)
    box_shape = np.where(cut == 0, shapes, cut - 1)
    if (cut == shapes + 1).any():
        raise boxes.broken(
            "cut_shape", "the whole extent of a tensor, which is stored as 0", "REQ-PRT-013"
        )
    if (cut > shapes).any() or (begin + box_shape > shapes).any():
        raise err(
            Code.BOX_BOUNDS,
            "a box leaves its tensor",
            where=boxes.place("begin"),
            requirement="REQ-PRT-004",
        )
    digest_count = boxes.packed("digest_count", count=count)
    digests = columns.digests("digests", count=total_of(digest_count))
    element_nbytes = np.repeat(table.element_nbytes, box_count)
    elements = products(box_shape, np.repeat(table.ndim, box_count))
    blocks = -(-elements // (block_nbytes // element_nbytes))
    owner = np.repeat(np.arange(len(box_count)), box_count)
    rows = parse_extents(
        columns, table, owner, files, encodings=encodings, reference_count=reference_count
    )
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
    # Written boxes have a digest for each block, so their sizes can't overflow an int64.
    check_smaller(rows, elements * element_nbytes, block_nbytes, columns)
    begins = place_extents(rows, rows.stored_nbytes(elements * element_nbytes, block_nbytes), files)
    return dataclasses.replace(
        held, extents=dataclasses.replace(rows, byte_begin=begins).take(order)
    )


def _check_blocks(held: Holdings, blocks: Integers, table: Columns) -> None:
    """Check digests and extents of each box. Spec: REQ-PRT-005, REQ-PRT-006."""
    unequal = (held.digest_count != blocks) & (
        held.written | ~held.replica | (held.digest_count > 0)
    )
    if unequal.any():
        row = int(unequal.argmax())
        detail = (
            f"{held.digest_count[row]} digests for the {blocks[row]} blocks of"
            f" {_name_of(held, row)}"
        )
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
        detail = (
            f"the extents of {_name_of(held, row)} don't hold each of its {blocks[row]} blocks once"
        )
        raise _uncovered(detail, table.place("begin"), "REQ-PRT-006")


def _uncovered(detail: str, where: str, requirement: str) -> CkptError:
    return err(Code.EXTENT_COVERAGE, detail, where=where, requirement=requirement)


def _name_of(held: Holdings, box: int) -> str:
    return repr(held.table.keys[held.owner[box]][1][:64])


def _of_boxes(flattened: Integers, ndim: Integers, box_count: Integers) -> Integers:
    """Return a flattened column of tensors, repeated for each box of the tensors."""
    if len(box_count) == 0 or (int(box_count.min()) == 1 == int(box_count.max())):
        return flattened
    first = np.cumsum(ndim) - ndim
    of_boxes: Integers = flattened[spread(np.repeat(first, box_count), np.repeat(ndim, box_count))]
    return of_boxes


def products(flattened: Integers, ndim: Integers) -> Integers:
    """Return the product of the entries of each box; 1 for a box without dimensions."""
    products = np.ones(len(ndim), np.int64)
    offsets = np.cumsum(ndim) - ndim
    for dim in range(int(ndim.max(initial=0))):
        deep = np.flatnonzero(ndim > dim)
        products[deep] *= flattened[offsets[deep] + dim]
    return products


# --- the structure that writers exchange before a save --------------------------------------------

#: The document's name in messages.
_STRUCTURE: Final = "holdings"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Structure(Boxes):
    """The structure of a writer's state, without values, exchanged among writers before a save.

    Attributes:
        declared_by: for each tensor, the declarer of its pieces as replicas; an empty string for
            none.
        replica: for each tensor, whether its pieces are declared replicas.
    """

    declared_by: Strings
    replica: Sequence[bool]

    def dump(self) -> tuple[bytes, bytes]:
        """Return the structure as bytes, and their digest.

        Equal structures give equal bytes in one program.
        """
        signed = self.as_dict()
        signed["tensors"] |= {
            "declared_by": dump_strings(self.declared_by.tolist()),
            "replica": dump_packed(self.replica),
        }
        return dump_packed_document(signed)

    @classmethod
    def parse(cls, content: bytes, *, known: dict[bytes, TensorTable] | None = None) -> Structure:
        """Return the structure from the bytes of `dump`.

        Args:
            known: a cache of the tables of other structures; see `tables.parse_tensor_table`.

        Raises: FormatError; IntegrityError(DOC_DIGEST).
        """
        signed, _, _ = parse_packed_document(content, where=_STRUCTURE)
        columns = Columns(signed, BOXES_KEYS, _STRUCTURE)
        boxes, rows = parse_boxes(columns, "declared_by", "replica", known=known)
        count = len(boxes.box_count)
        return cls(
            **boxes.members(),
            declared_by=rows.strings("declared_by", count=count),
            replica=[flag > 0 for flag in rows.packed("replica", count=count, below=2).tolist()],
        )

    def iter_pieces(self) -> Iterator[tuple[TensorKey, Box, str, int]]:
        """Yield key, box, declarer (see `declared_by`), and size in bytes of each piece."""
        declared = self.declared_by.tolist()
        boxes = zip(self.owner.tolist(), self.list_boxes(), self.box_nbytes().tolist(), strict=True)
        for row, box, nbytes in boxes:
            yield self.table.keys[row], box, declared[row], nbytes
