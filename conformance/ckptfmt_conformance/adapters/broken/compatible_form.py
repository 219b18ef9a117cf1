"""It wants strings in normal form KC, in which a ligature is its letters."""

from __future__ import annotations

import unicodedata

from ckptfmt_conformance.adapters.reference import Reference

BREAKS = ("REQ-DOC-006",)
CONVICTED_BY = ("documents/valid/string-normal-form",)


class _Unicode:
    """Says what is normalised."""

    def is_normalized(self, form: str, text: str) -> bool:
        """Say it."""
        del form
        return unicodedata.is_normalized("NFKC", text)


class Broken(Reference):
    """See above."""

    replacements = (("ckptfmt.documents.canonical:unicodedata", _Unicode()),)
