"""It writes other bytes than it is given once there are more than a few, and signs them all the same."""

from __future__ import annotations

from typing import Any

import numpy as np

from ckptfmt_conformance.adapters.reference import Reference, numpy_dtype

CONVICTED_BY = ("opening/valid/write-odd-shapes",)


class Broken(Reference):
    """See above."""

    def array_of(self, dtype: str, shape: list[int]) -> np.ndarray[Any, Any]:
        """Return an array whose byte i is i mod 256."""
        kind = numpy_dtype(dtype)
        count = kind.itemsize * int(np.prod(shape, dtype=np.int64))
        return np.arange(count, dtype=np.int64).astype(np.uint8).view(kind).reshape(shape)
