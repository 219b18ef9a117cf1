"""It takes elements to begin with their highest byte."""

from __future__ import annotations

import numpy as np

from ckptfmt_conformance.adapters.reference import Box, Checkpoint, Reference

BREAKS = ("REQ-TEN-002",)
CONVICTED_BY = (
    "manifest/valid/small",
    "shards/valid/dtypes",
    "shards/valid/bits",
    "prediction/valid/two-groups",
    "deltas/valid/base-whole",
)

#: Bytes of a number, of the dtypes with more than one; a complex element is two numbers.
_WIDTHS = {
    **dict.fromkeys(("uint16", "int16", "float16", "bfloat16", "complex32"), 2),
    **dict.fromkeys(("uint32", "int32", "float32", "complex64"), 4),
    **dict.fromkeys(("uint64", "int64", "float64", "complex128"), 8),
}


class Broken(Reference):
    """See above."""

    def content(self, checkpoint: Checkpoint, key: tuple[str, str, str], box: Box) -> bytes:
        """Return the bytes of a box, those of each number turned round."""
        content = super().content(checkpoint, key, box)
        width = _WIDTHS.get(checkpoint.tensors[key].dtype, 1)
        return np.frombuffer(content, f"u{width}").byteswap().tobytes()
