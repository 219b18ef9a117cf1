"""It lets the samples count that only fill a batch: they are seen twice as often as the others."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from ckptfmt_conformance.adapters.reference import Reference, original

BREAKS = ("REQ-CUR-016",)
CONVICTED_BY = (
    "context/valid/samples-pad",
    "context/valid/samples-pad-3-of-5",
    "context/valid/samples-skips-pad",
    "context/valid/samples-fill-mask",
    "context/valid/samples-fill-mask-2-of-3",
)

_draws = original("ckptfmt.data.course:Walk.draws")


def _draws_that_count(walk: Any, begin: int, end: int) -> Iterator[Any]:  # noqa: ANN401 - of the implementation
    for some in _draws(walk, begin, end):
        yield dataclasses.replace(some, is_padding=False)


class Broken(Reference):
    """See above."""

    replacements = (("ckptfmt.data.course:Walk.draws", _draws_that_count),)
