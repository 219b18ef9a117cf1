"""Which tensors of a checkpoint belong together: a weight, an optimizer's moments of it, a rounded copy of it.

Names alone are looked at, as page 60 gives them; whether a rule holds is measured afterwards.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from ckptfmt.codecs.prediction.options import number_of
from ckptfmt.codecs.prediction.rule import COPY, LOW
from ckptfmt.documents.tables import TensorKey
from ckptfmt.documents.tree import TensorRef

#: Dtype and global shape of each tensor.
Tensors = Mapping[TensorKey, tuple[str, tuple[int, ...]]]
#: Plain value of each leaf, by field, name and scope.
Leaves = Mapping[TensorKey, object]

#: Moments that a kind needs, the option that tells it from others, and the moment that there may be.
_KINDS: Final = {
    "adam": (("exp_avg", "exp_avg_sq"), "amsgrad", "max_exp_avg_sq"),
    "sgd": (("momentum_buffer",), "momentum", None),
}
_FIELDS: Final = ("weights", "optimizer", "data")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Members:
    """Tensors that may be predicted from each other.

    Attributes:
        kind: of the rule to look for.
        tensors: by role; a rule of this kind has these roles if it holds.
        options: of the parameter's group.
        step: number of steps, or the tensor that has it; None where the kind has none.
    """

    kind: str
    tensors: Mapping[str, TensorKey]
    options: Mapping[str, object] = dataclasses.field(default_factory=dict)
    step: TensorKey | float | None = None


def find_members(tensors: Tensors, leaves: Leaves) -> tuple[Members, ...]:
    """Return candidates for groups, each tensor in one at most: of optimizers first, then weights and their copies.

    Args:
        tensors: dtype and global shape of every tensor.
        leaves: the plain values of fields with optimizers, parsed.
    """
    copies = _Copies(tensors)
    used: set[TensorKey] = set()
    found = []
    for members in _iter_optimized(tensors, leaves, copies):
        keys = set(members.tensors.values())
        if len(keys) == len(members.tensors) and not keys & used:
            used |= keys
            found.append(members)
    for key, (dtype, _) in tensors.items():
        copy = copies.of(key)
        if dtype == "float32" and copy is not None and not {key, copy} & used:
            used |= {key, copy}
            found.append(Members(kind="cast", tensors={"master": key, "weight": copy}))
    return tuple(found)


class _Copies:
    """Tensors of 16 bits, by what comes behind the first step of their names."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors
        self._by_tail: dict[tuple[str, str, tuple[int, ...]], list[TensorKey]] = defaultdict(list)
        for key, (dtype, shape) in tensors.items():
            if dtype in LOW:
                for tail in _tails(key):
                    self._by_tail[tail, key[2], shape].append(key)

    def of(self, key: TensorKey) -> TensorKey | None:
        """Return the only tensor that may be the rounded copy of one in binary32."""
        _, shape = self._tensors[key]
        found = {copy for tail in _tails(key) for copy in self._by_tail.get((tail, key[2], shape), ())}
        return found.pop() if len(found) == 1 else None


def _tails(key: TensorKey) -> set[str]:
    """Return a name, and the same without the key of its module: ``master/fc.weight`` goes with ``fc.weight``."""
    _, name, _ = key
    return {name, name.partition("/")[2] or name}


def _iter_optimized(tensors: Tensors, leaves: Leaves, copies: _Copies) -> Iterator[Members]:
    for (field, name, scope), value in leaves.items():
        if not (isinstance(value, dict) and isinstance(value.get("params"), list)):
            continue
        options = value.get("options")
        if isinstance(options, dict):
            for parameter, state in _iter_states(leaves, field, name, scope, value["params"]):
                members = _members_of(tensors, parameter, state, options, field=field, scope=scope)
                if members is not None:
                    yield _with_copy(members, copies)


def _iter_states(
    leaves: Leaves, field: str, name: str, scope: str, parameters: Iterable[object]
) -> Iterator[tuple[str, Mapping[object, object]]]:
    """Yield the parameters of a group's leaf, and the state of each: their names begin as the group's does."""
    starts = [at for at in range(len(name)) if name.startswith("group/", at) and (at == 0 or name[at - 1] == "/")]
    for parameter in parameters:
        for prefix in (name[:at] for at in starts):
            state = leaves.get((field, f"{prefix}state/{parameter}", scope))
            if isinstance(parameter, str) and isinstance(state, dict):
                yield parameter, state
                break


def _members_of(
    tensors: Tensors,
    parameter: str,
    state: Mapping[object, object],
    options: Mapping[str, object],
    *,
    field: str,
    scope: str,
) -> Members | None:
    held = {key: (field, value.name, scope) for key, value in state.items() if isinstance(value, TensorRef)}
    places = ((at, parameter, where) for at in _FIELDS for where in dict.fromkeys((scope, "global")))
    weight = next((place for place in places if place in tensors), None)
    for kind, (needed, option, more) in _KINDS.items():
        if weight is None or option not in options or not set(needed) <= held.keys():
            continue
        found = {role: held[role] for role in needed}
        if more is not None and options[option] is True and more in held:
            found[more] = held[more]
        found["weight"] = weight
        shape = tensors[weight][1]
        master = _master(tensors, held, shape) if tensors[weight][0] in LOW else None
        if master is not None:
            found |= {"weight": master, COPY: weight}
        if any(tensors.get(key) != ("float32", shape) for role, key in found.items() if role != COPY):
            continue
        step = held.get("step", number_of(state.get("step")))
        return Members(kind=kind, tensors=found, options=options, step=step)
    return None


def _master(tensors: Tensors, held: Mapping[object, TensorKey], shape: tuple[int, ...]) -> TensorKey | None:
    """Return what an optimizer's state has of a weight in binary32, if its name says so."""
    return next(
        (key for name, key in held.items() if "master" in str(name) and tensors.get(key) == ("float32", shape)), None
    )


def _with_copy(members: Members, copies: _Copies) -> Members:
    copy = None if COPY in members.tensors else copies.of(members.tensors["weight"])
    if copy is None:
        return members
    return dataclasses.replace(members, tensors={**members.tensors, COPY: copy})
