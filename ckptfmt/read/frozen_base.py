"""Find, check and read the tensors of a frozen base, which a checkpoint refers to by digest.

A base is a checkpoint, a directory of safetensors files as of Hugging Face, or a safetensors file.

Spec: REQ-FRZ-005 to REQ-FRZ-007.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol, Self, TypeAlias
from urllib.parse import urlsplit

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from ckptfmt import limits
from ckptfmt.box import Box
from ckptfmt.documents.frozen_tensors import FrozenTensor
from ckptfmt.documents.index import IndexTensor
from ckptfmt.documents.manifest import MANIFEST_NAME
from ckptfmt.documents.run import LAUNCHES, RUN_NAME
from ckptfmt.documents.tables import TensorKey
from ckptfmt.dtypes import DTYPES
from ckptfmt.errors import CkptError, Code, err
from ckptfmt.layout.read_plan import iter_chunks
from ckptfmt.store import LocalStore, is_url, open_store
from ckptfmt.store.direct import make_memory
from ckptfmt.store.protocol import PAGE_NBYTES, Store
from ckptfmt.write.snapshot import TensorSink

#: Maximum size in bytes of the chunks of a tensor of a base.
CHUNK_NBYTES: Final = 16 << 20
_SUFFIX: Final = ".safetensors"
_INDEX_NAME: Final = "model.safetensors.index.json"
_PREFIX_NBYTES: Final = 8
#: Maximum size in bytes of a safetensors header, as in the safetensors library.
_HEADER_NBYTES: Final = 100_000_000
_METADATA_KEY: Final = "__metadata__"
_DTYPE_OF: Final = {dtype.safetensors: dtype.name for dtype in DTYPES.values() if dtype.safetensors}

#: A place in which a base may be.
Place: TypeAlias = "str | os.PathLike[str] | Store"
Chunks: TypeAlias = Iterator[tuple[Box, memoryview]]


class Opened(Protocol):
    """An open checkpoint as a base; `ckptfmt.read.reader.Checkpoint` implements the protocol."""

    @property
    def tensors(self) -> Mapping[TensorKey, IndexTensor]:
        """The tensors by field, name and scope."""
        ...

    def find(self, field: str, name: str, scope: str = "global") -> IndexTensor | None:
        """Return a tensor by name or alias."""
        ...

    def iter_content(self, tensor: IndexTensor, wanted: Box) -> Chunks:
        """Yield the elements of a box, in order."""
        ...

    def close(self) -> None:
        """Release the parts that were read."""
        ...


def _join(place: str, name: str) -> str:
    """Return the path or URL of a file in a place."""
    return f"{place.rstrip('/')}/{name}"


@dataclasses.dataclass(frozen=True, slots=True)
class BaseTensor:
    """A tensor of a base: dtype, shape, and the place in a file, for a safetensors file.

    Attributes:
        path: path of the file; empty in a checkpoint.
        byte_begin: first byte, from the start of the file.
    """

    dtype: str
    global_shape: tuple[int, ...]
    path: str = ""
    byte_begin: int = 0


class FrozenBase:
    """An open base. `close` releases the files.

    Args:
        place: path or URL of a checkpoint, of a directory of safetensors files, or of a safetensors
            file; or a store.
        open_checkpoint: opens a checkpoint.

    Attributes:
        location: the absolute path or the URL of the base.

    Raises: StateError(FROZEN_BASE_MISSING); the errors of opening a checkpoint; StoreError.
    Spec: REQ-FRZ-006.
    """

    def __init__(self, place: Place, open_checkpoint: Any) -> None:
        self._checkpoint: Opened | None = None
        self._tensors: dict[str, BaseTensor] = {}
        self._by_end: dict[str, list[str]] | None = None
        self._checked: set[FrozenTensor] = set()
        file = None
        if isinstance(place, str | os.PathLike) and os.fspath(place).endswith(_SUFFIX):
            parent, _, file = os.fspath(place).rpartition("/")
            place = parent or ("/" if os.fspath(place).startswith("/") else ".")
        try:
            store = open_store(place, writable=False)
        except CkptError as error:
            raise _missing(str(place), error.detail) from error
        self._store = store
        #: The store and the name of each file.
        self._files: dict[str, tuple[Store, str]] = {}
        self.location = store.name if file is None else _join(store.name, file)
        names = set(store.list_names(""))
        if not {RUN_NAME, f"{LAUNCHES}/"}.isdisjoint(names):
            detail = "this is a run, whose newest checkpoint changes"
            remedy = "Give the path of one checkpoint of the run."
            raise err(Code.ARGUMENT, detail, where=self.location, remedy=remedy)
        if file is None and MANIFEST_NAME in names:
            self._checkpoint = open_checkpoint(store)
            return
        for path in _list_files(store, names) if file is None else [file]:
            self._add_file(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the checkpoint, if the base is a checkpoint."""
        if self._checkpoint is not None:
            self._checkpoint.close()

    def find(self, name: str) -> BaseTensor | None:
        """Return dtype, shape and place of a tensor of the base."""
        if self._checkpoint is None:
            return self._tensors.get(name)
        tensor = self._checkpoint.find("weights", name)
        return None if tensor is None else BaseTensor(tensor.dtype, tensor.global_shape)

    def find_longer(self, end: str) -> tuple[str, ...]:
        """Return the only name of the base that ends in a dot and `end`, if there is only one."""
        if self._by_end is None:
            names: Iterable[str] = self._tensors
            if self._checkpoint is not None:
                names = [key[1] for key in self._checkpoint.tensors if key[0] == "weights"]
            self._by_end = {}
            for name in names:
                for at, letter in enumerate(name):
                    if letter == ".":
                        self._by_end.setdefault(name[at + 1 :], []).append(name)
        found = self._by_end.get(end, ())
        return tuple(found) if len(found) == 1 else ()

    def iter_content(self, name: str, wanted: Sequence[Box] | None = None) -> Chunks:
        """Yield the content of a tensor in order: C order, little-endian, with each chunk's box.

        Args:
            wanted: boxes; chunks without an element of any of these boxes are left out. None for
                all chunks.

        Raises: IntegrityError; StoreError.
        """
        tensor = self.find(name)
        assert tensor is not None  # noqa: S101
        whole = Box.whole(tensor.global_shape)
        if self._checkpoint is not None:
            found = self._checkpoint.find("weights", name)
            assert found is not None  # noqa: S101
            for chunk in iter_chunks(whole, DTYPES[tensor.dtype].nbytes, CHUNK_NBYTES):
                if _meets(chunk, wanted):
                    yield from self._checkpoint.iter_content(found, chunk)
            return
        element_nbytes = DTYPES[tensor.dtype].nbytes
        most_nbytes = min(CHUNK_NBYTES, whole.element_count * element_nbytes)
        buffer = make_memory(most_nbytes + 2 * PAGE_NBYTES)
        at = tensor.byte_begin
        store, file = self._files[tensor.path]
        with store.open_ranges(file) as reader:
            for chunk in iter_chunks(whole, element_nbytes, CHUNK_NBYTES):
                nbytes = chunk.element_count * element_nbytes
                if _meets(chunk, wanted):
                    yield chunk, reader.read_into(at, nbytes, buffer) if nbytes else buffer[:0]
                at += nbytes

    def digest(self, name: str) -> bytes:
        """Return the digest of the content of a tensor of the base. Raises: as `iter_content`."""
        hasher = blake3(max_threads=blake3.AUTO)
        for _, content in self.iter_content(name):
            hasher.update(content)
        return hasher.digest()

    def check(self, tensor: FrozenTensor) -> None:
        """Raise unless the base has the tensor that a reference describes.

        The content is compared at the first call for a tensor.

        Raises: StateError(FROZEN_BASE_CHANGED); as `iter_content`. Spec: REQ-FRZ-005.
        """
        if tensor in self._checked:
            return
        found = self.find(tensor.name_in_base)
        if found is None:
            raise self.changed(tensor, f"the base has no tensor {tensor.name_in_base!r}")
        if (found.dtype, found.global_shape) != (tensor.dtype, tensor.global_shape):
            said = f"{tensor.dtype} of shape {tensor.global_shape}"
            detail = f"the base has {found.dtype} of shape {found.global_shape}, not {said}"
            raise self.changed(tensor, detail)
        if self.digest(tensor.name_in_base) != tensor.digest:
            raise self.changed(tensor, "the base has another content under this name")
        self._checked.add(tensor)

    def changed(self, tensor: FrozenTensor, detail: str) -> CkptError:
        """Return the error for a tensor of the base that differs from a reference."""
        return err(
            Code.FROZEN_BASE_CHANGED,
            f"{detail} (in the base {self.location}, as {tensor.name_in_base!r})",
            where=f"weights:{tensor.name}",
            requirement="REQ-FRZ-005",
        )

    def _resolve(self, path: str) -> tuple[Store, str]:
        """Return the store and the name of a file, behind symbolic links of a local directory.

        The snapshots of Hugging Face's cache are directories of symbolic links. The digest decides
        about the content, so that a link can't replace the base.
        """
        if self._store.is_remote or not isinstance(self._store, LocalStore):
            return self._store, path
        folder, name = os.path.split(os.path.realpath(_join(self._store.name, path)))
        return LocalStore(folder, writable=False), name

    def _add_file(self, path: str) -> None:
        """Add the tensors of a safetensors file.

        Raises: StateError(FROZEN_BASE_MISSING) for a file of another form.
        """
        where = _join(self._store.name, path)
        try:
            self._files[path] = self._resolve(path)
            found = _read_entries(*self._files[path], path)
            self._tensors = {**found, **self._tensors}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise _missing(where, f"isn't a safetensors file: {error}") from error
        except CkptError as error:
            if error.code != Code.FILE_MISSING:
                raise
            raise _missing(where, "no such file") from error


