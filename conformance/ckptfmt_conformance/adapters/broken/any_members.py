"""It takes whatever it can compare for a member of a set."""

from __future__ import annotations

from typing import Any

from ckptfmt_conformance.adapters.reference import Reference

BREAKS = ("REQ-TRE-009",)
CONVICTED_BY = (
    "trees/invalid/set-of-arrays",
    "trees/invalid/set-of-tensors",
    "trees/invalid/set-of-tuples-of-arrays",
)


def _is_any(value: Any) -> bool:  # noqa: ANN401 - of the implementation
    return hash(value) is not None


class Broken(Reference):
    """See above."""

    replacements = (("ckptfmt.documents.tree:_is_member", _is_any),)
