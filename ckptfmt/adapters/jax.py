"""Save and load JAX arrays and pytrees; `ckptfmt.adapters` imports this module once jax is loaded.

Each shard of an array is saved once, from the device that holds the shard's first replica. An array
whose shards are all in this process is a single whole tensor in the checkpoint. For any other
array, each shard is a piece at its offsets.

Arrays are immutable, and so are most nodes of a pytree. A load therefore creates a new tree with
the classes, shardings and dtypes of the live tree. The new tree replaces the live tree in the
`State`.

A dict, list or tuple is saved as itself. Any other node registered with JAX (a NamedTuple of Optax,
a FrozenDict, a dataclass of Flax, an nnx.State) is saved as a dict of its children, under JAX's own
keys. Names are those of `jax.tree_util.keystr`: ``0/mu/Dense_0/kernel``.
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

#: The saved form of a typed key: its numbers under `_KEY_DATA`, and its kind.
_KEY_DATA: Final = "key_data"
_KEY_KIND: Final = "jax.random.key"
#: Node types that are saved as themselves.
_PLAIN_NODES: Final = (type(None), dict, list, tuple, OrderedDict)
#: Python's number type for each kind of dtype that can be weakly typed.
_WEAK: Final[dict[str, type]] = {"i": int, "f": float, "c": complex}
#: Settings that determine bits of results.
_SETTINGS: Final = (
    "jax_default_matmul_precision", "jax_default_prng_impl", "jax_enable_x64",
    "jax_numpy_dtype_promotion", "jax_threefry_partitionable",
)  # fmt: skip


def is_array(value: object) -> bool:
    """Return whether a value is a JAX array. Typed keys and tracers are arrays."""
    return isinstance(value, jax.Array)


class PendingArray:
    """A number in transfer from a device to the host.

    The transfer needs no copy on the device, since JAX arrays are immutable.

    Args:
        array: an array of a single element.

    Raises: ValueError for an array of several elements.
    """

    def __init__(self, array: jax.Array) -> None:
        if array.size != 1:
            raise ValueError(f"an array of {array.size} elements")
        self._array = array
        array.copy_to_host_async()

    def is_ready(self) -> bool:
        """Return whether `bits` returns without waiting."""
        return bool(self._array.is_ready())

    def wait(self) -> None:
        """Wait until the device has computed the number."""
        self._array.block_until_ready()

    def bits(self) -> int:
        """Return the bits of the number as a 64-bit float, which represents all floats exactly."""
        number = np.asarray(self._array).reshape(-1)[:1].astype(np.float64)
        return int(number.view(np.uint64)[0])


def is_node(value: object) -> bool:
    """Return whether a value is a node of a pytree."""
    return not jax.tree_util.all_leaves([value])


def children_of(value: object) -> list[tuple[object, object]]:
    """Return the keys and the direct children of a node."""
    found, _ = jax.tree_util.tree_flatten_with_path(value, is_leaf=lambda child: child is not value)
    return [(_plain_key(path[0]), child) for path, child in found]


def has_arrays(value: object) -> bool:
    """Return whether a tree must be loaded as a pytree.

    Such a tree has JAX arrays, `jax.ShapeDtypeStruct` objects, or nodes that are saved as dicts. A
    node without arrays, such as an EmptyState of Optax, counts too: only its class can recreate it.
    """
    leaves = jax.tree_util.tree_leaves(value, is_leaf=_is_own_node)
    return any(is_array(leaf) or _is_abstract(leaf) or _is_own_node(leaf) for leaf in leaves)


def _is_own_node(value: object) -> bool:
    return type(value) not in _PLAIN_NODES and is_node(value)


def _is_abstract(value: object) -> bool:
    return isinstance(value, jax.ShapeDtypeStruct)


def _is_key(value: Any) -> bool:
    return bool(jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key))


def _plain_key(key: Any) -> object:
    """Return the plain key that an entry of a JAX path represents."""
    tree = jax.tree_util
    if isinstance(key, tree.DictKey | tree.FlattenedIndexKey):
        return key.key
    if isinstance(key, tree.SequenceKey):
        return key.idx
    return key.name if isinstance(key, tree.GetAttrKey) else str(key)


# --- save -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardSource:
    """A source that reads a JAX array; see `ckptfmt.write.snapshot.MemoryOf`.

    Attributes:
        shards: the single-device arrays that this process writes, each with its box.
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
        """Return the bytes of the elements of `box`, read-only.

        Returns: None if the box spans several shards, or if the bytes aren't contiguous.
        """
        held = next((_on_host(shard) for own, shard in self.shards if own == box), None)
        return (
            None if held is None or not held.flags.c_contiguous else held.reshape(-1).view(np.uint8)
        )


