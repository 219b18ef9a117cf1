"""A directory of torch.distributed.checkpoint as the source or the target of a conversion, in one process.

Its ``.metadata`` is a pickle, and torch reads it with nothing in the way. Here only the classes that it consists of are
let in, and its values only as ``torch.load(weights_only=True)`` takes them: nothing in it can execute.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import logging
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch.distributed.checkpoint import _nested_dict
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

from ckptfmt.arithmetic.tiling import check_tiling
from ckptfmt.box import Box
from ckptfmt.dtypes import DTYPES
from ckptfmt.errors import Code, err
from ckptfmt.interop.convert.content import Array, Content, LeftOut, Memory, Tensor, map_tree
from ckptfmt.interop.torch.convert_zip import begin_of, damaged, load_safely, to_arrays
from ckptfmt.interop.torch.tensors import TORCH_DTYPES, dtype_name

__all__ = ["METADATA_NAME", "plan_flat", "read_directory", "write_directory"]

METADATA_NAME: Final = ".metadata"

_CLASSES: Final = frozenset(
    {
        *(("torch.distributed.checkpoint.metadata", name) for name in (*dcp_metadata.__all__, "_MEM_FORMAT_ENCODING")),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("torch", "Size"),
        *(("torch", str(dtype).removeprefix("torch.")) for dtype in TORCH_DTYPES.values()),
        *(("pathlib", name) for name in ("Path", "PosixPath", "PurePosixPath")),
        *(("pathlib._local", name) for name in ("Path", "PosixPath", "PurePosixPath")),
        ("collections", "OrderedDict"),
    }
)


# --- source -----------------------------------------------------------------------------------------------------------


def read_directory(path: str, content: Content) -> object:
    """Return what a directory holds as a tree, its tensors as `Array`.

    Raises: IntegrityError(FILE_MISSING, FILE_NBYTES); StateError(STATE_UNSUPPORTED); LayoutError(TILING_GAP,
        TILING_OVERLAP, BOX_BOUNDS).
    """
    with damaged(str(Path(path) / METADATA_NAME)):
        return _read_directory(path, content)


def _read_directory(path: str, content: Content) -> object:
    reader = FileSystemReader(path)
    metadata = _read_metadata(Path(path))
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    flat: dict[str, Any] = {}
    for name, described in metadata.state_dict_metadata.items():
        if isinstance(described, dcp_metadata.TensorStorageMetadata):
            flat[name] = _array_of(reader, name, described)
        else:
            index = dcp_metadata.MetadataIndex(name)
            flat[name] = to_arrays(load_safely(_item(reader, index), where=f"{path}: {name}"), content)
    paths = metadata.planner_data
    if not isinstance(paths, dict) or paths.keys() != flat.keys():
        return flat
    return _nested_dict.unflatten_state_dict(flat, paths)


class _RefusedError(Exception):
    """A class that isn't let in."""


class _Unpickler(pickle.Unpickler):
    """Makes objects of the classes that a metadata file consists of, and of no other."""

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401 - a class
        """Return one of the classes that may be made. Raises: _RefusedError."""
        if (module, name) not in _CLASSES:
            raise _RefusedError(f"{module}.{name}")
        return super().find_class(module, name)


def _read_metadata(path: Path) -> dcp_metadata.Metadata:
    where = str(path / METADATA_NAME)
    try:
        with (path / METADATA_NAME).open("rb") as file:
            found = _Unpickler(file).load()
    except _RefusedError as error:
        raise err(
            Code.STATE_UNSUPPORTED,
            f"it holds what isn't safe to load: {str(error)[:300]}",
            where=where,
            remedy="Where you trust it, load it with torch.distributed.checkpoint, and save it again with torch's own"
            " planner.",
        ) from None
    if not isinstance(found, dcp_metadata.Metadata) or not isinstance(found.storage_data, dict):
        raise err(Code.STATE_UNSUPPORTED, "it isn't the metadata of a distributed checkpoint", where=where)
    return found


