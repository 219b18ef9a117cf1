"""JAX's side: arrays and pytrees, what `ckptfmt.adapters` calls once the program has loaded jax.

Of an array each shard is saved once, from the device that has its first replica. An array whose shards are all in this
process is one whole tensor in the checkpoint; of any other, each shard is a piece at its offsets.

Arrays can't be changed, and nor can most nodes of a pytree: a load makes a new tree of the classes, shardings and
dtypes of the live one, which takes its place in the `State`.

A dict, list or tuple is saved as itself. Any other node that is registered with JAX (a NamedTuple of Optax, a
FrozenDict, a dataclass of Flax, an nnx.State) is saved as a dict of its children by JAX's own keys, so that a name is
what `jax.tree_util.keystr` shows: ``0/mu/Dense_0/kernel``.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from ckptfmt.adapters.live import Unit
from ckptfmt.adapters.live_trees import FLATTENED, Encoder, child_name, join_name
from ckptfmt.adapters.load_plan import MISSING, LoadPlan
from ckptfmt.adapters.numpy import ArraySink, dtype_name
from ckptfmt.adapters.pieces import Pieces
from ckptfmt.adapters.placing import Placer, fill, may_fill, put_back
from ckptfmt.box import Box
from ckptfmt.documents.index import IndexTensor
from ckptfmt.documents.tree import TensorRef
from ckptfmt.errors import CkptError, Code, err
from ckptfmt.state import place_of

#: What typed keys are saved as: numbers under this name, and how they are used.
_KEY_DATA: Final = "key_data"
_KEY_KIND: Final = "jax.random.key"
#: Nodes of a pytree that are saved as what they are.
_PLAIN_NODES: Final = (type(None), dict, list, tuple, OrderedDict)
#: The dtypes that a weak type can have: those of Python's numbers.
_WEAK: Final[dict[str, type]] = {"i": int, "f": float, "c": complex}
#: Settings that decide bits.
_SETTINGS: Final = (
    "jax_default_matmul_precision", "jax_default_prng_impl", "jax_enable_x64", "jax_numpy_dtype_promotion",
    "jax_threefry_partitionable",
)  # fmt: skip


def is_array(value: object) -> bool:
    """Tell whether this is an array of JAX, a typed key or a tracer among them."""
    return isinstance(value, jax.Array)


class Pending:
    """A number on its way from a device. Arrays of JAX don't change.

    Args:
        array: an array of one element.
    """

    def __init__(self, array: jax.Array) -> None:
        self._array = array
        array.copy_to_host_async()

    def is_ready(self) -> bool:
        """Return whether `bits` returns at once."""
        return bool(self._array.is_ready())

    def wait(self) -> None:
        """Wait for the device."""
        self._array.block_until_ready()

    def bits(self) -> int:
        """Return the bits of the number as a float of 64 bits: all floats are exact."""
        number = np.asarray(self._array).reshape(-1)[:1].astype(np.float64)
        return int(number.view(np.uint64)[0])


def is_node(value: object) -> bool:
    """Tell whether this is a node of a pytree."""
    return not jax.tree_util.all_leaves([value])


def children_of(value: object) -> list[tuple[object, object]]:
    """Return keys and children of a node, one level of it."""
    found, _ = jax.tree_util.tree_flatten_with_path(value, is_leaf=lambda child: child is not value)
    return [(_plain_key(path[0]), child) for path, child in found]


def has_arrays(value: object) -> bool:
    """Tell whether a tree is JAX's: it has arrays of JAX, or `jax.ShapeDtypeStruct`, or nodes that are saved as dicts.

    Such a node, an EmptyState of Optax, may hold no array, and must be made again by its class.
    """
    leaves = jax.tree_util.tree_leaves(value, is_leaf=_is_own_node)
    return any(is_array(leaf) or _is_abstract(leaf) or _is_own_node(leaf) for leaf in leaves)


def _is_own_node(value: object) -> bool:
    return type(value) not in _PLAIN_NODES and is_node(value)


def _is_abstract(value: object) -> bool:
    return isinstance(value, jax.ShapeDtypeStruct)


def _is_key(value: Any) -> bool:  # noqa: ANN401 - array or its shape
    return bool(jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key))


def _plain_key(key: Any) -> object:  # noqa: ANN401 - any of JAX's classes of keys
    """Return what a key of a path stands for."""
    tree = jax.tree_util
    if isinstance(key, tree.DictKey | tree.FlattenedIndexKey):
        return key.key
    if isinstance(key, tree.SequenceKey):
        return key.idx
    return key.name if isinstance(key, tree.GetAttrKey) else str(key)


# --- save -------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardSource:
    """An array to be written; see `ckptfmt.write.snapshot.MemorySource`.

    Attributes:
        shards: the arrays of single devices that this process writes, each with its box.
    """

    field: str
    name: str
    dtype: str
    global_shape: tuple[int, ...]
    scope: str
    boxes: tuple[Box, ...]
    shards: tuple[tuple[Box, jax.Array], ...]
    replica: bool = False
    storage: str = "persistent"
    aliases: tuple[str, ...] = ()

    def copy_into(self, box: Box, out: memoryview) -> None:
        """Copy the elements of `box` into `out`."""
        for own, shard in self.shards:
            if box.contains(own) and own.element_count:
                held = _on_host(shard)
                np.frombuffer(out, held.dtype).reshape(box.shape)[own.relative_to(box)] = held

    def memory_of(self, box: Box) -> NDArray[np.uint8] | None:
        """Return the bytes of the elements of `box`, to be read; None where several shards have them."""
        held = next((_on_host(shard) for own, shard in self.shards if own == box), None)
        return None if held is None or not held.flags.c_contiguous else held.reshape(-1).view(np.uint8)


def _on_host(shard: jax.Array) -> NDArray[Any]:
    """Return the elements of an array of one device, of the host's own memory where they lie there.

    They are integers of the same size, where there are such: copied as these, no bit of a NaN can be lost.
    """
    held: NDArray[Any] = np.asarray(shard)
    return held.view(f"u{held.itemsize}") if held.itemsize in (1, 2, 4, 8) else held


def source_of(array: jax.Array, *, field: str, name: str, scope: str) -> ShardSource:
    """Return the source of an array. Raises: StateError(STATE_UNSUPPORTED), also for one that was donated."""
    where = place_of(field, name)
    if isinstance(array, jax.core.Tracer):
        raise _unsupported("a tracer has no elements", where, "Save outside of jit, grad and vmap.")
    if _is_key(array):
        raise _unsupported("a typed key isn't one array of numbers", where, "Save jax.random.key_data(key).")
    if array.is_deleted():
        remedy = "Give what the step returned, not what was given to it with donate_argnums."
        raise _unsupported("the array was donated or deleted, and its elements are gone", where, remedy)
    kind = dtype_name(np.dtype(array.dtype), where=where)
    first = [shard for shard in array.addressable_shards if shard.replica_id == 0]
    shards = tuple((_box_of(shard.index, array.shape), shard.data) for shard in first)
    return ShardSource(
        field=field,
        name=name,
        dtype=kind,
        global_shape=array.shape,
        scope=scope,
        boxes=(Box.whole(array.shape),) if array.is_fully_addressable else tuple(box for box, _ in shards),
        shards=shards,
    )


def encode(encoder: Encoder, value: jax.Array, name: str) -> object:
    """Return the tree of an array; where none may be, the array as it is. Raises: StateError(STATE_UNSUPPORTED)."""
    if encoder.inline:
        return value
    if isinstance(value, jax.core.Tracer) or not _is_key(value):
        encoder.sources.append(source_of(value, field=encoder.field, name=name, scope=encoder.scope))
        return TensorRef(name, "numpy")
    inner = child_name(name, _KEY_DATA)
    data = jax.random.key_data(value)
    encoder.sources.append(source_of(data, field=encoder.field, name=inner, scope=encoder.scope))
    return {FLATTENED: _kind_of_key(value), _KEY_DATA: TensorRef(inner, "numpy")}


def _kind_of_key(key: jax.Array) -> str:
    return f"{_KEY_KIND}:{jax.random.key_impl(key)}"


def _box_of(index: Iterable[Any], shape: tuple[int, ...]) -> Box:
    """Return the box that JAX's slices cut out of an array of this shape."""
    spans = [slice(*cut.indices(extent)) for cut, extent in zip(index, shape, strict=True)]
    return Box(tuple(span.start for span in spans), tuple(span.stop - span.start for span in spans))


