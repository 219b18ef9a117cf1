"""What passes through a conversion: tensors that are read when they are written, plain values, and what is left out.

It is what a checkpoint of ckptfmt holds, so that every kind has one way in and one way out, and not one for each other.
"""

from __future__ import annotations

import dataclasses
import mmap
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeAlias

from ckptfmt import limits
from ckptfmt.adapters.names import GLOBAL, key_text
from ckptfmt.box import Box
from ckptfmt.convert.bounds import Budget
from ckptfmt.documents.tables import TensorKey
from ckptfmt.dtypes import DTYPES
from ckptfmt.errors import Code, err
from ckptfmt.layout.read_plan import iter_chunks

#: How many bytes of a tensor are in memory at a time, apart from copies of these.
CHUNK_NBYTES: Final = 16 << 20


#: Fills memory with the bytes of a box, which has elements: C order, little-endian.
Read: TypeAlias = Callable[[Box, memoryview], None]

#: Less than this comes from the heap, in bytes.
_SMALL_NBYTES: Final = 1 << 18


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Array:
    """A tensor of a foreign file, before it has a name: one object for each memory, however often it is referred to.

    Attributes:
        dtype: of the format.
        shape: in elements.
        read: fills memory with the bytes of a box.
    """

    dtype: str
    shape: tuple[int, ...]
    read: Read


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Tensor:
    """A tensor on its way; also a `ckptfmt.write.snapshot.TensorSource`.

    Attributes:
        read: fills memory with the bytes of a box.
    """

    field: str
    name: str
    dtype: str
    global_shape: tuple[int, ...]
    read: Read
    scope: str = GLOBAL
    storage: str = "persistent"
    aliases: tuple[str, ...] = ()
    replica: bool = False

    @property
    def boxes(self) -> tuple[Box, ...]:
        """The whole tensor."""
        return (Box.whole(self.global_shape),)

    @property
    def key(self) -> TensorKey:
        """What identifies it among all."""
        return self.field, self.name, self.scope

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.boxes[0].element_count * DTYPES[self.dtype].nbytes

    def copy_into(self, box: Box, out: memoryview) -> None:
        """Copy the elements of `box` into `out`."""
        if box.element_count:
            self.read(box, out)

    def iter_chunks(self) -> Iterator[Box]:
        """Yield boxes of at most `CHUNK_NBYTES` that tile the tensor, in the order of its bytes."""
        return iter_chunks(self.boxes[0], DTYPES[self.dtype].nbytes, CHUNK_NBYTES)

    def iter_content(self, memory: Memory | None = None) -> Iterator[memoryview]:
        """Yield the tensor's bytes in order, a chunk at a time.

        Args:
            memory: to use for each chunk, so that it is gone when the next is asked for; None for new memory each time.
        """
        for box in self.iter_chunks():
            out = (memory or Memory()).take(box.element_count * DTYPES[self.dtype].nbytes)
            self.copy_into(box, out)
            yield out


class Memory:
    """Memory for one chunk at a time, mapped for it alone: what the C library gets back it may keep for itself."""

    def __init__(self) -> None:
        self._held = memoryview(b"")

    def take(self, nbytes: int) -> memoryview:
        """Return so many bytes, which are those that were returned before if that suffices."""
        if self._held.nbytes < nbytes:
            private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            self._held = memoryview(bytearray(nbytes) if nbytes < _SMALL_NBYTES else mmap.mmap(-1, nbytes, private))
        return self._held[:nbytes]


@dataclasses.dataclass(frozen=True, slots=True)
class LeftOut:
    """Something that the target doesn't hold, or not as it was.

    Attributes:
        what: field and name.
        reason: why, the same words for the same reason.
    """

    what: str
    reason: str