@dataclasses.dataclass(slots=True, eq=False)
class _Chunk:
    """A stored piece of a tensor: its elements as a view of the file, once it is asked for."""

    box: Box
    index: dcp_metadata.MetadataIndex
    element_nbytes: int

    def view(self, reader: FileSystemReader) -> Any:  # noqa: ANN401 - an array of raw elements
        """Return the elements, mapped. Raises: IntegrityError(FILE_MISSING, FILE_NBYTES)."""
        path, begin = _place(reader, self.index)
        where = f"{path}: {self.index.fqn}"
        item = _item(reader, self.index)
        twin = load_safely(item, where=where, map_location="meta")
        if tuple(twin.shape) != self.box.shape or twin.element_size() != self.element_nbytes:
            raise err(Code.SHAPE_MISMATCH, f"stored as {tuple(twin.shape)}, not {self.box.shape}", where=where)
        reach = sum((size - 1) * stride for size, stride in zip(twin.shape, twin.stride(), strict=True))
        raw = np.dtype((np.void, self.element_nbytes))
        with damaged(where):
            with zipfile.ZipFile(item) as archive:
                (record,) = (record for record in archive.infolist() if "/data/" in record.filename)
            begin += begin_of(record, item) + twin.storage_offset() * self.element_nbytes
            flat = np.memmap(path, raw, mode="r", offset=begin, shape=(reach + 1,))
        strides = [stride * self.element_nbytes for stride in twin.stride()]
        return np.lib.stride_tricks.as_strided(flat, self.box.shape, strides, writeable=False)


def _array_of(reader: FileSystemReader, name: str, described: Any) -> Array:  # noqa: ANN401 - TensorStorageMetadata
    where = f"{reader.path}: {name}"
    dtype = dtype_name(described.properties.dtype, where=where)
    shape = tuple(described.size)
    nbytes = DTYPES[dtype].nbytes
    chunks = [
        _Chunk(Box(tuple(chunk.offsets), tuple(chunk.sizes)), dcp_metadata.MetadataIndex(name, chunk.offsets), nbytes)
        for chunk in described.chunks
    ]
    rows = [[chunk.box.begin for chunk in chunks], [chunk.box.shape for chunk in chunks]]
    begin, extents = (np.array(row, np.int64).reshape(len(chunks), len(shape)) for row in rows)
    check_tiling(shape, begin, extents, where=where)
    for chunk in chunks:
        _place(reader, chunk.index)
    return Array(dtype, shape, functools.partial(_read, reader, chunks))


def _read(reader: FileSystemReader, chunks: list[_Chunk], box: Box, out: memoryview) -> None:
    for chunk in chunks:
        common = chunk.box.intersect(box)
        if common is not None:
            made: Any = np.frombuffer(out, np.dtype((np.void, chunk.element_nbytes))).reshape(box.shape)
            view = chunk.view(reader)
            made[(*common.relative_to(box), ...)] = view[(*common.relative_to(chunk.box), ...)]


def _place(reader: FileSystemReader, index: dcp_metadata.MetadataIndex) -> tuple[Path, int]:
    """Return the file of an item and its first byte there.

    Raises: IntegrityError(FILE_MISSING, FILE_NBYTES); FormatError(UNSAFE_PATH); StateError(STATE_UNSUPPORTED).
    """
    stored = reader.storage_data.get(index)
    if stored is None:
        raise err(Code.FILE_MISSING, f"nothing says where {index.fqn!r} is stored", where=str(reader.path))
    name = stored.relative_path
    if Path(name).name != name or name in (".", ".."):
        raise err(Code.UNSAFE_PATH, f"{index.fqn!r} is in {name!r}", where=str(reader.path))
    path = Path(reader.path) / name
    if stored.transform_descriptors:
        raise err(Code.STATE_UNSUPPORTED, f"{index.fqn!r} is stored by an extension of torch's format", where=str(path))
    if not path.is_file():
        raise err(Code.FILE_MISSING, "the metadata names it", where=str(path), remedy="Copy the directory again.")
    if path.stat().st_size < stored.offset + stored.length:
        raise err(
            Code.FILE_NBYTES, f"it ends within {index.fqn!r}", where=str(path), remedy="Copy the directory again."
        )
    return path, stored.offset


