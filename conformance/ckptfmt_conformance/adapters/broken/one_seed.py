"""It shuffles all sources of a mixture by one seed: those of one length come in one order."""

from __future__ import annotations

from ckptfmt_conformance.adapters.reference import Reference

BREAKS = ("REQ-CUR-013",)
CONVICTED_BY = (
    "context/valid/samples-mixed",
    "context/valid/samples-mixed-by-blocks",
    "context/invalid/samples-one-seed",
)


def _seed_of_the_order(seed: int, _: str) -> int:
    return seed


class Broken(Reference):
    """See above."""

    replacements = (("ckptfmt.data.course:source_seed", _seed_of_the_order),)
