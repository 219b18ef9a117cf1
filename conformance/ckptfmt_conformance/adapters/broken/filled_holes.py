"""It fills a batch at the end of an epoch whatever skips say of these positions."""

from __future__ import annotations

from typing import Any

import numpy as np

from ckptfmt_conformance.adapters.reference import Reference, original

BREAKS = ("REQ-CUR-016", "REQ-CUR-018")
CONVICTED_BY = (
    "context/valid/samples-fill-hole",
    "context/valid/samples-fill-hole-2-of-3",
    "context/valid/samples-fill-hole-sample",
    "context/valid/samples-fill-hole-sample-2-of-3",
)

_COUNTS = original("ckptfmt.data.course:COUNTS")
_stretch = original("ckptfmt.data.course:Course.stretch")


def _stretch_filled(course: Any, begin: int, end: int) -> Any:  # noqa: ANN401 - of the implementation
    stretch = _stretch(course, begin, end)
    drawn = course._draw(begin, end)  # noqa: SLF001 - a fault needs no interface
    stretch.uses[:] = np.where(drawn.uses == _COUNTS, stretch.uses, drawn.uses)
    return stretch


class Broken(Reference):
    """See above."""

    replacements = (("ckptfmt.data.course:Course.stretch", _stretch_filled),)
