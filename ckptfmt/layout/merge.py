"""Merge the parts of an attempt into its index. Pure. Spec: REQ-CMT-010 to REQ-CMT-018.

The boxes of all parts are columns. One sort brings the boxes of each tensor together; then each
tensor is merged.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ckptfmt import limits
from ckptfmt.box import Box
from ckptfmt.digest import DIGEST_NBYTES
from ckptfmt.documents.frozen_tensors import (
    BASE_LEAF,
    check_frozen_names,
    is_frozen_leaf,
    parse_frozen,
)
from ckptfmt.documents.holdings import Holdings
from ckptfmt.documents.index import Index, IndexLeaf, IndexRngStream, IndexTensor, PartEntry
from ckptfmt.documents.manifest import FIELDS, FieldSummary, Origin, Reference
from ckptfmt.documents.packed import Integers, join_integers
from ckptfmt.documents.part import Leaf, Part, RngStream
from ckptfmt.documents.sharding import Sharding, rows_increase
from ckptfmt.documents.tables import TensorKey, TensorTable, key_of, sort_key, title_of
from ckptfmt.documents.tree import find_difference, parse_tree
from ckptfmt.errors import CkptError, Code, err
from ckptfmt.layout.tiling import check_sharding


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PartFileEntry:
    """A parsed part with its file's digest and size in bytes."""

    part: Part
    digest: bytes
    nbytes: int


#: Largest number of a value's characters in a message.
_SHOWN: Final = 60


