"""It rounds a NaN to 16 bits as it rounds numbers: one of them becomes an infinity, another a zero."""

from __future__ import annotations

from typing import Any

import numpy as np

from ckptfmt_conformance.adapters.reference import Reference, original

BREAKS = ("REQ-PRE-004",)
CONVICTED_BY = ("prediction/valid/cast-bfloat16", "prediction/valid/cast-float16")

_round_low = original("ckptfmt.codecs.optimizer_steps:round_low")


def _round_bits(values: Any, precision: str) -> Any:  # noqa: ANN401 - of the implementation
    low = _round_low(values, precision)
    bits = values.view(np.uint32).astype(np.uint64)
    if precision == "float16":
        cut = (bits >> 16 & 0x8000 | 0x7C00 | bits >> 13 & 0x3FF).astype(np.uint16)
    else:
        cut = (bits + 0x7FFF + (bits >> 16 & 1) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), cut, low)


class Broken(Reference):
    """See above."""

    replacements = (("ckptfmt.codecs.optimizer_steps:round_low", _round_bits),)