@dataclasses.dataclass(slots=True, kw_only=True)
class Content:
    """Everything that a source holds.

    Attributes:
        origin: what the source is, in words, with its article.
        tensors: by field, name and scope.
        leaves: plain values as trees; tensors within are `ckptfmt.documents.tree.TensorRef`.
        left_out: what of the source has no place in a checkpoint.
        step: training steps done, where the source says so.
        budget: of the bytes of tensors, where the source is foreign.
    """

    origin: str
    tensors: dict[TensorKey, Tensor] = dataclasses.field(default_factory=dict)
    leaves: dict[TensorKey, Any] = dataclasses.field(default_factory=dict)
    left_out: list[LeftOut] = dataclasses.field(default_factory=list)
    step: int | None = None
    budget: Budget | None = None

    def add(self, tensor: Tensor) -> None:
        """Add a tensor. Raises: StateError(STATE_NAME) for a name that is taken; FormatError(LIMIT_EXCEEDED)."""
        if len(tensor.global_shape) > limits.NDIM or len(tensor.name) > limits.NAME_NBYTES:
            detail = f"a name of {len(tensor.name)} characters, or {len(tensor.global_shape)} dimensions"
            raise err(Code.LIMIT_EXCEEDED, detail, where=tensor.name[:64], requirement="REQ-LIM-001")
        if self.budget is not None:
            self.budget.spend(tensor.nbytes)
        if tensor.key in self.tensors:
            raise err(Code.STATE_NAME, f"{tensor.field} has {tensor.name!r} twice", where=tensor.name)
        self.tensors[tensor.key] = tensor


class Unfit(Exception):  # noqa: N818 - no error: it says what is left out
    """A value that the target has no form for."""


#: Types of plain values that almost every conversion leaves as they are, of which long lists are.
_SCALARS: Final[frozenset[type]] = frozenset({type(None), bool, float, str})

#: Exactly these types are containers; what derives from them may hold more than its items.
_DICTS: Final = (dict, OrderedDict)
_ITEMS: Final = (list, tuple, set, frozenset)
_CONTAINERS: Final = frozenset({*_DICTS, *_ITEMS, deque, Counter})


def map_tree(
    value: Any,  # noqa: ANN401 - a tree
    leaf: Callable[[Any, str], Any],
    name: str = "",
    *,
    drop: Callable[[str, str], None] | None = None,
    whole: tuple[type, ...] = (),
    kept: frozenset[type] = _SCALARS,
    depth: int = 0,
) -> Any:  # noqa: ANN401 - the tree with other leaves
    """Return a tree of the same containers, with what `leaf` makes of each value that isn't one.

    Args:
        leaf: is given the value, and its name as arrays in trees are named.
        name: of the tree.
        drop: is told name and reason of each entry of a dict that `leaf` raises `Unfit` for, and that is left out.
        whole: kinds of containers that `leaf` is given as they are.
        kept: types of values that `leaf` would return as they are: a list of such values alone isn't looked at.

    Raises: FormatError(DOC_DEPTH); what `leaf` raises.
    """
    if depth > limits.MSGPACK_DEPTH:
        raise err(
            Code.DOC_DEPTH, f"nests deeper than {limits.MSGPACK_DEPTH}", where=name[:64], requirement="REQ-TRE-007"
        )

    def below(item: Any, key: object) -> Any:  # noqa: ANN401
        text = key_text(key)
        inner = f"{name}/{text}" if name else text
        return map_tree(item, leaf, inner, drop=drop, whole=whole, kept=kept, depth=depth + 1)

    kind = type(value)
    if kind in whole or kind not in _CONTAINERS:
        return leaf(value, name)
    if kind in _ITEMS:
        same = kept.issuperset(map(type, value))
        return kind(value if same else (below(item, index) for index, item in enumerate(value)))
    if kind is deque:
        return deque((below(item, index) for index, item in enumerate(value)), value.maxlen)
    if kind is Counter:
        counter: Counter[Any] = Counter()
        counter.update({key: below(item, key) for key, item in value.items()})
        return counter
    made = kind()
    for key, item in value.items():
        try:
            made[key] = below(item, key)
        except Unfit as unfit:
            if drop is None:
                raise
            drop(f"{name}/{key_text(key)}" if name else key_text(key), str(unfit))
    return made
