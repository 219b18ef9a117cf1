"""Tensors that are there already, touched, and loaded into; and proof that a load filled them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import blake3
import numpy as np
import torch
from numpy.typing import NDArray

#: A NaN that no training makes.
_SPOILT: Final = 0x7FC0BAD0


class Destination:
    """The tensors that everyone loads into, and what they are to hold afterwards.

    Args:
        tensors: of four-byte elements, contiguous; they hold now what is saved.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = dict(tensors)
        self.nbytes = sum(tensor.nbytes for tensor in self.tensors.values())
        self._flat = [tensor.detach().reshape(-1).view(torch.int32) for tensor in self.tensors.values()]
        self._ends = self._read_ends()
        self._digests = self._digest_all()

    def spoil(self) -> None:
        """Put a value everywhere that no load may leave there; so all of the memory is touched."""
        for flat in self._flat:
            flat.fill_(_SPOILT)

    def check(self) -> None:
        """Raise RuntimeError unless both ends of every tensor were loaded."""
        if self._read_ends() != self._ends:
            raise RuntimeError("a load left a tensor as it was")

    def check_all(self) -> None:
        """Raise RuntimeError unless every byte is what was saved."""
        if self._digest_all() != self._digests:
            raise RuntimeError("a load brought other bytes than were saved")

    def _read_ends(self) -> list[tuple[int, int]]:
        return [(int(flat[0]), int(flat[-1])) for flat in self._flat]

    def _digest_all(self) -> list[bytes]:
        return [_digest(flat.numpy()) for flat in self._flat]


def _digest(array: NDArray[np.int32]) -> bytes:
    return blake3.blake3(array.view(np.uint8).data, max_threads=blake3.blake3.AUTO).digest()
