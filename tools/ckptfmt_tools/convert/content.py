"""The contents that pass through a conversion: tensors, plain values, and the parts left out.

A `Content` holds the contents of a ckptfmt checkpoint. Each format has one reader that fills a
`Content` and one writer that takes a `Content`, instead of a converter for each pair of formats.

Foreign files are hostile input. A pickle of 2 KB can refer to one dict along 2^30 paths, a tensor
of one element can be 2^36 elements by a stride of 0, and an index can name a file elsewhere. So the
size of the source bounds the values and tensor bytes read, and only files of the source's directory
are read.
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
from ckptfmt.documents.manifest import Manifest
from ckptfmt.documents.tables import TensorKey
from ckptfmt.dtypes import DTYPES
from ckptfmt.errors import CkptError, Code, err
from ckptfmt.layout.read_plan import iter_chunks

#: Remedy for an incomplete file.
COPY: Final = "Copy it again from where it came from."

#: Remedy for an inconvertible value.
ANEW: Final = (
    "Load the file with the program that wrote it, if you trust the file, and save"
    " tensors and plain values alone."
)

#: Number of plain values allowed to a source of any size. A scalar counts as 1, a container as
#: 8, a text as 1 for each eight bytes.
_VALUES: Final = 100_000
#: Additional plain values for each byte of the pickle, since a value stored once may be referred to
#: several times.
_VALUES_RATIO: Final = 2
#: Bytes of tensors allowed to a source of any size.
_TENSORS_NBYTES: Final = 64 << 20
#: Additional tensor bytes for each byte of the source: tensors may share memory, or repeat it with
#: a stride of 0.
_TENSORS_RATIO: Final = 16


class Budget:
    """The number of values or bytes left for the expansion of a source."""

    def __init__(self, limit: int, *, what: str, where: str, remedy: str) -> None:
        self.left = limit
        self._said = (f"the file makes more than {limit:,} {what}", where, remedy)

    def spend(self, count: int) -> None:
        """Subtract `count` from the budget. Raises: FormatError(LIMIT_EXCEEDED)."""
        self.left -= count
        if self.left < 0:
            detail, where, remedy = self._said
            raise err(Code.LIMIT_EXCEEDED, detail, where=where, remedy=remedy)


def value_budget(nbytes: int, *, where: str) -> Budget:
    """Return the budget of the plain values of a pickle of `nbytes` bytes."""
    return Budget(
        _VALUES + _VALUES_RATIO * nbytes,
        what=f"plain values of {nbytes:,} bytes",
        where=where,
        remedy="Save the file anew; store repeated objects once, or once per reference.",
    )


def tensor_budget(nbytes: int, *, where: str) -> Budget:
    """Return the budget of the tensor bytes of a source of `nbytes` bytes."""
    return Budget(
        _TENSORS_NBYTES + _TENSORS_RATIO * nbytes,
        what=f"bytes of tensors of {nbytes:,} bytes that are stored",
        where=where,
        remedy=(
            "Save it anew with contiguous() of tensors that repeat few elements, or without them."
        ),
    )


def member_of(root: Path, name: object, *, named_by: str) -> Path:
    """Return the path of a regular file of the source's directory, named by a source's document.

    A symbolic link may lead to another file of the directory, or to the ``blobs`` of the Hugging
    Face cache if the directory is a snapshot of the cache: files of a snapshot are such links.

    Args:
        root: the source's directory.
        name: the file's name as the document gives it.
        named_by: the document's path, for messages.

    Raises: FormatError(UNSAFE_PATH, UNSAFE_FILE); IntegrityError(FILE_MISSING).
    """
    if (
        type(name) is not str
        or name in ("", ".", "..")
        or "/" in name
        or "\0" in name
        or os.sep in name
    ):
        raise err(Code.UNSAFE_PATH, f"it names a file {str(name)[:200]!r}", where=named_by)
    path = root / name
    try:
        kind = path.lstat().st_mode
        resolved = path.resolve(strict=True)
        regular = stat.S_ISREG(resolved.stat().st_mode)
    except (OSError, ValueError, RuntimeError):
        remedy = "Fetch the missing file, or copy the directory again."
        raise err(
            Code.FILE_MISSING, f"{named_by} names this file", where=str(path), remedy=remedy
        ) from None
    home = root.resolve()
    blobs = [home.parent.parent / "blobs"] if home.parent.name == "snapshots" else []
    if stat.S_ISLNK(kind) and not any(resolved.parent == place for place in (home, *blobs)):
        remedy = "Replace the link by the file, if you trust it."
        raise err(
            Code.UNSAFE_FILE,
            "the file is a link out of the directory",
            where=str(path),
            remedy=remedy,
        )
    if not regular:
        raise err(Code.UNSAFE_FILE, "not a regular file", where=str(path))
    return path


def read_exactly(path: Path | str, begin: int, out: memoryview, where: str) -> None:
    """Fill `out` from byte `begin` of a file on.

    Raises: IntegrityError(FILE_NBYTES) where the file is too short.
    """
    with Path(path).open("rb", buffering=0) as file:
        while out:
            count = os.preadv(file.fileno(), [out], begin)
            if not count:
                detail = f"the file ends before byte {begin + out.nbytes}"
                raise err(Code.FILE_NBYTES, detail, where=where, remedy=COPY)
            out = out[count:]
            begin = begin + count


#: Bytes of a tensor in memory at a time, not counting copies of these bytes.
CHUNK_NBYTES: Final = 16 << 20


#: A function to fill memory with the bytes of a non-empty box: C order, little-endian.
Read: TypeAlias = Callable[[Box, memoryview], None]

#: Sizes in bytes below this bound are allocated on the heap.
_SMALL_NBYTES: Final = 1 << 18


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Array:
    """A tensor of a foreign file, before it has a name.

    Tensors with the same elements in the same memory share an `Array`.

    Attributes:
        dtype: the tensor's dtype, named as in ckptfmt.
        shape: sizes in elements.
        read: the function to fill memory with the bytes of a box.
    """

    dtype: str
    shape: tuple[int, ...]
    read: Read


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Refused:
    """A value of a foreign file that can't be converted: an error only if the field is wanted.

    Attributes:
        error: the reason, with the value's key.
        is_tensor: whether the value is a tensor, of a kind that can't be converted.
    """

    error: CkptError
    is_tensor: bool = False


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Tensor:
    """A tensor in a conversion; also a `ckptfmt.write.snapshot.TensorSource`.

    Attributes:
        read: the function to fill memory with the bytes of a box.
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
        """The key of the tensor among all tensors of a checkpoint: field, name and scope."""
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
        """Yield boxes of at most `CHUNK_NBYTES` that tile the tensor, in the order of bytes."""
        return iter_chunks(self.boxes[0], DTYPES[self.dtype].nbytes, CHUNK_NBYTES)

    def iter_content(self, memory: Memory | None = None) -> Iterator[memoryview]:
        """Yield the tensor's bytes in order, a chunk at a time.

        Args:
            memory: the memory for all chunks, so that each chunk is overwritten by the next; None
                for new memory for each chunk.
        """
        for box in self.iter_chunks():
            out = (memory or Memory()).take(box.element_count * DTYPES[self.dtype].nbytes)
            self.copy_into(box, out)
            yield out


