"""It normalises by an old version of Unicode, to which newer marks are no marks."""

from __future__ import annotations

import itertools
import unicodedata
from typing import Any

from ckptfmt_conformance.adapters.reference import Reference

BREAKS = ("REQ-DOC-006",)
CONVICTED_BY = ("documents/invalid/string-marks",)

_OLD = unicodedata.ucd_3_2_0


class _Unicode:
    """Says what is normalised, one stretch of known code points after the other."""

    def is_normalized(self, form: Any, text: str) -> bool:  # noqa: ANN401 - of the implementation
        """Say it."""
        stretches = itertools.groupby(text, key=lambda one: _OLD.category(one) == "Cn")
        return all(is_new or unicodedata.is_normalized(form, "".join(some)) for is_new, some in stretches)


class Broken(Reference):
    """See above."""

    replacements = (("ckptfmt.documents.canonical:unicodedata", _Unicode()),)
