"""A torch.save file, or a directory of torch.distributed.checkpoint, as the target of a conversion.

A file is written in two passes: first torch saves placeholders, for which torch leaves room in the
file, then each tensor's bytes are written there in chunks. A directory is written by torch's own
writer, in one process, which receives one chunk at a time. So no tensor is ever whole in memory.
"""

from __future__ import annotations

import dataclasses
import io
import logging
import mmap
import os
import pickle  # only to write
import struct
import types
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.checkpoint import _nested_dict
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

from ckptfmt.adapters.torch.tensors import TORCH_DTYPES
from ckptfmt.box import Box
from ckptfmt.documents.tree import DeviceName, DtypeName, InlineArray, Size, iter_values
from ckptfmt.dtypes import DTYPES
from ckptfmt.errors import Code, err
from ckptfmt_tools.convert.content import LeftOut, Memory, Tensor, Unfit, map_tree
from ckptfmt_tools.convert.torch_archive import begin_of

#: Types of values restored by torch.load(weights_only=True).
_PLAIN: Final = frozenset({type(None), bool, float, str, bytes, complex, bytearray})
#: Greatest number of bits, including the sign, of an integer that torch.load(weights_only=True)
#: reads.
_INT_BITS: Final = 255 * 8


def fit(value: Any) -> Any:
    """Return torch's form of a plain value, if ``torch.load(weights_only=True)`` restores it.

    Raises: Unfit.
    """
    kind = type(value)
    if kind in _PLAIN or (kind is int and value.bit_length() < _INT_BITS):
        return value
    if kind is InlineArray:
        raise Unfit("torch.load(weights_only=True) refuses numpy's arrays and scalars")
    if kind is DtypeName:
        check_dtype(value.name)
        return TORCH_DTYPES[value.name]
    if kind is DeviceName or kind is Size:
        return torch.device(value.name) if kind is DeviceName else torch.Size(value.shape)
    if kind is tuple and value:  # a key, or a member of a set
        return tuple(map(fit, value))
    if kind is set:
        return set(map(fit, value))
    if kind is Counter:
        return Counter({fit(key): fit(count) for key, count in value.items()})
    raise Unfit(f"torch.load(weights_only=True) refuses such a {kind.__name__}")


def check_dtype(name: str) -> None:
    """Check that this torch has a dtype. Raises: Unfit."""
    if name not in TORCH_DTYPES:
        raise Unfit(f"this torch ({torch.__version__}) has no dtype {name}")


def iter_tensors(root: object) -> list[Tensor]:
    """Return the tensors of a tree in the tree's order, as often as they occur."""
    return [value for value in iter_values(root) if isinstance(value, Tensor)]


def write_file(root: dict[str, Any], path: Path, *, on_progress: Callable[[int], None]) -> None:
    """Write a new torch.save file; tied tensors share their storage.

    Raises: OSError; StateError(STATE_UNSUPPORTED); errors of reading the source.
    """
    tensors = [
        tensor
        for tensor in {id(tensor): tensor for tensor in iter_tensors(root)}.values()
        if tensor.nbytes
    ]
    places = _find_places(path, zip(tensors, _save_placeholders(root, tensors, path), strict=True))
    checksums: dict[str, int] = {}
    memory = Memory()
    with path.open("r+b", buffering=0) as file:
        for tensor, (record, begin) in places:
            at = begin
            checksum = 0
            for chunk in tensor.iter_content(memory):
                _write_exactly(file.fileno(), chunk, at)
                checksum = zlib.crc32(chunk, checksum)
                at += chunk.nbytes
                on_progress(chunk.nbytes)
            checksums[record] = checksum
        _mend_checksums(file.fileno(), path, checksums)
        os.fsync(file.fileno())


