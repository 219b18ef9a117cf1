"""It doesn't weigh what a document becomes against what is stored of it."""

from __future__ import annotations

from typing import Any

from ckptfmt_conformance.adapters.reference import Reference, original

BREAKS = ("REQ-DOC-029", "REQ-DOC-030")
CONVICTED_BY = (
    "tables/invalid/extents-compressed",
    "tables/invalid/rows-compressed",
    "tables/invalid/trees-compressed",
)

_weight: Any = original("ckptfmt.documents.msgpk:Weight")


def _most(_: int) -> Any:  # noqa: ANN401 - of the implementation
    return _weight(rows=1 << 40, extents=1 << 40, tree_nbytes=1 << 40)


class Broken(Reference):
    """See above."""

    replacements = (("ckptfmt.documents.msgpk:Weight.most", staticmethod(_most)),)
