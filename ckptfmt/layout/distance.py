"""How far the elements of one block are from those of another: how many differ, by how much, by how many ULPs. Pure."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np

from ckptfmt.dtypes import DTYPES

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: Elements without an order: they differ or don't.
_NO_NUMBERS: Final = frozenset({"bool", "float4_e2m1fn_x2"})
#: A float without a sign, of which a step is a factor of two.
_UNSIGNED_FLOATS: Final = frozenset({"float8_e8m0fnu"})
#: The least number of each number of binary digits, from one digit on.
_POWERS: Final = np.array([1 << digits for digits in range(64)], np.uint64)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Distance:
    """How far elements are from each other.

    Attributes:
        element_count: how many were compared.
        changed_count: how many have other bits; a complex one counts once.
        nan_count: how many of these are no number on one side at least, and so are nowhere.
        max_abs: the greatest difference of two numbers; None where no two were compared.
        max_ulps: the greatest number of floats from one number to the other, both zeros being one; None of what isn't
            a float, and where no two were compared.
        ulp_counts: how many numbers are how many ULPs apart: at k those with k binary digits, so that at 0 are those
            that are equal but for the sign of a zero, at 1 those of one ULP, at 2 those of two or three.
    """

    element_count: int = 0
    changed_count: int = 0
    nan_count: int = 0
    max_abs: float | int | None = None
    max_ulps: int | None = None
    ulp_counts: tuple[int, ...] = ()

    @property
    def median_ulps(self) -> int | None:
        """Return a number of ULPs, as few as binary digits tell, within which at least half of the changed ones are."""
        half, seen = sum(self.ulp_counts) / 2, 0
        for digits, count in enumerate(self.ulp_counts):
            seen += count
            if count and seen >= half:
                return min((1 << digits) - 1, self.max_ulps or 0)
        return None

    def add(self, other: Distance) -> Self:
        """Return the distance of these elements and others."""
        return type(self)(
            element_count=self.element_count + other.element_count,
            changed_count=self.changed_count + other.changed_count,
            nan_count=self.nan_count + other.nan_count,
            max_abs=_greater(self.max_abs, other.max_abs),
            max_ulps=_greater(self.max_ulps, other.max_ulps),
            ulp_counts=tuple(map(sum, itertools.zip_longest(self.ulp_counts, other.ulp_counts, fillvalue=0))),
        )


def measure(one: memoryview, other: memoryview, dtype: str) -> Distance:
    """Return how far elements are from each other, given as bytes, as many of one as of the other.

    >>> one, other = (np.array(values, "<f4").data.cast("B") for values in ([1, 2, 0.0], [1, 2.5, -0.0]))
    >>> measure(one, other, "float32")
    Distance(element_count=3, changed_count=2, nan_count=0, max_abs=0.5, max_ulps=2097152, ulp_counts=(1, 0, ..., 1))
    """
    nbytes = DTYPES[dtype].nbytes
    count = one.nbytes // nbytes
    rows = [np.frombuffer(content, np.uint8).reshape(count, nbytes) for content in (one, other)]
    changed = np.flatnonzero((rows[0] != rows[1]).any(axis=1))
    found = Distance(element_count=count, changed_count=len(changed))
    if not len(changed) or dtype in _NO_NUMBERS:
        return found
    lane_nbytes = nbytes // 2 if dtype.startswith("complex") else nbytes
    words = [row[changed].reshape(-1).view(f"<u{lane_nbytes}") for row in rows]
    if not dtype.startswith(("float", "bfloat", "complex")):
        gaps = _gaps(words[0], words[1], is_signed=dtype.startswith("int"))
        return dataclasses.replace(found, max_abs=int(gaps.max()))
    return found.add(_measure_floats(words[0], words[1], dtype, lanes=nbytes // lane_nbytes))


def _measure_floats(one: NDArray[Any], other: NDArray[Any], dtype: str, *, lanes: int) -> Distance:
    """Return what is to be said of floats of which some bits differ, in each element of so many lanes."""
    import ml_dtypes  # noqa: PLC0415 - a twentieth of a second that other commands needn't pay

    kind = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}.get(dtype, dtype)
    floats = np.dtype(getattr(ml_dtypes, kind, None) or kind)
    with np.errstate(invalid="ignore", over="ignore"):  # of NaNs, and of two that are infinitely far
        values = [words.view(floats).astype(np.float64) for words in (one, other)]
        gaps = np.abs(values[0] - values[1])
    are_numbers = ~(np.isnan(values[0]) | np.isnan(values[1]))
    nan_count = int((~are_numbers.reshape(-1, lanes).all(axis=1)).sum())
    compared = are_numbers & (one != other)  # of a complex one, the other half may be as it was
    if not compared.any():
        return Distance(nan_count=nan_count)
    is_signed = kind not in _UNSIGNED_FLOATS
    ordered = [_in_order(words[compared]) if is_signed else words[compared] for words in (one, other)]
    steps = _gaps(ordered[0], ordered[1], is_signed=is_signed).astype(np.uint64)
    return Distance(
        nan_count=nan_count,
        max_abs=float(gaps[compared].max()),
        max_ulps=int(steps.max()),
        ulp_counts=tuple(np.bincount(np.searchsorted(_POWERS, steps, "right")).tolist()),
    )


def _in_order(words: NDArray[Any]) -> NDArray[Any]:
    """Return integers that count floats from zero on, upwards and downwards; both zeros are 0."""
    bits = 8 * words.itemsize - 1
    signed = words.view(f"<i{words.itemsize}")
    magnitude = signed & ((1 << bits) - 1)
    ordered: NDArray[Any] = np.where(signed < 0, -magnitude, magnitude)
    return ordered


def _gaps(one: NDArray[Any], other: NDArray[Any], *, is_signed: bool) -> NDArray[Any]:
    """Return the differences of integers, which may be more than a signed one of their size holds."""
    width = one.itemsize
    if is_signed:
        one, other = one.view(f"<i{width}"), other.view(f"<i{width}")
    low, high = np.minimum(one, other), np.maximum(one, other)
    gaps: NDArray[Any] = high.view(f"<u{width}") - low.view(f"<u{width}")
    return gaps


def _greater(one: Any, other: Any) -> Any:  # noqa: ANN401 - numbers of one kind
    """Return the greater of two, either of which may be None."""
    return max((value for value in (one, other) if value is not None), default=None)
