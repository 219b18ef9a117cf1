"""It puts the boxes that a tensor was saved in behind each other, as if each had whole rows."""

from __future__ import annotations

from ckptfmt_conformance.adapters.reference import Box, Checkpoint, Reference

BREAKS = ("REQ-OPN-005",)
CONVICTED_BY = ("index/valid/quarters", "opening/valid/two-columns")


class Broken(Reference):
    """See above."""

    def content(self, checkpoint: Checkpoint, key: tuple[str, str, str], box: Box) -> bytes:
        """Return what each saved box has of a box, one behind the other."""
        sharding = checkpoint.tensors[key].sharding
        pieces = (saved.intersect(box) for saved, _ in sharding)
        return b"".join(super(Broken, self).content(checkpoint, key, piece) for piece in pieces if piece is not None)
