"""States of training as arrays: what a checkpoint would hold of them, and files to keep them from run to run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

WEIGHT, MASTER, STEP = "weight", "master", "step"

_SEPARATOR = "|"  # no name of a parameter has it


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tensor:
    """One tensor of a state.

    Attributes:
        field: as in a checkpoint: ``weights`` or ``optimizer``.
        parameter: the parameter's name, the same for all that belongs to it.
        role: what it is of this parameter: ``weight``, ``exp_avg``, ``step``, ...; ``buffer`` for
            what no optimizer updates.
        dtype: as the format names it; a bfloat16 array has dtype ``uint16``.
    """

    field: str
    parameter: str
    role: str
    dtype: str
    array: np.ndarray[Any, np.dtype[Any]]

    @property
    def name(self) -> str:
        """The name in the state."""
        return f"{self.field}/{self.parameter}" + (
            "" if self.role in (WEIGHT, "buffer") else f"/{self.role}"
        )

    @property
    def content(self) -> memoryview:
        """The bytes in C order."""
        return np.ascontiguousarray(self.array).reshape(-1).view(np.uint8).data


#: A state: its tensors by name.
Snapshot = Mapping[str, Tensor]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pair:
    """Two states of one training, `gap` steps apart.

    Attributes:
        name: the setting.
        kind: of the rule that may predict one from the other: ``adam``, ``sgd``, or empty.
        options: the optimizer's scalars of the last step, as its param group has them; step counts
            are in the states.
        gradients: those that the last step took, before they were clipped, by parameter; none if
            the gap isn't 1.
    """

    name: str
    kind: str
    gap: int
    lr: float
    options: Mapping[str, object]
    base: Snapshot
    new: Snapshot
    gradients: Mapping[str, np.ndarray[Any, np.dtype[Any]]]

    def steps_of(self, parameter: str) -> tuple[int | None, int | None]:
        """Return how many steps the optimizer has done with a parameter, before and after; None if nobody counted."""
        counts = (state.get(f"optimizer/{parameter}/{STEP}") for state in (self.base, self.new))
        before, after = (None if count is None else int(count.array) for count in counts)
        return before, after

    @property
    def nbytes(self) -> int:
        """Bytes of the newer state."""
        return sum(tensor.array.nbytes for tensor in self.new.values())

    def untouched(self) -> Pair:
        """Return the pair with those tensors alone that are the same in both states."""
        names = [
            n
            for n, tensor in self.new.items()
            if n in self.base and self.base[n].content == tensor.content
        ]
        base, new = ({name: state[name] for name in names} for state in (self.base, self.new))
        return dataclasses.replace(self, kind="", base=base, new=new, gradients={})

    def rounded(self) -> Pair:
        """Return the pair with the weights alone, in bfloat16: a state of its own, of which no rule is known."""
        return dataclasses.replace(
            self, kind="", base=round_weights(self.base), new=round_weights(self.new), gradients={}
        )


def round_weights(state: Snapshot) -> Snapshot:
    """Return the weights of a state in bfloat16, rounded to nearest even as torch casts: a state of its own."""
    return {
        name: dataclasses.replace(
            tensor, dtype="bfloat16", array=tensor.array.astype(ml_dtypes.bfloat16).view(np.uint16)
        )
        for name, tensor in state.items()
        if tensor.role == WEIGHT
    }


def write_snapshot(path: Path, state: Snapshot) -> None:
    """Write a state into a file, whole or not at all."""
    unfinished = path.with_suffix(".unfinished.npz")
    keys = {
        _SEPARATOR.join((tensor.field, tensor.parameter, tensor.role, tensor.dtype)): tensor.array
        for tensor in state.values()
    }
    np.savez(unfinished, allow_pickle=False, **keys)
    unfinished.replace(path)


def read_snapshot(path: Path) -> Snapshot:
    """Return a state that `write_snapshot` wrote."""
    state = {}
    with np.load(path) as arrays:
        for key in arrays.files:
            field, parameter, role, dtype = key.split(_SEPARATOR)
            tensor = Tensor(
                field=field, parameter=parameter, role=role, dtype=dtype, array=arrays[key]
            )
            state[tensor.name] = tensor
    return state
