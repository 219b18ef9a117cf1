"""It cuts a tensor in no more than seven dimensions."""

from __future__ import annotations

from ckptfmt_conformance.adapters.reference import Reference

BREAKS = ("REQ-LIM-002",)
CONVICTED_BY = ("index/valid/cut-in-8",)


class Broken(Reference):
    """See above."""

    replacements = (("ckptfmt.limits:SPLIT_NDIM", 7),)
