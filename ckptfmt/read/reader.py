"""Open a checkpoint and read selected contents, each block verified first.

Spec: REQ-OPN-001 to REQ-OPN-008.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ckptfmt.box import Box
from ckptfmt.documents.index import IndexTensor
from ckptfmt.documents.manifest import part_path
from ckptfmt.documents.tree import TensorRef, parse_tree
from ckptfmt.dtypes import DTYPES, numpy_dtype
from ckptfmt.errors import Code, StateError, err
from ckptfmt.layout.read_plan import iter_chunks
from ckptfmt.read.files import CheckpointFiles
from ckptfmt.read.frozen_base import FrozenBase, FrozenReading, Place, Recorded
from ckptfmt.read.reading import ArrayTarget, Reading, allocate, carrier_of, plan_reading
from ckptfmt.read.streaming import Borrow, ReadReport
from ckptfmt.write.snapshot import Memory, TensorSink

#: Prefix of the names of ``State(extra=...)`` values in the field optimizer.
_EXTRA: Final = "extra/"
#: The members listed by `dir` of a checkpoint.
_SHOWN: Final = (
    "close", "config", "data", "digest", "extra", "field", "leaf", "leaves", "manifest", "metrics",
    "optimizer", "path", "pending", "provenance", "read", "read_into", "rng", "step", "store",
    "stream", "streams", "tags", "tensors", "topology", "weights",
)  # fmt: skip
#: Maximum size in bytes of the chunks of `Checkpoint.iter_content`.
CHUNK_NBYTES: Final = 32 << 20


class Checkpoint(CheckpointFiles):
    """A committed checkpoint, opened for reading.

    Arguments and errors are those of `CheckpointFiles`.

    Opening reads the list of contents. Elements and values are read on demand, and verified before
    use.

    `weights`, `optimizer`, `extra`, `data`, `config`, `rng`, `topology` and `provenance` are
    mappings of the contents; `tensors`, `leaves` and `streams` are the entries of the index, for
    programs.

    Attributes:
        tensors: the tensors, by field, name and scope; each with ``dtype``, ``global_shape`` (in
            elements), ``nbytes``, ``aliases`` (further names of a tied tensor) and ``sharding``: a
            sequence of pairs of a stored box and the number of the writer that stored the box. The
            boxes don't overlap, and cover the tensor.
        leaves: the plain values, by field, name and scope; `leaf` reads a value.
        streams: the RNG streams, by name and scope; `stream` reads a stream.
        manifest: the committed document: ``origin`` (run, launch, step, writers), digests,
            references, labels.
        store: a store rooted at the checkpoint; ``store.name`` is the checkpoint's path.

    >>> import numpy as np, tempfile, ckptfmt
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     state = ckptfmt.State(weights={"w": np.zeros((2, 3), "float32")}, config={"lr": 0.1})
    ...     _ = ckptfmt.save(directory, state, step=1)
    ...     with ckptfmt.open(directory) as checkpoint:
    ...         tensor = checkpoint.tensors["weights", "w", "global"]
    ...         tensor.dtype, tensor.global_shape, list(tensor.sharding), checkpoint.leaf("config")
    ('float32', (2, 3), [(Box(begin=(0, 0), shape=(2, 3)), 0)], {'lr': 0.1})
    """

    #: The files held by savers of the run just before the run was opened. A newer checkpoint may be
    #: committed at any moment while savers hold files. Empty for a single checkpoint.
    pending: tuple[str, ...] = ()
    #: The frozen base, after the first read of one of its tensors.
    _frozen_base: FrozenBase | None = None

    def close(self) -> None:
        """Release the parts that were read, the bases and the frozen base."""
        super().close()
        if self._frozen_base is not None:
            self._frozen_base.close()
            self._frozen_base = None

    @property
    def step(self) -> int:
        """Number of training steps done at the save."""
        return self.manifest.origin.step

    @property
    def path(self) -> str:
        """The path or name of the checkpoint's directory."""
        return self.store.name

    @property
    def metrics(self) -> Mapping[str, float]:
        """The metrics at the save; `Run.list` also shows metrics that were added later."""
        return self.manifest.labels.numbers()

    @property
    def tags(self) -> tuple[str, ...]:
        """The tags at the save; `Run.list` also shows tags that were added later."""
        return self.manifest.labels.tags

    @property
    def suspect(self) -> str | None:
        """The reason why the checkpoint is suspect, or None. Spec: REQ-MAN-013.

        A run doesn't continue from a suspect checkpoint automatically.
        """
        return self.manifest.labels.suspect or None

    @property
    def weights(self) -> TensorView:
        """The weights by name, as numpy arrays that are read when indexed."""
        return TensorView(self, "weights")

    @property
    def optimizer(self) -> TensorView:
        """The optimizer's tensors by name, as numpy arrays that are read when indexed.

        The tensors of `extra` are left out.
        """
        return TensorView(self, "optimizer", without=_EXTRA)

    @property
    def config(self) -> Mapping[str, Any]:
        """The configuration; empty if no configuration was saved."""
        return ValueView(self, "config")

    @property
    def data(self) -> Mapping[str, Any]:
        """The position in the data: the members of the saved value, or several values by name."""
        return ValueView(self, "data")

    @property
    def extra(self) -> Mapping[str, Any]:
        """The values of ``State(extra=...)`` by key.

        The value of a module or a mapping of tensors is a `TensorView`.
        """
        return ExtraView(self)

    @property
    def rng(self) -> Mapping[str, Mapping[str, tuple[str, Any]]]:
        """The RNG streams, by worker (``lw/0``) and name, each with kind and state."""
        scopes = sorted({scope for _, scope in self.streams})
        return {scope: StreamView(self, scope) for scope in scopes}

    @property
    def topology(self) -> Mapping[str, Any]:
        """The surroundings of the run: processes, flags and versions.

        The member ``local`` describes the machine of process 0.
        """
        return ValueView(self, "topology")

    @property
    def provenance(self) -> Mapping[str, Any]:
        """The origin of the run: commit, command, host, and the caller's own entries."""
        return ValueView(self, "provenance")

    def __repr__(self) -> str:
        fields = [name for name, field in self.manifest.fields.items() if field.reason is None]
        kind = "" if self.manifest.profile == "full" else f", {self.manifest.profile}"
        return (
            f"Checkpoint({self.path!r}, step={self.step}, nbytes={self.manifest.nbytes}{kind},"
            f" {' '.join(fields)})"
        )

    def __dir__(self) -> list[str]:
        """Return the names for users who read a checkpoint, without the names for engines."""
        return sorted(_SHOWN)

    def field(self, field: str) -> TensorView:
        """Return the tensors of a field by name."""
        return TensorView(self, field)

    def leaf(self, field: str, name: str = "", scope: str = "global") -> Any:
        """Return a plain value.

        A tensor in the value is a `TensorRef` with the name of a tensor of the same field.

        Args:
            field: ``weights``, ``optimizer``, ``data``, ``config``, ``topology`` or ``provenance``.
                Values of ``State(extra=...)`` are in ``optimizer``, as ``extra/<name>``.
            name: a name in `leaves`; empty if the whole field is one value.
            scope: ``global``, or ``lw/<i>`` for the value of worker i alone.

        Raises: StateError(LEAF_MISSING); IntegrityError.
        """
        entry = self.leaves.get((field, name, scope))
        if entry is None:
            near = difflib.get_close_matches(
                name, [one for of, one, at in self.leaves if (of, at) == (field, scope)], n=1
            )
            remedy = (
                f"{f'Did you mean {near[0]!r}? ' if near else ''}`leaves` has the values"
                " that were saved."
            )
            raise err(
                Code.LEAF_MISSING,
                f"{field} has no value {name!r} ({scope})",
                where=name,
                remedy=remedy,
            )
        where = part_path(self.manifest.origin.attempt, entry.part)
        return parse_tree(self.stored_leaf(entry).value, where=f"{where}#/leaves/{field}/{name}")

    def stream(self, name: str, scope: str) -> tuple[str, Any]:
        """Return the kind and the state of an RNG stream.

        Raises: StateError(STREAM_MISSING).
        """
        entry = self.streams.get((name, scope))
        if entry is None:
            raise err(Code.STREAM_MISSING, f"there is no RNG stream {name!r} ({scope})", where=name)
        where = part_path(self.manifest.origin.attempt, entry.part)
        return entry.kind, parse_tree(
            self.stored_stream(entry).state, where=f"{where}#/streams/{name}"
        )

    def read(
        self, field: str, name: str, scope: str = "global", box: Box | None = None
    ) -> NDArray[Any]:
        """Return a tensor, or a box of a tensor, as a new numpy array.

        Shapes: the box's shape; without a box, the global shape.
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
        """Fill all sinks. Each block is read once, and verified before a sink receives its bytes.

        Several threads may call a sink at once, each call with different elements.

        Returns: the amounts read.
        Raises: StateError(TENSOR_MISSING, DTYPE_MISMATCH, SHAPE_MISMATCH); IntegrityError.
        Spec: REQ-OPN-005, REQ-OPN-006, REQ-OPN-008.
        """
        return self.plan_reading(sinks).run()

    def plan_reading(
        self,
        sinks: Sequence[TensorSink],
        *,
        borrow: Borrow | None = None,
        frozen_base: Place | None = None,
        memory: Memory | None = None,
    ) -> Reading:
        """Return a planned read that fills the sinks. Planning reads parts, but no shards.

        A tensor of a frozen base is compared with its digest during planning: either the sink has
        the content already, or the base is found and read.

        Args:
            borrow: called with the memory of the read buffers, for the duration of their use.
            frozen_base: the place in which to look first for the frozen base.
            memory: called with a tensor's key and a stored box; returns the content of the box, if
                this process has it in memory, and None otherwise. The content isn't verified.

        Raises: StateError(TENSOR_MISSING, DTYPE_MISMATCH, SHAPE_MISMATCH, FROZEN_BASE_MISSING,
            FROZEN_BASE_CHANGED); IntegrityError of parts.
        """
        reading = plan_reading(self, sinks, borrow, memory)
        frozen = [
            (self.frozen[tensor.key], sink)
            for sink in sinks
            if (tensor := self.find(sink.field, sink.name, sink.scope)) is not None
            and tensor.key in self.frozen
        ]
        if frozen:
            places = [*([] if frozen_base is None else [frozen_base]), *self.closure.places]
            recorded = Recorded(self.frozen_location, self.store.name)
            reading.frozen = FrozenReading(frozen, places, recorded, Checkpoint, self._frozen_base)
            self._frozen_base = reading.frozen.base or self._frozen_base
        return reading

    def iter_content(self, tensor: IndexTensor, wanted: Box) -> Iterator[tuple[Box, memoryview]]:
        """Yield the elements of `wanted`, chunk by chunk: C order, little-endian, verified.

        Raises: StateError(ARGUMENT) at the first chunk; IntegrityError. Spec: REQ-OPN-005,
            REQ-OPN-006.
        """
        _check_within(tensor, wanted)
        element_nbytes = DTYPES[tensor.dtype].nbytes
        for chunk in iter_chunks(wanted, element_nbytes, CHUNK_NBYTES):
            array = np.empty(chunk.shape, carrier_of(element_nbytes))
            self.fill(tensor, chunk, array)
            yield chunk, array.reshape(-1).view(np.uint8).data

    def fill(self, tensor: IndexTensor, box: Box, array: NDArray[Any]) -> ReadReport:
        """Fill an array with a box of a tensor, without conversion; return the amounts read.

        Args:
            array: an array with the shape of `box`, and with any dtype of the elements' size.

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
    """Raise StateError(ARGUMENT) unless a box lies within a tensor."""
    whole = Box.whole(tensor.global_shape)
    is_one = len(box.begin) == len(box.shape) == len(whole.shape) and min(box.shape, default=0) >= 0
    if not is_one or not whole.contains(box):
        raise err(
            Code.ARGUMENT, f"{box} leaves the tensor's {tensor.global_shape}", where=tensor.name
        )


