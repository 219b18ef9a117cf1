"""What a checkpoint library must offer to be judged: a `Peer`, and what it may offer besides."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

from ckptfmt_conformance.protocol import Unsupported

__all__ = ["AsyncPeer", "Description", "DistributedPeer", "Loaded", "Peer", "Pending", "Unsupported", "find_peer"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """What a peer says of itself.

    Attributes:
        name: of the library, and of the call.
        version: of the library.
        settings: how it is used here, one line.
        keeps: what it keeps besides tensors: of ``step`` and ``values``.
        disclaims: cases that its own documentation says it isn't made for: the sentence, and where it stands. Such a
            case is still run: it counts as UNSUPPORTED where it would have been a FAIL.
        remarks: by case, what its makers or its source say about it, with the place; shown beside the result, and
            changes nothing.
    """

    name: str
    version: str
    settings: str
    keeps: frozenset[str] = frozenset({"step", "values"})
    disclaims: Mapping[str, str] = dataclasses.field(default_factory=dict)
    remarks: Mapping[str, str] = dataclasses.field(default_factory=dict)


class Loaded(NamedTuple):
    """What a load gave.

    Attributes:
        state: as it was saved: ``tensors``, and ``values`` if there were any.
        step: that was saved with it; None where the library doesn't keep it.
    """

    state: Mapping[str, object]
    step: int | None


@runtime_checkable
class Peer(Protocol):
    """A checkpoint library, as its users use it.

    A state is a mapping: ``tensors`` from name to tensor, and in some cases ``values``, a mapping of plain values.
    Making a peer must start no thread and no process: it is made once, and forked before its first use.
    """

    def describe(self) -> Description:
        """Say what it is."""

    def save(self, path: Path, state: Mapping[str, object], step: int) -> None:
        """Save durably: what is asked for is on disk when this returns.

        Args:
            path: of the checkpoint, a file or a directory, as the library likes; its parent is there.
            state: what to save.
            step: training steps done.

        Raises: Unsupported; the library's own error for what it refuses.
        """

    def load(self, path: Path, state: Mapping[str, object]) -> Loaded:
        """Load all of a checkpoint.

        Args:
            path: as it was given to `save`.
            state: the same names, shapes and dtypes with other content: to load into in place, or to compare names and
                shapes with as ``load_state_dict`` does. Mappings of values have their keys, and None for the rest.

        Raises: the library's own error.
        """


class Pending(Protocol):
    """A save that goes on beside its caller."""

    def wait(self) -> None:
        """Wait until the checkpoint is durable. Raises: what the save failed with."""


@runtime_checkable
class AsyncPeer(Peer, Protocol):
    """A peer that saves beside the training as well."""

    def save_async(self, path: Path, state: Mapping[str, object], step: int) -> Pending:
        """Begin a save, and return when the library says that the tensors may be changed."""


@runtime_checkable
class DistributedPeer(Peer, Protocol):
    """A peer whose checkpoints are written and read by several processes of torch.distributed.

    Every process calls these with its own shards: DTensors, and the parameters of a module under FSDP2.
    """

    def save_distributed(self, path: Path, state: Mapping[str, object], step: int) -> None:
        """Save what all processes hold as one checkpoint."""

    def load_distributed(self, path: Path, state: Mapping[str, object]) -> Loaded:
        """Load into the shards that this process holds now, whatever layout they were saved in."""


def find_peer(name: str) -> Peer:
    """Return a new peer.

    Args:
        name: such as ``package.module:Class``.

    Raises: ValueError for a name that leads nowhere, or to something else.
    """
    module, _, attribute = name.partition(":")
    try:
        made = getattr(importlib.import_module(module), attribute)()
    except (ImportError, AttributeError, TypeError) as error:
        raise ValueError(f"no peer {name!r}: {error}; name it as package.module:Class") from error
    if not isinstance(made, Peer):
        raise ValueError(f"{name!r} is no peer: it needs describe(), save() and load()")  # noqa: TRY004 - a wrong name
    return made
