"""A save that goes on beside the training, as its caller sees it."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from typing import Any, Final, Self

from ckptfmt.documents.durability import HOME
from ckptfmt.documents.manifest import Manifest
from ckptfmt.errors import CkptError, Code, err
from ckptfmt.saver.request import OF_MANIFEST

_LOG: Final = logging.getLogger("ckptfmt")
#: The states of a save, in this order. FAILED and SKIPPED are the other ends.
STATES: Final = ("STAGING", "STAGED", "WRITTEN", "COMMITTED")
#: After how many seconds of waiting a signal, or a thread that ended without a word, is noticed at the latest.
_NAP_S: Final = 0.5


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport:
    """The report of a save.

    Attributes:
        path: where the checkpoint is.
        digest: of its manifest: its name.
        step: training steps done.
        nbytes: size of all tensors in bytes, each counted once.
        writer_count: how many writers it took.
        profile: ``full``, or ``delta``.
        stored_nbytes: size of the tensor bytes that the checkpoint stores itself, its bases left out, in bytes.
        reason: why this process's share was written in full, or as a delta.
        durability: where its files are at least: "home"; "node" where they may be in caches of nodes only.
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
        return cls(path=path, step=origin.step, writer_count=origin.writer_count, reason=reason, **told)


def tell_committed(writer: int, report: SaveReport, seconds: float) -> None:
    """Say that a checkpoint is committed: its step, size, the seconds that it took from the call on, and the rate."""
    size = bytes_text(report.stored_nbytes)
    if report.profile != "full":
        size += f" of {bytes_text(report.nbytes)}"
    if report.durability != HOME:
        size += f" in caches alone (durability {report.durability})"
    rate = f" ({bytes_text(report.stored_nbytes / seconds)}/s)" if seconds > 0 else ""
    level = logging.INFO if writer == 0 else logging.DEBUG
    _LOG.log(level, "step %d COMMITTED: %s in %.2f s%s: %s", report.step, size, seconds, rate, report.path)


def bytes_text(nbytes: float) -> str:
    """Return a number of bytes for people, in the units of the commands.

    >>> bytes_text(1_600_000_000), bytes_text(24_000), bytes_text(7)
    ('1.5 GiB', '23.4 KiB', '7 B')
    """
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if nbytes >= 1 << power:
            return f"{nbytes / (1 << power):.1f} {unit}"
    return f"{nbytes:.0f} B"


