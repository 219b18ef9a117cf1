"""It shuffles once: every epoch has the order of the first."""

from __future__ import annotations

from typing import Any

from ckptfmt_conformance.adapters.reference import Reference, original

BREAKS = ("REQ-CUR-007",)
CONVICTED_BY = (
    "context/valid/samples-carry",
    "context/valid/samples-drop",
    "context/valid/samples-check-elsewhere",
    "context/valid/samples-far",
    "context/invalid/samples-order-again",
)

_epoch = original("ckptfmt.data.shuffle:_epoch")


def _first_epoch(n: int, seed: int, _: int) -> Any:  # noqa: ANN401 - of the implementation
    return _epoch(n, seed, 0)


class Broken(Reference):
    """See above."""

    replacements = (("ckptfmt.data.shuffle:_epoch", _first_epoch),)
