"""The pace of a run: the exchanges of all processes that decide when to save and when to stop."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from ckptfmt.documents.labels import NO_LABELS, Labels
from ckptfmt.errors import Code, err
from ckptfmt.group import Group, attempt
from ckptfmt.loop.loop import Meters, StopSignals, Timer

if TYPE_CHECKING:
    from ckptfmt.loop.triggers import Triggers

_LOG: Final = logging.getLogger("ckptfmt")
#: Largest number of alarms after which a run goes back to the same save.
_REWINDS: Final = 3


class Pace:
    """The times of saves and the end of a run. Each question is one exchange of all processes.

    Args:
        group: group of the processes.
        cadence: interval of saves, as an int in steps or a float in seconds; None for no saves.
        meters: measurements of the training.
        signals: signals that save and stop the run.
        triggers: conditions that stop the run; None for none.

    Attributes:
        meters: measurements of the training.
        clock: function for the time of this process in seconds.
        timer: time of the last save.
        stopped: whether the run must stop.
        alarm: first notice of a trigger on any process; None if there is none.
        is_suspect: whether the notice is evidence against the state.
        alarm_step: number of steps done when a process first had the notice; None without one.
    """

    def __init__(
        self,
        group: Group,
        cadence: int | float | None,  # noqa: PYI041
        meters: Meters,
        signals: StopSignals,
        triggers: Triggers | None,
    ) -> None:
        self.meters = meters
        self.clock, self.timer = time.monotonic, Timer()
        self.stopped = False
        self.alarm: str | None = None
        self.is_suspect = False
        self.alarm_step: int | None = None
        #: The number of steps done when this process first had an alarm.
        self._own_step: int | None = None
        self.signals = signals
        self._triggers = triggers
        self._group = group
        self._cadence = cadence
        self._stop_s = math.inf
        #: The step of the save to which the run last went back after alarms, and their number.
        self._rewinds: tuple[int | None, int] = None, 0

    def begin(self) -> None:
        """Install the signal handlers, and start the watch over the steps.

        Raises: StateError(ARGUMENT) for signals outside of the main thread.
        """
        self.signals.install()
        if self._triggers is not None:
            self._triggers.begin()

    def end(self) -> None:
        """Restore the signal handlers, and end the watch over the steps."""
        if self._triggers is not None:  # reverse order of `begin`: both may handle one signal
            self._triggers.end()
        self.signals.remove()

    def rest(self) -> None:
        """Pause the watch over the steps until the next `beat`: no step is running."""
        if self._triggers is not None:
            self._triggers.rest()

    def beat(self) -> None:
        """Restart the watchdog's time: a step ended, or the next step begins."""
        if self._triggers is not None:
            self._triggers.beat()

    def note_save(self, next_step: int = 0) -> None:
        """Restart the time to the next save.

        Args:
            next_step: first step at which the processes ask each other again.
        """
        self.timer = Timer(last_s=self.clock(), next_step=next_step)

    def is_due(self, step: int, more: int, *, will_save: bool) -> bool:
        """Return whether to save now, and update whether to stop.

        Args:
            step: number of steps done.
            more: number of steps since the last question.
            will_save: whether the run is saved now in any case. Triggers are asked before a save.

        Raises: errors of the triggers' `alert`, on all processes.
        """
        self._note_alarm(step)
        # A loop may continue another run, so its first count may include steps of that run.
        self.timer.steps_since += more if step > more else 1
        self.meters.note_steps(self.clock(), max(1, more))
        cadence = self._cadence
        has_triggers = self._triggers is not None
        by_step = isinstance(cadence, int) and step // cadence > (step - more) // cadence
        asks = isinstance(cadence, float) or bool(self.signals) or has_triggers
        if (asks and step >= self.timer.next_step) or (has_triggers and (by_step or will_save)):
            return self._ask(step) or by_step
        return by_step

    def _ask(self, step: int) -> bool:
        """Ask all processes whether to save and whether to stop; return whether a save is due.

        Writer 0's clock decides about saves. Any process may have a signal or a notice.
        """
        self._cadence = self.meters.cadence(self._cadence)
        every_s = self._cadence if isinstance(self._cadence, float) else float("inf")
        asks = bool(self.signals) or self._triggers is not None
        is_alone = self._group.writer_count == 1
        answer = self.timer.answer(step, self.clock(), every_s, asks=asks, is_alone=is_alone)
        answer["stop"] = self.signals.first_s is not None
        noticed, error = self.look()
        answer |= noticed
        told = self._group.agree(error, answer)
        self.timer.next_step = told[0]["next_step"]
        self.hear(step, told)
        has_signal = any(theirs["stop"] for theirs in told)
        self.stopped = self.alarm is not None or has_signal
        if has_signal:  # a process without a signal counts from now
            self._stop_s, self.signals.is_agreed = time.monotonic(), True
        if self.stopped:  # the watchdog mustn't end the last save
            self.rest()
        return bool(told[0]["due"])

    def _note_alarm(self, step: int) -> None:
        """Keep the first step with an alarm of this process: all processes hear of it later."""
        if self._own_step is None and self._triggers is not None and self._triggers.is_alarm:
            self._own_step = step

    def look(self) -> tuple[dict[str, Any], Exception | None]:
        """Return this process's notice as a part of a message, and the error of `alert`."""
        triggers = self._triggers
        reason, error = (None, None) if triggers is None else attempt(triggers.look)
        suspects = triggers is not None and triggers.is_alarm
        return {"alarm": reason, "suspects": suspects, "since": self._own_step}, error

    def hear(self, step: int, told: Iterable[Mapping[str, Any]]) -> None:
        """Keep a notice of the processes, preferably a notice with evidence against the state.

        Among equals the earliest step counts, then the lowest process. An earlier notice stays,
        unless the new notice is the first evidence against the state.
        """
        noticed = [theirs for theirs in told if theirs["alarm"] is not None]
        noticed.sort(  # stable: the lowest process stays first
            key=lambda theirs: (
                not theirs["suspects"],
                step if theirs["since"] is None else theirs["since"],
            )
        )
        if not noticed or (
            self.alarm is not None and (self.is_suspect or not noticed[0]["suspects"])
        ):
            return
        since = noticed[0]["since"]
        self.alarm_step = step if since is None else since
        self.alarm = f"step {self.alarm_step}: {noticed[0]['alarm']}"
        self.is_suspect = noticed[0]["suspects"]
        if self._group.writer == 0:
            _LOG.warning("%s: %s", "alarm" if self.is_suspect else "notice", self.alarm)

    def gives_up(self) -> bool:
        """Return whether saves are given up after an alarm.

        Raises: StateError(ALARM), if the run must go back to an earlier checkpoint.
        """
        if (
            self.alarm is None
            or self._triggers is None
            or self._triggers.action in ("save", "drain", "rewind")
        ):
            return False
        if self._triggers.action == "back":
            raise err(Code.ALARM, self.alarm, where="Triggers(action='back')")
        return True

    @property
    def asks_rewind(self) -> bool:
        """Whether there is an alarm after which the run goes back."""
        triggers = self._triggers
        return self.is_suspect and triggers is not None and triggers.action == "rewind"

    def find_alarm(self, saved_step: int | None, *, is_bounded: bool) -> str | None:
        """Return the alarm after which the run goes back; None without such an alarm.

        Args:
            saved_step: the step of the save to which the run goes back; None if there is none.
            is_bounded: whether at most `_REWINDS` alarms for one save are returned, so that no
                training goes back for ever. A healer has bounds of its own.
        """
        if saved_step is None or not self.asks_rewind:
            return None
        step, count = self._rewinds
        self._rewinds = saved_step, count + 1 if step == saved_step else 1
        return None if is_bounded and self._rewinds[1] > _REWINDS else self.alarm

    def forget_stop(self) -> None:
        """Ask all processes anew about a signal to stop: some of the processes are new.

        A signal that this process has met stops all processes at the end of the next step.
        """
        self.stopped = False
        self._stop_s = math.inf
        self.signals.is_agreed = False

    def forget_alarm(self) -> None:
        """Forget the alarm and the numbers of the triggers: an earlier state is live again.

        A signal to stop stays in force.
        """
        self.alarm = None
        self.alarm_step = self._own_step = None
        self.is_suspect = False
        self.stopped = self.signals.first_s is not None
        if self._triggers is not None:
            self._triggers.forget()

    def doubt(self, label: Callable[[], Labels] | None) -> Callable[[], Labels] | None:
        """Return a function for the labels of a save, which marks the save suspect after an alarm.

        A reason that the caller's labels give already stays.
        """
        if not self.is_suspect:
            return label
        alarm = self.alarm or ""

        def doubted() -> Labels:
            labels = NO_LABELS if label is None else label()
            return labels if labels.suspect else dataclasses.replace(labels, suspect=alarm)

        return doubted

    def rest_s(self, deadline_s: float) -> float:
        """Return the rest of a deadline in seconds, shortened after a signal to stop the run."""
        stop_s = min(
            self._stop_s, math.inf if self.signals.first_s is None else self.signals.first_s
        )
        return max(0.0, min(deadline_s, stop_s + self.signals.deadline_s - time.monotonic()))
