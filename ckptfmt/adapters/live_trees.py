"""Encode live values as trees: plain values unchanged, tensors as references to sources."""

from __future__ import annotations

import functools
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from ckptfmt import limits
from ckptfmt.adapters import Sides, find_sides
from ckptfmt.adapters.numpy import ArraySource, array_of, inline_array
from ckptfmt.digest import digest_bytes
from ckptfmt.documents.part import Leaf
from ckptfmt.documents.tree import PLAIN, InlineArray, TensorRef, dump_tree
from ckptfmt.dtypes import DTYPES
from ckptfmt.errors import CkptError, Code, err
from ckptfmt.state import place_of
from ckptfmt.write.snapshot import TensorSource

#: The scope of values that are equal on all workers, and of tensors that the workers hold in
#: pieces.
GLOBAL = "global"


def worker_scope(worker: int) -> str:
    """Return the scope of values that belong to a single worker."""
    return f"lw/{worker}"


def key_text(key: object) -> str:
    """Return a mapping's key as text for a name: ``~`` and ``/`` escaped as in a JSON pointer.

    >>> key_text("a/b~c"), key_text(3)
    ('a~1b~0c', '3')
    """
    if type(key) is str and "~" not in key and "/" not in key:
        return key
    try:
        text = key if isinstance(key, str) else repr(key)
    except ValueError:  # Python refuses to print an integer of more than 4,300 digits.
        text = f"({type(key).__name__})"
    return text.replace("~", "~0").replace("/", "~1")


def child_name(name: str, key: object) -> str:
    """Return the name of the value under `key` in a container.

    The container is called `name`; the name of a whole field is empty.
    """
    return f"{name}/{key_text(key)}" if name else key_text(key)


def too_deep(where: str) -> CkptError:
    """Return the error for a live value that nests too deeply, or contains itself."""
    return err(
        Code.DOC_DEPTH,
        f"the value nests deeper than {limits.MSGPACK_DEPTH}",
        where=where,
        requirement="REQ-TRE-007",
        remedy="Flatten the value, or break its cycle.",
    )


def join_name(path: Iterable[object]) -> str:
    """Return the name of the value at `path`, a sequence of keys.

    >>> join_name(["extra", "ema", "layers.0.weight"])
    'extra/ema/layers.0.weight'
    """
    return "/".join(key_text(key) for key in path)


def prefix_of(path: Iterable[object]) -> str:
    """Return the prefix of all names beneath `path`.

    >>> prefix_of([]), prefix_of(["gen"])
    ('', 'gen/')
    """
    name = join_name(path)
    return f"{name}/" if name else ""


def find_below(tree: object, path: Iterable[object]) -> Any:
    """Return the value at a path of keys and positions in a tree, or None if there is none.

    >>> (find_below({"optimizers": [1, 2]}, ["optimizers", 1]), find_below([1], ["a"]),
    ...  find_below({}, []))
    (2, None, {})
    """
    for key in path:
        if isinstance(tree, list):
            tree = dict(enumerate(tree))
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def attributes_of(value: object) -> dict[str, Any]:
    """Return the ``__dict__`` of an object, or an empty dict if the object has none.

    No code of the object's class runs.

    >>> import types
    >>> attributes_of(types.SimpleNamespace(a=1)), attributes_of(3)
    ({'a': 1}, {})
    """
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return found if type(found) is dict else {}


#: The key that marks the tree of a composite tensor: a dict from this key to the name of the
#: tensor's class, and from attribute names to the inner tensors. The name of the class may be a
#: dict with the name under ``kind`` and further data that rebuild the tensor.
FLATTENED: Final = "ckptfmt.flattened"


def flattened_kind(tree: Mapping[Any, Any]) -> str:
    """Return the class name of a composite tensor, given its tree."""
    made = tree[FLATTENED]
    return str(made.get("kind")) if isinstance(made, dict) else str(made)


def plain_leaves(values: Sequence[tuple[str, str, object]], sides: Sides | None) -> list[Leaf]:
    """Return the leaves of values without tensors: arrays become parts of the leaves.

    Args:
        values: field, name and live value of each leaf of the scope ``global``.
        sides: the modules for torch and JAX; None to look the modules up.

    Raises: as `Encoder.leaf`.
    """
    trees = [
        Encoder(field=field, scope=GLOBAL, inline=True, sides=sides).encode(value, name)
        for field, name, value in values
    ]
    return [
        Leaf(
            field=field,
            name=name,
            scope=GLOBAL,
            value=dump_tree(tree, where=functools.partial(place_of, field, name)),
        )
        for (field, name, _), tree in zip(values, trees, strict=True)
    ]


