"""It takes a launch for overtaken of which nothing is committed, if the checkpoint that it names isn't either."""

from __future__ import annotations

from typing import Any

from ckptfmt_conformance.adapters.reference import Reference

BREAKS = ("REQ-RUN-006",)
CONVICTED_BY = (
    "run/invalid/overtaken-but-unreadable",
    "run/invalid/resume-from-aborted",
    "run/valid/launch-resume-from-aborted",
    "run/valid/launch-resume-from-lost",
    "run/valid/launch-resume-from-retired",
    "run/valid/overtaken-but-retired",
    "run/valid/overtaken-by-hand",
)


def _is_overtaken(launch: Any, entries: list[Any]) -> bool:  # noqa: ANN401 - of the implementation
    committed = {entry.name: entry.launch for entry in entries if entry.manifest is not None}
    named = launch.resume_from
    return named is not None and named.name not in committed and launch.launch not in committed.values()


class Broken(Reference):
    """See above."""

    replacements = (("ckptfmt.run.lineage:is_overtaken", _is_overtaken),)
