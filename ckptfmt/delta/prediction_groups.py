"""Which pieces of an image are predicted from each other in a delta, and by what rule.

Names and options say what may belong together; a sample of the base's and the new elements says whether it does. One
rule holds for all parameters of a group of the optimizer, so that it is looked for once for each of these.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import numpy as np

from ckptfmt.box import Box
from ckptfmt.codecs.prediction import Members, find_members
from ckptfmt.codecs.rule import Rule, roles
from ckptfmt.codecs.rule_search import find_rule
from ckptfmt.delta.base import BaseContents
from ckptfmt.documents.part import Leaf
from ckptfmt.documents.tables import TensorKey
from ckptfmt.documents.tree import parse_tree
from ckptfmt.dtypes import DTYPES
from ckptfmt.features import NEEDS_BASE
from ckptfmt.write.slot_contents import Snapped

#: Where leaves may say that tensors belong together.
_FIELDS: Final = frozenset({"weights", "optimizer", "data"})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlannedGroup:
    """Pieces that are predicted from each other.

    Attributes:
        rule: how.
        pieces: numbers of the pieces in the image, in the order in which they are decoded.
    """

    rule: Rule
    pieces: tuple[int, ...]

    @property
    def roles(self) -> tuple[str, ...]:
        """What each piece is."""
        return roles(self.rule)

    @property
    def needs_base(self) -> bool:
        """Whether predicting begins with the base's blocks."""
        return self.rule.kind != "cast"

    def is_predicted(self, role: str, encoding: str) -> bool:
        """Return whether the block of a role, encoded so, is decoded against what the group predicts."""
        return encoding in NEEDS_BASE and role != "master"


def find_groups(snapped: Snapped, base_leaves: Sequence[Leaf], contents: BaseContents) -> tuple[PlannedGroup, ...]:
    """Return the groups of a snapshot against its base; each piece is in one at most.

    Args:
        base_leaves: the leaves of the base.
        contents: of the base's blocks.

    Raises: what reading the base's files and waiting for the slot raise.
    """
    return _Finder(snapped, base_leaves, contents).find()


def dump_rules(groups: Iterable[PlannedGroup]) -> dict[int, bytes]:
    """Return the bytes of each rule, of which many groups share a few, by its id: equal ones may differ in a zero."""
    rules = {id(group.rule): group.rule for group in groups}
    return {number: rule.dump() for number, rule in rules.items()}


