"""What a delta's part has beside a full one's: references, groups, and how blocks are stored that aren't raw.

Spec: REQ-DEL-001 to REQ-DEL-012.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Final

import numpy as np

from ckptfmt import limits
from ckptfmt.digest import DIGEST_NBYTES, PREFIX, digest_text
from ckptfmt.documents.manifest import Reference, check_references
from ckptfmt.documents.packed import Columns, dump_packed, dump_strings, fold, unfold
from ckptfmt.errors import Code, err
from ckptfmt.features import DELTAS, ENCODINGS, GROUP_KINDS, PLAIN

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence, Sized

    from numpy.typing import NDArray

    from ckptfmt.documents.packed import Integers

GROUP_KEYS: Final = ("kind", "rule", "reference", "member_count", "box")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Boxes of one shape whose blocks are predicted from each other's.

    Attributes:
        kind: of `GROUP_KINDS`.
        rule: how, as a tree; see ``spec/56-prediction.md``.
        reference: number of the reference whose blocks the prediction begins with; None where it needs none.
        boxes: numbers of the boxes in the part, in the order in which they are decoded.
    """

    kind: str
    rule: bytes
    reference: int | None
    boxes: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredBlocks:
    """The encoded blocks of a part, in the order of its extents: all that are neither raw nor the base's.

    Attributes:
        nbytes: how many bytes each is stored in.
        digests: 32 bytes for each: of what is stored.
    """

    nbytes: Integers
    digests: bytes

    def columns(self) -> dict[str, object]:
        """Return the table as a part has it."""
        return {"nbytes": dump_packed(self.nbytes), "digest": self.digests}


def delta_features(encodings: Sequence[str], groups: Sequence[Group], references: Sized) -> list[str]:
    """Return the reader features that a part needs. Spec: REQ-DEL-001, REQ-VER-007.

    >>> delta_features(["raw"], [], []), delta_features(["raw", "sparse"], [], [])
    ([], ['deltas', 'sparse'])
    """
    used = {name for name in encodings if name not in PLAIN} | {group.kind for group in groups}
    return sorted({DELTAS, *used}) if used or references or "same" in encodings else []


def dump_references(references: Sequence[Reference]) -> list[dict[str, object]]:
    """Return references as a part has them: digests as bytes."""
    return [{"name": one.name, "digest": bytes.fromhex(one.digest.removeprefix(PREFIX))} for one in references]


def parse_references(columns: Columns) -> tuple[Reference, ...]:
    """Return the references of a part. Raises: FormatError. Spec: REQ-DEL-002."""
    rows = columns.any("references")
    if not isinstance(rows, list) or len(rows) > limits.REFERENCES:
        raise columns.broken("references", f"not a list of at most {limits.REFERENCES}", "REQ-LIM-001")
    found = []
    for row in rows:
        if not isinstance(row, dict) or row.keys() != {"name", "digest"}:
            raise columns.broken("references", "not maps of name and digest")
        name, digest = row["name"], row["digest"]
        if not isinstance(name, str) or not isinstance(digest, bytes) or len(digest) != DIGEST_NBYTES:
            raise columns.broken("references", "a name that is no string, or a digest that isn't 32 bytes")
        found.append(Reference(name=name, digest=digest_text(digest)))
    check_references(found, columns.place("references"))
    return tuple(found)


def parse_encodings(columns: Columns) -> tuple[str, ...]:
    """Return the encodings that a part lists: of the registry, in its order. Raises: FormatError. Spec: REQ-DEL-003."""
    names = columns.texts("encodings")
    known = {name: number for number, name in enumerate(ENCODINGS)}
    numbers = [known.get(name, -1) for name in names]
    if -1 in numbers:
        raise columns.broken("encodings", f"{names[numbers.index(-1)][:64]!r} isn't an encoding", "REQ-DEL-003")
    columns.check_increasing("encodings", numbers)
    return tuple(names)


def parse_stored(table: Columns, count: int) -> StoredBlocks:
    """Return the table of `count` encoded blocks. Raises: FormatError(COLUMN_FORM). Spec: REQ-DEL-005."""
    nbytes = table.packed("nbytes", count=count, below=limits.BLOCK_NBYTES_MAX)
    digests = table.any("digest")
    if not isinstance(digests, bytes) or len(digests) != count * DIGEST_NBYTES:
        raise table.broken("digest", f"not {count} digests")
    return StoredBlocks(nbytes=nbytes, digests=digests)


def dump_groups(groups: Sequence[Group]) -> dict[str, object]:
    """Return the table of groups as a part has it."""
    boxes = np.array([box for group in groups for box in group.boxes], np.int64)
    return {
        "kind": dump_strings([group.kind for group in groups]),
        "rule": [group.rule for group in groups],
        "reference": dump_packed([0 if group.reference is None else group.reference + 1 for group in groups]),
        "member_count": dump_packed([len(group.boxes) for group in groups]),
        "box": dump_packed(fold(np.diff(boxes, prepend=0))),
    }


def parse_groups(table: Columns, *, box_nbytes: Integers, element_nbytes: Integers, references: int) -> list[Group]:
    """Return the groups of a part.

    Args:
        box_nbytes: size of each box of the part.
        element_nbytes: size of an element of each box.
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
    members = [tuple(boxes[end - count : end].tolist()) for count, end in zip(member_count, ends, strict=True)]
    table.check_increasing("box", members)
    rows = zip(kinds, rules, reference, members, strict=True)
    return [
        Group(kind=kind, rule=rule, reference=None if not number else number - 1, boxes=boxes)
        for kind, rule, number, boxes in rows
    ]


def _check_members(table: Columns, boxes: NDArray[np.int64], member_count: Sequence[int], elements: Integers) -> None:
    """Raise unless all members of each group have as many elements. Spec: REQ-DEL-009."""
    if any(count < 2 for count in member_count):
        raise table.broken("member_count", "a group of fewer than two boxes", "REQ-DEL-009")
    first = np.cumsum(member_count) - member_count
    if (elements[boxes] != np.repeat(elements[boxes[first]] if len(boxes) else first, member_count)).any():
        raise table.broken("box", "boxes of different numbers of elements in one group", "REQ-DEL-009")


def check_encodings_used(used: Collection[str], encodings: Sequence[str], where: str) -> None:
    """Raise unless a part lists exactly the encodings that occur in it. Spec: REQ-DEL-003."""
    if set(used) != set(encodings):
        raise err(
            Code.COLUMN_ORDER,
            f"lists {', '.join(encodings)}, and has {', '.join(sorted(used))}",
            where=where,
            requirement="REQ-DEL-003",
        )
