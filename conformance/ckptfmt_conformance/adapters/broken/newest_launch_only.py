"""It looks at the newest launch and at what its record names, and no further down."""

from __future__ import annotations

from typing import Any

from ckptfmt_conformance.adapters.reference import Reference, original

BREAKS = ("REQ-RUN-006",)
CONVICTED_BY = (
    "run/valid/launch-down",
    "run/valid/launch-resume-from-aborted",
    "run/valid/launch-resume-from-digest",
    "run/valid/launch-resume-from-lost",
    "run/valid/launch-resume-from-retired",
    "run/valid/launch-smaller-steps-down",
    "run/valid/launch-smaller-steps-retired",
    "run/valid/launch-smaller-steps-unreadable",
    "run/valid/overtaken-but-retired",
    "run/valid/overtaken-by-hand",
)

_iter_lineage = original("ckptfmt.run.lineage:iter_lineage")


def _iter_newest(launches: list[Any], entries: list[Any]) -> Any:  # noqa: ANN401 - of the implementation
    found = list(_iter_lineage(launches, entries))
    newest = max((one.launch for one in launches), default=0)
    named = [one.resume_from.name for one in launches if one.launch == newest and one.resume_from is not None]
    return iter([one for one in found if one.launch == newest or one.name in named or not named])


class Broken(Reference):
    """See above."""

    replacements = (("ckptfmt.run.lineage:iter_lineage", _iter_newest),)
