"""It opens the first candidate of a run that it can read, and says nothing of those that it passed over."""

from __future__ import annotations

from typing import Any

from ckptfmt_conformance.adapters.reference import Reference, original

BREAKS = ("REQ-RUN-020", "REQ-RUN-003", "REQ-MAN-002")
CONVICTED_BY = (
    "run/invalid/abort-of-another-step",
    "run/invalid/first-unreadable",
    "run/invalid/foreign",
    "run/invalid/overtaken-but-unreadable",
    "run/invalid/resume-from-aborted",
    "run/invalid/resume-from-digest",
    "run/invalid/step-of-another",
    "run/invalid/tombstone-of-another-launch",
    "run/invalid/tombstone-of-another-run",
    "run/valid/launch-unreadable",
)

_iter_lineage = original("ckptfmt.run.lineage:iter_lineage")


def _iter_committed(*arguments: Any) -> Any:  # noqa: ANN401 - of the implementation
    return (entry for entry in _iter_lineage(*arguments) if entry.manifest is not None)


class Broken(Reference):
    """See above."""

    replacements = (("ckptfmt.run.lineage:iter_lineage", _iter_committed),)
