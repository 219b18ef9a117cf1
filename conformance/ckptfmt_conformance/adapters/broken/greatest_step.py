"""It goes on from the greatest step of all, whatever was rolled back."""

from __future__ import annotations

from typing import Any

from ckptfmt_conformance.adapters.reference import Reference

BREAKS = ("REQ-RUN-006",)
CONVICTED_BY = (
    "run/valid/fallback",
    "run/valid/launch-resume-from-retired",
    "run/valid/launch-smaller-steps",
    "run/valid/overtaken-but-retired",
    "run/valid/overtaken-by-hand",
    "run/valid/resume-from-retired",
    "run/valid/rolled-back",
    "run/valid/rolled-forward",
    "run/valid/rolled-back-unsaved",
)


def _iter_greatest(_: list[Any], entries: list[Any]) -> Any:  # noqa: ANN401 - of the implementation
    return iter(sorted((one for one in entries if one.manifest is not None), key=lambda one: (-one.step, -one.launch)))


class Broken(Reference):
    """See above."""

    replacements = (("ckptfmt.run.lineage:iter_lineage", _iter_greatest),)
