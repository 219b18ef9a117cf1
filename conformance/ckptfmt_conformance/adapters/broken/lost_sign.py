"""It loses the sign of zero, wherever a tensor or a tree has a float."""

from __future__ import annotations

import json

import numpy as np

from ckptfmt_conformance.adapters.reference import Box, Checkpoint, Reference

BREAKS = ("REQ-OPN-007",)
CONVICTED_BY = ("trees/valid/floats", "trees/valid/complex", "shards/valid/bits")


class Broken(Reference):
    """See above."""

    def content(self, checkpoint: Checkpoint, key: tuple[str, str, str], box: Box) -> bytes:
        """Return the bytes of a box, 0.0 for -0.0."""
        content = super().content(checkpoint, key, box)
        dtype = checkpoint.tensors[key].dtype
        if dtype not in ("float32", "float64"):
            return content
        values = np.frombuffer(content, dtype).copy()
        values[values == 0] = 0
        return values.tobytes()

    def tree_of(self, content: bytes) -> object:
        """Return what is said of a tree, 0.0 for -0.0."""
        return json.loads(json.dumps(super().tree_of(content)).replace(f'"{"80" + "00" * 7}"', f'"{"00" * 8}"'))
