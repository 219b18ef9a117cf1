"""Its reading checks no block unless it is asked to verify everything, and says that reading found the damage."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptfmt_conformance.adapters.reference import Reference
from ckptfmt_conformance.protocol import Rejected

BREAKS = ("REQ-OPN-006",)
CONVICTED_BY = ("parts/invalid/block-digest", "shards/invalid/bit-in-first-byte")


def _place_unchecked(reading: Any, blocks: Any, content: memoryview) -> None:  # noqa: ANN401 - of the implementation
    reading.boxes[blocks.box].place(blocks, content)


class Broken(Reference):
    """See above."""

    # A check of everything has a method of its own for this.
    replacements = (("ckptfmt.read.reading:Reading._take", _place_unchecked),)

    def open(self, path: Path, request: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """Open it; what a check of everything finds, call found by reading."""
        try:
            return super().open(path, request)
        except Rejected as answer:
            raise Rejected(answer.code, answer.where, "open" if answer.phase == "open" else "read") from answer
