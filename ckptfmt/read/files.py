"""Open the metadata of a committed checkpoint: manifest, index, parts, places of blocks, bases.

This module reads metadata only. `ckptfmt.read.decoding` and `ckptfmt.read.reader` read blocks.

Spec: REQ-OPN-001 to REQ-OPN-004, REQ-OPN-011, REQ-OPN-013, REQ-DEL-020 to REQ-DEL-024.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, Self, TypeVar

from ckptfmt import limits
from ckptfmt.box import Box
from ckptfmt.commit.decision import read_register
from ckptfmt.digest import DIGEST_NBYTES, PREFIX, digest_at, digest_bytes, iter_blocks
from ckptfmt.documents.durability import HOME
from ckptfmt.documents.extents import Extent, PredictionGroup
from ckptfmt.documents.frozen_tensors import (
    BASE_LEAF,
    FrozenTensor,
    check_frozen_names,
    check_frozen_scopes,
    has_frozen_leaves,
    is_frozen_leaf,
    parse_frozen,
    parse_location,
)
from ckptfmt.documents.index import Index, IndexLeaf, IndexRngStream, IndexTensor
from ckptfmt.documents.manifest import (
    MANIFEST_NAME,
    Abort,
    Manifest,
    Reference,
    index_name,
    part_path,
)
from ckptfmt.documents.part import Leaf, Part, PartFile, RngStream
from ckptfmt.documents.sharding import Sharding
from ckptfmt.documents.tables import TensorKey, TensorTable, key_of
from ckptfmt.documents.tree import parse_tree
from ckptfmt.dtypes import DTYPES
from ckptfmt.errors import CkptError, Code, FormatError, IntegrityError, UnsupportedError, err
from ckptfmt.features import FROZEN
from ckptfmt.layout.merge import check_index_tiling, summarise
from ckptfmt.layout.read_plan import BlockRange
from ckptfmt.store.protocol import FileSource, Store, call_each

T = TypeVar("T")

#: Maximum number of attempts of a read, where a save replaces the checkpoint during each attempt.
_READ_TRIES: Final = 10


class ReplacedError(IntegrityError):
    """The error of a reader whose manifest is no longer the document in the register.

    Spec: REQ-OPN-013.
    """


def replaced(digest: str) -> ReplacedError:
    """Return the error for a checkpoint that was replaced or retired while it was open.

    Args:
        digest: the checkpoint's manifest digest.
    """
    return ReplacedError(
        Code.CHECKPOINT_RETIRED,
        (
            f"the checkpoint {digest} isn't there any more: another process replaced or retired the"
            " checkpoint after the open"
        ),
        where=MANIFEST_NAME,
        requirement="REQ-OPN-013",
        remedy="Open the path again: another checkpoint is there now, or none.",
    )


class ReadTries:
    """The tries of a read that begins again where a save replaced the checkpoint meanwhile.

    A context that suppresses ReplacedError, except in the last try.

    Spec: REQ-OPN-013.

    >>> tries, begun = ReadTries(), []
    >>> while True:
    ...     with tries:
    ...         begun.append("a try")
    ...         if len(begun) < 3:
    ...             raise replaced("blake3:00")
    ...         break
    >>> len(begun)
    3
    """

    def __init__(self) -> None:
        self._left_count = _READ_TRIES

    def __enter__(self) -> None:
        self._left_count -= 1

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        return kind is not None and issubclass(kind, ReplacedError) and self._left_count > 0


def read_anew(read: Callable[[], T]) -> T:
    """Return the result of `read`, and call `read` again if the checkpoint was replaced meanwhile.

    Args:
        read: opens the checkpoint and reads from it.

    Raises: the errors of `read`; ReplacedError if the checkpoint was replaced during every attempt.
        Spec: REQ-OPN-013.
    """
    tries = ReadTries()
    while True:
        with tries:
            return read()


def is_current(store: Store, digest: str) -> bool:
    """Return whether the register contains the manifest with this digest.

    The result is True if the register can't be read.

    Spec: REQ-OPN-013.
    """
    try:
        register = read_register(store)
    except CkptError:
        return True
    return isinstance(register, Manifest) and register.digest == digest


class CheckpointFiles:
    """The files of a committed checkpoint.

    Opening reads only the manifest and the index; parts are read on demand.

    Args:
        store: a store rooted at the checkpoint's directory.
        digest: the expected manifest digest, if known.
        check: called with the manifest before all other checks; compares the manifest with the
            checkpoint's surroundings, and raises on a mismatch.
        bases: further places to search for the bases of a delta: checkpoints, or directories of
            checkpoints. The directory that contains this checkpoint is always searched.
        closure: the closure of the delta that reads from this checkpoint; None for a checkpoint
            that isn't opened as a base.
        title: the delta's name for this checkpoint; None for the name of its directory.

    Raises: IntegrityError(NOT_COMMITTED, CHECKPOINT_ABORTED, CHECKPOINT_RETIRED, FILE_MISSING,
        FILE_NBYTES, DOC_DIGEST); FormatError; UnsupportedError; LayoutError (tiling); StoreError.
    Spec: REQ-OPN-001 to REQ-OPN-004, REQ-OPN-013.
    """

    def __init__(
        self,
        store: Store,
        *,
        digest: str | None = None,
        check: Callable[[Manifest], object] | None = None,
        bases: Sequence[Store] = (),
        closure: Closure | None = None,
        title: str | None = None,
    ) -> None:
        self.store = store
        self._is_base = closure is not None
        #: Tensor tables by their columns: index and parts usually have one table, parsed once.
        self._tables: dict[bytes, TensorTable] = {}
        self.manifest, self.index = read_anew(lambda: self._open(digest, check))
        self.tensors: dict[TensorKey, IndexTensor] = {
            tensor.key: tensor for tensor in self.index.tensors
        }
        self.leaves: dict[TensorKey, IndexLeaf] = {key_of(one): one for one in self.index.leaves}
        self.streams: dict[tuple[str, str], IndexRngStream] = {
            (one.name, one.scope): one for one in self.index.streams
        }
        #: The references to tensors of a frozen base. These tensors are among `tensors`, without a
        #: stored box.
        self.frozen: dict[TensorKey, FrozenTensor] = {}
        #: The recorded location of the frozen base; empty without references.
        self.frozen_location = ""
        self.title = store.name.rstrip("/").rpartition("/")[2] if title is None else title
        self.closure = closure or Closure(store, self.manifest, bases)
        self._aliases = {
            (tensor.field, alias, tensor.scope): tensor
            for tensor in self.index.tensors
            for alias in tensor.aliases
        }
        self._parts: dict[int, OpenPart] = {}
        self._checked: set[str] = set()
        self._part_nbytes = self._header_nbytes = 0
        self._lock = threading.RLock()
        if FROZEN in self.manifest.features or has_frozen_leaves(self.index.leaves):
            self._take_frozen()

    def _take_frozen(self) -> None:
        """Move the references to a frozen base from the leaves to the tensors.

        Raises: FormatError(FROZEN_FORM, DOC_MISMATCH); LayoutError(TENSOR_DIVERGED); the errors of
            `open_part`. Spec: REQ-FRZ-001 to REQ-FRZ-004.
        """
        entries = {key: leaf for key, leaf in self.leaves.items() if is_frozen_leaf(leaf)}
        where = index_name(self.manifest.origin.attempt)
        if not entries or FROZEN not in self.manifest.features:
            detail = f"the manifest and the index disagree about the feature {FROZEN!r}"
            raise err(Code.DOC_MISMATCH, detail, where=where, requirement="REQ-FRZ-001")
        check_frozen_scopes(entries.values(), where)
        self.open_parts(leaf.part for leaf in entries.values())
        found = []
        for key, leaf in entries.items():
            del self.leaves[key]
            place = f"{part_path(self.manifest.origin.attempt, leaf.part)}#/leaves/{leaf.name}"
            tree = parse_tree(self.stored_leaf(leaf).value, where=place)
            if leaf.name == BASE_LEAF:
                self.frozen_location = parse_location(tree, where=place)
            else:
                found.append(parse_frozen(leaf.name, tree, where=place))
        check_frozen_names(found, {*self.tensors, *self._aliases})
        nowhere = Sharding.of([])
        for one in found:
            tensor = IndexTensor(
                field="weights",
                name=one.name,
                scope="global",
                dtype=one.dtype,
                global_shape=one.global_shape,
                storage="persistent",
                aliases=one.aliases,
                sharding=nowhere,
            )
            self.frozen[tensor.key] = one
            self.tensors[tensor.key] = tensor
            self._aliases |= {("weights", alias, "global"): tensor for alias in one.aliases}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(
        self, digest: str | None, check: Callable[[Manifest], object] | None
    ) -> tuple[Manifest, Index]:
        """Return a manifest and an index that belong together."""
        self.manifest = read_manifest(self.store)
        if check is not None:
            check(self.manifest)
        if digest is not None and self.manifest.digest != digest:
            raise err(
                Code.DOC_DIGEST,
                f"the manifest is {self.manifest.digest}, not {digest}",
                where=MANIFEST_NAME,
                requirement="REQ-OPN-001",
            )
        with self.while_current():
            return self.manifest, read_index(self.store, self.manifest, self._tables)

    def check_current(self) -> None:
        """Raise ReplacedError if the register no longer contains the opened manifest.

        Call this after damage was found: the files of a replaced checkpoint are deleted, which
        looks like damage. For a base this call does nothing, because a base's files stay as long as
        a checkpoint needs them. Spec: REQ-OPN-013.
        """
        if not self._is_base and not is_current(self.store, self.digest):
            raise replaced(self.digest)

    @contextlib.contextmanager
    def while_current(self) -> Iterator[None]:
        """Raise ReplacedError instead of an IntegrityError if the checkpoint was replaced."""
        try:
            yield
        except IntegrityError as error:
            if not isinstance(error, ReplacedError):
                self.check_current()
            raise

    def close(self) -> None:
        """Release the parts that were read.

        Close the bases, unless this checkpoint is a base itself.
        """
        self._parts.clear()
        self._checked.clear()
        if not self._is_base:
            self.closure.close()

    @property
    def digest(self) -> str:
        """The digest of the manifest, which identifies the checkpoint."""
        return self.manifest.digest

    @property
    def block_nbytes(self) -> int:
        """Size of a block in bytes."""
        return self.manifest.origin.block_nbytes

    @property
    def metadata_nbytes(self) -> int:
        """Number of bytes of manifest, index, parts and shard headers read so far."""
        return (
            self._manifest_nbytes
            + self.manifest.index_nbytes
            + self._part_nbytes
            + self._header_nbytes
        )

    @functools.cached_property
    def _manifest_nbytes(self) -> int:
        return len(self.manifest.dump())

    def place_of(self, name: str) -> str:
        """Return a file's place for messages, relative to the checkpoint that the caller opened."""
        return f"{self.title}/{name}" if self._is_base else name

    @contextlib.contextmanager
    def _placed(self) -> Iterator[None]:
        """Add the place to errors, as `place_of` does; apply `while_current` too."""
        try:
            with self.while_current():
                yield
        except CkptError as error:
            if not self._is_base:
                raise
            raise error.below(self.title) from error

    def find(self, field: str, name: str, scope: str = "global") -> IndexTensor | None:
        """Return a tensor's entry in the index, by name or alias; None without such a tensor."""
        key = (field, name, scope)
        return self.tensors.get(key) or self._aliases.get(key)

    def stored_leaf(self, entry: IndexLeaf) -> Leaf:
        """Return a plain value from its part.

        Raises: FormatError(DOC_MISMATCH); the errors of `open_part`.
        """
        leaf = self.open_part(entry.part).leaves.get(key_of(entry))
        if leaf is None:
            raise self._contradiction(entry.part, f"has no value {entry.name!r} of {entry.field}")
        return leaf

    def stored_stream(self, entry: IndexRngStream) -> RngStream:
        """Return an RNG stream from its part.

        Raises: FormatError(DOC_MISMATCH); the errors of `open_part`.
        """
        stream = self.open_part(entry.part).streams.get((entry.name, entry.scope))
        if stream is None or stream.kind != entry.kind:
            raise self._contradiction(
                entry.part, f"has no stream {entry.name!r} of kind {entry.kind!r}"
            )
        return stream

    def stored_box(self, tensor: IndexTensor, box: Box, part: int) -> StoredBox:
        """Return a box of a tensor as its part stores it.

        Raises: FormatError(DOC_MISMATCH); the errors of `open_part`. Spec: REQ-IDX-001.
        """
        stored = self.open_part(part).find(tensor.key, box)
        # The index and the part must agree on these properties.
        if stored is None or (stored.dtype, stored.global_shape, stored.storage) != (
            tensor.dtype,
            tensor.global_shape,
            tensor.storage,
        ):
            raise self._contradiction(part, f"doesn't store {box} of {tensor.name!r}")
        return stored

    def check_file(self, part: Part, name: str) -> None:
        """Compare the size and the header of a file with its part, once. Spec: REQ-OPN-011."""
        with self._lock:
            if name in self._checked:
                return
        # Outside the lock: two concurrent calls for one file both check the file, which is
        # harmless.
        file = next(file for file in part.files if file.name == name)
        with self._placed():
            self.check_nbytes(part, file)
            self.read_header(file)

    def check_nbytes(self, part: Part, file: PartFile) -> None:
        """Raise unless a file has the size given in the part.

        Raises: IntegrityError(FILE_NBYTES, FILE_MISSING; FILES_IN_CACHES if the part's durability
            permits a file outside the home store).
        Spec: REQ-CKP-003, REQ-CKP-004, REQ-OPN-012.
        """
        try:
            check_nbytes(self.store, file.name, file.nbytes)
        except CkptError as error:
            if error.code != Code.FILE_MISSING or part.durability == HOME:
                raise
            raise in_caches(part.durability, [file.name]) from None

    def read_header(self, file: PartFile) -> bytes:
        """Return a file's header, and mark the file as checked.

        The caller has compared the size before.

        Raises: as the function `read_header`. Spec: REQ-OPN-011.
        """
        header = read_header(self.store, file)
        with self._lock:
            self._header_nbytes += 0 if file.name in self._checked else file.header_nbytes
            self._checked.add(file.name)
        return header

    def open_part(self, number: int) -> OpenPart:
        """Return a part. The first call reads the part; later calls return the same object.

        Raises: as `read_part`.
        """
        with self._lock:
            if number not in self._parts:
                with self._placed():
                    self._keep_part(number, self.read_part(number))
            return self._parts[number]

    def open_parts(self, numbers: Iterable[int]) -> None:
        """Read several parts concurrently if the store is remote; otherwise do nothing.

        Raises: as `read_part`.
        """
        if not self.store.is_remote:
            return  # `open_part` reads each part on demand
        with self._lock, self._placed():
            missing = sorted(set(numbers) - self._parts.keys())
            for number, part in zip(
                missing, call_each(self.store, self.read_part, missing), strict=True
            ):
                self._keep_part(number, part)

    def _keep_part(self, number: int, part: Part) -> None:
        self._parts[number] = OpenPart(self, part)
        self._part_nbytes += self.index.parts[number].nbytes

    def read_part(self, number: int) -> Part:
        """Read and check one part.

        Raises: IntegrityError(FILE_MISSING, FILE_NBYTES, DOC_DIGEST); FormatError.
        Spec: REQ-OPN-004.
        """
        origin = self.manifest.origin
        entry = self.index.parts[number]
        path = part_path(origin.attempt, number)
        content = read_exactly(self.store, path, entry.nbytes)
        part, _ = Part.parse(content, where=path, digest=entry.digest, known=self._tables)
        if part.origin != origin or part.writer != number:
            raise self._contradiction(number, "is of another attempt or writer")
        if not set(part.features) <= set(self.manifest.features) or not set(part.references) <= set(
            self.manifest.references
        ):
            raise self._contradiction(
                number, "needs features or reads from checkpoints that the manifest doesn't list"
            )
        return part

    def _contradiction(self, number: int, detail: str) -> Exception:
        path = part_path(self.manifest.origin.attempt, number)
        return err(
            Code.DOC_MISMATCH,
            f"unlike the index says, {path} {detail}",
            where=path,
            requirement="REQ-IDX-001",
        )


