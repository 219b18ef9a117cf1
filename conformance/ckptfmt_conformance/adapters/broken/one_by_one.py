"""It knows lists only entry by entry."""

from __future__ import annotations

from typing import Any

from ckptfmt_conformance.adapters.reference import Reference, original

BREAKS = ("REQ-TRE-010",)
CONVICTED_BY = ("trees/valid/packed",)

_decoders: Any = original("ckptfmt.documents.tree:_DECODERS")


class Broken(Reference):
    """See above."""

    replacements = (
        ("ckptfmt.documents.tree:_DECODERS", {tag: one for tag, one in _decoders.items() if tag not in "LUQ"}),
    )
