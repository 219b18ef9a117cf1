"""It takes anything for a member of a set, as a language does whose sets compare identities."""

from __future__ import annotations

from typing import Any

from ckptfmt_conformance.adapters.reference import Reference, original

BREAKS = ("REQ-TRE-009",)
CONVICTED_BY = (
    "trees/invalid/set-of-lists",
    "trees/invalid/set-of-arrays",
    "trees/invalid/set-of-tensors",
    "trees/invalid/set-of-tuples-of-arrays",
)

_decode_set = original("ckptfmt.documents.tree:_decode_set")


def _decode_any(items: list[Any], where: Any) -> Any:  # noqa: ANN401 - of the implementation
    return _decode_set([["t", *item[1:]] if item[:1] == ["l"] else item for item in items], where)


def _is_any(_: object) -> bool:
    return True


class Broken(Reference):
    """See above."""

    replacements = (
        ("ckptfmt.documents.tree:_decode_set", _decode_any),
        ("ckptfmt.documents.tree:_is_member", _is_any),
    )
