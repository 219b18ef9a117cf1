"""It follows every launch record, also that of a launch that was overtaken by a clean-up."""

from __future__ import annotations

from ckptfmt_conformance.adapters.reference import Reference

BREAKS = ("REQ-RUN-006",)
CONVICTED_BY = ("run/valid/overtaken",)


def _is_never(*_: object) -> bool:
    return False


class Broken(Reference):
    """See above."""

    replacements = (("ckptfmt.run.lineage:is_overtaken", _is_never),)
