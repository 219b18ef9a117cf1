"""A torch.save file as the source or the target of a conversion; and what both torch formats share.

A file is read through a memory map. One is written in two passes: first torch saves placeholders, for which it leaves
room in the file, then each tensor's bytes are put there, a chunk at a time. So neither way holds a tensor in memory.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import pickle
import struct
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ckptfmt.box import Box
from ckptfmt.documents.tree import DeviceName, DtypeName, InlineArray, Size
from ckptfmt.errors import CkptError, Code, err
from ckptfmt.interop.convert.content import Array, Content, LeftOut, Memory, Tensor, Unfit, map_tree
from ckptfmt.interop.torch.tensors import TORCH_DTYPES, check_tensor, dtype_name, is_meta, memory_of, source_of

__all__ = [
    "begin_of",
    "check_dtype",
    "damaged",
    "fit",
    "iter_tensors",
    "load_safely",
    "read_file",
    "to_arrays",
    "write_file",
]

#: What every unpickler of torch makes again, without being asked whether it may.
_PLAIN: Final = frozenset({type(None), bool, float, str})
_INT_LIMIT: Final = 1 << 63


# --- source -----------------------------------------------------------------------------------------------------------


def read_file(path: str, content: Content) -> object:
    """Return what a torch.save file holds as a tree, its tensors as `Array`; nothing but plain values is unpickled.

    Raises: IntegrityError(FILE_NBYTES) for a file that isn't whole; StateError(ARGUMENT, STATE_UNSUPPORTED).
    """
    _check_archive(path)
    return to_arrays(load_safely(path, where=path, mmap=True), content)


@contextlib.contextmanager
def damaged(where: str) -> Iterator[None]:
    """Turn what a damaged archive or pickle raises in foreign code, which may be anything, into a named error.

    Raises: IntegrityError(FILE_NBYTES).
    """
    try:
        yield
    except (CkptError, OSError):
        raise
    except Exception as error:
        detail = f"it isn't whole: {type(error).__name__}: {str(error)[:200]}"
        raise err(Code.FILE_NBYTES, detail, where=where, remedy="Copy it again.") from error


def _check_archive(path: str) -> None:
    with damaged(path):
        _check_records(path)


def _check_records(path: str) -> None:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except zipfile.BadZipFile as error:
        with Path(path).open("rb") as file:
            if file.read(4) == b"PK\x03\x04":
                raise err(
                    Code.FILE_NBYTES,
                    f"the archive isn't whole: {error}",
                    where=path,
                    remedy="Copy the file again.",
                ) from None
        raise err(
            Code.ARGUMENT,
            "it isn't a torch.save file in the zip format",
            where=path,
            remedy="If torch.load reads it, save what it returns with torch.save of a newer torch.",
        ) from None
    if not any(name.endswith("/data.pkl") for name in names) or any(name.endswith("/constants.pkl") for name in names):
        remedy = "Give a file that torch.save made of a state_dict; a script of TorchScript isn't one."
        raise err(Code.ARGUMENT, "it is an archive, but not of torch.save", where=path, remedy=remedy)


def load_safely(file: Any, *, where: str, **options: Any) -> Any:  # noqa: ANN401 - torch's
    """Return what ``torch.load(weights_only=True)`` does.

    Raises: StateError(STATE_UNSUPPORTED) for what could execute something, or can't be read.
    """
    try:
        return torch.load(file, weights_only=True, **{"map_location": "cpu", **options})
    except pickle.UnpicklingError as error:
        # Torch's text is for a terminal, and advises to load it all the same; the class is in its later part.
        reason = str(error).rpartition("WeightsUnpickler error:")[2].strip() or "it isn't plain values and tensors"
        raise err(
            Code.STATE_UNSUPPORTED,
            f"it holds what isn't safe to load: {reason.splitlines()[0][:300]}",
            where=where,
            remedy="Where you trust it, load it with the program that wrote it, and save its state_dict and plain"
            " values alone.",
        ) from None
    except Exception as error:  # noqa: BLE001 - damaged pickles raise anything
        raise err(Code.STATE_UNSUPPORTED, f"torch can't load it: {str(error)[:300]}", where=where) from None


def to_arrays(root: object, content: Content) -> object:
    """Return a tree with its tensors as `Array`, one for each memory, and torch's own values as trees have them.

    Raises: StateError(STATE_UNSUPPORTED) for a tensor that isn't its elements alone.
    """
    arrays: dict[object, Array] = {}
    seen: list[tuple[str, torch.Tensor]] = []

    def convert(value: object, name: str) -> object:
        if isinstance(value, torch.Tensor):
            seen.append((name, value))
            check_tensor(value, where=name)
            if is_meta(value):
                remedy = "Materialise it before the save."
                raise err(Code.STATE_UNSUPPORTED, "a tensor without contents", where=name, remedy=remedy)
            key = memory_of(value) or id(value)
            if key not in arrays:
                tensor = value.detach()
                arrays[key] = Array(
                    dtype_name(tensor.dtype, where=name), tuple(tensor.shape), functools.partial(_read, tensor)
                )
            return arrays[key]
        if isinstance(value, torch.dtype):
            return DtypeName(dtype_name(value, where=name))
        if isinstance(value, torch.device):
            return DeviceName(str(value))
        return Size(tuple(value)) if isinstance(value, torch.Size) else value

    tree = map_tree(root, convert)
    content.left_out += [*_lost_attributes(root, ""), *_lost_of_tensors(seen)]
    return tree


def _read(tensor: torch.Tensor, box: Box, out: memoryview) -> None:
    piece = tensor[box.relative_to(Box.whole(tuple(tensor.shape)))]
    source = source_of(piece, field="", name="", scope="")
    source.copy_into(source.boxes[0], out)


def _lost_attributes(value: Any, name: str) -> Iterable[LeftOut]:  # noqa: ANN401 - anything
    """Yield what dicts have beside their items, such as the versions of modules that a state_dict carries."""
    if isinstance(value, OrderedDict):
        yield from (LeftOut(f"{name or 'the file'}: {key}", "a dict is kept without attributes") for key in vars(value))
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _lost_attributes(item, f"{name}/{key}" if name else str(key))


def _lost_of_tensors(tensors: list[tuple[str, torch.Tensor]]) -> Iterable[LeftOut]:
    """Yield what tensors are beside their elements: parts of another's memory, and whether they want gradients."""
    spans = []
    for name, tensor in tensors:
        if tensor.requires_grad:
            yield LeftOut(f"{name}: requires_grad", "a checkpoint keeps values, not what is trained")
        memory = memory_of(tensor)
        if memory is not None:
            reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            begin = tensor.data_ptr()
            spans.append((begin, begin + (reach + 1) * tensor.element_size(), name, memory))
    spans.sort(key=lambda span: span[:3])
    end, holder, held = 0, "", None
    for begin, span_end, name, memory in spans:
        if begin < end and memory != held:
            yield LeftOut(f"{name}: the memory that it shares with {holder}", "only tensors of one shape can be tied")
        if span_end > end:
            end, holder, held = span_end, name, memory


