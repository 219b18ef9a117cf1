"""The trainer's way to its saver: a process of its own, or a thread here. Neither ever makes the caller wait.

Whatever ends a link, an error in one of its threads included, is told once by `on_lost`. A thread that died without a
word is found by `failure`, which every wait for a save asks now and then.
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
from ckptfmt.run.node_cache import CacheOptions
from ckptfmt.saver.saver import Saver
from ckptfmt.stage.helper_process import start_helper
from ckptfmt.stage.slot import Slot
from ckptfmt.store import Address
from ckptfmt.store.protocol import Store

#: How long the end of a saver's process may come after that of its channel, in seconds.
_END_S: Final = 5.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """How a link ended.

    Attributes:
        error: why.
        has_ended: whether the saver is known to have ended. If not, it may still read its slots.
    """

    error: CkptError
    has_ended: bool


_OnMessage: TypeAlias = "Callable[[dict[str, Any]], None]"
_OnLost: TypeAlias = Callable[[Lost], None]


class ProcessLink:
    """A process ``python -m ckptfmt.saver.saver`` in a session of its own, with null standard streams.

    Args:
        address: of the run (`ckptfmt.store.address_of`); None where each request says its place.
        cache: through which saves of the run go; None for none.
        nice: what to add to its niceness.
        on_message: called with each of its messages, in a thread.
        on_lost: called once when it is gone, or can't be talked to any more, in a thread.

    Raises: CommitError(SAVER_LOST) if it can't be started.
    """

    def __init__(
        self,
        address: Address | None,
        *,
        cache: CacheOptions | None = None,
        nice: int,
        on_message: _OnMessage,
        on_lost: _OnLost,
    ) -> None:
        try:
            self._process, self._channel = start_helper("ckptfmt.saver.saver")
        except OSError as error:
            raise _not_started(error) from error
        self._on_message, self._on_lost = on_message, on_lost
        self._is_closing = False
        #: What ended a thread of this link.
        self._problem: BaseException | None = None
        self._outgoing: queue.SimpleQueue[tuple[dict[str, Any], Slot | None] | None] = queue.SimpleQueue()
        opening = {"type": "open", "address": address, "nice": nice, "trainer_pid": os.getpid()}
        opening["cache"] = None if cache is None else cache.as_dict()
        self._outgoing.put((opening, None))
        self._sender = threading.Thread(target=self._send_all, name="ckptfmt-send", daemon=True)
        self._receiver = threading.Thread(target=self._receive_all, name="ckptfmt-receive", daemon=True)
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
        """The saver's process."""
        return self._process.pid

    def add_slot(self, number: int, slot: Slot) -> None:
        """Hand over a slot; the saver answers ``ready``."""
        self._outgoing.put(({"type": "slot", "slot": number}, slot))  # which it keeps alive until it is sent

    def send(self, message: dict[str, Any]) -> None:
        """Put a message on its way. It is lost if the saver is."""
        self._outgoing.put((message, None))

    def failure(self) -> CkptError | None:
        """Return why no message can go to or come from the saver any more; None as long as the threads live."""
        if self._is_closing or (self._sender.is_alive() and self._receiver.is_alive()):
            return None
        if self._problem is None and self._process.poll() is None:
            return err(Code.SAVER_LOST, f"a thread of the connection to the saver process (pid {self.pid}) has ended")
        return self._why()

    def drop(self) -> None:
        """Have nothing to do with the saver any more, without waiting for its end.

        The saver finishes the saves whose snapshot is complete, gives up the others, and ends.
        """
        self._outgoing.put(None)
        self._channel.shut_down()
        if not self._receiver.is_alive():  # which cleans up otherwise
            self._reap()

    def close(self, timeout_s: float, *, drain_s: float = 0.0) -> bool:
        """Let the saver end when it has nothing to do any more.

        Args:
            timeout_s: how long to wait for its end, in seconds.
            drain_s: how long to wait before until it has all messages, if that is longer: what it hasn't is lost.

        Returns: False if it hasn't ended by then, and goes on.
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
        except BaseException as error:  # noqa: BLE001 - told by the receiver, whatever it is
            self._problem = self._problem or error
            self._channel.shut_down()  # what the saver has said already is still received

    def _receive_all(self) -> None:
        try:
            while (received := self._channel.receive()) is not None:
                self._on_message(received[0])
        except BaseException as error:  # noqa: BLE001 - told below, whatever it is
            self._problem = self._problem or error
            self._channel.shut_down()
        # Where it was the saver that ended the talk, its process is about to end.
        has_ended = self._has_ended(0.0 if self._problem is not None or self._is_closing else _END_S)
        self._on_lost(Lost(error=self._why(), has_ended=has_ended))
        if not self._is_closing:
            self._clean_up()

    def _has_ended(self, timeout_s: float) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        return self._process.returncode is not None

    def _why(self) -> CkptError:
        problem, code, pid = self._problem, self._process.returncode, self._process.pid
        if problem is not None and not isinstance(problem, ConnectionError):
            error = err(
                Code.SAVER_LOST,
                f"the connection to the saver (pid {pid}) broke: {type(problem).__qualname__}: {problem}",
            )
            error.__cause__ = problem
            return error
        ending = "ended" if code is None else f"exited with code {code}"
        return err(Code.SAVER_LOST, f"the saver process (pid {pid}) {ending}")

    def _clean_up(self) -> None:
        """Leave neither thread nor descriptor nor dead child of a saver that ended by itself."""
        self._outgoing.put(None)
        self._channel.shut_down()
        self._sender.join()
        self._process.wait()
        self._channel.close()

    def _reap(self) -> None:
        """Let somebody take note of the end of a process that goes on without us."""
        threading.Thread(target=self._process.wait, name="ckptfmt-reap", daemon=True).start()


def _not_started(error: BaseException) -> CkptError:
    remedy = "Pass saver='thread' where no process can be started."
    return err(Code.SAVER_LOST, f"the saver process can't be started: {error}", where=sys.executable, remedy=remedy)


class ThreadLink:
    """A saver in a thread of this process; it ends with it.

    Args:
        store: rooted at the run; None where each request says its place.
        cache: through which saves of the run go; None for none.
        on_message: called with each of the saver's messages, in a thread.
        on_lost: called once when the saver can't be told anything any more, in a thread.
    """

    def __init__(
        self, store: Store | None, *, cache: CacheOptions | None = None, on_message: _OnMessage, on_lost: _OnLost
    ) -> None:
        self._on_message, self._on_lost = on_message, on_lost
        self._is_closing = False
        self._incoming: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._handle_all, name="ckptfmt-messages", daemon=True)
        self._saver = Saver(store, on_message, cache=cache)
        try:
            self._thread.start()
        except BaseException:
            self._saver.finish(0.0)
            raise

    def add_slot(self, number: int, slot: Slot) -> None:
        """Hand over a slot; see `ProcessLink.add_slot`."""
        self._saver.add_slot(number, slot)
        self._on_message({"type": "ready", "slot": number})

    def send(self, message: dict[str, Any]) -> None:
        """Put a message on its way; see `ProcessLink.send`."""
        self._incoming.put(message)

    def failure(self) -> CkptError | None:
        """Return why the saver can't be talked to any more; see `ProcessLink.failure`."""
        # Once closed, what was on its way is done, and only the saver itself is still at work.
        is_well = self._saver.is_alive() and (self._is_closing or self._thread.is_alive())
        return None if is_well else err(Code.SAVER_LOST, "a thread of the saver has ended")

    def drop(self) -> None:
        """Have nothing to do with the saver any more; see `ProcessLink.drop`."""
        self._incoming.put(None)
        self._saver.give_up(err(Code.SAVER_LOST, "the trainer has ended its connection to the saver"))
        self._saver.finish(0.0)

    def close(self, timeout_s: float, *, drain_s: float = 0.0) -> bool:
        """Let the saver end; see `ProcessLink.close`."""
        self._is_closing = True
        self._incoming.put(None)
        self._thread.join(max(timeout_s, drain_s))
        return self._saver.finish(timeout_s)

    def _handle_all(self) -> None:
        try:
            while (message := self._incoming.get()) is not None:
                self._saver.handle(message)
        except BaseException as problem:  # noqa: BLE001 - told, whatever it is
            error = err(Code.SAVER_LOST, f"the saver failed at a message: {type(problem).__qualname__}: {problem}")
            error.__cause__ = problem
            self._saver.give_up(error)
            self._on_lost(Lost(error=error, has_ended=False))


#: A saver, and the way to it.
Link: TypeAlias = ProcessLink | ThreadLink
