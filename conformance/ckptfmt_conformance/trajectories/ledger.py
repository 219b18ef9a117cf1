"""The state of a run after every step, by raw bytes, and the first divergence of two runs."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import torch

__all__ = [
    "Comparison",
    "Divergence",
    "Facts",
    "Position",
    "bytes_of",
    "differ",
    "facts_of",
    "ulps_between",
]

#: The number of finished steps, and of finished microbatches in the unfinished step.
Position: TypeAlias = tuple[int, int]
#: All compared values, by ``<category>/<name>``: copies of tensors, and exact texts of plain
#: values.
Facts: TypeAlias = dict[str, "torch.Tensor | str"]

_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def facts_of(prefix: str, tree: object) -> Facts:
    """Return the leaves of a tree as facts. For a DTensor, the fact is this process's part.

    >>> facts_of("scheduler", {"last_epoch": 3, "lr": [0.5]})
    {'scheduler/last_epoch': '3', 'scheduler/lr/0': '0x1.0000000000000p-1'}
    """
    return dict(_leaves(prefix, tree))


def _leaves(name: str, value: object) -> Iterator[tuple[str, torch.Tensor | str]]:
    if isinstance(value, torch.Tensor):
        local: Any = value.detach()
        local = local.to_local() if hasattr(local, "to_local") else local
        yield name, local.clone()
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from _leaves(f"{name}/{key}", value[key])
    elif isinstance(value, list | tuple) and len(value) <= 64:
        for number, item in enumerate(value):
            yield from _leaves(f"{name}/{number}", item)
    else:
        yield name, _text(value)


def _text(value: object) -> str:
    return value.hex() if isinstance(value, float) else repr(value)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor. By bytes, -0.0 differs from 0.0, and a NaN equals itself."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def differ(left: torch.Tensor | str | None, right: torch.Tensor | str | None) -> bool:
    """Return whether two facts differ in dtype, shape or any bit."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        same_form = left.dtype == right.dtype and left.shape == right.shape
        return not (same_form and torch.equal(bytes_of(left), bytes_of(right)))
    return isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor) or left != right


