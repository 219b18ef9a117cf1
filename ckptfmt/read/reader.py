"""Read a checkpoint: open the manifest and the index, then only what is asked for, each block verified first.

Spec: REQ-OPN-001 to REQ-OPN-008.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np

from ckptfmt import limits
from ckptfmt.box import Box
from ckptfmt.commit.decision import read_register
from ckptfmt.digest import PREFIX, digest_bytes
from ckptfmt.documents.index import Index, IndexLeaf, IndexStream, IndexTensor
from ckptfmt.documents.manifest import MANIFEST_NAME, Abort, Manifest, index_name, part_path
from ckptfmt.documents.part import Leaf, Part, PartFile, Stream
from ckptfmt.documents.tables import TensorKey
from ckptfmt.documents.tree import parse_tree
from ckptfmt.dtypes import DTYPES
from ckptfmt.errors import CkptError, Code, err
from ckptfmt.layout.merge import check_index_tiling, summarise
from ckptfmt.layout.read_plan import PieceRead, iter_chunks, iter_pieces, plan_requests
from ckptfmt.read.closure import Closure, Library
from ckptfmt.read.decoding import OpenPart, StoredBox, open_part
from ckptfmt.read.reading import Reading
from ckptfmt.read.stored import ArrayTarget, StoredPiece, allocating, carrier_of
from ckptfmt.read.streaming import REQUEST_NBYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from ckptfmt.documents.manifest import Reference
    from ckptfmt.layout.read_plan import BlockRange, Request
    from ckptfmt.read.streaming import Borrow, ReadReport
    from ckptfmt.store.protocol import Store
    from ckptfmt.write.snapshot import TensorSink

#: How many bytes of a tensor `Checkpoint.iter_content` holds at a time.
CHUNK_NBYTES: Final = 32 << 20
#: How many bytes that nobody wants are read at most, so as to save a request.
GAP_NBYTES: Final = 64 << 10


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


class Checkpoint:
    """A committed checkpoint, opened for reading. Only manifest and index are read until more is asked for.

    Args:
        store: rooted at the checkpoint's directory.
        digest: the manifest digest that is expected, if one is.
        bases: where else to look for what a delta reads from, beside the directory that this one is in: checkpoints,
            or directories of them.
        closure: of the checkpoint that reads from this one.
        title: what that one calls this one; None for the name of its directory.

    Raises: IntegrityError(NOT_COMMITTED, CHECKPOINT_ABORTED, CHECKPOINT_RETIRED, FILE_MISSING, FILE_NBYTES,
        DOC_DIGEST); FormatError; UnsupportedError; LayoutError (tiling); StoreError.
    Spec: REQ-OPN-001 to REQ-OPN-004.
    """

    def __init__(
        self,
        store: Store,
        *,
        digest: str | None = None,
        bases: Sequence[Store] = (),
        closure: Closure | None = None,
        title: str | None = None,
    ) -> None:
        self.store = store
        #: Where a run was opened: what savers held in it just before. A newer checkpoint may follow at any moment then.
        self.pending: tuple[str, ...] = ()
        self.manifest = read_manifest(store)
        if digest is not None and self.manifest.digest != digest:
            raise err(
                Code.DOC_DIGEST,
                f"the manifest is {self.manifest.digest}, not {digest}",
                where=MANIFEST_NAME,
                requirement="REQ-OPN-001",
            )
        self.index = read_index(store, self.manifest)
        self._part_nbytes = self._header_nbytes = 0
        self.tensors: dict[TensorKey, IndexTensor] = {tensor.key: tensor for tensor in self.index.tensors}
        self.leaves: dict[TensorKey, IndexLeaf] = {(one.field, one.name, one.scope): one for one in self.index.leaves}
        self.streams: dict[tuple[str, str], IndexStream] = {(one.name, one.scope): one for one in self.index.streams}
        self._is_base = closure is not None
        self.title = store.name.rstrip("/").rpartition("/")[2] if title is None else title
        self.closure = closure or Closure(store, self.manifest, bases, _open_base)
        self._parts: dict[int, OpenPart] = {}
        self._checked: set[str] = set()
        self._lock = threading.RLock()
        #: Whether blocks are compared with their digests. It is for measuring what that costs, and for nothing else.
        self.is_verifying = True
        self._aliases = {
            (tensor.field, alias, tensor.scope): tensor for tensor in self.index.tensors for alias in tensor.aliases
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of what was read."""
        self._parts.clear()
        self._checked.clear()
        if not self._is_base:
            self.closure.close()

    def place_of(self, name: str) -> str:
        """Return where a file is, for messages: below the checkpoint that was opened."""
        return f"{self.title}/{name}" if self._is_base else name

    @contextlib.contextmanager
    def _placed(self) -> Iterator[None]:
        """Say of errors where they are, as `place_of` does."""
        try:
            yield
        except CkptError as error:
            if not self._is_base:
                raise
            raise error.below(self.title) from error

    @property
    def step(self) -> int:
        """Training steps done when it was saved."""
        return self.manifest.origin.step

    @property
    def digest(self) -> str:
        """The digest of the manifest: the name of the checkpoint."""
        return self.manifest.digest

    @property
    def metadata_nbytes(self) -> int:
        """How many bytes of manifest, index, parts and shard headers were read so far."""
        return self._manifest_nbytes + self.manifest.index_nbytes + self._part_nbytes + self._header_nbytes

    @functools.cached_property
    def _manifest_nbytes(self) -> int:
        return len(self.manifest.dump())

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

    def find(self, field: str, name: str, scope: str = "global") -> IndexTensor | None:
        """Return what the index says of a tensor, by its name or one of its aliases."""
        key = (field, name, scope)
        return self.tensors.get(key) or self._aliases.get(key)

    def leaf(self, field: str, name: str = "", scope: str = "global") -> Any:  # noqa: ANN401 - any plain value
        """Return a plain value; tensors within are `TensorRef`.

        Raises: StateError(LEAF_MISSING).
        """
        entry = self.leaves.get((field, name, scope))
        if entry is None:
            raise err(Code.LEAF_MISSING, f"{field} has no value {name!r} ({scope})", where=name)
        where = part_path(self.manifest.origin.attempt, entry.part)
        return parse_tree(self.stored_leaf(entry).value, where=f"{where}#/leaves/{field}/{name}")

    def stored_leaf(self, entry: IndexLeaf) -> Leaf:
        """Return a plain value as its part has it. Raises: FormatError(DOC_MISMATCH), and of parts."""
        leaf = self.open_part(entry.part).leaves.get((entry.field, entry.name, entry.scope))
        if leaf is None:
            raise self._contradiction(entry.part, f"has no value {entry.name!r} of {entry.field}")
        return leaf

    def stream(self, name: str, scope: str) -> tuple[str, Any]:
        """Return kind and state of a random-number stream.

        Raises: StateError(STREAM_MISSING).
        """
        entry = self.streams.get((name, scope))
        if entry is None:
            raise err(Code.STREAM_MISSING, f"no stream {name!r} ({scope})", where=name)
        where = part_path(self.manifest.origin.attempt, entry.part)
        return entry.kind, parse_tree(self.stored_stream(entry).state, where=f"{where}#/streams/{name}")

    def stored_stream(self, entry: IndexStream) -> Stream:
        """Return a stream as its part has it. Raises: FormatError(DOC_MISMATCH), and of parts."""
        stream = self.open_part(entry.part).streams.get((entry.name, entry.scope))
        if stream is None or stream.kind != entry.kind:
            raise self._contradiction(entry.part, f"has no stream {entry.name!r} of kind {entry.kind!r}")
        return stream

    def read(self, field: str, name: str, scope: str = "global", box: Box | None = None) -> NDArray[Any]:
        """Return a tensor, or a piece of it, as a numpy array of its own.

        Raises: StateError(TENSOR_MISSING, ARGUMENT, LOAD_MEMORY); IntegrityError.
        Spec: REQ-OPN-005, REQ-OPN-006.
        """
        tensor = self.find(field, name, scope)
        if tensor is None:
            raise err(Code.TENSOR_MISSING, f"{field} has no tensor {name!r} ({scope})", where=name)
        whole = Box.whole(tensor.global_shape)
        wanted = whole if box is None else box
        if len(wanted.shape) != len(whole.shape) or min(wanted.shape, default=0) < 0 or not whole.contains(wanted):
            raise err(Code.ARGUMENT, f"{wanted} leaves the tensor's {tensor.global_shape}", where=name)
        with allocating(tensor):
            array = np.empty(wanted.shape, numpy_dtype(tensor.dtype))
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
        return Reading(self, self._collect_pieces(sinks), borrow)

    def iter_content(self, tensor: IndexTensor, wanted: Box) -> Iterator[tuple[Box, memoryview]]:
        """Yield the elements of `wanted`, chunk by chunk: C order, little-endian, verified."""
        element_nbytes = DTYPES[tensor.dtype].nbytes
        for chunk in iter_chunks(wanted, element_nbytes, CHUNK_NBYTES):
            array = np.empty(chunk.shape, carrier_of(element_nbytes))
            self.fill(tensor, chunk, array)
            yield chunk, array.reshape(-1).view(np.uint8).data

    def fill(self, tensor: IndexTensor, box: Box, array: NDArray[Any]) -> None:
        """Fill an array with a box of a tensor, as whatever its elements are.

        Args:
            array: of the shape of `box`; its dtype may be any of the elements' size.

        Raises: IntegrityError. Spec: REQ-OPN-005, REQ-OPN-006.
        """
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
        self.read_into([target])

    def _collect_pieces(self, sinks: Sequence[TensorSink]) -> list[StoredPiece]:
        """Return the stored pieces of which the sinks want something, each once."""
        pieces: dict[tuple[TensorKey, Box], StoredPiece] = {}
        for sink in sinks:
            tensor = self._find_for(sink)
            for wanted in sink.boxes:
                for read in iter_pieces(tensor.sharding, wanted):
                    key = (tensor.key, read.stored)
                    if key not in pieces:
                        opened, stored = self.locate(tensor, read)
                        pieces[key] = StoredPiece(stored=stored, opened=opened, element_nbytes=stored.element_nbytes)
                    pieces[key].wanted.append((sink, read.wanted))
        return list(pieces.values())

    def plan_requests(self, library: Library, ranges: Iterable[BlockRange]) -> list[Request]:
        """Return the requests that read `ranges`; the files that they are in were compared with their parts."""
        by_path: dict[str, list[BlockRange]] = {}
        for blocks in ranges:
            if blocks.path not in by_path:
                library.check(blocks.path)
            by_path.setdefault(blocks.path, []).append(blocks)
        return [
            request
            for path, found in sorted(by_path.items())
            for request in plan_requests(
                found,
                block_nbytes=self.manifest.origin.block_nbytes,
                request_nbytes=REQUEST_NBYTES,
                gap_nbytes=GAP_NBYTES,
            )
        ]

    def _find_for(self, sink: TensorSink) -> IndexTensor:
        tensor = self.find(sink.field, sink.name, sink.scope)
        if tensor is None:
            raise err(Code.TENSOR_MISSING, f"{sink.field} has no tensor {sink.name!r} ({sink.scope})", where=sink.name)
        if sink.dtype != tensor.dtype:
            raise err(Code.DTYPE_MISMATCH, f"saved as {tensor.dtype}, wanted as {sink.dtype}", where=sink.name)
        if tuple(sink.global_shape) != tensor.global_shape:
            raise err(
                Code.SHAPE_MISMATCH,
                f"saved as {tensor.global_shape}, wanted as {tuple(sink.global_shape)}",
                where=sink.name,
            )
        return tensor

    def check_file(self, part: Part, name: str) -> None:
        """Compare the size and the header of a file with its part, once. Spec: REQ-OPN-011."""
        with self._lock:
            if name not in self._checked:
                file = next(file for file in part.files if file.name == name)
                with self._placed():
                    check_nbytes(self.store, file)
                    read_header(self.store, file)
                self._header_nbytes += file.header_nbytes
                self._checked.add(name)

    def check_stored(self, tensor: IndexTensor, box: Box, part: int) -> None:
        """Raise unless a part stores a piece as the index says. Raises: FormatError(DOC_MISMATCH), and of parts."""
        self.locate(tensor, PieceRead(box, part, box))

    def locate(self, tensor: IndexTensor, read: PieceRead) -> tuple[OpenPart, StoredBox]:
        """Return a piece as its part stores it. Raises: FormatError(DOC_MISMATCH), and of parts."""
        opened = self.open_part(read.part)
        box = opened.find(tensor.key, read.stored)
        if box is None or _what(box) != _what(tensor):
            raise self._contradiction(read.part, f"doesn't store {read.stored} of {tensor.name!r}")
        return opened, box

    def open_part(self, number: int) -> OpenPart:
        """Return a part with its rows by name; it is read once. Raises: as `read_part`."""
        with self._lock:
            if number not in self._parts:
                with self._placed():
                    self._parts[number] = open_part(self, self.read_part(number))
            return self._parts[number]

    def read_part(self, number: int) -> Part:
        """Read and check one part.

        Raises: IntegrityError(FILE_MISSING, FILE_NBYTES, DOC_DIGEST); FormatError.
        Spec: REQ-OPN-004.
        """
        origin, entry = self.manifest.origin, self.index.parts[number]
        path = part_path(origin.attempt, number)
        content = _read_exactly(self.store, path, entry.nbytes)
        part, _ = Part.parse(content, where=path, digest=entry.digest)
        self._part_nbytes += entry.nbytes
        if part.origin != origin or part.writer != number:
            raise self._contradiction(number, "is of another attempt or writer")
        if not set(part.features) <= set(self.manifest.features) or not set(part.references) <= set(
            self.manifest.references
        ):
            raise self._contradiction(number, "needs features or reads from checkpoints that the manifest doesn't list")
        return part

    def _contradiction(self, number: int, detail: str) -> Exception:
        path = part_path(self.manifest.origin.attempt, number)
        return err(
            Code.DOC_MISMATCH, f"against what the index says, {path} {detail}", where=path, requirement="REQ-IDX-001"
        )


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


