"""It begins each launch anew, whatever the run has."""

from __future__ import annotations

from typing import Any

from ckptfmt_conformance.adapters.reference import Reference

BREAKS = ("REQ-RUN-006",)
CONVICTED_BY = (
    "run/invalid/launch-none-whole",
    "run/valid/launch-aborted",
    "run/valid/launch-damaged",
    "run/valid/launch-newest",
    "run/valid/launch-unfinished",
)


def _choose_nothing(*_: Any) -> Any:  # noqa: ANN401 - of the implementation
    return None, "lineage"


class Broken(Reference):
    """See above."""

    replacements = (("ckptfmt.run.lineage:_choose_by_lineage", _choose_nothing),)