# --- load -------------------------------------------------------------------------------------------------------------


def plan_tree(plan: LoadPlan, unit: Unit) -> None:
    """Plan to make a tree like that of a unit, which takes its place once everything is read.

    Arrays go by their names, whatever tree they were saved in; other values stand at their place in the saved tree.

    Problems: TENSOR_MISSING, LEAF_MISSING, LEAF_UNEXPECTED, and those of a tensor that doesn't fit.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(unit.value)
    tree = _TreePlan(plan, unit)
    makers = [tree.plan_leaf(tuple(map(_plain_key, path)), live) for path, live in leaves]
    tree.refuse_leftover()
    plan.actions.append(lambda: put_back(plan, unit, structure.unflatten([make() for make in makers])))


class _TreePlan:
    """The load of one tree, leaf by leaf."""

    def __init__(self, plan: LoadPlan, unit: Unit) -> None:
        self._plan = plan
        self._unit = unit
        name = plan.renaming.saved_name(unit.name)
        #: Name, scope and value of what was saved in this place; `MISSING` where that has tensors only.
        self._name, self._scope, self._saved = plan.leaf(unit.field, [name], unit.scope)
        self._met: set[tuple[object, ...]] = set()

    def plan_leaf(self, path: tuple[object, ...], live: Any) -> Callable[[], object]:  # noqa: ANN401 - any leaf
        """Return what makes, or gives back, the value for a leaf once everything is read."""
        self._met.add(path)
        name = join_name((*self._unit.path, *path))
        is_array_like = is_array(live) or _is_abstract(live)
        if is_array_like and _is_key(live):
            return self._plan_key(path, live, name)
        if not is_array_like and not isinstance(live, np.ndarray):
            return self._plan_value(path, live, name)
        saved = self._find(name, tuple(live.shape))
        if saved is None:
            return lambda: live
        if is_array_like:
            return _plan_array(self._plan, live, saved, name)
        fill(self._plan, live, saved, field=self._unit.field, name=name)
        return lambda: live

    def _find(self, name: str, shape: tuple[int, ...]) -> IndexTensor | None:
        """Return the saved tensor of a live one, None if it isn't to be loaded, or isn't there."""
        chosen = self._plan.choose(self._unit.field, [name])
        saved = self._plan.tensor(self._unit.field, chosen, self._unit.scope) if chosen else None
        if chosen and saved is None:
            renamed = "" if chosen[0] == name else f" as {chosen[0]}"
            self._plan.miss(self._unit.field, name, f"not saved{renamed}", shape=shape)
        return saved

    def _plan_key(self, path: tuple[object, ...], live: Any, name: str) -> Callable[[], object]:  # noqa: ANN401
        where = place_of(self._unit.field, name)
        if _is_abstract(live):
            detail = "a key's place can't be held by its shape"
            self._plan.problem(Code.STATE_UNSUPPORTED, where, f"{detail}: give a key, such as jax.random.key(0)")
            return lambda: live
        at = _find_at(self._saved, path)
        found = at.get(FLATTENED) if isinstance(at, dict) else None
        if found is not None and found != _kind_of_key(live):
            self._plan.problem(Code.STATE_UNSUPPORTED, where, f"saved as {found}, here {_kind_of_key(live)}")
            return lambda: live
        data = jax.random.key_data(live)
        saved = self._find(child_name(name, _KEY_DATA), tuple(data.shape))
        if saved is None:
            return lambda: live
        make = _plan_array(self._plan, data, saved, name)
        return lambda: jax.random.wrap_key_data(make(), impl=jax.random.key_impl(live))

    def _plan_value(self, path: tuple[object, ...], live: object, name: str) -> Callable[[], object]:
        saved = _find_at(self._saved, path)
        if saved is MISSING:
            if self._plan.only.fits(self._unit.field, name):
                self._plan.problem(Code.LEAF_MISSING, place_of(self._unit.field, name), "not saved")
            return lambda: live
        placed = Placer(self._plan, field=self._unit.field, scope=self._scope).place(live, saved, name)
        return lambda: placed

    def refuse_leftover(self) -> None:
        """Make problems of saved values that have no place here; of tensors the load finds that by itself."""
        for path, value in _iter_paths(self._saved, self._met):
            name = join_name((self._name, *path)) if self._name else join_name(path)
            if value is not None and not isinstance(value, TensorRef) and self._plan.only.fits(self._unit.field, name):
                self._plan.problem(
                    Code.LEAF_UNEXPECTED, place_of(self._unit.field, name), "the live tree has no such leaf"
                )


def _find_at(tree: object, path: tuple[object, ...]) -> Any:  # noqa: ANN401 - any value of a tree
    """Return what a saved tree has at a path, or `MISSING`."""
    for key in path:
        tree = (_items(tree) or {}).get(key, MISSING)
    return tree


def _iter_paths(
    tree: object, met: set[tuple[object, ...]], path: tuple[object, ...] = ()
) -> Iterator[tuple[tuple[object, ...], object]]:
    """Yield path and value of what a saved tree has beside the paths that were met."""
    if tree is MISSING or path in met:
        return
    items = _items(tree)
    if items is None:
        yield path, tree
        return
    for key, value in items.items():
        yield from _iter_paths(value, met, (*path, key))


def _items(tree: object) -> dict[object, object] | None:
    """Return what a container of a saved tree holds, by key; None for anything else."""
    if isinstance(tree, list | tuple):
        return dict(enumerate(tree))
    return tree if isinstance(tree, dict) else None


def _plan_array(plan: LoadPlan, live: Any, saved: IndexTensor, name: str) -> Callable[[], jax.Array]:  # noqa: ANN401
    """Plan to read what this process's devices need of an array, and return what makes it."""
    where = place_of(saved.field, name)
    dtype = np.dtype(live.dtype)
    if not may_fill(plan, saved, shape=live.shape, dtype=lambda: dtype_name(dtype, where=where), where=where):
        return lambda: live
    is_weak = bool(getattr(live, "weak_type", False))
    if is_weak and dtype != _weak_zero(dtype).dtype:
        plan.problem(Code.STATE_UNSUPPORTED, where, f"a weak {dtype}, which no number of Python has: give it a dtype")
        return lambda: live
    finish: Callable[[jax.Array, Any], jax.Array] = _weaken if is_weak else lambda array, _: array
    sharding = live.sharding if _is_abstract(live) or live.committed else None
    cuts = [()] if sharding is None else sharding.addressable_devices_indices_map(live.shape).values()
    boxes = {_box_of(cut, live.shape) if cut else Box.whole(live.shape) for cut in cuts}
    arrays = {box: np.empty(box.shape, dtype) for box in boxes}
    plan.sinks.append(
        Pieces(
            field=saved.field,
            name=saved.name,
            scope=saved.scope,
            dtype=saved.dtype,
            global_shape=saved.global_shape,
            boxes=tuple(arrays),
            held={box: _sink(saved, array) for box, array in arrays.items()},
        )
    )
    if sharding is not None:
        read = functools.partial(_read_cut, arrays, live.shape)
        return lambda: finish(jax.make_array_from_callback(live.shape, sharding, read, dtype=dtype), sharding)
    (array,) = arrays.values()
    return lambda: finish(jnp.asarray(array), None)


