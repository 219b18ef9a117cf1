"""What a writer holds, as writers tell each other before a save: tensors and boxes in columns, no contents."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Final

from ckptfmt import limits
from ckptfmt.box import Box
from ckptfmt.documents.msgpk import dump_packed_document, parse_packed_document
from ckptfmt.documents.packed import Columns, dump_packed, dump_strings
from ckptfmt.documents.tables import (
    TENSOR_KEYS,
    TensorTable,
    alias_columns,
    check_scopes,
    collect_scopes,
    parse_tensor_table,
    tensor_columns,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckptfmt.documents.packed import Integers
    from ckptfmt.documents.tables import TensorKey

#: What messages call it.
_WHERE: Final = "holdings"
_KEYS: Final = ("scopes", "dtypes", "tensors", "aliases", "boxes")
_BOX_KEYS: Final = ("begin", "box_shape")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Structure:
    """The tensors that a writer holds pieces of, and which pieces.

    Attributes:
        table: what the tensors are, sorted by key.
        declared_by: who declares each tensor's pieces to be replicas; "" for nobody.
        replica: of each tensor, whether its pieces are declared replicas.
        box_count: how many pieces of each are held.
        begin: first index of each piece, flattened.
        box_shape: extents of each piece, flattened.
    """

    table: TensorTable
    declared_by: Sequence[str]
    replica: Sequence[bool]
    box_count: Integers
    begin: Integers
    box_shape: Integers

    def dump(self) -> tuple[bytes, bytes]:
        """Return the structure as bytes, and their digest: equal structures of one program have the same."""
        scopes, dtypes = collect_scopes(self.table), sorted(set(self.table.dtypes))
        return dump_packed_document(
            {
                "scopes": scopes,
                "dtypes": dtypes,
                "tensors": {
                    **tensor_columns(self.table, scopes, dtypes),
                    "declared_by": dump_strings(self.declared_by),
                    "replica": dump_packed(self.replica),
                    "box_count": dump_packed(self.box_count),
                },
                "aliases": alias_columns(self.table),
                "boxes": {"begin": dump_packed(self.begin), "box_shape": dump_packed(self.box_shape)},
            }
        )

    @classmethod
    def parse(cls, content: bytes) -> Structure:
        """Return the structure of `dump`. Raises: FormatError; IntegrityError(DOC_DIGEST)."""
        signed, _, _ = parse_packed_document(content, where=_WHERE)
        columns = Columns(signed, _KEYS, _WHERE)
        rows = columns.columns("tensors", (*TENSOR_KEYS, "declared_by", "replica", "box_count"))
        table = parse_tensor_table(rows, columns.columns("aliases", ("tensor", "name")), check_scopes(columns), columns)
        count = len(table.keys)
        box_count = rows.packed("box_count", count=count, below=limits.BOXES + 1)
        number_count = int((box_count * table.ndim).sum())
        boxes = columns.columns("boxes", _BOX_KEYS)
        return cls(
            table=table,
            declared_by=rows.strings("declared_by", count=count),
            replica=[flag > 0 for flag in rows.packed("replica", count=count, below=2).tolist()],
            box_count=box_count,
            begin=boxes.packed("begin", count=number_count, below=limits.DIM + 1),
            box_shape=boxes.packed("box_shape", count=number_count, below=limits.DIM + 1),
        )

    def iter_pieces(self) -> Iterator[tuple[TensorKey, Box, str, int]]:
        """Yield key, box, who declares it a replica, and size in bytes of each piece."""
        table, at = self.table, 0
        begins, shapes = self.begin.tolist(), self.box_shape.tolist()
        declared = self.declared_by[:]
        counts = zip(self.box_count.tolist(), table.ndim.tolist(), table.element_nbytes.tolist(), strict=True)
        for row, (count, ndim, element_nbytes) in enumerate(counts):
            for _ in range(count):
                box = Box(tuple(begins[at : at + ndim]), tuple(shapes[at : at + ndim]))
                yield table.keys[row], box, declared[row], box.element_count * element_nbytes
                at += ndim
