"""The skips of a data cursor: samples, shards and positions that a run leaves out, each from a position on.

    {"scope": "sample", "policy": "shift", "from_pos": 41024, "reason": "corrupt", "source": "books", "ids": [10422]}
    {"scope": "shard", "policy": "mask", "from_pos": 0, "reason": "licence", "source": "code", "shard": "00017.tar",
     "range": [0, 18000]}
    {"scope": "pos", "policy": "hole", "reason": "loss spike", "range": [70400, 70464]}

A skip says nothing of the positions before the one that it begins at: so what a run has done already stays true, as
long as entries are only added, and only such as begin where nothing was consumed yet (REQ-CUR-020).

Spec: REQ-CUR-017, REQ-CUR-019.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal, TypeAlias

from ckptfmt import limits
from ckptfmt.documents.cursor_map import CursorMap, check_ascending, refuse

Policy: TypeAlias = Literal["hole", "shift", "mask"]

_SCOPES: Final = ("sample", "shard", "pos")
_SHARD: Final = ("shard", "range")
_POSITION: Final = limits.DIM << 64


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SampleSkip:
    """The samples `ids` of a source, from the position `from_pos` on."""

    policy: Policy
    from_pos: int
    reason: str
    source: str
    ids: tuple[int, ...]
    scope: Literal["sample"] = "sample"

    @property
    def begin(self) -> int:
        """The first position that it may change."""
        return self.from_pos

    def ranges(self) -> list[tuple[int, int]]:
        """Return the samples as ranges ``[begin, end)``."""
        return [(sample, sample + 1) for sample in self.ids]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ShardSkip:
    """The samples ``[range[0], range[1])`` of a source, which are those of the shard `shard`, from `from_pos` on."""

    policy: Policy
    from_pos: int
    reason: str
    source: str
    shard: str
    range: tuple[int, int]
    scope: Literal["shard"] = "shard"

    @property
    def begin(self) -> int:
        """The first position that it may change."""
        return self.from_pos

    def ranges(self) -> list[tuple[int, int]]:
        """Return the samples as ranges ``[begin, end)``."""
        return [self.range]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PosSkip:
    """What the positions ``[range[0], range[1])`` would have."""

    policy: Policy
    reason: str
    range: tuple[int, int]
    scope: Literal["pos"] = "pos"

    @property
    def begin(self) -> int:
        """The first position that it may change."""
        return self.range[0]


Skip: TypeAlias = SampleSkip | ShardSkip | PosSkip


def parse_skips(top: CursorMap, lengths: dict[str, int]) -> tuple[Skip, ...]:
    """Return the skips of a cursor.

    Args:
        top: the cursor.
        lengths: number of samples of each source, by its id.

    Raises: CURSOR_FORM, FEATURE_UNSUPPORTED.
    """
    return tuple(_parse_skip(one, lengths) for one in top.maps("skips"))


def dump_skip(skip: Skip) -> dict[str, Any]:
    """Return the tree of a skip."""
    members = dataclasses.asdict(skip)
    return {name: list(value) if type(value) is tuple else value for name, value in members.items()}


def count_removed(skips: Iterable[Skip], source: str) -> int:
    """Return how many samples of a source its skips of the policy ``shift`` remove; each counts once.

    >>> one = SampleSkip(policy="shift", from_pos=0, reason="", source="a", ids=(1, 5))
    >>> two = ShardSkip(policy="shift", from_pos=8, reason="", source="a", shard="x", range=(4, 8))
    >>> count_removed([one, two], "a"), count_removed([one, two], "b")
    (5, 0)
    """
    count, reached = 0, 0
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
    one.check_names("scope", "policy", "from_pos", "reason", "source", *(("ids",) if scope == "sample" else _SHARD))
    policy, reason, source = _policy(one), one.text("reason"), one.text("source")
    from_pos = one.integer("from_pos", _POSITION)
    if source not in lengths:
        refuse(f"there is no source {source!r}", f"{one.where}/source", "REQ-CUR-017")
    if scope == "shard":
        shard, (begin, end) = one.text("shard"), _range(one, limits.DIM)
        _check_samples((end - 1,), lengths[source], f"{one.where}/range")
        return ShardSkip(
            policy=policy, from_pos=from_pos, reason=reason, source=source, shard=shard, range=(begin, end)
        )
    ids = one.integers("ids", limits.DIM)
    if not ids:
        refuse("it skips no sample", f"{one.where}/ids", "REQ-CUR-017")
    check_ascending(ids, f"{one.where}/ids", "REQ-CUR-017")
    _check_samples(ids, lengths[source], f"{one.where}/ids")
    return SampleSkip(policy=policy, from_pos=from_pos, reason=reason, source=source, ids=ids)


def _policy(one: CursorMap) -> Policy:
    policy = one.known("policy", "hole", "shift", "mask")
    return "hole" if policy == "hole" else "shift" if policy == "shift" else "mask"


def _range(one: CursorMap, most: int) -> tuple[int, int]:
    begin, end = one.integers("range", most, count=2)
    if begin >= end:
        refuse(f"[{begin}, {end}) is empty", f"{one.where}/range", "REQ-CUR-017")
    return begin, end


def _check_samples(ids: Sequence[int], n: int, where: str) -> None:
    if ids[-1] >= n:
        refuse(f"sample {ids[-1]} of a source of {n}", where, "REQ-CUR-017")
