"""The trainer's way to its saver: a process of its own, or a thread here. Neither ever makes the caller wait."""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any, Protocol

from ckptfmt.engines.saver import Saver
from ckptfmt.errors import Code, err
from ckptfmt.stage.process import start_helper

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptfmt.stage.slot import Slot
    from ckptfmt.store.protocol import Store

__all__ = ["Link", "ProcessLink", "ThreadLink"]


class Link(Protocol):
    """A saver, and the way to it."""

    def add_slot(self, number: int, slot: Slot) -> None:
        """Hand over a slot; the saver answers ``ready``."""

    def send(self, message: dict[str, Any]) -> None:
        """Put a message on its way. It is lost if the saver is."""

    def close(self, timeout_s: float, *, drain_s: float = 0.0) -> bool:
        """Let the saver end when it has nothing to do any more.

        Args:
            timeout_s: how long to wait for its end, in seconds.
            drain_s: how long to wait before until it has all messages, if that is longer: what it hasn't is lost.

        Returns: False if it hasn't ended by then, and goes on.
        """


class ProcessLink:
    """A process ``python -m ckptfmt.saver`` in a session of its own, with null standard streams.

    Args:
        path: of the run.
        nice: what to add to its niceness.
        on_message: called with each of its messages, in a thread.
        on_lost: called once when it is gone, in a thread.

    Raises: CommitError(SAVER_LOST) if it can't be started.
    """

    def __init__(
        self, path: str, *, nice: int, on_message: Callable[[dict[str, Any]], None], on_lost: Callable[[], None]
    ) -> None:
        try:
            self._process, self._channel = start_helper("ckptfmt.saver")
        except OSError as error:
            remedy = "Pass saver='thread' where no process can be started."
            raise err(Code.SAVER_LOST, f"it can't be started: {error}", where=sys.executable, remedy=remedy) from error
        self._on_message, self._on_lost = on_message, on_lost
        self._is_closing = False
        self._outgoing: queue.SimpleQueue[tuple[dict[str, Any], Slot | None] | None] = queue.SimpleQueue()
        self._outgoing.put(({"type": "open", "path": path, "nice": nice, "trainer_pid": os.getpid()}, None))
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for target, name in ((self._send_all, "ckptfmt-send"), (self._receive_all, "ckptfmt-receive"))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def pid(self) -> int:
        """The saver's process."""
        return self._process.pid

    def add_slot(self, number: int, slot: Slot) -> None:
        """Hand over a slot; see `Link.add_slot`."""
        self._outgoing.put(({"type": "slot", "slot": number}, slot))  # which it keeps alive until it is sent

    def send(self, message: dict[str, Any]) -> None:
        """Put a message on its way; see `Link.send`."""
        self._outgoing.put((message, None))

    def close(self, timeout_s: float, *, drain_s: float = 0.0) -> bool:
        """Let the saver end; see `Link.close`."""
        self._is_closing = True
        self._outgoing.put(None)
        self._threads[0].join(max(timeout_s, drain_s))
        self._channel.shut_down()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        for thread in self._threads:
            thread.join(timeout_s)
        if not any(thread.is_alive() for thread in self._threads):
            self._channel.close()
        if self._process.returncode is None:
            # It goes on without us; somebody has to take note of its end.
            threading.Thread(target=self._process.wait, name="ckptfmt-reap", daemon=True).start()
            return False
        return True

    def _send_all(self) -> None:
        with contextlib.suppress(OSError):
            while (item := self._outgoing.get()) is not None:
                message, slot = item
                self._channel.send(message, fd=None if slot is None else slot.fd)

    def _receive_all(self) -> None:
        while (received := self._channel.receive()) is not None:
            self._on_message(received[0])
        self._on_lost()
        if not self._is_closing:
            self._clean_up()

    def _clean_up(self) -> None:
        """Leave neither thread nor descriptor nor dead child of a saver that ended by itself."""
        self._outgoing.put(None)
        self._channel.shut_down()
        self._threads[0].join()
        self._process.wait()
        self._channel.close()


class ThreadLink:
    """A saver in a thread of this process; it ends with it."""

    def __init__(self, store: Store, *, on_message: Callable[[dict[str, Any]], None]) -> None:
        self._saver = Saver(store, on_message)
        self._on_message = on_message
        self._incoming: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._handle_all, name="ckptfmt-messages", daemon=True)
        self._thread.start()

    def add_slot(self, number: int, slot: Slot) -> None:
        """Hand over a slot; see `Link.add_slot`."""
        self._saver.add_slot(number, slot)
        self._on_message({"type": "ready", "slot": number})

    def send(self, message: dict[str, Any]) -> None:
        """Put a message on its way; see `Link.send`."""
        self._incoming.put(message)

    def close(self, timeout_s: float, *, drain_s: float = 0.0) -> bool:
        """Let the saver end; see `Link.close`."""
        self._incoming.put(None)
        self._thread.join(max(timeout_s, drain_s))
        return self._saver.finish(timeout_s)

    def _handle_all(self) -> None:
        while (message := self._incoming.get()) is not None:
            self._saver.handle(message)
