"""It relies on each box of a safetensors file having one extent, as writers make it, and reads no other."""

from __future__ import annotations

from ckptfmt_conformance.adapters.reference import Box, Checkpoint, Reference

BREAKS = ("REQ-PRT-006", "REQ-OPN-005")
CONVICTED_BY = ("parts/valid/two-extents",)


class Broken(Reference):
    """See above."""

    def content(self, checkpoint: Checkpoint, key: tuple[str, str, str], box: Box) -> bytes:
        """Return the first extent's bytes, and zeros for those of the others."""
        content = super().content(checkpoint, key, box)
        for number in range(len(checkpoint.index.parts)):
            for held in checkpoint.open_part(number).iter_boxes():
                if held.key == key and len(held.extents) > 1 and not held.extents[1].is_encoded:
                    nbytes = held.extents[0].block_count * checkpoint.index.origin.block_nbytes
                    return content[:nbytes].ljust(len(content), b"\0")
        return content