class MissingNameError(StateError, KeyError):
    """The error of a lookup of an unknown name in a checkpoint's mapping; also a `KeyError`."""


def _missing(code: Code, detail: str, name: object) -> MissingNameError:
    return MissingNameError(
        code, detail, where=str(name), remedy="List the names: they are the keys of this mapping."
    )


class TensorView(Mapping[str, "TensorHandle"]):
    """The tensors of one field by name. Indexing returns a `TensorHandle`, which reads when sliced.

    If a tensor has only per-worker copies, the view shows the copy of worker 0.

    Raises: MissingNameError(TENSOR_MISSING), which is a `KeyError`, for an unknown name.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        field: str,
        scope: str | None = None,
        *,
        under: str = "",
        without: str = "",
    ) -> None:
        self._checkpoint = checkpoint
        self._field = field
        self._scope = scope
        #: The prefix that the view removes from names, and the prefix of names that the view leaves
        #: out.
        self._under = under
        self._without = without

    def __repr__(self) -> str:
        return f"TensorView({place_of_view(self._field, self._under)}: {len(self)} names)"

    def scoped(self, scope: str) -> TensorView:
        """Return the view of a single scope, such as ``lw/0``."""
        return TensorView(
            self._checkpoint, self._field, scope, under=self._under, without=self._without
        )

    def __getitem__(self, name: str) -> TensorHandle:
        found = self._find(name)
        if found is None:
            raise _missing(Code.TENSOR_MISSING, f"{self._field} has no tensor {name!r}", name)
        return TensorHandle(self._checkpoint, found)

    def _find(self, name: object) -> IndexTensor | None:
        if not isinstance(name, str) or not self._shows(f"{self._under}{name}"):
            return None
        for scope in self._scopes:
            tensor = self._checkpoint.find(self._field, f"{self._under}{name}", scope)
            if tensor is not None:
                return tensor
        return None

    @property
    def _scopes(self) -> tuple[str, ...]:
        return (self._scope,) if self._scope else ("global", "lw/0")

    def _shows(self, name: str) -> bool:
        return name.startswith(self._under) and not (
            self._without and name.startswith(self._without)
        )

    def __contains__(self, name: object) -> bool:
        return self._find(name) is not None

    def __iter__(self) -> Iterator[str]:
        """Yield every name, aliases included."""
        names: dict[str, None] = {}
        for tensor in self._checkpoint.index.tensors:
            if tensor.field == self._field and tensor.scope in self._scopes:
                names.update(dict.fromkeys((tensor.name, *tensor.aliases)))
        return (name.removeprefix(self._under) for name in names if self._shows(name))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class ValueView(Mapping[str, Any]):
    """The plain values of a field: the members of the field's unnamed value, and the named values.

    Values are read on demand. A tensor in a value is a `TensorHandle`.

    Raises: MissingNameError(LEAF_MISSING), which is a `KeyError`, for an unknown name.
    """

    def __init__(self, checkpoint: Checkpoint, field: str) -> None:
        self._checkpoint = checkpoint
        self._field = field

    @functools.cached_property
    def _values(self) -> dict[str, Any]:
        names = [
            name
            for field, name, scope in self._checkpoint.leaves
            if (field, scope) == (self._field, "global")
        ]
        values = {name: _with_handles(self._checkpoint, self._field, name) for name in names}
        whole = values.pop("", None)
        # A value that isn't a mapping has no members, and appears under the empty name.
        members = whole if isinstance(whole, dict) else {"": whole} if "" in names else {}
        return {**members, **values}

    def __getitem__(self, name: str) -> Any:
        if name not in self._values:
            raise _missing(Code.LEAF_MISSING, f"{self._field} has no value {name!r}", name)
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return repr(self._values)


class ExtraView(Mapping[str, Any]):
    """The values of ``State(extra=...)`` by key.

    Raises: MissingNameError(LEAF_MISSING), which is a `KeyError`, for an unknown key.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    @functools.cached_property
    def _keys(self) -> dict[str, None]:
        checkpoint = self._checkpoint
        keys = (key for keys in (checkpoint.leaves, checkpoint.tensors) for key in keys)
        names = (
            name.removeprefix(_EXTRA)
            for field, name, _ in keys
            if field == "optimizer" and name.startswith(_EXTRA)
        )
        return dict.fromkeys(sorted(name.partition("/")[0] for name in names))

    def __getitem__(self, key: str) -> Any:
        if key not in self._keys:
            raise _missing(Code.LEAF_MISSING, f"extra has no value {key!r}", key)
        if ("optimizer", f"{_EXTRA}{key}", "global") in self._checkpoint.leaves:
            return _with_handles(self._checkpoint, "optimizer", f"{_EXTRA}{key}")
        return TensorView(self._checkpoint, "optimizer", under=f"{_EXTRA}{key}/")

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def __repr__(self) -> str:
        return f"ExtraView({', '.join(self._keys)})"