def _on_host(shard: jax.Array) -> NDArray[Any]:
    """Return the elements of a single-device array, without a copy where they are in host memory.

    The result is viewed as unsigned integers of the same size if such a type exists. Copies of
    integers preserve all bits of a NaN.
    """
    held: NDArray[Any] = np.asarray(shard)
    return held.view(f"u{held.itemsize}") if held.itemsize in (1, 2, 4, 8) else held


def source_of(array: jax.Array, *, field: str, name: str, scope: str) -> ShardSource:
    """Return the source of an array.

    Raises: StateError(STATE_UNSUPPORTED) for tracers, typed keys, donated arrays and unknown
        dtypes.
    """
    where = place_of(field, name)
    if isinstance(array, jax.core.Tracer):
        raise _unsupported("a tracer has no elements", where, "Save outside of jit, grad and vmap.")
    if _is_key(array):
        raise _unsupported(
            "a typed key isn't one array of numbers", where, "Save jax.random.key_data(key)."
        )
    if array.is_deleted():
        remedy = "Give the step's return value, not an argument donated by donate_argnums."
        raise _unsupported(
            "the array was donated or deleted, and its elements are gone", where, remedy
        )
    kind = dtype_name(np.dtype(array.dtype), where=where)
    first = [shard for shard in array.addressable_shards if shard.replica_id == 0]
    shards = tuple((_box_of(shard.index, array.shape), shard.data) for shard in first)
    return ShardSource(
        field=field,
        name=name,
        dtype=kind,
        global_shape=array.shape,
        scope=scope,
        boxes=(Box.whole(array.shape),)
        if array.is_fully_addressable
        else tuple(box for box, _ in shards),
        shards=shards,
    )


def encode(encoder: Encoder, value: jax.Array, name: str) -> object:
    """Return the tree of an array, or the array itself if the encoder allows no references.

    Raises: StateError(STATE_UNSUPPORTED).
    """
    if encoder.inline:
        return value
    if isinstance(value, jax.core.Tracer) or not _is_key(value):
        encoder.sources.append(
            source_of(value, field=encoder.field, name=name, scope=encoder.scope)
        )
        return TensorRef(name, "numpy")
    inner = child_name(name, _KEY_DATA)
    data = jax.random.key_data(value)
    encoder.sources.append(source_of(data, field=encoder.field, name=inner, scope=encoder.scope))
    kind = _kind_of_key(jax.random.key_impl(value))
    return {FLATTENED: kind, _KEY_DATA: TensorRef(inner, "numpy")}


def _kind_of_key(implementation: object) -> str:
    return f"{_KEY_KIND}:{implementation}"


def _parts_of_key(key: Any) -> tuple[Any, Any]:
    """Return the implementation of a typed key, and the key's numbers, or their shape and dtype.

    Args:
        key: an array of keys, or a `jax.ShapeDtypeStruct` with a key's dtype.
    """
    if not _is_abstract(key):
        return jax.random.key_impl(key), jax.random.key_data(key)
    kinds: list[Any] = []

    def read(traced: jax.Array) -> jax.Array:
        kinds.append(jax.random.key_impl(traced))
        return jax.random.key_data(traced)

    data = jax.eval_shape(read, key)
    return kinds[0], jax.ShapeDtypeStruct(data.shape, data.dtype)


def arrays_of(tree: Any, field: str) -> Any:
    """Return a field's tree from `load_trees`, with JAX arrays and keys in place of numpy arrays.

    The arrays are on JAX's default device. A tied tensor becomes one array.

    Raises: StateError(STATE_UNSUPPORTED) for a dtype that JAX would convert.
    """
    made: dict[int, jax.Array] = {}

    def convert(value: Any, name: str) -> Any:
        if isinstance(value, np.ndarray):
            if id(value) not in made:
                made[id(value)] = _array_of(value, place_of(field, name))
            return made[id(value)]
        if not isinstance(value, dict | list | tuple):
            return value
        if isinstance(value, dict):
            items = {key: convert(item, child_name(name, key)) for key, item in value.items()}
            kind = value.get(FLATTENED)
            if isinstance(kind, str) and kind.startswith(f"{_KEY_KIND}:"):
                implementation = kind.removeprefix(f"{_KEY_KIND}:")
                return jax.random.wrap_key_data(items[_KEY_DATA], impl=implementation)
            return type(value)(items)
        return type(value)(convert(item, child_name(name, i)) for i, item in enumerate(value))

    return convert(tree, "")


def _array_of(held: NDArray[Any], where: str) -> jax.Array:
    if jax.dtypes.canonicalize_dtype(held.dtype) != held.dtype:
        remedy = "Set jax.config.update('jax_enable_x64', True), or load with framework='numpy'."
        raise _unsupported(f"JAX would convert {held.dtype}", where, remedy)
    return jnp.asarray(held)


