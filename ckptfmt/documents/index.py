"""The index: every tensor, stream and leaf of a checkpoint, and the part that has it. Spec: REQ-IDX-001 to REQ-IDX-006.

It is a pure function of the parts, so that any two committers write the same bytes.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from ckptfmt import limits
from ckptfmt.box import Box
from ckptfmt.digest import DIGEST_NBYTES
from ckptfmt.documents.canonical import check_version
from ckptfmt.documents.manifest import Origin
from ckptfmt.documents.msgpk import dump_packed_document, parse_packed_document
from ckptfmt.documents.packed import Columns, dump_packed
from ckptfmt.documents.tables import (
    ORIGIN_KEYS,
    TENSOR_KEYS,
    TensorKey,
    alias_columns,
    check_dtypes,
    check_scopes,
    collect_scopes,
    document_head,
    leaf_columns,
    parse_absent,
    parse_aliases,
    parse_boxes,
    parse_counter,
    parse_leaf_rows,
    parse_origin,
    parse_stream_rows,
    parse_tensor_rows,
    stream_columns,
    tensor_columns,
)
from ckptfmt.dtypes import DTYPES
from ckptfmt.errors import Code, err

__all__ = ["Index", "IndexLeaf", "IndexStream", "IndexTensor", "PartEntry", "Sharding"]

#: The pieces of a tensor and, for each, the number of the part that stores it; sorted by the boxes' begins.
Sharding = tuple[tuple[Box, int], ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PartEntry:
    """Size and digest of a part; its name follows from attempt and writer."""

    nbytes: int
    digest: bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class IndexTensor:
    """A tensor: what it is called, what it is, where its pieces are."""

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
        """What the tensor is called."""
        return self.field, self.name, self.scope

    @property
    def nbytes(self) -> int:
        """Size of the whole tensor in bytes."""
        return Box.whole(self.global_shape).element_count * DTYPES[self.dtype].nbytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class IndexStream:
    """A random-number stream, and the part that has its state."""

    name: str
    scope: str
    kind: str
    part: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class IndexLeaf:
    """A plain value, and the part that has it."""

    field: str
    name: str
    scope: str
    part: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """What a checkpoint holds."""

    origin: Origin
    saved_unix_s: int
    parts: tuple[PartEntry, ...]
    tensors: tuple[IndexTensor, ...]
    streams: tuple[IndexStream, ...]
    leaves: tuple[IndexLeaf, ...]
    absent: dict[str, str]

    def dump(self) -> tuple[bytes, bytes]:
        """Return the bytes of the index file, and the digest that names them."""
        return dump_packed_document(self._signed())

    def _signed(self) -> dict[str, Any]:
        scopes = collect_scopes(self.tensors, self.streams, self.leaves)
        dtypes = sorted({tensor.dtype for tensor in self.tensors})
        numbers: dict[Sharding, int] = {}
        for tensor in self.tensors:
            numbers.setdefault(tensor.sharding, len(numbers))
        return {
            **document_head("index", self.origin, saved_unix_s=self.saved_unix_s, scopes=scopes, dtypes=dtypes),
            "parts": {
                "nbytes": dump_packed([part.nbytes for part in self.parts]),
                "digest": b"".join(part.digest for part in self.parts),
            },
            "tensors": {
                **tensor_columns(self.tensors, scopes, dtypes),
                "sharding": dump_packed([numbers[tensor.sharding] for tensor in self.tensors]),
            },
            "aliases": alias_columns(self.tensors),
            "shardings": _sharding_columns(list(numbers)),
            "streams": {
                **stream_columns(self.streams, scopes),
                "part": dump_packed([stream.part for stream in self.streams]),
            },
            "leaves": {
                **leaf_columns(self.leaves, scopes),
                "part": dump_packed([leaf.part for leaf in self.leaves]),
            },
            "absent": dict(self.absent),
        }

    @classmethod
    def parse(cls, content: bytes, *, where: str, digest: bytes | None = None) -> Index:
        """Return the index of a file; what it says of the tensors' tiling isn't checked here.

        Raises: FormatError, IntegrityError(DOC_DIGEST), UnsupportedError.
        Spec: REQ-IDX-002, REQ-IDX-003, REQ-IDX-006.
        """
        signed, _ = parse_packed_document(content, where=where, digest=digest)
        index = _parse_index(signed, where)
        if {**index._signed(), "features": signed["features"]} != signed:  # noqa: SLF001 - our own
            # The one form: scopes and dtypes exactly those in use, equal shardings once, in the order of first use.
            raise err(
                Code.COLUMN_ORDER,
                "scopes, dtypes or shardings aren't in their one form",
                where=where,
                requirement="REQ-IDX-009",
            )
        return index


def _sharding_columns(shardings: list[Sharding]) -> dict[str, object]:
    boxes = [box for sharding in shardings for box, _ in sharding]
    return {
        "ndim": dump_packed([len(sharding[0][0].begin) if sharding else 0 for sharding in shardings]),
        "box_count": dump_packed([len(sharding) for sharding in shardings]),
        "begin": dump_packed([begin for box in boxes for begin in box.begin]),
        "box_shape": dump_packed([extent for box in boxes for extent in box.shape]),
        "part": dump_packed([part for sharding in shardings for _, part in sharding]),
    }


_INDEX_KEYS: Final = (
    "type", "format_version", "features", *ORIGIN_KEYS, "saved_unix_s", "scopes", "dtypes", "parts", "tensors",
    "aliases", "shardings", "streams", "leaves", "absent",
)  # fmt: skip


def _parse_index(signed: dict[str, Any], where: str) -> Index:
    check_version(signed, where)
    columns = Columns(signed, _INDEX_KEYS, where)
    if columns.any("type") != "index":
        raise err(Code.DOC_SCHEMA, "not an index", where=columns.place("type"), requirement="REQ-DOC-011")
    origin = parse_origin(columns)
    writers = origin.writer_count
    scopes = check_scopes(columns)
    part_table = columns.columns("parts", ("nbytes", "digest"))
    nbytes = part_table.packed("nbytes", count=writers, below=limits.MSGPACK_NBYTES + 1)
    digests = part_table.fixed("digest", count=writers, nbytes=DIGEST_NBYTES)
    return Index(
        origin=origin,
        saved_unix_s=parse_counter(columns, "saved_unix_s"),
        parts=tuple(PartEntry(nbytes=size, digest=digest) for size, digest in zip(nbytes, digests, strict=True)),
        tensors=_parse_tensors(columns, scopes, writers),
        streams=_parse_streams(columns.columns("streams", ("name", "scope", "kind", "part")), scopes, writers),
        leaves=_parse_leaves(columns.columns("leaves", ("field", "name", "scope", "part")), scopes, writers),
        absent=parse_absent(columns),
    )


def _parse_tensors(columns: Columns, scopes: list[str], part_count: int) -> tuple[IndexTensor, ...]:
    table = columns.columns("tensors", (*TENSOR_KEYS, "sharding"))
    rows = parse_tensor_rows(table, scopes, check_dtypes(columns))
    shardings = _parse_shardings(columns, part_count)
    numbers = table.packed("sharding", count=len(rows), below=len(shardings))
    aliases = parse_aliases(columns.columns("aliases", ("tensor", "name")), len(rows))
    tensors = []
    for (key, dtype, shape, storage), number, names in zip(rows, numbers, aliases, strict=True):
        sharding = shardings[number]
        if sharding and len(sharding[0][0].begin) != len(shape):
            raise table.broken("sharding", f"{key[1][:64]!r} has the sharding of a tensor of another rank")
        tensors.append(
            IndexTensor(
                field=key[0],
                name=key[1],
                scope=key[2],
                dtype=dtype,
                global_shape=shape,
                storage=storage,
                aliases=names,
                sharding=sharding,
            )
        )
    return tuple(tensors)


def _parse_shardings(columns: Columns, part_count: int) -> list[Sharding]:
    table = columns.columns("shardings", ("ndim", "box_count", "begin", "box_shape", "part"))
    ndim = table.packed("ndim", below=limits.NDIM + 1)
    counts = table.packed("box_count", count=len(ndim), below=limits.BOXES + 1)
    if sum(counts) > limits.BOXES:
        raise err(
            Code.LIMIT_EXCEEDED, f"{sum(counts)} boxes", where=table.place("box_count"), requirement="REQ-LIM-001"
        )
    parts = iter(table.packed("part", count=sum(counts), below=part_count))
    boxes = parse_boxes(table, zip(ndim, counts, strict=True))
    for owned in boxes:
        table.check_increasing("begin", owned)
    return [tuple((box, next(parts)) for box in owned) for owned in boxes]


def _parse_streams(table: Columns, scopes: list[str], part_count: int) -> tuple[IndexStream, ...]:
    rows = parse_stream_rows(table, scopes)
    parts = table.packed("part", count=len(rows), below=part_count)
    return tuple(
        IndexStream(name=name, scope=scope, kind=kind, part=part)
        for (name, scope, kind), part in zip(rows, parts, strict=True)
    )


def _parse_leaves(table: Columns, scopes: list[str], part_count: int) -> tuple[IndexLeaf, ...]:
    rows = parse_leaf_rows(table, scopes)
    parts = table.packed("part", count=len(rows), below=part_count)
    return tuple(
        IndexLeaf(field=field, name=name, scope=scope, part=part)
        for (field, name, scope), part in zip(rows, parts, strict=True)
    )
