"""Entropy floors of coders of single elements. Pure: arrays in, numbers out.

All floors are of order 0: without knowledge of an element's neighbours or of the base's value. A
coder with such knowledge may go below.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any, Final

import numpy as np

from benchmarks.snapshots import Snapshot
from ckptfmt.limits import BLOCK_NBYTES

Array = np.ndarray[Any, np.dtype[Any]]

#: Narrow lanes code steps as single symbols; wider lanes code a step as a length and bits.
_NARROW: Final = 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """The changed part of a state, and the least number of bytes for the changes.

    Attributes:
        elements: the number of elements.
        changed: the number of elements with different bits.
        floor_nbytes: n*H(p) + changed*H(step in ULPs), over all elements at once.
    """

    elements: int
    changed: int
    floor_nbytes: float

    @property
    def fraction(self) -> float:
        """The changed fraction."""
        return self.changed / self.elements if self.elements else 0.0


def entropy(counts: Array) -> float:
    """Return the entropy in bits per element, from the count of each value.

    >>> entropy(np.array([4, 4, 0])) 1.0
    """
    met = counts[counts > 0]
    p = met / met.sum() if met.size else np.ones(1)
    return float(-(p * np.log2(p)).sum() + 0.0)


def entropy_of_changes(elements: int, changed: int) -> float:
    """Return n*H(p) in bits: the cost of the set of changed elements.

    >>> entropy_of_changes(8, 4), entropy_of_changes(8, 0), entropy_of_changes(8, 8) (8.0, 0.0, 0.0)
    """
    return elements * entropy(np.array([changed, elements - changed])) if elements else 0.0


def ordered(lanes: Array) -> Array:
    """Return the bits of floats as integers in the order of the floats: 1 per ULP.

    Args:
        lanes: unsigned integers of 16 or 32 bits, the floats' bits.

    >>> ordered(np.array([0x8001, 0x8000, 0x0000, 0x3F80], np.uint16)).tolist() [-1, 0, 0, 16256]
    """
    bits = 8 * lanes.itemsize
    magnitude = (lanes & ((1 << (bits - 1)) - 1)).astype(np.int64)
    return np.where(lanes >> (bits - 1) != 0, -magnitude, magnitude)


def step_bits(steps: Array, *, lane_nbytes: int) -> float:
    """Return the entropy of all steps in ULPs together, in bits.

    In narrow lanes, each step is a value. Wide lanes have more values than elements, so counts of
    values are meaningless: a step is then a sign and a length, with their entropy, followed by the
    bits below the highest, which count in full. Both agree where neighbouring values are about
    equally likely.
    """
    if steps.size == 0:
        return 0.0
    if lane_nbytes <= _NARROW:
        return steps.size * entropy(np.unique(steps, return_counts=True)[1])
    lengths = np.frexp(np.abs(steps).astype(np.float64))[1].astype(np.int64)
    kinds = np.unique(np.where(steps < 0, -lengths, lengths), return_counts=True)[1]
    return steps.size * entropy(kinds) + float(np.maximum(lengths - 1, 0).sum())


def change_of(base: Snapshot, new: Snapshot, *, roles: Iterable[str] | None = None) -> Change:
    """Return the change between the common tensors of two states, or the tensors of some roles."""
    chosen = None if roles is None else set(roles)
    names = [
        name
        for name, tensor in new.items()
        if name in base and (chosen is None or tensor.role in chosen)
    ]
    floor_bits = 0.0
    elements = 0
    changed = 0
    for lane_nbytes in sorted({new[name].array.itemsize for name in names}):
        steps, counted = [], 0
        for name in (name for name in names if new[name].array.itemsize == lane_nbytes):
            before, after = (_lanes(state[name].array) for state in (base, new))
            counted += after.size
            places = before != after
            steps.append(_steps(before[places], after[places]))
        found = np.concatenate(steps)
        elements += counted
        changed += found.size
        floor_bits += entropy_of_changes(counted, found.size) + step_bits(
            found, lane_nbytes=lane_nbytes
        )
    return Change(elements=elements, changed=changed, floor_nbytes=floor_bits / 8)


def gradient_nbytes(gradients: Iterable[Array], *, narrow: bool) -> float:
    """Return the order-0 entropy of gradients in bytes: the new information in a predictable step.

    Args:
        gradients: fp32 arrays, with values counted together.
        narrow: whether gradients have the precision of bf16. Each value then counts; otherwise,
            sign and exponent have their entropy, and the 23 bits of the mantissa count in full.
    """
    lanes = np.concatenate([_lanes(gradient) for gradient in gradients])
    shift, noise = (16, 0) if narrow else (23, 23)
    return lanes.size * (entropy(np.bincount(lanes >> shift)) + noise) / 8


def gradient_nbytes_by_block(gradients: Iterable[Array], *, narrow: bool) -> float:
    """Return the entropy with separate counts per block: for coders that adapt to blocks."""
    return sum(
        gradient_nbytes([block], narrow=narrow)
        for gradient in gradients
        for block in np.array_split(
            gradient.reshape(-1), max(1, -(-gradient.nbytes // BLOCK_NBYTES))
        )
    )


def moment_nbytes(base: Snapshot, new: Snapshot, *, role: str, decay: float) -> float:
    """Return the order-0 entropy of the changes of first moments, in bytes.

    A moment keeps fewer digits of the gradient than the gradient has where the moment is larger. A
    decoder needs only the kept digits, if second moments and weights depend rarely or never on the
    lost digits. The result may therefore be below the entropy of the gradients.

    Args:
        role: the role of the first moments.
        decay: the factor of the first moments.
    """
    steps = []
    for name, tensor in new.items():
        if tensor.role == role and name in base and base[name].content != tensor.content:
            after, before = (state[name].array.ravel().astype(np.float64) for state in (new, base))
            ulp = np.spacing(np.abs(tensor.array.ravel())).astype(np.float64)
            steps.append(np.rint((after - float(np.float32(decay)) * before) / ulp))
    return step_bits(np.concatenate(steps), lane_nbytes=4) / 8


def _lanes(array: Array) -> Array:
    return np.ascontiguousarray(array).reshape(-1).view(np.dtype(f"u{array.itemsize}"))


def _steps(before: Array, after: Array) -> Array:
    """Return the difference in ULPs for floats; the plain difference for 8-byte values."""
    if before.itemsize > 4:
        return (after - before).astype(np.int64)
    steps = ordered(after) - ordered(before)
    # From -0.0 to 0.0, the distance is 0, but the bits change: use a step unknown to other floats.
    steps[steps == 0] = math.trunc(2**33)
    return steps
