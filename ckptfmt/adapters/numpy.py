"""Numpy arrays as sources, sinks and values of trees."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, TypeAlias

import numpy as np

from ckptfmt.box import Box
from ckptfmt.documents.tree import InlineArray
from ckptfmt.dtypes import DTYPES, numpy_dtype
from ckptfmt.errors import Code, err
from ckptfmt.state import place_of

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]


def dtype_name(dtype: np.dtype[Any], *, where: str) -> str:
    """Return the format's name of a numpy dtype, of either byte order. Raises: StateError(STATE_UNSUPPORTED)."""
    name = _find_name(dtype)
    if name is None:
        raise err(Code.STATE_UNSUPPORTED, f"the format has no dtype like numpy's {dtype}", where=where)
    return name


@functools.lru_cache(maxsize=64)
def _find_name(dtype: np.dtype[Any]) -> str | None:
    """Return a dtype's name: numpy makes it anew each time that it is asked for."""
    return dtype.name if not dtype.hasobject and dtype.name in DTYPES else None


def saved_dtype(array: Array, *, where: str) -> str:
    """Return the format's name of the dtype of an array that can be saved as it is.

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


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class ArraySource:
    """A numpy array to be written; see `ckptfmt.write.snapshot.MemorySource`."""

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
            dtype=saved_dtype(array, where=place_of(field, name)),
            global_shape=array.shape,
            scope=scope,
            array=array,
            boxes=(Box.whole(array.shape),),
        )

    def copy_into(self, box: Box, out: memoryview) -> None:
        """Copy the elements of `box` into `out`; other threads of Python run meanwhile."""
        if not box.element_count:
            return
        memory = self.memory_of(box)
        if memory is not None:
            np.copyto(np.frombuffer(out, np.uint8), memory)
        else:
            view = _view(self.array, box)
            np.copyto(np.frombuffer(out, view.dtype.newbyteorder("<")).reshape(view.shape), view)

    def memory_of(self, box: Box) -> Array | None:
        """Return the bytes of the elements of `box`, if they follow each other in memory as the format has them."""
        view = _view(self.array, box)
        if not view.flags.c_contiguous or view.dtype != view.dtype.newbyteorder("<"):
            return None
        return view.reshape(-1).view(np.uint8)


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class ArraySink:
    """A numpy array to be filled; see `ckptfmt.write.snapshot.TensorSink`. Another dtype of the array converts."""

    field: str
    name: str
    dtype: str
    global_shape: tuple[int, ...]
    scope: str
    array: Array
    boxes: tuple[Box, ...]

    def copy_from(self, box: Box, content: memoryview) -> None:
        """Take the elements of `box`."""
        incoming = np.frombuffer(content, dtype=numpy_dtype(self.dtype)).reshape(box.shape)
        with np.errstate(over="ignore", invalid="ignore"):  # a conversion was asked for, with what it rounds to
            if not np.can_cast(incoming.dtype, self.array.dtype, "unsafe"):
                incoming = incoming.astype(np.float32)  # exact: this is between kinds of float8
            np.copyto(_view(self.array, box), incoming, casting="unsafe")


def inline_array(value: Array | np.generic, *, where: str) -> InlineArray:
    """Return an array, or a numpy scalar, as a value of a tree. Raises: StateError(STATE_UNSUPPORTED)."""
    scalar = isinstance(value, np.generic)
    array = np.asarray(value)
    return InlineArray(saved_dtype(array, where=where), array.shape, bytes(_content(array)), scalar)


def array_of(value: InlineArray) -> Array | np.generic:
    """Return the array, or the numpy scalar, that a tree holds.

    >>> array_of(inline_array(np.float32(2), where="x"))
    np.float32(2.0)
    """
    array = np.frombuffer(value.content, dtype=numpy_dtype(value.dtype)).reshape(value.shape).copy()
    return array[()] if value.scalar else array


def _view(array: Array, box: Box) -> Array:
    index: tuple[Any, ...] = (*box.relative_to(Box.whole(array.shape)), ...)  # the dots keep an array of rank 0 one
    view: Array = array[index]
    return view


def _content(array: Array) -> memoryview:
    little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    content: memoryview = little.reshape(-1).view(np.uint8).data
    return content
