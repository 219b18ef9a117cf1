"""It doesn't count the corners of a tensor's boxes."""

from __future__ import annotations

from ckptfmt_conformance.adapters.reference import Reference

BREAKS = ("REQ-LIM-001",)
CONVICTED_BY = ("index/invalid/corners-beyond",)


class Broken(Reference):
    """See above."""

    replacements = (("ckptfmt.limits:CORNERS", 1 << 62),)
