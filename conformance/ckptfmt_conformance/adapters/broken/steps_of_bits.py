"""It counts steps of floats from bit pattern to bit pattern, as those of integers: below zero they go the other way."""

from __future__ import annotations

from typing import Any

from ckptfmt_conformance.adapters.reference import Reference

BREAKS = ("REQ-ENC-015",)
CONVICTED_BY = ("encodings/valid/difference-dtypes",)


def _as_it_is(words: Any, lane: Any) -> Any:  # noqa: ANN401 - of the implementation
    return words.view(f"<i{lane.nbytes}")


class Broken(Reference):
    """See above."""

    replacements = (("ckptfmt.codecs.lanes:_ordered", _as_it_is),)
