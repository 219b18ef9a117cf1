"""Merge the parts of an attempt into its index. A pure function of the parts. Spec: REQ-CMT-010 to REQ-CMT-018."""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

from ckptfmt.arithmetic.tiling import check_tiling
from ckptfmt.digest import DIGEST_NBYTES
from ckptfmt.documents.index import Index, IndexLeaf, IndexStream, IndexTensor, PartEntry
from ckptfmt.documents.manifest import FIELDS, FieldSummary, Origin
from ckptfmt.documents.tables import TensorKey, sort_key
from ckptfmt.documents.tree import find_difference, parse_tree
from ckptfmt.errors import Code, err

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptfmt.box import Box
    from ckptfmt.documents.index import Sharding
    from ckptfmt.documents.part import Leaf, Part, PartBox, PartTensor, Stream

__all__ = ["PartFileEntry", "check_index_tiling", "merge_parts", "summarise"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PartFileEntry:
    """A part as it was read: its contents, its digest, the size of its file in bytes."""

    part: Part
    digest: bytes
    nbytes: int


#: Who holds a piece: (writer, what its part says of the piece).
_Holders = list[tuple[int, "PartBox"]]


def merge_parts(entries: Sequence[PartFileEntry]) -> Index:
    """Return the index of an attempt, given all of its parts in writer order.

    Raises: LayoutError: WRITERS_DIVERGED where the parts aren't of one attempt; TENSOR_DIVERGED, REPLICA_DIVERGED,
        HELD_NOT_WRITTEN, LEAF_DIVERGED, TILING_GAP, TILING_OVERLAP, BOX_BOUNDS; each names tensor or value and writers.
    Spec: REQ-CMT-010 to REQ-CMT-018, REQ-IDX-004, REQ-IDX-005.
    """
    parts = [entry.part for entry in entries]
    origin = _check_origins(parts)
    tensors = tuple(
        _merge_tensor(key, holders, origin.block_nbytes)
        for key, holders in sorted(_by_key(parts).items(), key=lambda item: sort_key(item[0]))
    )
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


def check_index_tiling(index: Index) -> None:
    """Raise unless the pieces of every tensor tile it exactly.

    Raises: LayoutError(TILING_GAP, TILING_OVERLAP, BOX_BOUNDS). Spec: REQ-IDX-004.
    """
    checked: set[tuple[tuple[int, ...], Sharding]] = set()
    for tensor in index.tensors:
        if (tensor.global_shape, tensor.sharding) in checked:
            continue
        checked.add((tensor.global_shape, tensor.sharding))
        rows = (len(tensor.sharding), len(tensor.global_shape))
        begin = np.array([box.begin for box, _ in tensor.sharding], dtype=np.int64).reshape(rows)
        box_shape = np.array([box.shape for box, _ in tensor.sharding], dtype=np.int64).reshape(rows)
        check_tiling(tensor.global_shape, begin, box_shape, where=_title(tensor.key))


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


def _by_key(parts: Sequence[Part]) -> dict[TensorKey, list[tuple[int, PartTensor]]]:
    held: dict[TensorKey, list[tuple[int, PartTensor]]] = defaultdict(list)
    for part in parts:
        for tensor in part.tensors:
            held[tensor.key].append((part.writer, tensor))
    return held


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
                    where=_title(tensor.key),
                    requirement="REQ-IDX-008",
                )


def _merge_tensor(key: TensorKey, holders: list[tuple[int, PartTensor]], block_nbytes: int) -> IndexTensor:
    first_writer, first = holders[0]
    for writer, tensor in holders[1:]:
        for what in ("dtype", "global_shape", "storage"):
            if getattr(tensor, what) != getattr(first, what):
                raise err(
                    Code.TENSOR_DIVERGED,
                    f"{what} is {getattr(first, what)} on writer {first_writer}, "
                    f"{getattr(tensor, what)} on writer {writer}",
                    where=_title(key),
                    requirement="REQ-CMT-011",
                )
    pieces: dict[Box, _Holders] = defaultdict(list)
    for writer, tensor in holders:
        for held in tensor.boxes:
            if held.box.element_count or 0 in first.global_shape:
                if pieces[held.box] and pieces[held.box][-1][0] == writer:
                    raise err(
                        Code.TILING_OVERLAP,
                        f"writer {writer} lists {held.box} twice",
                        where=_title(key),
                        requirement="REQ-PRT-011",
                    )
                pieces[held.box].append((writer, held))
    return IndexTensor(
        field=first.field,
        name=first.name,
        scope=first.scope,
        dtype=first.dtype,
        global_shape=first.global_shape,
        storage=first.storage,
        aliases=tuple(sorted({alias for _, tensor in holders for alias in tensor.aliases}, key=str.encode)),
        sharding=tuple((box, _merge_piece(key, pieces[box], block_nbytes)) for box in sorted(pieces)),
    )


def _merge_piece(key: TensorKey, holders: _Holders, block_nbytes: int) -> int:
    """Return the writer whose copy of a piece counts, after comparing all copies that have digests."""
    declared = all(held.replica for _, held in holders)
    known = [(writer, held) for writer, held in holders if held.digests]
    if len(holders) > 1 and not declared and len(known) not in (0, len(holders)):
        silent = next(writer for writer, held in holders if not held.digests)
        raise err(
            Code.REPLICA_DIVERGED,
            f"writer {silent} gives no digest of what it holds, and not every holder says that it is a replica",
            where=_title(key),
            requirement="REQ-CMT-012",
        )
    for writer, held in known[1:]:
        _check_same_digests(key, known[0], (writer, held), block_nbytes)
    for writer, held in holders:
        if held.extents:
            return writer
    raise err(
        Code.HELD_NOT_WRITTEN,
        f"writers {', '.join(str(writer) for writer, _ in holders[:8])} hold {holders[0][1].box}; none wrote it",
        where=_title(key),
        requirement="REQ-CMT-013",
    )


def _check_same_digests(
    key: TensorKey, one: tuple[int, PartBox], other: tuple[int, PartBox], block_nbytes: int
) -> None:
    if one[1].digests == other[1].digests:
        return
    pairs = itertools.zip_longest(_split(one[1].digests), _split(other[1].digests))
    block = next(number for number, (a, b) in enumerate(pairs) if a != b)
    raise err(
        Code.REPLICA_DIVERGED,
        f"block {block} (from byte {block * block_nbytes}) of {one[1].box} differs between writers {one[0]} and"
        f" {other[0]}",
        where=_title(key),
        requirement="REQ-CMT-012",
    )


def _split(digests: bytes) -> list[bytes]:
    return [digests[begin : begin + DIGEST_NBYTES] for begin in range(0, len(digests), DIGEST_NBYTES)]


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
                title = _title(key)
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


def _title(key: TensorKey) -> str:
    field, name, scope = key
    return f"{field} {name!r}" + ("" if scope == "global" else f" ({scope})")