def merge_parts(entries: Sequence[PartFileEntry]) -> Index:
    """Return the index of an attempt from all of its parts, in writer order.

    Raises: LayoutError: WRITERS_DIVERGED if the parts belong to different attempts;
        TENSOR_DIVERGED, REPLICA_DIVERGED, HELD_NOT_WRITTEN, LEAF_DIVERGED, TILING_GAP,
        TILING_OVERLAP, BOX_BOUNDS. Each error names the tensor or value and the writers.
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
    _check_frozen(parts, tensors)
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
    """Return the union of the parts' reader features, and the union of the parts' references.

    Raises: FormatError(LIMIT_EXCEEDED, REFERENCE_CLOSURE). Spec: REQ-DEL-001, REQ-DEL-021.
    """
    features = sorted({feature for part in parts for feature in part.features})
    references = sorted(
        {one for part in parts for one in part.references}, key=lambda one: one.digest
    )
    if len(references) > limits.REFERENCES:
        raise err(
            Code.LIMIT_EXCEEDED,
            f"the parts refer to {len(references)} checkpoints",
            requirement="REQ-LIM-001",
        )
    if len({one.digest for one in references}) != len(references):
        raise err(
            Code.REFERENCE_CLOSURE,
            "two parts refer to one checkpoint by two names",
            requirement="REQ-DEL-002",
        )
    return tuple(features), tuple(references)


def add_stored(fields: dict[str, FieldSummary], parts: Sequence[Part]) -> dict[str, FieldSummary]:
    """Return a delta's summaries with the number of bytes stored in the delta's own files.

    Spec: REQ-MAN-006.
    """
    stored: Counter[str] = Counter()
    for part in parts:
        held = part.holdings
        owners = np.repeat(np.arange(len(held.box_count)), held.box_count)[held.extents.box]
        nbytes = held.extents.stored_nbytes(held.box_nbytes(), part.origin.block_nbytes)
        of_tensors = np.bincount(owners, nbytes, minlength=len(held.box_count)).astype(np.int64)
        for (field, _, _), count in zip(held.table.keys, of_tensors.tolist(), strict=True):
            stored[field] += count
    return {
        name: field
        if field.reason is not None
        else dataclasses.replace(field, stored_nbytes=stored[name])
        for name, field in fields.items()
    }


def check_index_tiling(index: Index) -> None:
    """Raise unless the boxes of every tensor tile the tensor exactly.

    Raises: LayoutError(TILING_GAP, TILING_OVERLAP, BOX_BOUNDS). Spec: REQ-IDX-004.
    """
    checked: set[tuple[tuple[int, ...], Sharding]] = set()
    for tensor in index.tensors:
        # Tensors with equal shape and sharding are checked once.
        if (tensor.global_shape, tensor.sharding) not in checked:
            checked.add((tensor.global_shape, tensor.sharding))
            check_sharding(tensor.sharding, tensor.global_shape, where=title_of(tensor.key))


def _check_origins(parts: Sequence[Part]) -> Origin:
    origin = parts[0].origin
    for number, part in enumerate(parts):
        if part.writer != number or part.origin != origin:
            theirs = part.origin.as_dict()
            ours = origin.as_dict()
            differing = [key for key in ours if ours[key] != theirs[key]] or ["writer"]
            raise err(
                Code.WRITERS_DIVERGED,
                f"the parts of writers 0 and {number} differ in {', '.join(differing)}",
                requirement="REQ-CMT-010",
            )
    if len(parts) != origin.writer_count:
        raise err(
            Code.WRITERS_MISSING,
            f"{len(parts)} parts of {origin.writer_count}",
            requirement="REQ-CMT-010",
        )
    return origin


def _merge_tensors(parts: Sequence[Part], block_nbytes: int) -> tuple[IndexTensor, ...]:
    held = [part.holdings for part in parts]
    # Most parts share one table object, so each distinct table is processed once.
    tables: dict[int, tuple[int, TensorTable]] = {}
    for part, holdings in zip(parts, held, strict=True):
        tables.setdefault(id(holdings.table), (part.writer, holdings.table))
    table = _unite_tables(list(tables.values()))
    numbers = {key: number for number, key in enumerate(table.keys)}
    rows = {
        one: np.array([numbers[key] for key in of.keys], np.int64)
        for one, (_, of) in tables.items()
    }
    shardings = merge_all_boxes(
        held, [rows[id(holdings.table)] for holdings in held], table, block_nbytes
    )
    return tuple(_list_tensors(table, shardings))


def _list_tensors(table: TensorTable, shardings: Iterable[Sharding]) -> list[IndexTensor]:
    """Return the rows of a table with their shardings."""
    rows = zip(range(len(table.keys)), shardings, strict=True)
    return [IndexTensor(**table.members(row), sharding=sharding) for row, sharding in rows]


def _unite_tables(tables: Sequence[tuple[int, TensorTable]]) -> TensorTable:
    """Return the union of the tables of some writers, sorted by key."""
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


def _find_divergence(
    first_writer: int, first: IndexTensor, writer: int, tensor: IndexTensor
) -> Exception | None:
    """Return the error if two writers describe a tensor differently; else None.

    Spec: REQ-CMT-011.
    """
    for what in ("dtype", "global_shape", "storage"):
        one = getattr(first, what)
        other = getattr(tensor, what)
        if one != other:
            return err(
                Code.TENSOR_DIVERGED,
                f"{what} is {one} on writer {first_writer}, {other} on writer {writer}",
                where=title_of(tensor.key),
                requirement="REQ-CMT-011",
            )
    return None


def _check_names(tensors: Sequence[IndexTensor]) -> None:
    """Raise if two tensors share a name or alias.

    One writer can't see a conflict with another writer's names.

    Spec: REQ-IDX-008.
    """
    owners: dict[TensorKey, IndexTensor] = {tensor.key: tensor for tensor in tensors}
    for tensor in tensors:
        for alias in tensor.aliases:
            owner = owners.setdefault((tensor.field, alias, tensor.scope), tensor)
            if owner is not tensor:
                raise err(
                    Code.TENSOR_DIVERGED,
                    (
                        f"{alias!r} is another name of {tensor.name!r} on one writer, and of"
                        f" {owner.name!r} on another"
                    ),
                    where=title_of(tensor.key),
                    requirement="REQ-IDX-008",
                )


def _check_frozen(parts: Sequence[Part], tensors: Sequence[IndexTensor]) -> None:
    """Raise if a tensor is stored by one writer, and taken from a frozen base by another.

    Spec: REQ-FRZ-004.
    """
    leaves = {leaf.name: leaf for part in parts for leaf in part.leaves if is_frozen_leaf(leaf)}
    found = [
        parse_frozen(name, parse_tree(leaf.value, where=name), where=name)
        for name, leaf in leaves.items()
        if name != BASE_LEAF
    ]
    if found:
        names = {
            (tensor.field, name, tensor.scope)
            for tensor in tensors
            for name in (tensor.name, *tensor.aliases)
        }
        check_frozen_names(found, names)


def _merge_streams(parts: Sequence[Part]) -> tuple[IndexRngStream, ...]:
    found: dict[tuple[str, str], tuple[int, RngStream]] = {}
    for part in parts:
        for stream in part.streams:
            writer, first = found.setdefault((stream.name, stream.scope), (part.writer, stream))
            if first != stream:
                raise _diverged(f"rng {stream.name} ({stream.scope})", writer, part.writer, None)
    return tuple(
        IndexRngStream(name=stream.name, scope=stream.scope, kind=stream.kind, part=writer)
        for _, (writer, stream) in sorted(
            found.items(), key=lambda item: [part.encode() for part in item[0]]
        )
    )


def _merge_leaves(parts: Sequence[Part]) -> tuple[IndexLeaf, ...]:
    found: dict[TensorKey, tuple[int, Leaf]] = {}
    for part in parts:
        for leaf in part.leaves:
            key = key_of(leaf)
            writer, first = found.setdefault(key, (part.writer, leaf))
            if first.value != leaf.value:
                raise leaf_diverged(key, (writer, first.value), (part.writer, leaf.value))
    return tuple(
        IndexLeaf(field=leaf.field, name=leaf.name, scope=leaf.scope, part=writer)
        for _, (writer, leaf) in sorted(found.items(), key=lambda item: sort_key(item[0]))
    )


def leaf_diverged(key: TensorKey, one: tuple[int, bytes], other: tuple[int, bytes]) -> CkptError:
    """Return the error for a leaf with different values on two writers, including both values.

    Args:
        key: field, name and scope of the leaf.
        one, other: a writer's number, and the bytes of this writer's tree.
    """
    title = title_of(key)
    (first, left), (second, right) = (
        (writer, parse_tree(value, where=title)) for writer, value in (one, other)
    )
    path = find_difference(left, right)
    keys = path.split("/")[1:] if path else []
    values = " and ".join(_shown(tree, keys) for tree in (left, right))
    remedy = None
    if key[0] == "config":
        name = f"config={{..., {keys[0]!r}: ...}}" if keys and keys[0] else "config="
        remedy = (
            f"Make it equal on all processes, or leave it out of {name}; or give process 0's:"
            " State(config=ckptfmt.FirstWorker(config))."
        )
    return err(
        Code.LEAF_DIVERGED,
        f"differs between writers {first} and {second}{f' at {path}' if path else ''}: {values}",
        where=title,
        requirement="REQ-CMT-014",
        remedy=remedy,
    )


def _shown(tree: object, keys: Sequence[str]) -> str:
    """Return the text of the value below some keys of a tree, shortened for a message."""
    for key in keys:
        if isinstance(tree, dict):
            tree = next((value for name, value in tree.items() if str(name) == key), tree)
        elif isinstance(tree, list | tuple) and key.isdigit():
            tree = tree[int(key)]
    text = repr(tree)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def _diverged(title: str, one: int, other: int, path: str | None) -> Exception:
    place = f" at {path}" if path else ""
    return err(
        Code.LEAF_DIVERGED,
        f"differs between writers {one} and {other}{place}",
        where=title,
        requirement="REQ-CMT-014",
    )


def _absent_fields(parts: Sequence[Part], index: Index) -> dict[str, str]:
    """Return the fields that every writer declares absent, with the first writer's reason."""
    present = {tensor.field for tensor in index.tensors} | {leaf.field for leaf in index.leaves}
    if index.streams:
        present.add("rng")
    return {
        field: parts[0].absent[field]
        for field in FIELDS
        if field not in present and all(field in part.absent for part in parts)
    }


