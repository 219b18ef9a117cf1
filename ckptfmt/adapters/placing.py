"""Restore live values from saved trees and tensors, in place or as new values."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, MutableMapping
from typing import Any, Final, TypeAlias

import numpy as np

from ckptfmt.adapters import jax_side, torch_side
from ckptfmt.adapters.live import Unit
from ckptfmt.adapters.live_trees import (
    FLATTENED,
    GLOBAL,
    child_name,
    flattened_kind,
    join_name,
    plain_values,
)
from ckptfmt.adapters.load_plan import LoadPlan, Patterns
from ckptfmt.adapters.numpy import ArraySink, array_of, dtype_name
from ckptfmt.box import Box
from ckptfmt.documents.index import IndexTensor
from ckptfmt.documents.manifest import FIELDS
from ckptfmt.documents.tables import TensorKey
from ckptfmt.documents.tree import (
    PLAIN,
    DeviceName,
    DtypeName,
    InlineArray,
    Size,
    TensorRef,
    iter_references,
    iter_values,
)
from ckptfmt.dtypes import numpy_dtype
from ckptfmt.errors import Code, err
from ckptfmt.read.reader import Checkpoint
from ckptfmt.read.reading import allocate
from ckptfmt.state import place_of
from ckptfmt.write.snapshot import TensorSink

_DICTS: Final = (dict, OrderedDict)
_ITEMS: Final = (list, tuple, deque, set, frozenset)
#: Fields in which the mappings of all workers are merged. In other fields a mapping is a single
#: value, equal on all workers.
_FIELDS: Final = ("weights", "optimizer")

#: Name parts of special dtypes: the suffix of dtypes that pack several elements into a byte, and
#: the prefix of complex dtypes.
_PACKED: Final = "_x2"
_COMPLEX: Final = "complex"

#: The place of a new value: a name, or the container's place and a key. Only messages convert a
#: place to text.
_Name: TypeAlias = "str | tuple[_Name, object]"


def _text_of(name: _Name) -> str:
    return name if isinstance(name, str) else child_name(_text_of(name[0]), name[1])


@dataclasses.dataclass(slots=True, eq=False)
class Placer:
    """A builder of the live values of a saved leaf. Its tensors are filled when the plan runs.

    Args:
        plan: the load plan.
        field: the leaf's field.
        scope: the scope in which the leaf was found, and the scope of the leaf's tensors.
        framework: ``torch`` or ``numpy`` for new tensors; None for the saved framework of each
            tensor.
        device: the device of new torch tensors without a live counterpart. Default: CPU.
        parts: whether a composite tensor becomes a dict of its inner tensors. If false, a live
            tensor must exist, or the class must be registered.
        whole: whether to place the whole value, regardless of the caller's patterns.
    """

    plan: LoadPlan
    _: dataclasses.KW_ONLY
    field: str
    scope: str
    framework: str | None = None
    device: object = None
    parts: bool = False
    whole: bool = False

    # --- in place ---------------------------------------------------------------------------------

    def place(self, live: Any, saved: Any, name: str) -> Any:
        """Return the value to put in the place of `live`.

        Returns: `live` itself, to be changed in place, or a new value.

        Args:
            live: the current value.
            saved: the saved tree.
            name: the saved name, which the caller's patterns select. Items of a mapping can be
                selected even if the mapping itself isn't.
        """
        if not self._fits(name) and not (type(live) in _DICTS and type(saved) in _DICTS):
            self.plan.left_count += 1
            return live
        if _is_tensor(live) and (
            isinstance(saved, TensorRef) or (isinstance(saved, dict) and FLATTENED in saved)
        ):
            self._fill_live(live, saved)
            return live
        if type(live) in _DICTS and type(saved) in _DICTS:
            self._place_dict(live, saved, name)
            return live
        if type(live) is type(saved) and isinstance(live, list | tuple | deque):
            return self._place_items(live, saved, name)
        fresh = self.fresh(saved, name)
        if type(live) is type(fresh) and isinstance(live, set | Counter):
            self.plan.actions.append(lambda: _refill(live, fresh))
            return live
        return fresh

    def _place_dict(self, live: MutableMapping[Any, Any], saved: dict[Any, Any], name: str) -> None:
        taken = {
            key: value
            for key, value in saved.items()
            if key in live or self._fits(child_name(name, key))
        }
        if live:
            for key in [key for key in taken if key not in live]:
                where = place_of(self.field, child_name(name, key))
                self.plan.problem(Code.LEAF_UNEXPECTED, where, "the live mapping has no such key")
                if isinstance(taken[key], TensorRef):
                    self.plan.unused.append(self.referred(taken[key]))
                self.take(taken.pop(key))
            for key in [
                key for key in live if key not in saved and self._fits(child_name(name, key))
            ]:
                where = place_of(self.field, child_name(name, key))
                if _is_tensor(live[key]):
                    self.plan.missing[self.field, child_name(name, key)] = tuple(live[key].shape)
                self.plan.problem(Code.LEAF_MISSING, where, "the saved mapping has no such key")
        placed = {
            key: self.place(live[key], value, child_name(name, key))
            if key in live
            else self.fresh(value, child_name(name, key))
            for key, value in taken.items()
        }
        self.plan.actions.append(lambda: _update(live, placed))

    def _place_items(self, live: Any, saved: Any, name: str) -> Any:
        before: list[Any] = list(live) if len(live) == len(saved) else [None] * len(saved)
        items = [
            self.place(old, value, child_name(name, index))
            for index, (old, value) in enumerate(zip(before, saved, strict=True))
        ]
        if isinstance(live, tuple):
            return tuple(items)
        if isinstance(live, deque) and live.maxlen != saved.maxlen:
            return deque(items, saved.maxlen)
        self.plan.actions.append(lambda: _refill(live, items))
        return live

    def _fill_live(self, live: Any, saved: TensorRef | dict[Any, Any]) -> None:
        if isinstance(saved, TensorRef):
            fill(self.plan, live, self.referred(saved))
            return
        side = torch_side()
        inner = (
            {}
            if side is None
            else {name.removeprefix("/"): part for name, part in side.inner_tensors(live, "")}
        )
        references = {key: reference for key, reference in saved.items() if key != FLATTENED}
        if inner.keys() != references.keys():
            detail = f"made of {sorted(references)} when saved, here of {sorted(inner)}"
            self.plan.problem(
                Code.SHAPE_MISMATCH,
                place_of(self.field, next(iter(references.values())).name),
                detail,
            )
            return
        for key, part in inner.items():
            fill(self.plan, part, self.referred(references[key]))

    # --- new --------------------------------------------------------------------------------------

    def fresh(  # noqa: PLR0911
        self,
        saved: Any,
        name: _Name,
        like: Any = None,
    ) -> Any:
        """Return a new value.

        Tensors take device and placements from the tensors at the same place in `like`.

        Containers of plain values aren't copied: the result shares them with `saved`, which was
        parsed for this load. Copies would double the memory of a large tree.
        """
        if type(saved) in PLAIN:
            return saved
        if isinstance(saved, TensorRef):
            return self._fresh_tensor(saved, like)
        if isinstance(saved, InlineArray):
            return array_of(saved)
        if isinstance(saved, DtypeName | DeviceName | Size):
            side = torch_side()
            return saved if side is None else side.decode(saved)
        if type(saved) in _DICTS:
            return self._fresh_dict(saved, name, like if isinstance(like, dict) else {})
        if type(saved) is Counter:
            if PLAIN.issuperset(map(type, saved.values())):
                return saved
            counter: Counter[Any] = Counter()
            counter.update({key: self.fresh(value, (name, key)) for key, value in saved.items()})
            return counter
        return self._fresh_items(saved, name, like) if type(saved) in _ITEMS else saved

    def _fresh_dict(self, saved: Any, name: _Name, like: dict[Any, Any]) -> Any:
        if FLATTENED in saved and not self.parts:
            return self._fresh_flattened(saved, name)
        if PLAIN.issuperset(map(type, saved.values())):
            return saved
        return type(saved)(
            (key, self.fresh(item, (name, key), like.get(key))) for key, item in saved.items()
        )

    def _fresh_flattened(self, saved: Any, name: _Name) -> Any:
        """Return a new tensor of a registered class. Raises: StateError(STATE_UNSUPPORTED)."""
        side = torch_side()
        where = place_of(self.field, _text_of(name))
        form = saved[FLATTENED]
        if side is None or not isinstance(form, dict):
            raise err(
                Code.STATE_UNSUPPORTED,
                f"a tensor of {flattened_kind(saved)} can only be filled in place",
                where=where,
                remedy="Create the tensor before the load, for an optimizer by a step.",
            )
        made = self.fresh(form, name)
        inner = {
            key: self.fresh(item, (name, key)) for key, item in saved.items() if key != FLATTENED
        }
        return side.unflatten(made, inner, where=where)

    def _fresh_items(self, saved: Any, name: _Name, like: Any) -> Any:
        if PLAIN.issuperset(map(type, saved)):
            return saved
        same = (
            type(like) is type(saved)
            and len(like) == len(saved)
            and not isinstance(like, set | frozenset)
        )
        old: list[Any] = list(like) if same else [None] * len(saved)
        items = [
            item if type(item) in PLAIN else self.fresh(item, (name, i), old[i])
            for i, item in enumerate(saved)
        ]
        return deque(items, saved.maxlen) if isinstance(saved, deque) else type(saved)(items)

    def _fresh_tensor(self, saved: TensorRef, like: object) -> object:
        tensor = self.referred(saved)
        side = torch_side()
        dtype = tensor.dtype
        shape = tensor.global_shape
        if (self.framework or saved.kind) == "torch" and side is not None:
            made = allocate(
                tensor, lambda: side.allocate(dtype, shape, like=like, device=self.device)
            )
        else:
            made = allocate(tensor, lambda: np.empty(shape, numpy_dtype(dtype)))
        if 0 not in shape:  # skips reads of empty tensors, of which an index may list many
            fill(self.plan, made, tensor)
        return made

    def referred(self, saved: TensorRef) -> IndexTensor:
        """Return the tensor of a reference, and mark the tensor as taken.

        Raises: FormatError(TREE_REFERENCE).
        """
        tensor = self.plan.checkpoint.find(self.field, saved.name, self.scope)
        if tensor is None:
            raise err(
                Code.TREE_REFERENCE,
                f"no tensor {saved.name!r}",
                where=self.field,
                requirement="REQ-TRE-004",
            )
        self.plan.taken_tensors.add(tensor.key)
        return tensor

    def take(self, saved: object) -> None:
        """Mark all tensors of a tree as taken."""
        for value in iter_references(saved):
            self.referred(value)

    def _fits(self, name: str) -> bool:
        return self.whole or self.plan.only.fits(self.field, name)


def fill(
    plan: LoadPlan,
    live: Any,
    saved: IndexTensor,
    *,
    field: str | None = None,
    name: str | None = None,
) -> None:
    """Plan to fill a live tensor or array from a saved tensor, or add a problem.

    Args:
        plan: the load plan.
        live: the destination.
        saved: the saved tensor.
        field, name: the live tensor's field and name. Default: those of `saved`.

    Problems: SHAPE_MISMATCH, DTYPE_MISMATCH (converted where allowed), STATE_UNSUPPORTED where no
        conversion keeps the values, META_DESTINATION.
    Raises: StateError(STATE_UNSUPPORTED).
    """
    where = place_of(saved.field if field is None else field, saved.name if name is None else name)
    if not may_fill(
        plan, saved, shape=tuple(live.shape), dtype=lambda: _dtype_name(live, where), where=where
    ):
        return
    if isinstance(live, np.ndarray):
        if not live.flags.writeable:
            raise err(
                Code.STATE_UNSUPPORTED,
                "the live array is read-only",
                where=where,
                remedy="Pass a copy of it.",
            )
        plan.sinks.append(ArraySink.of(saved, live))
        return
    side = torch_side()
    if side is not None and side.is_meta(live):
        plan.problem(Code.META_DESTINATION, where, "the live tensor is on the meta device")
    elif side is not None:
        plan.sinks.append(
            side.sink_of(
                live, field=saved.field, name=saved.name, scope=saved.scope, dtype=saved.dtype
            )
        )


def may_fill(
    plan: LoadPlan,
    saved: IndexTensor,
    *,
    shape: tuple[int, ...],
    dtype: Callable[[], str],
    where: str,
) -> bool:
    """Return whether a saved tensor fits a live tensor of this shape and dtype.

    Another dtype fits if the caller allows conversion.

    Problems: SHAPE_MISMATCH, DTYPE_MISMATCH, STATE_UNSUPPORTED.
    """
    if shape != saved.global_shape:
        return plan.problem(
            Code.SHAPE_MISMATCH, where, f"saved with shape {saved.global_shape}, here {shape}"
        )
    kind = dtype()
    return kind == saved.dtype or _may_convert(plan, where, saved.dtype, kind)


def _may_convert(plan: LoadPlan, where: str, saved: str, live: str) -> bool:
    """Return whether the caller allows a conversion, and the conversion is supported.

    An unsupported conversion becomes a problem before any live value changes.
    """
    if not plan.problem(Code.DTYPE_MISMATCH, where, f"saved as {saved}, here {live}"):
        return False
    if converts(saved, live):
        return True
    plan.problem(
        Code.STATE_UNSUPPORTED, where, f"saved as {saved}, which can't be converted to {live}"
    )
    return False


@functools.lru_cache(maxsize=512)
def converts(saved: str, live: str) -> bool:
    """Return whether conversion from a saved dtype to a live dtype is supported.

    Packed dtypes can't be converted, nor complex dtypes to real dtypes.

    >>> (converts("float32", "bfloat16"), converts("complex64", "float32"),
    ...  converts("float4_e2m1fn_x2", "float32"))
    (True, False, False)
    """
    if any(name.endswith(_PACKED) for name in (saved, live)):
        return False
    return not saved.startswith(_COMPLEX) or live.startswith(_COMPLEX)


def refuses(live: Any, saved: IndexTensor) -> bool:
    """Return whether `live` is unsuitable: not a tensor or array of the saved dtype and shape."""
    if not _is_tensor(live) or tuple(live.shape) != saved.global_shape:
        return True
    return _dtype_name(live, saved.name) != saved.dtype


def _dtype_name(live: Any, where: str) -> str:
    if isinstance(live, np.ndarray):
        return dtype_name(live.dtype, where=where)
    side = torch_side()
    return "" if side is None else str(side.dtype_name(live.dtype, where=where))


def _is_tensor(value: object) -> bool:
    side = torch_side()
    return isinstance(value, np.ndarray) or (side is not None and side.is_tensor(value))


def _update(live: MutableMapping[Any, Any], placed: dict[Any, Any]) -> None:
    """Set the placed items, and their order if all items of the mapping are placed."""
    if live.keys() == placed.keys() and list(live) != list(placed):
        live.clear()
    live.update(placed)


def _refill(live: Any, items: Any) -> None:
    live.clear()
    if isinstance(live, list | deque):
        live.extend(items)
    else:
        live.update(items)


def put_back(plan: LoadPlan, unit: Unit, value: object) -> None:
    """Replace the value of a unit.

    If no mutable container holds the value, the new value also goes into the load's report.
    """
    if unit.put is None or not unit.path:
        plan.values[f"{unit.field}:{unit.name}"] = value
    if unit.put is not None:
        unit.put(value)


def is_named_tensors(unit: Unit) -> bool:
    """Return whether a unit is a flat mapping from strings to tensors or arrays.

    An empty mapping counts.
    """
    return (
        unit.field in _FIELDS
        and type(unit.value) in _DICTS
        and all(type(key) is str and _is_tensor(value) for key, value in unit.value.items())
    )


def plan_named_tensors(plan: LoadPlan, unit: Unit) -> bool:
    """Plan to fill a mapping of named tensors, tensor by tensor.

    Returns: False if the unit isn't such a mapping. Also False if a single worker saved the mapping
        as one value, and the load neither selects a part of the checkpoint nor renames tensors.
    Problems: TENSOR_MISSING and the problems of `fill`.
    """
    saved_as_one = (
        unit.field,
        plan.renaming.saved_name(unit.name),
        unit.scope,
    ) in plan.checkpoint.leaves
    as_one = saved_as_one and plan.worker_count == 1 and not plan.is_partial and not plan.renaming
    if not is_named_tensors(unit) or as_one:
        return False
    for key, value in unit.value.items():
        name = join_name((*unit.path, key))
        chosen = plan.choose(unit.field, [name])
        saved = plan.tensor(unit.field, chosen, unit.scope) if chosen else None
        if saved is not None:
            fill(plan, value, saved, field=unit.field, name=name)
        elif chosen:
            renamed = "" if chosen[0] == name else f" as {chosen[0]}"
            plan.miss(unit.field, name, f"not saved{renamed}", shape=tuple(value.shape))
    take_named_leaf(plan, unit)
    return True


def take_named_leaf(plan: LoadPlan, unit: Unit) -> None:
    """Mark the saved leaf of a mapping of named tensors as taken.

    A single worker saves such a leaf. The leaf has no content beyond the tensors' names.
    """
    key = (unit.field, plan.renaming.saved_name(unit.name), unit.scope)
    if key in plan.checkpoint.leaves:
        tree = plan.checkpoint.leaf(*key)
        if isinstance(tree, dict) and all(
            isinstance(value, TensorRef) for value in iter_values(tree)
        ):
            plan.taken_leaves.add(key)


_FRAMEWORKS: Final = (None, "numpy", "torch", "jax")
#: Fields whose arrays are tensors of the checkpoint.
_FIELDS_OF_TENSORS: Final = ("weights", "optimizer", "data")

#: The result of a selection that matches no part of a value.
_NOTHING: Final = object()


def load_trees(
    checkpoint: Checkpoint, framework: str | None = None, *, only: Patterns = None
) -> dict[str, Any]:
    """Return the contents of a checkpoint, by field.

    A field that was saved as a single tree is returned as that tree. Any other field is a mapping
    from names to tensors and values. The mapping has every name of a tied tensor and omits
    non-persistent buffers, so ``load_state_dict`` accepts a module's mapping directly. Values of a
    single worker are in a nested mapping under ``lw/<i>``. Absent fields are omitted.

    Args:
        checkpoint: an open checkpoint.
        framework: ``torch``, ``numpy`` or ``jax`` for all tensors. None for the saved framework of
            each tensor, or numpy if the program hasn't loaded torch.
        only: patterns of the names to load. Items of a mapping can be selected.

    Raises: StateError(ARGUMENT; STATE_UNSUPPORTED for a dtype that the framework lacks); and the
        errors of reading.
    """
    if framework not in _FRAMEWORKS:
        raise err(
            Code.ARGUMENT, f"{framework!r} is none of 'torch', 'numpy', 'jax'", where="framework"
        )
    if framework in ("torch", "jax"):
        _import(framework)
    plan = LoadPlan(checkpoint, worker=0, worker_count=1, allow=frozenset(), only=only)
    if not plan.is_partial:
        checkpoint.open_parts(leaf.part for leaf in checkpoint.leaves.values())
    kind = "numpy" if framework == "jax" else framework
    trees = {field: _field(plan, field, kind) for field in FIELDS if field != "rng"}
    plan.check()
    checkpoint.plan_reading(plan.sinks).run()
    for action in plan.actions:
        action()
    side = jax_side() if framework == "jax" else None
    if side is not None:
        trees.update({field: side.arrays_of(trees[field], field) for field in _FIELDS_OF_TENSORS})
    trees["rng"] = _streams(plan)
    return {field: trees[field] for field in FIELDS if trees[field] != {} or _is_there(plan, field)}


def _import(framework: str) -> None:
    """Import torch or jax. Raises: StateError(ARGUMENT) where the package isn't installed."""
    try:
        importlib.import_module(framework)
    except ModuleNotFoundError as error:
        if error.name != framework:
            raise
        detail = f"the package {framework} isn't installed"
        remedy = f"pip install {framework}, or give framework='numpy'."
        raise err(Code.ARGUMENT, detail, where="framework", remedy=remedy) from None


