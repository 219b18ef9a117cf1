"""It says of an extent that is spelled out in full that the box leaves its tensor."""

from __future__ import annotations

from typing import Any

from ckptfmt_conformance.adapters.reference import CkptError, Code, Reference, original

BREAKS = ("REQ-PRT-013",)
CONVICTED_BY = (
    "parts/invalid/cut-shape-spelled-out",
    "parts/invalid/cut-shape-spelled-out-first",
)

_parse_holdings = original("ckptfmt.documents.part:parse_holdings")


def _parse(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - of the implementation
    try:
        return _parse_holdings(*arguments, **options)
    except CkptError as error:
        raise CkptError(Code.BOX_BOUNDS if error.requirement == "REQ-PRT-013" else error.code, "boxes") from error


class Broken(Reference):
    """See above."""

    replacements = (("ckptfmt.documents.part:parse_holdings", _parse),)
