"""The trainer's connection to its saver, a process or a thread. Sends never block the caller.

`on_lost` reports the end of a link once, also if an error in one of its threads ended the link. A
thread that ends without a message is found by `failure`, which every wait for a save calls
regularly.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any, Final, TypeAlias

from ckptfmt.errors import CkptError, Code, err
from ckptfmt.run.node_cache import Cache
from ckptfmt.saving.saver import Saver
from ckptfmt.store import Address
from ckptfmt.store.protocol import Store
from ckptfmt.write.helper_process import start_helper
from ckptfmt.write.slot import Slot

#: Longest time between the end of a saver process's channel and the end of the process, in seconds.
_END_S: Final = 5.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """The end of a link.

    Attributes:
        error: reason of the end.
        has_ended: whether the saver is known to have ended. If not, the saver may still read the
            slots.
    """

    error: CkptError
    has_ended: bool


_OnMessage: TypeAlias = "Callable[[dict[str, Any]], None]"
_OnLost: TypeAlias = Callable[[Lost], None]


class ProcessLink:
    """A saver process ``python -m ckptfmt.saving.saver`` with its own session and null streams.

    Args:
        address: address of the run (`ckptfmt.store.address_of`); None if each request names its
            place.
        cache: node cache for saves of the run; None for none.
        nice: increment of the saver process's niceness.
        on_message: called in a thread with each message of the saver.
        on_lost: called once in a thread, when the saver has ended or the connection is broken.

    Raises: CommitError(SAVER_LOST) if the process can't be started.
    """

    def __init__(
        self,
        address: Address | None,
        *,
        cache: Cache | None = None,
        nice: int,
        on_message: _OnMessage,
        on_lost: _OnLost,
    ) -> None:
        try:
            self._process, self._channel = start_helper("ckptfmt.saving.saver")
        except OSError as error:
            raise _not_started(error) from error
        self._on_message = on_message
        self._on_lost = on_lost
        self._is_closing = False
        #: The exception that ended a thread of this link.
        self._problem: BaseException | None = None
        self._outgoing: queue.SimpleQueue[tuple[dict[str, Any], Slot | None] | None] = (
            queue.SimpleQueue()
        )
        opening = {"type": "open", "address": address, "nice": nice, "trainer_pid": os.getpid()}
        opening["cache"] = None if cache is None else cache.as_dict()
        self._outgoing.put((opening, None))
        self._sender = threading.Thread(target=self._send_all, name="ckptfmt-send", daemon=True)
        self._receiver = threading.Thread(
            target=self._receive_all, name="ckptfmt-receive", daemon=True
        )
        try:
            self._sender.start()
            self._receiver.start()
        except BaseException as error:
            self._is_closing = True
            self._outgoing.put(None)
            self._channel.shut_down()
            raise (_not_started(error) if isinstance(error, RuntimeError) else error) from error

    @property
    def pid(self) -> int:
        """The saver's process id."""
        return self._process.pid

    def add_slot(self, number: int, slot: Slot) -> None:
        """Send a slot to the saver, which answers ``ready``."""
        self._outgoing.put(
            ({"type": "slot", "slot": number}, slot)
        )  # the queue keeps the slot alive

    def send(self, message: dict[str, Any]) -> None:
        """Queue a message for the saver. The end of the saver loses queued messages."""
        self._outgoing.put((message, None))

    def failure(self) -> CkptError | None:
        """Return the error that broke the connection; None while both threads live."""
        if self._is_closing or (self._sender.is_alive() and self._receiver.is_alive()):
            return None
        if self._problem is None and self._process.poll() is None:
            return err(
                Code.SAVER_LOST,
                f"a thread of the connection to the saver process (pid {self.pid}) has ended",
            )
        return self._why()

    def drop(self) -> None:
        """End the connection without waiting for the saver's end.

        The saver finishes the saves with a complete snapshot, abandons incomplete saves, and ends.
        """
        self._outgoing.put(None)
        self._channel.shut_down()
        if not self._receiver.is_alive():  # else the receiver cleans up
            self._reap()

    def close(self, timeout_s: float, *, drain_s: float = 0.0) -> bool:
        """End the connection, and wait for the saver to finish all saves and end.

        Args:
            timeout_s: longest wait for the saver's end, in seconds.
            drain_s: longest wait until all messages are sent, if longer than `timeout_s`. Unsent
                messages are lost.

        Returns: False if the saver is still running.
        """
        self._is_closing = True
        self._outgoing.put(None)
        self._sender.join(max(timeout_s, drain_s))
        self._channel.shut_down()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        for thread in (self._sender, self._receiver):
            thread.join(timeout_s)
        if not self._sender.is_alive() and not self._receiver.is_alive():
            self._channel.close()
        if self._process.returncode is None:
            self._reap()
            return False
        return True

    def _send_all(self) -> None:
        try:
            while (item := self._outgoing.get()) is not None:
                message, slot = item
                self._channel.send(message, fd=None if slot is None else slot.fd)
        except BaseException as error:  # noqa: BLE001
            self._problem = self._problem or error
            self._channel.shut_down()  # messages from the saver are still received

    def _receive_all(self) -> None:
        try:
            while (received := self._channel.receive()) is not None:
                self._on_message(received[0])
        except BaseException as error:  # noqa: BLE001
            self._problem = self._problem or error
            self._channel.shut_down()
        # If the saver closed the channel, the process ends soon.
        has_ended = self._has_ended(
            0.0 if self._problem is not None or self._is_closing else _END_S
        )
        self._on_lost(Lost(error=self._why(), has_ended=has_ended))
        if not self._is_closing:
            self._clean_up()

    def _has_ended(self, timeout_s: float) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        return self._process.returncode is not None

    def _why(self) -> CkptError:
        problem = self._problem
        code = self._process.returncode
        pid = self._process.pid
        if problem is not None and not isinstance(problem, ConnectionError):
            error = err(
                Code.SAVER_LOST,
                (
                    f"the connection to the saver (pid {pid}) broke: {type(problem).__qualname__}:"
                    f" {problem}"
                ),
            )
            error.__cause__ = problem
            return error
        ending = "ended" if code is None else f"exited with code {code}"
        return err(Code.SAVER_LOST, f"the saver process (pid {pid}) {ending}")

    def _clean_up(self) -> None:
        """Release the threads, the descriptor and the process entry of an ended saver."""
        self._outgoing.put(None)
        self._channel.shut_down()
        self._sender.join()
        self._process.wait()
        self._channel.close()

    def _reap(self) -> None:
        """Wait in a thread for the end of a running saver process."""
        threading.Thread(target=self._process.wait, name="ckptfmt-reap", daemon=True).start()


