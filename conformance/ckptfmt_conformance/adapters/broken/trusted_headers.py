"""It checks the bytes of a shard's header, and not that it says what the part says."""

from __future__ import annotations

from ckptfmt_conformance.adapters.reference import Reference

BREAKS = ("REQ-SHD-010",)
CONVICTED_BY = (
    "deltas/invalid/base-beyond-key",
    "parts/invalid/two-extents-checked",
)


def _check_nothing(*_: object) -> None:
    return None


class Broken(Reference):
    """See above."""

    replacements = (("ckptfmt.read.verify:_verify_header", _check_nothing),)