# --- bases ----------------------------------------------------------------------------------------


class Closure:
    """The bases of a delta. Each base is found by digest and opened once.

    The search covers the delta's parent directory and `bases`.

    Args:
        store: the delta's store.
        manifest: the delta's manifest; only its references may be opened here.
        bases: further places to search: each a checkpoint, or a directory of checkpoints.
    """

    def __init__(self, store: Store, manifest: Manifest, bases: Sequence[Store]) -> None:
        self._store = store
        self._references = frozenset(manifest.references)
        self._bases = tuple(bases)
        self._opened: dict[Reference, CheckpointFiles] = {}
        self._lock = threading.RLock()

    @property
    def places(self) -> tuple[Store, ...]:
        """The further places to search, also for a frozen base."""
        return self._bases

    def open(self, reference: Reference) -> CheckpointFiles:
        """Return a referenced checkpoint, opened once.

        Raises: IntegrityError(BASE_MISSING, BASE_MISMATCH) and the errors of opening a checkpoint;
            FormatError(REFERENCE_CLOSURE).
        """
        with self._lock:
            if reference not in self._opened:
                self._opened[reference] = self._find(reference)
            return self._opened[reference]

    def close(self) -> None:
        """Close the opened bases."""
        with self._lock:
            for files in self._opened.values():
                files.close()

    def _find(self, reference: Reference) -> CheckpointFiles:
        self._check_listed({reference})
        store = self.find(reference)
        try:
            files = _open_base(store, reference, self)
        except CkptError as error:
            raise error.below(reference.name) from error
        # The delta's manifest must list the base's own references too. A base has fewer references
        # than the delta, so chains of bases end and contain no cycle.
        self._check_listed(set(files.manifest.references))
        return files

    def _check_listed(self, needed: set[Reference]) -> None:
        missing = sorted(reference.name for reference in needed - self._references)
        if missing:
            raise err(
                Code.REFERENCE_CLOSURE,
                f"the checkpoint reads from {', '.join(missing)}, which the manifest doesn't list",
                where=f"{MANIFEST_NAME}#/signed/references",
                requirement="REQ-DEL-021",
            )

    def find(self, reference: Reference) -> Store:
        """Return the store of the checkpoint with the reference's digest.

        Raises: IntegrityError(BASE_MISSING, BASE_MISMATCH).
        """
        found: list[str] = []
        elsewhere = (place for base in self._bases for place in (base, base.at(reference.name)))
        for place in (self._store.beside(reference.name), *elsewhere):
            try:
                register = read_register(place)
            except (FormatError, IntegrityError, UnsupportedError) as error:
                found.append(f"{place.name}: {error.code}")
                continue
            if isinstance(register, Manifest) and register.digest == reference.digest:
                return place
            if register is not None:
                kind = (
                    register.digest
                    if isinstance(register, Manifest)
                    else type(register).__name__.lower()
                )
                found.append(f"{place.name}: {kind}")
        code = Code.BASE_MISMATCH if found else Code.BASE_MISSING
        detail = f"the base {reference.digest} isn't there" + (
            f"; found {'; '.join(found)}" if found else ""
        )
        raise err(code, detail, where=reference.name, requirement="REQ-DEL-020")


