"""It takes every mark behind a letter for a letter that isn't composed, and every other letter for composed."""

from __future__ import annotations

import unicodedata

from ckptfmt_conformance.adapters.reference import Reference

BREAKS = ("REQ-DOC-006",)
CONVICTED_BY = (
    "documents/invalid/string-excluded",
    "documents/invalid/string-jamo",
    "documents/invalid/string-singleton",
    "documents/valid/string-normal-form",
)


class _Unicode:
    """Says what is normalised."""

    def is_normalized(self, form: str, text: str) -> bool:
        """Say it."""
        del form
        return not any(map(unicodedata.combining, text))


class Broken(Reference):
    """See above."""

    replacements = (("ckptfmt.documents.canonical:unicodedata", _Unicode()),)
