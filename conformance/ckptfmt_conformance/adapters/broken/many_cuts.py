"""It doesn't count in how many dimensions a tensor is cut."""

from __future__ import annotations

from ckptfmt_conformance.adapters.reference import Reference

BREAKS = ("REQ-LIM-001",)
CONVICTED_BY = ("index/invalid/cut-in-9",)


class Broken(Reference):
    """See above."""

    replacements = (("ckptfmt.limits:SPLIT_NDIM", 32),)