def _open_base(store: Store, reference: Reference, closure: Closure) -> CheckpointFiles:
    return CheckpointFiles(store, digest=reference.digest, closure=closure, title=reference.name)


# --- parts ----------------------------------------------------------------------------------------


class OpenPart:
    """A part of an opened checkpoint, with lookup of its boxes by name.

    Box objects are made on demand and kept.

    Attributes:
        files: the checkpoint.
        part: the document.
        streams, leaves: the part's RNG streams and plain values, by name.
    """

    def __init__(self, files: CheckpointFiles, part: Part) -> None:
        self.files = files
        self.part = part
        self.streams = {(stream.name, stream.scope): stream for stream in part.streams}
        self.leaves = {key_of(leaf): leaf for leaf in part.leaves}
        self._groups = {row: group for group in part.groups for row in group.boxes}
        self._boxes: dict[int, StoredBox] = {}
        self._written: dict[int, dict[Box, int]] = {}

    def find(self, key: TensorKey, box: Box) -> StoredBox | None:
        """Return a tensor's box as the part stores it; None if the part doesn't store this box."""
        held = self.part.holdings
        tensor = held.table.numbers.get(key)
        if tensor is None:
            return None
        rows = held.rows_of(tensor)
        if len(rows) > 1:
            if tensor not in self._written:
                self._written[tensor] = {held.box(row): row for row in rows if held.written[row]}
            row = self._written[tensor].get(box)
            return None if row is None else self.box(row)
        stored = self.box(rows[0]) if rows else None  # the usual case, without a search
        return stored if stored is not None and stored.extents and stored.box == box else None

    def box(self, row: int) -> StoredBox:
        """Return a box by its number in the part."""
        if row not in self._boxes:
            # Concurrent threads must get the same object, because blocks are identified by the
            # object.
            self._boxes.setdefault(row, self._make_box(row))
        return self._boxes[row]

    def iter_boxes(self) -> Iterator[StoredBox]:
        """Yield all boxes of the part."""
        return map(self.box, range(len(self.part.holdings.replica)))

    def _make_box(self, row: int) -> StoredBox:
        held = self.part.holdings
        tensor = held.owner[row]
        table = held.table
        return StoredBox(
            opened=self,
            row=row,
            key=table.keys[tensor],
            dtype=table.dtypes[tensor],
            global_shape=table.global_shapes[tensor],
            storage=table.storages[tensor],
            box=held.box(row),
            digests=held.digests_of(row),
            extents=held.extents.of_box(row),
            group=self._groups.get(row),
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredBox:
    """A box as one part stores it.

    Attributes:
        opened: the part.
        row: the box's number in the part.
        key, dtype, global_shape, storage: the tensor's properties.
        box: the box's place and shape in the tensor.
        extents: the places of the blocks; empty for a box that another writer stores.
        digests: the digests of the blocks' contents, concatenated.
        group: the box's prediction group; None if the box has no group.
    """

    opened: OpenPart
    row: int
    key: TensorKey
    dtype: str
    global_shape: tuple[int, ...]
    storage: str
    box: Box
    extents: tuple[Extent, ...]
    digests: bytes
    group: PredictionGroup | None

    @property
    def nbytes(self) -> int:
        """Size of the box in bytes."""
        return self.box.element_count * self.element_nbytes

    @property
    def element_nbytes(self) -> int:
        """Size of an element in bytes."""
        return DTYPES[self.dtype].nbytes

    @property
    def block_nbytes(self) -> int:
        """Size of a block in bytes; the last block of a box may be shorter."""
        return self.opened.part.origin.block_nbytes

    def digests_of(self, first: int, last: int) -> bytes:
        """Return the digests of the content of blocks ``[first, last)``."""
        return self.digests[first * DIGEST_NBYTES : last * DIGEST_NBYTES]

    def content_nbytes(self, block: int) -> int:
        """Return the size of a block's content in bytes."""
        return min(self.block_nbytes, self.nbytes - block * self.block_nbytes)

    def extent_of(self, block: int) -> Extent:
        """Return the extent that contains a block."""
        return self.extents[0] if len(self.extents) == 1 else self.extents[self._find(block)]

    def extents_of(self, first: int, last: int) -> tuple[Extent, ...]:
        """Return the extents that contain any of the blocks ``[first, last)``.

        At least one block is given.
        """
        return self.extents[self._find(first) : self._find(last - 1) + 1]

    def _find(self, block: int) -> int:
        """Return the number of the extent that contains a block.

        The extents cover the blocks once and in order.
        """
        return bisect.bisect_right(self.extents, block, key=lambda extent: extent.block_begin) - 1

    def span_of(self, first: int, last: int) -> tuple[str, int, int]:
        """Return the file, first byte and stored size of blocks ``[first, last)`` of one extent.

        Args:
            last: ``first + 1`` for encoded blocks.
        """
        extent = self.extent_of(first)
        assert extent.file is not None  # noqa: S101
        if extent.is_encoded:
            byte_begin = extent.stored_begin(first)
            nbytes = extent.stored_nbytes(first)
        else:
            byte_begin = extent.byte_begin + (first - extent.block_begin) * self.block_nbytes
            nbytes = min(last * self.block_nbytes, self.nbytes) - first * self.block_nbytes
        return self.opened.part.files[extent.file].name, byte_begin, nbytes

    def title_of(self, block: int) -> str:
        """Return a block's name for messages."""
        return f"block {block} of {self.key[0]} {self.key[1][:100]!r}"

    def place_of(self, block: int) -> str:
        """Return the place of a block's stored bytes, for messages."""
        name, byte_begin, nbytes = self.span_of(block, block + 1)
        return f"{self.opened.files.place_of(name)}[{byte_begin}:{byte_begin + nbytes}]"

    def iter_damages(self, blocks: BlockRange, stored: memoryview) -> Iterator[CkptError]:
        """Yield an IntegrityError(BLOCK_DIGEST) for each block that doesn't match its digest.

        Args:
            blocks: raw blocks of one extent, or one encoded block.
            stored: the bytes of the range.

        Spec: REQ-OPN-006, REQ-DEL-007.
        """
        first = blocks.box_byte_begin // self.block_nbytes
        extent = self.extent_of(first)
        if extent.is_encoded:
            digests = extent.stored_digest(first)
            requirement = "REQ-DEL-007"
            saved = "stored as it was saved"
        else:  # raw, in this checkpoint or in a base
            digests = self.digests_of(first, first - (-blocks.nbytes // self.block_nbytes))
            requirement = "REQ-OPN-006"
            saved = "what was saved"
        for number, (begin, end) in enumerate(iter_blocks(blocks.nbytes, self.block_nbytes)):
            if digest_bytes(stored[begin:end]) != digest_at(digests, number):
                yield err(
                    Code.BLOCK_DIGEST,
                    f"{self.title_of(first + number)} isn't {saved}",
                    where=f"{blocks.path}[{blocks.byte_begin + begin}:{blocks.byte_begin + end}]",
                    requirement=requirement,
                )


# --- single documents and headers -----------------------------------------------------------------


def read_manifest(store: Store) -> Manifest:
    """Return the manifest in a checkpoint directory's register.

    Raises: IntegrityError(NOT_COMMITTED, CHECKPOINT_ABORTED, CHECKPOINT_RETIRED); the errors of
        `read_register`.
    Spec: REQ-MAN-001.
    """
    register = read_register(store)
    if isinstance(register, Manifest):
        return register
    if register is None:
        code = Code.NOT_COMMITTED
        detail = f"{store.name} has no {MANIFEST_NAME}"
    elif isinstance(register, Abort):
        code = Code.CHECKPOINT_ABORTED
        detail = register.reason
    else:
        code = Code.CHECKPOINT_RETIRED
        detail = f"the checkpoint {register.manifest_digest} was retired"
    raise err(code, detail, where=MANIFEST_NAME, requirement="REQ-MAN-001")


def read_index(store: Store, manifest: Manifest, known: dict[bytes, TensorTable]) -> Index:
    """Return the index named by a manifest, checked against the manifest.

    Args:
        known: see `Index.parse`.

    Raises: IntegrityError(FILE_MISSING, FILE_NBYTES, DOC_DIGEST); FormatError(DOC_MISMATCH,
        MANIFEST_SUMMARY and the codes of parsing); LayoutError.
    Spec: REQ-IDX-001, REQ-IDX-004, REQ-MAN-006.
    """
    path = index_name(manifest.origin.attempt)
    content = read_exactly(store, path, manifest.index_nbytes)
    digest = bytes.fromhex(manifest.index_digest.removeprefix(PREFIX))
    index = Index.parse(content, where=path, digest=digest, known=known)
    if index.origin != manifest.origin or index.saved_unix_s != manifest.saved_unix_s:
        raise err(
            Code.DOC_MISMATCH,
            "manifest and index are of different attempts",
            where=path,
            requirement="REQ-IDX-001",
        )
    said = {
        name: dataclasses.replace(field, stored_nbytes=None)
        for name, field in manifest.fields.items()
    }
    if summarise(index) != said:
        raise err(
            Code.MANIFEST_SUMMARY,
            "the fields aren't as the index says",
            where=f"{MANIFEST_NAME}#/signed/fields",
            requirement="REQ-MAN-006",
        )
    check_index_tiling(index)
    return index


def in_caches(durability: str, names: Sequence[str]) -> CkptError:
    """Return the error for files that were saved to caches and are missing from the home store."""
    others = (
        f", and {len(names) - 1} more files of the checkpoint aren't at home either"
        if len(names) > 1
        else ""
    )
    detail = (
        "the file isn't at home: it was written to a cache of its node (durability"
        f" {durability}){others}"
    )
    return err(Code.FILES_IN_CACHES, detail, where=names[0], requirement="REQ-OPN-012")


def check_nbytes(store: FileSource, path: str, nbytes: int) -> None:
    """Raise unless a file has the declared size.

    Raises: IntegrityError(FILE_NBYTES, FILE_MISSING).
    """
    actual = store.nbytes(path)
    if actual != nbytes:
        detail = f"the file has {actual} bytes, not {nbytes}"
        raise err(Code.FILE_NBYTES, detail, where=path, requirement="REQ-CKP-003")


def read_header(store: Store, file: PartFile) -> bytes:
    """Return a file's header, compared with its digest. Raises: IntegrityError(HEADER_DIGEST)."""
    header = store.read_range(file.name, 0, file.header_nbytes)
    if digest_bytes(header) != file.header_digest:
        raise err(
            Code.HEADER_DIGEST,
            "the header differs from the saved header",
            where=f"{file.name}[0:{file.header_nbytes}]",
            requirement="REQ-PRT-008",
        )
    return header


def read_exactly(store: Store, path: str, nbytes: int) -> bytes:
    """Return a file with a declared size. Raises: IntegrityError(FILE_MISSING, FILE_NBYTES)."""
    try:
        content = store.read(path, limit_nbytes=min(nbytes, limits.MSGPACK_NBYTES))
    except CkptError as error:
        if error.code != Code.LIMIT_EXCEEDED:
            raise
        check_nbytes(store, path, nbytes)  # the declared size is the usual cause
        raise
    if len(content) != nbytes:
        check_nbytes(store, path, nbytes)
    return content