def ulps_between(expected: torch.Tensor, found: torch.Tensor) -> int | None:
    """Return the distance of two numbers of a dtype in representable values.

    Return None for NaN and integers.

    >>> ulps_between(torch.tensor(0.0), torch.tensor(-1e-45))
    2
    """
    if not expected.is_floating_point() or bool(expected.isnan()) or bool(found.isnan()):
        return None
    bits = 8 * expected.element_size()

    def rank(value: torch.Tensor) -> int:
        number = int(value.reshape(1).view(_SIGNED[value.element_size()]).item())
        return number if number >= 0 else -(number + (1 << bits - 1)) - 1

    return abs(rank(expected) - rank(found))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The first place where a run differs from the uninterrupted run.

    Attributes:
        position: the finished steps and microbatches.
        loads: the number of preceding loads.
        at_load: whether the state is a load's result, before any further step.
        names: the names of all differing facts, the most informative first.
        detail: the first fact's element and values.
    """

    position: Position
    loads: int
    at_load: bool
    names: tuple[str, ...]
    detail: str

    def explain(self) -> str:
        """Return one sentence with step, tensor, index, ULPs, and the probable cause."""
        step, micro = self.position
        when = f"step {step}" + (f", microbatch {micro}" if micro else "")
        since = (
            "right after load"
            if self.at_load
            else "after load"
            if self.loads
            else "before any load"
        )
        count = f" {self.loads}" if self.loads else ""
        more = f"; {len(self.names) - 1} more differ" if len(self.names) > 1 else ""
        return f"first divergence at {when} ({since}{count}): {self.detail}{more}; {self._guess()}"

    def _guess(self) -> str:
        if not self.loads:
            return (
                "nothing was restored yet, so the training itself isn't deterministic, or a"
                " save changed it"
            )
        if not self.at_load:
            return (
                "all that is compared came back, so look at what isn't: threads, kernels,"
                " prefetched data"
            )
        kinds = list(dict.fromkeys(describe(name) for name in self.names))
        return f"most likely not restored: {', '.join(kinds[:3])}" + (
            " and more" if len(kinds) > 3 else ""
        )


_KINDS = {
    "parameter": "the weights",
    "cursor": "the data cursor",
    "scaler": "the loss scaler",
    "ema": "the averaged weights",
    "window": "the accumulation window",
    "progress": "the loop's counters",
    "trainer": "the trainer's own state",
    "sample": "the data cursor",
    "alias": "the tie between two weights",
}


def describe(name: str) -> str:
    """Return the owner of a fact, in words.

    >>> describe("moment/exp_avg/layers.0.weight")
    "the optimizer's exp_avg"
    >>> describe("cursor/skips/0/ids/1")
    "the data cursor's skips"
    """
    category, _, rest = name.partition("/")
    head = rest.partition("/")[0]
    if category == "moment":
        return f"the optimizer's {head}"
    if category == "group":
        return f"the optimizer's option {rest.split('/')[1]}"
    if category == "scheduler":
        return "the scheduler (learning rate)"
    if category in ("buffer", "extra_state"):
        return f"the {category.replace('_', ' ')} {rest}"
    if category == "rng":
        return f"the random-number stream {head}"
    kind = _KINDS.get(category, name)
    return f"{kind}'s {head}" if category == "cursor" and head in ("skips", "mixture") else kind


class Comparison:
    """The comparison of a run with the uninterrupted run, position by position.

    Args:
        reference: the facts of the uninterrupted run at each position.

    Attributes:
        first: the first divergence.
        differences: the kind of difference at each position, for each fact that differs anywhere.
        learnt_at: the first position where weights or loss differ, as evidence of the difference's
            effect.
        compared: the number of compared facts.
    """

    def __init__(self, reference: Mapping[Position, Facts]) -> None:
        self._reference = reference
        self.first: Divergence | None = None
        self.differences: dict[str, dict[Position, str]] = {}
        self._seen: list[Position] = []
        self.learnt_at: Position | None = None
        self.compared = 0

    def look(self, position: Position, facts: Facts, *, loads: int, at_load: bool) -> None:
        """Compare the state at a position."""
        expected = self._reference[position]
        ignored = ("sample/", "loss/") if at_load else ()  # values of a step from another process
        names = [name for name in expected.keys() | facts.keys() if not name.startswith(ignored)]
        self.compared += len(names)
        found = sorted(
            (n for n in names if differ(expected.get(n), facts.get(n))), key=_how_telling
        )
        self._seen.append(position)
        for name in found:
            self.differences.setdefault(name, {})[position] = _distance(
                expected.get(name), facts.get(name)
            )
        if found and self.first is None:
            detail = _explain(found[0], expected.get(found[0]), facts.get(found[0]))
            self.first = Divergence(
                position=position, loads=loads, at_load=at_load, names=tuple(found), detail=detail
            )  # fmt: skip
        if (
            self.learnt_at is None
            and not at_load
            and any(n.startswith(("parameter/", "loss/")) for n in found)
        ):
            self.learnt_at = position

    def explain(self) -> str | None:
        """Return the first divergence in a sentence, followed by a table by fact and step."""
        if self.first is None:
            return None
        begin = self.first.position
        shown = [
            one
            for one in dict.fromkeys(self._seen)
            if one >= begin and (one == begin or not one[1])
        ]
        names = sorted(
            self.differences, key=lambda name: (min(self.differences[name]), _how_telling(name))
        )
        rows = [
            ["steps done", *(f"{step}+{micro}" if micro else str(step) for step, micro in shown)]
        ]
        rows += [
            [name, *(self.differences[name].get(one, ".") for one in shown)]
            for name in names[:_ROWS]
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            for row in rows
        ]
        lines += [f"and {len(names) - _ROWS} more"] if len(names) > _ROWS else []
        return "\n".join([self.first.explain(), _LEGEND, *lines])

    def has_same_weights(self, position: Position, facts: Facts) -> bool:
        """Return whether any weight already has its expected value."""
        expected = self._reference[position]
        matrices = [
            name
            for name, fact in facts.items()
            if name.startswith("parameter/") and "norm" not in name
        ]
        return not all(
            differ(expected.get(name), facts[name]) for name in matrices if name.endswith("weight")
        )


#: The number of facts in the table of a divergence.
_ROWS = 24
_LEGEND = (
    "the greatest difference relative to the larger of two elements, by tensor or value and"
    " step; . the same:"
)
_ORDER = (
    "alias",
    "parameter",
    "buffer",
    "extra_state",
    "moment",
    "group",
    "scheduler",
    "scaler",
    "ema",
    "window",
)


def _how_telling(name: str) -> tuple[int, str]:
    category = name.partition("/")[0]
    return (_ORDER.index(category) if category in _ORDER else len(_ORDER), name)


def _distance(expected: torch.Tensor | str | None, found: torch.Tensor | str | None) -> str:
    """Return the greatest relative difference of two elements, or a word where no number applies.

    >>> _distance(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 1.0]))
    '5e-01'
    >>> _distance("3", "4"), _distance("3", None)
    ('differs', 'missing')
    """
    if expected is None or found is None:
        return "missing"
    if not (isinstance(expected, torch.Tensor) and isinstance(found, torch.Tensor)):
        return "differs"
    is_number = (
        expected.dtype == found.dtype
        and expected.shape == found.shape
        and expected.is_floating_point()
    )
    if not is_number:
        return "differs"
    one = expected.double()
    other = found.double()
    ratio = (
        (one - other).abs()
        / torch.maximum(one.abs(), other.abs()).clamp_min(torch.finfo(torch.float64).tiny)
    ).max()
    return f"{float(ratio):.0e}" if bool(ratio.isfinite()) else "nan"


def _explain(
    name: str, expected: torch.Tensor | str | None, found: torch.Tensor | str | None
) -> str:
    if not (isinstance(expected, torch.Tensor) and isinstance(found, torch.Tensor)):
        return f"{name} is {_short(found)}, should be {_short(expected)}"
    if expected.dtype != found.dtype or expected.shape != found.shape:
        forms = [f"{tensor.dtype} of {list(tensor.shape)}" for tensor in (found, expected)]
        return f"{name} is {forms[0]}, should be {forms[1]}"
    width = expected.element_size()
    unequal = (bytes_of(expected) != bytes_of(found)).reshape(-1, width).any(dim=1)
    flat = int(unequal.nonzero()[0].item())
    ours = expected.reshape(-1)[flat]
    theirs = found.reshape(-1)[flat]
    index = (
        [int(part) for part in torch.unravel_index(torch.tensor(flat), expected.shape)]
        if expected.dim()
        else []
    )
    ulps = ulps_between(ours, theirs)
    apart = f" ({ulps} ULPs)" if ulps is not None else ""
    count = int(unequal.sum().item())
    return (
        f"{name}{index or ''} is {theirs.item()!r}, should be {ours.item()!r}{apart}, "
        f"{count} of {expected.numel()} elements differ"
    )


def _short(value: torch.Tensor | str | None) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of {list(value.shape)}"
    return "missing" if value is None else value[:80]


def float_bits(value: float) -> str:
    """Return the bits of a loss, in hex.

    >>> float_bits(1.0)
    '3ff0000000000000'
    """
    return struct.pack(">d", value).hex()
