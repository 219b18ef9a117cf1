"""It keeps the names of tensors in normal form C."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptfmt_conformance.adapters.reference import Reference

BREAKS = ("REQ-IDX-011",)
CONVICTED_BY = ("index/valid/names-of-two-forms", "index/valid/unicode-order")


class Broken(Reference):
    """See above."""

    def open(self, path: Path, request: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """Open it, and give tensors other names."""
        answer = super().open(path, request)
        tensors = {unicodedata.normalize("NFC", name): one for name, one in answer["tensors"].items()}
        return {**answer, "tensors": tensors}
