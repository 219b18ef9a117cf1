"""Read a checkpoint: open the manifest and the index, then only what is asked for, each block verified first.

Spec: REQ-OPN-001 to REQ-OPN-008.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ckptfmt.box import Box
from ckptfmt.documents.index import IndexTensor
from ckptfmt.documents.manifest import part_path
from ckptfmt.documents.tree import parse_tree
from ckptfmt.dtypes import DTYPES
from ckptfmt.errors import Code, err
from ckptfmt.layout.read_plan import iter_chunks
from ckptfmt.read.files import CheckpointFiles
from ckptfmt.read.reading import ArrayTarget, Reading, allocate, carrier_of, plan_reading
from ckptfmt.read.streaming import Borrow, ReadReport
from ckptfmt.write.snapshot import TensorSink

#: How many bytes of a tensor `Checkpoint.iter_content` holds at a time.
CHUNK_NBYTES: Final = 32 << 20


@functools.cache
def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the numpy dtype of a dtype of the format; bfloat16 and the float8 family come from ml_dtypes.

    Raises: StateError(STATE_UNSUPPORTED) for the few that neither has.
    """
    import ml_dtypes  # noqa: PLC0415 - a twentieth of a second that validate needn't pay

    if hasattr(ml_dtypes, name):
        found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return found
    try:
        return np.dtype(name).newbyteorder("<")
    except TypeError:
        raise err(
            Code.STATE_UNSUPPORTED,
            f"numpy has no dtype {name}",
            remedy="Load it into a torch tensor: pass a state, or framework='torch'.",
        ) from None


