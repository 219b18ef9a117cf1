"""Signals that ask a training to stop, caught while somebody wants them, and given back afterwards."""

from __future__ import annotations

import logging
import signal
import threading
import time
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

from ckptfmt.errors import Code, err

if TYPE_CHECKING:
    from collections.abc import Iterable

_LOG: Final = logging.getLogger("ckptfmt")


class StopSignals:
    """The signals after which a run is to save and stop.

    The first one is only noted. A second one does what it would have done without us: whoever sends it is impatient.

    Args:
        numbers: such as ``signal.SIGTERM``; none for none.
        deadline_s: how long saving and stopping may take, in seconds.

    Raises: StateError(ARGUMENT).
    """

    def __init__(self, numbers: Iterable[int], *, deadline_s: float = 30.0) -> None:
        if not deadline_s > 0:
            raise err(Code.ARGUMENT, f"{deadline_s!r} isn't a positive time", where="stop_deadline_s=")
        self.deadline_s = deadline_s
        try:
            # Each once: to catch one twice would make ourselves the one to give it back to.
            self._numbers = list(dict.fromkeys(signal.Signals(number) for number in numbers))
        except (TypeError, ValueError) as error:
            raise err(Code.ARGUMENT, f"stop_on: {error}", where="stop_on=") from error
        for number in self._numbers:
            if number in (signal.SIGKILL, signal.SIGSTOP):
                raise err(Code.ARGUMENT, f"stop_on: nobody can catch {number.name}", where="stop_on=")
        self._previous: dict[signal.Signals, Any] = {}
        self.first_s: float | None = None

    def __bool__(self) -> bool:
        return bool(self._numbers)

    def install(self) -> None:
        """Catch the signals from now on. Raises: StateError(ARGUMENT) outside of the main thread."""
        if not self._numbers or self._previous:
            return
        if threading.current_thread() is not threading.main_thread():
            raise err(Code.ARGUMENT, "signals can be caught in the main thread only", where="stop_on=")
        for number in self._numbers:
            self._previous[number] = signal.signal(number, self._note)

    def remove(self) -> None:
        """Give the signals back to whom they belonged before; outside of the main thread, that is left to the next."""
        if threading.current_thread() is not threading.main_thread():
            return
        while self._previous:
            number, previous = self._previous.popitem()
            # None: it was set from C, and can't be set again from here.
            signal.signal(number, signal.SIG_DFL if previous is None else previous)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.first_s = time.monotonic()
        _LOG.warning("%s: the run saves and stops", signal.Signals(number).name)
        self.remove()
