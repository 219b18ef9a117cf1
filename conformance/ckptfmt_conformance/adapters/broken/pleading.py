"""It says of everything that it doesn't support that."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptfmt_conformance.adapters.reference import Reference
from ckptfmt_conformance.protocol import Unsupported

BREAKS = ("REQ-VER-006",)
CONVICTED_BY = ("manifest/valid/small", "index/invalid/tiling-gap")


class Broken(Reference):
    """See above."""

    def open(self, path: Path, request: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """Say no more."""
        del path, request
        raise Unsupported("reading")
