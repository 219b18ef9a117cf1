"""The durations of a training's steps, during saves and without saves."""

from __future__ import annotations

import collections
import dataclasses
from typing import Final

from ckptfmt.saving.handle import SaveHandle

#: Number of recent steps without a save to keep.
_STEPS: Final = 100


@dataclasses.dataclass(frozen=True, slots=True)
class Beside:
    """A finished save, with the steps during the save.

    Attributes:
        handle: handle of the save.
        steps_s: duration of each step during the save, in seconds.
        others: saves that began during the save.
    """

    handle: SaveHandle
    steps_s: list[float]
    others: list[SaveHandle]


class StepMeter:
    """The meter of a training's steps. A single save is measured at a time.

    Attributes:
        alone_s: durations of the last steps without a save, in seconds.
    """

    def __init__(self) -> None:
        self.alone_s: collections.deque[float] = collections.deque(maxlen=_STEPS)
        self._last_s: float | None = None
        self._handle: SaveHandle | None = None
        self._beside_s: list[float] = []
        self._others: list[SaveHandle] = []

    def note_steps(self, now_s: float, count: int) -> tuple[float, Beside | None]:
        """Record the end of `count` steps at the time `now_s`.

        Returns: the time since the last call in seconds, and the measured save, if over by now.
        """
        seconds = 0.0 if self._last_s is None else now_s - self._last_s
        is_first = self._last_s is None
        self._last_s = now_s
        if is_first:  # the first step compiles, or waits for data
            return seconds, None
        handle = self._handle
        if handle is None:
            self.alone_s.append(seconds / count)
            return seconds, None
        self._beside_s += [seconds / count] * count
        if handle.state not in ("COMMITTED", "FAILED", "SKIPPED"):
            return seconds, None
        over = Beside(handle, self._beside_s, self._others)
        self._handle = None
        self._beside_s = []
        self._others = []
        return seconds, over

    def note_save(self, handle: SaveHandle) -> None:
        """Record the start of a save."""
        if self._handle is None:
            self._handle = handle
        else:
            self._others.append(handle)
