"""It takes another loader's library and version only as a document would name them."""

from __future__ import annotations

from typing import Any

from ckptfmt_conformance.adapters.reference import CkptError, Code, Reference, original

BREAKS = ("REQ-CUR-022",)
CONVICTED_BY = ("context/valid/loader-named", "context/valid/loader-nameless")

_parse_foreign = original("ckptfmt.documents.cursor:parse_foreign")


def _parse_named(tree: Any, **members: Any) -> Any:  # noqa: ANN401 - of the implementation
    foreign = _parse_foreign(tree, **members)
    if not all(name and name.isprintable() for name in (foreign.lib, foreign.version)):
        raise CkptError(Code.CURSOR_FORM, "a library without a name", where="loader")
    return foreign


class Broken(Reference):
    """See above."""

    replacements = (("ckptfmt.read.verify:parse_foreign", _parse_named),)