def _not_started(error: BaseException) -> CkptError:
    remedy = "Pass saver='thread' where no process can be started."
    return err(
        Code.SAVER_LOST,
        f"the saver process can't be started: {error}",
        where=sys.executable,
        remedy=remedy,
    )


class ThreadLink:
    """A saver in a thread of this process. The thread ends with the process.

    Args:
        store: store rooted at the run; None if each request names its place.
        cache: node cache for saves of the run; None for none.
        on_message: called in a thread with each message of the saver.
        on_lost: called once in a thread, when the saver no longer handles messages.
    """

    def __init__(
        self,
        store: Store | None,
        *,
        cache: Cache | None = None,
        on_message: _OnMessage,
        on_lost: _OnLost,
    ) -> None:
        self._on_message = on_message
        self._on_lost = on_lost
        self._is_closing = False
        self._incoming: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._handle_all, name="ckptfmt-messages", daemon=True
        )
        self._saver = Saver(store, on_message, cache=cache)
        try:
            self._thread.start()
        except BaseException:
            self._saver.finish(0.0)
            raise

    def add_slot(self, number: int, slot: Slot) -> None:
        """Give a slot to the saver, which answers ``ready``."""
        self._saver.add_slot(number, slot)
        self._on_message({"type": "ready", "slot": number})

    def send(self, message: dict[str, Any]) -> None:
        """Queue a message for the saver."""
        self._incoming.put(message)

    def failure(self) -> CkptError | None:
        """Return the error that broke the connection; None while the threads live."""
        # After `close` the message thread ends as planned, so that only the saver's own thread
        # counts.
        is_well = self._saver.is_alive() and (self._is_closing or self._thread.is_alive())
        return None if is_well else err(Code.SAVER_LOST, "a thread of the saver has ended")

    def drop(self) -> None:
        """End the connection without waiting; incomplete saves are abandoned."""
        self._incoming.put(None)
        self._saver.give_up(
            err(Code.SAVER_LOST, "the trainer has ended its connection to the saver")
        )
        self._saver.finish(0.0)

    def close(self, timeout_s: float, *, drain_s: float = 0.0) -> bool:
        """Wait for the saver to finish all saves. Returns: False if the saver is still running."""
        self._is_closing = True
        self._incoming.put(None)
        self._thread.join(max(timeout_s, drain_s))
        return self._saver.finish(timeout_s)

    def _handle_all(self) -> None:
        try:
            while (message := self._incoming.get()) is not None:
                self._saver.handle(message)
        except BaseException as problem:  # noqa: BLE001
            error = err(
                Code.SAVER_LOST,
                f"the saver failed at a message: {type(problem).__qualname__}: {problem}",
            )
            error.__cause__ = problem
            self._saver.give_up(error)
            self._on_lost(Lost(error=error, has_ended=False))


#: A saver's connection.
Link: TypeAlias = ProcessLink | ThreadLink
