"""A loss scale of powers of two. The decision uses the summed gradient, so all processes agree."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

__all__ = ["LossScale"]


@dataclasses.dataclass(slots=True, kw_only=True)
class LossScale:
    """A loss scale for half precision: halved after an overflow, doubled after enough good steps.

    A power of two changes only the exponent of a gradient, so scaling can be undone exactly.

    Attributes:
        scale: the factor of the losses; a power of two.
        interval: the number of steps without overflow before the scale doubles.
        good: the number of steps without overflow since the last change.

    >>> scale = LossScale(scale=1024.0, interval=2)
    >>> [scale.update(overflow=overflow) for overflow in (False, False, True)], scale.scale
    ([1024.0, 2048.0, 1024.0], 1024.0)
    """

    scale: float = 65536.0
    interval: int = 2000
    good: int = 0

    def update(self, *, overflow: bool) -> float:
        """Count a step, and return the scale of the next step."""
        self.good = 0 if overflow else self.good + 1
        if overflow:
            self.scale = self.scale / 2
        elif self.good == self.interval:
            self.scale = self.scale * 2
            self.good = 0
        return self.scale

    def state_dict(self) -> dict[str, Any]:
        """Return scale, interval and good steps."""
        return dataclasses.asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self.scale = state["scale"]
        self.interval = state["interval"]
        self.good = state["good"]
