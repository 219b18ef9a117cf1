"""It makes floats of 32 bits of those of 16: whoever loads has other bytes, and another dtype, than were saved."""

from __future__ import annotations

from typing import Any

import numpy as np
from blake3 import blake3

from ckptfmt_conformance.adapters.reference import Box, Checkpoint, Reference, numpy_dtype

BREAKS = ("REQ-OPN-007",)
CONVICTED_BY = ("shards/valid/dtypes",)


class Broken(Reference):
    """See above."""

    def digests(self, checkpoint: Checkpoint, key: tuple[str, str, str]) -> dict[str, Any]:
        """Return what is said of a tensor, once it is widened."""
        tensor = checkpoint.tensors[key]
        if tensor.dtype not in ("bfloat16", "float16"):
            return super().digests(checkpoint, key)
        content = self.content(checkpoint, key, Box.whole(tensor.global_shape))
        with np.errstate(all="ignore"):
            wide = np.frombuffer(content, numpy_dtype(tensor.dtype)).astype(np.float32).tobytes()
        return {
            "dtype": "float32",
            "shape": list(tensor.global_shape),
            "blake3": blake3(wide).hexdigest(),
            "first16": wide[:16].hex(),
        }