def _box_of(index: Iterable[Any], shape: tuple[int, ...]) -> Box:
    """Return the box that a tuple of JAX's slices selects in an array of this shape."""
    spans = [slice(*cut.indices(extent)) for cut, extent in zip(index, shape, strict=True)]
    return Box(tuple(span.start for span in spans), tuple(span.stop - span.start for span in spans))


# --- load -----------------------------------------------------------------------------------------


def plan_tree(plan: LoadPlan, unit: Unit) -> None:
    """Plan to build a new tree for a unit. The new tree replaces the live tree after all reads.

    Arrays are found by name, in any saved tree. Plain values are found at their path in the saved
    tree.

    Problems: TENSOR_MISSING, LEAF_MISSING, LEAF_UNEXPECTED, and the problems of `may_fill`.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(unit.value)
    tree = _TreePlan(plan, unit)
    makers = [tree.plan_leaf(tuple(map(_plain_key, path)), live) for path, live in leaves]
    tree.refuse_leftover()
    plan.actions.append(
        lambda: put_back(plan, unit, structure.unflatten([make() for make in makers]))
    )


class _TreePlan:
    """The plan to load a single tree, leaf by leaf."""

    def __init__(self, plan: LoadPlan, unit: Unit) -> None:
        self._plan = plan
        self._unit = unit
        name = plan.renaming.saved_name(unit.name)
        #: Name, scope and value of the saved leaf; the value is `MISSING` if only tensors were
        #: saved.
        self._name, self._scope, self._saved = plan.leaf(unit.field, [name], unit.scope)
        self._met: set[tuple[object, ...]] = set()

    def plan_leaf(self, path: tuple[object, ...], live: Any) -> Callable[[], object]:
        """Return a function that returns the leaf's value. The function runs after all reads."""
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
        """Return the saved tensor for a live array.

        Returns: None if the array isn't chosen, or wasn't saved. A missing tensor becomes a
            problem.
        """
        chosen = self._plan.choose(self._unit.field, [name])
        saved = self._plan.tensor(self._unit.field, chosen, self._unit.scope) if chosen else None
        if chosen and saved is None:
            renamed = "" if chosen[0] == name else f" as {chosen[0]}"
            self._plan.miss(self._unit.field, name, f"not saved{renamed}", shape=shape)
        return saved

    def _plan_key(self, path: tuple[object, ...], live: Any, name: str) -> Callable[[], object]:
        where = place_of(self._unit.field, name)
        kind, data = _parts_of_key(live)
        at = _find_at(self._saved, path)
        found = at.get(FLATTENED) if isinstance(at, dict) else None
        if found is not None and found != _kind_of_key(kind):
            self._plan.problem(
                Code.STATE_UNSUPPORTED, where, f"saved as {found}, here {_kind_of_key(kind)}"
            )
            return lambda: live
        saved = self._find(child_name(name, _KEY_DATA), tuple(data.shape))
        if saved is None:
            return lambda: live
        make = _plan_array(self._plan, data, saved, name)
        sharding = live.sharding if _is_abstract(live) else None

        def wrap() -> jax.Array:
            key = jax.random.wrap_key_data(make(), impl=kind)
            return key if sharding is None else jax.device_put(key, sharding)

        return wrap

    def _plan_value(
        self, path: tuple[object, ...], live: object, name: str
    ) -> Callable[[], object]:
        saved = _find_at(self._saved, path)
        if saved is MISSING:
            if self._plan.only.fits(self._unit.field, name):
                self._plan.problem(Code.LEAF_MISSING, place_of(self._unit.field, name), "not saved")
            return lambda: live
        placed = Placer(self._plan, field=self._unit.field, scope=self._scope).place(
            live, saved, name
        )
        return lambda: placed

    def refuse_leftover(self) -> None:
        """Add a problem for each saved value without a leaf in the live tree.

        Saved tensors are skipped: the load checks all tensors itself.
        """
        for path, value in _iter_paths(self._saved, self._met):
            name = join_name((self._name, *path)) if self._name else join_name(path)
            if (
                value is not None
                and not isinstance(value, TensorRef)
                and self._plan.only.fits(self._unit.field, name)
            ):
                self._plan.problem(
                    Code.LEAF_UNEXPECTED,
                    place_of(self._unit.field, name),
                    "the live tree has no such leaf",
                )


def _find_at(tree: object, path: tuple[object, ...]) -> Any:
    """Return the value at a path in a saved tree, or `MISSING`."""
    for key in path:
        tree = (_items(tree) or {}).get(key, MISSING)
    return tree