def _read_entries(store: Store, file: str, path: str) -> dict[str, BaseTensor]:
    """Return the tensors of a file's header. Raises: ValueError, TypeError, KeyError.

    Args:
        store, file: the file to read.
        path: the file's name in the base.
    """
    file_nbytes = store.nbytes(file)
    prefix = store.read_range(file, 0, min(_PREFIX_NBYTES, file_nbytes))
    text_nbytes = int.from_bytes(prefix, "little")
    begin = _PREFIX_NBYTES + text_nbytes
    if len(prefix) < _PREFIX_NBYTES or begin > file_nbytes:
        raise ValueError("the header's length exceeds the file")
    if text_nbytes > _HEADER_NBYTES:
        raise ValueError(f"a header of {text_nbytes} bytes")
    header = json.loads(store.read_range(file, _PREFIX_NBYTES, text_nbytes))
    return {
        name: _parse_entry(entry, path, begin, file_nbytes)
        for name, entry in header.items()
        if name != _METADATA_KEY and entry["dtype"] in _DTYPE_OF
    }


def _parse_entry(entry: Any, path: str, begin: int, file_nbytes: int) -> BaseTensor:
    """Return a tensor of a header. Raises: ValueError, TypeError, KeyError."""
    dtype = _DTYPE_OF[entry["dtype"]]
    shape = tuple(map(int, entry["shape"]))
    first, last = map(int, entry["data_offsets"])
    if last - first != math.prod(shape) * DTYPES[dtype].nbytes or min((first, *shape)) < 0:
        raise ValueError("the offsets of a tensor don't fit its shape")
    if begin + last > file_nbytes:
        raise ValueError(f"the tensors end at byte {begin + last}, the file at {file_nbytes}")
    return BaseTensor(dtype, shape, path, begin + first)


