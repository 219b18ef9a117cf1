"""Recorders: what a run did to a store, in the order in which it was done, for those who ask what a crash would leave.

A crash-state explorer takes a `Log` and enumerates what may be on the disk after a power cut at
each point of it. A `gate` is asked before each operation: one that waits lets a scheduler
interleave actors, one that raises stops them.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable
from typing import Final

from ckptfmt.store.posix import PosixCalls
from ckptfmt.store.protocol import Store
from tests.stores.hooked import OK, HookedCalls, HookedStore, Operation

#: The `Operation.op` of a mark: here an actor told somebody that something is done. The label is
#: its path.
ACK: Final = "ack"

Gate = Callable[[Operation], None]

#: The system calls that leave a trace on a disk; those that only look aren't recorded.
_LASTING: Final = frozenset(
    {
        "mkdir",
        "open_new",
        "write",
        "write_at",
        "preallocate",
        "truncate",
        "fsync",
        "fsync_directory",
    }
    | {"link", "rename_noreplace", "rename", "unlink", "rmdir"}
)


class Log:
    """Operations in the order in which they ended, of all actors that share the log. Thread-safe."""

    def __init__(self) -> None:
        self._operations: list[Operation] = []
        self._lock = threading.Lock()

    def append(self, operation: Operation) -> None:
        """Add an operation at the end."""
        with self._lock:
            self._operations.append(operation)

    def ack(self, label: str, *, who: str = "") -> None:
        """Mark that from here on somebody relies on what was done: a crash must not take it away."""
        self.append(Operation(ACK, label, who=who, outcome=OK))

    @property
    def operations(self) -> tuple[Operation, ...]:
        """All operations so far."""
        with self._lock:
            return tuple(self._operations)


class Recorder(HookedStore):
    """A store that records every operation on the store inside, reads and failed ones too.

    Contents are kept for ``create`` and ``replace``; for a create that lost, `Operation.outcome`
    says so.

    Args:
        inner: the store to record.
        log: where to; a new one if it isn't given.
        who: the actor, for each operation.
        gate: called before each operation.

    >>> from ckptfmt.store.memory import MemoryStore
    >>> recorder = Recorder(MemoryStore(), who="writer 0")
    >>> recorder.at("run").create("run.json", [b"{}"])
    >>> recorder.log.operations
    (Operation(op='create', path='run/run.json', ..., data=b'{}', who='writer 0', outcome='ok',
    ...),)
    """

    def __init__(
        self, inner: Store, *, log: Log | None = None, who: str = "", gate: Gate | None = None
    ) -> None:
        super().__init__(inner)
        self.log = Log() if log is None else log
        self._who = who
        self._gate = gate

    def before(self, operation: Operation) -> None:
        """Ask the gate."""
        if self._gate:
            self._gate(dataclasses.replace(operation, who=self._who))

    def after(self, operation: Operation) -> None:
        """Record the operation."""
        self.log.append(dataclasses.replace(operation, who=self._who))


class RecordingCalls(HookedCalls):
    """System calls of a `LocalStore` that are recorded if they succeed and may change what is on the disk.

    The gate is asked before every call, those that only look too, maybe in a thread of the store's.
    Each ``write`` is behind the last one of its file, a ``write_at`` tells its place. A file is
    named by the path under which it was created. Paths are relative to `base`; what is done outside
    of it (fsync of the root's ancestors) isn't recorded.

    Args:
        base: the root of the store, or a directory above it.
        log: where to; a new one if it isn't given.
        who: the actor, for each operation.
        gate: called before each operation.
        inner: the calls to wrap.
    """

    def __init__(
        self,
        base: str | os.PathLike[str],
        *,
        log: Log | None = None,
        who: str = "",
        gate: Gate | None = None,
        inner: PosixCalls | None = None,
    ) -> None:
        super().__init__(base, inner=inner)
        self.log = Log() if log is None else log
        self._who = who
        self._gate = gate

    def before(self, operation: Operation) -> None:
        """Ask the gate."""
        if self._gate:
            self._gate(dataclasses.replace(operation, who=self._who))

    def after(self, operation: Operation) -> None:
        """Record the call if it may have changed the disk."""
        if (
            operation.op in _LASTING
            and operation.outcome == OK
            and not operation.path.startswith("/")
        ):
            self.log.append(dataclasses.replace(operation, who=self._who))
