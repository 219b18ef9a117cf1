"""It checks the tables of an index or part before the members that all documents have."""

from __future__ import annotations

from typing import Any

from ckptfmt_conformance.adapters.reference import Reference, original

BREAKS = ("REQ-IDX-014",)
CONVICTED_BY = (
    "index/invalid/order-clock-first",
    "index/invalid/order-origin-first",
    "parts/invalid/order-writer-first",
)

_check_scopes = original("ckptfmt.documents.tables:check_scopes")
_parse_origin = original("ckptfmt.documents.tables:parse_origin")


def _parse_late(columns: Any) -> Any:  # noqa: ANN401 - of the implementation
    _check_scopes(columns)
    return _parse_origin(columns)


class Broken(Reference):
    """See above."""

    replacements = (("ckptfmt.documents.tables:parse_origin", _parse_late),)
