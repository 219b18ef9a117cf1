"""Fault injectors: the N-th operation fails, once or from then on, before it is carried out or after.

A test counts up N until nothing fails any more, and so has seen every failure that a protocol can
meet.
"""

from __future__ import annotations

import dataclasses
import os
import threading

from ckptfmt.errors import Code, err
from ckptfmt.store.posix import PosixCalls
from ckptfmt.store.protocol import Store
from tests.stores.hooked import OK, HookedCalls, HookedStore, Operation


@dataclasses.dataclass(kw_only=True, slots=True)
class Fault:
    """When to fail. Shared by all views of a store. Thread-safe.

    Attributes:
        fail_at: which operation fails, counted from 1.
        sticky: whether all later ones fail too.
        applied: whether the operation is carried out before it fails: the answer is lost.
        operations: the names of those that count (see `Operation.op`); None: all.
        path_end: only operations on paths that end with this count.
        fired_count: how many have failed so far; 0 at the end of a test says that `fail_at` was
            beyond the last.
    """

    fail_at: int
    sticky: bool = False
    applied: bool = False
    operations: frozenset[str] | None = None
    path_end: str = ""
    fired_count: int = 0
    _seen_count: int = 0
    _lock: threading.Lock = dataclasses.field(default_factory=threading.Lock, repr=False)

    def is_due(self, operation: Operation) -> bool:
        """Count an operation, if it counts, and say whether it fails."""
        if self.operations is not None and operation.op not in self.operations:
            return False
        if not operation.path.endswith(self.path_end):
            return False
        with self._lock:
            self._seen_count += 1
            due = self._seen_count == self.fail_at or (
                self.sticky and self._seen_count > self.fail_at
            )
            self.fired_count += due
        return due


class FaultStore(HookedStore):
    """A store whose operations fail with the error `code` when `fault` says so.

    Args:
        inner: the store that carries out the rest.
        fault: when to fail.
        code: how; an operation that is `Fault.applied` calls for ``STORE_NO_ANSWER``.
    """

    def __init__(self, inner: Store, fault: Fault, *, code: Code = Code.STORE_IO) -> None:
        super().__init__(inner)
        self.fault = fault
        self._code = code

    def before(self, operation: Operation) -> None:
        """Fail an operation that isn't carried out."""
        if not self.fault.applied:
            self._fail_if_due(operation)

    def after(self, operation: Operation) -> None:
        """Fail an operation that was carried out."""
        if self.fault.applied and operation.outcome == OK:
            self._fail_if_due(operation)

    def _fail_if_due(self, operation: Operation) -> None:
        if self.fault.is_due(operation):
            raise err(self._code, f"injected into {operation.op}", where=operation.path)


class FaultCalls(HookedCalls):
    """System calls that fail with an errno when `fault` says so.

    Args:
        base: the root of the store; `Fault.path_end` is compared with paths relative to it.
        fault: when to fail.
        errno_value: how, such as ``errno.EIO``.
        inner: the calls that carry out the rest.
    """

    def __init__(
        self,
        base: str | os.PathLike[str],
        fault: Fault,
        *,
        errno_value: int,
        inner: PosixCalls | None = None,
    ) -> None:
        super().__init__(base, inner=inner)
        self.fault = fault
        self._errno_value = errno_value

    def before(self, operation: Operation) -> None:
        """Fail a call that isn't made."""
        if not self.fault.applied:
            self._fail_if_due(operation)

    def after(self, operation: Operation) -> None:
        """Fail a call that was made."""
        if self.fault.applied and operation.outcome == OK:
            self._fail_if_due(operation)

    def _fail_if_due(self, operation: Operation) -> None:
        if self.fault.is_due(operation):
            raise OSError(
                self._errno_value,
                f"{os.strerror(self._errno_value)} (injected into {operation.op})",
            )