class Callbacks:
    """Functions that are called when a save is over: one after the other, in a thread that lives while there are any.

    Whoever tells of the end of a save goes on at once. A function that blocks keeps only later ones waiting; what it
    raises is logged. In a fork of this process nothing is called that was asked for before.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        # Entered itself, and not by way of the condition: an interrupt can't come between its being taken and `with`.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._calls: collections.deque[tuple[Callable[[Any], object], object]] = collections.deque()
        self._thread: threading.Thread | None = None

    def add(self, function: Callable[[Any], object], argument: object) -> None:
        """Have a function called, once."""
        if os.getpid() != self._pid:
            Callbacks.__init__(self)
        with self._lock:
            self._calls.append((function, argument))
        self._start()

    def wait(self, timeout_s: float) -> bool:
        """Wait until all calls are done, and say whether they are; from within one of them, don't wait."""
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
        """Start the thread, if there is something to call and nobody at it."""
        with self._lock:
            if not self._calls or (self._thread is not None and self._thread.is_alive()):
                return
            thread = threading.Thread(target=self._call_all, name="ckptfmt-callbacks", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # there are too many; whoever adds one or waits tries again
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
            except BaseException:  # noqa: BLE001 - whatever it is, the next one is called
                _LOG.exception("a callback of a save raised: %r", function)


class SaveHandle:
    """One save of a `Checkpointer` or a `ckptfmt.Saver`.

    States: ``STAGING`` the snapshot is being copied; ``STAGED`` it is complete and in the saver's hands: a trainer that
    dies now loses nothing; ``WRITTEN`` this process's share is durable; ``COMMITTED`` the checkpoint is, for all
    processes. ``FAILED``: there is no checkpoint, or nobody here will learn of it (SAVER_LOST); `error` says why.
    ``SKIPPED``: no slot was free, and the policy is to skip.

    Attributes:
        step: training steps done.
        path: directory of the checkpoint.
        blocked_s: how long the training stood still for it, in seconds: in `Checkpointer.save`, and at the guard.
        times: seconds from the call to each state that was reached.
        error: why it failed.
        report: its `SaveReport`, once it is committed.
    """

    def __init__(
        self, *, step: int, path: str, begin_s: float, state: str = "STAGING", callbacks: Callbacks | None = None
    ) -> None:
        self.step = step
        self.path = path
        self.blocked_s = 0.0
        self.times: dict[str, float] = {}
        self.error: CkptError | None = None
        self.report: SaveReport | None = None
        self._begin_s = begin_s
        self._state = state
        self._is_copied = self._is_over = state == "SKIPPED"
        self._look: Callable[[], None] = _nothing
        self._callbacks = Callbacks() if callbacks is None else callbacks
        #: What is to be called at the end, by the state that this is.
        self._at_end: list[tuple[str, Callable[[Any], object]]] = []
        self._is_failure_taken = False
        # Entered itself, and not by way of the condition: an interrupt can't come between its being taken and `with`.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)

    def __repr__(self) -> str:
        return f"SaveHandle(step={self.step}, state={self.state!r}, path={self.path!r})"

    @property
    def state(self) -> str:
        """The state that it has reached."""
        return self._state

    @property
    def is_copied(self) -> bool:
        """Whether no tensor is read for it any more."""
        return self._is_copied

    @property
    def is_through(self) -> bool:
        """Whether its slot is needed no more: written or failed, and no thread fills it."""
        return self._is_copied and (self._state not in STATES or self._has_reached("WRITTEN"))

    @property
    def is_over(self) -> bool:
        """Whether nothing is done for it any more, clean-up included."""
        return self._is_copied and self._is_over

    @property
    def is_failure_taken(self) -> bool:
        """Whether somebody is told of a failure by `on_failed`, so that no later call raises it."""
        return self._is_failure_taken

    def on_committed(self, function: Callable[[SaveReport], object]) -> Self:
        """Have a function called with the report, once, when the save is committed; soon, if it is already.

        It is called in a thread for callbacks, and holds up nothing but later callbacks. Its errors are logged. The
        `close` that ends the saves waits for it; a process that ends without doesn't.
        """
        return self._call_at("COMMITTED", function)

    def on_failed(self, function: Callable[[CkptError], object]) -> Self:
        """Have a function called with the error, once, when the save fails; soon, if it has failed already.

        Called as by `on_committed`. The failure is no longer raised by the next save or `close`. With several
        processes every one of them passes a function: a failure that one of them doesn't take is raised on all.
        """
        self._is_failure_taken = True
        return self._call_at("FAILED", function)

    def _call_at(self, state: str, function: Callable[[Any], object]) -> Self:
        with self._lock:
            self._at_end.append((state, function))
            self._call_back()
        return self

    def _call_back(self) -> None:
        """Hand over what is to be called in the state that is reached, if it is an end; with the lock held."""
        argument = self.report if self._state == "COMMITTED" else self.error
        if self._state in ("COMMITTED", "FAILED", "SKIPPED"):
            due, self._at_end = self._at_end, []
            for state, function in due:
                if state == self._state:
                    self._callbacks.add(function, argument)

    def wait(self, state: str = "COMMITTED", timeout_s: float | None = None) -> SaveReport | None:
        """Wait until the save has reached a state.

        Args:
            state: one of `STATES`.
            timeout_s: how long at most, in seconds; None for as long as it takes.

        Returns: the report, once it is committed; None before, and for a skipped save.
        Raises: the error of the save; CommitError(SAVE_PENDING) at the timeout: it goes on.
        """
        if state not in STATES:
            raise err(Code.ARGUMENT, f"{state!r} isn't one of {', '.join(STATES)}", where="state=")
        self._wait_for(lambda: self._has_reached(state), state, timeout_s)
        return self.report

    def wait_staged(self, timeout_s: float | None = None) -> None:
        """Wait until the save is STAGED: every tensor may be changed, and the death of this process loses nothing.

        Raises: the error of the save; CommitError(SAVE_PENDING) at the timeout. Spec: REQ-CMT-030.
        """
        self._wait_for(lambda: self._is_copied and self._has_reached("STAGED"), "STAGED", timeout_s)

    def wait_copied(self, timeout_s: float | None = None) -> None:
        """Wait until every tensor is copied and may be changed, whether or not the saver has the snapshot yet.

        Raises: the error of the save; CommitError(SAVE_PENDING) at the timeout.
        """
        self._wait_for(lambda: self._is_copied, "STAGED", timeout_s)

    def wait_over(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is done for this save any more, clean-up included; say whether that is so."""
        return self._holds_in_time(lambda: self.is_over, timeout_s)

    def _wait_for(self, is_there: Callable[[], bool], state: str, timeout_s: float | None) -> None:
        if not self._holds_in_time(lambda: self._state in ("FAILED", "SKIPPED") or is_there(), timeout_s):
            detail = f"the save is {self._state}, and not yet {state} after {timeout_s:g} s"
            raise err(Code.SAVE_PENDING, detail, where=self.path)
        if self.error is not None:
            raise self.error

    def _holds_in_time(self, is_there: Callable[[], bool], timeout_s: float | None) -> bool:
        """Wait until something holds, and say whether it does."""
        look = lambda: self._look()  # noqa: E731, PLW0108 - it is told once the save has begun, while somebody waits
        return wait_until(is_there, lock=self._lock, changed=self._changed, look=look, timeout_s=timeout_s)

    def _has_reached(self, state: str) -> bool:
        return self._state in STATES and STATES.index(self._state) >= STATES.index(state)

    # What the checkpointer and its saver tell, from any thread. What comes late, or after a failure, changes nothing.

    def tell_begun(self, look: Callable[[], None]) -> None:
        """Take note of what finds that those have ended who do this save; who waits for it calls that now and then."""
        self._look = look

    def tell_copied(self) -> None:
        """Take note that no tensor is read any more, whether or not the snapshot is complete."""
        with self._lock:
            self._is_copied = True
            self._note_end()
            self._changed.notify_all()

    def tell_state(self, state: str, report: SaveReport | None = None) -> None:
        """Take note of a state."""
        with self._lock:
            if self._state in STATES and not self._has_reached(state):
                self._state = state
                self.times[state] = time.monotonic() - self._begin_s
                self.report = report
                self._call_back()
                self._changed.notify_all()

    def tell_over(self, removed: tuple[str, ...] = ()) -> None:
        """Take note that all is done, and what retention let go."""
        with self._lock:
            self._is_over = True
            self._note_end()
            if self.report is not None:
                self.report = dataclasses.replace(self.report, removed=removed)
            self._changed.notify_all()

    def tell_failed(self, error: CkptError) -> bool:
        """Take note of a failure; False if the save was over before, or is committed."""
        with self._lock:
            changes = self._state in STATES and self._state != "COMMITTED"
            if changes:
                self._state, self.error = "FAILED", error
                self._call_back()
            self._is_over = True
            self._note_end()
            self._changed.notify_all()
            return changes

    def _note_end(self) -> None:
        if self.is_over:
            self._look = _nothing  # and keep nobody alive


def _nothing() -> None:
    """Look at nothing."""


def wait_until(
    is_there: Callable[[], bool],
    *,
    lock: contextlib.AbstractContextManager[object],
    changed: threading.Condition,
    look: Callable[[], None],
    timeout_s: float | None,
) -> bool:
    """Wait until something holds, and say whether it does.

    Args:
        is_there: asked with the lock held.
        lock: that of `changed`. It is entered itself: an interrupt can't come between its being taken and `with`.
        changed: notified when it may hold.
        look: called now and then without the lock. The system may give a signal to another thread, and then it wakes
            nobody here; and a thread that should have notified may have ended, which this finds.
        timeout_s: how long at most, in seconds; None for as long as it takes.
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
