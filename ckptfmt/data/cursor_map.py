"""Typed access to the maps of a cursor's tree, with places for errors; and the skips of a cursor.

A skip excludes samples, a shard or positions from a run, each from a position on:

    {"scope": "sample", "policy": "shift", "from_pos": 41024, "reason": "corrupt",
     "source": "books", "ids": [10422]}
    {"scope": "shard", "policy": "mask", "from_pos": 0, "reason": "licence",
     "source": "code", "shard": "00017.tar", "range": [0, 18000]}
    {"scope": "pos", "policy": "hole", "reason": "loss spike", "range": [70400, 70464]}

A skip has no effect on positions before its first position. So the record of finished steps stays
true if entries are only added, and only for positions not consumed yet (REQ-CUR-020).

Spec: REQ-CUR-002, REQ-CUR-017, REQ-CUR-019.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal, NoReturn, TypeAlias, TypeVar

from ckptfmt import limits
from ckptfmt.errors import Code, err

W = TypeVar("W", bound=str)

#: Largest number of bits of an integer in a message.
_SHOWN_BITS: Final = 4096


@dataclasses.dataclass(frozen=True, slots=True)
class CursorMap:
    """A map of the tree, and the map's place. The getters check exact types: True is no integer."""

    members: dict[object, object]
    where: str
    #: The clause that defines the map's members.
    clause: str = "REQ-CUR-002"

    @classmethod
    def of(cls, value: object, where: str, clause: str = "REQ-CUR-002") -> CursorMap:
        """Return a value as a map. Raises: CURSOR_FORM if the value is of another type."""
        if type(value) is not dict:
            refuse(f"a {type(value).__name__} where a map belongs", where, clause)
        return cls(value, where, clause)

    def check_names(self, *names: str) -> None:
        """Raise unless the map has exactly the members `names`. Raises: CURSOR_FORM."""
        if missing := [name for name in names if name not in self.members]:
            refuse(f"without {missing[0]!r}", self.where, self.clause)
        if unknown := [name for name in self.members if name not in names]:
            refuse(f"the unknown member {show_value(unknown[0])}", self.where, self.clause)

    def known(self, name: str, *known: W) -> W:
        """Return a member with a word from `known`, the words of this reader.

        Raises: CURSOR_FORM, FEATURE_UNSUPPORTED.
        """
        value = self.text(name)
        for word in known:
            if word == value:
                return word
        detail = f"{name} {value!r}; this reader knows {', '.join(map(repr, known))}"
        raise err(
            Code.FEATURE_UNSUPPORTED,
            detail,
            where=f"{self.where}/{name}",
            requirement="REQ-CUR-003",
        )

    def inner(self, name: str) -> CursorMap:
        """Return a member, a map. Raises: CURSOR_FORM."""
        return CursorMap.of(self.members.get(name), f"{self.where}/{name}", self.clause)

    def items(self, name: str) -> list[object]:
        """Return a member, a list. Raises: CURSOR_FORM."""
        value = self.members.get(name)
        if type(value) is not list:
            refuse(
                f"a {type(value).__name__} where a list belongs",
                f"{self.where}/{name}",
                self.clause,
            )
        return value

    def maps(self, name: str) -> list[CursorMap]:
        """Return a member, a list of maps, each with its place. Raises: CURSOR_FORM."""
        return [
            CursorMap.of(value, f"{self.where}/{name}/{i}", self.clause)
            for i, value in enumerate(self.items(name))
        ]

    def text(self, name: str) -> str:
        """Return a string of at most `NAME_NBYTES`. Raises: CURSOR_FORM."""
        value = self.members.get(name)
        if type(value) is not str or len(value.encode(errors="replace")) > limits.NAME_NBYTES:
            detail = f"not a string of at most {limits.NAME_NBYTES} bytes"
            refuse(detail, f"{self.where}/{name}", self.clause)
        return value

    def integer(self, name: str, most: int, *, least: int = 0) -> int:
        """Return an integer from `least` to `most`. Raises: CURSOR_FORM."""
        return _integer(self.members.get(name), f"{self.where}/{name}", most, least, self.clause)

    def integers(self, name: str, most: int, *, count: int | None = None) -> tuple[int, ...]:
        """Return a list of integers from 0 to `most`; of length `count` unless `count` is None.

        Raises: CURSOR_FORM.
        """
        values = self.items(name)
        if count is not None and len(values) != count:
            refuse(
                f"{len(values)} integers where {count} belong", f"{self.where}/{name}", self.clause
            )
        return tuple(
            _integer(value, f"{self.where}/{name}/{i}", most, 0, self.clause)
            for i, value in enumerate(values)
        )


def refuse(detail: str, where: str, requirement: str) -> NoReturn:
    """Raise CURSOR_FORM."""
    raise err(Code.CURSOR_FORM, detail, where=where, requirement=requirement)


def show_value(value: object) -> str:
    """Return the text of a value for a message.

    >>> show_value("a"), show_value(1 << 20_000)
    ("'a'", 'a value of the type int')
    """
    if type(value) in (str, int, bool, type(None)) and not (
        type(value) is int and value.bit_length() > _SHOWN_BITS
    ):
        return f"{value!r:.80}"
    # Lists and maps aren't printed: Python refuses to print the very long integers that they may
    # contain.
    return f"a value of the type {type(value).__name__}"


def check_ascending(values: Sequence[int], where: str, requirement: str) -> None:
    """Raise unless integers increase strictly. Raises: CURSOR_FORM."""
    for before, after in itertools.pairwise(values):
        if before >= after:
            refuse(f"{after} comes after {before}; they ascend", where, requirement)


