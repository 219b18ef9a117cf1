"""Sizes of two states in ckptfmt's own encodings, block by block, without files.

A delta consists of these bytes, and of parts and manifests: digests of each block (of the content
and of the stored bytes) and the block's place.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Iterator, Mapping
from typing import Final

from benchmarks.codecs import Measured, timed
from benchmarks.snapshots import MASTER, WEIGHT, Pair, Tensor
from ckptfmt.codecs import encodings, prediction
from ckptfmt.codecs.rule import Rule, roles
from ckptfmt.codecs.rule_search import find_rule
from ckptfmt.delta.block_coder import SMALL_NBYTES, encode_small
from ckptfmt.digest import DIGEST_NBYTES, iter_blocks
from ckptfmt.limits import BLOCK_NBYTES

#: The members of a group by kind of rule: roles of a predictable parameter.
_ROLES: Final = {
    "adam": {"exp_avg", "exp_avg_sq", WEIGHT},
    "sgd": {"momentum_buffer", WEIGHT},
    "cast": {MASTER, WEIGHT},
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Coded(Measured):
    """The result of ckptfmt's encodings on a state.

    Attributes:
        digests_nbytes: the size of digests: one per block, and a second per stored block.
        find_s: the seconds for finding the rule that predicts this step, included in the seconds of
            encoding.
        predicted: the number of predicted parameters.
        by_role: stored over raw bytes.
        blocks: the number of blocks per encoding.
    """

    digests_nbytes: int
    find_s: float
    predicted: int
    by_role: Mapping[str, float]
    blocks: Mapping[str, int]

    def describe(self) -> dict[str, object]:
        """Return the entry for a record."""
        return {
            **Measured.describe(self),
            "with_digests_vs_raw": (self.stored_nbytes + self.digests_nbytes) / self.nbytes,
            "find_s": self.find_s,
            "predicted": self.predicted,
            "by_role": dict(self.by_role),
            "blocks": dict(self.blocks),
        }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """A block of a tensor, before and after."""

    tensor: Tensor
    base: memoryview | None
    new: memoryview

    @property
    def is_unchanged(self) -> bool:
        return self.base is not None and self.base == self.new


#: A block of each tensor of a group, by role, or a block of a single tensor.
_Blocks = Mapping[str, _Block]


class _Tally:
    """Sums over blocks."""

    def __init__(self) -> None:
        self.encode_s = self.decode_s = 0.0
        self.digests_nbytes = 0
        self.stored: collections.Counter[str] = collections.Counter()
        self.raw: collections.Counter[str] = collections.Counter()
        self.blocks: collections.Counter[str] = collections.Counter()

    def add(self, block: _Block, encoding: str, stored_nbytes: int) -> None:
        """Count a block; ``same`` equals the base, and stores nothing."""
        self.stored[block.tensor.role] += stored_nbytes
        self.raw[block.tensor.role] += block.new.nbytes
        self.blocks[encoding] += 1
        self.digests_nbytes += DIGEST_NBYTES * (1 if encoding in ("same", "raw") else 2)


def code(pair: Pair, *, predict: bool = True) -> Coded:
    """Encode the newer state against the older state, and decode the result.

    Args:
        predict: whether to look for an optimizer's rule.

    Raises: RuntimeError if decoding returns different bytes.
    """
    tally = _Tally()
    kind = pair.kind if predict else ""
    groups = list_groups(pair, kind)
    begin_s = time.thread_time()
    rules = _find_rules(pair, kind, groups)
    find_s = time.thread_time() - begin_s
    grouped = {tensor.name for parameter in rules for tensor in groups[parameter].values()}
    for name, tensor in pair.new.items():
        if name not in grouped:
            for blocks in _iter_blocks(pair, {tensor.role: tensor}):
                _code_alone(blocks[tensor.role], tally)
    for parameter, rule in rules.items():
        for blocks in _iter_blocks(pair, groups[parameter]):
            _code_group(rule, blocks, tally)
    return Coded(
        nbytes=tally.raw.total(),
        stored_nbytes=tally.stored.total(),
        encode_s=tally.encode_s + find_s,
        decode_s=tally.decode_s,
        digests_nbytes=tally.digests_nbytes,
        find_s=find_s,
        predicted=len(rules),
        by_role={role: tally.stored[role] / nbytes for role, nbytes in tally.raw.items()},
        blocks=tally.blocks,
    )


def list_groups(pair: Pair, kind: str) -> dict[str, dict[str, Tensor]]:
    """Return predictable groups: by parameter, the tensors by role, all present in both states."""
    roles = _ROLES.get(kind, set())
    groups: dict[str, dict[str, Tensor]] = {}
    for name, tensor in pair.new.items():
        if tensor.role in roles and name in pair.base:
            groups.setdefault(tensor.parameter, {})[tensor.role] = tensor
    return {parameter: group for parameter, group in groups.items() if group.keys() == roles}


def _find_rules(
    pair: Pair, kind: str, groups: Mapping[str, Mapping[str, Tensor]]
) -> dict[str, Rule]:
    """Return the rule per predictable parameter, found in the largest with equal step counts."""
    by_steps: dict[tuple[int | None, int | None], list[str]] = {}
    for parameter, group in groups.items():
        if any(pair.base[tensor.name].content != tensor.content for tensor in group.values()):
            by_steps.setdefault(pair.steps_of(parameter), []).append(parameter)
    rules: dict[str, Rule] = {}
    hint = None
    for (before, after), parameters in by_steps.items():
        largest = groups[
            max(parameters, key=lambda parameter: groups[parameter][WEIGHT].array.size)
        ]
        samples = {
            role: (pair.base[tensor.name].content[:BLOCK_NBYTES], tensor.content[:BLOCK_NBYTES])
            for role, tensor in largest.items()
        }
        options, base_options = ({**pair.options, "step": step} for step in (after, before))
        rule = find_rule(kind, options, samples, base_options=base_options, hint=hint)
        if rule is not None:
            hint = rule
            rules.update(dict.fromkeys(parameters, rule))
    return rules


def _iter_blocks(pair: Pair, tensors: Mapping[str, Tensor]) -> Iterator[_Blocks]:
    """Yield blocks of tensors of equal shape, blocks of equal number together."""
    first = next(iter(tensors.values()))
    for begin, end in iter_blocks(first.content.nbytes, BLOCK_NBYTES):
        yield {
            role: _Block(
                tensor=tensor,
                base=pair.base[tensor.name].content[begin:end]
                if tensor.name in pair.base
                else None,
                new=tensor.content[begin:end],
            )
            for role, tensor in tensors.items()
        }


def _code_alone(block: _Block, tally: _Tally) -> None:
    if block.is_unchanged:
        tally.add(block, "same", 0)
        return
    dtype = block.tensor.dtype
    base = block.base
    if base is not None and block.new.nbytes < SMALL_NBYTES:
        (encoding, stored), encode_s = timed(encode_small, block.new, dtype=dtype, base=base)
    else:
        (encoding, stored), encode_s = timed(encodings.choose, block.new, dtype=dtype, base=base)
    tally.encode_s += encode_s
    if encoding == "raw":
        tally.add(block, encoding, block.new.nbytes)
        return
    tally.add(block, encoding, len(stored))
    out = memoryview(bytearray(block.new.nbytes))
    content = memoryview(stored)
    base = base if encoding in encodings.NEEDS_BASE else None
    where = block.tensor.name
    _, decode_s = timed(
        encodings.decode, encoding, content, out, dtype=dtype, base=base, where=where
    )
    tally.decode_s += decode_s
    _check(block, out)


def _code_group(rule: Rule, blocks: _Blocks, tally: _Tally) -> None:
    bases = {role: block.base for role, block in blocks.items() if block.base is not None}
    news: dict[str, memoryview] = {}
    for role in roles(rule):
        block = blocks[role]
        earlier = dict(news)
        news[role] = block.new
        if block.is_unchanged:
            tally.add(block, "same", 0)
            continue
        if block.new.nbytes < SMALL_NBYTES:
            _code_alone(block, tally)
            continue
        dtype = block.tensor.dtype
        (encoding, stored), encode_s = timed(
            prediction.encode_member, rule, role, block.new, bases=bases, news=earlier, dtype=dtype
        )
        tally.encode_s += encode_s
        if encoding == "raw":
            tally.add(block, encoding, block.new.nbytes)
            continue
        tally.add(block, encoding, len(stored))
        content = memoryview(stored)
        out = memoryview(bytearray(block.new.nbytes))
        where = block.tensor.name
        _, decode_s = timed(
            prediction.decode_member,
            rule,
            role,
            encoding,
            content,
            out,
            bases=bases,
            news=earlier,
            where=where,
        )
        tally.decode_s += decode_s
        _check(block, out)


def _check(block: _Block, out: memoryview) -> None:
    if out != block.new:
        raise RuntimeError(f"other bytes came back of {block.tensor.name}")
