"""Triggers: conditions that show a failing training, and the common action of all processes."""

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
from ckptfmt.loop.loop import StopSignals

_LOG: Final = logging.getLogger("ckptfmt")
#: Longest reason in characters; a manifest may hold longer texts.
_REASON_LENGTH: Final = 200
#: Time for the report of a hanging step before the process ends, in seconds.
_TELL_S: Final = 5.0
#: Fewest norms before a norm is compared with their average.
_FEWEST_NORMS: Final = 10

#: Log line after `Triggers.alarm` with the action "save".
_TOLD_OF_ALARM: Final = (
    "Triggers.alarm(%r): the save that follows is suspect, and the next start passes it over. For"
    " a notice that says"
    " nothing against the state, such as of a machine that is to be drained, create"
    " Triggers('drain'), or return the"
    " text from alert="
)

#: The action after a notice, as explained at `Triggers`.
Action: TypeAlias = Literal["save", "drain", "stop", "back", "rewind"]


class Triggers:
    """Conditions that stop a training, and the action that follows.

    A notice is a reason to stop. An *alarm* is a notice that is evidence against the state: a
    number given to `feed`, or a call of `alarm` by the program. A notice from outside, by `alert`,
    `file` or `signals`, is no evidence against the state.

    Give such an object to `Checkpointer(stop=Stop(triggers=))` on every process, with the same
    arguments. Feed the numbers of each step before the step ends. A notice on one process is
    enough: all processes learn of the notice together at the end of a step, within about a second,
    and no later than the next save. The first notice counts, and an alarm comes before other
    notices. Afterwards `Checkpointer.alarm` has the reason, and `Checkpointer.stopped` is true.

    Args:
        action: action at the end of that step, on all processes. "save": save the run and end
            `steps`. After an alarm the save is marked suspect with the reason, so that no start
            resumes from the save automatically; after a notice from outside the next start resumes
            from the save. "drain": as "save", but a call of `alarm` is a notice from outside too,
            so only numbers are evidence against the state. "stop": end `steps` without a save.
            "back": raise StateError(ALARM) without a save, so that torchrun or another launcher
            restarts the job from the last good checkpoint. "rewind": after an alarm, go back to the
            newest save in the same processes, leave out the samples of the steps since then, and
            go on; see `Checkpointer.rewind`. The fourth alarm after one save is handled as by
            "save", and so are a notice from outside, and each alarm in a loop that counts with
            `end_step`.
        norm_factor: a gradient norm above this multiple of the average of earlier norms is an
            alarm; None for no such alarm.
        norm_count: number of norms in that average. With fewer than ten norms none is compared.
        rising: number of losses in a row, each above the one before, that are an alarm; None for no
            such alarm.
        alert: called in the training's thread, about once a second and before each save; in a
            training of one process, at the end of each step. The function must return at once: the
            reason to stop the training, or None. If the reason is evidence against the state, the
            function calls `alarm` itself.
        file: path that is looked for as often as `alert` is called. Once the file exists, its first
            line is the reason. A path that can't be read is logged once, and is no notice.
        signals: signal numbers such as ``signal.SIGUSR1`` that are a notice. A second signal has
            its previous effect.
        timeout_s: longest duration of a step with the save at its end, in seconds. The first step
            includes the time before the step. After the timeout a thread writes the stacks of all
            threads to stderr and ends the process with `exit_code`. The saver process finishes
            saves that are STAGED. None for no such thread. The thread can't run while a hanging
            library holds Python's global interpreter lock.

    Attributes:
        reason: first notice of this process; None without a notice.
        is_alarm: whether that notice is evidence against the state.
        exit_code: exit code of a process whose step took longer than `timeout_s`: 75, which means
            "try again".

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
        if action not in ("save", "drain", "stop", "back", "rewind"):
            detail = f"{action!r}: save, drain, stop, back or rewind"
            raise err(Code.ARGUMENT, detail, where="action=")
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
        self._rising = rising
        self._rises = 0
        self._last_loss = math.inf
        self._alert = alert
        self._file = file
        self._has_warned = False
        self._signals = StopSignals(signals)
        # Reentrant: a program may call `alarm` in a signal handler.
        self._lock = threading.RLock()
        self._watchdog = None if timeout_s is None else _Watchdog(timeout_s, self.exit_code)

    def __repr__(self) -> str:
        return f"Triggers({self.action!r}, reason={self.reason!r})"

    def feed(
        self, *, loss: SupportsFloat | None = None, grad_norm: SupportsFloat | None = None
    ) -> None:
        """Check the numbers of a step. A tensor on a device is waited for, as by ``item()``."""
        if loss is not None:
            self._feed_loss(_number_of(loss))
        if grad_norm is not None:
            self._feed_norm(_number_of(grad_norm))

    def alarm(self, reason: str) -> None:
        """Record that the training fails, from any thread. The first reason stays.

        With the action "drain" the call means that the training should be saved and stopped.
        """
        is_first = self.reason is None
        self._notice(reason, is_alarm=self.action != "drain")
        if is_first and self.action == "save":
            _LOG.warning(_TOLD_OF_ALARM, self.reason)

    def forget(self) -> None:
        """Forget the notice and the numbers: the training went back to an earlier state."""
        with self._lock:
            self.reason = None
            self.is_alarm = False
        self._norms.clear()
        self._rises = 0
        self._last_loss = math.inf

    def look(self) -> str | None:
        """Check signals, file and `alert`, and return this process's reason to stop, or None.

        Raises: errors of `alert`.
        """
        if self.reason is None and self._signals.first_s is not None:
            self._notice(self._signals.first_name)
        if self.reason is None and self._file is not None:
            self._look_for(self._file)
        if (
            self.reason is None
            and self._alert is not None
            and (reason := self._alert()) is not None
        ):
            self._notice(reason)
        return self.reason

    def begin(self) -> None:
        """Install the signal handlers, and start the watch over the steps.

        Raises: StateError(ARGUMENT) for signals outside of the main thread.
        """
        self._signals.install()
        if self._watchdog is not None:
            self._watchdog.beat()

    def beat(self) -> None:
        """Restart the time of a step: a step begins or ends."""
        if self._watchdog is not None:
            self._watchdog.beat()

    def end(self) -> None:
        """Restore the signal handlers, and end the watch over the steps."""
        self._signals.remove()
        self.rest()

    def rest(self) -> None:
        """Pause the watch over the steps until the next `beat`."""
        if self._watchdog is not None:
            self._watchdog.end()

    def _notice(self, reason: str, *, is_alarm: bool = False) -> None:
        """Keep the first notice, which the first alarm replaces."""
        with self._lock:
            if self.reason is None or (is_alarm and not self.is_alarm):
                text = " ".join(str(reason).split()) or "an alert without a reason"
                self.reason = fit_string(text, _REASON_LENGTH)
                self.is_alarm = is_alarm

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
        if self._norm_factor is not None and len(self._norms) >= min(
            _FEWEST_NORMS, self._norms.maxlen or 0
        ):
            average = math.fsum(self._norms) / len(self._norms)
            if norm > self._norm_factor * average:
                text = (
                    f"grad_norm is {norm:.6g}, more than {self._norm_factor:g} times the"
                    f" average of {average:.6g}"
                )
                return self._notice(text, is_alarm=True)
        self._norms.append(norm)
        return None

    def _look_for(self, path: str | os.PathLike[str]) -> None:
        try:
            with open(path, encoding="utf-8", errors="backslashreplace") as file:  # noqa: PTH123
                self._notice(file.readline(_REASON_LENGTH))
        except FileNotFoundError:
            pass
        except OSError as error:  # the file's storage may be unreachable for a while
            if not self._has_warned:
                _LOG.warning(
                    "Triggers(file=) can't look for %s: %s", os.fspath(path), error.strerror
                )
            self._has_warned = True


def _number_of(value: SupportsFloat) -> float:
    """Return a number. `item` is used for tensors: ``float()`` warns if a gradient is needed."""
    item = getattr(value, "item", None)
    return float(value if item is None else item())


class _Watchdog:
    """The thread that ends the process if a step takes too long."""

    def __init__(self, timeout_s: float, exit_code: int) -> None:
        self._timeout_s = timeout_s
        self._exit_code = exit_code
        self._changed = threading.Condition()
        self._due_s: float | None = None
        self._thread: threading.Thread | None = None

    def beat(self) -> None:
        """Restart the time of a step; the first beat starts the thread."""
        with self._changed:
            self._due_s = time.monotonic() + self._timeout_s
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._watch, name="ckptfmt-watchdog", daemon=True
            )
            self._thread.start()

    def end(self) -> None:
        """End the thread."""
        with self._changed:
            self._due_s = None
            self._changed.notify()
        thread = self._thread
        self._thread = None
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
        # In a thread, since the report may block too, by a handler's lock or a full pipe.
        telling = threading.Thread(target=self._tell, name="ckptfmt-watchdog-tells", daemon=True)
        telling.start()
        telling.join(_TELL_S)
        os._exit(self._exit_code)

    def _tell(self) -> None:
        faulthandler.dump_traceback(
            file=2, all_threads=True
        )  # a descriptor, since sys.stderr may be replaced
        error = err(
            Code.STEP_OVERDUE,
            f"no step began within {self._timeout_s:g} s",
            where="Triggers(timeout_s=)",
        )
        _LOG.critical("%s; process %d ends with exit code %d", error, os.getpid(), self._exit_code)
