"""A torch.save file as the target of a conversion; and what both torch formats can hold.

It is written in two passes: first torch saves placeholders, for which it leaves room in the file, then each tensor's
bytes are put there, a chunk at a time. So no tensor is ever whole in memory.
"""

from __future__ import annotations

import mmap
import os
import pickle  # for writing alone
import struct
import types
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import torch

from ckptfmt.adapters.torch.tensors import TORCH_DTYPES
from ckptfmt.convert.content import Memory, Tensor, Unfit, map_tree
from ckptfmt.convert.torch_archive import begin_of
from ckptfmt.documents.tree import DeviceName, DtypeName, InlineArray, Size
from ckptfmt.errors import Code, err

#: What torch's careful unpickler makes again.
_PLAIN: Final = frozenset({type(None), bool, float, str, bytes, complex, bytearray})
#: It reads integers of so many bits, a sign among them.
_INT_BITS: Final = 255 * 8


def fit(value: Any) -> Any:  # noqa: ANN401 - a leaf of a tree
    """Return torch's form of a plain value, if ``torch.load(weights_only=True)`` gives it back.

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
    """Return the tensors of a tree in its order, as often as they occur."""
    found: list[Tensor] = []
    map_tree(root, lambda value, _: found.append(value) if isinstance(value, Tensor) else None)
    return found


def write_file(root: dict[str, Any], path: Path, *, on_progress: Callable[[int], None]) -> None:
    """Write a torch.save file that isn't there yet; tied tensors share their storage.

    Raises: OSError; StateError(STATE_UNSUPPORTED); what reading the source raises.
    """
    tensors = [tensor for tensor in {id(tensor): tensor for tensor in iter_tensors(root)}.values() if tensor.nbytes]
    places = _find_places(path, zip(tensors, _save_placeholders(root, tensors, path), strict=True))
    checksums: dict[str, int] = {}
    memory = Memory()
    with path.open("r+b", buffering=0) as file:
        for tensor, (record, begin) in places:
            at, checksum = begin, 0
            for chunk in tensor.iter_content(memory):
                _write_exactly(file.fileno(), chunk, at)
                checksum = zlib.crc32(chunk, checksum)
                at += chunk.nbytes
                on_progress(chunk.nbytes)
            checksums[record] = checksum
        _mend_checksums(file.fileno(), path, checksums)
        os.fsync(file.fileno())


def _save_placeholders(root: dict[str, Any], tensors: list[Tensor], path: Path) -> list[str]:
    """Let torch save a tree without the bytes of its tensors, and return the key of each tensor's storage.

    The placeholders lie in memory that is never touched: read-only, so that the system sets none aside for it.
    """
    held = mmap.mmap(-1, max(1, sum(map(_step, tensors))), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ)
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
        """Torch derives its own from it, whose `persistent_id` gives storages their keys."""

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
    """Return how far the next placeholder is away, so that each begins where any dtype may."""
    return -(-tensor.nbytes // 64) * 64


def _find_places(path: Path, keys: Iterable[tuple[Tensor, str]]) -> list[tuple[Tensor, tuple[str, int]]]:
    """Return each tensor with its record in the archive and the record's first byte in the file, in its order.

    Raises: StateError(STATE_UNSUPPORTED) if torch didn't leave the room that a tensor takes.
    """
    by_key = {key: tensor for tensor, key in keys}
    places = []
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        for record in archive.infolist():
            if "/data/" not in record.filename or not record.file_size:
                continue
            tensor = by_key.pop(record.filename.rpartition("/")[2], None)
            if tensor is None or tensor.nbytes != record.file_size:
                raise err(Code.STATE_UNSUPPORTED, "this torch lays files out otherwise", where=torch.__version__)
            places.append((tensor, (record.filename, begin_of(record, file))))
    if by_key:
        raise err(Code.STATE_UNSUPPORTED, "this torch lays files out otherwise", where=torch.__version__)
    return places


def _mend_checksums(fd: int, path: Path, checksums: dict[str, int]) -> None:
    """Put the checksums of the tensors where torch left zeros: it doesn't look at them, other tools do.

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
        content, at = content[count:], at + count
