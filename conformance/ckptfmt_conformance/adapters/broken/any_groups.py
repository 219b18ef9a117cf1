"""It takes the groups of a part in whatever order they are."""

from __future__ import annotations

from typing import Any

from ckptfmt_conformance.adapters.reference import Reference, original

BREAKS = ("REQ-IDX-003",)
CONVICTED_BY = ("prediction/invalid/groups-unsorted",)

_check_increasing = original("ckptfmt.documents.packed:Columns.check_increasing")


def _check_others(columns: Any, name: str, rows: Any, **members: Any) -> None:  # noqa: ANN401 - of the implementation
    if not columns.place("").endswith("#/groups/"):
        _check_increasing(columns, name, rows, **members)


class Broken(Reference):
    """See above."""

    replacements = (("ckptfmt.documents.packed:Columns.check_increasing", _check_others),)
