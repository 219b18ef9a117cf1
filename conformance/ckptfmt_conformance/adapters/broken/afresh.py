"""It begins a run anew if nothing that it could go on from is whole."""

from __future__ import annotations

from typing import Any

from ckptfmt_conformance.adapters.reference import CkptError, Reference, original

BREAKS = ("REQ-RUN-010",)
CONVICTED_BY = (
    "run/invalid/launch-base-needed",
    "run/invalid/launch-none-whole",
    "run/invalid/launch-resume-from-gone",
    "run/invalid/launch-ring",
)

_choose_by_lineage = original("ckptfmt.run.lineage:_choose_by_lineage")


def _choose_or_begin(*arguments: Any) -> Any:  # noqa: ANN401 - of the implementation
    try:
        return _choose_by_lineage(*arguments)
    except CkptError as error:
        if error.code == "NO_VALID_CHECKPOINT":
            return None, "lineage"
        raise


class Broken(Reference):
    """See above."""

    replacements = (("ckptfmt.run.lineage:_choose_by_lineage", _choose_or_begin),)
