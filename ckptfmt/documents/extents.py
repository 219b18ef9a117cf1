"""Places of blocks as columns: extents, encoded blocks, references, prediction groups.

Spec: REQ-PRT-006, REQ-PRT-007, REQ-DEL-001 to REQ-DEL-012.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Sequence, Sized
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ckptfmt import limits
from ckptfmt.digest import DIGEST_NBYTES, PREFIX, digest_at, digest_text
from ckptfmt.documents.manifest import Reference, check_references
from ckptfmt.documents.packed import (
    Columns,
    Integers,
    Strings,
    dump_packed,
    dump_strings,
    fold,
    make_integers,
    spread,
    total_of,
    unfold,
)
from ckptfmt.documents.tables import TensorTable
from ckptfmt.errors import Code, err
from ckptfmt.features import DELTAS, ENCODINGS, GROUP_KINDS, NEEDS_BASE, PLAIN

GROUP_KEYS: Final = ("kind", "rule", "reference", "member_count", "box")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PredictionGroup:
    """Boxes of one shape with blocks predicted from each other's blocks.

    Attributes:
        kind: one of `GROUP_KINDS`.
        rule: the prediction's parameters as a tree; see ``spec/companions/56-prediction.md``.
        reference: number of the reference at the start of the prediction; None if the kind needs
            no base.
        boxes: numbers of the boxes in the part, in the order of decoding.
    """

    kind: str
    rule: bytes
    reference: int | None
    boxes: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredBlocks:
    """The encoded blocks of a part, in the order of its extents.

    Raw blocks, and blocks equal to the base, aren't included.

    Attributes:
        nbytes: stored size of each block in bytes.
        digests: 32 bytes for each block: the digest of the stored bytes.
    """

    nbytes: Integers
    digests: bytes

    def columns(self) -> dict[str, object]:
        """Return the table for a part."""
        return {"nbytes": dump_packed(self.nbytes), "digest": self.digests}


def delta_features(
    encodings: Sequence[str], groups: Sequence[PredictionGroup], references: Sized
) -> list[str]:
    """Return the reader features that a part needs. Spec: REQ-DEL-001, REQ-VER-007.

    >>> delta_features(["raw"], [], []), delta_features(["raw", "sparse"], [], [])
    ([], ['deltas', 'sparse'])
    """
    used = {name for name in encodings if name not in PLAIN} | {group.kind for group in groups}
    return sorted({DELTAS, *used}) if used or references or "same" in encodings else []


def dump_references(references: Sequence[Reference]) -> list[dict[str, object]]:
    """Return references in the form of a part: digests as bytes."""
    return [
        {"name": one.name, "digest": bytes.fromhex(one.digest.removeprefix(PREFIX))}
        for one in references
    ]


def parse_references(columns: Columns) -> tuple[Reference, ...]:
    """Return the references of a part. Raises: FormatError. Spec: REQ-DEL-002."""
    rows = columns.any("references")
    if not isinstance(rows, list) or len(rows) > limits.REFERENCES:
        raise columns.broken(
            "references", f"not a list of at most {limits.REFERENCES}", "REQ-LIM-001"
        )
    found = []
    for row in rows:
        if not isinstance(row, dict) or row.keys() != {"name", "digest"}:
            raise columns.broken("references", "not maps of name and digest")
        name = row["name"]
        digest = row["digest"]
        if (
            not isinstance(name, str)
            or not isinstance(digest, bytes)
            or len(digest) != DIGEST_NBYTES
        ):
            raise columns.broken(
                "references", "a name that is no string, or a digest that isn't 32 bytes"
            )
        found.append(Reference(name=name, digest=digest_text(digest)))
    check_references(found, columns.place("references"))
    return tuple(found)


def parse_encodings(columns: Columns) -> tuple[str, ...]:
    """Return the encodings that a part lists, in the order of the registry.

    Raises: FormatError. Spec: REQ-DEL-003.
    """
    names = columns.texts("encodings")
    known = {name: number for number, name in enumerate(ENCODINGS)}
    numbers = [known.get(name, -1) for name in names]
    if -1 in numbers:
        raise columns.broken(
            "encodings", f"{names[numbers.index(-1)][:64]!r} isn't an encoding", "REQ-DEL-003"
        )
    columns.check_increasing("encodings", numbers)
    return tuple(names)


def dump_groups(groups: Sequence[PredictionGroup]) -> dict[str, object]:
    """Return the table of groups for a part."""
    boxes = np.array([box for group in groups for box in group.boxes], np.int64)
    return {
        "kind": dump_strings([group.kind for group in groups]),
        "rule": [group.rule for group in groups],
        "reference": dump_packed(
            [0 if group.reference is None else group.reference + 1 for group in groups]
        ),
        "member_count": dump_packed([len(group.boxes) for group in groups]),
        "box": dump_packed(fold(np.diff(boxes, prepend=0))),
    }


def parse_groups(
    table: Columns, *, box_nbytes: Integers, element_nbytes: Integers, references: int
) -> list[PredictionGroup]:
    """Return the groups of a part.

    Args:
        box_nbytes: size of each box of the part in bytes.
        element_nbytes: size of an element of each box in bytes.
        references: number of references of the part.

    Raises: FormatError(COLUMN_FORM, COLUMN_ORDER). Spec: REQ-DEL-009, REQ-DEL-010.
    """
    kinds = table.strings("kind").tolist()
    if any(kind not in GROUP_KINDS for kind in kinds):
        raise table.broken("kind", "a kind that isn't one of groups", "REQ-DEL-009")
    rules = table.blobs("rule", count=len(kinds))
    reference = table.packed("reference", count=len(kinds), below=references + 1).tolist()
    member_count = table.packed("member_count", count=len(kinds), below=limits.BOXES).tolist()
    if sum(member_count) > len(box_nbytes):
        raise table.broken("member_count", "more members than the part has boxes", "REQ-DEL-009")
    steps = table.packed("box", count=sum(member_count), below=2 * limits.BOXES)
    boxes = np.cumsum(unfold(steps))
    if len(boxes) and not 0 <= int(boxes.min()) <= int(boxes.max()) < len(box_nbytes):
        raise table.broken("box", "a box that the part doesn't have")
    if len(np.unique(boxes)) != len(boxes):
        raise table.broken("box", "a box that is in two groups, or twice in one", "REQ-DEL-009")
    _check_members(table, boxes, member_count, box_nbytes // element_nbytes)
    ends = np.cumsum(member_count).tolist()
    members = [
        tuple(boxes[end - count : end].tolist())
        for count, end in zip(member_count, ends, strict=True)
    ]
    table.check_increasing("box", members)
    rows = zip(kinds, rules, reference, members, strict=True)
    return [
        PredictionGroup(
            kind=kind, rule=rule, reference=None if not number else number - 1, boxes=boxes
        )
        for kind, rule, number, boxes in rows
    ]


def _check_members(
    table: Columns, boxes: NDArray[np.int64], member_count: Sequence[int], elements: Integers
) -> None:
    """Raise unless all members of a group have the same number of elements. Spec: REQ-DEL-009."""
    if any(count < 2 for count in member_count):
        raise table.broken("member_count", "a group of fewer than two boxes", "REQ-DEL-009")
    first = np.cumsum(member_count) - member_count
    if (
        elements[boxes] != np.repeat(elements[boxes[first]] if len(boxes) else first, member_count)
    ).any():
        raise table.broken(
            "box", "boxes of different numbers of elements in one group", "REQ-DEL-009"
        )


def check_encodings_used(used: Collection[str], encodings: Sequence[str], where: str) -> None:
    """Raise unless a part lists exactly the encodings of its extents. Spec: REQ-DEL-003."""
    if set(used) != set(encodings):
        raise err(
            Code.COLUMN_ORDER,
            f"lists {', '.join(encodings)}, and has {', '.join(sorted(used))}",
            where=where,
            requirement="REQ-DEL-003",
        )


# --- extents --------------------------------------------------------------------------------------

_EXTENT_KEYS: Final = ("box", "block_begin", "block_count", "file", "gap_nbytes", "encoding", "key")
_DELTA_KEYS: Final = (*_EXTENT_KEYS, "reference", "predicted")
#: The number of the encoding ``raw``: blocks stored unchanged.
RAW: Final = ENCODINGS.index("raw")
#: The number of the encoding ``same``: blocks equal to the base's blocks.
SAME: Final = ENCODINGS.index("same")
_GRADIENT = ENCODINGS.index("gradient")
#: For each encoding, whether the blocks are neither raw nor equal to the base, and whether the
#: blocks need a base.
_IS_ENCODED: Final = np.array([name not in PLAIN for name in ENCODINGS], np.bool_)
_NEEDS_BASE: Final = np.array([name in NEEDS_BASE for name in ENCODINGS], np.bool_)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Extent:
    """The place of a run of a box's blocks: a row of `Extents` as an object.

    Attributes:
        block_begin: first block.
        block_count: number of blocks.
        file: number of the file in the part; None for blocks equal to the base.
        byte_begin: first byte, from the start of the file.
        encoding: one of `ckptfmt.features.ENCODINGS`.
        reference: number of the reference with the base; None without a base, or if a group defines
            the base.
        predicted: whether the group's prediction replaces the base's content.
    """

    block_begin: int
    block_count: int
    file: int | None
    byte_begin: int
    encoding: str
    reference: int | None
    predicted: bool
    _extents: Extents
    _row: int

    @property
    def key(self) -> str:
        """The key of the box in the file's header; an empty string stands for the tensor's name."""
        return self._extents.key[self._row]

    @property
    def is_encoded(self) -> bool:
        """Whether the blocks are neither raw nor equal to the base."""
        return self.encoding not in PLAIN

    def stored_begin(self, block: int) -> int:
        """Return the offset of an encoded block in the file, in bytes."""
        ends = self._extents.stored_ends
        first = self._extents.stored_row[self._row]
        return self.byte_begin + int(ends[first + block - self.block_begin] - ends[first])

    def stored_nbytes(self, block: int) -> int:
        """Return the stored size of an encoded block in bytes."""
        return int(
            self._extents.stored.nbytes[
                self._extents.stored_row[self._row] + block - self.block_begin
            ]
        )

    def stored_digest(self, block: int) -> bytes:
        """Return the digest of an encoded block's stored bytes."""
        row = int(self._extents.stored_row[self._row]) + block - self.block_begin
        return digest_at(self._extents.stored.digests, row)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Extents:
    """The columns of extents, sorted by box and block.

    Attributes:
        file: number of the file; -1 for blocks equal to the base.
        key: the box's key in the file's header; an empty string stands for the tensor's name.
        encoding: number in `ENCODINGS`.
        reference: number of the reference, plus 1; 0 for none.
        stored_row: for encoded blocks, the first block's row in `stored`.
        stored: the encoded blocks.
    """

    box: Integers
    block_begin: Integers
    block_count: Integers
    file: Integers
    byte_begin: Integers
    key: Strings
    encoding: Integers
    reference: Integers
    predicted: NDArray[np.bool_]
    stored_row: Integers
    stored: StoredBlocks

    @classmethod
    def of_raw(
        cls,
        *,
        box: Integers,
        block_count: Integers,
        file: Integers,
        byte_begin: Integers,
        key: Strings,
    ) -> Extents:
        """Return the extents of boxes that are stored unchanged, each in one extent."""
        none = np.zeros(len(box), np.int64)
        return cls(
            box=box,
            block_begin=none,
            block_count=block_count,
            file=file,
            byte_begin=byte_begin,
            key=key,
            encoding=np.full(len(box), RAW),
            reference=none,
            predicted=none > 0,
            stored_row=none,
            stored=StoredBlocks(nbytes=none[:0], digests=b""),
        )

    def row(self, row: int) -> Extent:
        """Return one row."""
        file = int(self.file[row])
        reference = int(self.reference[row])
        return Extent(
            block_begin=int(self.block_begin[row]),
            block_count=int(self.block_count[row]),
            file=file if file >= 0 else None,
            byte_begin=int(self.byte_begin[row]),
            encoding=ENCODINGS[self.encoding[row]],
            reference=reference - 1 if reference else None,
            predicted=bool(self.predicted[row]),
            _extents=self,
            _row=row,
        )

    def of_box(self, box: int) -> tuple[Extent, ...]:
        """Return the rows of one box."""
        bounds = self._first[box : box + 2].tolist()
        return tuple(map(self.row, range(*bounds))) if len(bounds) == 2 else ()

    @functools.cached_property
    def _first(self) -> NDArray[np.intp]:
        """The number of each box's first extent, then the number of extents.

        The entries end with the last box that has extents.
        """
        return np.searchsorted(self.box, np.arange(int(self.box.max(initial=-1)) + 2))

    @functools.cached_property
    def stored_ends(self) -> Integers:
        """A 0, then the running sum of the encoded blocks' stored sizes."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.stored.nbytes)])

    @property
    def is_encoded(self) -> NDArray[np.bool_]:
        """For each row, whether the blocks are neither raw nor equal to the base."""
        encoded: NDArray[np.bool_] = _IS_ENCODED[self.encoding]
        return encoded

    def order(self) -> NDArray[np.intp] | None:
        """Return the order that sorts the rows by box and block; None if they are sorted."""
        return None if (np.diff(self.box) > 0).all() else np.lexsort((self.block_begin, self.box))

    def take(self, order: NDArray[np.intp] | None) -> Extents:
        """Return the rows in a given order."""
        if order is None:
            return self
        names = (
            name.name for name in dataclasses.fields(self) if name.name not in {"key", "stored"}
        )
        columns = {name: getattr(self, name)[order] for name in names}
        return Extents(key=self.key.take(order), stored=self.stored, **columns)

    def stored_in(self, order: NDArray[np.intp]) -> StoredBlocks:
        """Return the encoded blocks for a given order of the extents."""
        encoded = order[self.is_encoded[order]]
        rows = spread(self.stored_row[encoded], self.block_count[encoded])
        digests = np.frombuffer(self.stored.digests, np.uint8).reshape(-1, DIGEST_NBYTES)
        return StoredBlocks(nbytes=self.stored.nbytes[rows], digests=digests[rows].tobytes())

    def stored_nbytes(self, box_nbytes: Integers, block_nbytes: int) -> Integers:
        """Return the stored size of each extent in bytes."""
        first = self.block_begin * block_nbytes
        content = np.minimum(box_nbytes[self.box], first + self.block_count * block_nbytes) - first
        found: Integers = np.where(self.encoding == RAW, content, 0)
        is_encoded = self.is_encoded
        if is_encoded.any():
            ends = self.stored_ends
            first = self.stored_row[is_encoded]
            found[is_encoded] = ends[first + self.block_count[is_encoded]] - ends[first]
        return found


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Files:
    """Properties of a part's files that the checks of extents use.

    Attributes:
        nbytes: size of each file in bytes.
        header_nbytes: size of each file's header in bytes.
        is_pack: for each file, whether it is a pack.
        table: the part's table of files, for messages.
    """

    nbytes: Integers
    header_nbytes: Integers
    is_pack: NDArray[np.bool_]
    table: Columns


def parse_extents(
    columns: Columns,
    tensors: TensorTable,
    owner: Integers,
    files: Files,
    *,
    encodings: Sequence[str],
    reference_count: int | None,
) -> Extents:
    """Return the extents in the order of their bytes.

    `byte_begin` still holds the gap to the previous extent; see `place_extents`.

    Args:
        owner: for each box of the part, the number of its tensor.
    """
    is_delta = reference_count is not None
    references = reference_count or 0
    table = columns.columns("extents", _DELTA_KEYS if is_delta else _EXTENT_KEYS)
    key = table.strings("key", limit_nbytes=limits.KEY_NBYTES)
    count = len(key)
    box = np.cumsum(unfold(table.packed("box", count=count, below=2 * limits.BOXES)) + 1) - 1
    if count and not 0 <= int(box.min()) <= int(box.max()) < len(owner):
        raise table.broken("box", f"an extent of a box that isn't one of the {len(owner)}")
    encoding = make_integers(map(ENCODINGS.index, encodings))[
        table.packed("encoding", count=count, below=len(encodings))
    ]
    block_count = table.packed("block_count", count=count)
    blocks = count_stored(encoding, block_count)
    none = np.zeros(count, np.int64)
    found = Extents(
        box=box,
        block_begin=table.packed("block_begin", count=count),
        block_count=block_count,
        file=table.packed("file", count=count, below=len(files.nbytes) + is_delta),
        byte_begin=table.packed("gap_nbytes", count=count),
        key=key,
        encoding=encoding,
        reference=table.packed("reference", count=count, below=references + 1)
        if is_delta
        else none,
        predicted=(table.packed("predicted", count=count, below=2) if is_delta else none) > 0,
        stored_row=np.cumsum(blocks) - blocks,
        stored=_parse_stored(columns, total_of(blocks))
        if is_delta
        else StoredBlocks(nbytes=none[:0], digests=b""),
    )
    if (np.diff(found.file) < 0).any():
        raise table.unsorted("file")
    for row in key.rows_with_text():
        if key[row] == tensors.keys[owner[box[row]]][1]:
            raise table.broken(
                "key",
                f"{key[row][:64]!r} stands there, and not the empty string for it",
                "REQ-PRT-012",
            )
    if is_delta:
        _check_encoded(found, files, encodings, table)
    return found


def _parse_stored(columns: Columns, count: int) -> StoredBlocks:
    """Return the table of `count` encoded blocks.

    Raises: FormatError(COLUMN_FORM). Spec: REQ-DEL-005.
    """
    table = columns.columns("stored", ("nbytes", "digest"))
    nbytes = table.packed("nbytes", count=count, below=limits.BLOCK_NBYTES_MAX)
    return StoredBlocks(nbytes=nbytes, digests=table.digests("digest", count=count))


def count_stored(encoding: Integers, block_count: Integers) -> Integers:
    """Return the number of encoded blocks of each extent: its rows in the stored blocks."""
    found: Integers = np.where(_IS_ENCODED[encoding], block_count, 0)
    return found


def _check_encoded(found: Extents, files: Files, encodings: Sequence[str], table: Columns) -> None:
    """Raise unless each extent has a place and a base that fit its encoding.

    Spec: REQ-DEL-003, REQ-DEL-004, REQ-DEL-006.
    """
    used = [ENCODINGS[number] for number in np.unique(found.encoding)] or ["raw"]
    check_encodings_used(used, encodings, table.place("encoding"))
    is_pack = np.append(files.is_pack, False)[found.file]
    is_stored = found.file < len(files.nbytes)
    if ((found.encoding == SAME) == is_stored).any() or (found.is_encoded & ~is_pack).any():
        raise table.broken(
            "file", "a block is stored where its encoding doesn't allow it", "REQ-DEL-004"
        )
    needs_base = _NEEDS_BASE[found.encoding]
    if (found.predicted & (~needs_base | (found.encoding == SAME))).any():
        raise table.broken(
            "predicted", "a predicted block has an encoding without a base", "REQ-DEL-006"
        )
    if ((found.encoding == _GRADIENT) & ~found.predicted).any():
        raise table.broken("predicted", "a gradient that isn't predicted", "REQ-DEL-006")
    if ((needs_base & ~found.predicted) != (found.reference > 0)).any():
        raise table.broken(
            "reference",
            "a block has a base that it doesn't need, or none that it needs",
            "REQ-DEL-006",
        )


def check_smaller(rows: Extents, box_nbytes: Integers, block_nbytes: int, columns: Columns) -> None:
    """Raise unless each encoded block's stored size is smaller than its content.

    Spec: REQ-DEL-005.
    """
    encoded = np.flatnonzero(rows.is_encoded)
    if not len(encoded):
        return
    blocks = rows.block_count[encoded]
    number = spread(rows.block_begin[encoded], blocks)
    nbytes = np.minimum(
        np.repeat(box_nbytes[rows.box[encoded]], blocks) - number * block_nbytes, block_nbytes
    )
    if (rows.stored.nbytes >= nbytes).any():
        detail = (
            "an encoded block of"
            f" {rows.stored.nbytes[(rows.stored.nbytes >= nbytes).argmax()]} bytes"
        )
        raise columns.broken(
            "stored", f"{detail}, which isn't fewer than its content has", "REQ-DEL-005"
        )


def place_extents(rows: Extents, nbytes: Integers, files: Files) -> Integers:
    """Return the first byte of each extent in its file.

    Raise unless header and extents tile each file exactly.

    Raises: FormatError(FILE_COVERAGE, COLUMN_ORDER). Spec: REQ-PRT-007.
    """
    gap = rows.byte_begin > 0
    ends = np.cumsum(nbytes)
    last = np.searchsorted(rows.file, np.arange(len(files.nbytes)), "right")
    stored = np.diff(np.append(0, ends)[last], prepend=0)
    wrong = np.flatnonzero(files.header_nbytes + stored != files.nbytes)
    if gap.any() or len(wrong):
        number = int(rows.file[gap.argmax()] if gap.any() else wrong[0])
        file = "no file" if number == len(files.nbytes) else files.table.strings("name")[number]
        raise err(
            Code.FILE_COVERAGE,
            f"header and extents don't tile {file} exactly",
            where=files.table.place("nbytes"),
            requirement="REQ-PRT-007",
        )
    # For each file, its header's size minus the stored bytes of earlier files.
    before = files.header_nbytes - (np.cumsum(stored) - stored)
    begins: Integers = np.where(
        rows.file < len(files.nbytes), ends - nbytes + np.append(before, 0)[rows.file], 0
    )
    empty = nbytes == 0
    boxes = np.diff(rows.box)
    blocks = np.diff(rows.block_begin)
    unsorted = (boxes < 0) | ((boxes == 0) & (blocks <= 0))
    if (empty[1:] & empty[:-1] & (np.diff(rows.file) == 0) & unsorted).any():
        raise files.table.unsorted(
            "nbytes", "extents without bytes aren't sorted by their boxes", "REQ-IDX-003"
        )
    rows.file[rows.file == len(files.nbytes)] = -1
    return begins