# --- one tensor -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeldBoxes:
    """The boxes of one tensor held by writers, in the order of the writers.

    Attributes:
        begin: first index of each box, of shape (n, ndim).
        box_shape: extents of each box, of shape (n, ndim).
        writer: number of each box's holder.
        replica: whether the holder declares the box a replica.
        written: whether the holder wrote the box.
        digest_begin: number of the box's first digest among its holder's digests.
        digest_count: number of the box's digests.
        digests: concatenated digests of each writer.
    """

    begin: Integers
    box_shape: Integers
    writer: Integers
    replica: NDArray[np.bool_]
    written: NDArray[np.bool_]
    digest_begin: Integers
    digest_count: Integers
    digests: Sequence[bytes]

    def take(self, rows: NDArray[np.intp]) -> HeldBoxes:
        """Return some rows in a given order."""
        columns = (field.name for field in dataclasses.fields(self) if field.name != "digests")
        return HeldBoxes(
            digests=self.digests, **{name: getattr(self, name)[rows] for name in columns}
        )

    def box(self, row: int) -> Box:
        """Return the box of a row."""
        return Box(tuple(self.begin[row].tolist()), tuple(self.box_shape[row].tolist()))

    def digests_of(self, row: int) -> bytes:
        """Return the digests of a row."""
        begin = int(self.digest_begin[row])
        count = int(self.digest_count[row])
        return self.digests[int(self.writer[row])][
            begin * DIGEST_NBYTES : (begin + count) * DIGEST_NBYTES
        ]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Gathered:
    """The boxes of all tensors held by writers, sorted by tensor, then by writer.

    Attributes:
        ndim: number of dimensions of each tensor.
        end: for each tensor, the number of the row after its last row.
        begin, box_shape: flattened columns of all boxes, in the order of the writers.
        place: for each row, offset of the row's numbers in the flattened columns.
        columns: the other columns of `HeldBoxes`.
        digests: concatenated digests of each writer.
    """

    ndim: Integers
    end: Integers
    begin: Integers
    box_shape: Integers
    place: Integers
    columns: dict[str, NDArray[Any]]
    digests: Sequence[bytes]

    def of(self, tensor: int) -> HeldBoxes:
        """Return the rows of a tensor."""
        rows = slice(int(self.end[tensor - 1]) if tensor else 0, int(self.end[tensor]))
        place = self.place[rows, None] + np.arange(self.ndim[tensor])
        own = {name: column[rows] for name, column in self.columns.items()}
        return HeldBoxes(
            begin=self.begin[place], box_shape=self.box_shape[place], digests=self.digests, **own
        )

    def merge_alone(self) -> dict[int, Sharding]:
        """Return, by tensor number, the shardings of tensors with one box, written by its holder.

        Most tensors are of this kind. Empty boxes are left out. Equal shardings are one object.
        """
        alone = np.flatnonzero(np.diff(self.end, prepend=0) == 1)
        alone = alone[self.columns["written"][self.end[alone] - 1]]
        found: dict[int, Sharding] = {}
        for rank in np.unique(self.ndim[alone]).tolist():
            tensors = alone[self.ndim[alone] == rank]
            rows = self.end[tensors] - 1
            place = self.place[rows, None] + np.arange(rank)
            begin = self.begin[place]
            box_shape = self.box_shape[place]
            writer = self.columns["writer"][rows]
            full = box_shape.all(axis=1)
            described = np.column_stack([writer, begin, box_shape])[full]
            _, first, kinds = np.unique(described, axis=0, return_index=True, return_inverse=True)
            shardings = [
                Sharding.boxes(row[None, 1 : 1 + rank], row[None, 1 + rank :], row[:1])
                for row in described[first]
            ]
            found.update(
                zip(
                    tensors[full].tolist(),
                    (shardings[kind] for kind in kinds.ravel().tolist()),
                    strict=True,
                )
            )
        return found


