"""Files of torch.save before torch 1.6, read without torch.

Two forms came before the zip archive. From torch 0.1.11 on, a file is a sequence of five pickles: a
magic number, the protocol's version, the machine's properties, the object, and the keys of its
storages. The storages' elements follow in the order of the keys, each after its count. Before torch
0.1.11, a file was a tar archive with the members ``storages``, ``tensors`` and ``pickle``.

Counts and elements are little-endian in both forms, whatever the machine's properties say: torch
swaps bytes when it writes. The first versions didn't swap, and wrote counts and elements in the
machine's byte order. The pickle holds each count too, so the byte order of a file follows from the
comparison of the two.

Source: `torch.serialization`, ``_legacy_save`` and ``_legacy_load``.
"""

from __future__ import annotations

import itertools
import mmap
import struct
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from ckptfmt import limits
from ckptfmt.dtypes import DTYPES
from ckptfmt.errors import Code, err
from ckptfmt_tools.convert.content import COPY
from ckptfmt_tools.convert.pickles import PERSISTENT, Made, Named, parse_pickle
from ckptfmt_tools.convert.torch_archive import (
    StoredBytes,
    dtype_of_storage,
    only,
    size_of,
    storage_id,
)

_MAGIC: Final = 0x1950A86A20F9469CFC6C
_PROTOCOL: Final = 1001
_COUNT_NBYTES: Final = 8
#: Greatest length in bytes of an operation's line, which is a name: without a line feed, a line has
#: no end.
_LINE_NBYTES: Final = 4096
#: Element sizes of the storages of quantised tensors, which aren't converted.
_QUANTIZED: Final = {
    "torch.QInt8Storage": 1,
    "torch.QUInt8Storage": 1,
    "torch.QInt32Storage": 4,
    "torch.QUInt4x2Storage": 1,
    "torch.QUInt2x4Storage": 1,
}
_MEMBERS: Final = ("storages", "tensors", "pickle")
#: Greatest number of members read of a tar archive: four are expected.
_MEMBER_COUNT: Final = 64


class Mapped(mmap.mmap):
    """A memory-mapped file from which consecutive pickles are read."""

    def readline(self) -> bytes:
        """Return the bytes up to the next line feed.

        Raises: ValueError where the line is too long.
        """
        begin = self.tell()
        end = self.find(b"\n", begin, begin + _LINE_NBYTES)
        if end < 0:
            raise ValueError("a line without an end")
        return self.read(end + 1 - begin)

    def take(self, nbytes: int) -> bytes:
        """Return the next `nbytes` bytes. Raises: ValueError where the file is shorter."""
        content = self.read(nbytes)
        if len(content) < nbytes:
            raise ValueError("the file ends before its last storage")
        return content