def _list_files(store: Store, names: Iterable[str]) -> list[str]:
    """Return the safetensors files of a directory: those of the index, or all.

    Raises: StateError(FROZEN_BASE_MISSING).
    """
    files = sorted(name for name in names if name.endswith(_SUFFIX))
    if _INDEX_NAME in names:
        with contextlib.suppress(ValueError, AttributeError, TypeError):
            index = json.loads(store.read(_INDEX_NAME, limit_nbytes=limits.JSON_NBYTES))
            named = {*map(str, index["weight_map"].values())}
            # A name with a slash could lead elsewhere.
            files = sorted(name for name in named if "/" not in name and name.endswith(_SUFFIX))
    if not files:
        raise _missing(store.name, "there is neither a checkpoint nor a safetensors file")
    return files


def _missing(location: str, detail: str) -> CkptError:
    return err(Code.FROZEN_BASE_MISSING, detail, where=location, requirement="REQ-FRZ-006")


@dataclasses.dataclass(frozen=True, slots=True)
class Recorded:
    """The location of a base as recorded by a checkpoint, whose author may be a stranger.

    Attributes:
        location: path or URL of the base at the save.
        checkpoint: path or URL of the checkpoint.
    """

    location: str
    checkpoint: str

    def check(self) -> str:
        """Return the location, if a reader may open the location without the caller's consent.

        A request to a bucket has the credentials of this process, and the owner of the bucket
        learns of the request. So the caller must have named the bucket: as the bucket of the
        checkpoint, or of a place of the base. Local paths are opened: a read of a local file tells
        nobody of the read.

        Raises: StateError(FROZEN_BASE_MISSING). Spec: REQ-FRZ-006.
        """
        location = self.location
        if not is_url(location):
            return location
        try:
            bucket = urlsplit(location)[:2]
            is_named = bucket[0] == "file" or bucket == urlsplit(self.checkpoint)[:2]
        except ValueError as error:
            raise _missing(location, str(error)) from error
        if not is_named:
            detail = "a recorded URL outside of the checkpoint's bucket is opened only if given"
            raise _missing(location, detail)
        return location


