"""It never comes back from what it should refuse."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptfmt_conformance.adapters.reference import Reference
from ckptfmt_conformance.protocol import Rejected

CONVICTED_BY = ("documents/invalid/empty",)


class Broken(Reference):
    """See above."""

    def open(self, path: Path, request: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """Open it, or wait."""
        try:
            return super().open(path, request)
        except Rejected:
            time.sleep(3600)
            raise
