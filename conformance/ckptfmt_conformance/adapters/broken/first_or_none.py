"""It begins no launch if the newest candidate is damaged."""

from __future__ import annotations

from typing import Any

from ckptfmt_conformance.adapters.reference import Reference, original

BREAKS = ("REQ-RUN-007", "REQ-RUN-012")
CONVICTED_BY = (
    "run/valid/launch-abort-of-another-step",
    "run/valid/launch-damaged",
    "run/valid/launch-down",
    "run/valid/launch-foreign",
    "run/valid/launch-smaller-steps",
    "run/valid/launch-unreadable",
)

_iter_lineage = original("ckptfmt.run.lineage:iter_lineage")


def _iter_first(*arguments: Any) -> Any:  # noqa: ANN401 - of the implementation
    return iter(list(_iter_lineage(*arguments))[:1])


class Broken(Reference):
    """See above."""

    replacements = (("ckptfmt.run.lineage:iter_lineage", _iter_first),)