def find_base(
    tensors: Sequence[FrozenTensor],
    places: Iterable[Place],
    recorded: Recorded,
    open_checkpoint: Any,
    known: FrozenBase | None = None,
) -> FrozenBase:
    """Return the first base that has the tensors of some references, checked to the last byte.

    Args:
        tensors: the references.
        places: the caller's places, searched before the recorded location.
        recorded: the location at the save, which is opened only as `Recorded.check` allows.
        open_checkpoint: opens a checkpoint.
        known: a base that an earlier call returned, searched first; others are searched again.

    Raises: StateError(FROZEN_BASE_MISSING, FROZEN_BASE_CHANGED).
    Spec: REQ-FRZ-005, REQ-FRZ-006.
    """
    given = list(places)
    errors: list[CkptError] = []
    for place in (*([] if known is None else [known]), *given, recorded):
        try:
            if isinstance(place, FrozenBase):
                base = place
            else:
                where = place.check() if isinstance(place, Recorded) else place
                base = FrozenBase(where, open_checkpoint)
            try:
                for tensor in tensors:
                    base.check(tensor)
            except BaseException:
                base.close()
                raise
        except CkptError as error:
            errors.append(error)
            continue
        return base
    # A base that was found and differs says more than a place without a base.
    changed = next((one for one in errors if one.code == Code.FROZEN_BASE_CHANGED), None)
    if changed is not None:
        raise changed
    told = "; ".join(f"{one.where}: {one.detail}" for one in errors)
    count = len(tensors)
    detail = (
        f"{count} frozen {'tensor is' if count == 1 else 'tensors are'} in a base, which was at"
        f" {recorded.location} when this checkpoint was saved, and isn't found ({told})"
    )
    raise err(
        Code.FROZEN_BASE_MISSING,
        detail,
        where=f"weights:{tensors[0].name}",
        requirement="REQ-FRZ-006",
    )


class FrozenReading:
    """A read of tensors of a frozen base into sinks.

    A sink that has the content already, as in a program that has loaded the base, isn't read.

    Args:
        wanted: pairs of a reference and a sink.
        places: the caller's places, searched before the recorded location.
        recorded: the location at the save; see `find_base`.
        open_checkpoint: opens a checkpoint.
        known: the base of an earlier read of this checkpoint.

    Attributes:
        base: the open base, which the caller closes; None if nothing is read.
        read_nbytes: number of bytes copied from the base so far.

    Raises: StateError(FROZEN_BASE_MISSING, FROZEN_BASE_CHANGED). Spec: REQ-FRZ-005, REQ-FRZ-006.
    """

    def __init__(
        self,
        wanted: Iterable[tuple[FrozenTensor, TensorSink]],
        places: Iterable[Place],
        recorded: Recorded,
        open_checkpoint: Any,
        known: FrozenBase | None = None,
    ) -> None:
        self.read_nbytes = 0
        self._sinks: dict[FrozenTensor, list[TensorSink]] = {}
        for tensor, sink in wanted:
            digest_of = getattr(sink, "content_digest", None)
            if sink.boxes and (digest_of is None or digest_of() != tensor.digest):
                self._sinks.setdefault(tensor, []).append(sink)
        self.base = (
            find_base(list(self._sinks), places, recorded, open_checkpoint, known)
            if self._sinks
            else None
        )

    def run(self) -> None:
        """Copy the elements from the base to the sinks.

        Raises: StateError(FROZEN_BASE_CHANGED) if the base changed since the planning.
        """
        base = self.base
        if base is None:
            return
        for tensor, sinks in self._sinks.items():
            wanted = [box for sink in sinks for box in sink.boxes]
            hasher = blake3(max_threads=blake3.AUTO)
            nbytes = 0
            for chunk, content in base.iter_content(tensor.name_in_base, wanted):
                hasher.update(content)
                nbytes += content.nbytes
                for sink in sinks:
                    _place(sink, chunk, content, DTYPES[tensor.dtype].nbytes)
            # A part of the content was compared as a part of the whole, in `find_base`.
            if nbytes == tensor.nbytes and hasher.digest() != tensor.digest:
                raise base.changed(tensor, "the base was changed during this load")
            self.read_nbytes += nbytes


def _meets(chunk: Box, wanted: Sequence[Box] | None) -> bool:
    """Return whether a chunk has elements of any of some boxes."""
    return wanted is None or any(chunk.intersect(box) is not None for box in wanted)


def _place(sink: TensorSink, chunk: Box, content: memoryview, element_nbytes: int) -> None:
    """Copy the elements of a chunk that a sink wants."""
    for wanted in sink.boxes:
        common = chunk.intersect(wanted)
        if common is not None:
            sink.copy_from(common, cut_chunk(content, chunk, common, element_nbytes))


def cut_chunk(content: memoryview, chunk: Box, wanted: Box, element_nbytes: int) -> memoryview:
    """Return the elements of `wanted` from the elements of a chunk, in C order.

    The result may be a view of `content`.
    """
    if wanted == chunk:
        return content[: chunk.element_count * element_nbytes]
    held: NDArray[np.uint8] = np.frombuffer(content, np.uint8).reshape(*chunk.shape, element_nbytes)
    index: tuple[Any, ...] = (*wanted.relative_to(chunk), ...)
    found: memoryview = held[index].copy(order="C").reshape(-1).data
    return found