def merge_all_boxes(
    held: Sequence[Holdings], numbers: Sequence[Integers], tensors: TensorTable, block_nbytes: int
) -> list[Sharding]:
    """Compare all copies of each box by their digests, and return the sharding of each tensor.

    Equal shardings are one object.

    Args:
        held: holdings of each writer.
        numbers: for each writer, the tensor numbers of its table's rows.
        tensors: the united table of all writers.

    Raises: the errors of `merge_boxes`.
    """
    gathered = _gather(held, numbers, tensors.ndim)
    alone = gathered.merge_alone()
    known = {sharding: sharding for sharding in alone.values()}
    shardings = []
    for number, (key, global_shape) in enumerate(
        zip(tensors.keys, tensors.global_shapes, strict=True)
    ):
        sharding = alone.get(number)
        if sharding is None:
            merged = merge_boxes(
                gathered.of(number), global_shape, block_nbytes, where=title_of(key)
            )
            sharding = known.setdefault(merged, merged)
        shardings.append(sharding)
    return shardings


def _gather(held: Sequence[Holdings], numbers: Sequence[Integers], ndim: Integers) -> _Gathered:
    tensor = join_integers(
        [np.repeat(of, holdings.box_count) for of, holdings in zip(numbers, held, strict=True)]
    )
    # NumPy sorts 16-bit integers by radix sort, ten times as fast. The stable sort keeps the order
    # of writers.
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
            "digest_begin": join_integers(
                [np.cumsum(one.digest_count) - one.digest_count for one in held]
            )[order],
            "digest_count": join_integers([one.digest_count for one in held])[order],
        },
        digests=[one.digests for one in held],
    )


