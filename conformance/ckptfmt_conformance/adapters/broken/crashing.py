"""It dies of what it should refuse, with an error that isn't its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptfmt_conformance.adapters.reference import Reference
from ckptfmt_conformance.protocol import Rejected

BREAKS = ("REQ-ERR-001",)
CONVICTED_BY = ("documents/invalid/empty", "index/invalid/tiling-gap")


class Broken(Reference):
    """See above."""

    def open(self, path: Path, request: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """Open it, or crash."""
        try:
            return super().open(path, request)
        except Rejected as answer:
            raise RuntimeError(f"unexpected {answer.code}") from answer
