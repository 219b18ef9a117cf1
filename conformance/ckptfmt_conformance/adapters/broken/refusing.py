"""It refuses everything."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptfmt_conformance.adapters.reference import Reference
from ckptfmt_conformance.protocol import Rejected

BREAKS = ("REQ-VER-006",)
CONVICTED_BY = ("manifest/valid/small", "parts/valid/two-writers", "index/invalid/tiling-gap")


class Broken(Reference):
    """See above."""

    def open(self, path: Path, request: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """Refuse it."""
        del path, request
        raise Rejected("DOC_SYNTAX", None, "open")

    def parse(self, path: Path, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Refuse it."""
        del path, request
        raise Rejected("DOC_SYNTAX", None, "open")
