"""The index: all tensors, RNG streams and leaves of a checkpoint, each with its part.

The index is a pure function of the parts, so all committers of an attempt create the same index.

Spec: REQ-IDX-001 to REQ-IDX-012.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Final

import numpy as np

from ckptfmt import limits
from ckptfmt.digest import digest_at
from ckptfmt.documents import tables
from ckptfmt.documents.canonical import check_version
from ckptfmt.documents.manifest import Origin
from ckptfmt.documents.msgpk import Weight, dump_packed_document, parse_packed_document
from ckptfmt.documents.packed import Columns, Integers, RowBudget, dump_packed
from ckptfmt.documents.sharding import Sharding, parse_shardings, sharding_columns
from ckptfmt.documents.tables import TensorKey, TensorTable
from ckptfmt.documents.versions import known_members
from ckptfmt.dtypes import DTYPES
from ckptfmt.errors import Code, err


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PartEntry:
    """Size and digest of a part. The part's name follows from attempt and writer."""

    nbytes: int
    digest: bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class IndexTensor:
    """A tensor: key, dtype and shape, and the places of its pieces."""

    field: str
    name: str
    scope: str
    dtype: str
    global_shape: tuple[int, ...]
    storage: str
    aliases: tuple[str, ...]
    sharding: Sharding

    @property
    def key(self) -> TensorKey:
        """The tensor's field, name and scope."""
        return self.field, self.name, self.scope

    @property
    def nbytes(self) -> int:
        """Size of the whole tensor in bytes."""
        return math.prod(self.global_shape) * DTYPES[self.dtype].nbytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class IndexRngStream:
    """An RNG stream, and the number of the part with its state."""

    name: str
    scope: str
    kind: str
    part: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class IndexLeaf:
    """A plain value's key, and the number of the part with the value."""

    field: str
    name: str
    scope: str
    part: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """The contents of a checkpoint."""

    origin: Origin
    saved_unix_s: int
    parts: tuple[PartEntry, ...]
    tensors: tuple[IndexTensor, ...]
    streams: tuple[IndexRngStream, ...]
    leaves: tuple[IndexLeaf, ...]
    absent: dict[str, str]

    def dump(self) -> tuple[bytes, bytes]:
        """Return the bytes of the index file, and the digest that names them."""
        return dump_packed_document(self._signed(), self._weigh())

    def _weigh(self) -> Weight:
        shardings = {tensor.sharding for tensor in self.tensors}
        rows = len(self.parts) + len(shardings) + len(self.streams) + len(self.leaves)
        return Weight(
            rows=rows + sum(1 + len(tensor.aliases) for tensor in self.tensors),
            extents=sum(len(tensor.global_shape) for tensor in self.tensors)
            + sum(
                each.begin.size if each.extents is None else len(each.extents) for each in shardings
            ),
        )

    def _signed(self) -> dict[str, Any]:
        table = TensorTable.of(self.tensors)
        scopes = tables.collect_scopes(table, self.streams, self.leaves)
        dtypes = sorted(set(table.dtypes))
        numbers: dict[Sharding, int] = {}
        for tensor in self.tensors:
            numbers.setdefault(tensor.sharding, len(numbers))
        return {
            **tables.document_head(
                "index", self.origin, saved_unix_s=self.saved_unix_s, scopes=scopes, dtypes=dtypes
            ),
            "parts": {
                "nbytes": dump_packed([part.nbytes for part in self.parts]),
                "digest": b"".join(part.digest for part in self.parts),
            },
            "tensors": {
                **tables.tensor_columns(table, scopes, dtypes),
                "sharding": dump_packed([numbers[tensor.sharding] for tensor in self.tensors]),
            },
            "aliases": tables.alias_columns(table),
            "shardings": sharding_columns(list(numbers), self.origin.writer_count),
            "streams": {
                **tables.stream_columns(self.streams, scopes),
                "part": dump_packed([stream.part for stream in self.streams]),
            },
            "leaves": {
                **tables.leaf_columns(self.leaves, scopes),
                "part": dump_packed([leaf.part for leaf in self.leaves]),
            },
            "absent": dict(self.absent),
        }

    @classmethod
    def parse(
        cls,
        content: bytes,
        *,
        where: str,
        digest: bytes | None = None,
        known: dict[bytes, TensorTable] | None = None,
    ) -> Index:
        """Return the index of a file. The tiling of tensors isn't checked here.

        Args:
            where: name of the file, for messages.
            digest: the expected digest from another document; None to skip the check.
            known: as in `Part.parse`.

        Raises: FormatError, IntegrityError(DOC_DIGEST), UnsupportedError.
        Spec: REQ-IDX-002, REQ-IDX-003, REQ-IDX-006.
        """
        signed, _, stored_nbytes = parse_packed_document(content, where=where, digest=digest)
        return _parse_index(signed, where, RowBudget(Weight.most(stored_nbytes)), known)


