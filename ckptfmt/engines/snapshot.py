"""What the engines are given to write and to fill: two small protocols, and no framework behind them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from ckptfmt.box import Box
    from ckptfmt.documents.part import Leaf, Stream

__all__ = ["Snapshot", "TensorSink", "TensorSource"]


@runtime_checkable
class TensorSource(Protocol):
    """A tensor, or the pieces of it that this writer holds, ready to be written.

    Attributes:
        field: one of the seven fields.
        name: unique within field and scope; any string.
        dtype: a name of the format's table of dtypes.
        global_shape: of the whole tensor, in elements.
        scope: ``global``, or ``lw/<i>`` for what belongs to logical worker i alone.
        boxes: the pieces held here; disjoint; none on a writer that holds nothing of it.
        replica: whether mesh or caller say that every holder of a piece has the same bytes.
        storage: ``persistent`` or ``non-persistent``.
        aliases: other names of the same memory.
    """

    field: str
    name: str
    dtype: str
    global_shape: tuple[int, ...]
    scope: str
    boxes: tuple[Box, ...]
    replica: bool
    storage: str
    aliases: tuple[str, ...]

    def copy_into(self, box: Box, out: memoryview) -> None:
        """Copy the elements of `box`, one of `boxes`, into `out`: C order, little-endian."""
        ...


@runtime_checkable
class TensorSink(Protocol):
    """A destination for pieces of a tensor.

    Attributes:
        field, name, dtype, global_shape, scope: as those of the tensor to be read; dtype and shape are checked.
        boxes: the pieces wanted.
    """

    field: str
    name: str
    dtype: str
    global_shape: tuple[int, ...]
    scope: str
    boxes: tuple[Box, ...]

    def copy_from(self, box: Box, content: memoryview) -> None:
        """Take verified elements: `box` lies within one of `boxes`; C order, little-endian."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Everything that one writer gives to a save.

    Attributes:
        tensors: what it holds.
        streams: its random-number streams.
        leaves: its plain values.
        absent: each field that it has nothing for, with the reason.
    """

    tensors: tuple[TensorSource, ...]
    streams: tuple[Stream, ...]
    leaves: tuple[Leaf, ...]
    absent: dict[str, str]
