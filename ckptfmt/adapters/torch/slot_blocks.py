"""Which blocks of device tensors a slot holds already: those needn't cross the bus again.

A slot is filled with the same image again and again. Blocks whose digests, computed where the tensor lives, are those
of the last filling are there already, so that what a slot holds is always a whole snapshot: whoever reads it needn't
know how it came there.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Final

import numpy as np

from ckptfmt.digest import DIGEST_NBYTES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ckptfmt.write.image import Image

#: For how many fillings at most a tensor is only copied. Dense training changes every block at every step, and then
#: digests tell nothing; what is left of looking after it is two of 18 fillings.
_LONGEST_PAUSE: Final = 16


@dataclasses.dataclass(slots=True, eq=False)
class Watched:
    """What a slot holds of one tensor.

    Attributes:
        held: digests of its blocks, of shape (blocks, 32), before it is filled; None where they aren't known.
        found: those of what it is being filled with; None where nobody looks.
    """

    held: NDArray[np.uint8] | None = None
    found: NDArray[np.uint8] | None = None
    _pause: int = 0
    _rest: int = 0

    def begin(self, *, is_known: bool) -> None:
        """Prepare for the next filling; see `SlotBlocks.begin`."""
        self.held, self.found = self.found if is_known else None, None

    def is_due(self) -> bool:
        """Tell whether to look at this filling; to be asked once."""
        if self._rest:
            self._rest -= 1
            return False
        return True

    def compare(self, digests: bytes) -> NDArray[np.bool_]:
        """Take the digests of what it is filled with; return for each block whether the slot has it."""
        self.found = np.frombuffer(digests, np.uint8).reshape(-1, DIGEST_NBYTES)
        if self.held is None:
            return np.zeros(len(self.found), np.bool_)
        kept: NDArray[np.bool_] = (self.found == self.held).all(axis=1)
        self._pause = 0 if kept.any() else min(max(1, 2 * self._pause), _LONGEST_PAUSE)
        self._rest = self._pause
        return kept


class SlotBlocks:
    """What a slot holds of the tensors of devices."""

    def __init__(self) -> None:
        self._image: Image | None = None
        self._watched: dict[int, Watched] = {}
        self.block_nbytes = 0

    def begin(self, image: Image, *, is_known: bool) -> None:
        """Prepare for the next filling.

        Args:
            image: what the slot will hold.
            is_known: whether what it holds now was written, and thereby compared with what devices had found.
        """
        if image is not self._image:
            self._image, self._watched, self.block_nbytes = image, {}, image.block_nbytes
        for watched in self._watched.values():
            watched.begin(is_known=is_known)

    def watch(self, begin: int) -> Watched | None:
        """Return what is known of the tensor whose first byte in the image is `begin`; None to copy it unseen."""
        watched = self._watched.setdefault(begin, Watched())
        return watched if watched.is_due() else None
