"""It reads every byte while it opens, and says so."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptfmt_conformance.adapters.reference import Reference
from ckptfmt_conformance.protocol import Rejected

BREAKS = ("REQ-OPN-002",)
CONVICTED_BY = (
    "parts/invalid/block-digest",
    "shards/invalid/bit-in-last-byte",
    "prediction/invalid/base-without-weight",
)


class Broken(Reference):
    """See above."""

    def open(self, path: Path, request: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """Read and check all there is, and call that opening."""
        try:
            self.validate(path, request or {})
            return super().open(path, request)
        except Rejected as answer:
            raise Rejected(answer.code, answer.where, "open") from answer
