"""The handle of a save in the background, for the caller of the save."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, Self

from ckptfmt.documents.durability import HOME
from ckptfmt.documents.manifest import Manifest
from ckptfmt.errors import CkptError, Code, err
from ckptfmt.saving.request import OF_MANIFEST

_LOG: Final = logging.getLogger("ckptfmt")
#: The states of a save, in this order. FAILED and SKIPPED are the other final states.
STATES: Final = ("STAGING", "STAGED", "WRITTEN", "COMMITTED")
#: Longest time until a wait notices a signal, or a thread that ended without a message, in seconds.
_NAP_S: Final = 0.5


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport:
    """The report of a committed save.

    Attributes:
        path: path of the checkpoint.
        digest: digest of the manifest.
        step: number of training steps done.
        nbytes: size of all tensors in bytes, each counted once.
        writer_count: number of writers.
        profile: ``full`` or ``delta``.
        stored_nbytes: size of the tensor bytes in the checkpoint's own files, without its bases.
        reason: reason why this process's share was written in full or as a delta.
        durability: "home" if all files are in the run's own store; "peers" or "node" if some files
            may be in caches of nodes only.
        removed: checkpoints of the run that retention has removed so far.
    """

    path: str
    digest: str
    step: int
    nbytes: int
    writer_count: int
    profile: str = "full"
    stored_nbytes: int = 0
    reason: str = ""
    durability: str = HOME
    removed: tuple[str, ...] = ()

    @classmethod
    def of(cls, manifest: Manifest, *, path: str, reason: str = "") -> SaveReport:
        """Return the report of a committed save."""
        told = {name: getattr(manifest, name) for name in OF_MANIFEST}
        origin = manifest.origin
        return cls(
            path=path, step=origin.step, writer_count=origin.writer_count, reason=reason, **told
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SaveEvent:
    """A change of a save's state, for the function ``on_save`` of `Checkpointer`.

    Attributes:
        kind: "staged" once the snapshot is complete and in the saver's hands; "committed" once the
            checkpoint is durable for all processes; "failed" if there is no checkpoint, or if the
            outcome stays unknown in this process (`error` has SAVER_LOST or COMMIT_UNKNOWN), or if
            the checkpoint lies at one of several homes and doesn't count (FENCED or HOMES_AWAY). A
            skipped save has no event.
        step: number of training steps done.
        path: directory of the checkpoint.
        seconds: seconds from the call of the save to each state reached by now, such as
            ``{"STAGED": 0.2, "WRITTEN": 1.5, "COMMITTED": 1.6}``.
        blocked_s: time for which the save has blocked the training so far, in seconds.
        nbytes: size of all tensors in bytes, each counted once; None unless committed.
        stored_nbytes: size of the tensor bytes in the checkpoint's own files, without its bases;
            None unless committed.
        error: error of a failed save; else None.
    """

    kind: Literal["staged", "committed", "failed"]
    step: int
    path: str
    seconds: Mapping[str, float]
    blocked_s: float = 0.0
    nbytes: int | None = None
    stored_nbytes: int | None = None
    error: CkptError | None = None


#: The states that `SaveHandle.on_event` reports, with the kind of their events.
_KINDS: Final[Mapping[str, Literal["staged", "committed", "failed"]]] = {
    "STAGED": "staged",
    "COMMITTED": "committed",
    "FAILED": "failed",
}


def tell_committed(writer: int, report: SaveReport, seconds: float) -> None:
    """Log that a checkpoint is committed, with step, size, duration and rate.

    Args:
        writer: number of this process; the line is INFO for 0, else DEBUG.
        seconds: duration from the call of `save` to the commit.
    """
    size = bytes_text(report.stored_nbytes)
    if report.profile != "full":
        size += f" of {bytes_text(report.nbytes)}"
    if report.durability != HOME:
        size += f" in caches alone (durability {report.durability})"
    rate = f" ({bytes_text(report.stored_nbytes / seconds)}/s)" if seconds > 0 else ""
    level = logging.INFO if writer == 0 else logging.DEBUG
    _LOG.log(
        level,
        "step %d COMMITTED: %s in %.2f s%s: %s",
        report.step,
        size,
        seconds,
        rate,
        report.path,
    )


def bytes_text(nbytes: float) -> str:
    """Return a number of bytes as text for people, in the units of the commands.

    >>> bytes_text(1_600_000_000), bytes_text(24_000), bytes_text(7)
    ('1.5 GiB', '23.4 KiB', '7 B')
    """
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if nbytes >= 1 << power:
            return f"{nbytes / (1 << power):.1f} {unit}"
    return f"{nbytes:.0f} B"


class Callbacks:
    """Functions to call at the end of saves, one after the other in a thread.

    The thread lives while calls are due, so the end of a save never waits for a function. A
    function that blocks delays the later functions only. Exceptions are logged. A fork of this
    process drops the functions that were added before the fork.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        # Entered directly instead of through the condition: an interrupt can't come between the
        # acquisition and the `with` block.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._calls: collections.deque[tuple[Callable[[Any], object], object]] = collections.deque()
        self._thread: threading.Thread | None = None

    def add(self, function: Callable[[Any], object], argument: object) -> None:
        """Add a function to call once with an argument."""
        if os.getpid() != self._pid:
            Callbacks.__init__(self)
        with self._lock:
            self._calls.append((function, argument))
        self._start()

    def wait(self, timeout_s: float) -> bool:
        """Wait until all calls are done; from within a call, return at once.

        Returns: whether all calls were done in time.
        """
        if threading.current_thread() is self._thread or os.getpid() != self._pid:
            return True
        return wait_until(
            lambda: not self._calls and self._thread is None,
            lock=self._lock,
            changed=self._changed,
            look=self._start,
            timeout_s=timeout_s,
        )

    def _start(self) -> None:
        """Start the thread, if a call is due and no thread runs."""
        with self._lock:
            if not self._calls or (self._thread is not None and self._thread.is_alive()):
                return
            thread = threading.Thread(target=self._call_all, name="ckptfmt-callbacks", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # too many threads; the next `add` or `wait` tries again
                _LOG.warning("callbacks of saves wait: %s", error)
            else:
                self._thread = thread

    def _call_all(self) -> None:
        while True:
            with self._lock:
                if not self._calls:
                    self._thread = None
                    self._changed.notify_all()
                    return
                function, argument = self._calls.popleft()
            try:
                function(argument)
            except BaseException:  # noqa: BLE001
                _LOG.exception("a callback of a save raised: %r", function)


class SaveHandle:
    """A save of a `Checkpointer` or a `ckptfmt.PathSaver`.

    The states are:

    - ``STAGING``: the snapshot is being copied.
    - ``STAGED``: the snapshot is complete and in the saver's hands. The death of the trainer loses
      nothing from now on.
    - ``WRITTEN``: this process's share is durable.
    - ``COMMITTED``: the checkpoint is durable for all processes.
    - ``FAILED``: there is no checkpoint, or the outcome stays unknown here (SAVER_LOST). `error`
      has the reason.
    - ``SKIPPED``: no slot was free, and the policy is to skip; or a snapshot in memory was
      replaced before it was written.

    Attributes:
        step: number of training steps done.
        path: directory of the checkpoint.
        state: state of the save.
        is_copied: whether the live tensors are no longer read for the save.
        is_failure_taken: whether `on_failed` was called, so that no later call raises the failure.
        blocked_s: time for which the save blocked the training, in seconds: in `Checkpointer.save`
            and at the guard.
        times: seconds from the call of `save` to each reached state; for a snapshot that is
            written, seconds from the begin of the write to ``WRITTEN`` and ``COMMITTED``.
        error: error of a failed save; else None.
        report: `SaveReport` of a committed save; else None.
    """

    def __init__(
        self,
        *,
        step: int,
        path: str,
        begin_s: float,
        state: str = "STAGING",
        callbacks: Callbacks | None = None,
        look: Callable[[], None] | None = None,
    ) -> None:
        self.step = step
        self.path = path
        self.blocked_s = 0.0
        self.times: dict[str, float] = {}
        self.error: CkptError | None = None
        self.report: SaveReport | None = None
        self._begin_s = begin_s
        self.state = state
        self.is_copied = self._is_over = state == "SKIPPED"
        self.is_failure_taken = False
        #: Finds failures. Waiting threads call this function regularly.
        self._look = look or _nothing
        self._callbacks = Callbacks() if callbacks is None else callbacks
        #: Functions to call at the end, each with the final state that it is for.
        self._at_end: list[tuple[str, Callable[[Any], object]]] = []
        #: Functions of this package to call at the end, without an argument.
        self._at_once: list[Callable[[], object]] = []
        #: Function for events, and the kinds of events that the function got.
        self._on_event: Callable[[SaveEvent], object] | None = None
        self._told_kinds: set[str] = set()
        # Entered directly instead of through the condition: an interrupt can't come between the
        # acquisition and the `with` block.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)

    def __repr__(self) -> str:
        return f"SaveHandle(step={self.step}, state={self.state!r}, path={self.path!r})"

    @property
    def is_through(self) -> bool:
        """Whether the slot is free: the save is written or failed, and no thread fills the slot."""
        return self.is_copied and (self.state not in STATES or self._has_reached("WRITTEN"))

    @property
    def is_over(self) -> bool:
        """Whether all work for the save is done, clean-up included."""
        return self.is_copied and self._is_over

    def on_committed(self, function: Callable[[SaveReport], object]) -> Self:
        """Call a function once with the report when the save is committed, or soon afterwards.

        The call runs in a thread for callbacks, and delays only later callbacks. Exceptions are
        logged. The `close` that ends the saves waits for the call; the end of the process doesn't.
        """
        return self._call_at("COMMITTED", function)

    def on_failed(self, function: Callable[[CkptError], object]) -> Self:
        """Call a function once with the error when the save fails, or soon afterwards.

        The call runs as for `on_committed`. The next save and `close` no longer raise the failure.
        In a job of several processes each process must pass a function: a failure that a process
        doesn't take is raised on all processes.
        """
        self.is_failure_taken = True
        return self._call_at("FAILED", function)

    def call_at_end(self, function: Callable[[], object]) -> None:
        """Call a function that doesn't block once the save is committed, has failed, or is skipped.

        Unlike the functions of users, the function runs in the thread that finds out the end.
        """
        with self._lock:
            if self.state in STATES and self.state != "COMMITTED":
                self._at_once.append(function)
                return
        function()

    def on_event(self, function: Callable[[SaveEvent], object]) -> Self:
        """Call a function with an event when the save is staged, and when it is over.

        Events of the past are handed over at once. The calls run as for `on_committed`. The
        failure is still raised by the next save or `close`.
        """
        with self._lock:
            self._on_event = function
            self._hand_over_events()
        return self

    def _hand_over_events(self) -> None:
        """Hand over the events of the reached states, each once. Needs the lock."""
        if self._on_event is None:
            return
        for state, kind in _KINDS.items():
            is_reached = state in self.times or state == self.state
            if is_reached and kind not in self._told_kinds:
                self._told_kinds.add(kind)
                report = self.report if kind == "committed" else None
                event = SaveEvent(
                    kind=kind,
                    step=self.step,
                    path=self.path,
                    seconds=dict(self.times),
                    blocked_s=self.blocked_s,
                    nbytes=None if report is None else report.nbytes,
                    stored_nbytes=None if report is None else report.stored_nbytes,
                    error=self.error,
                )
                self._callbacks.add(self._on_event, event)

    def _call_at(self, state: str, function: Callable[[Any], object]) -> Self:
        with self._lock:
            self._at_end.append((state, function))
            self._call_back()
        return self

    def _call_back(self) -> None:
        """Hand over the functions for the reached state, if it is final. Needs the lock."""
        argument = self.report if self.state == "COMMITTED" else self.error
        if self.state in ("COMMITTED", "FAILED", "SKIPPED"):
            for at_once in self._at_once:
                at_once()
            self._at_once = []
            due = self._at_end
            self._at_end = []
            for state, function in due:
                if state == self.state:
                    self._callbacks.add(function, argument)

    def wait(self, state: str = "COMMITTED", timeout_s: float | None = None) -> SaveReport | None:
        """Wait until the save has reached a state.

        Args:
            state: one of `STATES`.
            timeout_s: longest wait in seconds; None for no limit.

        Returns: the report of a committed save; None for an earlier state and for a skipped save.
        Raises: the error of the save; CommitError(SAVE_PENDING) at the timeout. After a timeout the
            save continues.
        """
        if state not in STATES:
            raise err(Code.ARGUMENT, f"{state!r} isn't one of {', '.join(STATES)}", where="state=")
        self._wait_for(lambda: self._has_reached(state), state, timeout_s)
        return self.report

    def wait_staged(self, timeout_s: float | None = None) -> None:
        """Wait until the save is STAGED.

        Then the program may change every tensor, and the death of this process loses nothing.

        Raises: the error of the save; CommitError(SAVE_PENDING) at the timeout.
        Spec: REQ-CMT-030.
        """
        self._wait_for(lambda: self.is_copied and self._has_reached("STAGED"), "STAGED", timeout_s)

    def wait_copied(self, timeout_s: float | None = None) -> None:
        """Wait until every tensor is copied and may be changed.

        The saver may still lack the complete snapshot.

        Raises: the error of the save; CommitError(SAVE_PENDING) at the timeout.
        """
        self._wait_for(lambda: self.is_copied, "STAGED", timeout_s)

    def wait_over(self, timeout_s: float | None = None) -> bool:
        """Wait until all work for this save is done, clean-up included.

        Returns: whether the work was done in time.
        """
        return self._holds_in_time(lambda: self.is_over, timeout_s)

    def _wait_for(self, is_there: Callable[[], bool], state: str, timeout_s: float | None) -> None:
        if not self._holds_in_time(
            lambda: self.state in ("FAILED", "SKIPPED") or is_there(), timeout_s
        ):
            detail = f"the save is {self.state}, and not yet {state} after {timeout_s:g} s"
            raise err(Code.SAVE_PENDING, detail, where=self.path)
        if self.error is not None:
            raise self.error

    def _holds_in_time(self, is_there: Callable[[], bool], timeout_s: float | None) -> bool:
        """Wait until a condition holds. Returns: whether the condition held in time."""
        look = lambda: self._look()  # noqa: E731, PLW0108
        return wait_until(
            is_there, lock=self._lock, changed=self._changed, look=look, timeout_s=timeout_s
        )

    def _has_reached(self, state: str) -> bool:
        return self.state in STATES and STATES.index(self.state) >= STATES.index(state)

    # The checkpointer and the saver call these methods from any thread. A message that comes late,
    # or after a failure, changes nothing.

    def tell_copied(self) -> None:
        """Record that no tensor is read any more, whether or not the snapshot is complete."""
        with self._lock:
            self.is_copied = True
            self._note_end()
            self._changed.notify_all()

    def tell_state(self, state: str, report: SaveReport | None = None) -> None:
        """Record a new state, with the report if the save is committed."""
        with self._lock:
            if self.state in STATES and not self._has_reached(state):
                self.state = state
                self.times[state] = time.monotonic() - self._begin_s
                self.report = report
                self._call_back()
                self._hand_over_events()
                self._changed.notify_all()

    def tell_over(self, removed: tuple[str, ...] = ()) -> None:
        """Record that all work is done, and the checkpoints that retention removed."""
        with self._lock:
            self._is_over = True
            self._note_end()
            if self.report is not None:
                self.report = dataclasses.replace(self.report, removed=removed)
            self._changed.notify_all()

    def tell_failed(self, error: CkptError) -> bool:
        """Record a failure; return False if the save was over or committed before."""
        with self._lock:
            changes = self.state in STATES and self.state != "COMMITTED"
            if changes:
                self.state = "FAILED"
                self.error = error
                self._call_back()
                self._hand_over_events()
            self._is_over = True
            self._note_end()
            self._changed.notify_all()
            return changes

    def tell_released(self) -> None:
        """Count the seconds to the later states from now: a snapshot in memory becomes a save."""
        with self._lock:
            self._begin_s = time.monotonic()

    def tell_skipped(self) -> None:
        """Record that the save isn't written, unless it has ended otherwise."""
        with self._lock:
            if self.state in STATES and self.state != "COMMITTED":
                self.state = "SKIPPED"
                self._call_back()
            self._is_over = True
            self._note_end()
            self._changed.notify_all()

    def _note_end(self) -> None:
        if self.is_over:
            self._look = _nothing  # so that the background isn't kept alive


def _nothing() -> None:
    """Do nothing."""


def wait_until(
    is_there: Callable[[], bool],
    *,
    lock: contextlib.AbstractContextManager[object],
    changed: threading.Condition,
    look: Callable[[], None],
    timeout_s: float | None,
) -> bool:
    """Wait until a condition holds, and return whether it held in time.

    Args:
        is_there: returns whether the condition holds; called with the lock held.
        lock: lock of `changed`. The lock is entered directly: an interrupt can't come between the
            acquisition and the `with` block.
        changed: condition variable, notified when `is_there` may have changed.
        look: called regularly without the lock. A signal may go to another thread and then wakes no
            waiting thread. A thread that should have notified may have ended; `look` finds this.
        timeout_s: longest wait in seconds; None for no limit.
    """
    end_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
    while True:
        with lock:
            if is_there():
                return True
            rest_s = end_s - time.monotonic()
            if rest_s <= 0:
                return False
            changed.wait(min(rest_s, _NAP_S))
            if is_there():
                return True
        look()
