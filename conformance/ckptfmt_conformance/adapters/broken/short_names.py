"""It takes names of at most 255 bytes, as a file system does."""

from __future__ import annotations

from typing import Any

from ckptfmt_conformance.adapters.reference import Reference, original

BREAKS = ("REQ-LIM-002",)
CONVICTED_BY = ("index/valid/name-of-4096",)


_MOST_NBYTES = 255

_strings = original("ckptfmt.documents.packed:Columns.strings")


def _short_strings(columns: Any, key: str, **members: Any) -> Any:  # noqa: ANN401 - of the implementation
    most = min(_MOST_NBYTES, members.pop("limit_nbytes", _MOST_NBYTES))
    return _strings(columns, key, limit_nbytes=most, **members)


class Broken(Reference):
    """See above."""

    replacements = (("ckptfmt.documents.packed:Columns.strings", _short_strings),)
