"""It lets a packed deque have more entries than its `maxlen`, and forgets the first."""

from __future__ import annotations

from collections import deque
from typing import Any

from ckptfmt_conformance.adapters.reference import Reference, original

BREAKS = ("REQ-TRE-001",)
CONVICTED_BY = ("trees/invalid/packed-deque-too-long",)

_unpack_items = original("ckptfmt.documents.packed:unpack_items")
_decoders: Any = original("ckptfmt.documents.tree:_DECODERS")


def _decode_deque(items: list[Any], where: Any) -> deque[Any]:  # noqa: ANN401 - of the implementation
    return deque(_unpack_items(items[1:], where=str(where)), items[0])


class Broken(Reference):
    """See above."""

    replacements = (("ckptfmt.documents.tree:_DECODERS", {**_decoders, "Q": _decode_deque}),)
