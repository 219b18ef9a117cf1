"""Protocols of tensors that are written and filled: sources and sinks, free of any framework."""

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

MemoryOf: TypeAlias = "Callable[[Box], NDArray[np.uint8] | None]"


class _Tensor(Protocol):
    """The description of a tensor, for source and sink alike."""

    @property
    def field(self) -> str:
        """One of the seven fields."""
        ...

    @property
    def name(self) -> str:
        """Unique within field and scope; any string."""
        ...

    @property
    def dtype(self) -> str:
        """A name of the format's table of dtypes."""
        ...

    @property
    def global_shape(self) -> tuple[int, ...]:
        """Of the whole tensor, in elements."""
        ...

    @property
    def scope(self) -> str:
        """``global``, or ``lw/<i>`` for what belongs to logical worker i alone."""
        ...

    @property
    def boxes(self) -> tuple[Box, ...]:
        """The pieces held, or wanted, here; disjoint; none where there is nothing of it."""
        ...


@runtime_checkable
class TensorSource(_Tensor, Protocol):
    """A tensor, or the pieces of it that this writer holds, ready to be written."""

    @property
    def replica(self) -> bool:
        """Whether mesh or caller say that every holder of a piece has the same bytes."""
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


class MemorySource(TensorSource, Protocol):
    """A source in memory: where its elements follow each other, they may be compared before they are copied."""

    def memory_of(self, box: Box) -> NDArray[np.uint8] | None:
        """Return the elements of `box`, one of `boxes`, in C order, little-endian, to be read; None if they lie apart.

        They are read while the source is there.
        """
        ...


@runtime_checkable
class TensorSink(_Tensor, Protocol):
    """A destination for pieces of a tensor, whose dtype and shape must be those of the tensor."""

    def copy_from(self, box: Box, content: memoryview) -> None:
        """Take verified elements: `box` lies within one of `boxes`; C order, little-endian.

        `content` is valid until this returns. Several threads may call it at once, each with other elements.
        """
        ...


class MemorySink(TensorSink, Protocol):
    """A destination in memory: where its elements follow each other, they needn't be handed to it range by range."""

    def memory_of(self, box: Box) -> NDArray[np.uint8] | None:
        """Return the bytes to fill with the elements of `box`, in C order; None where they lie apart.

        Called once before they are filled; `box` lies within one of `boxes`. They are filled while the sink is there.
        """
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Everything that one writer gives to a save.

    Attributes:
        tensors: what it holds.
        streams: its RNG streams.
        leaves: its plain values.
        absent: each field that it has nothing for, with the reason.
        declared_by: for declared replicas, who declares them, such as a mesh. It speaks for its own holders only: what
            several declare is written once for each of them, and compared.
        labels: metrics and tags of the checkpoint, and why it is suspect; of writer 0 alone.
    """

    tensors: tuple[TensorSource, ...]
    streams: tuple[RngStream, ...]
    leaves: tuple[Leaf, ...]
    absent: dict[str, str]
    declared_by: Mapping[TensorKey, str] = dataclasses.field(default_factory=dict)
    labels: Labels = NO_LABELS
