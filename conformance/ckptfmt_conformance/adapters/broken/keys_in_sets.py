"""It takes nothing into a set that couldn't be the key of a dict."""

from __future__ import annotations

from ckptfmt_conformance.adapters.reference import Reference, original

BREAKS = ("REQ-TRE-009",)
CONVICTED_BY = ("trees/valid/set-members",)

_is_key = original("ckptfmt.documents.tree:_is_key")


class Broken(Reference):
    """See above."""

    replacements = (("ckptfmt.documents.tree:_is_member", _is_key),)
