"""It takes a retired checkpoint on the lineage for a damaged one."""

from __future__ import annotations

import dataclasses
from typing import Any

from ckptfmt_conformance.adapters.reference import CkptError, Code, Reference, original

BREAKS = ("REQ-RUN-006", "REQ-RUN-007")
CONVICTED_BY = ("run/invalid/all-retired", "run/valid/launch-resume-from-retired")

_iter_lineage = original("ckptfmt.run.lineage:iter_lineage")


def _iter_with_retired(launches: list[Any], entries: list[Any]) -> Any:  # noqa: ANN401 - of the implementation
    damaged = CkptError(Code.CHECKPOINT_RETIRED, "it was retired")
    return _iter_lineage(
        launches,
        [dataclasses.replace(one, register=damaged) if _is_retired(one) else one for one in entries],
    )


def _is_retired(entry: Any) -> bool:  # noqa: ANN401 - of the implementation
    return hasattr(entry.register, "manifest_digest")


class Broken(Reference):
    """See above."""

    replacements = (
        ("ckptfmt.run.lineage:iter_lineage", _iter_with_retired),
        ("ckptfmt.run.lineage:_is_retired", lambda *_: False),
    )
