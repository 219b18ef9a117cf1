"""It finds everything, but only once it has handed out what it read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptfmt_conformance.adapters.reference import Reference
from ckptfmt_conformance.protocol import Rejected

BREAKS = ("REQ-ERR-002",)
CONVICTED_BY = ("documents/invalid/empty", "index/invalid/tiling-gap", "parts/invalid/block-digest")


class Broken(Reference):
    """See above."""

    def open(self, path: Path, request: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """Open it, or say too late what is wrong."""
        try:
            return super().open(path, request)
        except Rejected as answer:
            raise Rejected(answer.code, answer.where, "validate") from answer
