"""It leaves out what a skip names from now on, wherever the skip begins."""

from __future__ import annotations

import dataclasses
from typing import Any

from ckptfmt_conformance.adapters.reference import Reference, original

BREAKS = ("REQ-CUR-018",)
CONVICTED_BY = (
    "context/valid/samples-skips-later",
    "context/valid/samples-skips-meet",
    "context/valid/samples-skips-unsorted",
    "context/valid/samples-mixed-skips",
    "context/invalid/samples-skip-early",
)

_init = original("ckptfmt.data.course:Course.__init__")


def _begin_at_once(course: Any, *sources: Any, skips: Any = (), **members: Any) -> None:  # noqa: ANN401 - of the implementation
    begun = [skip if skip.scope == "pos" else dataclasses.replace(skip, from_pos=0) for skip in skips]
    _init(course, *sources, skips=begun, **members)


class Broken(Reference):
    """See above."""

    replacements = (("ckptfmt.data.course:Course.__init__", _begin_at_once),)