def _iter_paths(
    tree: object, met: set[tuple[object, ...]], path: tuple[object, ...] = ()
) -> Iterator[tuple[tuple[object, ...], object]]:
    """Yield path and value of each part of a saved tree outside the paths in `met`."""
    if tree is MISSING or path in met:
        return
    items = _items(tree)
    if items is None:
        yield path, tree
        return
    for key, value in items.items():
        yield from _iter_paths(value, met, (*path, key))


def _items(tree: object) -> dict[object, object] | None:
    """Return the items of a list, tuple or dict in a saved tree, by key; None for plain values."""
    if isinstance(tree, list | tuple):
        return dict(enumerate(tree))
    return tree if isinstance(tree, dict) else None


def _plan_array(
    plan: LoadPlan, live: Any, saved: IndexTensor, name: str
) -> Callable[[], jax.Array]:
    """Plan to read the parts of an array that this process's devices need.

    Returns: a function that creates the array after all reads.
    """
    where = place_of(saved.field, name)
    dtype = np.dtype(live.dtype)
    if not may_fill(
        plan, saved, shape=live.shape, dtype=lambda: dtype_name(dtype, where=where), where=where
    ):
        return lambda: live
    is_weak = bool(getattr(live, "weak_type", False))
    if is_weak and dtype != _weak_zero(dtype).dtype:
        plan.problem(
            Code.STATE_UNSUPPORTED,
            where,
            f"a weak {dtype}, which no number of Python has: give it a dtype",
        )
        return lambda: live
    finish: Callable[[jax.Array, Any], jax.Array] = _weaken if is_weak else lambda array, _: array
    sharding = live.sharding if _is_abstract(live) or live.committed else None
    cuts = (
        [()] if sharding is None else sharding.addressable_devices_indices_map(live.shape).values()
    )
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
            held={box: ArraySink.of(saved, array) for box, array in arrays.items()},
        )
    )
    if sharding is not None:
        read = functools.partial(_read_cut, arrays, live.shape)
        return lambda: finish(
            jax.make_array_from_callback(live.shape, sharding, read, dtype=dtype), sharding
        )
    (array,) = arrays.values()
    return lambda: finish(jnp.asarray(array), None)


def _read_cut(
    arrays: Mapping[Box, NDArray[Any]], shape: tuple[int, ...], cut: tuple[slice, ...]
) -> NDArray[Any]:
    return arrays[_box_of(cut, shape)]


def _weak_zero(dtype: np.dtype[Any]) -> jax.Array:
    """Return a Python zero as a weakly typed array.

    In an operation with a weakly typed array, the other operand determines the result's dtype.
    """
    return jnp.asarray(_WEAK.get(dtype.kind, bool)())


def _weaken(array: jax.Array, sharding: Any) -> jax.Array:
    """Return an array with a weak type, on the same devices.

    A functional write into a weakly typed array keeps the weak type.
    """

    def write(held: jax.Array) -> jax.Array:
        return jnp.broadcast_to(_weak_zero(np.dtype(held.dtype)), held.shape).at[...].set(held)

    return jax.jit(write, **({} if sharding is None else {"out_shardings": sharding}))(array)


# --- context --------------------------------------------------------------------------------------


def local_facts(units: Iterable[Unit]) -> dict[str, object]:
    """Return the versions, settings, devices and meshes of the JAX arrays in a state.

    Returns: an empty dict if the state has no JAX array.
    """
    arrays = [leaf for unit in units for leaf in jax.tree_util.tree_leaves(unit.value)]
    arrays = [leaf for leaf in arrays if is_array(leaf) and not isinstance(leaf, jax.core.Tracer)]
    if not arrays:
        return {}
    devices = {device for array in arrays for device in array.sharding.device_set}
    meshes = {
        array.sharding.mesh
        for array in arrays
        if isinstance(array.sharding, jax.sharding.NamedSharding)
    }
    facts = {
        "versions": {"jax": jax.__version__, "jaxlib": jax.lib.__version__},
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "settings": {name: _read_setting(name) for name in _SETTINGS},
        "devices": len(devices),
        "device_kinds": sorted({f"{device.platform}: {device.device_kind}" for device in devices}),
        "meshes": sorted(
            [list(map(str, mesh.axis_names)), list(mesh.axis_sizes)] for mesh in meshes
        ),
    }
    return {"jax": facts}


def _read_setting(name: str) -> str | None:
    value = getattr(jax.config, name, None)
    return None if value is None else str(value)


def _unsupported(detail: str, where: str, remedy: str) -> CkptError:
    return err(Code.STATE_UNSUPPORTED, detail, where=where, remedy=remedy)
