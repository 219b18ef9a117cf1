"""It says of everything that it refuses that it found it while it opened."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptfmt_conformance.adapters.reference import Reference
from ckptfmt_conformance.protocol import Rejected

CONVICTED_BY = (
    "parts/invalid/block-digest",
    "shards/invalid/bit-in-last-byte",
    "shards/invalid/tail",
    "deltas/invalid/stored-bit",
)


class Broken(Reference):
    """See above."""

    def open(self, path: Path, request: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """Open it, or claim that opening found what is wrong."""
        try:
            return super().open(path, request)
        except Rejected as answer:
            raise Rejected(answer.code, answer.where, "open") from answer
