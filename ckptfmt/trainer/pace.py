"""The pace of a run: when it is saved and when it stops, asked of all processes at steps that all of them know."""

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
from ckptfmt.trainer.loop import Meters, StopSignals, Timer

if TYPE_CHECKING:
    from ckptfmt.trainer.triggers import Triggers

_LOG: Final = logging.getLogger("ckptfmt")


class Pace:
    """When a run is saved and when it stops; each question is one exchange of all processes.

    Args:
        group: the processes.
        cadence: steps from save to save as an int, seconds as a float; None for no saves.
        meters: what measures the training.
        signals: what stops the run, with a save.
        triggers: what notices that something is wrong; None if nothing does.

    Attributes:
        meters: as given.
        clock: the time of this process, in seconds.
        timer: when the last save was.
        stopped: whether the run is to stop.
        alarm: why it is, where triggers say so on any process; None if none does.
        is_suspect: whether that reason is evidence against the state.
    """

    def __init__(
        self,
        group: Group,
        cadence: int | float | None,  # noqa: PYI041 - steps are another thing than seconds
        meters: Meters,
        signals: StopSignals,
        triggers: Triggers | None,
    ) -> None:
        self.meters = meters
        self.clock, self.timer = time.monotonic, Timer()
        self.stopped = False
        self.alarm: str | None = None
        self.is_suspect = False
        self.signals, self._triggers = signals, triggers
        self._group, self._cadence, self._stop_s = group, cadence, math.inf

    def begin(self) -> None:
        """Catch signals, and watch the steps. Raises: StateError(ARGUMENT) for signals outside of the main thread."""
        self.signals.install()
        if self._triggers is not None:
            self._triggers.begin()

    def end(self) -> None:
        """Give the signals back, and watch no more."""
        if self._triggers is not None:  # in the other order than `begin`: both may have caught one signal
            self._triggers.end()
        self.signals.remove()

    def rest(self) -> None:
        """Watch no step until the next `beat`: none is under way."""
        if self._triggers is not None:
            self._triggers.rest()

    def beat(self) -> None:
        """Say that a step ended, or the next one begins."""
        if self._triggers is not None:
            self._triggers.beat()

    def note_save(self, next_step: int = 0) -> None:
        """Count the time to the next save from now."""
        self.timer = Timer(last_s=self.clock(), next_step=next_step)

    def is_due(self, step: int, more: int, *, will_save: bool) -> bool:
        """Return whether to save now, `more` steps after the last question, and find out whether to stop.

        Args:
            will_save: whether the run is saved now whatever the answer is: triggers are asked before.

        Raises: what `alert` of the triggers raises, on all processes.
        """
        # At which step a loop began isn't known before its first count: it may go on from another run's.
        self.timer.steps_since += more if step > more else 1
        self.meters.note_steps(self.clock(), max(1, more))
        cadence, has_triggers = self._cadence, self._triggers is not None
        by_step = isinstance(cadence, int) and step // cadence > (step - more) // cadence
        asks = isinstance(cadence, float) or bool(self.signals) or has_triggers
        if (asks and step >= self.timer.next_step) or (has_triggers and (by_step or will_save)):
            return self._ask(step) or by_step
        return by_step

    def _ask(self, step: int) -> bool:
        """Ask whether the time has come: writer 0 has the clock, anyone may get a signal or notice something."""
        self._cadence = self.meters.cadence(self._cadence)
        every_s = self._cadence if isinstance(self._cadence, float) else float("inf")
        asks, is_alone = bool(self.signals) or self._triggers is not None, self._group.writer_count == 1
        answer = self.timer.answer(step, self.clock(), every_s, asks=asks, is_alone=is_alone)
        answer["stop"] = self.signals.first_s is not None
        noticed, error = self.look()
        answer |= noticed
        told = self._group.agree(error, answer)
        self.timer.next_step = told[0]["next_step"]
        self.hear(step, told)
        has_signal = any(theirs["stop"] for theirs in told)
        self.stopped = self.alarm is not None or has_signal
        if has_signal:  # a process that got none counts from now
            self._stop_s, self.signals.is_agreed = time.monotonic(), True
        if self.stopped:  # the last save may take longer than a step
            self.rest()
        return bool(told[0]["due"])

    def look(self) -> tuple[dict[str, Any], Exception | None]:
        """Return what this process noticed, as a part of a message to the others; and what `alert` raised."""
        triggers = self._triggers
        reason, error = (None, None) if triggers is None else attempt(triggers.look)
        return {"alarm": reason, "suspects": triggers is not None and triggers.is_alarm}, error

    def hear(self, step: int, told: Iterable[Mapping[str, Any]]) -> None:
        """Keep what the processes noticed: of the lowest process with evidence against the state, else of the lowest.

        The first notice counts, until there is evidence against the state.
        """
        noticed = [theirs for theirs in told if theirs["alarm"] is not None]
        noticed.sort(key=lambda theirs: not theirs["suspects"])  # stable
        if not noticed or (self.alarm is not None and (self.is_suspect or not noticed[0]["suspects"])):
            return
        self.alarm, self.is_suspect = f"step {step}: {noticed[0]['alarm']}", noticed[0]["suspects"]
        if self._group.writer == 0:
            _LOG.warning("%s: %s", "alarm" if self.is_suspect else "notice", self.alarm)

    def gives_up(self) -> bool:
        """Return whether nothing is to be saved any more. Raises: StateError(ALARM), where the run is to go back."""
        if self.alarm is None or self._triggers is None or self._triggers.action in ("save", "drain"):
            return False
        if self._triggers.action == "back":
            raise err(Code.ALARM, self.alarm, where="Triggers(action='back')")
        return True

    def doubt(self, label: Callable[[], Labels] | None) -> Callable[[], Labels] | None:
        """Return what returns the labels of a save: with the alarm, if there is one, unless another reason is given."""
        if not self.is_suspect:
            return label
        alarm = self.alarm or ""

        def doubted() -> Labels:
            labels = NO_LABELS if label is None else label()
            return labels if labels.suspect else dataclasses.replace(labels, suspect=alarm)

        return doubted

    def rest_s(self, deadline_s: float) -> float:
        """Return how much of a deadline is left, in seconds, once a signal asked the run to stop."""
        stop_s = min(self._stop_s, math.inf if self.signals.first_s is None else self.signals.first_s)
        return max(0.0, min(deadline_s, stop_s + self.signals.deadline_s - time.monotonic()))
