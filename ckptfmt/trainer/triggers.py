"""Triggers: they notice that a training goes wrong, and say what all processes then do at one step."""

from __future__ import annotations

import collections
import faulthandler
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import Final, Literal, SupportsFloat, TypeAlias

from ckptfmt.documents.canonical import fit_string
from ckptfmt.errors import Code, err
from ckptfmt.trainer.loop import StopSignals

_LOG: Final = logging.getLogger("ckptfmt")
#: How long a reason may be, in characters; what a manifest may hold is longer.
_REASON_LENGTH: Final = 200
#: How long the process of a step that hangs is given to say so, in seconds.
_TELL_S: Final = 5.0
#: How many norms there must be before one is compared with their average.
_FEWEST_NORMS: Final = 10

#: What a program that calls `Triggers.alarm` is told with the action "save".
_TOLD_OF_ALARM: Final = (
    "Triggers.alarm(%r): the save that follows is suspect, and the next start passes it over. For a notice that says"
    " nothing against the state, such as of a machine that is to be drained, create Triggers('drain'), or return the"
    " text from alert="
)

#: What to do at a notice: see `Triggers`.
Action: TypeAlias = Literal["save", "drain", "stop", "back"]


class Triggers:
    """Conditions under which a training is to stop, and what is to be done then.

    A notice is an *alarm* where it is evidence that the training went wrong: a number given to `feed`, and what the
    program says by `alarm`. A notice from outside, by `alert`, `file` or `signals`, says nothing about the state.

    Give one to `Checkpointer(triggers=)`, on every process with the same arguments, and feed it with the numbers of
    each step, before the step ends. One process that notices something is enough: all learn of it together, at the end
    of the same step, at the latest with the next save, and otherwise within a second. The first notice counts, and an
    alarm before any other notice; `Checkpointer.alarm` says why, and `Checkpointer.stopped` is true.

    Args:
        action: the consequence at the end of that step, on all processes. "save": the run is saved, and `steps` ends.
            After an alarm, the save is marked suspect with the reason, so that no start goes on from it by itself;
            after a notice from outside, the next start goes on from it. "drain": likewise, and `alarm` is a notice
            from outside, too: only numbers are evidence against the state. "stop": `steps` ends, and nothing is
            saved. "back": StateError(ALARM) is raised, and nothing is saved, so that torchrun, or whatever else
            starts failed jobs again, lets the run go on from its last good checkpoint.
        norm_factor: a gradient norm above so many times the average of those before is an alarm; None for none.
        norm_count: of how many norms that average is; as long as there are fewer than ten, none is compared.
        rising: so many losses in a row, each above the one before, are an alarm; None for none.
        alert: asked about once a second, and before each save, in the thread of the training; in a training of one
            process, at the end of each step. It returns at once: why the training is to stop, or None. Where
            its text is evidence against the state, it calls `alarm` itself.
        file: a path that is looked for likewise: once a file is there, its first line is why. A path that can't be
            looked at is named in the log once, and is no notice.
        signals: such as ``signal.SIGUSR1``: one of these is a notice; a second one does what it did before.
        timeout_s: how long a step may take, with the save at its end, and the first one with what comes before it, in
            seconds. A thread then writes the stacks of all threads to stderr and ends the process with `exit_code`;
            what is STAGED is finished by the saver's process. None for no such thread. Where a library holds Python's
            lock while it hangs, the thread can't run either.

    Attributes:
        reason: the first notice of this process; None if there was none.
        is_alarm: whether that notice is evidence against the state.
        exit_code: of a process whose step took longer than `timeout_s`: 75, which means: try again.

    Raises: StateError(ARGUMENT).

    >>> triggers = Triggers(norm_factor=10)
    >>> for _ in range(20):
    ...     triggers.feed(loss=2.5, grad_norm=1.0)
    >>> triggers.feed(loss=2.5, grad_norm=11.0)
    >>> triggers.reason
    'grad_norm is 11, more than 10 times the average of 1'
    """

    exit_code: Final = 75

    def __init__(
        self,
        action: Action = "save",
        *,
        norm_factor: float | None = 10.0,
        norm_count: int = 100,
        rising: int | None = None,
        alert: Callable[[], str | None] | None = None,
        file: str | os.PathLike[str] | None = None,
        signals: Iterable[int] = (),
        timeout_s: float | None = None,
    ) -> None:
        if action not in ("save", "drain", "stop", "back"):
            raise err(Code.ARGUMENT, f"{action!r}: save, drain, stop or back", where="action=")
        for name, number, least in (
            ("norm_factor", norm_factor, 1.0),
            ("norm_count", norm_count, _FEWEST_NORMS),
            ("rising", rising, 1),
        ):
            if number is not None and not number >= least:
                raise err(Code.ARGUMENT, f"{number!r} isn't at least {least:g}", where=f"{name}=")
        if timeout_s is not None and not 0 < timeout_s < threading.TIMEOUT_MAX:
            raise err(Code.ARGUMENT, f"{timeout_s!r} isn't a positive time", where="timeout_s=")
        self.action = action
        self.reason: str | None = None
        self.is_alarm = False
        self._norm_factor, self._norms = norm_factor, collections.deque[float](maxlen=norm_count)
        self._rising, self._rises, self._last_loss = rising, 0, math.inf
        self._alert, self._file, self._has_warned = alert, file, False
        self._signals = StopSignals(signals)
        # Reentrant: a program may call `alarm` in a signal handler.
        self._lock = threading.RLock()
        self._watchdog = None if timeout_s is None else _Watchdog(timeout_s, self.exit_code)

    def __repr__(self) -> str:
        return f"Triggers({self.action!r}, reason={self.reason!r})"

    def feed(self, *, loss: SupportsFloat | None = None, grad_norm: SupportsFloat | None = None) -> None:
        """Take note of a step's numbers. A tensor on a device is waited for, as by ``item()``."""
        if loss is not None:
            self._feed_loss(_number_of(loss))
        if grad_norm is not None:
            self._feed_norm(_number_of(grad_norm))

    def alarm(self, reason: str) -> None:
        """Say that the training goes wrong, from any thread; the first reason stands.

        With the action "drain": say that the training is to be saved and stopped.
        """
        is_first = self.reason is None
        self._notice(reason, is_alarm=self.action != "drain")
        if is_first and self.action == "save":
            _LOG.warning(_TOLD_OF_ALARM, self.reason)

    def look(self) -> str | None:
        """Ask whatever is outside, and return why the training is to stop, as far as this process knows.

        Raises: the error that `alert` raises.
        """
        if self.reason is None and self._signals.first_s is not None:
            self._notice(self._signals.first_name)
        if self.reason is None and self._file is not None:
            self._look_for(self._file)
        if self.reason is None and self._alert is not None and (reason := self._alert()) is not None:
            self._notice(reason)
        return self.reason

    def begin(self) -> None:
        """Catch the signals, and watch the steps from now on.

        Raises: StateError(ARGUMENT) for signals outside of the main thread.
        """
        self._signals.install()
        if self._watchdog is not None:
            self._watchdog.beat()

    def beat(self) -> None:
        """Say that a step begins, or ends: the time of the next one counts from here."""
        if self._watchdog is not None:
            self._watchdog.beat()

    def end(self) -> None:
        """Give the signals back, and watch no more."""
        self._signals.remove()
        self.rest()

    def rest(self) -> None:
        """Watch no step until the next `beat`."""
        if self._watchdog is not None:
            self._watchdog.end()

    def _notice(self, reason: str, *, is_alarm: bool = False) -> None:
        """Keep the first reason, or the first alarm: evidence against the state counts more than a notice."""
        with self._lock:
            if self.reason is None or (is_alarm and not self.is_alarm):
                text = " ".join(str(reason).split()) or "an alert without a reason"
                self.reason, self.is_alarm = fit_string(text, _REASON_LENGTH), is_alarm

    def _feed_loss(self, loss: float) -> None:
        if not math.isfinite(loss):
            return self._notice(f"loss is {loss}", is_alarm=True)
        self._rises = self._rises + 1 if loss > self._last_loss else 0
        self._last_loss = loss
        if self._rising is not None and self._rises >= self._rising:
            self._notice(f"loss rose {self._rises} times in a row, to {loss:.6g}", is_alarm=True)
        return None

    def _feed_norm(self, norm: float) -> None:
        if not math.isfinite(norm):
            return self._notice(f"grad_norm is {norm}", is_alarm=True)
        if self._norm_factor is not None and len(self._norms) >= min(_FEWEST_NORMS, self._norms.maxlen or 0):
            average = math.fsum(self._norms) / len(self._norms)
            if norm > self._norm_factor * average:
                text = f"grad_norm is {norm:.6g}, more than {self._norm_factor:g} times the average of {average:.6g}"
                return self._notice(text, is_alarm=True)
        self._norms.append(norm)
        return None

    def _look_for(self, path: str | os.PathLike[str]) -> None:
        try:
            with open(path, encoding="utf-8", errors="backslashreplace") as file:  # noqa: PTH123 - any path, a user's
                self._notice(file.readline(_REASON_LENGTH))
        except FileNotFoundError:
            pass
        except OSError as error:  # the storage of the file is away for a while
            if not self._has_warned:
                _LOG.warning("Triggers(file=) can't look for %s: %s", os.fspath(path), error.strerror)
            self._has_warned = True


