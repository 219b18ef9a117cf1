"""States of training as arrays, as a checkpoint holds them, and files that keep states."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

WEIGHT = "weight"
MASTER = "master"
STEP = "step"

_SEPARATOR = "|"  # in no parameter's name


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tensor:
    """A tensor of a state.

    Attributes:
        field: the field in a checkpoint: ``weights`` or ``optimizer``.
        parameter: the parameter's name, common to all tensors of the parameter.
        role: the tensor's role for the parameter: ``weight``, ``exp_avg``, ``step``, ...;
            ``buffer`` for tensors without optimizer.
        dtype: the format's name of the dtype; a bfloat16 array has dtype ``uint16``.
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


#: A state: tensors by name.
Snapshot = Mapping[str, Tensor]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pair:
    """Two states of a training, `gap` steps apart.

    Attributes:
        name: the setting.
        kind: the kind of a rule that may predict the newer state: ``adam``, ``sgd``, or empty.
        options: the optimizer's scalars of the last step, as in a param group; step counts are in
            the states.
        gradients: the gradients of the last step before clipping, by parameter; empty unless the
            gap is 1.
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
        """Return a parameter's step counts before and after; None without a count."""
        counts = (state.get(f"optimizer/{parameter}/{STEP}") for state in (self.base, self.new))
        before, after = (None if count is None else int(count.array) for count in counts)
        return before, after

    @property
    def nbytes(self) -> int:
        """Bytes of the newer state."""
        return sum(tensor.array.nbytes for tensor in self.new.values())

    def untouched(self) -> Pair:
        """Return the pair with only the tensors equal in both states."""
        names = [
            n
            for n, tensor in self.new.items()
            if n in self.base and self.base[n].content == tensor.content
        ]
        base, new = ({name: state[name] for name in names} for state in (self.base, self.new))
        return dataclasses.replace(self, kind="", base=base, new=new, gradients={})

    def rounded(self) -> Pair:
        """Return the pair with only the weights, in bfloat16, without a known rule."""
        return dataclasses.replace(
            self, kind="", base=round_weights(self.base), new=round_weights(self.new), gradients={}
        )


def round_weights(state: Snapshot) -> Snapshot:
    """Return a state's weights in bfloat16, rounded to nearest even as in torch's casts."""
    return {
        name: dataclasses.replace(
            tensor, dtype="bfloat16", array=tensor.array.astype(ml_dtypes.bfloat16).view(np.uint16)
        )
        for name, tensor in state.items()
        if tensor.role == WEIGHT
    }


def write_snapshot(path: Path, state: Snapshot) -> None:
    """Write a state to a file atomically."""
    unfinished = path.with_suffix(".unfinished.npz")
    keys = {
        _SEPARATOR.join((tensor.field, tensor.parameter, tensor.role, tensor.dtype)): tensor.array
        for tensor in state.values()
    }
    np.savez(unfinished, allow_pickle=False, **keys)
    unfinished.replace(path)


def read_snapshot(path: Path) -> Snapshot:
    """Return a state written by `write_snapshot`."""
    state = {}
    with np.load(path) as arrays:
        for key in arrays.files:
            field, parameter, role, dtype = key.split(_SEPARATOR)
            tensor = Tensor(
                field=field, parameter=parameter, role=role, dtype=dtype, array=arrays[key]
            )
            state[tensor.name] = tensor
    return state
