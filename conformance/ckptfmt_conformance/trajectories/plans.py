"""Data plans by name: sources, mixture, tail and skips."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Final

__all__ = ["PLANS", "DataPlan", "Skip", "plan_of"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Skip:
    """A skip by the program.

    Attributes:
        said: the step before which the program announces the skip, as the earliest time.
        policy: ``hole``, ``mask`` or ``shift``.
        source: the source of the samples or the shard.
        samples, shard, positions: exactly one is given: sample numbers; a shard's name with begin
            and end of its samples; or begin and end of positions.
    """

    said: int
    policy: str
    source: str = ""
    samples: tuple[int, ...] = ()
    shard: tuple[str, int, int] | None = None
    positions: tuple[int, int] | None = None

    def arguments(self, batch: int) -> dict[str, Any]:
        """Return the arguments of a sampler's `skip`.

        >>> Skip(said=2, policy="hole", source="data", samples=(3,)).arguments(6)
        {'policy': 'hole', 'source': 'data', 'from_pos': 12, 'samples': (3,)}
        """
        if self.positions is not None:
            return {"policy": self.policy, "positions": self.positions}
        what: dict[str, Any] = (
            {"samples": self.samples} if self.shard is None else {"shard": self.shard}
        )
        return {"policy": self.policy, "source": self.source, "from_pos": self.said * batch} | what


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DataPlan:
    """The parameters of a sampler, and the later skips by the program.

    Attributes:
        sources: names, and numbers of samples.
        batch: the number of positions in a step, over all workers.
        seed: the seed of the order.
        tail: ``carry``, ``drop`` or ``pad_masked``.
        stages: the stages of a mixture of several sources: the first position of each, and the
            count of each source.
        skips: the skips by the program.
    """

    sources: tuple[tuple[str, int], ...]
    batch: int
    seed: int = 5
    tail: str = "carry"
    stages: tuple[tuple[int, tuple[int, ...]], ...] = ()
    skips: tuple[Skip, ...] = ()

    @property
    def lengths(self) -> dict[str, int]:
        """The numbers of samples by source, in order."""
        return dict(self.sources)

    @property
    def mixture(self) -> dict[int, dict[str, int]] | None:
        """The counts by source, by the first position of each stage; None for a single source."""
        names = [name for name, _ in self.sources]
        stages = {begin: dict(zip(names, counts, strict=True)) for begin, counts in self.stages}
        return stages or None


def _single(
    batch: int, missing: int = 0, *, tail: str = "carry", skips: tuple[Skip, ...] = ()
) -> DataPlan:
    """Return a plan of one source of five steps, less `missing` samples."""
    return DataPlan(sources=(("data", 5 * batch - missing),), batch=batch, tail=tail, skips=skips)


def _mixed(batch: int, skips: tuple[Skip, ...] = ()) -> DataPlan:
    """Return a plan of three sources, two of which wrap. Weights change after six and ten steps."""
    block = 2 * batch
    first = (block - batch // 2 - batch // 3, batch // 2, batch // 3)
    second = (batch // 3, (block - batch // 3) // 2, block - batch // 3 - (block - batch // 3) // 2)
    third = (block // 3, (block - block // 3) // 2, block - block // 3 - (block - block // 3) // 2)
    sources = (("books", 6 * batch + 4), ("code", 2 * batch - 1), ("web", batch + 1))
    return DataPlan(
        sources=sources,
        batch=batch,
        stages=((0, first), (6 * batch, second), (10 * batch, third)),
        skips=skips,
    )


def _shifted(batch: int) -> DataPlan:
    """Return the mixture with switches of stages within a step, by steps one position shorter."""
    plan = _mixed(batch)
    sooner = tuple((begin - 2 * batch if begin else 0, counts) for begin, counts in plan.stages)
    return dataclasses.replace(plan, batch=batch - 1, stages=sooner)


def _quarantine(batch: int) -> tuple[Skip, ...]:
    """Return skips of samples, a shard and positions, all announced before the seventh step."""
    return (
        Skip(said=0, policy="hole", source="data", samples=(3, 11, 17)),
        Skip(said=2, policy="shift", source="data", shard=("00004.tar", 2 * batch, 2 * batch + 5)),
        Skip(said=3, policy="mask", positions=(8 * batch + 1, 8 * batch + 3)),
    )


def _late(batch: int) -> tuple[Skip, ...]:
    """Return an early skip of a sample, and skips of all kinds before the eighth step."""
    return (
        Skip(said=0, policy="mask", source="data", samples=(1,)),
        Skip(said=7, policy="hole", source="data", samples=tuple(range(5, 5 * batch - 6, 7))),
        Skip(said=7, policy="shift", source="data", shard=("00002.tar", batch, batch + 4)),
        Skip(said=7, policy="shift", positions=(8 * batch, 8 * batch + 2)),
    )


def _of_epochs(batch: int) -> tuple[Skip, ...]:
    """Return skips valid for a tail whose epochs end with a step.

    There, a skip that shifts samples also begins and ends with a step.
    """
    return (
        Skip(said=2, policy="shift", source="data", shard=("00001.tar", 4, 7)),
        Skip(said=6, policy="hole", source="data", samples=(2, 9, 20)),
        Skip(said=6, policy="shift", positions=(8 * batch, 9 * batch)),
    )


def _of_mixture(batch: int) -> tuple[Skip, ...]:
    """Return skips of each source, announced before, at and after the switch of the weights."""
    return (
        Skip(said=0, policy="hole", source="code", samples=(0, 4)),
        Skip(said=4, policy="shift", source="web", shard=("web-1", 1, 3)),
        Skip(said=6, policy="mask", source="code", samples=(2, 7)),
        Skip(said=7, policy="shift", source="code", samples=(5, 6)),
        Skip(said=7, policy="mask", source="web", shard=("web-0", 0, 1)),
        Skip(said=7, policy="hole", positions=(8 * batch, 8 * batch + 2)),
    )


#: Plans by name, as functions of the number of positions in a step.
PLANS: Final[Mapping[str, Callable[[int], DataPlan]]] = {
    "shuffled": _single,
    "carry": lambda batch: _single(batch, 4),
    "drop": lambda batch: _single(batch, 4, tail="drop"),
    "pad": lambda batch: _single(batch, 4, tail="pad_masked"),
    "mixed": _mixed,
    "mixed-within": _shifted,
    "quarantine": lambda batch: _single(batch, skips=_quarantine(batch)),
    "quarantine-late": lambda batch: _single(batch, skips=_late(batch)),
    "quarantine-drop": lambda batch: _single(batch, 4, tail="drop", skips=_of_epochs(batch)),
    "quarantine-pad": lambda batch: _single(batch, 4, tail="pad_masked", skips=_of_epochs(batch)),
    "quarantine-mixed": lambda batch: _mixed(batch, _of_mixture(batch)),
}


def plan_of(name: str, batch: int) -> DataPlan:
    """Return the plan with a name.

    >>> plan_of("mixed", 6).mixture[36]
    {'books': 2, 'code': 5, 'web': 5}
    """
    return PLANS[name](batch)
