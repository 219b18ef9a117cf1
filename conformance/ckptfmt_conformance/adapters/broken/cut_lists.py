"""It reads of a packed list what it can, and leaves out what is cut."""

from __future__ import annotations

import itertools
from typing import Any

from ckptfmt_conformance.adapters.reference import Reference, original

BREAKS = ("REQ-TRE-011",)
CONVICTED_BY = (
    "trees/invalid/packed-cut",
    "trees/invalid/packed-short-text",
    "trees/invalid/packed-within-a-character",
)

_unpack_items = original("ckptfmt.documents.packed:unpack_items")


def _unpack_whole(items: list[Any], where: Any) -> list[Any]:  # noqa: ANN401 - of the implementation
    if items[0] == "str":
        text = items[2].encode()
        ends = [0, *itertools.accumulate(items[1][1])]
        return [text[begin:end].decode(errors="replace") for begin, end in itertools.pairwise(ends)]
    if items[0] == "float64":
        items = [items[0], items[1][: len(items[1]) // 8 * 8]]
    found: list[Any] = _unpack_items(items, where=str(where))
    return found


def _unpack_tuple(items: list[Any], where: Any) -> tuple[Any, ...]:  # noqa: ANN401 - of the implementation
    return tuple(_unpack_whole(items, where))


_decoders: Any = original("ckptfmt.documents.tree:_DECODERS")


class Broken(Reference):
    """See above."""

    replacements = (("ckptfmt.documents.tree:_DECODERS", {**_decoders, "L": _unpack_whole, "U": _unpack_tuple}),)