def merge_boxes(
    held: HeldBoxes, global_shape: tuple[int, ...], block_nbytes: int, *, where: str
) -> Sharding:
    """Compare all copies of each box by their digests, and return the sharding of the tensor.

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


def _sort(held: HeldBoxes, global_shape: tuple[int, ...]) -> tuple[HeldBoxes, NDArray[np.intp]]:
    """Return the rows sorted by box and writer, and the number of each distinct box's first row."""
    ndim = len(global_shape)
    # The offset of a box's first element usually sorts the boxes; the result is checked before use.
    strides = [math.prod(global_shape[dim + 1 :]) for dim in range(ndim)]
    place = (
        held.begin @ np.array(strides, np.int64)
        if 0 not in global_shape
        else np.zeros(len(held.writer), np.int64)
    )
    # The boxes of most tensors have the order of their writers.
    is_sorted = not (place[1:] < place[:-1]).any()
    found = held if is_sorted else held.take(np.argsort(place, kind="stable"))
    if rows_increase([*found.begin.T, *found.box_shape.T]):
        return found, np.arange(len(held.writer))
    columns = [*held.begin.T, *held.box_shape.T]
    found = held.take(np.lexsort(columns[::-1])) if columns else held
    new = (np.diff(found.begin, axis=0) != 0).any(axis=1) | (
        np.diff(found.box_shape, axis=0) != 0
    ).any(axis=1)
    return found, np.concatenate([np.zeros(1, np.intp), np.flatnonzero(new) + 1])


def _check_listed_once(held: HeldBoxes, first: NDArray[np.intp], where: str) -> None:
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


def _check_replicas(
    held: HeldBoxes, first: NDArray[np.intp], block_nbytes: int, where: str
) -> None:
    """Raise for the first box with different copies, or without a writer."""
    holders = np.diff(first, append=len(held.writer))
    known = np.add.reduceat((held.digest_count > 0).astype(np.int64), first)
    wrong = (
        (holders > 1)
        & ~np.logical_and.reduceat(held.replica, first)
        & (known != 0)
        & (known != holders)
    )
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


def _find_different(held: HeldBoxes, rows: range) -> tuple[int, int] | None:
    """Return the first two rows with different digests; rows without digests are ignored."""
    known = [row for row in rows if held.digest_count[row]]
    digests = held.digests_of(known[0]) if known else b""
    return next(((known[0], row) for row in known[1:] if held.digests_of(row) != digests), None)


def _describe_wrong(
    held: HeldBoxes, rows: range, block_nbytes: int, where: str, *, silent: bool
) -> CkptError:
    if silent:
        writer = next(int(held.writer[row]) for row in rows if not held.digest_count[row])
        detail = (
            f"writer {writer} gives no digest of what it holds, and not every holder says"
            " that it is a replica"
        )
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
        f"block {block} (from byte {block * block_nbytes}) of {held.box(rows[0])} differs"
        f" between writers {writers}"
    )
    return err(Code.REPLICA_DIVERGED, detail, where=where, requirement="REQ-CMT-012")


def _split(digests: bytes) -> list[bytes]:
    return [
        digests[begin : begin + DIGEST_NBYTES] for begin in range(0, len(digests), DIGEST_NBYTES)
    ]
