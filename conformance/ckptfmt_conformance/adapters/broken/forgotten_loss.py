"""It goes on below a checkpoint that a launch record names and that isn't there, as if that had been retired."""

from __future__ import annotations

from ckptfmt_conformance.adapters.reference import Reference

BREAKS = ("REQ-RUN-022",)
CONVICTED_BY = (
    "run/invalid/resume-from-aborted",
    "run/valid/launch-resume-from-aborted",
    "run/valid/launch-resume-from-lost",
)


def _find_nothing(*_: object) -> None:
    return None


class Broken(Reference):
    """See above."""

    replacements = (("ckptfmt.run.lineage:_find_replacement", _find_nothing),)