def _number_of(value: SupportsFloat) -> float:
    """Return a number; of a tensor that has a gradient, ``float()`` would warn."""
    item = getattr(value, "item", None)
    return float(value if item is None else item())


class _Watchdog:
    """The thread that ends the process where a step takes too long. It waits for a beat, or for its end."""

    def __init__(self, timeout_s: float, exit_code: int) -> None:
        self._timeout_s, self._exit_code = timeout_s, exit_code
        self._changed = threading.Condition()
        self._due_s: float | None = None
        self._thread: threading.Thread | None = None

    def beat(self) -> None:
        """Count the time from now; the first beat starts the thread."""
        with self._changed:
            self._due_s = time.monotonic() + self._timeout_s
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="ckptfmt-watchdog", daemon=True)
            self._thread.start()

    def end(self) -> None:
        """End the thread."""
        with self._changed:
            self._due_s = None
            self._changed.notify()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

    def _watch(self) -> None:
        with self._changed:
            while self._due_s is not None:
                left_s = self._due_s - time.monotonic()
                if left_s <= 0:
                    break
                self._changed.wait(left_s)
            else:
                return
        # Both may wait for what hangs: a handler's lock, a pipe that nobody reads.
        telling = threading.Thread(target=self._tell, name="ckptfmt-watchdog-tells", daemon=True)
        telling.start()
        telling.join(_TELL_S)
        os._exit(self._exit_code)

    def _tell(self) -> None:
        faulthandler.dump_traceback(file=2, all_threads=True)  # the descriptor: sys.stderr may be anything
        error = err(Code.STEP_OVERDUE, f"no step began within {self._timeout_s:g} s", where="Triggers(timeout_s=)")
        _LOG.critical("%s; process %d ends with exit code %d", error, os.getpid(), self._exit_code)
