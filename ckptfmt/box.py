"""Half-open hyper-rectangles of a tensor, in elements."""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Box:
    """The piece ``[begin, begin + shape)`` of a tensor, one entry per dimension; a scalar has none.

    >>> Box((0, 2), (4, 3)).intersect(Box((1, 0), (9, 4)))
    Box(begin=(1, 2), shape=(3, 2))
    """

    begin: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, global_shape: tuple[int, ...]) -> Box:
        """Return the box of a whole tensor."""
        return cls((0,) * len(global_shape), tuple(global_shape))

    @property
    def end(self) -> tuple[int, ...]:
        """The first index after the box, per dimension."""
        return tuple(begin + extent for begin, extent in zip(self.begin, self.shape, strict=True))

    @property
    def element_count(self) -> int:
        """The number of elements of the box; a scalar has one."""
        return math.prod(self.shape)

    def intersect(self, other: Box) -> Box | None:
        """Return the intersection of two boxes, or None; an empty box intersects no box."""
        # The usual case, of whole tensors.
        if self.begin == other.begin and self.shape == other.shape:
            return self if all(self.shape) else None
        begin = tuple(max(a, b) for a, b in zip(self.begin, other.begin, strict=True))
        end = tuple(min(a, b) for a, b in zip(self.end, other.end, strict=True))
        shape = tuple(e - b for b, e in zip(begin, end, strict=True))
        return Box(begin, shape) if all(extent > 0 for extent in shape) else None

    def contains(self, other: Box) -> bool:
        """Return whether `other` lies within this box."""
        return all(
            a <= b and b_end <= a_end
            for a, b, a_end, b_end in zip(self.begin, other.begin, self.end, other.end, strict=True)
        )

    def relative_to(self, outer: Box) -> tuple[slice, ...]:
        """Return the slices of this box in an array for `outer`."""
        return tuple(
            slice(begin - base, begin - base + extent)
            for begin, base, extent in zip(self.begin, outer.begin, self.shape, strict=True)
        )
