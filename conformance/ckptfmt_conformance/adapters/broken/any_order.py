"""It takes the rows of a table in whatever order they are."""

from __future__ import annotations

from typing import Any

from ckptfmt_conformance.adapters.reference import CkptError, Reference, original

BREAKS = ("REQ-IDX-003",)
CONVICTED_BY = ("parts/invalid/no-bytes-unsorted",)

_place_extents = original("ckptfmt.documents.holdings:place_extents")


def _place_any(rows: Any, nbytes: Any, files: Any) -> Any:  # noqa: ANN401 - of the implementation
    try:
        return _place_extents(rows, nbytes, files)
    except CkptError as error:
        if error.code != "COLUMN_ORDER":
            raise
        return files.header_nbytes[rows.file]


class Broken(Reference):
    """See above."""

    replacements = (("ckptfmt.documents.holdings:place_extents", _place_any),)