def _is_there(plan: LoadPlan, field: str) -> bool:
    if plan.is_partial:
        return False
    return any(key[0] == field for key in (*plan.checkpoint.leaves, *plan.checkpoint.tensors))


def _field(plan: LoadPlan, field: str, framework: str | None) -> Any:
    values: dict[str, dict[str, Any]] = {}
    for key in plan.checkpoint.leaves:
        tree = _choose(plan, key, plan.checkpoint.leaf(*key)) if key[0] == field else _NOTHING
        if tree is not _NOTHING:
            placer = Placer(plan, field=field, scope=key[2], framework=framework, parts=True)
            values.setdefault(key[2], {})[key[1]] = placer.fresh(tree, key[1])
    alone = [
        key for key in plan.checkpoint.tensors if key[0] == field and key not in plan.taken_tensors
    ]
    if plan.is_partial:
        alone = [
            key for key in alone if any(plan.only.fits(field, name) for name in _names(plan, key))
        ]
    if not alone and list(values) == [GLOBAL] and list(values[GLOBAL]) == [""]:
        return values[GLOBAL][""]
    kind = framework or ("torch" if "torch" in sys.modules else "numpy")
    placers = {
        scope: Placer(plan, field=field, scope=scope, framework=kind)
        for scope in {key[2] for key in alone}
    }
    for key in alone:
        _add_tensor(plan, key, placers[key[2]], kind, values.setdefault(key[2], {}))
    return {**values.pop(GLOBAL, {}), **values}


