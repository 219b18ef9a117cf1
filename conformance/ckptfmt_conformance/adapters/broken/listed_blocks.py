"""It gives a block its sources one after the other, as a mixture lists them."""

from __future__ import annotations

import numpy as np

from ckptfmt_conformance.adapters.reference import Reference

BREAKS = ("REQ-CUR-012",)
CONVICTED_BY = (
    "context/valid/samples-mixed",
    "context/valid/samples-mixed-4-of-5",
    "context/valid/samples-mixed-skips",
    "context/invalid/samples-blocks-listed",
)


def _list_sources(block: int, seed: int, number: int, counts: tuple[int, ...]) -> np.ndarray[tuple[int], np.dtype]:
    del block, seed, number
    return np.repeat(np.arange(len(counts)), counts)


class Broken(Reference):
    """See above."""

    replacements = (("ckptfmt.data.course:_sources_of_block", _list_sources),)
