"""Merge the parts of an attempt into its index. A pure function of the parts. Spec: REQ-CMT-010 to REQ-CMT-018.

The boxes of all parts are columns: brought together by tensor with one sort, then merged tensor by tensor.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from ckptfmt import limits
from ckptfmt.documents.index import Index, IndexLeaf, IndexStream, IndexTensor, PartEntry
from ckptfmt.documents.manifest import FIELDS, FieldSummary, Origin, Reference
from ckptfmt.documents.sharding import Sharding
from ckptfmt.documents.tables import TensorTable, sort_key, title_of
from ckptfmt.documents.tree import find_difference, parse_tree
from ckptfmt.errors import Code, err
from ckptfmt.layout.merge_tensor import merge_all_pieces
from ckptfmt.layout.tiling import check_sharding

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ckptfmt.documents.part import Leaf, Part, Stream
    from ckptfmt.documents.tables import TensorKey


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PartFileEntry:
    """A part as it was read: its contents, its digest, the size of its file in bytes."""

    part: Part
    digest: bytes
    nbytes: int


def merge_parts(entries: Sequence[PartFileEntry]) -> Index:
    """Return the index of an attempt, given all of its parts in writer order.

    Raises: LayoutError: WRITERS_DIVERGED where the parts aren't of one attempt; TENSOR_DIVERGED, REPLICA_DIVERGED,
        HELD_NOT_WRITTEN, LEAF_DIVERGED, TILING_GAP, TILING_OVERLAP, BOX_BOUNDS; each names tensor or value and writers.
    Spec: REQ-CMT-010 to REQ-CMT-018, REQ-IDX-004, REQ-IDX-005.
    """
    parts = [entry.part for entry in entries]
    origin = _check_origins(parts)
    tensors = _merge_tensors(parts, origin.block_nbytes)
    index = Index(
        origin=origin,
        saved_unix_s=parts[0].saved_unix_s,
        parts=tuple(PartEntry(nbytes=entry.nbytes, digest=entry.digest) for entry in entries),
        tensors=tensors,
        streams=_merge_streams(parts),
        leaves=_merge_leaves(parts),
        absent={},
    )
    check_index_tiling(index)
    _check_names(tensors)
    return dataclasses.replace(index, absent=_absent_fields(parts, index))


def summarise(index: Index) -> dict[str, FieldSummary]:
    """Return the manifest's summary of each field. Spec: REQ-MAN-006."""
    summaries = {}
    for field in FIELDS:
        tensors = [tensor for tensor in index.tensors if tensor.field == field]
        summaries[field] = FieldSummary(
            tensor_count=len(tensors),
            nbytes=sum(tensor.nbytes for tensor in tensors),
            stream_count=len(index.streams) if field == "rng" else 0,
            leaf_count=sum(leaf.field == field for leaf in index.leaves),
            reason=index.absent.get(field),
        )
    return summaries


def merge_deltas(parts: Sequence[Part]) -> tuple[tuple[str, ...], tuple[Reference, ...]]:
    """Return the reader features and the references of a checkpoint: all that one of its parts has.

    Raises: FormatError(LIMIT_EXCEEDED, REFERENCE_CLOSURE). Spec: REQ-DEL-001, REQ-DEL-021.
    """
    features = sorted({feature for part in parts for feature in part.features})
    references = sorted({one for part in parts for one in part.references}, key=lambda one: one.digest)
    if len(references) > limits.REFERENCES:
        raise err(Code.LIMIT_EXCEEDED, f"the parts refer to {len(references)} checkpoints", requirement="REQ-LIM-001")
    if len({one.digest for one in references}) != len(references):
        raise err(Code.REFERENCE_CLOSURE, "two parts refer to one checkpoint by two names", requirement="REQ-DEL-002")
    return tuple(features), tuple(references)


