"""It validates a delta without what it reads from, beyond what its blocks need."""

from __future__ import annotations

from ckptfmt_conformance.adapters.reference import Reference

BREAKS = ("REQ-OPN-009",)
CONVICTED_BY = (
    "deltas/invalid/base-beyond-bit",
    "deltas/invalid/base-beyond-key",
    "deltas/invalid/base-beyond-lost",
    "deltas/invalid/base-beyond-tree",
)


def _check_nothing(*_: object) -> None:
    return None


class Broken(Reference):
    """See above."""

    replacements = (("ckptfmt.read.verify:_Verification.check_closure", _check_nothing),)
