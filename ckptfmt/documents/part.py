"""A part: what one writer contributed to an attempt. Spec: REQ-PRT-001 to REQ-PRT-010."""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import TYPE_CHECKING, Any, Final

from ckptfmt import limits
from ckptfmt.box import Box
from ckptfmt.digest import DIGEST_NBYTES
from ckptfmt.documents.canonical import check_version, dump_document
from ckptfmt.documents.manifest import Origin
from ckptfmt.documents.msgpk import dump_packed_document, parse_packed_document
from ckptfmt.documents.packed import Columns, dump_packed
from ckptfmt.documents.tables import (
    ORIGIN_KEYS,
    TENSOR_KEYS,
    TensorKey,
    alias_columns,
    block_count,
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
from ckptfmt.errors import CkptError, Code, err

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "Extent",
    "Leaf",
    "Part",
    "PartBox",
    "PartFile",
    "PartTensor",
    "Stream",
    "dump_failure",
    "extent_nbytes",
]

ENCODINGS: Final = ("raw",)
FILE_KINDS: Final = ("safetensors",)

_FILE_NAME: Final = re.compile(r"[a-z][a-z_]{0,40}-([0-9a-f]{16})-([0-9]{5,9})\.safetensors")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PartFile:
    """A file of a part: kind, size in bytes, size and digest of its header."""

    name: str
    kind: str
    nbytes: int
    header_nbytes: int
    header_digest: bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """Where a run of a box's blocks is stored.

    Attributes:
        block_begin: first block.
        block_count: number of blocks.
        file: number of the file in the part.
        byte_begin: first byte, from the start of the file.
        encoding: ``raw``.
        key: of the box in the file's header.
    """

    block_begin: int
    block_count: int
    file: int
    byte_begin: int
    key: str
    encoding: str = "raw"


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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """A random-number stream: logical name, scope, generator kind, state as a tree."""

    name: str
    scope: str
    kind: str
    state: bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """A plain value, as a tree."""

    field: str
    name: str
    scope: str
    value: bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one writer contributed.

    Attributes:
        origin: what all documents of the attempt share.
        writer: number of the writer.
        saved_unix_s: when it took the state, by its own clock; information only.
        files: what it wrote.
        tensors: everything that it holds, written or not.
        streams: its random-number streams.
        leaves: its plain values.
        absent: fields that it has nothing for, each with a reason.
    """

    origin: Origin
    writer: int
    saved_unix_s: int
    files: tuple[PartFile, ...]
    tensors: tuple[PartTensor, ...]
    streams: tuple[Stream, ...]
    leaves: tuple[Leaf, ...]
    absent: dict[str, str]

    def dump(self) -> tuple[bytes, bytes]:
        """Return the bytes of the part's file, and the digest that names them."""
        return dump_packed_document(self._signed())

    def _signed(self) -> dict[str, Any]:
        scopes = collect_scopes(self.tensors, self.streams, self.leaves)
        dtypes = sorted({tensor.dtype for tensor in self.tensors})
        return {
            **document_head("part", self.origin, saved_unix_s=self.saved_unix_s, scopes=scopes, dtypes=dtypes),
            "writer": self.writer,
            "references": [],
            "encodings": list(ENCODINGS),
            "files": self._file_columns(),
            "tensors": {
                **tensor_columns(self.tensors, scopes, dtypes),
                "box_count": dump_packed([len(tensor.boxes) for tensor in self.tensors]),
            },
            "aliases": alias_columns(self.tensors),
            **self._box_columns(),
            "streams": {
                **stream_columns(self.streams, scopes),
                "state": [stream.state for stream in self.streams],
            },
            "leaves": {
                **leaf_columns(self.leaves, scopes),
                "value": [leaf.value for leaf in self.leaves],
            },
            "absent": dict(self.absent),
        }

    def _file_columns(self) -> dict[str, object]:
        return {
            "name": [file.name for file in self.files],
            "kind": [file.kind for file in self.files],
            "nbytes": dump_packed([file.nbytes for file in self.files]),
            "header_nbytes": dump_packed([file.header_nbytes for file in self.files]),
            "header_digest": b"".join(file.header_digest for file in self.files),
        }

    def _box_columns(self) -> dict[str, object]:
        boxes = [box for tensor in self.tensors for box in tensor.boxes]
        extents = [(number, extent) for number, box in enumerate(boxes) for extent in box.extents]
        return {
            "boxes": {
                "begin": dump_packed([begin for box in boxes for begin in box.box.begin]),
                "box_shape": dump_packed([extent for box in boxes for extent in box.box.shape]),
                "replica": dump_packed([int(box.replica) for box in boxes]),
                "digest_count": dump_packed([len(box.digests) // DIGEST_NBYTES for box in boxes]),
            },
            "extents": {
                "box": dump_packed([number for number, _ in extents]),
                "block_begin": dump_packed([extent.block_begin for _, extent in extents]),
                "block_count": dump_packed([extent.block_count for _, extent in extents]),
                "file": dump_packed([extent.file for _, extent in extents]),
                "byte_begin": dump_packed([extent.byte_begin for _, extent in extents]),
                "encoding": dump_packed([ENCODINGS.index(extent.encoding) for _, extent in extents]),
                "key": [extent.key for _, extent in extents],
            },
            "digests": b"".join(box.digests for box in boxes),
        }

    @classmethod
    def parse(cls, content: bytes, *, where: str, digest: bytes | None = None) -> tuple[Part, bytes]:
        """Return the part of a file, and the digest that names it.

        Raises: FormatError, IntegrityError(DOC_DIGEST), UnsupportedError.
        Spec: REQ-PRT-001 to REQ-PRT-010.
        """
        signed, actual = parse_packed_document(content, where=where, digest=digest)
        part = _parse_part(signed, where)
        if {**part._signed(), "features": signed["features"]} != signed:  # noqa: SLF001 - our own
            # The one form: scopes and dtypes exactly those in use.
            raise err(
                Code.COLUMN_ORDER,
                "scopes or dtypes aren't in their one form",
                where=where,
                requirement="REQ-IDX-007",
            )
        return part, actual


def dump_failure(origin: Origin, writer: int, error: CkptError) -> bytes:
    """Return the record by which a writer says that it failed. Spec: REQ-CMT-004."""
    detail = "".join(char if char.isprintable() and ord(char) < 0x7F else "?" for char in str(error))
    return dump_document(
        {
            "type": "failure",
            "format_version": limits.FORMAT_VERSION,
            "features": {"reader": [], "writer": []},
            "attempt": origin.attempt,
            "writer": writer,
            "code": str(error.code),
            "detail": detail[:1000],
        }
    )


# --- parse ------------------------------------------------------------------------------------------------------------

_PART_KEYS: Final = (
    "type", "format_version", "features", *ORIGIN_KEYS, "writer", "saved_unix_s", "references", "encodings", "scopes",
    "dtypes", "files", "tensors", "aliases", "boxes", "extents", "digests", "streams", "leaves", "absent",
)  # fmt: skip


def _parse_part(signed: dict[str, Any], where: str) -> Part:
    check_version(signed, where)
    columns = Columns(signed, _PART_KEYS, where)
    if columns.any("type") != "part":
        raise err(Code.DOC_SCHEMA, "not a part", where=columns.place("type"), requirement="REQ-DOC-011")
    if (columns.any("references"), columns.any("encodings")) != ([], list(ENCODINGS)):
        raise err(
            Code.PROFILE_MISMATCH,
            "a full checkpoint has no references, and raw blocks only",
            where=where,
            requirement="REQ-MAN-005",
        )
    origin = parse_origin(columns)
    writer = parse_counter(columns, "writer", below=origin.writer_count)
    scopes = check_scopes(columns)
    files = _parse_files(columns, origin, writer)
    tensors = _parse_tensors(columns, origin, scopes, len(files))
    _check_files_covered(files, tensors, origin.block_nbytes, columns.columns("files", _FILE_KEYS))
    return Part(
        origin=origin,
        writer=writer,
        saved_unix_s=parse_counter(columns, "saved_unix_s"),
        files=files,
        tensors=tensors,
        streams=_parse_streams(columns.columns("streams", ("name", "scope", "kind", "state")), scopes),
        leaves=_parse_leaves(columns.columns("leaves", ("field", "name", "scope", "value")), scopes),
        absent=parse_absent(columns),
    )


def _parse_files(columns: Columns, origin: Origin, writer: int) -> tuple[PartFile, ...]:
    table = columns.columns("files", _FILE_KEYS)
    names = table.strings("name")
    table.check_increasing("name", names)
    for name in names:
        found = _FILE_NAME.fullmatch(name)
        if not found or found[1] != origin.attempt or found[2] != f"{writer:05d}":
            raise err(
                Code.UNSAFE_PATH,
                f"{name[:64]!r} isn't a file name of this part",
                where=table.place("name"),
                requirement="REQ-CKP-001",
            )
    kinds = table.strings("kind", count=len(names))
    if any(kind not in FILE_KINDS for kind in kinds):
        raise table.broken("kind", "unknown file kind")
    nbytes = table.packed("nbytes", count=len(names))
    header_nbytes = table.packed("header_nbytes", count=len(names), below=8 + limits.SHARD_HEADER_NBYTES + 1)
    digests = table.fixed("header_digest", count=len(names), nbytes=DIGEST_NBYTES)
    return tuple(
        PartFile(name=name, kind=kind, nbytes=total, header_nbytes=header, header_digest=digest)
        for name, kind, total, header, digest in zip(names, kinds, nbytes, header_nbytes, digests, strict=True)
    )


def _parse_tensors(columns: Columns, origin: Origin, scopes: list[str], file_count: int) -> tuple[PartTensor, ...]:
    table = columns.columns("tensors", (*TENSOR_KEYS, "box_count"))
    rows = parse_tensor_rows(table, scopes, check_dtypes(columns))
    counts = table.packed("box_count", count=len(rows), below=limits.BOXES + 1)
    aliases = parse_aliases(columns.columns("aliases", ("tensor", "name")), len(rows))
    if sum(counts) > limits.BOXES:
        raise err(
            Code.LIMIT_EXCEEDED, f"{sum(counts)} boxes", where=table.place("box_count"), requirement="REQ-LIM-001"
        )
    box_table = columns.columns("boxes", ("begin", "box_shape", "replica", "digest_count"))
    # Before the boxes: those of scalars have no numbers, so that nothing else would bound how many are built.
    replica = iter(box_table.packed("replica", count=sum(counts), below=2))
    boxes = parse_boxes(box_table, [(len(row[2]), count) for row, count in zip(rows, counts, strict=True)])
    digests = _split_digests(columns, box_table, sum(counts))
    extents = _parse_extents(columns.columns("extents", _EXTENT_KEYS), sum(counts), file_count)
    numbers = itertools.count()
    tensors = []
    for row, names, owned in zip(rows, aliases, boxes, strict=True):
        key, dtype, shape, storage = row
        tensor = PartTensor(
            field=key[0],
            name=key[1],
            scope=key[2],
            dtype=dtype,
            global_shape=shape,
            storage=storage,
            aliases=names,
            boxes=tuple(
                PartBox(box=box, replica=bool(next(replica)), digests=next(digests), extents=extents[next(numbers)])
                for box in owned
            ),
        )
        _check_boxes(tensor, origin.block_nbytes, box_table)
        tensors.append(tensor)
    return tuple(tensors)


_FILE_KEYS: Final = ("name", "kind", "nbytes", "header_nbytes", "header_digest")
_EXTENT_KEYS: Final = ("box", "block_begin", "block_count", "file", "byte_begin", "encoding", "key")


def _parse_extents(table: Columns, box_count: int, file_count: int) -> list[tuple[Extent, ...]]:
    keys = table.strings("key", limit_nbytes=limits.KEY_NBYTES)
    owners = table.packed("box", count=len(keys), below=box_count)
    block_begin = table.packed("block_begin", count=len(keys))
    block_counts = table.packed("block_count", count=len(keys))
    files = table.packed("file", count=len(keys), below=file_count)
    byte_begin = table.packed("byte_begin", count=len(keys))
    encodings = table.packed("encoding", count=len(keys), below=len(ENCODINGS))
    table.check_increasing("box", list(zip(owners, block_begin, strict=True)))
    extents: list[list[Extent]] = [[] for _ in range(box_count)]
    for row, owner in enumerate(owners):
        extents[owner].append(
            Extent(
                block_begin=block_begin[row],
                block_count=block_counts[row],
                file=files[row],
                byte_begin=byte_begin[row],
                encoding=ENCODINGS[encodings[row]],
                key=keys[row],
            )
        )
    return [tuple(found) for found in extents]


def _split_digests(columns: Columns, box_table: Columns, box_count: int) -> Iterator[bytes]:
    counts = box_table.packed("digest_count", count=box_count)
    content = columns.any("digests")
    if not isinstance(content, bytes) or len(content) != sum(counts) * DIGEST_NBYTES:
        raise columns.broken("digests", f"not {sum(counts)} digests")
    ends = list(itertools.accumulate(count * DIGEST_NBYTES for count in counts))
    return iter([content[begin:end] for begin, end in zip([0, *ends], ends, strict=False)])


def _check_boxes(tensor: PartTensor, block_nbytes: int, table: Columns) -> None:
    """Check bounds, digests and extents of each box. Spec: REQ-PRT-004, REQ-PRT-005, REQ-PRT-006."""
    whole = Box.whole(tensor.global_shape)
    for held in tensor.boxes:
        if not whole.contains(held.box):
            raise err(
                Code.BOX_BOUNDS,
                f"{held.box} leaves {tensor.global_shape} of {tensor.name[:64]!r}",
                where=table.place("begin"),
                requirement="REQ-PRT-004",
            )
        blocks = block_count(tensor.box_nbytes(held.box), block_nbytes)
        digests = len(held.digests) // DIGEST_NBYTES
        must_have = bool(held.extents) or not held.replica
        if digests != blocks and (must_have or digests):
            raise err(
                Code.EXTENT_COVERAGE,
                f"{digests} digests for the {blocks} blocks of {tensor.name[:64]!r}",
                where=table.place("digest_count"),
                requirement="REQ-PRT-005",
            )
        at = 0
        for extent in held.extents:
            if extent.block_begin != at or (extent.block_count == 0 and blocks):
                raise err(
                    Code.EXTENT_COVERAGE,
                    f"the extents of {tensor.name[:64]!r} skip or repeat block {at}",
                    where=table.place("begin"),
                    requirement="REQ-PRT-006",
                )
            at += extent.block_count
        if held.extents and at != blocks:
            raise err(
                Code.EXTENT_COVERAGE,
                f"the extents of {tensor.name[:64]!r} hold {at} of {blocks} blocks",
                where=table.place("begin"),
                requirement="REQ-PRT-006",
            )


def extent_nbytes(tensor: PartTensor, held: PartBox, extent: Extent, block_nbytes: int) -> int:
    """Return the number of bytes that a raw extent stores."""
    total = tensor.box_nbytes(held.box)
    begin = extent.block_begin * block_nbytes
    return min(total, begin + extent.block_count * block_nbytes) - begin


def _check_files_covered(
    files: tuple[PartFile, ...], tensors: tuple[PartTensor, ...], block_nbytes: int, table: Columns
) -> None:
    """Check that header and extents tile each file: no byte is undigested, and none is counted twice."""
    spans: list[list[tuple[int, int]]] = [[(0, file.header_nbytes)] for file in files]
    for tensor in tensors:
        for held in tensor.boxes:
            for extent in held.extents:
                nbytes = extent_nbytes(tensor, held, extent, block_nbytes)
                spans[extent.file].append((extent.byte_begin, extent.byte_begin + nbytes))
    for file, found in zip(files, spans, strict=True):
        at = 0
        for begin, end in sorted(found):
            if begin != at:
                break
            at = end
        else:
            if at == file.nbytes:
                continue
        raise err(
            Code.FILE_COVERAGE,
            f"byte {at} of {file.name} (of {file.nbytes}) is covered by nothing, or twice",
            where=table.place("nbytes"),
            requirement="REQ-PRT-007",
        )


def _parse_streams(table: Columns, scopes: list[str]) -> tuple[Stream, ...]:
    rows = parse_stream_rows(table, scopes)
    states = table.blobs("state", count=len(rows))
    return tuple(
        Stream(name=name, scope=scope, kind=kind, state=state)
        for (name, scope, kind), state in zip(rows, states, strict=True)
    )


def _parse_leaves(table: Columns, scopes: list[str]) -> tuple[Leaf, ...]:
    rows = parse_leaf_rows(table, scopes)
    values = table.blobs("value", count=len(rows))
    return tuple(
        Leaf(field=field, name=name, scope=scope, value=value)
        for (field, name, scope), value in zip(rows, values, strict=True)
    )
