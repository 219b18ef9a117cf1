"""It doesn't compare the sample that a cursor's check names: an order that is another one goes unseen."""

from __future__ import annotations

from ckptfmt_conformance.adapters.reference import Reference

BREAKS = ("REQ-CUR-006",)
CONVICTED_BY = (
    "context/invalid/samples-check",
    "context/invalid/samples-check-behind",
    "context/invalid/samples-order-again",
    "context/invalid/samples-blocks-listed",
)


def _check_nothing(*_: object) -> None:
    return None


class Broken(Reference):
    """See above."""

    replacements = (("ckptfmt.data.sampler:_check_vector", _check_nothing),)
