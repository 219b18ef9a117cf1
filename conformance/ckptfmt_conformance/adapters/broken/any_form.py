"""It takes strings of JSON documents in any form of Unicode."""

from __future__ import annotations

from ckptfmt_conformance.adapters.reference import Reference

BREAKS = ("REQ-DOC-006",)
CONVICTED_BY = (
    "documents/invalid/name-not-nfc",
    "documents/invalid/string-excluded",
    "documents/invalid/string-jamo",
    "documents/invalid/string-marks",
    "documents/invalid/string-not-nfc",
    "documents/invalid/string-singleton",
)


class _Unicode:
    """Says what is normalised."""

    def is_normalized(self, form: str, text: str) -> bool:
        """Say it."""
        del form, text
        return True


class Broken(Reference):
    """See above."""

    replacements = (("ckptfmt.documents.canonical:unicodedata", _Unicode()),)
