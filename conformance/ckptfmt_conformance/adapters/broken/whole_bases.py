"""It refuses to read from a base unless all of that is whole, and nothing else beside it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptfmt_conformance.adapters.reference import Checkpoint, Reference, original
from ckptfmt_conformance.protocol import Rejected

BREAKS = ("REQ-DEL-007", "REQ-OPN-009")
CONVICTED_BY = (
    "deltas/valid/base-beyond-bit",
    "deltas/valid/base-beyond-key",
    "deltas/valid/base-beyond-lost",
    "deltas/valid/base-beyond-tree",
    "deltas/valid/base-extra-files",
)

_validate = original("ckptfmt:validate")


class Broken(Reference):
    """See above."""

    def open(self, path: Path, request: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """Open it, once its bases are checked."""
        answer = super().open(path, request)
        with self._open(path, request or {}) as checkpoint:
            names = _bases_beside(checkpoint, path)
        for name in names:
            report = _validate(path.parent / name)
            if report.violations:
                raise Rejected(report.violations[0].code, None, "open")
            if report.warnings:
                raise Rejected("DOC_MISMATCH", None, "open")
        return answer


def _bases_beside(checkpoint: Checkpoint, path: Path) -> list[str]:
    return [one.name for one in checkpoint.manifest.references if (path.parent / one.name).is_dir()]