class Checkpoint(CheckpointFiles):
    """A committed checkpoint, opened for reading. Arguments and errors are those of `CheckpointFiles`.

    What it holds is known once it is open; elements and values are read when they are asked for, and verified first.

    Attributes:
        tensors: by field, name and scope; of each its ``dtype``, ``global_shape`` (in elements), ``nbytes``,
            ``aliases`` (other names that it was tied to) and ``sharding``: a sequence of pairs, the box of each stored
            piece and the number of the writer that stored it. The boxes don't overlap, and cover the tensor.
        leaves: plain values, by field, name and scope; `leaf` reads one.
        streams: RNG streams, by name and scope; `stream` reads one.
        manifest: what was committed: ``origin`` (run, launch, step, writers), digests, references, labels.
        store: rooted at the checkpoint; ``store.name`` is its path.

    >>> import numpy as np, tempfile, ckptfmt
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     state = ckptfmt.State(weights={"w": np.zeros((2, 3), "float32")}, config={"lr": 0.1})
    ...     _ = ckptfmt.save(directory, state, step=1)
    ...     with ckptfmt.open(directory) as checkpoint:
    ...         tensor = checkpoint.tensors["weights", "w", "global"]
    ...         tensor.dtype, tensor.global_shape, list(tensor.sharding), checkpoint.leaf("config")
    ('float32', (2, 3), [(Box(begin=(0, 0), shape=(2, 3)), 0)], {'lr': 0.1})
    """

    #: Where a run was opened: what savers held in it just before. A newer checkpoint may follow at any moment then.
    pending: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        """Training steps done when it was saved."""
        return self.manifest.origin.step

    @property
    def weights(self) -> TensorView:
        """The weights by name, as numpy arrays, read when they are indexed."""
        return TensorView(self, "weights")

    @property
    def optimizer(self) -> TensorView:
        """The optimizer's tensors by name, as numpy arrays, read when they are indexed."""
        return TensorView(self, "optimizer")

    def field(self, field: str) -> TensorView:
        """Return the tensors of a field by name."""
        return TensorView(self, field)

    def leaf(self, field: str, name: str = "", scope: str = "global") -> Any:  # noqa: ANN401 - any plain value
        """Return a plain value; tensors within are `TensorRef`, whose ``name`` is that of a tensor of the same field.

        Args:
            field: one of ``weights``, ``optimizer``, ``data``, ``config``, ``topology`` and ``provenance``. Values of
                ``State(extra=...)`` are in ``optimizer``, as ``extra/<name>``.
            name: as in `leaves`; empty where the whole field is one value.
            scope: ``global``, or ``lw/<i>`` for that of worker i alone.

        Raises: StateError(LEAF_MISSING); IntegrityError.
        """
        entry = self.leaves.get((field, name, scope))
        if entry is None:
            raise err(Code.LEAF_MISSING, f"{field} has no value {name!r} ({scope})", where=name)
        where = part_path(self.manifest.origin.attempt, entry.part)
        return parse_tree(self.stored_leaf(entry).value, where=f"{where}#/leaves/{field}/{name}")

    def stream(self, name: str, scope: str) -> tuple[str, Any]:
        """Return kind and state of an RNG stream.

        Raises: StateError(STREAM_MISSING).
        """
        entry = self.streams.get((name, scope))
        if entry is None:
            raise err(Code.STREAM_MISSING, f"there is no RNG stream {name!r} ({scope})", where=name)
        where = part_path(self.manifest.origin.attempt, entry.part)
        return entry.kind, parse_tree(self.stored_stream(entry).state, where=f"{where}#/streams/{name}")

    def read(self, field: str, name: str, scope: str = "global", box: Box | None = None) -> NDArray[Any]:
        """Return a tensor, or a box of it, as a numpy array of its own.

        Shapes: that of the box; else the global shape.
        Raises: StateError(TENSOR_MISSING, ARGUMENT, LOAD_MEMORY); IntegrityError.
        Spec: REQ-OPN-005, REQ-OPN-006.
        """
        tensor = self.find(field, name, scope)
        if tensor is None:
            raise err(Code.TENSOR_MISSING, f"{field} has no tensor {name!r} ({scope})", where=name)
        wanted = Box.whole(tensor.global_shape) if box is None else box
        _check_within(tensor, wanted)
        array = allocate(tensor, lambda: np.empty(wanted.shape, numpy_dtype(tensor.dtype)))
        self.fill(tensor, wanted, array.view(carrier_of(array.itemsize)))
        return array

    def read_into(self, sinks: Sequence[TensorSink]) -> ReadReport:
        """Fill every sink. Bytes are handed on only when their block is verified; each block is read once.

        Sinks may be called from several threads at once, each call for other elements.

        Returns: what was read for it.
        Raises: StateError(TENSOR_MISSING, DTYPE_MISMATCH, SHAPE_MISMATCH); IntegrityError.
        Spec: REQ-OPN-005, REQ-OPN-006, REQ-OPN-008.
        """
        return self.plan_reading(sinks).run()

    def plan_reading(self, sinks: Sequence[TensorSink], *, borrow: Borrow | None = None) -> Reading:
        """Return what `read_into` will do; parts are read for it, and no shard.

        Args:
            borrow: is given the memory that bytes are read into, for as long as they are.

        Raises: StateError(TENSOR_MISSING, DTYPE_MISMATCH, SHAPE_MISMATCH); IntegrityError of parts.
        """
        return plan_reading(self, sinks, borrow)

    def iter_content(self, tensor: IndexTensor, wanted: Box) -> Iterator[tuple[Box, memoryview]]:
        """Yield the elements of `wanted`, chunk by chunk: C order, little-endian, verified.

        Raises: StateError(ARGUMENT), with the first chunk; IntegrityError. Spec: REQ-OPN-005, REQ-OPN-006.
        """
        _check_within(tensor, wanted)
        element_nbytes = DTYPES[tensor.dtype].nbytes
        for chunk in iter_chunks(wanted, element_nbytes, CHUNK_NBYTES):
            array = np.empty(chunk.shape, carrier_of(element_nbytes))
            self.fill(tensor, chunk, array)
            yield chunk, array.reshape(-1).view(np.uint8).data

    def fill(self, tensor: IndexTensor, box: Box, array: NDArray[Any]) -> ReadReport:
        """Fill an array with a box of a tensor, as whatever its elements are; return what was read for it.

        Args:
            array: of the shape of `box`; its dtype may be any of the elements' size.

        Raises: StateError(ARGUMENT), IntegrityError. Spec: REQ-OPN-005, REQ-OPN-006.
        """
        _check_within(tensor, box)
        field, name, scope = tensor.key
        target = ArrayTarget(
            field=field,
            name=name,
            scope=scope,
            dtype=tensor.dtype,
            global_shape=tensor.global_shape,
            boxes=(box,),
            array=array,
        )
        return self.read_into([target])


def _check_within(tensor: IndexTensor, box: Box) -> None:
    """Raise ARGUMENT for a box that isn't one of the tensor's."""
    whole = Box.whole(tensor.global_shape)
    is_one = len(box.begin) == len(box.shape) == len(whole.shape) and min(box.shape, default=0) >= 0
    if not is_one or not whole.contains(box):
        raise err(Code.ARGUMENT, f"{box} leaves the tensor's {tensor.global_shape}", where=tensor.name)


