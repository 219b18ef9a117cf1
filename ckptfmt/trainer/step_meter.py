"""How long the steps of a training take, beside a save and without one."""

from __future__ import annotations

import collections
import dataclasses
from typing import Final

from ckptfmt.trainer.handle import SaveHandle

#: How many steps without a save tell how long a step takes.
_STEPS: Final = 100


@dataclasses.dataclass(frozen=True, slots=True)
class Beside:
    """A save that is over.

    Attributes:
        handle: of the save.
        steps_s: how long each step beside it took, in seconds.
        others: the saves that began while it went on.
    """

    handle: SaveHandle
    steps_s: list[float]
    others: list[SaveHandle]


class StepMeter:
    """Measures each step; of saves that begin while one is measured, nothing is measured.

    Attributes:
        alone_s: how long each of the last steps without a save took, in seconds.
    """

    def __init__(self) -> None:
        self.alone_s: collections.deque[float] = collections.deque(maxlen=_STEPS)
        self._last_s: float | None = None
        self._handle: SaveHandle | None = None
        self._beside_s: list[float] = []
        self._others: list[SaveHandle] = []

    def note_steps(self, now_s: float, count: int) -> tuple[float, Beside | None]:
        """Take note that so many steps are over; return how long they took, and the save that is over since then."""
        seconds = 0.0 if self._last_s is None else now_s - self._last_s
        is_first, self._last_s = self._last_s is None, now_s
        if is_first:  # it compiles, or waits for data
            return seconds, None
        handle = self._handle
        if handle is None:
            self.alone_s.append(seconds / count)
            return seconds, None
        self._beside_s += [seconds / count] * count
        if handle.state not in ("COMMITTED", "FAILED", "SKIPPED"):
            return seconds, None
        over = Beside(handle, self._beside_s, self._others)
        self._handle, self._beside_s, self._others = None, [], []
        return seconds, over

    def note_save(self, handle: SaveHandle) -> None:
        """Take note that a save has begun."""
        if self._handle is None:
            self._handle = handle
        else:
            self._others.append(handle)
