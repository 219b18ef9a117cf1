"""The warning about a training without any save, early enough to correct the program."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, Final

from ckptfmt.adapters import torch_side

#: Fewest steps of one optimizer that show an uncounted training. A training step may take several.
_UPDATES_MIN: Final = 10
#: Number of counted steps, or seconds, after which a run that is saved only at the end of `steps`
#: is warned.
_STEPS_MIN: Final = 100
_UNSAVED_S: Final = 600.0

_UNCOUNTED: Final = (
    "NOTHING_SAVED: {updates} optimizer steps are done since the checkpointer was entered, and no"
    " step was counted, so"
    " that every={every!r} saves nothing: loop over checkpointer.steps(total), hold each step in"
    " checkpointer.training_step(), or call checkpointer.end_step(n) after each"
)
_AT_END: Final = (
    "NOTHING_SAVED: {count} steps are done since the checkpointer was entered, and none is saved:"
    " every=None saves at"
    " the end of steps() and when save() is called, and until then a crash loses all of them;"
    " pass every=, such as"
    " every='5min'"
)


class UnsavedWatch:
    """The watch over a launch without a save so far.

    Args:
        every: interval of saves as given by the caller.
        cadence: interval of saves as returned by `parse_every`.
        report: called at most once, with a sentence.

    Attributes:
        has_counted: whether a step was counted or the first counted step has begun.
    """

    def __init__(
        self, every: int | str | None, cadence: float | None, report: Callable[[str], None]
    ) -> None:
        self._every = every
        self._cadence = cadence
        self._report = report
        self._has_told = False
        self._begin_s = math.nan
        self._updates: dict[int, int] = {}
        self._steps = 0
        self._is_saved = False
        self.has_counted = False
        self._unhook: Callable[[], None] | None = None

    def begin(self) -> None:
        """Start the watch. A second call has no effect."""
        if math.isnan(self._begin_s):
            self._begin_s = time.monotonic()
            side: Any = torch_side()
            if side is not None:
                self._unhook = side.watch_updates(self._note_update)

    def note_counted(self, steps: int) -> None:
        """Record the start of the first step, or the count of `steps` more steps."""
        if not self.has_counted:
            self.has_counted = True
            self.end()  # the optimizers are watched only for uncounted steps
        self._steps += steps
        is_long = self._steps >= _STEPS_MIN or time.monotonic() - self._begin_s >= _UNSAVED_S
        if self._every is None and not self._is_saved and steps and is_long:
            self._tell(_AT_END.format(count=self._steps))

    def note_saved(self) -> None:
        """Record a save."""
        self._is_saved = True
        self.end()

    def end(self) -> None:
        """End the watch over the optimizers."""
        if self._unhook is not None:
            self._unhook()
            self._unhook = None

    def tell_at_exit(self) -> None:
        """Report at the end of the launch if no step of the training was saved."""
        updates = max(self._updates.values(), default=0)
        if self._is_saved:
            return
        if updates and not self.has_counted:
            self._tell(_UNCOUNTED.format(updates=updates, every=self._every))
        elif self._steps:
            self._tell(
                f"NOTHING_SAVED: {self._steps} steps were counted, and the checkpointer was"
                " closed without a save of"
                " them: call checkpointer.save() behind the loop, or pass every="
            )
        elif self._every is not None and not self.has_counted and torch_side() is None:
            # Without torch there are no optimizers to watch.
            self._tell(
                "NOTHING_SAVED: the checkpointer was closed, and no step was counted, so that"
                f" every={self._every!r}"
                " saved nothing: count the steps of a training by steps(), training_step() or"
                " end_step()"
            )

    def _note_update(self, optimizer: object) -> None:
        """Record a step of an optimizer. A training step has one or a few such steps."""
        count = self._updates[id(optimizer)] = self._updates.get(id(optimizer), 0) + 1
        if self.has_counted or self._is_saved or self._cadence is None or count < _UPDATES_MIN:
            return
        is_late = (
            count >= 2 * self._cadence
            if isinstance(self._cadence, int)
            else time.monotonic() - self._begin_s >= min(self._cadence, _UNSAVED_S)
        )
        if is_late:
            self._tell(_UNCOUNTED.format(updates=count, every=self._every))

    def _tell(self, sentence: str) -> None:
        if not self._has_told:
            self._has_told = True
            self._report(sentence)