def _item(reader: FileSystemReader, index: dcp_metadata.MetadataIndex) -> Any:  # noqa: ANN401 - a file
    """Return an item of a file, as a file of its own."""
    path, begin = _place(reader, index)
    return _Window(path, begin, reader.storage_data[index].length)


class _Window(io.RawIOBase):
    """A piece of a file, as a file."""

    def __init__(self, path: Path, begin: int, nbytes: int) -> None:
        self._file = path.open("rb", buffering=0)
        self._begin, self._nbytes, self._at = begin, nbytes, 0

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """Return the position."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the position."""
        self._at = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._nbytes}[whence])
        return self._at

    def readinto(self, out: Any) -> int:  # noqa: ANN401 - a buffer
        """Read up to the piece's end."""
        view = memoryview(out).cast("B")[: max(0, self._nbytes - self._at)]
        self._file.seek(self._begin + self._at)
        count = self._file.readinto(view) or 0
        self._at += count
        return count

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        super().close()


# --- target -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Flat:
    """What a directory will hold.

    Attributes:
        state_dict: nested, its tensors on the meta device.
        tensors: by the flattened name.
        left_out: what comes back otherwise.
    """

    state_dict: dict[str, Any]
    tensors: dict[str, Tensor]
    left_out: list[LeftOut]


def plan_flat(root: dict[str, Any]) -> Flat:
    """Flatten a mapping as torch does, and say what of it comes back otherwise.

    Raises: StateError(STATE_NAME) where two paths become one name.
    """
    tied: dict[int, str] = {}
    left_out: list[LeftOut] = []

    def placeholder(value: object, path: str) -> object:
        if not isinstance(value, Tensor):
            return value
        if value.nbytes and tied.setdefault(id(value), path) != path:
            left_out.append(LeftOut(path, f"tied to {tied[id(value)]}, and stored a second time"))
        return _Named(value)

    named = map_tree(root, placeholder)
    metas = map_tree(named, lambda value, _: value.meta if isinstance(value, _Named) else value)
    # Torch pickles a tuple as it is, with whatever tensors are in it.
    lists = _tuples_of_tensors_as_lists(metas)
    try:
        flat, paths = _nested_dict.flatten_state_dict(lists)
    except ValueError as error:
        remedy = "Convert it to a torch.save file, which keeps nested names, or one field of it with --only."
        raise err(Code.STATE_NAME, f"torch joins names with dots: {error}", where="", remedy=remedy) from None
    by_meta = {id(value.meta): value.tensor for value in _all_named(named)}
    tensors = {name: by_meta[id(value)] for name, value in flat.items() if id(value) in by_meta}
    assert len(tensors) == len(by_meta)  # noqa: S101 - else a placeholder would be pickled in a tensor's place
    left_out += _differences(metas, _nested_dict.unflatten_state_dict(flat, paths), "")
    return Flat(state_dict=lists, tensors=tensors, left_out=left_out)


def _tuples_of_tensors_as_lists(value: Any) -> Any:  # noqa: ANN401 - a tree
    if isinstance(value, dict):
        return type(value)((key, _tuples_of_tensors_as_lists(item)) for key, item in value.items())
    if not isinstance(value, list | tuple):
        return value
    items = [_tuples_of_tensors_as_lists(item) for item in value]
    return items if isinstance(value, list) or _has_tensors(items) else value


def _has_tensors(value: object) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    return any(map(_has_tensors, value)) if isinstance(value, list) else isinstance(value, torch.Tensor)


