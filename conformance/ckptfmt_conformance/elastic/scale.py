"""A loss scale of powers of two, decided on the summed gradient: every process takes the same decision."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

__all__ = ["LossScale"]


@dataclasses.dataclass(slots=True, kw_only=True)
class LossScale:
    """Scale losses for half precision; halve after an overflow, double after `interval` steps without one.

    Powers of two change no bit of a gradient but its exponent, so that scaling can be undone exactly.

    Attributes:
        scale: what losses are multiplied by; a power of two.
        interval: steps without overflow after which it doubles.
        good: such steps since it last changed.

    >>> scale = LossScale(scale=1024.0, interval=2)
    >>> [scale.update(overflow=overflow) for overflow in (False, False, True)], scale.scale
    ([1024.0, 2048.0, 1024.0], 1024.0)
    """

    scale: float = 65536.0
    interval: int = 2000
    good: int = 0

    def update(self, *, overflow: bool) -> float:
        """Take note of a step, and return the scale of the next one."""
        self.good = 0 if overflow else self.good + 1
        if overflow:
            self.scale = self.scale / 2
        elif self.good == self.interval:
            self.scale, self.good = self.scale * 2, 0
        return self.scale

    def state_dict(self) -> dict[str, Any]:
        """Return scale, interval and good steps."""
        return dataclasses.asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        self.scale, self.interval, self.good = state["scale"], state["interval"], state["good"]
