"""It begins a launch from a checkpoint whose register it has read, and nothing else of it."""

from __future__ import annotations

from typing import Any

from ckptfmt_conformance.adapters.reference import CkptError, Reference

BREAKS = ("REQ-RUN-010", "REQ-RUN-012")
CONVICTED_BY = (
    "run/invalid/launch-base-needed",
    "run/invalid/launch-none-whole",
    "run/valid/launch-damaged",
    "run/valid/launch-down",
    "run/valid/launch-smaller-steps",
)


def _open_nothing(_: object, entry: Any, *_others: object) -> Any:  # noqa: ANN401 - of the implementation
    if isinstance(entry.register, CkptError):
        return entry.register
    return entry  # The entry has the manifest, as an open checkpoint has.


class Broken(Reference):
    """See above."""

    replacements = (("ckptfmt.run.lineage:_open_valid", _open_nothing),)
