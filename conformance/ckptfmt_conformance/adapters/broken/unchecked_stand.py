"""It doesn't look whether the sources stand where a cursor says they do."""

from __future__ import annotations

from ckptfmt_conformance.adapters.reference import Reference

BREAKS = ("REQ-CUR-014",)
CONVICTED_BY = (
    "context/invalid/samples-stand",
    "context/invalid/samples-stand-epoch",
    "context/invalid/samples-stand-mixed",
    "context/invalid/samples-stand-left-out",
)


def _check_nothing(*_: object) -> None:
    return None


class Broken(Reference):
    """See above."""

    replacements = (("ckptfmt.data.sampler:_check_stand", _check_nothing),)
