"""It refuses a run in which any register can't be read, also one that nothing goes on from."""

from __future__ import annotations

from typing import Any

from ckptfmt_conformance.adapters.reference import CkptError, Reference, original

BREAKS = ("REQ-RUN-007", "REQ-RUN-021")
CONVICTED_BY = (
    "run/valid/launch-abort-of-another-step",
    "run/valid/launch-foreign",
    "run/valid/launch-moved",
    "run/valid/launch-smaller-steps-unreadable",
    "run/valid/launch-tombstone-of-another-run",
    "run/valid/launch-unreadable",
    "run/valid/unreadable-beside",
    "run/valid/unreadable-beyond",
)

_list_checkpoints = original("ckptfmt.run.lineage:list_checkpoints")


def _list_readable(*arguments: Any) -> Any:  # noqa: ANN401 - of the implementation
    entries = _list_checkpoints(*arguments)
    for entry in entries:
        if isinstance(entry.register, CkptError):
            raise entry.register
    return entries


class Broken(Reference):
    """See above."""

    replacements = (("ckptfmt.run.lineage:list_checkpoints", _list_readable),)
