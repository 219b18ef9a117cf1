"""Inspect a State: its units, each with its form of saving; its modules, parameters and devices."""

from __future__ import annotations

import dataclasses
import functools
import operator
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from types import ModuleType
from typing import Any, Final, TypeGuard

import numpy as np

from ckptfmt import limits
from ckptfmt.adapters import Sides, find_sides, torch_side
from ckptfmt.adapters.live_trees import GLOBAL, join_name, prefix_of, too_deep, worker_scope
from ckptfmt.adapters.streamed_data import list_losses
from ckptfmt.box import Box
from ckptfmt.documents.tree import PLAIN
from ckptfmt.dtypes import DTYPES
from ckptfmt.errors import Code, err
from ckptfmt.state import FirstWorker, Parts, PerWorker, State, place_of
from ckptfmt.write.snapshot import TensorSink, TensorSource


class Kind(Enum):
    """The form in which a unit is saved and loaded."""

    MODULE = "module"
    OPTIMIZER = "optimizer"
    STATEFUL = "stateful"
    PIECE = "piece"
    GENERATOR = "generator"
    TREE = "tree"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Unit:
    """An object of a State that is saved as a whole.

    Attributes:
        field: the field in which the object is saved.
        path: the keys that lead to the object within the field; empty for a whole field.
        scope: ``global``, or this worker's scope beneath a `PerWorker`.
        kind: the form of saving.
        value: the object.
        put: replaces the object in its container; None if the container is immutable.
        is_given: whether this worker contributes the object to a save. Beneath a `FirstWorker` only
            worker 0 does.
        name: the path as a name.
        wrapper: the object around an optimizer in `value`; None without one.
    """

    field: str
    path: tuple[object, ...]
    name: str
    scope: str
    kind: Kind
    value: Any
    put: Callable[[object], None] | None
    is_given: bool = True
    wrapper: object = None


#: The report for an optimizer with a learning-rate schedule but without a saved scheduler.
NO_SCHEDULE: Final = (
    "the optimizer's groups have initial_lr, as schedulers of learning rates set it, and no"
    " scheduler's state is saved:"
    ' give State(extra={"scheduler": scheduler})'
)

#: Containers whose items become units. Instances of subclasses are objects of their own.
_WALKED: Final = (dict, OrderedDict, list, tuple, deque)
#: Types of values without parts, which are trees of their own.
_LEAVES: Final[frozenset[type]] = PLAIN | {np.ndarray}


def walk(state: State, *, worker: int, sides: Sides | None = None) -> Iterator[Unit]:
    """Yield the units of weights, extra, optimizer and data, in the order of loading.

    Args:
        state: the state.
        worker: number of this worker, from 0.
        sides: the modules for torch and JAX; None to look the modules up.
    """
    walker = _Walker(worker, torch_side() if sides is None else sides.torch)

    def field(name: str) -> Iterator[Unit]:
        return walker.units(
            name, (), GLOBAL, getattr(state, name), functools.partial(setattr, state, name)
        )

    yield from field("weights")
    extra = state.extra or {}
    for key, value in extra.items():
        yield from walker.units("optimizer", ("extra", key), GLOBAL, value, _putter(extra, key))
    yield from field("optimizer")
    yield from field("data")


def list_doubts(state: State, *, worker: int) -> list[str]:
    """Return a sentence for each likely mistake in a State.

    The first case is an optimizer with a state saved by the positions of the parameters, not by
    their names. The second case is a learning-rate schedule without a scheduler in the State. The
    third case is a position in the data that the data's library can't restore.
    """
    side = torch_side()
    units = list(walk(state, worker=worker))
    groups = [
        group for unit in units if unit.kind is Kind.OPTIMIZER for group in unit.value.param_groups
    ]
    has_schedule = any("initial_lr" in group for group in groups)
    is_unsaved = has_schedule and not any(may_be_schedule(unit.name, unit.value) for unit in units)
    found = list_losses(unit.value for unit in units if unit.field == "data")
    found += [f"SCHEDULER_NOT_SAVED: {NO_SCHEDULE}"] * is_unsaved
    return found + [
        f"SAVED_BY_POSITION: {unit.field}:{unit.name} is a {type(unit.value).__qualname__}, with a"
        " state_dict of numbered parameters, which loads only into the same order and layout;"
        " to save by names, give the wrapped optimizer"
        for unit in units
        if side is not None and _is_numbered(unit, side)
    ]


def _is_numbered(unit: Unit, side: Any) -> bool:
    # Some optimizers have a state_dict on one process alone.
    return unit.is_given and unit.kind is Kind.STATEFUL and bool(side.is_numbered(unit.value))


