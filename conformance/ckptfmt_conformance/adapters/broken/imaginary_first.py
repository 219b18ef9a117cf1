"""It takes the imaginary part of a complex element for the real one."""

from __future__ import annotations

import numpy as np

from ckptfmt_conformance.adapters.reference import Box, Checkpoint, Reference

BREAKS = ("REQ-TEN-002",)
CONVICTED_BY = ("shards/valid/dtypes",)

_WIDTHS = {"complex32": 2, "complex64": 4, "complex128": 8}


class Broken(Reference):
    """See above."""

    def content(self, checkpoint: Checkpoint, key: tuple[str, str, str], box: Box) -> bytes:
        """Return the bytes of a box, both parts exchanged."""
        content = super().content(checkpoint, key, box)
        width = _WIDTHS.get(checkpoint.tensors[key].dtype)
        if width is None:
            return content
        return np.frombuffer(content, f"u{width}").reshape(-1, 2)[:, ::-1].tobytes()