class _Named:
    """A tensor of the content, with its placeholder on the meta device."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.meta = torch.empty(tensor.global_shape, dtype=TORCH_DTYPES[tensor.dtype], device="meta")


def _all_named(root: object) -> list[_Named]:
    found: list[_Named] = []
    map_tree(root, lambda value, _: found.append(value) if isinstance(value, _Named) else None)
    return found


def _differences(before: Any, after: Any, path: str) -> list[LeftOut]:  # noqa: ANN401 - trees
    """Return where a tree isn't the same any more: torch knows dicts with strings as keys, and lists."""
    if isinstance(before, torch.Tensor) or before is after:
        return []
    found = []
    if type(before) is not type(after):
        found.append(LeftOut(path, f"a {type(before).__name__} comes back as a {type(after).__name__}"))
    if isinstance(before, dict) and isinstance(after, dict):
        for key, item in before.items():
            below = f"{path}/{key}" if path else str(key)
            if str(key) not in after:
                found.append(LeftOut(below, "what is empty doesn't come back"))
                continue
            if type(key) is not str:
                found.append(LeftOut(below, "a key that isn't a string comes back as one"))
            found += _differences(item, after[str(key)], below)
    elif isinstance(before, list | tuple) and isinstance(after, list | tuple):
        for index, (item, other) in enumerate(zip(before, after, strict=False)):
            found += _differences(item, other, f"{path}/{index}")
    return found


def write_directory(path: Path, flat: Flat, *, on_progress: Callable[[int], None]) -> None:
    """Write a directory with torch's own writer, which is given a chunk of a tensor at a time.

    Raises: OSError; what reading the source raises.
    """
    planner = _StreamingPlanner(flat.tensors, on_progress)
    writer = FileSystemWriter(path, per_thread_copy_ahead=0, overwrite=False)
    logger = logging.getLogger("torch.distributed.checkpoint")
    level = logger.level
    try:
        logger.setLevel(logging.ERROR)
        save(flat.state_dict, storage_writer=writer, planner=planner, no_dist=True)
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from error
    finally:
        logger.setLevel(level)


class _StreamingPlanner(DefaultSavePlanner):
    """Cuts tensors into chunks, and reads each just when it is written."""

    def __init__(self, tensors: dict[str, Tensor], on_progress: Callable[[int], None]) -> None:
        super().__init__()
        self._tensors = tensors
        self._on_progress = on_progress
        self._memory = Memory()

    def create_local_plan(self) -> SavePlan:
        """Return torch's plan with several items for each large tensor."""
        plan = super().create_local_plan()
        self.plan = dataclasses.replace(plan, items=[piece for item in plan.items for piece in self._cut(item)])
        return self.plan

    def _cut(self, item: WriteItem) -> list[WriteItem]:
        if item.type is WriteItemType.BYTE_IO or item.tensor_data is None:
            return [item]
        boxes = list(self._tensors[item.index.fqn].iter_chunks())
        if len(boxes) == 1:
            return [item]
        pieces = []
        for box in boxes:
            chunk = dcp_metadata.ChunkStorageMetadata(torch.Size(box.begin), torch.Size(box.shape))
            data = dataclasses.replace(item.tensor_data, chunk=chunk)
            index = dcp_metadata.MetadataIndex(item.index.fqn, chunk.offsets)
            pieces.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
        return pieces

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return the elements of a chunk, until the next is asked for: torch's writer keeps all that it is given."""
        if write_item.type is WriteItemType.BYTE_IO or write_item.tensor_data is None:
            return super().resolve_data(write_item)
        tensor, chunk = self._tensors[write_item.index.fqn], write_item.tensor_data.chunk
        box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
        out = self._memory.take(box.element_count * DTYPES[tensor.dtype].nbytes)
        tensor.copy_into(box, out)
        self._on_progress(out.nbytes)
        dtype = TORCH_DTYPES[tensor.dtype]
        if not out.nbytes:
            return torch.empty(chunk.sizes, dtype=dtype)
        return torch.frombuffer(out, dtype=torch.uint8).view(dtype).reshape(chunk.sizes)