class TensorView:
    """The tensors of one field by name; indexing returns a `TensorHandle`, which reads when it is sliced.

    A tensor that only has per-worker copies is found under the name of its first worker's.
    """

    def __init__(self, checkpoint: Checkpoint, field: str, scope: str | None = None) -> None:
        self._checkpoint = checkpoint
        self._field = field
        self._scope = scope

    def __repr__(self) -> str:
        return f"TensorView({self._field}: {len(self)} names)"

    def scoped(self, scope: str) -> TensorView:
        """Return the view of one scope only, such as ``lw/0``."""
        return TensorView(self._checkpoint, self._field, scope)

    def __getitem__(self, name: str) -> TensorHandle:
        for scope in (self._scope,) if self._scope else ("global", "lw/0"):
            tensor = self._checkpoint.find(self._field, name, scope)
            if tensor is not None:
                return TensorHandle(self._checkpoint, tensor)
        raise err(Code.TENSOR_MISSING, f"{self._field} has no tensor {name!r}", where=name)

    def items(self) -> Iterator[tuple[str, TensorHandle]]:
        """Yield each name, aliases included, with its tensor."""
        for name in self:
            yield name, self[name]

    def __contains__(self, name: object) -> bool:
        return name in set(self)

    def __iter__(self) -> Iterator[str]:
        names: dict[str, None] = {}
        for tensor in self._checkpoint.index.tensors:
            if tensor.field == self._field and tensor.scope in ((self._scope,) if self._scope else ("global", "lw/0")):
                names.update(dict.fromkeys((tensor.name, *tensor.aliases)))
        return iter(names)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def keys(self) -> list[str]:
        """Return the names, aliases included."""
        return list(self)


class TensorHandle:
    """A tensor of a checkpoint: shape and dtype at once, elements when it is sliced."""

    def __init__(self, checkpoint: Checkpoint, tensor: IndexTensor) -> None:
        self._checkpoint = checkpoint
        self._tensor = tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape in elements."""
        return self._tensor.global_shape

    @property
    def dtype(self) -> str:
        """Name of the dtype."""
        return self._tensor.dtype

    @property
    def nbytes(self) -> int:
        """Size of the whole tensor in bytes."""
        return self._tensor.nbytes

    def __repr__(self) -> str:
        return f"TensorHandle({self._tensor.name!r}, {self.dtype}, {self.shape})"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:  # noqa: ANN401, FBT001 - numpy's
        del copy
        array = self[...]
        return array if dtype is None else array.astype(dtype)

    def __getitem__(self, item: Any) -> NDArray[Any]:  # noqa: ANN401 - as in numpy
        """Return elements; of basic indices with step 1, only the blocks that have them are read."""
        items = item if isinstance(item, tuple) else (item,)
        box, keep = _box_of(items, self.shape, self._tensor.name)
        key = self._tensor.key
        array = self._checkpoint.read(*key, box=box)
        kept: NDArray[Any] = array[(*keep, ...)]  # with the dots, an array without dimensions stays an array
        return kept


def _box_of(items: tuple[Any, ...], shape: tuple[int, ...], name: str) -> tuple[Box, tuple[Any, ...]]:
    """Return the box that basic indices select, and the index that drops what integers select of it."""
    # By identity: an array among the indices compares element by element.
    dots = [at for at, item in enumerate(items) if item is Ellipsis]
    if len(dots) > 1 or len(items) - len(dots) > len(shape):
        raise err(Code.ARGUMENT, f"too many indices for shape {shape}", where=name)
    for at in dots:
        filled = (slice(None),) * (len(shape) - len(items) + 1)
        items = (*items[:at], *filled, *items[at + 1 :])
    items = (*items, *(slice(None),) * (len(shape) - len(items)))
    begin, extents, keep = [], [], []
    for index, extent in zip(items, shape, strict=True):
        if isinstance(index, slice):
            start, stop, step = index.indices(extent)
            if step != 1:
                raise err(Code.ARGUMENT, "slices with a step aren't read: slice the array", where=name)
            begin.append(start)
            extents.append(max(0, stop - start))
            keep.append(slice(None))
        elif isinstance(index, int | np.integer) and not isinstance(index, bool) and -extent <= index < extent:
            begin.append(int(index) % extent)
            extents.append(1)
            keep.append(0)  # type: ignore[arg-type]
        else:
            raise err(Code.ARGUMENT, f"index {index!r} doesn't fit an extent of {extent}", where=name)
    return Box(tuple(begin), tuple(extents)), tuple(keep)