_INDEX_KEYS: Final = (
    "type", "format_version", "features", *tables.ORIGIN_KEYS, "saved_unix_s", "scopes", "dtypes",
    "parts", "tensors", "aliases", "shardings", "streams", "leaves", "absent",
)  # fmt: skip


def _parse_index(
    signed: dict[str, Any],
    where: str,
    budget: RowBudget,
    known: dict[bytes, TensorTable] | None,
) -> Index:
    check_version(signed, where)
    columns = Columns(known_members(signed, _INDEX_KEYS), _INDEX_KEYS, where, budget=budget)
    if columns.any("type") != "index":
        raise err(
            Code.DOC_SCHEMA, "not an index", where=columns.place("type"), requirement="REQ-DOC-011"
        )
    origin = tables.parse_origin(columns)
    saved_unix_s = tables.parse_counter(columns, "saved_unix_s")
    writers = origin.writer_count
    scopes = tables.check_scopes(columns)
    part_table = columns.columns("parts", ("nbytes", "digest"))
    part_table.take("nbytes", rows=writers)
    nbytes = part_table.packed("nbytes", count=writers, below=limits.MSGPACK_NBYTES + 1).tolist()
    digests = part_table.digests("digest", count=writers)
    tensors, table = _parse_tensors(columns, scopes, writers, known)
    streams = _parse_streams(
        columns.columns("streams", ("name", "scope", "kind", "part")), scopes, writers
    )
    leaves = _parse_leaves(
        columns.columns("leaves", ("field", "name", "scope", "part")), scopes, writers
    )
    tables.check_scopes_used(columns, table, (*streams, *leaves))
    return Index(
        origin=origin,
        saved_unix_s=saved_unix_s,
        parts=tuple(
            PartEntry(nbytes=size, digest=digest_at(digests, at)) for at, size in enumerate(nbytes)
        ),
        tensors=tensors,
        streams=streams,
        leaves=leaves,
        absent=tables.parse_absent(columns),
    )


def _parse_tensors(
    columns: Columns, scopes: list[str], part_count: int, known: dict[bytes, TensorTable] | None
) -> tuple[tuple[IndexTensor, ...], TensorTable]:
    rows = columns.columns("tensors", (*tables.TENSOR_KEYS, "sharding"))
    table = tables.parse_tensor_table(
        rows, columns.columns("aliases", ("tensor", "name")), scopes, columns, known=known
    )
    shardings = parse_shardings(columns, part_count)
    numbers = rows.packed("sharding", count=len(table.keys), below=len(shardings))
    tensors = []
    for row, number in enumerate(numbers.tolist()):
        tensor = IndexTensor(**table.members(row), sharding=shardings[number])
        if len(tensor.sharding) and tensor.sharding.ndim != len(tensor.global_shape):
            raise rows.broken(
                "sharding", f"{tensor.name[:64]!r} has the sharding of a tensor of another rank"
            )
        tensors.append(tensor)
    _check_first_uses(columns, numbers, len(shardings))
    return tuple(tensors), table


def _check_first_uses(columns: Columns, numbers: Integers, count: int) -> None:
    """Raise unless every sharding is used, and shardings stand in the order of their first use.

    Spec: REQ-IDX-009.
    """
    used, first = np.unique(numbers, return_index=True)
    if len(used) != count or (np.diff(first) < 0).any():
        detail = (
            "shardings aren't those that tensors have, in the order in which they first have them"
        )
        raise columns.unsorted("shardings", detail, "REQ-IDX-009")


def _parse_streams(
    table: Columns, scopes: list[str], part_count: int
) -> tuple[IndexRngStream, ...]:
    rows = tables.parse_stream_rows(table, scopes)
    parts = table.packed("part", count=len(rows), below=part_count).tolist()
    return tuple(IndexRngStream(**row, part=part) for row, part in zip(rows, parts, strict=True))


def _parse_leaves(table: Columns, scopes: list[str], part_count: int) -> tuple[IndexLeaf, ...]:
    rows = tables.parse_leaf_rows(table, scopes)
    parts = table.packed("part", count=len(rows), below=part_count).tolist()
    return tuple(IndexLeaf(**row, part=part) for row, part in zip(rows, parts, strict=True))