def _read_cut(arrays: Mapping[Box, NDArray[Any]], shape: tuple[int, ...], cut: tuple[slice, ...]) -> NDArray[Any]:
    return arrays[_box_of(cut, shape)]


def _weak_zero(dtype: np.dtype[Any]) -> jax.Array:
    """Return a zero of Python as an array: its type is weak, so that others decide the dtype of a result."""
    return jnp.asarray(_WEAK.get(dtype.kind, bool)())


def _weaken(array: jax.Array, sharding: Any) -> jax.Array:  # noqa: ANN401 - of JAX, or None
    """Return an array with a weak type, on the same devices: one that is written into keeps its own type."""

    def write(held: jax.Array) -> jax.Array:
        return jnp.broadcast_to(_weak_zero(np.dtype(held.dtype)), held.shape).at[...].set(held)

    return jax.jit(write, **({} if sharding is None else {"out_shardings": sharding}))(array)


def _sink(saved: IndexTensor, array: NDArray[Any]) -> ArraySink:
    return ArraySink(
        field=saved.field,
        name=saved.name,
        scope=saved.scope,
        dtype=saved.dtype,
        global_shape=array.shape,
        array=array,
        boxes=(Box.whole(array.shape),),
    )


# --- context ----------------------------------------------------------------------------------------------------------


