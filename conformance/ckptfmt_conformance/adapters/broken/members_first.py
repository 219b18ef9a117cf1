"""It checks the members of an index or part before the version, and the origin before the profile."""

from __future__ import annotations

from typing import Any

from ckptfmt_conformance.adapters.reference import CkptError, Code, Reference, original

BREAKS = ("REQ-IDX-014", "REQ-DOC-010")
CONVICTED_BY = (
    "index/invalid/order-version-first",
    "parts/invalid/order-profile-first",
)

_check_version = original("ckptfmt.documents.canonical:check_version")
_columns = original("ckptfmt.documents.packed:Columns")
_parse_origin = original("ckptfmt.documents.tables:parse_origin")


def _check_late(signed: Any, where: str) -> Any:  # noqa: ANN401 - of the implementation
    columns = _columns(signed, tuple(signed), where)
    if "aliases" not in signed:
        raise CkptError(Code.DOC_SCHEMA, "no aliases")
    _parse_origin(columns)
    return _check_version(signed, where)


class Broken(Reference):
    """See above."""

    replacements = (
        ("ckptfmt.documents.index:check_version", _check_late),
        ("ckptfmt.documents.part:check_version", _check_late),
    )