def add_stored(fields: dict[str, FieldSummary], parts: Sequence[Part]) -> dict[str, FieldSummary]:
    """Return the summaries of a delta: with what its own files store of each field. Spec: REQ-MAN-006."""
    stored: Counter[str] = Counter()
    for part in parts:
        held = part.holdings
        owners = np.repeat(np.arange(len(held.box_count)), held.box_count)[held.extents.box]
        nbytes = held.extents.stored_nbytes(held.box_nbytes(), part.origin.block_nbytes)
        of_tensors = np.bincount(owners, nbytes, minlength=len(held.box_count)).astype(np.int64)
        for (field, _, _), count in zip(held.table.keys, of_tensors.tolist(), strict=True):
            stored[field] += count
    return {
        name: field if field.reason is not None else dataclasses.replace(field, stored_nbytes=stored[name])
        for name, field in fields.items()
    }


def check_index_tiling(index: Index) -> None:
    """Raise unless the pieces of every tensor tile it exactly.

    Raises: LayoutError(TILING_GAP, TILING_OVERLAP, BOX_BOUNDS). Spec: REQ-IDX-004.
    """
    checked: set[tuple[tuple[int, ...], Sharding]] = set()
    for tensor in index.tensors:
        # Of tensors that are cut alike, the first speaks for all.
        if (tensor.global_shape, tensor.sharding) not in checked:
            checked.add((tensor.global_shape, tensor.sharding))
            check_sharding(tensor.sharding, tensor.global_shape, where=title_of(tensor.key))


def _check_origins(parts: Sequence[Part]) -> Origin:
    origin = parts[0].origin
    for number, part in enumerate(parts):
        if part.writer != number or part.origin != origin:
            theirs, ours = part.origin.as_dict(), origin.as_dict()
            differing = [key for key in ours if ours[key] != theirs[key]] or ["writer"]
            raise err(
                Code.WRITERS_DIVERGED,
                f"the parts of writers 0 and {number} differ in {', '.join(differing)}",
                requirement="REQ-CMT-010",
            )
    if len(parts) != origin.writer_count:
        raise err(Code.WRITERS_MISSING, f"{len(parts)} parts of {origin.writer_count}", requirement="REQ-CMT-010")
    return origin


def _merge_tensors(parts: Sequence[Part], block_nbytes: int) -> tuple[IndexTensor, ...]:
    held = [part.holdings for part in parts]
    # Most parts have one table of tensors, the very same object: it is looked at once.
    tables: dict[int, tuple[int, TensorTable]] = {}
    for part, holdings in zip(parts, held, strict=True):
        tables.setdefault(id(holdings.table), (part.writer, holdings.table))
    table = _unite_tables(list(tables.values()))
    numbers = {key: number for number, key in enumerate(table.keys)}
    rows = {one: np.array([numbers[key] for key in of.keys], np.int64) for one, (_, of) in tables.items()}
    shardings = merge_all_pieces(held, [rows[id(holdings.table)] for holdings in held], table, block_nbytes)
    return tuple(_list_tensors(table, shardings))


def _list_tensors(table: TensorTable, shardings: Iterable[Sharding]) -> list[IndexTensor]:
    """Return the rows of a table, each with its sharding."""
    rows = zip(table.keys, table.dtypes, table.global_shapes, table.storages, table.aliases, strict=True)
    return [
        IndexTensor(
            field=field,
            name=name,
            scope=scope,
            dtype=dtype,
            global_shape=global_shape,
            storage=storage,
            aliases=aliases,
            sharding=sharding,
        )
        for ((field, name, scope), dtype, global_shape, storage, aliases), sharding in zip(rows, shardings, strict=True)
    ]


def _unite_tables(tables: Sequence[tuple[int, TensorTable]]) -> TensorTable:
    """Return what the tables of some writers say of all tensors, sorted."""
    table = tables[0][1]
    if len(tables) == 1 and sorted(table.keys, key=sort_key) == list(table.keys):
        return table
    nothing = Sharding.of(())
    found: dict[TensorKey, tuple[int, IndexTensor]] = {}
    diverged: dict[TensorKey, Exception] = {}
    for writer, of_writer in tables:
        for tensor in _list_tensors(of_writer, [nothing] * len(of_writer.keys)):
            first_writer, first = found.setdefault(tensor.key, (writer, tensor))
            if first != tensor:
                error = _find_divergence(first_writer, first, writer, tensor)
                if error is not None:
                    diverged.setdefault(tensor.key, error)
                union = tuple(sorted({*first.aliases, *tensor.aliases}, key=str.encode))
                found[tensor.key] = first_writer, dataclasses.replace(first, aliases=union)
    if diverged:
        raise diverged[min(diverged, key=sort_key)]
    return TensorTable.of([found[key][1] for key in sorted(found, key=sort_key)])


