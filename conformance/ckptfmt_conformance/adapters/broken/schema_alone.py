"""It refuses all that is wrong in an index or part as a validator of JSON Schema does: with one code."""

from __future__ import annotations

from typing import Any

from ckptfmt_conformance.adapters.reference import Reference
from ckptfmt_conformance.protocol import Rejected

BREAKS = ("REQ-IDX-014",)
CONVICTED_BY = (
    "index/invalid/absent-no-map",
    "index/invalid/dtypes-of-integers",
    "index/invalid/scopes-no-list",
    "parts/invalid/digests-text",
    "parts/invalid/kind-no-column",
    "parts/invalid/scope-form",
)

_COLUMNS = ("COLUMN_FORM", "MANIFEST_FIELDS", "SCOPE_FORM", "UNSAFE_PATH")


class Broken(Reference):
    """See above."""

    def open(self, path: Any, request: Any) -> Any:  # noqa: ANN401 - of the implementation
        """Refuse with the code of documents."""
        try:
            return super().open(path, request)
        except Rejected as answer:
            raise Rejected(
                "DOC_SCHEMA" if answer.code in _COLUMNS else answer.code, answer.where, answer.phase
            ) from answer
