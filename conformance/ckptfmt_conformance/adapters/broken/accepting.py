"""It accepts everything, and reads nothing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptfmt_conformance.adapters.reference import Reference

CONVICTED_BY = ("manifest/valid/small", "parts/valid/two-writers", "index/invalid/tiling-gap")


class Broken(Reference):
    """See above."""

    def open(self, path: Path, request: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """Accept it."""
        del path, request
        return {"tensors": {}}

    def parse(self, path: Path, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Accept it."""
        del path, request
        return {}
