"""The coding of a delta's blocks: a reference to the base, or the encoding with the fewest bytes.

Encodings are compared by their measured sizes. Encoded bytes are decoded and compared with the
content before they are used.

Pieces of related tensors form groups, in which one piece is predicted from another: an optimizer's
moments and the weight, or a weight and its rounded copy. Names and optimizer options suggest a
group. A sample of old and new elements then shows by which rule the prediction works, if by any.
All parameters of one optimizer group share a rule, so that the search runs once per such group.

Spec: REQ-DEL-008, REQ-PRE-012.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from ckptfmt.box import Box
from ckptfmt.codecs import encodings, prediction
from ckptfmt.codecs.lanes import LANES
from ckptfmt.codecs.prediction import Members, find_members
from ckptfmt.codecs.rule import Rule, roles
from ckptfmt.codecs.rule_search import find_rule
from ckptfmt.delta.base import BaseContents
from ckptfmt.digest import DIGEST_NBYTES, digest_bytes
from ckptfmt.documents.extents import RAW, SAME
from ckptfmt.documents.part import Leaf
from ckptfmt.documents.tables import TensorKey, key_of
from ckptfmt.documents.tree import parse_tree
from ckptfmt.dtypes import DTYPES
from ckptfmt.features import ENCODINGS, NEEDS_BASE
from ckptfmt.write.image import Image
from ckptfmt.write.slot_contents import Snapped

#: Fields with leaves that may show which tensors are related.
_FIELDS: Final = frozenset({"weights", "optimizer", "data"})


class DeltaSides:
    """The elements of a snapshot in a slot, and of its base, addressed by the numbers of pieces.

    Args:
        image: image of the snapshot and of the base.
        view: memory of the snapshot's slot.
        contents: contents of the base's blocks.
    """

    def __init__(self, image: Image, view: memoryview, contents: BaseContents) -> None:
        self.image = image
        self.contents = contents
        self._view = view
        self._dtypes = image.holdings.table.dtypes_by_key()

    def dtype(self, number: int) -> str:
        """Return the dtype of a piece."""
        return self._dtypes[self.image.pieces[number].key]

    def width(self, number: int) -> int:
        """Return the size of an element of a piece in bytes."""
        return DTYPES[self.dtype(number)].nbytes

    def elements_of(self, number: int, block: int) -> range:
        """Return the range of a piece's elements that a block holds."""
        piece = self.image.pieces[number]
        width = self.width(number)
        per_block = self.image.block_nbytes // width
        return range(
            block * per_block, min((block + 1) * per_block, (piece.end - piece.begin) // width)
        )

    def end_of(self, number: int, elements: range) -> int:
        """Return how many bytes of the slot must be filled before elements of a piece are there."""
        return self.image.pieces[number].begin + elements.stop * self.width(number)

    def new(self, number: int, elements: range) -> memoryview:
        """Return a range of elements of a piece of the snapshot."""
        begin = self.image.pieces[number].begin + elements.start * self.width(number)
        return self._view[begin : self.end_of(number, elements)]

    def base(self, number: int, elements: range) -> memoryview:
        """Return a range of elements of a piece of the base."""
        return self.contents.elements(number, elements, self.width(number))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlannedGroup:
    """Pieces that are predicted from each other.

    Attributes:
        rule: rule of the prediction.
        pieces: numbers of the pieces in the image, in decoding order.
    """

    rule: Rule
    pieces: tuple[int, ...]

    @property
    def roles(self) -> tuple[str, ...]:
        """The role of each piece."""
        return roles(self.rule)

    @property
    def needs_base(self) -> bool:
        """Whether a prediction starts from the base's blocks."""
        return self.rule.kind != "cast"

    def is_predicted(self, role: str, encoding: str) -> bool:
        """Return whether a block of this role and encoding is decoded against the prediction."""
        return encoding in NEEDS_BASE and role != "master"


def find_groups(
    snapped: Snapped, base_leaves: Sequence[Leaf], contents: BaseContents
) -> tuple[PlannedGroup, ...]:
    """Return the groups of a snapshot and its base; groups don't overlap.

    Args:
        base_leaves: leaves of the base's part.
        contents: contents of the base's blocks.

    Raises: errors of reading the base's files and of waiting for the slot.
    """
    return _Finder(snapped, base_leaves, contents).find()


def dump_rules(groups: Iterable[PlannedGroup]) -> dict[int, bytes]:
    """Return the bytes of each distinct rule object, by the object's `id`.

    Many groups share a few rule objects. The key isn't the rule: equal rules may differ in the sign
    of a zero, and then have different bytes.
    """
    rules = {id(group.rule): group.rule for group in groups}
    return {number: rule.dump() for number, rule in rules.items()}


class _Finder:
    def __init__(
        self, snapped: Snapped, base_leaves: Sequence[Leaf], contents: BaseContents
    ) -> None:
        self._snapped = snapped
        self._leaves = snapped.context.leaves, base_leaves
        self._image = snapped.image
        self._sides = DeltaSides(snapped.image, snapped.view, contents)
        self._pieces: dict[TensorKey, dict[Box, int]] = {}
        for number, piece in enumerate(self._image.pieces):
            if piece.shard is not None and piece.end > piece.begin:
                self._pieces.setdefault(piece.key, {})[piece.box] = number
        self._hints: dict[str, Rule] = {}

    def find(self) -> tuple[PlannedGroup, ...]:
        """Return the groups, each with a rule that a sample has confirmed."""
        members, base_members = self._find_members()
        before = {_names_of(one): one.options for one in base_members}
        found: list[PlannedGroup] = []
        for alike in self._sort_by_rule(members):
            rows = [row for one in alike for row in self._rows_of(one)]
            rule = (
                self._find_rule(alike[0], before.get(_names_of(alike[0]), {}), rows)
                if rows
                else None
            )
            if rule is not None:
                self._hints[rule.kind] = rule
                found += [PlannedGroup(rule=rule, pieces=row[: len(roles(rule))]) for row in rows]
        return tuple(found)

    def _find_members(self) -> tuple[Sequence[Members], Sequence[Members]]:
        """Return the candidates for groups, in the snapshot and in its base."""
        table = self._image.holdings.table
        shapes = dict(zip(table.keys, table.global_shapes, strict=True))
        dtypes = table.dtypes_by_key()
        tensors = {key: (dtypes[key], shapes[key]) for key in self._pieces}
        parse = functools.cache(parse_tree)  # most leaves are equal in both, and are parsed once
        new, base = (_values_of(leaves, parse) for leaves in self._leaves)
        return find_members(tensors, new), find_members(tensors, base)

    def _sort_by_rule(self, members: Iterable[Members]) -> list[list[Members]]:
        """Group candidates by the facts that determine a rule: kind, roles, options and steps."""
        found: dict[object, list[Members]] = {}
        said: dict[int, str] = {}  # by id: all parameters of an optimizer group share one dict
        for one in members:
            if id(one.options) not in said:
                said[id(one.options)] = repr(sorted(one.options.items(), key=str))
            alike = (one.kind, _roles_of(one), said[id(one.options)], self._steps_of(one))
            found.setdefault(alike, []).append(one)
        return list(found.values())

    def _rows_of(self, members: Members) -> list[tuple[int, ...]]:
        """Return a row of pieces for each box that this writer has of all members.

        The pieces of a row are in the order of roles.
        """
        keys = [members.tensors[role] for role in _roles_of(members)]
        boxes = [
            box
            for box in self._pieces[keys[0]]
            if all(box in self._pieces.get(key, {}) for key in keys)
        ]
        return [tuple(self._pieces[key][box] for key in keys) for box in boxes]

    def _steps_of(self, members: Members) -> tuple[float, float] | None:
        """Return the parameter's step counts in the base and in the snapshot; None if unknown."""
        if not isinstance(members.step, tuple):
            return None if members.step is None else (members.step - 1, members.step)
        number = next(iter(self._pieces.get(members.step, {}).values()), None)
        if number is None or (dtype := self._sides.dtype(number)) not in (
            "float32",
            "float64",
            "int64",
            "int32",
        ):
            return None
        pair = self._sample(number, range(1))
        base, new = (float(np.frombuffer(content, dtype)[0]) for content in pair)
        return base, new

    def _find_rule(
        self, members: Members, base_options: Mapping[str, object], rows: Sequence[tuple[int, ...]]
    ) -> Rule | None:
        """Return the rule that a sample of the largest box confirms, or None."""
        row = max(
            rows, key=lambda row: self._image.pieces[row[0]].end - self._image.pieces[row[0]].begin
        )
        piece = self._image.pieces[row[0]]
        per_block = self._image.block_nbytes // max(map(self._sides.width, row))
        count = (piece.end - piece.begin) // self._sides.width(row[0])
        first = count // per_block // 2 * per_block
        elements = range(first, min(count, first + per_block))
        samples = {
            role: self._sample(number, elements)
            for role, number in zip(_roles_of(members), row, strict=True)
        }
        options = dict(members.options)
        before = dict(base_options or members.options)
        steps = self._steps_of(members)
        if steps is not None:
            before["step"], options["step"] = steps
        hint = self._hints.get(members.kind)
        return find_rule(members.kind, options, samples, base_options=before, hint=hint)

    def _sample(self, number: int, elements: range) -> tuple[memoryview, memoryview]:
        """Return elements of a piece as a pair: the base's, then the snapshot's."""
        self._snapped.progress.wait(self._sides.end_of(number, elements))
        return self._sides.base(number, elements), self._sides.new(number, elements)


def _values_of(leaves: Iterable[Leaf], parse: Callable[..., object]) -> dict[TensorKey, object]:
    return {
        key_of(leaf): parse(leaf.value, where=leaf.name) for leaf in leaves if leaf.field in _FIELDS
    }


def _names_of(members: Members) -> frozenset[TensorKey]:
    return frozenset(members.tensors.values())


def _roles_of(members: Members) -> tuple[str, ...]:
    """Return all roles that a rule of these members may have, in decoding order."""
    order = ("master", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "weight")
    return tuple(
        sorted(members.tensors, key=lambda role: order.index(role) if role in order else len(order))
    )


#: Smallest block that is encoded, in bytes: below, the digest of the stored bytes costs the gain.
LEAST_NBYTES: Final = 64
#: Below this size in bytes only `sparse` is tried: the rest takes more time than the gain is worth.
SMALL_NBYTES: Final = 2048
_FOR_SMALL: Final = ("raw", "sparse")
#: Largest share of changed lanes at which a small block is encoded. Biases and gains of norms are
#: a quarter of a per cent of a state, and without this limit took a quarter of the encoding time.
_MOST_CHANGED: Final = 0.5

#: Encodings are compared anew where a block's ratio of stored to content bytes exceeds this factor
#: times the ratio at the last comparison.
_ALIKE: Final = 1.1


#: The columns of verdicts, in the messages of coder processes and in the memory of a delta.
VERDICT: Final = np.dtype(
    [
        ("encoding", np.uint8),
        ("predicted", np.bool_),
        ("nbytes", np.int64),
        ("digest", f"V{DIGEST_NBYTES}"),
        ("stored_digest", f"V{DIGEST_NBYTES}"),
        ("decode_s", np.float64),
    ]
)
#: Value of the column `encoding` for a block without a verdict.
UNDECIDED: Final = 255


class Verdict(NamedTuple):
    """The decision how a block is stored: a row of `VERDICT`.

    Attributes:
        encoding: number of the encoding in `ENCODINGS`.
        predicted: whether decoding starts from the group's prediction instead of the base's block.
        nbytes: size of the stored bytes.
        digest: digest of the block's content.
        stored_digest: digest of the encoded bytes; zeros for a raw or unchanged block.
        decode_s: decoding time in seconds.
    """

    encoding: int
    predicted: bool
    nbytes: int
    digest: bytes
    stored_digest: bytes = bytes(DIGEST_NBYTES)
    decode_s: float = 0.0


class _Encoded(NamedTuple):
    """The encoded bytes of a changed block, and the time that decoding them takes, in seconds."""

    encoding: str
    stored: bytes
    decode_s: float
    predicted: bool = False


class BlockCoder:
    """Encodes blocks of a snapshot against the base's blocks; thread-safe.

    Args:
        image: image of the snapshot and of the base.
        view: memory of the snapshot's slot.
        contents: contents of the base's blocks.
        groups: groups of pieces that are predicted from each other.
        fields: fields in which changed blocks are encoded; elsewhere they are stored raw.
        among: candidate encodings.
    """

    def __init__(
        self,
        image: Image,
        view: memoryview,
        *,
        contents: BaseContents,
        groups: Sequence[PlannedGroup],
        fields: Collection[str],
        among: Sequence[str],
    ) -> None:
        self._image = image
        self._sides = DeltaSides(image, view, contents)
        self._fields = fields
        self._groups = {number: group for group in groups for number in group.pieces}
        self._among = among
        #: By piece or role: the last chosen encoding, and its ratio of stored to content bytes.
        self._chosen: dict[int | str, tuple[str, float]] = {}

    def end_of(self, number: int, block: int) -> int:
        """Return how many bytes of the slot must be filled before a block can be coded."""
        group = self._groups.get(number)
        if group is None:
            return self._image.span(number, block)[1]
        elements = self._sides.elements_of(number, block)
        members = group.pieces[: group.pieces.index(number) + 1]
        return max(self._sides.end_of(member, elements) for member in members)

    def code(
        self, number: int, block: int, *, digest: bytes | None = None
    ) -> tuple[Verdict, bytes]:
        """Return the verdict on a block, and the encoded bytes.

        The bytes are empty for a raw or unchanged block.

        Args:
            digest: digest of the block's content, if known.

        Raises: errors of `BaseContents.content`.
        """
        content = self._content(number, block)
        digest = digest_bytes(content) if digest is None else digest
        if digest == self._sides.contents.digest(number, block):
            return Verdict(SAME, predicted=False, nbytes=0, digest=digest), b""
        found = None
        if self._image.pieces[number].key[0] in self._fields and content.nbytes >= LEAST_NBYTES:
            found = self._code_changed(number, block, content)
        if found is None:
            return Verdict(RAW, predicted=False, nbytes=content.nbytes, digest=digest), b""
        verdict = Verdict(
            ENCODINGS.index(found.encoding),
            predicted=found.predicted,
            nbytes=len(found.stored),
            digest=digest,
            stored_digest=digest_bytes(found.stored),
            decode_s=found.decode_s,
        )
        return verdict, found.stored

    def _code_changed(self, number: int, block: int, content: memoryview) -> _Encoded | None:
        """Return the smallest encoding of a changed block, checked by decoding; None for raw."""
        group = self._groups.get(number)
        is_small = content.nbytes < SMALL_NBYTES
        found = None if group is None or is_small else self._predict(group, number, block, content)
        if found is not None:
            return found
        base = self._sides.contents.content(number, block)
        dtype = self._sides.dtype(number)
        if is_small:
            encoding, stored = encode_small(content, dtype=dtype, base=base)
        else:
            encoding, stored = self._encode(
                number, content, dtype=dtype, base=base, among=self._among
            )
        decode = functools.partial(encodings.decode, dtype=dtype, base=base)
        decode_s = _time_decoding(encoding, stored, content, decode)
        return None if decode_s is None else _Encoded(encoding, stored, decode_s)

    def code_as(self, encoding: str, number: int, block: int, *, predicted: bool) -> bytes:
        """Return the bytes of a block again, in the encoding of an earlier verdict."""
        content = self._content(number, block)
        if predicted:
            found = self._predict(self._groups[number], number, block, content)
            return b"" if found is None else found.stored
        base = self._sides.contents.content(number, block)
        return encodings.encode(encoding, content, dtype=self._sides.dtype(number), base=base)

    def _encode(
        self,
        like: int | str,
        content: memoryview,
        *,
        dtype: str,
        base: memoryview,
        among: Sequence[str],
    ) -> tuple[str, bytes]:
        """Return the encoding and bytes of a block, trying the last choice for `like` first.

        Comparing encodings takes several times as long as encoding. Blocks of one piece resemble
        each other, and so do blocks of one role in all pieces.
        """
        encoding, share = self._chosen.get(like, ("raw", 1.0))
        if encoding != "raw":
            stored = encodings.encode(encoding, content, dtype=dtype, base=base)
            if len(stored) <= min(_ALIKE * share, 1.0 - 1e-9) * len(content):
                return encoding, stored
        encoding, stored = encodings.choose(content, dtype=dtype, base=base, among=among)
        self._chosen[like] = encoding, len(stored) / len(content)
        return encoding, stored

    def _predict(
        self, group: PlannedGroup, number: int, block: int, content: memoryview
    ) -> _Encoded | None:
        """Return a block encoded with its group's prediction; None if that doesn't work or pay."""
        place = group.pieces.index(number)
        elements = self._sides.elements_of(number, block)
        role = group.roles[place]
        given: dict[str, Any] = {
            "news": {
                name: self._sides.new(member, elements)
                for name, member in zip(group.roles[:place], group.pieces, strict=False)
            },
            "bases": self._bases_of(group, role, elements),
        }
        if role == "master":
            return None
        begin_s = time.perf_counter()
        given["predicted"] = prediction.predict_member(group.rule, role, **given)
        predict_s = time.perf_counter() - begin_s
        # The residual of a prediction is noise or almost empty: the slow encoding `classes`
        # gains no bytes there.
        encode = functools.partial(self._encode, role, among=encodings.QUICK)
        dtype = self._sides.dtype(number)
        encoding, stored = prediction.encode_member(
            group.rule, role, content, dtype=dtype, encode=encode, **given
        )
        decode = functools.partial(prediction.decode_member, group.rule, role, **given)
        decode_s = _time_decoding(encoding, stored, content, decode)
        if decode_s is None:
            return None
        is_predicted = group.is_predicted(role, encoding)
        return _Encoded(encoding, stored, predict_s + decode_s, predicted=is_predicted)

    def _bases_of(self, group: PlannedGroup, role: str, elements: range) -> dict[str, memoryview]:
        """Return the base's elements of all members from which a role is decoded."""
        if not group.needs_base:
            return {}
        wanted = prediction.needed_bases(group.rule, role)
        return {
            name: self._sides.base(member, elements)
            for name, member in zip(group.roles, group.pieces, strict=True)
            if name in wanted
        }

    def _content(self, number: int, block: int) -> memoryview:
        return self._sides.new(number, self._sides.elements_of(number, block))


def encode_small(content: memoryview, *, dtype: str, base: memoryview) -> tuple[str, bytes]:
    """Return the encoding and bytes of a small block; `("raw", b"")` where encoding doesn't pay."""
    if content.nbytes < LEAST_NBYTES:
        return "raw", b""
    words = LANES[dtype].words
    changed = np.frombuffer(content, words) != np.frombuffer(base, words)
    if np.count_nonzero(changed) > _MOST_CHANGED * changed.size:
        return "raw", b""
    return encodings.choose(content, dtype=dtype, base=base, among=_FOR_SMALL)


def _time_decoding(
    encoding: str, stored: bytes, content: memoryview, decode: Callable[..., None]
) -> float | None:
    """Return the time in seconds in which the stored bytes decode to the content.

    Returns: None for raw blocks, and if the bytes decode to something else.
    """
    if encoding == "raw":
        return None
    out = memoryview(bytearray(content.nbytes))
    begin_s = time.perf_counter()
    decode(encoding, memoryview(stored), out, where="delta")
    decode_s = time.perf_counter() - begin_s
    # Memoryviews compare byte by byte, twenty times as slowly as arrays.
    is_same = np.array_equal(np.frombuffer(out, np.uint8), np.frombuffer(content, np.uint8))
    return decode_s if is_same else None
