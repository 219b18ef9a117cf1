"""Entropy floors: what no coder that looks at one element at a time can go below. Pure: arrays in, numbers out.

All of them are of order 0: nothing is known of an element's neighbours, nor of its base's value. A
coder that looks at these may go below.
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

#: Of the lanes whose steps are told one by one; those of wider ones are told as a length and its
#: bits.
_NARROW: Final = 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """How much of a state changed, and the fewest bytes in which that can be said.

    Attributes:
        elements: how many there are.
        changed: of how many of them the bits differ.
        floor_nbytes: n*H(p) + changed*H(step in ULPs), over all elements at once.
    """

    elements: int
    changed: int
    floor_nbytes: float

    @property
    def fraction(self) -> float:
        """The part that changed."""
        return self.changed / self.elements if self.elements else 0.0


def entropy(counts: Array) -> float:
    """Return the entropy in bits of an element, of which each value was met so often.

    >>> entropy(np.array([4, 4, 0]))
    1.0
    """
    met = counts[counts > 0]
    p = met / met.sum() if met.size else np.ones(1)
    return float(-(p * np.log2(p)).sum() + 0.0)


def entropy_of_changes(elements: int, changed: int) -> float:
    """Return n*H(p) in bits: what it takes to say which elements changed.

    >>> entropy_of_changes(8, 4), entropy_of_changes(8, 0), entropy_of_changes(8, 8)
    (8.0, 0.0, 0.0)
    """
    return elements * entropy(np.array([changed, elements - changed])) if elements else 0.0


def ordered(lanes: Array) -> Array:
    """Return the bits of floats as integers in the order of the floats: neighbours differ by one ULP, that is by 1.

    Args:
        lanes: unsigned integers of 16 or 32 bits, the floats' bits.

    >>> ordered(np.array([0x8001, 0x8000, 0x0000, 0x3F80], np.uint16)).tolist()
    [-1, 0, 0, 16256]
    """
    bits = 8 * lanes.itemsize
    magnitude = (lanes & ((1 << (bits - 1)) - 1)).astype(np.int64)
    return np.where(lanes >> (bits - 1) != 0, -magnitude, magnitude)


def step_bits(steps: Array, *, lane_nbytes: int) -> float:
    """Return the entropy of steps in ULPs, in bits, of all of them together.

    Of narrow lanes each step is a value of its own. Wide ones have more values than there are
    elements, which makes counting them meaningless: a step is then its sign and length, with their
    entropy, and the bits below the highest, which count whole. Where neighbouring values are about
    as likely as each other that is the same.
    """
    if steps.size == 0:
        return 0.0
    if lane_nbytes <= _NARROW:
        return steps.size * entropy(np.unique(steps, return_counts=True)[1])
    lengths = np.frexp(np.abs(steps).astype(np.float64))[1].astype(np.int64)
    kinds = np.unique(np.where(steps < 0, -lengths, lengths), return_counts=True)[1]
    return steps.size * entropy(kinds) + float(np.maximum(lengths - 1, 0).sum())


def change_of(base: Snapshot, new: Snapshot, *, roles: Iterable[str] | None = None) -> Change:
    """Return what changed between the tensors, or those of some roles, that both states have."""
    chosen = None if roles is None else set(roles)
    names = [
        name
        for name, tensor in new.items()
        if name in base and (chosen is None or tensor.role in chosen)
    ]
    floor_bits, elements, changed = 0.0, 0, 0
    for lane_nbytes in sorted({new[name].array.itemsize for name in names}):
        steps, counted = [], 0
        for name in (name for name in names if new[name].array.itemsize == lane_nbytes):
            before, after = (_lanes(state[name].array) for state in (base, new))
            counted += after.size
            places = before != after
            steps.append(_steps(before[places], after[places]))
        found = np.concatenate(steps)
        elements, changed = elements + counted, changed + found.size
        floor_bits += entropy_of_changes(counted, found.size) + step_bits(
            found, lane_nbytes=lane_nbytes
        )
    return Change(elements=elements, changed=changed, floor_nbytes=floor_bits / 8)


def gradient_nbytes(gradients: Iterable[Array], *, narrow: bool) -> float:
    """Return the order-0 entropy of gradients in bytes: what is new in a step of which all else can be predicted.

    Args:
        gradients: fp32 arrays; their values are counted together.
        narrow: whether they have the precision of bf16. Then each of their values counts; otherwise
            sign and exponent have their entropy, and the 23 bits of the mantissa count whole.
    """
    lanes = np.concatenate([_lanes(gradient) for gradient in gradients])
    shift, noise = (16, 0) if narrow else (23, 23)
    return lanes.size * (entropy(np.bincount(lanes >> shift)) + noise) / 8


def gradient_nbytes_by_block(gradients: Iterable[Array], *, narrow: bool) -> float:
    """Return the same, each block counted on its own: for coders that adapt to each."""
    return sum(
        gradient_nbytes([block], narrow=narrow)
        for gradient in gradients
        for block in np.array_split(
            gradient.reshape(-1), max(1, -(-gradient.nbytes // BLOCK_NBYTES))
        )
    )


def moment_nbytes(base: Snapshot, new: Snapshot, *, role: str, decay: float) -> float:
    """Return the order-0 entropy of what moved the first moments, in bytes.

    A moment keeps fewer digits of its gradient than the gradient has where it is the larger of the
    two: what of them it keeps is all that a decoder needs, if second moments and weights depend on
        the others nowhere or seldom. So this may
    be below the entropy of the gradients.

    Args:
        role: of the first moments.
        decay: what they were multiplied by.
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
    """Return how many ULPs lie between, for floats; of 8 bytes, which are step counts and the like, the difference."""
    if before.itemsize > 4:
        return (after - before).astype(np.int64)
    steps = ordered(after) - ordered(before)
    # From -0.0 to 0.0 there is no distance, and a change nevertheless: one that no other float has.
    steps[steps == 0] = math.trunc(2**33)
    return steps
