"""A State looked at once: its units, what its modules hold, what its parameters are called, where its tensors lie."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from ckptfmt import limits
from ckptfmt.adapters import torch_side
from ckptfmt.adapters.names import join_name, prefix_of
from ckptfmt.adapters.units import Kind, Unit, walk
from ckptfmt.errors import Code, err
from ckptfmt.state import State


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Live:
    """What a State holds just now.

    Attributes:
        units: in the order in which they are loaded.
        views: what each module holds, by the number of its unit.
        entries: the live tensors of all modules of a field, tied ones once.
        names: all names of each parameter, by its id; those of weights stand above those of extra.
        devices: torch devices that hold something, as torch prints them.
        meshes: of DTensors; each once.
        worker_count: how many workers there are.
    """

    units: tuple[Unit, ...]
    views: dict[int, Any]
    entries: dict[str, list[Any]]
    names: dict[int, tuple[str, ...]]
    devices: frozenset[str]
    meshes: list[Any]
    worker_count: int

    @classmethod
    def of(cls, state: State, *, worker: int, worker_count: int) -> Live:
        """Look at a state. Raises: StateError(ARGUMENT, STATE_UNSUPPORTED, STATE_NAME)."""
        if not 0 <= worker < worker_count:
            raise err(Code.ARGUMENT, f"worker {worker} of {worker_count}", where="writer")
        units = tuple(walk(state, worker=worker))
        side = torch_side()
        if side is None:
            return cls(
                units=units,
                views={},
                entries={},
                names={},
                devices=frozenset(),
                meshes=[],
                worker_count=worker_count,
            )
        views = {
            number: side.view_module(
                unit.value,
                field=unit.field,
                prefix=prefix_of(unit.path),
                scope=unit.scope,
                worker=worker,
                worker_count=worker_count,
            )
            for number, unit in enumerate(units)
            if unit.kind is Kind.MODULE
        }
        entries: dict[str, list[Any]] = {}
        for number, view in views.items():
            entries.setdefault(units[number].field, []).extend(view.entries)
        merged = {field: side.merge_tied(found) for field, found in entries.items()}
        tensors = [entry.tensor for found in merged.values() for entry in found]
        tensors += [tensor for unit in units if unit.kind is Kind.TREE for _, tensor in _tensors(side, unit)]
        return cls(
            units=units,
            views=views,
            entries=merged,
            names=_parameter_names(side, units, views, merged),
            devices=side.devices_of(tensors),
            meshes=side.meshes_of(tensors),
            worker_count=worker_count,
        )


def optimizer_prefix(unit: Unit) -> str:
    """Return what an optimizer's names begin with: nothing in State(optimizer=...), where its parameters' do."""
    return prefix_of(unit.path) if unit.field != "optimizer" or unit.path[:1] == ("extra",) else ""


def _parameter_names(
    side: ModuleType, units: tuple[Unit, ...], views: dict[int, Any], merged: dict[str, list[Any]]
) -> dict[int, tuple[str, ...]]:
    names: dict[int, tuple[str, ...]] = {}
    for field in ("data", "optimizer", "weights"):  # later ones stand above
        for number, unit in enumerate(units):
            if unit.field == field and number in views:
                names |= views[number].parameters
            elif unit.field == field and unit.kind is Kind.TREE:
                names |= {id(tensor): (name,) for name, tensor in _tensors(side, unit)}
        names |= {id(entry.tensor): entry.names for entry in merged.get(field, ())}
    return names


def _tensors(side: ModuleType, unit: Unit) -> Iterator[tuple[str, Any]]:
    def find(value: object, path: tuple[object, ...]) -> Iterator[tuple[str, Any]]:
        if len(path) > limits.MSGPACK_DEPTH:
            return  # refused by name when it is encoded
        if side.is_tensor(value):
            yield join_name(path), value
        elif isinstance(value, dict):
            for key, item in value.items():
                yield from find(item, (*path, key))
        elif isinstance(value, list | tuple):
            for index, item in enumerate(value):
                yield from find(item, (*path, index))

    return find(unit.value, unit.path)