class _Finder:
    def __init__(self, snapped: Snapped, base_leaves: Sequence[Leaf], contents: BaseContents) -> None:
        self._snapped = snapped
        self._leaves = snapped.context.leaves, base_leaves
        self._contents = contents
        self._image = snapped.image
        self._dtypes = self._image.holdings.table.dtypes_by_key()
        self._pieces: dict[TensorKey, dict[Box, int]] = {}
        for number, piece in enumerate(self._image.pieces):
            if piece.shard is not None and piece.end > piece.begin:
                self._pieces.setdefault(piece.key, {})[piece.box] = number
        self._hints: dict[str, Rule] = {}

    def find(self) -> tuple[PlannedGroup, ...]:
        """Return the groups."""
        members, base_members = self._find_members()
        before = {_names_of(one): one.options for one in base_members}
        found: list[PlannedGroup] = []
        for alike in self._sort_by_rule(members):
            rows = [row for one in alike for row in self._rows_of(one)]
            rule = self._find_rule(alike[0], before.get(_names_of(alike[0]), {}), rows) if rows else None
            if rule is not None:
                self._hints[rule.kind] = rule
                found += [PlannedGroup(rule=rule, pieces=row[: len(roles(rule))]) for row in rows]
        return tuple(found)

    def _find_members(self) -> tuple[Sequence[Members], Sequence[Members]]:
        """Return what may belong together in the snapshot, and in its base."""
        table = self._image.holdings.table
        shapes = dict(zip(table.keys, table.global_shapes, strict=True))
        tensors = {key: (self._dtypes[key], shapes[key]) for key in self._pieces}
        parse = functools.cache(parse_tree)  # most leaves are in both as they were
        new, base = (_values_of(leaves, parse) for leaves in self._leaves)
        return find_members(tensors, new), find_members(tensors, base)

    def _sort_by_rule(self, members: Iterable[Members]) -> list[list[Members]]:
        """Return members by what a rule depends on: kind, roles, options and number of steps."""
        found: dict[object, list[Members]] = {}
        said: dict[int, str] = {}  # all parameters of a group of the optimizer have the same options
        for one in members:
            if id(one.options) not in said:
                said[id(one.options)] = repr(sorted(one.options.items(), key=str))
            alike = (one.kind, _roles_of(one), said[id(one.options)], self._steps_of(one))
            found.setdefault(alike, []).append(one)
        return list(found.values())

    def _rows_of(self, members: Members) -> list[tuple[int, ...]]:
        """Return the pieces of boxes that this writer has of all members, a row for each box, in the order of roles."""
        keys = [members.tensors[role] for role in _roles_of(members)]
        boxes = [box for box in self._pieces[keys[0]] if all(box in self._pieces.get(key, {}) for key in keys)]
        return [tuple(self._pieces[key][box] for key in keys) for box in boxes]

    def _steps_of(self, members: Members) -> tuple[float, float] | None:
        """Return how many steps a parameter had behind it in the base, and has now; None where nothing says so."""
        if not isinstance(members.step, tuple):
            return None if members.step is None else (members.step - 1, members.step)
        number = next(iter(self._pieces.get(members.step, {}).values()), None)
        if number is None or self._dtypes[members.step] not in ("float32", "float64", "int64", "int32"):
            return None
        pair = self._sample(number, range(1))
        base, new = (float(np.frombuffer(content, self._dtypes[members.step])[0]) for content in pair)
        return base, new

    def _find_rule(
        self, members: Members, base_options: Mapping[str, object], rows: Sequence[tuple[int, ...]]
    ) -> Rule | None:
        """Return the rule that a sample of the largest box shows."""
        row = max(rows, key=lambda row: self._image.pieces[row[0]].end - self._image.pieces[row[0]].begin)
        piece = self._image.pieces[row[0]]
        per_block = self._image.block_nbytes // max(map(self._width, row))
        count = (piece.end - piece.begin) // self._width(row[0])
        first = count // per_block // 2 * per_block
        elements = range(first, min(count, first + per_block))
        samples = {role: self._sample(number, elements) for role, number in zip(_roles_of(members), row, strict=True)}
        options, before = dict(members.options), dict(base_options or members.options)
        steps = self._steps_of(members)
        if steps is not None:
            before["step"], options["step"] = steps
        hint = self._hints.get(members.kind)
        return find_rule(members.kind, options, samples, base_options=before, hint=hint)

    def _sample(self, number: int, elements: range) -> tuple[memoryview, memoryview]:
        """Return some elements of a piece: the base's, and the new ones."""
        piece, width = self._image.pieces[number], self._width(number)
        self._snapped.progress.wait(piece.begin + elements.stop * width)
        new = self._snapped.view[piece.begin + elements.start * width : piece.begin + elements.stop * width]
        return self._contents.elements(number, elements, width), new

    def _width(self, number: int) -> int:
        return DTYPES[self._dtypes[self._image.pieces[number].key]].nbytes


def _values_of(leaves: Iterable[Leaf], parse: Callable[..., object]) -> dict[TensorKey, object]:
    return {
        (leaf.field, leaf.name, leaf.scope): parse(leaf.value, where=leaf.name)
        for leaf in leaves
        if leaf.field in _FIELDS
    }


def _names_of(members: Members) -> frozenset[TensorKey]:
    return frozenset(members.tensors.values())


def _roles_of(members: Members) -> tuple[str, ...]:
    """Return all roles that a rule of these members may have, in the order of decoding."""
    order = ("master", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "weight")
    return tuple(sorted(members.tensors, key=lambda role: order.index(role) if role in order else len(order)))
