"""It goes by the name in a launch record, and doesn't compare the digest."""

from __future__ import annotations

from typing import Any

from ckptfmt_conformance.adapters.reference import Reference, original

BREAKS = ("REQ-RUN-022",)
CONVICTED_BY = ("run/invalid/resume-from-digest", "run/valid/launch-resume-from-digest")

_find_replacement = original("ckptfmt.run.lineage:_find_replacement")


def _find_absence(resume: Any, register: Any) -> Any:  # noqa: ANN401 - of the implementation
    found = _find_replacement(resume, register)
    return None if found is not None and found.code == "DOC_DIGEST" else found


class Broken(Reference):
    """See above."""

    replacements = (("ckptfmt.run.lineage:_find_replacement", _find_absence),)
