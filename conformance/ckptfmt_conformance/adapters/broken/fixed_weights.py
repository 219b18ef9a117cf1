"""It has one limit of extents and trees, however much is stored of a document."""

from __future__ import annotations

from typing import Any

from ckptfmt_conformance.adapters.reference import Reference, original

BREAKS = ("REQ-LIM-002", "REQ-DOC-029", "REQ-DOC-030")
CONVICTED_BY = (
    "tables/valid/extents-stored",
    "tables/valid/trees-stored",
)

_weight: Any = original("ckptfmt.documents.msgpk:Weight")


def _most(_: int) -> Any:  # noqa: ANN401 - of the implementation
    return _weight(rows=1 << 20, extents=2048, tree_nbytes=64 << 10)


class Broken(Reference):
    """See above."""

    replacements = (("ckptfmt.documents.msgpk:Weight.most", staticmethod(_most)),)
