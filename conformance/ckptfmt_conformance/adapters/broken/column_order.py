"""It lets the first dimension of a box run fastest."""

from __future__ import annotations

import numpy as np

from ckptfmt_conformance.adapters.reference import Box, Checkpoint, Reference

BREAKS = ("REQ-TEN-001",)
CONVICTED_BY = ("manifest/valid/small", "opening/valid/read-across-boxes")


class Broken(Reference):
    """See above."""

    def content(self, checkpoint: Checkpoint, key: tuple[str, str, str], box: Box) -> bytes:
        """Return the bytes of a box, column by column."""
        content = super().content(checkpoint, key, box)
        if not content:
            return content
        elements = np.frombuffer(content, f"V{len(content) // box.element_count}")
        return elements.reshape(box.shape).tobytes(order="F")