class Encoder:
    """An encoder of live values as trees, which collects the tensors in them.

    Args:
        field: the field of the leaves and tensors.
        scope: the scope of the leaves and tensors.
        inline: whether numpy arrays become part of the tree. Torch tensors can't be encoded then.
        sides: the modules for torch and JAX; None to look the modules up.
    """

    def __init__(
        self, *, field: str, scope: str, inline: bool = False, sides: Sides | None = None
    ) -> None:
        self.field = field
        self.scope = scope
        self.inline = inline
        self.sources: list[TensorSource] = []
        self._depth = 0
        self.sides = find_sides() if sides is None else sides

    def leaf(self, name: str, value: object, *, tensors_under: str | None = None) -> Leaf:
        """Return the leaf of a value.

        Args:
            name: the leaf's name.
            value: the live value. Its tensors become sources.
            tensors_under: the prefix of the tensors' names. Default: the leaf's name.

        Raises: StateError(STATE_UNSUPPORTED); FormatError(LIMIT_EXCEEDED, DOC_DEPTH).
        """
        return self.leaf_of(
            name, self.encode(value, name if tensors_under is None else tensors_under)
        )

    def leaf_of(self, name: str, tree: object) -> Leaf:
        """Return the leaf of a tree that `encode` returned."""
        content = dump_tree(tree, where=functools.partial(place_of, self.field, name))
        return Leaf(field=self.field, name=name, scope=self.scope, value=content)

    def encode(self, value: object, name: str) -> object:
        """Return the tree of a value.

        A value of an unsupported type stays in the tree unchanged, and `dump_tree` reports its
        place. The tree may share containers of plain values with the live value, so it is valid
        only until the value changes.
        """
        kind = type(value)
        if kind in PLAIN:
            return value
        encode = _CONTAINERS.get(kind)
        if encode is not None:
            return self._encode_container(encode, value, name)
        if kind is not np.ndarray:
            self._look_for_libraries()
            of_jax = self.sides.jax
            if of_jax is not None and of_jax.is_node(value):
                return self._encode_container(_encode_node, value, name)
        if isinstance(value, np.generic | np.ndarray):
            return self._encode_array(value, name)
        side, of_jax = self.sides
        if of_jax is not None and of_jax.is_array(value):
            side = of_jax
        return value if side is None else side.encode(self, value, name)

    def _encode_array(self, value: Any, name: str) -> object:
        if self.inline or isinstance(value, np.generic):
            return inline_array(value, field=self.field, name=name)
        self.sources.append(ArraySource.of(value, field=self.field, name=name, scope=self.scope))
        return TensorRef(name, "numpy")

    def _look_for_libraries(self) -> None:
        """Look up torch and JAX again if the code of a value has imported a library."""
        side, of_jax = self.sides
        if (side is None and "torch" in sys.modules) or (of_jax is None and "jax" in sys.modules):
            self.sides = find_sides()

    def _encode_container(
        self, encode: Callable[[Encoder, Any, str], object], value: object, name: str
    ) -> object:
        if self._depth > limits.MSGPACK_DEPTH:
            raise too_deep(place_of(self.field, name[:64]))
        self._depth += 1
        try:
            return encode(self, value, name)
        finally:
            self._depth -= 1


def fingerprint(value: object, *, field: str, name: str) -> tuple[bytes, dict[str, bytes]]:
    """Return the encoded tree of a value, and a digest of each tensor in the value.

    Two fingerprints are equal if and only if all bits of the values are equal.
    """
    encoder = Encoder(field=field, scope="global")
    leaf = encoder.leaf(name, value)
    return leaf.value, {source.name: source_digest(source) for source in encoder.sources}


def plain_values(tree: Any) -> Any:
    """Return the live values of a tree without references to tensors."""
    if isinstance(tree, InlineArray):
        return array_of(tree)
    if type(tree) in (list, tuple):
        return type(tree)(plain_values(item) for item in tree)
    if type(tree) in (dict, Counter):
        return {key: plain_values(item) for key, item in tree.items()}
    return tree


def source_digest(source: TensorSource) -> bytes:
    """Return a digest of a source's dtype, global shape and local elements."""
    content = bytearray(repr((source.dtype, source.global_shape)).encode())
    for box in source.boxes:
        piece = bytearray(box.element_count * DTYPES[source.dtype].nbytes)
        source.copy_into(box, memoryview(piece))
        content += digest_bytes(piece)
    return digest_bytes(content)


def _encode_list(encoder: Encoder, value: Any, name: str) -> object:
    if PLAIN.issuperset(map(type, value)):
        return value
    items = [
        item if type(item) in PLAIN else encoder.encode(item, child_name(name, index))
        for index, item in enumerate(value)
    ]
    return deque(items, value.maxlen) if isinstance(value, deque) else type(value)(items)


def _encode_dict(encoder: Encoder, value: Any, name: str) -> object:
    if PLAIN.issuperset(map(type, value.values())):
        return value
    items = {
        key: item if type(item) in PLAIN else encoder.encode(item, child_name(name, key))
        for key, item in value.items()
    }
    return items if type(value) is dict else OrderedDict(items)


def _encode_counter(encoder: Encoder, value: Any, name: str) -> object:
    counter: Counter[object] = Counter()
    for key, item in value.items():
        counter[key] = encoder.encode(item, child_name(name, key))  # type: ignore[assignment]
    return counter


def _encode_set(encoder: Encoder, value: Any, name: str) -> object:
    return type(value)(encoder.encode(item, child_name(name, item)) for item in value)


def _encode_node(encoder: Encoder, value: Any, name: str) -> object:
    children = encoder.sides.jax.children_of(value)
    return {key: encoder.encode(child, child_name(name, key)) for key, child in children}


#: Functions by exact type. An instance of a subclass may hold more than its items.
_CONTAINERS: Final[dict[type, Callable[[Encoder, Any, str], object]]] = {
    list: _encode_list,
    tuple: _encode_list,
    deque: _encode_list,
    dict: _encode_dict,
    OrderedDict: _encode_dict,
    Counter: _encode_counter,
    set: _encode_set,
    frozenset: _encode_set,
}
