"""The interface of a checkpoint library to be judged: a `Peer`, and optional extensions."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

from ckptfmt_conformance.protocol import Unsupported

__all__ = [
    "AsyncPeer",
    "Description",
    "DistributedPeer",
    "Loaded",
    "Peer",
    "Pending",
    "Unsupported",
    "find_peer",
]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """A peer's description of itself.

    Attributes:
        name: the name of the library, and of the call.
        version: the version of the library.
        settings: the settings in use, in a line.
        keeps: the kept items in addition to tensors: a subset of ``step`` and ``values``.
        disclaims: cases excluded by the library's own documentation: the sentence, and the place.
            Such a case is still run. A FAIL counts as UNSUPPORTED then.
        remarks: remarks of the library's makers or source on a case, with the place. A remark is
            shown beside the result, and doesn't change it.
    """

    name: str
    version: str
    settings: str
    keeps: frozenset[str] = frozenset({"step", "values"})
    disclaims: Mapping[str, str] = dataclasses.field(default_factory=dict)
    remarks: Mapping[str, str] = dataclasses.field(default_factory=dict)


class Loaded(NamedTuple):
    """The result of a load.

    Attributes:
        state: the saved state: ``tensors``, and ``values`` if there were any.
        step: the saved step; None where the library doesn't keep steps.
    """

    state: Mapping[str, object]
    step: int | None


@runtime_checkable
class Peer(Protocol):
    """A checkpoint library, called as users call the library.

    A state is a mapping: ``tensors`` from name to tensor, and in some cases ``values``, a mapping
    of plain values. The constructor must start no thread and no process: a peer is made once, and
    its process is forked before the first use.
    """

    def describe(self) -> Description:
        """Return the peer's description."""

    def save(self, path: Path, state: Mapping[str, object], step: int) -> None:
        """Save durably: the checkpoint is on disk when the method returns.

        Args:
            path: the checkpoint's path, for a file or a directory; the parent exists.
            state: the state to save.
            step: the number of finished training steps.

        Raises: Unsupported; the library's own error for a refusal.
        """

    def load(self, path: Path, state: Mapping[str, object]) -> Loaded:
        """Load a whole checkpoint.

        Args:
            path: the path given to `save`.
            state: the same names, shapes and dtypes with other content, to load into in place, or
                to compare names and shapes as ``load_state_dict`` does. Mappings of values have
                their keys; all other values are None.

        Raises: the library's own error.
        """


class Pending(Protocol):
    """An asynchronous save in progress."""

    def wait(self) -> None:
        """Wait until the checkpoint is durable. Raises: the save's error."""


@runtime_checkable
class AsyncPeer(Peer, Protocol):
    """A peer with asynchronous saves."""

    def save_async(self, path: Path, state: Mapping[str, object], step: int) -> Pending:
        """Start a save. Return when the library permits changes to the tensors."""


@runtime_checkable
class DistributedPeer(Peer, Protocol):
    """A peer with saves and loads by several processes of torch.distributed.

    Every process calls the methods with the process's shards: DTensors, and the parameters of a
    module under FSDP2.
    """

    def save_distributed(self, path: Path, state: Mapping[str, object], step: int) -> None:
        """Save the shards of all processes as a checkpoint."""

    def load_distributed(self, path: Path, state: Mapping[str, object]) -> Loaded:
        """Load into this process's shards, independent of the saved layout."""


def find_peer(name: str) -> Peer:
    """Return a new peer.

    Args:
        name: the class's name, such as ``package.module:Class``.

    Raises: ValueError for a name of no class, or of a class without the methods.
    """
    module, _, attribute = name.partition(":")
    try:
        made = getattr(importlib.import_module(module), attribute)()
    except (ImportError, AttributeError, TypeError) as error:
        raise ValueError(f"no peer {name!r}: {error}; name it as package.module:Class") from error
    if not isinstance(made, Peer):
        # A wrong name.
        raise ValueError(f"{name!r} is no peer: it needs describe(), save() and load()")  # noqa: TRY004
    return made