# --- target -----------------------------------------------------------------------------------------------------------


def fit(value: Any) -> Any:  # noqa: ANN401 - a leaf of a tree
    """Return torch's form of a plain value, if a careful torch.load gives it back.

    Raises: Unfit.
    """
    if type(value) in _PLAIN or (type(value) is int and -_INT_LIMIT <= value < _INT_LIMIT):
        return value
    if isinstance(value, InlineArray):
        raise Unfit("torch.load(weights_only=True) refuses numpy's arrays and scalars")
    if isinstance(value, DtypeName):
        check_dtype(value.name)
        return TORCH_DTYPES[value.name]
    if isinstance(value, DeviceName | Size):
        return torch.device(value.name) if isinstance(value, DeviceName) else torch.Size(value.shape)
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    try:
        same = load_safely(buffer, where="") == value
    except CkptError:
        same = False
    if not same:
        raise Unfit(f"torch.load(weights_only=True) refuses such a {type(value).__name__}")
    return value


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

    Raises: OSError; what reading the source raises.
    """
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(_placeholders(root), str(path))
    places = _find_places(root, path)
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


def _placeholders(root: dict[str, Any]) -> Any:  # noqa: ANN401 - the same tree, with tensors of torch
    made: dict[int, torch.Tensor] = {}

    def placeholder(value: object, _: str) -> object:
        if not isinstance(value, Tensor):
            return value
        if id(value) not in made:
            with FakeTensorMode():
                made[id(value)] = torch.empty(value.global_shape, dtype=TORCH_DTYPES[value.dtype])
        return made[id(value)]

    return map_tree(root, placeholder)


def _find_places(root: dict[str, Any], path: Path) -> list[tuple[Tensor, tuple[str, int]]]:
    """Return each tensor that has elements, with its record in the archive and the record's first byte in the file.

    Torch maps the whole file: from where a tensor lies in memory follows where it lies in the file.
    """
    loaded: list[torch.Tensor] = []
    map_tree(
        load_safely(str(path), where=str(path), mmap=True),
        lambda value, _: loaded.append(value) if isinstance(value, torch.Tensor) else None,
    )
    addresses = {
        id(tensor): (twin.data_ptr(), tensor)
        for tensor, twin in zip(iter_tensors(root), loaded, strict=True)
        if twin.numel()
    }
    ordered = sorted(addresses.values(), key=lambda row: row[0])
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        records = [
            (record.filename, begin_of(record, file))
            for record in archive.infolist()
            if "/data/" in record.filename and record.file_size
        ]
    records.sort(key=lambda record: record[1])
    places = [(tensor, record) for (_, tensor), record in zip(ordered, records, strict=True)]
    base = {address - begin for (address, _), (_, begin) in zip(ordered, records, strict=True)}
    if len(base) > 1:
        raise err(Code.STATE_UNSUPPORTED, "this torch doesn't map a file as a whole", where=torch.__version__)
    return places


def begin_of(record: zipfile.ZipInfo, file: Any) -> int:  # noqa: ANN401 - a file, or a piece of one
    """Return the first byte of a record's contents: behind its own header, whose length only that header says."""
    file.seek(record.header_offset)
    name_nbytes, extra_nbytes = struct.unpack("<HH", file.read(30)[26:])
    return record.header_offset + 30 + int(name_nbytes) + int(extra_nbytes)


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