def _integer(value: object, where: str, most: int, least: int, clause: str) -> int:
    if type(value) is not int or not least <= value <= most:
        refuse(f"not an integer from {least} to {most}: {show_value(value)}", where, clause)
    return value


# --- skips ----------------------------------------------------------------------------------------

Policy: TypeAlias = Literal["hole", "shift", "mask"]

_SCOPES: Final = ("sample", "shard", "pos")
_SHARD: Final = ("shard", "range")
_POSITION: Final = limits.DIM << 64


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _SourceSkip:
    """The common members of skips of a source's samples, from the position `from_pos` on."""

    policy: Policy
    from_pos: int
    reason: str
    source: str

    @property
    def begin(self) -> int:
        """The first position that the skip may change."""
        return self.from_pos


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SampleSkip(_SourceSkip):
    """The samples `ids` of a source, from the position `from_pos` on."""

    ids: tuple[int, ...]
    scope: Literal["sample"] = "sample"

    def ranges(self) -> list[tuple[int, int]]:
        """Return the samples as ranges ``[begin, end)``."""
        return [(sample, sample + 1) for sample in self.ids]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ShardSkip(_SourceSkip):
    """The samples ``[range[0], range[1])`` of a source, the shard `shard`, from `from_pos` on."""

    shard: str
    range: tuple[int, int]
    scope: Literal["shard"] = "shard"

    def ranges(self) -> list[tuple[int, int]]:
        """Return the samples as ranges ``[begin, end)``."""
        return [self.range]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PosSkip:
    """The samples at the positions ``[range[0], range[1])``."""

    policy: Policy
    reason: str
    range: tuple[int, int]
    scope: Literal["pos"] = "pos"

    @property
    def begin(self) -> int:
        """The first position that the skip may change."""
        return self.range[0]


Skip: TypeAlias = SampleSkip | ShardSkip | PosSkip


def parse_skips(top: CursorMap, lengths: dict[str, int]) -> tuple[Skip, ...]:
    """Return the skips of a cursor.

    Args:
        top: the cursor.
        lengths: number of samples of each source, by id.

    Raises: CURSOR_FORM, FEATURE_UNSUPPORTED.
    """
    return tuple(_parse_skip(one, lengths) for one in top.maps("skips"))


def dump_skip(skip: Skip) -> dict[str, Any]:
    """Return the tree of a skip."""
    members = dataclasses.asdict(skip)
    return {name: list(value) if type(value) is tuple else value for name, value in members.items()}


def count_removed(skips: Iterable[Skip], source: str) -> int:
    """Return the number of a source's samples removed by skips of the policy ``shift``.

    A sample in several skips counts once.

    >>> one = SampleSkip(policy="shift", from_pos=0, reason="", source="a", ids=(1, 5))
    >>> two = ShardSkip(policy="shift", from_pos=8, reason="", source="a", shard="x", range=(4, 8))
    >>> count_removed([one, two], "a"), count_removed([one, two], "b")
    (5, 0)
    """
    count = 0
    reached = 0
    for begin, end in sorted(_shifted(skips, source)):
        count += max(0, end - max(begin, reached))
        reached = max(reached, end)
    return count


def _shifted(skips: Iterable[Skip], source: str) -> Iterable[tuple[int, int]]:
    for skip in skips:
        if not isinstance(skip, PosSkip) and skip.policy == "shift" and skip.source == source:
            yield from skip.ranges()


def _parse_skip(one: CursorMap, lengths: dict[str, int]) -> Skip:
    scope = one.known("scope", *_SCOPES)
    if scope == "pos":
        one.check_names("scope", "policy", "reason", "range")
        begin, end = _range(one, _POSITION)
        return PosSkip(policy=_policy(one), reason=one.text("reason"), range=(begin, end))
    one.check_names(
        "scope",
        "policy",
        "from_pos",
        "reason",
        "source",
        *(("ids",) if scope == "sample" else _SHARD),
    )
    policy = _policy(one)
    reason = one.text("reason")
    source = one.text("source")
    from_pos = one.integer("from_pos", _POSITION)
    if source not in lengths:
        refuse(f"there is no source {source!r}", f"{one.where}/source", "REQ-CUR-017")
    if scope == "shard":
        shard, (begin, end) = one.text("shard"), _range(one, limits.DIM)
        _check_samples((end - 1,), lengths[source], f"{one.where}/range")
        return ShardSkip(
            policy=policy,
            from_pos=from_pos,
            reason=reason,
            source=source,
            shard=shard,
            range=(begin, end),
        )
    ids = one.integers("ids", limits.DIM)
    if not ids:
        refuse("it skips no sample", f"{one.where}/ids", "REQ-CUR-017")
    check_ascending(ids, f"{one.where}/ids", "REQ-CUR-017")
    _check_samples(ids, lengths[source], f"{one.where}/ids")
    return SampleSkip(policy=policy, from_pos=from_pos, reason=reason, source=source, ids=ids)


def _policy(one: CursorMap) -> Policy:
    return one.known("policy", "hole", "shift", "mask")


def _range(one: CursorMap, most: int) -> tuple[int, int]:
    begin, end = one.integers("range", most, count=2)
    if begin >= end:
        refuse(f"[{begin}, {end}) is empty", f"{one.where}/range", "REQ-CUR-017")
    return begin, end


def _check_samples(ids: Sequence[int], n: int, where: str) -> None:
    if ids[-1] >= n:
        refuse(f"sample {ids[-1]} of a source of {n}", where, "REQ-CUR-017")