@contextmanager
def _open(path: str) -> Iterator[Mapped]:
    with Path(path).open("rb") as file, Mapped(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        yield mapped


class OldFile:
    """A file of torch 0.1.11 to 1.5: pickles, then storages.

    The class is a `ckptfmt_tools.convert.torch_archive.TorchFile`.

    Raises: StateError(ARGUMENT, STATE_UNSUPPORTED); IntegrityError(FILE_NBYTES).
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.where = path
        self.pickle_nbytes = 0
        self._storages: dict[str, StoredBytes] = {}

    def root(self) -> Any:
        """Return the value of the object's pickle, and locate its storages.

        Raises: as `parse_pickle`.
        """
        with _open(self.path) as file:
            magic, protocol, _machine = (parse_pickle(file, where=self.where) for _ in range(3))
            if (magic, protocol) != (_MAGIC, _PROTOCOL):
                detail = (
                    f"the file is of version {str(protocol)[:20]} of torch.save's old form,"
                    " which isn't known"
                )
                raise err(
                    Code.STATE_UNSUPPORTED,
                    detail,
                    where=self.where,
                    remedy="Save it anew with a newer torch.",
                )
            begin = file.tell()
            # Class and count by key, from the first reference to each storage.
            said: dict[str, tuple[str, object]] = {}

            def note(made: Made) -> Made:
                if type(made.args[0]) is tuple and made.args[0][:1] == ("storage",):
                    kind, key, count, _view = storage_id(made)
                    said.setdefault(key, (kind, count))
                return made

            found = parse_pickle(file, where=self.where, persistent=note)
            self.pickle_nbytes = file.tell() - begin
            keys = only(parse_pickle(file, where=self.where), list)
            for key in keys:
                if only(key, str) not in said or key in self._storages:
                    raise ValueError(
                        "a storage without a tensor, or two storages with the same key"
                    )
                self._storages[key] = self._take(file, key, *said[key])
        return found

    def _take(self, file: Mapped, key: str, kind: str, count: object) -> StoredBytes:
        """Return the place of the storage at the file's position, and move to the storage's end."""
        dtype = None if kind in _QUANTIZED else dtype_of_storage(kind, self.where)
        element_nbytes = DTYPES[dtype].nbytes if dtype else _QUANTIZED.get(kind, 1)
        raw = file.take(_COUNT_NBYTES)
        if int.from_bytes(raw, "little") != count and int.from_bytes(raw, "big") != count:
            raise ValueError(
                f"a storage of {int.from_bytes(raw, 'little')} elements where the pickle says"
                f" {count}"
            )
        return _skip(
            file,
            size_of(count) * element_nbytes,
            dtype,
            key,
            big=int.from_bytes(raw, "little") != count,
        )

    def find_storage(self, made: object, where: str) -> StoredBytes:
        """Return the place of a storage, or of a storage's part, which old versions called a view.

        Raises: IntegrityError(FILE_NBYTES); StateError(STATE_UNSUPPORTED).
        """
        kind, key, _count, view = storage_id(made)
        held = self._storages.get(key)
        if held is None:
            raise err(
                Code.FILE_NBYTES, f"the file has no storage {key[:200]!r}", where=where, remedy=COPY
            )
        dtype = dtype_of_storage(kind, where)
        begin = held.begin
        nbytes = held.nbytes
        if view is not None:
            _key, first, count = only(view, tuple)
            element_nbytes = DTYPES[dtype].nbytes if dtype else 1
            skipped = size_of(first) * element_nbytes
            nbytes = size_of(count) * element_nbytes
            if skipped + nbytes > held.nbytes:
                raise err(Code.FILE_NBYTES, "a view exceeds its storage", where=where, remedy=COPY)
            begin += skipped
        return StoredBytes(
            dtype=dtype, record=key, begin=begin, nbytes=nbytes, big_endian=held.big_endian
        )


def _skip(file: Mapped, nbytes: int, dtype: str | None, key: str, *, big: bool) -> StoredBytes:
    """Return the storage of `nbytes` bytes at the file's position, and move to its end.

    Raises: ValueError.
    """
    begin = file.tell()
    if begin + nbytes > len(file):
        raise ValueError("the file ends before its last storage")
    file.seek(begin + nbytes)
    return StoredBytes(dtype=dtype, record=key, begin=begin, nbytes=nbytes, big_endian=big)


class TarFile:
    """A tar archive of torch before 0.1.11: a `ckptfmt_tools.convert.torch_archive.TorchFile`.

    Tensors and storages have numbers in the archive; the pickle refers to a tensor by its number.

    Raises: StateError(ARGUMENT, STATE_UNSUPPORTED); IntegrityError(FILE_NBYTES).
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.where = path
        self._storages: dict[str, StoredBytes] = {}
        self._tensors: dict[str, Made] = {}
        self._order = "<"
        self._members: dict[str, tuple[int, int]] = {}
        with tarfile.open(path, "r:") as archive:
            for member in itertools.islice(archive, _MEMBER_COUNT):
                if member.isreg() and not member.issparse():
                    self._members[member.name] = (member.offset_data, member.size)
        if lacking := [name for name in _MEMBERS if name not in self._members]:
            detail = (
                "the file is a tar archive, but not one of torch.save: it has no member"
                f" {lacking[0]!r}"
            )
            raise err(
                Code.ARGUMENT,
                detail,
                where=self.where,
                remedy="Unpack the archive, and convert the file inside.",
            )
        self.pickle_nbytes = self._members["pickle"][1]

    def root(self) -> Any:
        """Return the value of the object's pickle, with tensors in torch's current form.

        Raises: as `parse_pickle`.
        """
        with _open(self.path) as file:
            self._read_storages(file)
            self._read_tensors(file)
            file.seek(self._members["pickle"][0])
            return parse_pickle(file, where=self.where, persistent=self._persistent)

    def _read_storages(self, file: Mapped) -> None:
        file.seek(self._members["storages"][0])
        for _ in range(size_of(parse_pickle(file, where=self.where))):
            key, _location, kind = only(parse_pickle(file, where=self.where), tuple)
            dtype = dtype_of_storage(only(kind, Named).name, self.where)
            element_nbytes = DTYPES[dtype].nbytes if dtype else 1
            raw = file.take(_COUNT_NBYTES)
            little = int.from_bytes(raw, "little")
            big = little * element_nbytes > len(file)
            count = int.from_bytes(raw, "big" if big else "little")
            self._order = ">" if big else self._order
            self._storages[str(key)] = _skip(
                file, size_of(count) * element_nbytes, dtype, str(key), big=big
            )
        for row in only(parse_pickle(file, where=self.where), list):
            target, root, first, count = only(row, tuple)
            held = self._storages[str(root)]
            element_nbytes = DTYPES[held.dtype].nbytes if held.dtype else 1
            begin = size_of(first) * element_nbytes
            nbytes = size_of(count) * element_nbytes
            if begin + nbytes > held.nbytes:
                raise ValueError("a view exceeds its storage")
            self._storages[str(target)] = StoredBytes(
                dtype=held.dtype,
                record=held.record,
                begin=held.begin + begin,
                nbytes=nbytes,
                big_endian=held.big_endian,
            )

    def _read_tensors(self, file: Mapped) -> None:
        file.seek(self._members["tensors"][0])
        for _ in range(size_of(parse_pickle(file, where=self.where))):
            key, storage, _kind = only(parse_pickle(file, where=self.where), tuple)
            (ndim,) = struct.unpack(f"{self._order}i", file.take(8)[:4])
            if not 0 <= ndim <= limits.NDIM:
                raise ValueError("a number of dimensions out of range")
            numbers = struct.unpack(f"{self._order}{2 * ndim + 1}q", file.take(8 * (2 * ndim + 1)))
            place = Made(PERSISTENT, (str(storage),))
            args = (place, numbers[-1], numbers[:ndim], numbers[ndim:-1])
            self._tensors[str(key)] = Made("torch._utils._rebuild_tensor", args)

    def _persistent(self, made: Made) -> Made:
        """Return the tensor of a number; or unchanged a class, which is a tuple with its source."""
        return made if type(made.args[0]) is tuple else self._tensors[str(made.args[0])]

    def find_storage(self, made: object, where: str) -> StoredBytes:
        """Return the place of a storage. Raises: IntegrityError(FILE_NBYTES)."""
        key = only(made, Made).args[0]
        if key not in self._storages:
            raise err(
                Code.FILE_NBYTES,
                f"the file has no storage {str(key)[:200]!r}",
                where=where,
                remedy=COPY,
            )
        return self._storages[key]