class Memory:
    """Memory for one chunk at a time.

    The memory is mapped, and so returned to the system: the C library may keep freed heap memory.
    """

    def __init__(self) -> None:
        self._held = memoryview(b"")

    def take(self, nbytes: int) -> memoryview:
        """Return `nbytes` bytes of memory: the previous call's memory where large enough."""
        if self._held.nbytes < nbytes:
            private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            self._held = memoryview(
                bytearray(nbytes) if nbytes < _SMALL_NBYTES else mmap.mmap(-1, nbytes, private)
            )
        return self._held[:nbytes]


@dataclasses.dataclass(frozen=True, slots=True)
class LeftOut:
    """A value or property of the source that the target lacks, or holds differently.

    Attributes:
        what: field and name.
        reason: the reason, in equal words for equal reasons.
    """

    what: str
    reason: str


def text_of(key: TensorKey) -> str:
    """Return field and name of a tensor or value, and the scope if only one worker has it."""
    field, name, scope = key
    return f"{field}:{name}" if scope == GLOBAL else f"{field}:{name} ({scope})"


@dataclasses.dataclass(slots=True, kw_only=True)
class Content:
    """All tensors and values of a source.

    Attributes:
        origin: the kind of source, in words, with its article.
        tensors: the tensors by field, name and scope.
        leaves: plain values as trees; tensors within are `ckptfmt.documents.tree.TensorRef`.
        left_out: parts of the source without a place in a checkpoint.
        refused: the first inconvertible value of each field.
        step: number of training steps done; None where the source has no such number.
        step_key: key of the step in a foreign source.
        budget: budget of tensor bytes; None where the source is a checkpoint of ckptfmt.
        manifest: the manifest of a checkpoint of ckptfmt; None for a foreign source.
        frozen: the tensors that a checkpoint of ckptfmt takes from a frozen base.
    """

    origin: str
    tensors: dict[TensorKey, Tensor] = dataclasses.field(default_factory=dict)
    leaves: dict[TensorKey, Any] = dataclasses.field(default_factory=dict)
    left_out: list[LeftOut] = dataclasses.field(default_factory=list)
    refused: dict[str, Refused] = dataclasses.field(default_factory=dict)
    step: int | None = None
    step_key: str | None = None
    budget: Budget | None = None
    manifest: Manifest | None = None
    frozen: frozenset[TensorKey] = frozenset()

    def add(self, tensor: Tensor) -> None:
        """Add a tensor.

        Raises: StateError(STATE_NAME) for a taken name; FormatError(LIMIT_EXCEEDED).
        """
        if len(tensor.global_shape) > limits.NDIM or len(tensor.name) > limits.NAME_NBYTES:
            detail = (
                f"a name of {len(tensor.name)} characters, or {len(tensor.global_shape)} dimensions"
            )
            raise err(
                Code.LIMIT_EXCEEDED, detail, where=tensor.name[:64], requirement="REQ-LIM-001"
            )
        if self.budget is not None:
            self.budget.spend(tensor.nbytes)
        if tensor.key in self.tensors:
            raise err(
                Code.STATE_NAME, f"{tensor.field} has {tensor.name!r} twice", where=tensor.name
            )
        self.tensors[tensor.key] = tensor


