"""Its process ends at what it should refuse; to a shell that looks like a refusal."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptfmt_conformance.adapters.reference import Reference
from ckptfmt_conformance.protocol import Rejected

CONVICTED_BY = ("documents/invalid/empty", "index/invalid/tiling-gap")


class Broken(Reference):
    """See above."""

    def open(self, path: Path, request: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """Open it, or leave."""
        try:
            return super().open(path, request)
        except Rejected:
            os._exit(1)
