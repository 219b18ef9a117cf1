"""Arithmetic of figures: percentiles, summaries, paired ratios. Pure: numbers in, numbers out."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measured quantity over all rounds: where its middle lies, and how far it spreads."""

    median: float
    p10: float
    p90: float
    count: int

    def spread(self) -> dict[str, float]:
        """Return the percentiles alone, as a record's `spread` holds them."""
        return {"p10": self.p10, "p90": self.p90}


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile, by linear interpolation between the two nearest values.

    Raises: ValueError without values, or if `percent` isn't between 0 and 100.

    >>> percentile([4.0, 1.0, 2.0, 3.0], 50)
    2.5
    """
    if not values or not 0 <= percent <= 100:
        raise ValueError(f"percentile {percent} of {len(values)} values")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below, above = math.floor(place), math.ceil(place)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def median_of(values: Sequence[float]) -> float:
    """Return the median: half of the values lie on each side of it."""
    return percentile(values, 50)


def summarize(values: Sequence[float]) -> Figure:
    """Return the summary of one quantity over all rounds."""
    return Figure(
        median=median_of(values),
        p10=percentile(values, 10),
        p90=percentile(values, 90),
        count=len(values),
    )


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> Figure:
    """Return the summary of the ratios of each round, ours divided by theirs.

    Paired, since what a machine gives changes from minute to minute: both sides of one round met
    the same minute.

    Raises: ValueError if there aren't equally many, or if one of theirs isn't above zero.

    >>> paired_ratio([1.0, 4.0, 3.0], [2.0, 4.0, 1.0]).median
    1.0
    """
    if len(ours) != len(theirs) or any(value <= 0 for value in theirs):
        raise ValueError(f"no ratios of {list(ours)} to {list(theirs)}")
    return summarize([mine / other for mine, other in zip(ours, theirs, strict=True)])


def floor_all(values: Sequence[float], least: float) -> list[float]:
    """Return the values, none of them below `least`.

    A difference of two wall times may come out at or below zero: it is then less than what the
    clock of the experiment can tell apart, which is what `least` says.
    """
    return [max(value, least) for value in values]
