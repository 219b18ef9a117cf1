"""Files of torch.save, read without torch: the archive, and the tensors in the archive.

The archive is a zip file of uncompressed records. The record ``data.pkl`` is a pickle in which a
tensor is a storage's key with offset, shape and strides. Each storage has a record with its
elements. `ckptfmt_tools.convert.pickles` explains why no unpickler is used, neither Python's nor
torch's. `ckptfmt_tools.convert.old_files` reads the two older forms.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from ckptfmt import limits
from ckptfmt.box import Box
from ckptfmt.dtypes import DTYPES
from ckptfmt.errors import CkptError, Code, err
from ckptfmt_tools.convert.content import COPY, read_exactly
from ckptfmt_tools.convert.pickles import DICT, PERSISTENT, Made, Named, parse_pickle
from ckptfmt_tools.convert.recognition import check_records, unknown_archive

#: The format's dtype by the dtype's name in a pickle.
DTYPE_NAMES: Final = {f"torch.{name}": name for name in DTYPES}
#: The dtype of each class of storages and of tensors, by the first word of the class's name.
_CLASSES: Final = {
    "Double": "float64",
    "Float": "float32",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
    "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
}
_MODULES: Final = ("torch", "torch.cuda")
_STORAGES: Final = {
    f"{at}.{name}Storage": dtype for at in _MODULES for name, dtype in _CLASSES.items()
}
_UNTYPED: Final = "torch.storage.UntypedStorage"

#: Tensors of more than dense elements, by the function in the pickle.
_OTHER_TENSORS: Final = {
    "torch._utils._rebuild_sparse_tensor": "a sparse tensor",
    "torch._utils._rebuild_sparse_csr_tensor": "a sparse tensor",
    "torch._utils._rebuild_qtensor": "a quantized tensor",
    "torch._utils._rebuild_nested_tensor": "a nested tensor",
    "torch._utils._rebuild_wrapper_subclass": "the tensor is of a class of its own",
    "torch._utils._rebuild_meta_tensor_no_storage": "a tensor without contents",
    "torch._utils._rebuild_device_tensor_from_numpy": (
        "a tensor of a device that torch.save can't write"
    ),
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": (
        "a tensor of a device that torch.save can't write"
    ),
}
_DENSE: Final = "Save its parts as dense tensors."
_PARAMETERS: Final = (
    "torch._utils._rebuild_parameter",
    "torch._utils._rebuild_parameter_with_state",
)
_TENSOR: Final = "torch._utils._rebuild_tensor"
_TENSOR_V2: Final = "torch._utils._rebuild_tensor_v2"
_TENSOR_V3: Final = "torch._utils._rebuild_tensor_v3"
_WITH_ATTRIBUTES: Final = "torch._tensor._rebuild_from_type_v2"
_PLAIN_TENSORS: Final = ("torch.Tensor", "torch.nn.parameter.Parameter")
#: Tensors before torch 0.4: objects with a state of storage, offset, shape and strides.
_OLD_TENSORS: Final = (
    "torch.Tensor",
    *(f"{at}.{name}Tensor" for at in _MODULES for name in _CLASSES),
)
#: Parameters before torch 0.4: objects around a tensor, which the state of the object may hold.
_OLD_PARAMETERS: Final = ("torch.nn.parameter.Parameter", "torch.autograd.variable.Variable")
TENSORS: Final = frozenset(
    {
        *(_TENSOR, _TENSOR_V2, _TENSOR_V3, _WITH_ATTRIBUTES),
        *_PARAMETERS,
        *_OTHER_TENSORS,
        *_OLD_TENSORS,
        *_OLD_PARAMETERS,
    }
)


@contextlib.contextmanager
def damaged(where: str) -> Iterator[None]:
    """Turn an exception of foreign code about a damaged archive, of any type, into a `CkptError`.

    Raises: IntegrityError(FILE_NBYTES).
    """
    try:
        yield
    except (CkptError, OSError):
        raise
    except Exception as error:
        detail = f"the file isn't whole: {type(error).__name__}: {str(error)[:200]}"
        raise err(Code.FILE_NBYTES, detail, where=where, remedy=COPY) from error


# --- the archive ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoredBytes:
    """The place of a storage's elements in a file.

    Attributes:
        dtype: the dtype that the storage's class implies; None for a storage of bytes, and for an
            unknown dtype.
        record: the storage's key.
        begin, nbytes: the first byte in the file, and the size.
        big_endian: whether the elements are big-endian.
    """

    dtype: str | None
    record: str
    begin: int
    nbytes: int
    big_endian: bool


class TorchFile(Protocol):
    """A file of torch.save: a pickle, and the storages of the pickle's tensors.

    Attributes:
        path: the file's path.
        where: the file's name for messages.
        pickle_nbytes: size of the pickle; known after `root` has returned.
    """

    path: str
    where: str
    pickle_nbytes: int

    def root(self) -> Any:
        """Return the value of the pickle. Raises: as `parse_pickle`."""

    def find_storage(self, made: object, where: str) -> StoredBytes:
        """Return the place of a storage.

        Raises: IntegrityError(FILE_NBYTES); StateError(STATE_UNSUPPORTED).
        """


class Archive:
    """A zip file of torch.save, which may be a part of a larger file. The class is a `TorchFile`.

    Args:
        path: the file's path.
        begin: first byte of the archive in the file.
        nbytes: the archive's size; None for the rest of the file.
        where: the name for messages; None for the path.

    Raises: StateError(ARGUMENT, STATE_UNSUPPORTED); IntegrityError(FILE_NBYTES).
    """

    def __init__(
        self, path: str, begin: int = 0, nbytes: int | None = None, *, where: str | None = None
    ) -> None:
        self.path = path
        self.where = where or path
        self._records: dict[str, tuple[int, int]] = {}
        nbytes = Path(path).stat().st_size - begin if nbytes is None else nbytes
        with _Window(path, begin, nbytes) as window:
            records = self._list(window)
            check_records([record.filename for record in records], where=self.where)
            for record in records:
                self._add(record, window, begin)
        pickles = [name for name in self._records if name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise unknown_archive(list(self._records), where=self.where)
        self._prefix = pickles[0].removesuffix("data.pkl")
        self.pickle_nbytes = self._records[pickles[0]][1]
        order = (
            self._read("byteorder", 16)
            if f"{self._prefix}byteorder" in self._records
            else b"little"
        )
        if order not in (b"little", b"big"):
            raise err(
                Code.STATE_UNSUPPORTED,
                "the file's record `byteorder` says neither little nor big",
                where=self.where,
            )
        self._big_endian = order == b"big"

    def _list(self, window: _Window) -> list[zipfile.ZipInfo]:
        try:
            with zipfile.ZipFile(window) as archive:
                return archive.infolist()
        except zipfile.BadZipFile as error:
            window.seek(0)
            if window.read(4) == b"PK\x03\x04":
                detail = f"the archive isn't whole: {error}"
                raise err(
                    Code.FILE_NBYTES, detail, where=self.where, remedy="Copy the file again."
                ) from None
            remedy = "Give a file that torch.save made."
            raise err(
                Code.ARGUMENT, "the file isn't one of torch.save", where=self.where, remedy=remedy
            ) from None

    def _add(self, record: zipfile.ZipInfo, window: _Window, begin: int) -> None:
        name = record.filename
        if name in self._records:
            detail = f"the archive has two records called {name[:200]!r}"
            raise err(
                Code.STATE_UNSUPPORTED,
                detail,
                where=self.where,
                remedy="Save it anew with torch.save.",
            )
        if record.compress_type != zipfile.ZIP_STORED or record.flag_bits & 1:
            detail = (
                f"the record {name[:200]!r} is compressed or encrypted, as torch.save"
                " doesn't write it"
            )
            remedy = "Unpack the archive and pack it anew without compression (zip -0)."
            raise err(Code.STATE_UNSUPPORTED, detail, where=self.where, remedy=remedy)
        at = begin_of(record, window)
        if at + record.file_size > window.nbytes:
            raise err(
                Code.FILE_NBYTES, f"the file ends in {name[:200]!r}", where=self.where, remedy=COPY
            )
        self._records[name] = (begin + at, record.file_size)

    def root(self) -> Any:
        """Return the value of the pickle. Raises: as `parse_pickle`."""
        return parse_pickle(self._read("data.pkl"), where=self.where)

    def _read(self, name: str, limit_nbytes: int | None = None) -> bytes:
        begin, nbytes = self._records[f"{self._prefix}{name}"]
        with Path(self.path).open("rb") as file:
            file.seek(begin)
            return file.read(nbytes if limit_nbytes is None else min(nbytes, limit_nbytes))

    def find_storage(self, made: object, where: str) -> StoredBytes:
        """Return the place of a storage.

        Raises: IntegrityError(FILE_NBYTES); StateError(STATE_UNSUPPORTED).
        """
        kind, key, *_ = storage_id(made)
        record = f"{self._prefix}data/{key}"
        if record not in self._records:
            raise err(
                Code.FILE_NBYTES,
                f"the archive has no record {record[:200]!r}",
                where=where,
                remedy=COPY,
            )
        begin, nbytes = self._records[record]
        dtype = dtype_of_storage(kind, where)
        return StoredBytes(
            dtype=dtype, record=record, begin=begin, nbytes=nbytes, big_endian=self._big_endian
        )


def storage_id(made: object) -> tuple[str, str, object, object]:
    """Return class, key, element count and view of a storage's persistent id. Raises: TypeError.

    The view is a tuple of key, first element and count of a part of the storage; None for the whole
    storage.
    """
    if type(made) is not Made or made.kind != PERSISTENT or type(made.args[0]) is not tuple:
        raise TypeError("no persistent id where one belongs")
    tag, kind, key, _location, count, *view = made.args[0]
    if tag != "storage" or type(key) is not str or type(kind) is not Named or len(view) > 1:
        raise TypeError("an id that isn't a storage's")
    return kind.name, key, count, view[0] if view else None


def dtype_of_storage(kind: str, where: str) -> str | None:
    """Return the dtype of a class of storages; None for bytes.

    Raises: StateError(STATE_UNSUPPORTED).
    """
    if kind != _UNTYPED and kind not in _STORAGES:
        detail = f"the tensor's storage is of the unknown kind {kind[:200]}"
        raise err(Code.STATE_UNSUPPORTED, detail, where=where, remedy=_DENSE)
    return _STORAGES.get(kind)


def tensor_of(file: TorchFile, made: object, *, where: str) -> StoredTensor:
    """Return a tensor from the record in a file's pickle.

    Raises: IntegrityError; StateError(STATE_UNSUPPORTED).
    """
    if type(made) is not Made or made.kind not in TENSORS:
        raise err(Code.STATE_UNSUPPORTED, "the value isn't a tensor", where=where)
    if made.items is not None:
        raise TypeError("a tensor with items")
    if made.kind in _OTHER_TENSORS:
        raise err(Code.STATE_UNSUPPORTED, _OTHER_TENSORS[made.kind], where=where, remedy=_DENSE)
    if made.kind in _PARAMETERS:
        inner = tensor_of(file, only(made.args[0], Made), where=where)
        attributes = inner.attributes or (made.args[3] if len(made.args) > 3 else None)
        return dataclasses.replace(inner, requires_grad=made.args[1] is True, attributes=attributes)
    if made.kind in _OLD_PARAMETERS:
        # In torch 0.1, the state is tensor, gradient, hooks and two flags; later, only hooks and
        # flags.
        state: tuple[Any, ...] = only(made.state, tuple) if made.state is not None else (False,)
        data, requires_grad = (state[0], state[3]) if len(state) == 5 else (made.args[0], state[0])
        return dataclasses.replace(
            tensor_of(file, data, where=where), requires_grad=requires_grad is True
        )
    if made.kind == _WITH_ATTRIBUTES:
        maker, kind, args, attributes = made.args
        if (
            only(kind, Named).name not in _PLAIN_TENSORS
            or only(maker, Named).name == _WITH_ATTRIBUTES
        ):
            raise err(
                Code.STATE_UNSUPPORTED,
                "the tensor is of a class of its own",
                where=where,
                remedy=_DENSE,
            )
        inner = tensor_of(file, Made(maker.name, only(args, tuple)), where=where)
        return dataclasses.replace(inner, attributes=inner.attributes or attributes)
    if made.kind in _OLD_TENSORS:
        return _plain_tensor(file, Made(_TENSOR, only(made.state, tuple)), where)
    return _plain_tensor(file, made, where)


def _plain_tensor(file: TorchFile, made: Made, where: str) -> StoredTensor:
    storage, offset, shape, strides, *rest = made.args
    named = rest[2] if made.kind == _TENSOR_V3 else None
    lazy = rest[3] if made.kind == _TENSOR_V3 and len(rest) > 3 else None
    lazy = rest[2] if made.kind == _TENSOR_V2 and len(rest) > 2 else lazy
    stored = file.find_storage(storage, where)
    dtype = stored.dtype if named is None else DTYPE_NAMES.get(only(named, Named).name)
    if dtype is None:
        of = only(named, Named).name[:200] if named is not None else "a storage of bytes"
        raise err(
            Code.STATE_UNSUPPORTED, f"the format has no dtype like {of}", where=where, remedy=_DENSE
        )
    bits = _flags(lazy)
    tensor = StoredTensor(
        path=file.path,
        where=where,
        record=stored.record,
        dtype=dtype,
        begin=stored.begin + size_of(offset) * DTYPES[dtype].nbytes,
        shape=shape_of(shape),
        strides=shape_of(strides),
        conj=bits.get("conj") is True,
        neg=bits.get("neg") is True,
        big_endian=stored.big_endian,
        requires_grad=bool(rest and rest[0] is True),
    )
    tensor.check(stored.begin + stored.nbytes)
    return tensor


def begin_of(record: zipfile.ZipInfo, file: Any) -> int:
    """Return the first byte of a record's contents, which follow a header of variable size."""
    if record.header_offset < 0:
        raise ValueError("a record that begins before the file")
    file.seek(record.header_offset)
    name_nbytes, extra_nbytes = struct.unpack("<HH", file.read(30)[26:])
    return record.header_offset + 30 + int(name_nbytes) + int(extra_nbytes)


