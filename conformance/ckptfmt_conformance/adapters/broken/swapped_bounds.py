"""It takes the first dimension of a box for the last one."""

from __future__ import annotations

from ckptfmt_conformance.adapters.reference import Box, Checkpoint, Reference

BREAKS = ("REQ-OPN-005",)
CONVICTED_BY = ("opening/valid/read-a-column", "opening/valid/read-inside-one-box")


class Broken(Reference):
    """See above."""

    def digest_of(self, checkpoint: Checkpoint, field: str, name: str, scope: str, box: Box) -> str:
        """Return the digest of another box."""
        return super().digest_of(checkpoint, field, name, scope, Box(box.begin[::-1], box.shape[::-1]))
