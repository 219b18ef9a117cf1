"""Use numpy arrays as sources, as sinks and as values of trees."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Final, TypeAlias

import numpy as np

from ckptfmt.box import Box
from ckptfmt.documents.index import IndexTensor
from ckptfmt.documents.tree import InlineArray
from ckptfmt.dtypes import DTYPES, numpy_dtype
from ckptfmt.errors import Code, err
from ckptfmt.state import place_of

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
#: The remedy for each dtype of ml_dtypes with less than a byte per element.
_REMEDIES: Final = {
    name: f"Save array.astype('{whole}'), and load with .astype('{name}'): no value changes."
    for name, whole in (("int2", "int8"), ("int4", "int8"), ("uint2", "uint8"), ("uint4", "uint8"))
}


def dtype_name(dtype: np.dtype[Any], *, where: str) -> str:
    """Return the format's name of a numpy dtype of any byte order.

    Raises: StateError(STATE_UNSUPPORTED).
    """
    name = _find_name(dtype)
    if name is None:
        detail = f"the format has no dtype like numpy's {dtype}"
        if dtype.name in _REMEDIES:
            raise err(Code.STATE_UNSUPPORTED, detail, where=where, remedy=_REMEDIES[dtype.name])
        raise err(Code.STATE_UNSUPPORTED, detail, where=where)
    return name


@functools.lru_cache(maxsize=64)
def _find_name(dtype: np.dtype[Any]) -> str | None:
    """Return a dtype's name from a cache: numpy builds the string at each access."""
    return dtype.name if not dtype.hasobject and dtype.name in DTYPES else None


def saved_dtype(array: Array, *, where: str) -> str:
    """Return the format's name of an array's dtype.

    Raises: StateError(STATE_UNSUPPORTED) for subclasses and for dtypes that the format lacks.
    """
    if type(array) is not np.ndarray:
        raise err(
            Code.STATE_UNSUPPORTED,
            f"{type(array).__module__}.{type(array).__qualname__} is a subclass of numpy's array",
            where=where,
            remedy="Pass np.asarray(...) of it.",
        )
    return dtype_name(array.dtype, where=where)


def _saved_name(array: Array, field: str, name: str) -> str:
    """Return `saved_dtype` of an array, without the text of its place for a known dtype."""
    dtype = _find_name(array.dtype) if type(array) is np.ndarray else None
    return dtype or saved_dtype(array, where=place_of(field, name))


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class ArraySource:
    """A source that reads a numpy array; see `ckptfmt.write.snapshot.MemoryOf`."""

    field: str
    name: str
    dtype: str
    global_shape: tuple[int, ...]
    scope: str
    array: Array
    boxes: tuple[Box, ...]
    replica: bool = False
    storage: str = "persistent"
    aliases: tuple[str, ...] = ()

    @classmethod
    def of(cls, array: Array, *, field: str, name: str, scope: str) -> ArraySource:
        """Return the source of an array. Raises: StateError(STATE_UNSUPPORTED)."""
        return cls(
            field=field,
            name=name,
            dtype=_saved_name(array, field, name),
            global_shape=array.shape,
            scope=scope,
            array=array,
            boxes=(Box((0,) * array.ndim, array.shape),),
        )

    def copy_into(self, box: Box, out: memoryview) -> None:
        """Copy the elements of `box` into `out`. The copy releases the GIL."""
        if 0 in box.shape:
            return
        memory = self.memory_of(box)
        if memory is not None:
            np.copyto(np.frombuffer(out, np.uint8), memory)
        else:
            view = _view(self.array, box)
            np.copyto(np.frombuffer(out, view.dtype.newbyteorder("<")).reshape(view.shape), view)

    def memory_of(self, box: Box) -> Array | None:
        """Return the bytes of the elements of `box` as a view.

        Returns: None if the elements aren't contiguous in memory, or not in the format's byte
        order.
        """
        view = _view(self.array, box)
        if not view.flags.c_contiguous or view.dtype != view.dtype.newbyteorder("<"):
            return None
        return view.reshape(-1).view(np.uint8)


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class ArraySink:
    """A sink that fills a numpy array; see `ckptfmt.write.snapshot.TensorSink`.

    If the array has another dtype than the saved tensor, the elements are converted.
    """

    field: str
    name: str
    dtype: str
    global_shape: tuple[int, ...]
    scope: str
    array: Array
    boxes: tuple[Box, ...]

    @classmethod
    def of(cls, saved: IndexTensor, array: Array) -> ArraySink:
        """Return a sink that fills an array with a saved tensor."""
        return cls(
            field=saved.field,
            name=saved.name,
            dtype=saved.dtype,
            global_shape=array.shape,
            scope=saved.scope,
            array=array,
            boxes=(Box.whole(array.shape),),
        )

    def copy_from(self, box: Box, content: memoryview) -> None:
        """Copy `content` into the elements of `box`."""
        incoming = np.frombuffer(content, dtype=numpy_dtype(self.dtype)).reshape(box.shape)
        with np.errstate(over="ignore", invalid="ignore"):  # the caller asked for this rounding
            if not np.can_cast(incoming.dtype, self.array.dtype, "unsafe"):
                incoming = incoming.astype(np.float32)  # exact for conversions between float8 types
            np.copyto(_view(self.array, box), incoming, casting="unsafe")


def inline_array(value: Array | np.generic, *, field: str, name: str) -> InlineArray:
    """Return an array or a numpy scalar as a value of a tree.

    Args:
        value: the value.
        field, name: the value's place, for messages.

    Raises: StateError(STATE_UNSUPPORTED).
    """
    scalar = isinstance(value, np.generic)
    array = np.asarray(value)
    dtype = _saved_name(array, field, name)
    return InlineArray(dtype, array.shape, bytes(_content(array)), scalar)


def array_of(value: InlineArray) -> Array | np.generic:
    """Return the array or numpy scalar that a value of a tree represents.

    >>> array_of(inline_array(np.float32(2), field="data", name="x"))
    np.float32(2.0)
    """
    array = np.frombuffer(value.content, dtype=numpy_dtype(value.dtype)).reshape(value.shape).copy()
    return array[()] if value.scalar else array


def _view(array: Array, box: Box) -> Array:
    if box.shape == array.shape:
        return array
    # the ellipsis keeps a 0-d array an array
    index: tuple[Any, ...] = (*box.relative_to(Box.whole(array.shape)), ...)
    view: Array = array[index]
    return view


def _content(array: Array) -> memoryview:
    little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    content: memoryview = little.reshape(-1).view(np.uint8).data
    return content