class Unfit(Exception):  # noqa: N818
    """A value for which the target has no form."""


#: Types of plain values left unchanged by almost every conversion; long lists consist
#: of.
_SCALARS: Final[frozenset[type]] = frozenset({type(None), bool, float, str})

#: Values of exactly these types are containers. An instance of a derived class may hold more than
#: items.
_DICTS: Final = (dict, OrderedDict)
_ITEMS: Final = (list, tuple, set, frozenset)
_CONTAINERS: Final = frozenset({*_DICTS, *_ITEMS, deque, Counter})


def check_depth(depth: int, name: str) -> None:
    """Check that `depth` is within the limit of a tree's depth. Raises: FormatError(DOC_DEPTH)."""
    if depth > limits.MSGPACK_DEPTH:
        detail = f"the value nests deeper than {limits.MSGPACK_DEPTH}"
        raise err(Code.DOC_DEPTH, detail, where=name[:64], requirement="REQ-TRE-007")


def map_tree(
    value: Any,
    leaf: Callable[[Any, str], Any],
    name: str = "",
    *,
    drop: Callable[[str, str], None] | None = None,
    whole: tuple[type, ...] = (),
    kept: frozenset[type] = _SCALARS,
    depth: int = 0,
) -> Any:
    """Return a tree of the same containers, with each leaf value replaced by `leaf`'s result.

    Args:
        leaf: the function to make the new value, given the value and its name. Names follow
            the same rule as those of arrays in trees.
        name: the name of the tree.
        drop: receives name and reason of each entry of a dict for which `leaf` raises `Unfit`; such
            an entry is left out. None to let `Unfit` pass.
        whole: types of containers given to `leaf` unchanged.
        kept: types of values left unchanged by `leaf`: a list of only such values is copied
            without a call.

    Raises: FormatError(DOC_DEPTH); exceptions of `leaf`.
    """
    check_depth(depth, name)

    def below(item: Any, key: object) -> Any:
        return map_tree(
            item, leaf, child_name(name, key), drop=drop, whole=whole, kept=kept, depth=depth + 1
        )

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