def only(value: Any, kind: type) -> Any:
    """Return `value` if its type is exactly `kind`. Raises: TypeError."""
    if type(value) is not kind:
        raise TypeError(f"a {type(value).__name__} where a {kind.__name__} belongs")
    return value


def size_of(value: object) -> int:
    """Return `value` if it is a valid size or offset. Raises: ValueError."""
    if type(value) is not int or not 0 <= value <= limits.ELEMENTS:
        raise ValueError("a size out of range")
    return value


def shape_of(value: object) -> tuple[int, ...]:
    """Return the sizes of a tuple or torch.Size of a pickle.

    Raises: TypeError, ValueError.
    """
    if type(value) is Made and value.kind == "torch.Size":
        (value,) = value.args
    sizes = only(value, tuple)
    if len(sizes) > limits.NDIM:
        raise err(
            Code.LIMIT_EXCEEDED,
            f"a tensor has more than {limits.NDIM} dimensions",
            requirement="REQ-LIM-001",
        )
    return tuple(map(size_of, sizes))


def _flags(value: object) -> dict[object, object]:
    """Return the flags of a tensor, such as ``conj``, by name."""
    if value is None:
        return {}
    items = only(value, Made).items or []
    if only(value, Made).kind != DICT or len(items) > 16:
        raise TypeError("bits of a tensor that are no dict")
    return {
        key: item for key, item in zip(items[::2], items[1::2], strict=True) if type(key) is str
    }


