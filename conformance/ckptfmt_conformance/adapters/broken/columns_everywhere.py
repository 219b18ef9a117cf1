"""It says of each member of an index or part that isn't of its type that a column is of the wrong form."""

from __future__ import annotations

from typing import Any

from ckptfmt_conformance.adapters.reference import Reference
from ckptfmt_conformance.protocol import Rejected

BREAKS = ("REQ-IDX-014",)
CONVICTED_BY = (
    "index/invalid/saved-unix-s-negative",
    "index/invalid/tensors-no-map",
    "parts/invalid/boxes-no-map",
    "parts/invalid/saved-unix-s-text",
)


class Broken(Reference):
    """See above."""

    def open(self, path: Any, request: Any) -> Any:  # noqa: ANN401 - of the implementation
        """Refuse with the code of columns."""
        try:
            return super().open(path, request)
        except Rejected as answer:
            is_table = "msgpack" in str(answer.where) and answer.code == "DOC_SCHEMA"
            raise Rejected("COLUMN_FORM" if is_table else answer.code, answer.where, answer.phase) from answer
