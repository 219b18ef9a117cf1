"""It finds a tensor by its name, and not by an alias."""

from __future__ import annotations

from typing import Any

from ckptfmt_conformance.adapters.reference import Reference

BREAKS = ("REQ-IDX-013",)
CONVICTED_BY = (
    "opening/valid/read-by-alias",
    "trees/valid/reference-to-an-alias",
)


def _find(self: Any, field: str, name: str, scope: str = "global") -> Any:  # noqa: ANN401 - of the implementation
    return self.tensors.get((field, name, scope))


class Broken(Reference):
    """See above."""

    replacements = (("ckptfmt.read.files:CheckpointFiles.find", _find),)