def _add_tensor(
    plan: LoadPlan, key: TensorKey, placer: Placer, kind: str, values: dict[str, Any]
) -> None:
    tensor = plan.checkpoint.tensors[key]
    if tensor.storage == "persistent":
        made = placer.fresh(TensorRef(tensor.name, kind), tensor.name)
        values.update(dict.fromkeys((tensor.name, *tensor.aliases), made))


def _names(plan: LoadPlan, key: TensorKey) -> tuple[str, ...]:
    return (key[1], *plan.checkpoint.tensors[key].aliases)


def _choose(plan: LoadPlan, key: TensorKey, tree: Any, name: str | None = None) -> Any:
    """Return the selected part of a saved value: the value, a smaller mapping, or `_NOTHING`."""
    field = key[0]
    if (
        plan.only.fits_leaf(key[0], key[1], lambda: tree)
        if name is None
        else plan.only.fits(field, name)
    ):
        return tree
    if type(tree) not in (dict, OrderedDict):
        return _NOTHING
    at = key[1] if name is None else name
    parts = (
        (item, _choose(plan, key, value, child_name(at, item))) for item, value in tree.items()
    )
    chosen = [(item, part) for item, part in parts if part is not _NOTHING]
    return type(tree)(chosen) if chosen else _NOTHING


