"""It doesn't look whether the register of an aborted or retired checkpoint is that of its directory."""

from __future__ import annotations

from typing import Any

from ckptfmt_conformance.adapters.reference import Reference, original

BREAKS = ("REQ-RUN-003", "REQ-MAN-002")
CONVICTED_BY = (
    "run/invalid/abort-of-another-step",
    "run/invalid/tombstone-of-another-launch",
    "run/invalid/tombstone-of-another-run",
    "run/valid/launch-abort-of-another-step",
    "run/valid/launch-tombstone-of-another-run",
)

_check_place = original("ckptfmt.run.lineage:check_place")


def _check_manifests(register: Any, *others: Any) -> None:  # noqa: ANN401 - of the implementation
    if hasattr(register, "origin"):
        _check_place(register, *others)


class Broken(Reference):
    """See above."""

    replacements = (("ckptfmt.run.lineage:check_place", _check_manifests),)