def _save_placeholders(root: dict[str, Any], tensors: list[Tensor], path: Path) -> list[str]:
    """Save a tree by torch, without tensor bytes, and return the key of each tensor's storage.

    The memory of the placeholders is mapped read-only and never touched: the system allocates no
    pages.
    """
    held = mmap.mmap(
        -1, max(1, sum(map(_step, tensors))), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ
    )
    made: dict[int, torch.Tensor] = {}
    at = 0
    for tensor in tensors:
        flat = torch.frombuffer(held, dtype=torch.uint8, count=tensor.nbytes, offset=at)
        made[id(tensor)] = flat.view(TORCH_DTYPES[tensor.dtype]).reshape(tensor.global_shape)
        at += _step(tensor)

    def placeholder(value: object, _: str) -> object:
        if not isinstance(value, Tensor):
            return value
        if id(value) not in made:
            made[id(value)] = torch.empty(value.global_shape, dtype=TORCH_DTYPES[value.dtype])
        return made[id(value)]

    keys: list[str] = []

    class Pickler(pickle.Pickler):
        """The base of torch's own pickler, whose `persistent_id` gives storages their keys."""

        def dump(self, obj: object, /) -> None:
            super().dump(obj)
            for tensor in tensors:
                storage = made[id(tensor)].__reduce_ex__(2)[1][0]
                keys.append(self.persistent_id(storage)[2])

    module = types.SimpleNamespace(Pickler=Pickler, __name__=__name__)
    with torch.serialization.skip_data():
        torch.save(map_tree(root, placeholder), str(path), pickle_module=module)
    return keys


