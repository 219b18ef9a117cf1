"""Floats as everyone computes them: one rounding for each operation, and none that the hardware leaves out."""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ckptfmt.errors import Code, err

#: binary32, and what is on its way to it.
Floats: TypeAlias = NDArray[np.float32]
Doubles: TypeAlias = NDArray[np.float64]

_QUIET_NAN: Final = {"bfloat16": 0x7FC0, "float16": 0x7E00}
_HALF: Final = np.uint32(0x7FFF)
_ONE: Final = np.uint32(1)
_UPPER: Final = np.uint32(16)


def check_float_environment() -> None:
    """Check that this thread's floating point keeps denormals and rounds to nearest, ties to even.

    A library may turn denormals to zero for its thread and for those it starts, and numpy then does so too.

    Raises: StateError(FLOAT_ENVIRONMENT).
    Spec: REQ-PRE-003.
    """
    for factor, values, addend, products, sums in _PROBES:
        # Bits are compared, since a comparison of floats takes a denormal for zero in the very environment looked for.
        product = np.multiply(values, factor)
        if (product.view(products.dtype) != products).any():
            detail = "denormal numbers are flushed to zero in this thread"
        elif ((product + addend).view(sums.dtype) != sums).any():
            detail = "this thread flushes denormal numbers to zero, or doesn't round to nearest"
        else:
            continue
        raise err(Code.FLOAT_ENVIRONMENT, detail, requirement="REQ-PRE-003")


def _probe(digits: int, least: int, words: type[np.unsignedinteger[Any]], floats: str) -> tuple[NDArray[Any], ...]:
    """Return a factor, values, what is added, and the bits of the products and of the sums.

    By bits, since this thread's own arithmetic is what is in question. Half the least normal number, twice, is that
    number; 1 and half a digit is a tie that goes to 1, three quarters of a digit more than a tie.
    """
    width = np.dtype(words).itemsize * 8
    bias = (1 << (width - digits - 2)) - 1
    one, sign = bias << digits, 1 << (width - 1)
    half, three_quarters = (bias - digits - 1) << digits, (bias - digits - 1) << digits | 1 << (digits - 1)
    rows = [
        # value, addend, product with 1/2, sum of product and addend
        (least, least >> 1, least >> 1, least),
        (one + (1 << digits), half, one, one),
        (one + (1 << digits), three_quarters, one, one + 1),
        (sign | one + (1 << digits), sign | half, sign | one, sign | one),
        (sign | one + (1 << digits), sign | three_quarters, sign | one, sign | one + 1),
    ]
    values, addend, products, sums = (np.array(column * 4, words) for column in zip(*rows, strict=True))
    factor = np.array([bias - 1 << digits], words).view(floats)
    return factor, values.view(floats), addend.view(floats), products, sums


_PROBES: Final = (_probe(23, 1 << 23, np.uint32, "<f4"), _probe(52, 1 << 52, np.uint64, "<f8"))


def bits_of(values: Floats) -> NDArray[np.uint32]:
    """Return the bits of binary32 numbers."""
    return values.view(np.uint32)


def multiply_add(factor: Any, values: NDArray[Any], addend: NDArray[Any], *, separate: bool) -> Floats:  # noqa: ANN401 - array or scalar
    """Return factor * values + addend in binary32, with one rounding at the end, or with two.

    Args:
        factor: scalar or array.
        values: array.
        addend: array; of binary64 if it was left unrounded.
        separate: round the product to binary32 first.

    Spec: REQ-PRE-002.
    """
    if separate:
        return np.asarray(factor * values + addend, np.float32)
    exact: Doubles = values.astype(np.float64)
    exact *= factor
    exact += addend
    return exact.astype(np.float32)


def round_low(values: Floats, precision: str) -> NDArray[np.uint16]:
    """Return the bits of numbers rounded to `precision`, ``bfloat16`` or ``float16``: to nearest, ties to even.

    Spec: REQ-PRE-004.
    """
    if precision == "float16":
        low = values.astype(np.float16).view(np.uint16)
    else:
        bits = bits_of(values)
        rounded = bits >> _UPPER
        rounded &= _ONE
        rounded += _HALF
        rounded += bits
        rounded >>= _UPPER
        low = rounded.astype(np.uint16)
    unordered = np.isnan(values)
    if unordered.any():
        # The payload of a NaN depends on the machine, and rounding one may carry it to infinity.
        low[unordered] = _QUIET_NAN[precision]
    return low


def from_low(low: NDArray[np.uint16], precision: str) -> Floats:
    """Return numbers of `precision`, given by their bits, as binary32; exact."""
    if precision == "float16":
        return low.view(np.float16).astype(np.float32)
    wide = low.astype(np.uint32)
    wide <<= _UPPER
    return wide.view(np.float32)


def without_nan(predicted: Floats, base: Floats) -> Floats:
    """Return `predicted` with the bits of `base` wherever it isn't a number. May change `predicted`.

    Spec: REQ-PRE-005.
    """
    unordered = np.isnan(predicted)
    if unordered.any():
        bits_of(predicted)[unordered] = bits_of(base)[unordered]
    return predicted
