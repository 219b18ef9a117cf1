"""It wants lists packed from fifteen entries on."""

from __future__ import annotations

from ckptfmt_conformance.adapters.reference import Reference

BREAKS = ("REQ-TRE-010",)
CONVICTED_BY = (
    "trees/invalid/packed-15",
    "trees/valid/not-packed",
)


class Broken(Reference):
    """See above."""

    replacements = (("ckptfmt.limits:COMPACT_ITEMS", 15),)
