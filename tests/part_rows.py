"""What a part holds, as rows: to write parts by hand, and to look at them. The package itself has columns only."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from ckptfmt.box import Box
from ckptfmt.digest import DIGEST_NBYTES
from ckptfmt.documents.extents import Extents, StoredBlocks, count_stored
from ckptfmt.documents.holdings import Holdings
from ckptfmt.documents.packed import Strings, make_integers
from ckptfmt.documents.part import Part
from ckptfmt.documents.tables import TensorKey, TensorTable
from ckptfmt.dtypes import DTYPES
from ckptfmt.features import ENCODINGS


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowExtent:
    """Where a run of a box's blocks is stored; see `ckptfmt.documents.extents.Extent`."""

    block_begin: int
    block_count: int
    file: int | None
    byte_begin: int
    key: str
    encoding: str = "raw"
    reference: int | None = None
    predicted: bool = False
    stored_nbytes: tuple[int, ...] = ()
    stored_digests: bytes = b""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowBox:
    """A piece that the writer holds."""

    box: Box
    replica: bool
    digests: bytes
    extents: tuple[RowExtent, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowTensor:
    """A tensor of which the writer holds pieces."""

    field: str
    name: str
    scope: str
    dtype: str
    global_shape: tuple[int, ...]
    storage: str
    aliases: tuple[str, ...]
    boxes: tuple[RowBox, ...]

    @property
    def key(self) -> TensorKey:
        """What the tensor is called."""
        return self.field, self.name, self.scope

    def box_nbytes(self, box: Box) -> int:
        """Return the size of a piece in bytes."""
        return box.element_count * DTYPES[self.dtype].nbytes


def holdings_of(tensors: Sequence[RowTensor]) -> Holdings:
    """Return the columns of rows."""
    boxes = [held for tensor in tensors for held in tensor.boxes]
    return Holdings(
        table=TensorTable.of(tensors),
        box_count=make_integers(len(tensor.boxes) for tensor in tensors),
        begin=make_integers(first for held in boxes for first in held.box.begin),
        box_shape=make_integers(extent for held in boxes for extent in held.box.shape),
        replica=np.array([held.replica for held in boxes], np.bool_),
        digest_count=make_integers(len(held.digests) // DIGEST_NBYTES for held in boxes),
        digests=b"".join(held.digests for held in boxes),
        extents=_extents_of(tensors),
    )


def _extents_of(tensors: Iterable[RowTensor]) -> Extents:
    boxes = [(tensor.name, held) for tensor in tensors for held in tensor.boxes]
    rows = [
        (row, name, extent) for row, (name, held) in enumerate(boxes) for extent in held.extents
    ]
    encoding = make_integers(ENCODINGS.index(extent.encoding) for _, _, extent in rows)
    block_count = make_integers(extent.block_count for _, _, extent in rows)
    blocks = count_stored(encoding, block_count)
    found = Extents(
        box=make_integers(row for row, _, _ in rows),
        block_begin=make_integers(extent.block_begin for _, _, extent in rows),
        block_count=block_count,
        file=make_integers(-1 if extent.file is None else extent.file for _, _, extent in rows),
        byte_begin=make_integers(extent.byte_begin for _, _, extent in rows),
        key=Strings.of(["" if extent.key == name else extent.key for _, name, extent in rows]),
        encoding=encoding,
        reference=make_integers(
            0 if extent.reference is None else extent.reference + 1 for _, _, extent in rows
        ),
        predicted=np.array([extent.predicted for _, _, extent in rows], np.bool_),
        stored_row=np.cumsum(blocks) - blocks,
        stored=StoredBlocks(
            nbytes=make_integers(
                nbytes for _, _, extent in rows for nbytes in extent.stored_nbytes
            ),
            digests=b"".join(extent.stored_digests for _, _, extent in rows),
        ),
    )
    return found.take(found.order())


def rows_of(held: Holdings) -> tuple[RowTensor, ...]:
    """Return the rows of columns."""
    boxes = iter([_box_of(held, row) for row in range(len(held.replica))])
    return tuple(
        RowTensor(**held.table.members(tensor), boxes=tuple(itertools.islice(boxes, count)))
        for tensor, count in zip(range(len(held.table.keys)), held.box_count, strict=True)
    )


def _box_of(held: Holdings, row: int) -> RowBox:
    name, extents = held.table.keys[held.owner[row]][1], []
    for extent in held.extents.of_box(row):
        blocks = (
            range(extent.block_begin, extent.block_begin + extent.block_count)
            if extent.is_encoded
            else ()
        )
        members = (
            "block_begin",
            "block_count",
            "file",
            "byte_begin",
            "encoding",
            "reference",
            "predicted",
        )
        extents.append(
            RowExtent(
                **{member: getattr(extent, member) for member in members},
                key=extent.key or name,
                stored_nbytes=tuple(map(extent.stored_nbytes, blocks)),
                stored_digests=b"".join(map(extent.stored_digest, blocks)),
            )
        )
    return RowBox(
        box=held.box(row),
        replica=bool(held.replica[row]),
        digests=held.digests_of(row),
        extents=tuple(extents),
    )


def contents_of(part: Part) -> dict[str, object]:
    """Return all that a part says, to be compared."""
    members = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
    return {**members, "holdings": rows_of(part.holdings)}