def local_facts(units: Iterable[Unit]) -> dict[str, object]:
    """Return the versions, settings, devices and meshes of the arrays of JAX in a state; nothing if there are none."""
    arrays = [leaf for unit in units for leaf in jax.tree_util.tree_leaves(unit.value)]
    arrays = [leaf for leaf in arrays if is_array(leaf) and not isinstance(leaf, jax.core.Tracer)]
    if not arrays:
        return {}
    devices = {device for array in arrays for device in array.sharding.device_set}
    meshes = {array.sharding.mesh for array in arrays if isinstance(array.sharding, jax.sharding.NamedSharding)}
    facts = {
        "versions": {"jax": jax.__version__, "jaxlib": jax.lib.__version__},
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "settings": {name: _read_setting(name) for name in _SETTINGS},
        "devices": len(devices),
        "device_kinds": sorted({f"{device.platform}: {device.device_kind}" for device in devices}),
        "meshes": sorted([list(map(str, mesh.axis_names)), list(mesh.axis_sizes)] for mesh in meshes),
    }
    return {"jax": facts}


def _read_setting(name: str) -> str | None:
    value = getattr(jax.config, name, None)
    return None if value is None else str(value)


def _unsupported(detail: str, where: str, remedy: str) -> CkptError:
    return err(Code.STATE_UNSUPPORTED, detail, where=where, remedy=remedy)
