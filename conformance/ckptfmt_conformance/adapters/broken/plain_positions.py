"""It holds every cursor to the sum of whole epochs, also where a shift left positions out."""

from __future__ import annotations

import dataclasses
from typing import Any

from ckptfmt_conformance.adapters.reference import Reference, original

BREAKS = ("REQ-CUR-004",)
CONVICTED_BY = (
    "context/valid/samples-ahead-left-out",
    "context/valid/samples-fill-shift-step",
    "context/valid/samples-left-out",
    "context/valid/samples-left-out-epoch",
    "context/valid/samples-fill-shift-step-2-of-3",
)

_check_epoch = original("ckptfmt.documents.cursor:_check_epoch")


def _check_plainly(cursor: Any, where: str) -> None:  # noqa: ANN401 - of the implementation
    _check_epoch(dataclasses.replace(cursor, skips=()), where)


class Broken(Reference):
    """See above."""

    replacements = (("ckptfmt.documents.cursor:_check_epoch", _check_plainly),)
