"""It takes all checkpoints of a launch on the lineage, those beyond the step that was gone on from as well."""

from __future__ import annotations

import dataclasses
from typing import Any

from ckptfmt_conformance.adapters.reference import Reference, original

BREAKS = ("REQ-RUN-006", "REQ-RUN-021")
CONVICTED_BY = (
    "run/valid/launch-resume-from-retired",
    "run/valid/launch-smaller-steps",
    "run/valid/launch-smaller-steps-down",
    "run/valid/launch-smaller-steps-retired",
    "run/valid/overtaken-by-hand",
    "run/valid/rolled-back-unsaved",
    "run/valid/unreadable-beyond",
)

_iter_lineage = original("ckptfmt.run.lineage:iter_lineage")


def _iter_all(launches: list[Any], entries: list[Any]) -> Any:  # noqa: ANN401 - of the implementation
    """Make each record name the last checkpoint of the launch that it names one of."""
    last = {one.launch: one for one in entries}
    moved = []
    for launch in launches:
        named = next((one for one in entries if launch.resume_from and one.name == launch.resume_from.name), None)
        if named is not None and launch.launch == max(one.launch for one in launches):
            resume = last[named.launch]
            digest = resume.manifest.digest if resume.manifest else launch.resume_from.digest
            moved.append(
                dataclasses.replace(
                    launch, resume_from=dataclasses.replace(launch.resume_from, name=resume.name, digest=digest)
                )
            )
        else:
            moved.append(launch)
    return _iter_lineage(moved, entries)


class Broken(Reference):
    """See above."""

    replacements = (("ckptfmt.run.lineage:iter_lineage", _iter_all),)
