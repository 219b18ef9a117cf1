"""It doesn't look whether launch records are those of the run, nor whether each launch has one."""

from __future__ import annotations

from typing import Any

from ckptfmt_conformance.adapters.reference import Reference, original

BREAKS = ("REQ-RUN-003", "REQ-RUN-015")
CONVICTED_BY = (
    "run/invalid/launch-of-another-run",
    "run/invalid/launch-record-of-another-run",
    "run/invalid/launch-unrecorded",
)

_read_launch = original("ckptfmt.run.lineage:read_launch")


def _read_any(store: Any, number: int, _: object = None) -> Any:  # noqa: ANN401 - of the implementation
    return _read_launch(store, number)


def _check_nothing(*_: object) -> None:
    return None


class Broken(Reference):
    """See above."""

    replacements = (
        ("ckptfmt.run.lineage:read_launch", _read_any),
        ("ckptfmt.run.lineage:check_records", _check_nothing),
    )
