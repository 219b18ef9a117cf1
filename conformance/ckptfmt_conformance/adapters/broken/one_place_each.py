"""It takes two extents that begin at one byte for two that overlap, though neither has bytes."""

from __future__ import annotations

from typing import Any

from ckptfmt_conformance.adapters.reference import CkptError, Code, Reference, original

BREAKS = ("REQ-IDX-003",)
CONVICTED_BY = ("parts/valid/no-bytes",)

_place_extents = original("ckptfmt.documents.holdings:place_extents")


def _place_apart(rows: Any, nbytes: Any, files: Any) -> Any:  # noqa: ANN401 - of the implementation
    begins = _place_extents(rows, nbytes, files)
    places = list(zip(rows.file.tolist(), begins.tolist(), strict=True))
    if len(set(places)) != len(places):
        raise CkptError(Code.COLUMN_ORDER, "two extents in one place", where="extents")
    return begins


class Broken(Reference):
    """See above."""

    replacements = (("ckptfmt.documents.holdings:place_extents", _place_apart),)