def check_nbytes(store: Store, file: PartFile) -> None:
    """Raise unless a file has the size that its part says. Raises: IntegrityError(FILE_NBYTES, FILE_MISSING)."""
    actual = store.nbytes(file.name)
    if actual != file.nbytes:
        raise err(
            Code.FILE_NBYTES,
            f"{actual} bytes where {file.nbytes} are declared",
            where=file.name,
            requirement="REQ-CKP-003",
        )


def read_header(store: Store, file: PartFile) -> bytes:
    """Return a file's header, which is the one that was digested. Raises: IntegrityError(HEADER_DIGEST)."""
    header = store.read_range(file.name, 0, file.header_nbytes)
    if digest_bytes(header) != file.header_digest:
        raise err(
            Code.HEADER_DIGEST,
            "the header isn't the one that was saved",
            where=f"{file.name}[0:{file.header_nbytes}]",
            requirement="REQ-PRT-008",
        )
    return header


def read_manifest(store: Store) -> Manifest:
    """Return the manifest in a checkpoint directory's register.

    Raises: IntegrityError(NOT_COMMITTED, CHECKPOINT_ABORTED, CHECKPOINT_RETIRED) and those of `read_register`.
    Spec: REQ-MAN-001.
    """
    register = read_register(store)
    if isinstance(register, Manifest):
        return register
    if register is None:
        code, detail = Code.NOT_COMMITTED, f"{store.name} has no {MANIFEST_NAME}"
    elif isinstance(register, Abort):
        code, detail = Code.CHECKPOINT_ABORTED, register.reason
    else:
        code, detail = Code.CHECKPOINT_RETIRED, f"it was {register.manifest_digest}"
    raise err(code, detail, where=MANIFEST_NAME, requirement="REQ-MAN-001")


