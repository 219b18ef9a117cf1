"""It takes a list packed or not, in whatever dtype its numbers are."""

from __future__ import annotations

from typing import Any

from ckptfmt_conformance.adapters.reference import Reference, original

BREAKS = ("REQ-TRE-010", "REQ-TRE-011")
CONVICTED_BY = (
    "trees/invalid/deque-of-16-strings",
    "trees/invalid/list-of-16-integers",
    "trees/invalid/packed-15",
    "trees/invalid/packed-bool-of-2",
    "trees/invalid/packed-float32",
    "trees/invalid/packed-none",
    "trees/invalid/packed-signed",
    "trees/invalid/packed-too-wide",
    "trees/invalid/tuple-of-16-floats",
)


class _AsItIs:
    """What packing a list would give, which is always what stands there."""

    def __ne__(self, other: object) -> bool:
        """Say that it is no other."""
        return False

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        """Say that it is the same."""
        return True


def _pack_nothing(_: Any) -> Any:  # noqa: ANN401 - of the implementation
    return _AsItIs()


def _take(items: list[Any], where: Any) -> Any:  # noqa: ANN401 - of the implementation
    return _decode_items(items, where)


_decode_items = original("ckptfmt.documents.tree:_decode_items")
_decoders: Any = original("ckptfmt.documents.tree:_DECODERS")
_numbers: Any = original("ckptfmt.documents.packed:_NUMBERS")


class Broken(Reference):
    """See above."""

    replacements = (
        ("ckptfmt.documents.packed:pack_items", _pack_nothing),
        ("ckptfmt.documents.tree:_one_by_one", _take),
        ("ckptfmt.documents.tree:_DECODERS", {**_decoders, "l": _take}),
        ("ckptfmt.documents.packed:_NUMBERS", {**_numbers, "float32": "<f4"}),
    )
