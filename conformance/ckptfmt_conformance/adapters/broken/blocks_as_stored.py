"""It takes the blocks of a box in the order in which a file has them."""

from __future__ import annotations

from typing import Any

from ckptfmt_conformance.adapters.reference import Reference, original

BREAKS = ("REQ-PRT-006",)
CONVICTED_BY = ("deltas/valid/blocks-backwards",)

np: Any = original("ckptfmt.documents.extents:np")


def _order(self: Any) -> Any:  # noqa: ANN401 - of the implementation
    return np.argsort(self.box, kind="stable")


class Broken(Reference):
    """See above."""

    replacements = (("ckptfmt.documents.extents:Extents.order", _order),)