class StreamView(Mapping[str, tuple[str, Any]]):
    """The RNG streams of a worker, by name: the kind and the state of each, read on demand.

    Raises: MissingNameError(STREAM_MISSING), which is a `KeyError`, for an unknown name.
    """

    def __init__(self, checkpoint: Checkpoint, scope: str) -> None:
        self._checkpoint = checkpoint
        self._scope = scope

    def __getitem__(self, name: str) -> tuple[str, Any]:
        if (name, self._scope) not in self._checkpoint.streams:
            raise _missing(Code.STREAM_MISSING, f"{self._scope} has no RNG stream {name!r}", name)
        return self._checkpoint.stream(name, self._scope)

    def __iter__(self) -> Iterator[str]:
        return (name for name, scope in self._checkpoint.streams if scope == self._scope)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"StreamView({self._scope}: {', '.join(self)})"


def _with_handles(checkpoint: Checkpoint, field: str, name: str) -> Any:
    """Return a saved value with references to tensors replaced by handles."""

    def replace(value: Any) -> Any:
        if isinstance(value, TensorRef):
            tensor = checkpoint.find(field, value.name)
            return value if tensor is None else TensorHandle(checkpoint, tensor)
        if isinstance(value, dict):
            return type(value)((key, replace(item)) for key, item in value.items())
        return type(value)(map(replace, value)) if type(value) in (list, tuple) else value

    return replace(checkpoint.leaf(field, name))


