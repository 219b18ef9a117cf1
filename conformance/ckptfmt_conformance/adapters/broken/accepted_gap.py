"""It doesn't look whether boxes tile their tensor: what no box has is whatever was in memory."""

from __future__ import annotations

from ckptfmt_conformance.adapters.reference import Reference

CONVICTED_BY = ("index/invalid/tiling-gap", "index/invalid/tiling-gap-inside", "index/invalid/tiling-overlap")


def _check_nothing(*_: object, **__: object) -> None:
    return None


class Broken(Reference):
    """See above."""

    replacements = (
        ("ckptfmt.read.files:check_index_tiling", _check_nothing),
        ("ckptfmt.layout.merge:check_sharding", _check_nothing),
    )