def _find_divergence(first_writer: int, first: IndexTensor, writer: int, tensor: IndexTensor) -> Exception | None:
    """Return the error of two writers that don't say the same of a tensor. Spec: REQ-CMT-011."""
    for what in ("dtype", "global_shape", "storage"):
        one, other = getattr(first, what), getattr(tensor, what)
        if one != other:
            return err(
                Code.TENSOR_DIVERGED,
                f"{what} is {one} on writer {first_writer}, {other} on writer {writer}",
                where=title_of(tensor.key),
                requirement="REQ-CMT-011",
            )
    return None


def _check_names(tensors: Sequence[IndexTensor]) -> None:
    """Raise if a name or alias belongs to two tensors, as one writer may not know of another. Spec: REQ-IDX-008."""
    owners: dict[TensorKey, IndexTensor] = {tensor.key: tensor for tensor in tensors}
    for tensor in tensors:
        for alias in tensor.aliases:
            owner = owners.setdefault((tensor.field, alias, tensor.scope), tensor)
            if owner is not tensor:
                raise err(
                    Code.TENSOR_DIVERGED,
                    f"{alias!r} is another name of {tensor.name!r} on one writer, and of {owner.name!r} on another",
                    where=title_of(tensor.key),
                    requirement="REQ-IDX-008",
                )


def _merge_streams(parts: Sequence[Part]) -> tuple[IndexStream, ...]:
    found: dict[tuple[str, str], tuple[int, Stream]] = {}
    for part in parts:
        for stream in part.streams:
            writer, first = found.setdefault((stream.name, stream.scope), (part.writer, stream))
            if first != stream:
                raise _diverged(f"rng {stream.name} ({stream.scope})", writer, part.writer, None)
    return tuple(
        IndexStream(name=stream.name, scope=stream.scope, kind=stream.kind, part=writer)
        for _, (writer, stream) in sorted(found.items(), key=lambda item: [part.encode() for part in item[0]])
    )


def _merge_leaves(parts: Sequence[Part]) -> tuple[IndexLeaf, ...]:
    found: dict[TensorKey, tuple[int, Leaf]] = {}
    for part in parts:
        for leaf in part.leaves:
            key = (leaf.field, leaf.name, leaf.scope)
            writer, first = found.setdefault(key, (part.writer, leaf))
            if first.value != leaf.value:
                title = title_of(key)
                path = find_difference(parse_tree(first.value, where=title), parse_tree(leaf.value, where=title))
                raise _diverged(title, writer, part.writer, path)
    return tuple(
        IndexLeaf(field=leaf.field, name=leaf.name, scope=leaf.scope, part=writer)
        for _, (writer, leaf) in sorted(found.items(), key=lambda item: sort_key(item[0]))
    )


def _diverged(title: str, one: int, other: int, path: str | None) -> Exception:
    place = f" at {path}" if path else ""
    return err(
        Code.LEAF_DIVERGED, f"differs between writers {one} and {other}{place}", where=title, requirement="REQ-CMT-014"
    )


def _absent_fields(parts: Sequence[Part], index: Index) -> dict[str, str]:
    """Return the fields that every writer says it has nothing for, with the first writer's reason."""
    present = {tensor.field for tensor in index.tensors} | {leaf.field for leaf in index.leaves}
    if index.streams:
        present.add("rng")
    return {
        field: parts[0].absent[field]
        for field in FIELDS
        if field not in present and all(field in part.absent for part in parts)
    }