def place_of_view(field: str, under: str) -> str:
    """Return the name of a view of tensors, from the field and the prefix of its names.

    >>> place_of_view("weights", ""), place_of_view("optimizer", "extra/ema/")
    ('weights', 'extra:ema')
    """
    return f"extra:{under.removeprefix(_EXTRA).rstrip('/')}" if under.startswith(_EXTRA) else field


class TensorHandle:
    """A tensor of a checkpoint. Shape and dtype are known; elements are read by slicing."""

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

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:  # noqa: FBT001
        del copy
        array = self[...]
        return array if dtype is None else array.astype(dtype)

    def __getitem__(self, item: Any) -> NDArray[Any]:
        """Return elements as an array. Only basic indices with step 1 are accepted.

        Only the blocks that contain the elements are read.
        """
        items = item if isinstance(item, tuple) else (item,)
        box, keep = _box_of(items, self.shape, self._tensor.name)
        key = self._tensor.key
        array = self._checkpoint.read(*key, box=box)
        kept: NDArray[Any] = array[(*keep, ...)]  # the ellipsis keeps an array of rank 0 an array
        return kept


def _box_of(
    items: tuple[Any, ...], shape: tuple[int, ...], name: str
) -> tuple[Box, tuple[Any, ...]]:
    """Return the box selected by basic indices, and the index that drops the integer axes."""
    # Compare by identity, because an array in the indices compares element by element.
    dots = [at for at, item in enumerate(items) if item is Ellipsis]
    if len(dots) > 1 or len(items) - len(dots) > len(shape):
        raise err(Code.ARGUMENT, f"too many indices for shape {shape}", where=name)
    for at in dots:
        filled = (slice(None),) * (len(shape) - len(items) + 1)
        items = (*items[:at], *filled, *items[at + 1 :])
    items = (*items, *(slice(None),) * (len(shape) - len(items)))
    begin = []
    extents = []
    keep = []
    for index, extent in zip(items, shape, strict=True):
        if isinstance(index, slice):
            start, stop, step = index.indices(extent)
            if step != 1:
                raise err(
                    Code.ARGUMENT, "slices with a step aren't read: slice the array", where=name
                )
            begin.append(start)
            extents.append(max(0, stop - start))
            keep.append(slice(None))
        elif (
            isinstance(index, int | np.integer)
            and not isinstance(index, bool)
            and -extent <= index < extent
        ):
            begin.append(int(index) % extent)
            extents.append(1)
            keep.append(0)  # type: ignore[arg-type]
        else:
            raise err(
                Code.ARGUMENT, f"index {index!r} doesn't fit an extent of {extent}", where=name
            )
    return Box(tuple(begin), tuple(extents)), tuple(keep)