def _streams(plan: LoadPlan) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for name, scope in plan.checkpoint.streams:
        if not plan.only.fits("rng", name):
            continue
        kind, state = plan.checkpoint.stream(name, scope)
        found.setdefault(scope, {})[name] = (kind, plain_values(state))
    return found


def plan_sink(plan: LoadPlan, value: object, *, field: str, where: str) -> None:
    """Plan to fill a sink.

    Problems: TENSOR_MISSING, SHAPE_MISMATCH, STATE_UNSUPPORTED.
    Raises: StateError(DTYPE_MISMATCH), whatever the caller allows.
    """
    if not isinstance(value, TensorSink) or value.field != field:
        kind = type(value)
        detail = (
            f"{kind.__module__}.{kind.__qualname__} isn't a ckptfmt.TensorSink of the field {field}"
        )
        plan.problem(Code.STATE_UNSUPPORTED, where, detail)
        return
    chosen = plan.choose(field, [value.name])
    if not chosen:
        return
    saved = plan.tensor(field, chosen, value.scope)
    if saved is None:
        plan.problem(Code.TENSOR_MISSING, where, "not saved")
    elif tuple(value.global_shape) != saved.global_shape:
        detail = f"saved with shape {saved.global_shape}, here {tuple(value.global_shape)}"
        plan.problem(Code.SHAPE_MISMATCH, where, detail)
    elif value.dtype != saved.dtype:
        # A sink receives bytes, so a conversion is impossible even where the caller allows
        # conversions.
        raise err(
            Code.DTYPE_MISMATCH,
            f"saved as {saved.dtype}, wanted as {value.dtype}",
            where=where,
            remedy="Give the sink the saved dtype, and convert in its copy_from.",
        )
    else:
        plan.sinks.append(
            _Sink(
                field=field,
                name=saved.name,
                scope=saved.scope,
                dtype=saved.dtype,
                global_shape=saved.global_shape,
                boxes=tuple(value.boxes),
                copy_from=value.copy_from,
            )
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Sink:
    """A sink for a tensor that was saved under another name or scope."""

    field: str
    name: str
    scope: str
    dtype: str
    global_shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    copy_from: Callable[[Box, memoryview], None]
