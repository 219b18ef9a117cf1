"""What passes through a conversion: tensors that are read when they are written, plain values, and what is left out.

It is what a checkpoint of ckptfmt holds, so that every kind has one way in and one way out, and not one for each other.

A pickle of 2 KB can refer to one dict along 2^30 paths, a tensor of one element can be 2^36 elements by a stride of 0,
and an index can name a file elsewhere. So what is read is bounded by the size of the source, and by its directory.
"""

from __future__ import annotations

import dataclasses
import mmap
import os
import stat
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, TypeAlias

from ckptfmt import limits
from ckptfmt.adapters.live_trees import GLOBAL, child_name
from ckptfmt.box import Box
from ckptfmt.documents.tables import TensorKey
from ckptfmt.dtypes import DTYPES
from ckptfmt.errors import CkptError, Code, err
from ckptfmt.layout.read_plan import iter_chunks

#: What to do about a file that isn't whole.
COPY: Final = "Copy it again from where it came from."

#: What to do about a value that can't be converted.
ANEW: Final = (
    "Load the file with the program that wrote it, if you trust the file, and save tensors and plain values alone."
)

#: Plain values that a source may hold, whatever its size. A scalar counts one, a container eight, text one for each
#: eight bytes.
_VALUES: Final = 100_000
#: More of them for each byte of the pickle: what is stored once and referred to several times.
_VALUES_RATIO: Final = 2
#: Bytes of tensors that a source may have, whatever its size.
_TENSORS_NBYTES: Final = 64 << 20
#: More of them for each byte of the source: tensors may show the same memory, or repeat it with a stride of 0.
_TENSORS_RATIO: Final = 16


class Budget:
    """How much a source may still make of what it stores."""

    def __init__(self, limit: int, *, what: str, where: str, remedy: str) -> None:
        self.left = limit
        self._said = (f"the file makes more than {limit:,} {what}", where, remedy)

    def spend(self, count: int) -> None:
        """Take so much away. Raises: FormatError(LIMIT_EXCEEDED)."""
        self.left -= count
        if self.left < 0:
            detail, where, remedy = self._said
            raise err(Code.LIMIT_EXCEEDED, detail, where=where, remedy=remedy)


def value_budget(nbytes: int, *, where: str) -> Budget:
    """Return the budget of the plain values that a pickle of so many bytes may expand to."""
    return Budget(
        _VALUES + _VALUES_RATIO * nbytes,
        what=f"plain values of {nbytes:,} bytes",
        where=where,
        remedy="Save it anew, with what it refers to many times stored as often, or once.",
    )


def tensor_budget(nbytes: int, *, where: str) -> Budget:
    """Return the budget of the bytes of tensors that a source of so many bytes may have."""
    return Budget(
        _TENSORS_NBYTES + _TENSORS_RATIO * nbytes,
        what=f"bytes of tensors of {nbytes:,} bytes that are stored",
        where=where,
        remedy="Save it anew with contiguous() of tensors that repeat few elements, or without them.",
    )


def member_of(root: Path, name: object, *, named_by: str) -> Path:
    """Return the path of a file that a source's own document names: a regular file of its directory.

    A symbolic link may lead to another file of the directory, or to the ``blobs`` of the Hugging Face cache of which
    the directory is a snapshot; files in that cache are such links.

    Args:
        root: the source's directory.
        name: as the document says it.
        named_by: the document, for messages.

    Raises: FormatError(UNSAFE_PATH, UNSAFE_FILE); IntegrityError(FILE_MISSING).
    """
    if type(name) is not str or name in ("", ".", "..") or "/" in name or "\0" in name or os.sep in name:
        raise err(Code.UNSAFE_PATH, f"it names a file {str(name)[:200]!r}", where=named_by)
    path = root / name
    try:
        kind = path.lstat().st_mode
        resolved = path.resolve(strict=True)
        regular = stat.S_ISREG(resolved.stat().st_mode)
    except (OSError, ValueError, RuntimeError):
        remedy = "Fetch the missing file, or copy the directory again."
        raise err(Code.FILE_MISSING, f"{named_by} names this file", where=str(path), remedy=remedy) from None
    home = root.resolve()
    blobs = [home.parent.parent / "blobs"] if home.parent.name == "snapshots" else []
    if stat.S_ISLNK(kind) and not any(resolved.parent == place for place in (home, *blobs)):
        remedy = "Replace the link by the file, if you trust it."
        raise err(Code.UNSAFE_FILE, "the file is a link out of the directory", where=str(path), remedy=remedy)
    if not regular:
        raise err(Code.UNSAFE_FILE, "not a regular file", where=str(path))
    return path


def read_exactly(path: Path | str, begin: int, out: memoryview, where: str) -> None:
    """Fill memory from a byte of a file on. Raises: IntegrityError(FILE_NBYTES) where the file ends before."""
    with Path(path).open("rb", buffering=0) as file:
        while out:
            count = os.preadv(file.fileno(), [out], begin)
            if not count:
                detail = f"the file ends before byte {begin + out.nbytes}"
                raise err(Code.FILE_NBYTES, detail, where=where, remedy=COPY)
            out, begin = out[count:], begin + count


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


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Refused:
    """A value of a foreign file that can't be converted: an error, unless the value's field isn't wanted.

    Attributes:
        error: the reason, with the value's key.
        is_tensor: whether the value is a tensor, of a kind that can't be converted.
    """

    error: CkptError
    is_tensor: bool = False


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


def text_of(key: TensorKey) -> str:
    """Return field and name of a tensor or value, and the scope if it is one worker's."""
    field, name, scope = key
    return f"{field}:{name}" if scope == GLOBAL else f"{field}:{name} ({scope})"


@dataclasses.dataclass(slots=True, kw_only=True)
class Content:
    """Everything that a source holds.

    Attributes:
        origin: what the source is, in words, with its article.
        tensors: by field, name and scope.
        leaves: plain values as trees; tensors within are `ckptfmt.documents.tree.TensorRef`.
        left_out: what of the source has no place in a checkpoint.
        refused: by field, the first of its values that can't be converted.
        step: training steps done, where the source says so.
        step_key: the key under which a foreign source says so.
        budget: of the bytes of tensors, where the source is foreign.
    """

    origin: str
    tensors: dict[TensorKey, Tensor] = dataclasses.field(default_factory=dict)
    leaves: dict[TensorKey, Any] = dataclasses.field(default_factory=dict)
    left_out: list[LeftOut] = dataclasses.field(default_factory=list)
    refused: dict[str, Refused] = dataclasses.field(default_factory=dict)
    step: int | None = None
    step_key: str | None = None
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


def check_depth(depth: int, name: str) -> None:
    """Check that a tree may go as deep. Raises: FormatError(DOC_DEPTH)."""
    if depth > limits.MSGPACK_DEPTH:
        detail = f"the value nests deeper than {limits.MSGPACK_DEPTH}"
        raise err(Code.DOC_DEPTH, detail, where=name[:64], requirement="REQ-TRE-007")


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
    check_depth(depth, name)

    def below(item: Any, key: object) -> Any:  # noqa: ANN401
        return map_tree(item, leaf, child_name(name, key), drop=drop, whole=whole, kept=kept, depth=depth + 1)

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
            drop(child_name(name, key), str(unfit))
    return made