def read_index(store: Store, manifest: Manifest) -> Index:
    """Return the index that a manifest names, checked against it.

    Raises: IntegrityError(FILE_MISSING, FILE_NBYTES, DOC_DIGEST); FormatError(DOC_MISMATCH, MANIFEST_SUMMARY and
        those of parsing); LayoutError.
    Spec: REQ-IDX-001, REQ-IDX-004, REQ-MAN-006.
    """
    path = index_name(manifest.origin.attempt)
    content = _read_exactly(store, path, manifest.index_nbytes)
    digest = bytes.fromhex(manifest.index_digest.removeprefix(PREFIX))
    index = Index.parse(content, where=path, digest=digest)
    if index.origin != manifest.origin or index.saved_unix_s != manifest.saved_unix_s:
        raise err(
            Code.DOC_MISMATCH, "manifest and index are of different attempts", where=path, requirement="REQ-IDX-001"
        )
    said = {name: dataclasses.replace(field, stored_nbytes=None) for name, field in manifest.fields.items()}
    if summarise(index) != said:
        raise err(
            Code.MANIFEST_SUMMARY,
            "the fields aren't as the index says",
            where=f"{MANIFEST_NAME}#/signed/fields",
            requirement="REQ-MAN-006",
        )
    check_index_tiling(index)
    return index


def _open_base(store: Store, reference: Reference, closure: Closure) -> Checkpoint:
    return Checkpoint(store, digest=reference.digest, closure=closure, title=reference.name)


def _what(tensor: IndexTensor | StoredBox) -> tuple[object, ...]:
    """Return what index and part must say alike of a tensor. Spec: REQ-IDX-001."""
    return tensor.dtype, tensor.global_shape, tensor.storage


def _read_exactly(store: Store, path: str, nbytes: int) -> bytes:
    actual = store.nbytes(path)
    if actual != nbytes:
        raise err(
            Code.FILE_NBYTES, f"{actual} bytes where {nbytes} are declared", where=path, requirement="REQ-CKP-003"
        )
    return store.read(path, limit_nbytes=min(nbytes, limits.MSGPACK_NBYTES))


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
                raise err(Code.ARGUMENT, "a slice with a step; read it without, then slice the array", where=name)
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
