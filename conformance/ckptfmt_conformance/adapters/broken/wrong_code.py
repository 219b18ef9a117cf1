"""It says of all that is wrong that the document is damaged."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptfmt_conformance.adapters.reference import Reference
from ckptfmt_conformance.protocol import Rejected

BREAKS = ("REQ-VER-004", "REQ-ERR-001")
CONVICTED_BY = ("documents/invalid/empty", "index/invalid/tiling-gap", "parts/invalid/block-digest")


class Broken(Reference):
    """See above."""

    def open(self, path: Path, request: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """Open it, or say the same as ever."""
        try:
            return super().open(path, request)
        except Rejected as answer:
            raise Rejected("DOC_DIGEST", answer.where, answer.phase) from answer