class _Window(io.RawIOBase):
    """A part of a file, as a file object."""

    def __init__(self, path: str, begin: int, nbytes: int) -> None:
        self._file = Path(path).open("rb", buffering=0)  # noqa: SIM115
        self.nbytes = nbytes
        self._begin = begin
        self._at = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the position."""
        self._at = max(
            0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.nbytes}[whence]
        )
        return self._at

    def readinto(self, out: Any) -> int:
        """Read into `out`, up to the end of the part."""
        view = memoryview(out).cast("B")[: max(0, self.nbytes - self._at)]
        self._file.seek(self._begin + self._at)
        count = self._file.readinto(view) or 0
        self._at += count
        return count

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        super().close()


# --- tensors --------------------------------------------------------------------------------------

#: Dtypes with a sign bit, with the unsigned integer of their size; for a complex dtype, of the size
#: of a part.
_SIGNED: Final = {
    "float16": "<u2",
    "bfloat16": "<u2",
    "float32": "<u4",
    "float64": "<u8",
    "complex32": "<u2",
    "complex64": "<u4",
    "complex128": "<u8",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor as a file holds it: a view of a storage.

    Attributes:
        path: the file's path.
        where: the tensor's name for messages.
        record: the key or record of the tensor's storage.
        begin: the first byte of the first element in the file.
        shape, strides: sizes and strides in elements.
        conj, neg: whether the elements are stored as their complex conjugates, or as their
            negatives.
        big_endian: whether the elements are big-endian.
        requires_grad: whether the tensor requires gradients.
        attributes: Python attributes of the tensor; None for no attributes.
    """

    path: str
    where: str
    record: str
    dtype: str
    begin: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    conj: bool
    neg: bool
    big_endian: bool
    requires_grad: bool
    attributes: Any = None

    @property
    def memory(self) -> tuple[object, ...] | None:
        """A key, equal for tensors of the same elements in memory; None for no elements."""
        if 0 in self.shape:
            return None
        return self.record, self.begin, self.dtype, self.shape, self.strides, self.conj, self.neg

    @property
    def end(self) -> int:
        """The end of the last element in the file, in bytes."""
        reach = sum(
            (size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True)
        )
        return self.begin + (reach + 1) * DTYPES[self.dtype].nbytes

    def check(self, storage_end: int) -> None:
        """Check that a tensor lies within the storage, and has flags suitable for the dtype.

        Raises: IntegrityError(FILE_NBYTES); StateError(STATE_UNSUPPORTED).
        """
        if len(self.shape) != len(self.strides):
            raise ValueError("a shape and strides of different lengths")
        if (0 not in self.shape and self.end > storage_end) or self.begin > storage_end:
            raise err(
                Code.FILE_NBYTES, "the tensor exceeds its storage", where=self.where, remedy=COPY
            )
        is_complex = self.dtype.startswith("complex")
        if (self.conj and not is_complex) or (
            self.neg and self.dtype not in _SIGNED and "int" not in self.dtype
        ):
            detail = f"a tensor of {self.dtype} is stored as its negative or conjugate"
            raise err(
                Code.STATE_UNSUPPORTED, detail, where=self.where, remedy="Save a clone() of it."
            )

    def read(self, box: Box, out: memoryview) -> None:
        """Fill memory with the bytes of a box. Raises: IntegrityError(FILE_NBYTES)."""
        if box.shape == self.shape and self._is_dense():
            # One read: for many small tensors, a mapping of each takes several times as long.
            read_exactly(self.path, self.begin, out, self.where)
        else:
            self._gather(box, out)
        if self.big_endian:
            part = np.dtype(_SIGNED.get(self.dtype, f"u{DTYPES[self.dtype].nbytes}"))
            np.frombuffer(out, part).byteswap(inplace=True)
        if self.conj or self.neg:
            self._resolve(np.frombuffer(out, np.uint8))

    def _is_dense(self) -> bool:
        """Return whether the elements are contiguous, in C order."""
        step = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size > 1 and stride != step:
                return False
            step *= size
        return True

    def _gather(self, box: Box, out: memoryview) -> None:
        element = np.dtype((np.void, DTYPES[self.dtype].nbytes))
        with damaged(self.where):
            held = np.memmap(
                self.path, np.uint8, mode="r", offset=self.begin, shape=(self.end - self.begin,)
            )
            flat: Any = held.view(element)
        strides = [stride * element.itemsize for stride in self.strides]
        view: Any = np.lib.stride_tricks.as_strided(flat, self.shape, strides, writeable=False)
        made: Any = np.frombuffer(out, element).reshape(box.shape)
        made[...] = view[(*box.relative_to(Box.whole(self.shape)), ...)]

    def _resolve(self, content: NDArray[np.uint8]) -> None:
        """Negate or conjugate the elements in place. The sign is one bit, also of a NaN."""
        if self.dtype not in _SIGNED:
            integers = content.view(self.dtype)
            np.negative(integers, out=integers)
            return
        parts = content.view(_SIGNED[self.dtype])
        sign = parts.dtype.type(1 << (8 * parts.itemsize - 1))
        if self.neg:
            parts ^= sign
        if self.conj:
            parts[1::2] ^= sign
