"""It doesn't compare blocks with their digests: damage is handed on as if it had been saved."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptfmt_conformance.adapters.reference import Checkpoint, Reference

CONVICTED_BY = ("parts/invalid/block-digest",)


def _find_nothing(*_: object, **__: object) -> tuple[()]:
    return ()


class Broken(Reference):
    """See above."""

    replacements = (("ckptfmt.read.verify_blocks:iter_damages", _find_nothing),)

    def _open(self, path: Path, request: Mapping[str, Any]) -> Checkpoint:
        checkpoint = super()._open(path, request)
        checkpoint.is_verifying = False
        return checkpoint
