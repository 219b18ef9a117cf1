"""Protocols for tensors to save (sources) and to load (sinks), independent of any framework."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

from ckptfmt.documents.labels import NO_LABELS, Labels

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy as np
    from numpy.typing import NDArray

    from ckptfmt.box import Box
    from ckptfmt.documents.part import Leaf, RngStream
    from ckptfmt.documents.tables import TensorKey

#: The optional method `memory_of` of a source or sink with elements in host memory. The method
#: returns the memory of the elements of a box as bytes, in C order and little-endian; None for
#: elements that aren't contiguous. The caller uses the memory only while the source or sink exists.
#: The elements of such a source can be compared before a copy. Such a sink is filled without calls
#: of `copy_from`.
MemoryOf: TypeAlias = "Callable[[Box], NDArray[np.uint8] | None]"


#: Returns the content of a box of a saved tensor, if this process has the content in memory; else
#: None. The content is complete, but isn't verified again.
Memory: TypeAlias = "Callable[[TensorKey, Box], memoryview | None]"


class _Tensor(Protocol):
    """The description of a tensor, shared by source and sink."""

    @property
    def field(self) -> str:
        """One of the seven fields."""
        ...

    @property
    def name(self) -> str:
        """The tensor's name: any string, unique within field and scope."""
        ...

    @property
    def dtype(self) -> str:
        """A name from the format's table of dtypes."""
        ...

    @property
    def global_shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor, in elements."""
        ...

    @property
    def scope(self) -> str:
        """``global``, or ``lw/<i>`` for a tensor of logical worker i only."""
        ...

    @property
    def boxes(self) -> tuple[Box, ...]:
        """The disjoint boxes that this process holds or wants; may be empty."""
        ...


@runtime_checkable
class TensorSource(_Tensor, Protocol):
    """A tensor, or the pieces of a tensor that this writer holds, ready to be written."""

    @property
    def replica(self) -> bool:
        """Whether mesh or caller declare all copies of a piece equal."""
        ...

    @property
    def storage(self) -> str:
        """``persistent`` or ``non-persistent``."""
        ...

    @property
    def aliases(self) -> tuple[str, ...]:
        """Other names of the same memory."""
        ...

    def copy_into(self, box: Box, out: memoryview) -> None:
        """Copy the elements of `box`, one of `boxes`, into `out`: C order, little-endian."""
        ...


@runtime_checkable
class TensorSink(_Tensor, Protocol):
    """A destination for pieces of a tensor. Dtype and shape must equal the stored tensor's."""

    def copy_from(self, box: Box, content: memoryview) -> None:
        """Store verified elements of `box`, a part of one of `boxes`; C order, little-endian.

        `content` is valid until this method returns. Several threads may call it at once, each with
        different elements.
        """
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A writer's contribution to a save.

    Attributes:
        tensors: the writer's tensors.
        streams: the writer's RNG streams.
        leaves: the writer's plain values.
        absent: fields for which the writer has no state, each with the reason.
        doubts: names of the `DATA_DOUBTS` about the writer's position in the data.
        declared_by: for each declared replica, the declarer's name, such as a mesh. A declaration
            covers the declarer's holders only: a replica of several declarers is written once for
            each declarer, and the copies are compared.
        labels: metrics and tags of the checkpoint, and the reason if the checkpoint is suspect; set
            on writer 0 only.
    """

    tensors: tuple[TensorSource, ...]
    streams: tuple[RngStream, ...]
    leaves: tuple[Leaf, ...]
    absent: dict[str, str]
    doubts: tuple[str, ...] = ()
    declared_by: Mapping[TensorKey, str] = dataclasses.field(default_factory=dict)
    labels: Labels = NO_LABELS
