"""Arithmetic of figures: percentiles, summaries, paired ratios. Pure: numbers in, numbers out."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A measured quantity over all rounds: median and spread."""

    median: float
    p10: float
    p90: float
    count: int

    def spread(self) -> dict[str, float]:
        """Return the percentiles for a record's `spread`."""
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
    below = math.floor(place)
    above = math.ceil(place)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def median_of(values: Sequence[float]) -> float:
    """Return the median."""
    return percentile(values, 50)


def summarize(values: Sequence[float]) -> Figure:
    """Return the summary of a quantity over all rounds."""
    return Figure(
        median=median_of(values),
        p10=percentile(values, 10),
        p90=percentile(values, 90),
        count=len(values),
    )


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> Figure:
    """Return the summary of the ratios of each round, ours divided by theirs.

    Ratios are paired, since a machine's performance changes from minute to minute: both sides of a
    round run within the same minute.

    Raises: ValueError for unequal lengths, or a value of theirs that isn't above zero.

    >>> paired_ratio([1.0, 4.0, 3.0], [2.0, 4.0, 1.0]).median 1.0
    """
    if len(ours) != len(theirs) or any(value <= 0 for value in theirs):
        raise ValueError(f"no ratios of {list(ours)} to {list(theirs)}")
    return summarize([mine / other for mine, other in zip(ours, theirs, strict=True)])


def floor_all(values: Sequence[float], least: float) -> list[float]:
    """Return the values, raised to at least `least`.

    A difference of two wall times may be zero or negative: the difference is then below the
    resolution `least` of the experiment's clock.
    """
    return [max(value, least) for value in values]
