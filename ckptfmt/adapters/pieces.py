"""Wrap live tensors and arrays as sources and sinks, for libraries that hold their own pieces."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

from ckptfmt.adapters import jax_side, torch_side
from ckptfmt.adapters.live_trees import GLOBAL
from ckptfmt.adapters.numpy import Array, ArraySink, ArraySource, saved_dtype
from ckptfmt.box import Box
from ckptfmt.errors import CkptError, Code, err
from ckptfmt.state import place_of
from ckptfmt.write.snapshot import TensorSink, TensorSource

Tensor = TypeVar("Tensor", TensorSource, TensorSink)


def source_of(
    name: str,
    pieces: object,
    *,
    field: str = "weights",
    global_shape: tuple[int, ...] | None = None,
    scope: str = GLOBAL,
) -> TensorSource:
    """Return the source of a tensor that this process holds as a whole or in pieces.

    The source is for `State`, or for the save of another library.

    Args:
        name: the tensor's name, unique within field and scope.
        pieces: the whole tensor: a torch tensor (DTensor included), a numpy array or a JAX array.
            Or a mapping from offsets to pieces; the offsets are a tuple, the piece's begin in the
            global tensor.
        field: ``weights``, ``optimizer`` or ``data``.
        global_shape: the shape of the whole tensor, in elements. Required if `pieces` is a mapping.
        scope: ``global``, or ``lw/<i>`` for a tensor of process i only.

    Raises: StateError(STATE_UNSUPPORTED, ARGUMENT); LayoutError(BOX_BOUNDS, TILING_OVERLAP).

    >>> import numpy as np
    >>> source = source_of("w", {(2, 0): np.zeros((2, 3), "float32")}, global_shape=(4, 3))
    >>> source.dtype, source.boxes
    ('float32', (Box(begin=(2, 0), shape=(2, 3)),))
    """
    where = place_of(field, name)
    if not isinstance(pieces, Mapping):
        return _of_shape(
            _whole_source(pieces, field=field, name=name, scope=scope), global_shape, where
        )
    found = {
        box: _whole_source(piece, field=field, name=name, scope=scope)
        for box, piece in _boxes(pieces, where)
    }
    shape = _check_pieces(found, global_shape, where)
    dtypes = {source.dtype for source in found.values()}
    if len(dtypes) != 1:
        raise err(
            Code.ARGUMENT,
            f"pieces of {len(dtypes)} dtypes; a tensor has a single dtype",
            where=where,
        )
    return Pieces(
        field=field,
        name=name,
        scope=scope,
        dtype=dtypes.pop(),
        global_shape=shape,
        boxes=tuple(found),
        held=found,
    )


def sink_of(
    name: str,
    pieces: object,
    *,
    dtype: str | None = None,
    field: str = "weights",
    global_shape: tuple[int, ...] | None = None,
    scope: str = GLOBAL,
) -> TensorSink:
    """Return a sink for `Checkpoint.read_into` that fills live tensors or arrays in place.

    Args:
        name: the tensor's name.
        pieces: the destination, as for `source_of`. JAX arrays can't be filled: `ckptfmt.load`
            creates new arrays.
        dtype: the saved dtype, if it differs from the destination's. Elements are converted then.
        field: the tensor's field.
        global_shape: the shape of the whole tensor, in elements. Required if `pieces` is a mapping.
        scope: the tensor's scope.

    Raises: StateError(STATE_UNSUPPORTED, META_DESTINATION, ARGUMENT); LayoutError(BOX_BOUNDS,
        TILING_OVERLAP).
    """
    where = place_of(field, name)
    if not isinstance(pieces, Mapping):
        return _of_shape(
            _whole_sink(pieces, field=field, name=name, scope=scope, dtype=dtype),
            global_shape,
            where,
        )
    found = {
        box: _whole_sink(piece, field=field, name=name, scope=scope, dtype=dtype)
        for box, piece in _boxes(pieces, where)
    }
    shape = _check_pieces(found, global_shape, where)
    saved = dtype or next(iter(found.values())).dtype
    return Pieces(
        field=field,
        name=name,
        scope=scope,
        dtype=saved,
        global_shape=shape,
        boxes=tuple(found),
        held=found,
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pieces:
    """A source or a sink of several local tensors, each at its box of a global tensor."""

    field: str
    name: str
    scope: str
    dtype: str
    global_shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    held: Mapping[Box, Any]
    replica: bool = False
    storage: str = "persistent"
    aliases: tuple[str, ...] = ()

    def copy_into(self, box: Box, out: memoryview) -> None:
        """Copy the elements of `box` into `out`."""
        held, local = self._find(box)
        held.copy_into(local, out)

    def copy_from(self, box: Box, content: memoryview) -> None:
        """Copy `content` into the elements of `box`."""
        held, local = self._find(box)
        held.copy_from(local, content)

    def memory_of(self, box: Box) -> Array | None:
        """Return the bytes of the elements of `box` as a view.

        Returns: None if the elements aren't contiguous in memory.
        """
        held, local = self._find(box)
        memory_of = getattr(held, "memory_of", None)
        return None if memory_of is None else memory_of(local)

    def _find(self, box: Box) -> tuple[Any, Box]:
        """Return the local tensor that contains a box, and the box relative to that tensor."""
        around = next(own for own in self.boxes if own.contains(box))
        begin = tuple(at - own for at, own in zip(box.begin, around.begin, strict=True))
        return self.held[around], Box(begin, box.shape)


def _of_shape(whole: Tensor, global_shape: tuple[int, ...] | None, where: str) -> Tensor:
    """Return a whole tensor, after a check of its shape if the caller gave one."""
    if global_shape is not None and tuple(global_shape) != whole.global_shape:
        detail = (
            f"the tensor has the shape {whole.global_shape}, and global_shape={tuple(global_shape)}"
        )
        remedy = "Give a piece with the offsets at which it begins: {(0, 0): tensor}."
        raise err(Code.ARGUMENT, detail, where=where, remedy=remedy)
    return whole


def _boxes(pieces: Mapping[Any, Any], where: str) -> list[tuple[Box, Any]]:
    if not pieces:
        remedy = "Leave out names that have no piece in this process."
        raise err(Code.ARGUMENT, "no piece", where=where, remedy=remedy)
    boxes = []
    for begin, piece in pieces.items():
        if not hasattr(piece, "shape"):
            raise _no_tensor(piece, where)
        if not isinstance(begin, tuple) or not all(type(offset) is int for offset in begin):
            remedy = (
                "The keys are the offsets at which a piece begins, a tuple of integers: {(0,"
                " 0): tensor}."
            )
            raise err(
                Code.ARGUMENT, f"{begin!r} isn't a tuple of offsets", where=where, remedy=remedy
            )
        boxes.append((Box(begin, tuple(piece.shape)), piece))
    return boxes


def _check_pieces(
    found: Mapping[Box, Any], global_shape: tuple[int, ...] | None, where: str
) -> tuple[int, ...]:
    if global_shape is None:
        raise err(
            Code.ARGUMENT, "pieces at offsets need the shape of the whole", where="global_shape="
        )
    whole = Box.whole(tuple(global_shape))
    for box, held in found.items():
        if held.boxes != (Box.whole(box.shape),):
            remedy = "Give a DTensor as it is, without offsets."
            raise err(Code.ARGUMENT, "a DTensor has offsets of its own", where=where, remedy=remedy)
        if (
            len(box.begin) != len(box.shape)
            or len(box.begin) != len(whole.begin)
            or not whole.contains(box)
        ):
            raise err(
                Code.BOX_BOUNDS,
                f"{box} leaves {whole.shape}",
                where=where,
                remedy="Mend the offsets.",
            )
    for one, other in itertools.combinations(found, 2):
        if one.intersect(other) is not None:
            raise err(Code.TILING_OVERLAP, f"{one} and {other} overlap", where=where)
    return whole.shape


def _whole_source(value: Any, *, field: str, name: str, scope: str) -> TensorSource:
    side = torch_side()
    if side is not None and side.is_tensor(value):
        source: TensorSource = side.source_of(value, field=field, name=name, scope=scope)
        return source
    of_jax = jax_side()
    if of_jax is not None and of_jax.is_array(value):
        found: TensorSource = of_jax.source_of(value, field=field, name=name, scope=scope)
        return found
    if not isinstance(value, np.ndarray):
        raise _no_tensor(value, place_of(field, name))
    return ArraySource.of(value, field=field, name=name, scope=scope)


def _whole_sink(value: Any, *, field: str, name: str, scope: str, dtype: str | None) -> TensorSink:
    side = torch_side()
    if side is not None and side.is_tensor(value):
        own = side.dtype_name(value.dtype, where=place_of(field, name))
        sink: TensorSink = side.sink_of(
            value, field=field, name=name, scope=scope, dtype=dtype or own
        )
        return sink
    if not isinstance(value, np.ndarray):
        raise _no_tensor(value, place_of(field, name))
    own = saved_dtype(value, where=place_of(field, name))
    boxes = (Box.whole(value.shape),)
    return ArraySink(
        field=field,
        name=name,
        scope=scope,
        dtype=dtype or own,
        global_shape=value.shape,
        array=value,
        boxes=boxes,
    )


def _no_tensor(value: object, where: str) -> CkptError:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    remedy = "Give a torch tensor, a numpy array, or a mapping from offsets to them."
    return err(
        Code.STATE_UNSUPPORTED, f"{kind} is neither tensor nor array", where=where, remedy=remedy
    )