def _step(tensor: Tensor) -> int:
    """Return the distance to the next placeholder in bytes, with alignment for every dtype."""
    return -(-tensor.nbytes // 64) * 64


def _find_places(
    path: Path, keys: Iterable[tuple[Tensor, str]]
) -> list[tuple[Tensor, tuple[str, int]]]:
    """Return each tensor with its record and the record's first byte, in the file's order.

    Raises: StateError(STATE_UNSUPPORTED) if torch left no room of the tensor's size.
    """
    by_key = {key: tensor for tensor, key in keys}
    places = []
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        for record in archive.infolist():
            if "/data/" not in record.filename or not record.file_size:
                continue
            tensor = by_key.pop(record.filename.rpartition("/")[2], None)
            if tensor is None or tensor.nbytes != record.file_size:
                raise err(
                    Code.STATE_UNSUPPORTED,
                    "this torch writes files of another layout",
                    where=torch.__version__,
                )
            places.append((tensor, (record.filename, begin_of(record, file))))
    if by_key:
        raise err(
            Code.STATE_UNSUPPORTED,
            "this torch writes files of another layout",
            where=torch.__version__,
        )
    return places


def _mend_checksums(fd: int, path: Path, checksums: dict[str, int]) -> None:
    """Write the checksums of the tensors in the place of torch's zeros, for tools other than torch.

    Source: APPNOTE.TXT of PKWARE, 4.3.9 (data descriptor) and 4.3.12 (central directory).
    """
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        at = archive.start_dir
        for record in archive.infolist():
            file.seek(at)
            header = file.read(46)
            if record.filename in checksums:
                checksum = struct.pack("<I", checksums[record.filename])
                os.pwrite(fd, checksum, at + 16)
                behind = begin_of(record, file) + record.file_size
                if os.pread(fd, 4, behind) == b"PK\x07\x08":
                    os.pwrite(fd, checksum, behind + 4)
            at += 46 + sum(struct.unpack("<HHH", header[28:34]))


def _write_exactly(fd: int, content: memoryview, at: int) -> None:
    while content:
        count = os.pwrite(fd, content, at)
        content = content[count:]
        at = at + count


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Flat:
    """The contents of a directory, flattened.

    Attributes:
        state_dict: the nested mapping, with tensors on the meta device.
        tensors: tensors by their flattened names.
        left_out: values restored differently by torch.
    """

    state_dict: dict[str, Any]
    tensors: dict[str, Tensor]
    left_out: list[LeftOut]


def plan_flat(root: dict[str, Any]) -> Flat:
    """Flatten a mapping as torch does, and list the values that torch restores differently.

    Raises: StateError(STATE_NAME) where two paths become one name.
    """
    tied: dict[int, str] = {}
    by_meta: dict[int, Tensor] = {}
    left_out: list[LeftOut] = []

    def placeholder(value: object, path: str) -> object:
        if not isinstance(value, Tensor):
            return value
        if value.nbytes and tied.setdefault(id(value), path) != path:
            left_out.append(LeftOut(path, f"tied to {tied[id(value)]}, and stored a second time"))
        meta = torch.empty(value.global_shape, dtype=TORCH_DTYPES[value.dtype], device="meta")
        by_meta[id(meta)] = value
        return meta

    metas = map_tree(root, placeholder)
    # Torch pickles a tuple unchanged, including the tensors.
    lists = _tuples_of_tensors_as_lists(metas)
    try:
        flat, paths = _nested_dict.flatten_state_dict(lists)
    except ValueError as error:
        remedy = (
            "Convert it to a torch.save file, which keeps nested names, or one field of it"
            " with --only."
        )
        raise err(
            Code.STATE_NAME, f"torch joins names with dots: {error}", where="", remedy=remedy
        ) from None
    tensors = {name: by_meta[id(value)] for name, value in flat.items() if id(value) in by_meta}
    assert len(tensors) == len(by_meta)  # noqa: S101
    left_out += _differences(metas, _nested_dict.unflatten_state_dict(flat, paths), "")
    return Flat(state_dict=lists, tensors=tensors, left_out=left_out)


def _tuples_of_tensors_as_lists(value: Any) -> Any:
    if isinstance(value, dict):
        return type(value)((key, _tuples_of_tensors_as_lists(item)) for key, item in value.items())
    if not isinstance(value, list | tuple):
        return value
    items = [_tuples_of_tensors_as_lists(item) for item in value]
    return items if isinstance(value, list) or _has_tensors(items) else value


def _has_tensors(value: object) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    return (
        any(map(_has_tensors, value))
        if isinstance(value, list)
        else isinstance(value, torch.Tensor)
    )


def _differences(before: Any, after: Any, path: str) -> list[LeftOut]:
    """Return the differences of two trees: torch keeps dicts with strings as keys, and lists."""
    if isinstance(before, torch.Tensor) or before is after:
        return []
    found = []
    if type(before) is not type(after):
        found.append(
            LeftOut(path, f"a {type(before).__name__} comes back as a {type(after).__name__}")
        )
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
    """Write a directory with torch's own writer, which receives one chunk of a tensor at a time.

    Raises: OSError; errors of reading the source.
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
    """A planner that cuts tensors into chunks, each read when torch writes the chunk."""

    def __init__(self, tensors: dict[str, Tensor], on_progress: Callable[[int], None]) -> None:
        super().__init__()
        self._tensors = tensors
        self._on_progress = on_progress
        self._memory = Memory()

    def create_local_plan(self) -> SavePlan:
        """Return torch's plan, with several items for each large tensor."""
        plan = super().create_local_plan()
        self.plan = dataclasses.replace(
            plan, items=[piece for item in plan.items for piece in self._cut(item)]
        )
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
        """Return the elements of a chunk, valid until the next call.

        Torch's writer keeps every tensor that it receives, so all chunks share one memory.
        """
        if write_item.type is WriteItemType.BYTE_IO or write_item.tensor_data is None:
            return super().resolve_data(write_item)
        tensor = self._tensors[write_item.index.fqn]
        chunk = write_item.tensor_data.chunk
        box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
        out = self._memory.take(box.element_count * DTYPES[tensor.dtype].nbytes)
        tensor.copy_into(box, out)
        self._on_progress(out.nbytes)
        dtype = TORCH_DTYPES[tensor.dtype]
        if not out.nbytes:
            return torch.empty(chunk.sizes, dtype=dtype)
        return torch.frombuffer(out, dtype=torch.uint8).view(dtype).reshape(chunk.sizes)