def may_be_schedule(name: str, value: object) -> bool:
    """Return whether a value may be a learning-rate scheduler, or the state of a scheduler."""
    if "sched" in name.lower() or "last_epoch" in name or hasattr(value, "last_epoch"):
        return True
    inner = (
        value.values()
        if isinstance(value, Mapping)
        else value
        if isinstance(value, list | tuple)
        else ()
    )
    return (isinstance(value, Mapping) and "last_epoch" in value) or any(
        may_be_schedule("", one) for one in inner
    )


def iter_tensors(state: State) -> Iterator[tuple[str, Any]]:
    """Yield the torch tensors of a state's modules and mappings, each with its place.

    These are parameters, buffers, and tensors in trees. The state of optimizers is excluded.
    Without torch, no tensor is yielded.
    """
    side: Any = torch_side()
    for unit in walk(state, worker=0) if side is not None else ():
        place = place_of(unit.field, unit.name)
        if unit.kind is Kind.MODULE:
            for found in (unit.value.named_parameters(), unit.value.named_buffers()):
                yield from ((f"{place}.{name}", tensor) for name, tensor in found)
        elif unit.kind is Kind.TREE:
            yield from ((f"{unit.field}:{name}", tensor) for name, tensor in _tensors(side, unit))


def iter_tensor_readers(state: State) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the places of the tensors of `iter_tensors`, each with a function that reads the place.

    A program may replace the tensor in a place at every step. The function returns the present
    tensor, or None if the place no longer exists.
    """
    side: Any = torch_side()
    for unit in walk(state, worker=0) if side is not None else ():
        place = place_of(unit.field, unit.name)
        if unit.kind is Kind.MODULE:
            yield from ((f"{place}.{name}", read) for name, read in side.tensor_readers(unit.value))
        elif unit.kind is Kind.TREE:
            for path, tensor in _tensor_paths(side, unit):
                read = functools.partial(_read_path, state, unit.field, path)
                if read() is tensor:
                    yield f"{unit.field}:{join_name(path)}", read


def _read_path(state: State, field: str, path: tuple[object, ...]) -> Any:
    is_extra = field == "optimizer" and path[:1] == ("extra",)
    value: Any = getattr(state, "extra" if is_extra else field)
    for key in path[1:] if is_extra else path:
        try:
            value = _unwrapped(value)[key]
        except (LookupError, TypeError):
            return None
    return _unwrapped(value)


def _unwrapped(value: Any) -> Any:
    while isinstance(value, PerWorker | FirstWorker):
        value = value.value
    return value


class _Walker:
    def __init__(self, worker: int, side: Any) -> None:
        self._worker = worker
        self._side = side
        self._leaves = _LEAVES if side is None else _LEAVES | side.TENSOR_TYPES

    def _counts_for_all(self, unit: Unit) -> bool:
        """Return whether this worker's value beneath a `FirstWorker` is saved.

        Raises: StateError(ARGUMENT).
        """
        if unit.scope != GLOBAL or unit.kind in (
            Kind.MODULE,
            Kind.OPTIMIZER,
            Kind.PIECE,
            Kind.GENERATOR,
        ):
            what = (
                "a value of one worker alone"
                if unit.scope != GLOBAL
                else type(unit.value).__qualname__
            )
            raise err(
                Code.ARGUMENT,
                (
                    f"FirstWorker holds {what}; worker 0's is taken of plain values and of objects"
                    " with a state_dict"
                ),
                where=place_of(unit.field, unit.name),
                remedy="Give modules, optimizers, generators and tensor sources as they are, and"
                " PerWorker outside of"
                " FirstWorker.",
            )
        return self._worker == 0

    def units(
        self,
        field: str,
        path: tuple[object, ...],
        scope: str,
        value: object,
        put: Callable[[object], None] | None,
    ) -> Iterator[Unit]:
        if value is None and not path:
            return
        if isinstance(value, PerWorker):
            scope = worker_scope(self._worker)
            put = functools.partial(setattr, value, "value")
            yield from self.units(field, path, scope, value.value, put)
            return
        if isinstance(value, FirstWorker):
            for unit in self.units(
                field, path, scope, value.value, functools.partial(setattr, value, "value")
            ):
                yield dataclasses.replace(unit, is_given=self._counts_for_all(unit))
            return
        if isinstance(value, Parts):
            yield from self._parts(field, path, scope, value)
            return
        if len(path) > limits.MSGPACK_DEPTH:
            raise too_deep(place_of(field, join_name(path[:4])))
        side = self._side
        kind = Kind.TREE
        wrapper: object = None
        if type(value) in _WALKED:
            if not self._are_plain(value):
                for key, item in _items(value):
                    yield from self.units(field, (*path, key), scope, item, _putter(value, key))
                return
        elif type(value) not in self._leaves:
            given = value
            value = value if side is None else side.unwrap_optimizer(value)
            wrapper = None if value is given else given
            if side is not None and side.is_plain_loader(value):
                value = side.position_of(value, where=place_of(field, join_name(path)))
                scope = worker_scope(self._worker)
            kind = _kind_of(value, side)
        name = join_name(path) if path else ""
        yield Unit(
            field=field,
            path=path,
            name=name,
            scope=scope,
            kind=kind,
            value=value,
            put=put,
            wrapper=wrapper,
        )

    def _are_plain(self, container: object, depth: int = 0) -> bool:
        """Return whether a container holds plain values, tensors and other values of trees only."""
        kinds = self._leaves
        values: Any = container.values() if isinstance(container, dict) else container
        if kinds.issuperset(map(type, values)):
            return True
        return all(self._is_plain(value, depth + 1) for value in values if type(value) not in kinds)

    def _is_plain(self, value: object, depth: int) -> bool:
        if type(value) in _WALKED:
            # The encoder rejects values that nest too deeply.
            return depth > limits.MSGPACK_DEPTH or self._are_plain(value, depth)
        side = self._side
        if isinstance(value, PerWorker | FirstWorker | Parts):
            return False
        # A load must not replace a torch data loader without a position.
        is_loader = side is not None and side.is_plain_loader(value)
        return not is_loader and _kind_of(value, side) is Kind.TREE

    def _parts(
        self, field: str, path: tuple[object, ...], scope: str, value: Parts
    ) -> Iterator[Unit]:
        """Yield the modules of a `Parts` as units with the same name.

        Raises: StateError(ARGUMENT).
        """
        name = join_name(path)
        for part in value.modules:
            if _kind_of(part, self._side) is not Kind.MODULE:
                detail = f"Parts holds a {type(part).__qualname__}, which isn't a module"
                raise err(Code.ARGUMENT, detail, where=place_of(field, name))
            yield Unit(
                field=field,
                path=path,
                name=name,
                scope=scope,
                kind=Kind.MODULE,
                value=part,
                put=None,
            )


def _kind_of(value: object, side: Any) -> Kind:
    if side is not None and side.is_module(value):
        return Kind.MODULE
    if side is not None and side.is_plain_optimizer(value):
        return Kind.OPTIMIZER
    if is_piece(value):
        return Kind.PIECE
    if is_generator(value, side):
        return Kind.GENERATOR
    stateful = not isinstance(value, type) and all(
        callable(getattr(value, method, None)) for method in ("state_dict", "load_state_dict")
    )
    return Kind.STATEFUL if stateful else Kind.TREE


def is_generator(value: object, side: Any) -> bool:
    """Return whether a value is a random-number generator with a state that can be saved.

    Args:
        side: the result of `torch_side`.
    """
    if type(value) is random.Random or isinstance(
        value, np.random.RandomState | np.random.Generator
    ):
        return True
    return side is not None and bool(side.is_generator(value))


def _items(value: Any) -> list[tuple[object, object]]:
    return list(value.items()) if isinstance(value, dict) else list(enumerate(value))


def _putter(container: object, key: object) -> Callable[[object], None] | None:
    if not isinstance(container, dict | list | deque):
        return None
    return functools.partial(operator.setitem, container, key)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Live:
    """A snapshot of a State's structure. Without torch only the units are filled in.

    Attributes:
        units: the units, in the order of loading.
        worker_count: the number of workers.
        views: the contents of each module, by the index of its unit.
        entries: the live tensors of all modules of a field, each tied tensor once.
        names: all names of each parameter, by the parameter's id. Names in weights precede names in
            extra.
        devices: the torch devices of all tensors, as torch prints them.
        meshes: the distinct meshes of DTensors.
        jax_facts: facts that determine bits of JAX arrays in the state.
        sides: the modules for torch and JAX.
    """

    units: tuple[Unit, ...]
    worker_count: int
    sides: Sides
    views: dict[int, Any] = dataclasses.field(default_factory=dict)
    entries: dict[str, list[Any]] = dataclasses.field(default_factory=dict)
    names: dict[int, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    devices: frozenset[str] = frozenset()
    meshes: list[Any] = dataclasses.field(default_factory=list)
    jax_facts: dict[str, object] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, state: State, *, worker: int, worker_count: int) -> Live:
        """Return a snapshot of a state.

        Raises: StateError(ARGUMENT, STATE_UNSUPPORTED, STATE_NAME).
        """
        if not 0 <= worker < worker_count:
            raise err(
                Code.ARGUMENT, f"there is no worker {worker} of {worker_count}", where="writer"
            )
        sides = find_sides()
        units = tuple(walk(state, worker=worker, sides=sides))
        side, of_jax = sides
        for unit in units if side is not None else ():
            if isinstance(unit.value, side.FollowedLoader):
                unit.value.worker_count = worker_count
        trees = [unit for unit in units if unit.kind is Kind.TREE]
        jax_facts = {} if of_jax is None else of_jax.local_facts(trees)
        if side is None:
            return cls(units=units, worker_count=worker_count, sides=sides, jax_facts=jax_facts)
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
        tensors += [tensor for unit in trees for _, tensor in _tensors(side, unit)]
        return cls(
            units=units,
            views=views,
            entries=merged,
            names=_parameter_names(side, units, views, merged),
            devices=side.devices_of(tensors),
            meshes=side.meshes_of(tensors),
            jax_facts=jax_facts,
            worker_count=worker_count,
            sides=sides,
        )


def optimizer_prefix(unit: Unit) -> str:
    """Return the prefix of an optimizer's names.

    The prefix is empty in State(optimizer=...), where the names are those of the parameters.
    """
    return prefix_of(unit.path) if unit.field != "optimizer" or unit.path[:1] == ("extra",) else ""


def _parameter_names(
    side: ModuleType, units: tuple[Unit, ...], views: dict[int, Any], merged: dict[str, list[Any]]
) -> dict[int, tuple[str, ...]]:
    names: dict[int, tuple[str, ...]] = {}
    for field in ("data", "optimizer", "weights"):  # later fields override earlier fields
        for number, unit in enumerate(units):
            if unit.field == field and number in views:
                names |= views[number].parameters
            elif unit.field == field and unit.kind is Kind.TREE:
                names |= {id(tensor): (name,) for name, tensor in _tensors(side, unit)}
        names |= {id(entry.tensor): entry.names for entry in merged.get(field, ())}
    return names


def _tensors(side: ModuleType, unit: Unit) -> Iterator[tuple[str, Any]]:
    return ((join_name(path), tensor) for path, tensor in _tensor_paths(side, unit))


def _tensor_paths(side: ModuleType, unit: Unit) -> Iterator[tuple[tuple[object, ...], Any]]:
    def find(value: object, path: tuple[object, ...]) -> Iterator[tuple[tuple[object, ...], Any]]:
        if len(path) > limits.MSGPACK_DEPTH:
            return  # the encoder rejects this value
        if side.is_tensor(value):
            yield path, value
        elif isinstance(value, dict):
            for key, item in value.items():
                yield from find(item, (*path, key))
        elif isinstance(value, list | tuple):
            for index, item in enumerate(value):
                yield from find(item, (*path, index))

    return find(unit.value, unit.path)


#: The attributes of a `TensorSource`.
_SOURCE: Final = (
    "aliases", "boxes", "copy_into", "dtype", "field", "global_shape", "name", "replica", "scope",
    "storage",
)  # fmt: skip


def is_piece(value: object) -> TypeGuard[TensorSource | TensorSink]:
    """Return whether a value is a source or a sink.

    Only the class is inspected, so no code behind an attribute of the value runs.
    """
    kind = type(value)
    return callable(getattr(kind, "copy_into", None)) or callable(getattr(kind, "copy_from", None))


def check_source(value: object, *, field: str, where: str) -> TensorSource:
    """Return the value as a source, after a check that the source can be saved in `field`.

    Raises: StateError(STATE_UNSUPPORTED, STATE_NAME); LayoutError(BOX_BOUNDS).
    """
    if not isinstance(value, TensorSource):
        kind = type(value)
        lacking = ", ".join(name for name in _SOURCE if not hasattr(value, name))
        detail = (
            f"{kind.__module__}.{kind.__qualname__} isn't a ckptfmt.TensorSource: it lacks"
            f" {lacking}"
        )
        raise err(Code.STATE_UNSUPPORTED, detail, where=where)
    if value.field != field:
        raise err(
            Code.STATE_NAME,
            f"the source's field is {value.field}, and it was given as {field}",
            where=where,
        )
    if value.dtype not in DTYPES:
        raise err(
            Code.STATE_UNSUPPORTED, f"the source has the unknown dtype {value.dtype!r}", where=where
        )
    whole = Box.whole(tuple(value.global_shape))
    for box in value.boxes:
        if len(box.begin) != len(whole.begin) or not whole.contains(box):
            raise err(
                Code.BOX_BOUNDS,
                f"{box} leaves the shape {whole.shape}",
                where=where,
                remedy="Correct its boxes.",
            )
    return value
