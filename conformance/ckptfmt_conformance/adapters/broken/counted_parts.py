"""It counts the files in `parts/` to see whether all are there: what another attempt left is one too many."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptfmt_conformance.adapters.reference import Checkpoint, Reference
from ckptfmt_conformance.protocol import Rejected

BREAKS = ("REQ-CKP-005",)
CONVICTED_BY = ("opening/valid/left-behind",)


class Broken(Reference):
    """See above."""

    def _open(self, path: Path, request: Mapping[str, Any]) -> Checkpoint:
        checkpoint = super()._open(path, request)
        if len(checkpoint.store.list_names("parts")) != len(checkpoint.index.parts):
            raise Rejected("FILE_MISSING", "parts", "open")
        return checkpoint
