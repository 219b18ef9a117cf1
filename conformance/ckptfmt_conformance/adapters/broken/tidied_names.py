"""It takes the name of a tensor for a path, and tidies it up."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptfmt_conformance.adapters.reference import Reference

BREAKS = ("REQ-IDX-011",)
CONVICTED_BY = ("index/valid/stray-paths",)


class Broken(Reference):
    """See above."""

    def open(self, path: Path, request: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """Open it, and give tensors other names."""
        answer = super().open(path, request)
        return {**answer, "tensors": {posixpath.normpath(name): one for name, one in answer["tensors"].items()}}
