"""Lists of many numbers or strings, as the one array of bytes that stands for them in a tree.

Spec: REQ-TRE-010, REQ-TRE-011.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

import numpy as np

from ckptfmt import limits
from ckptfmt.documents.packed import Columns, dump_strings

#: How numbers lie in the bytes of a list of numbers.
_NUMBERS: Final = {
    "bool": "?",
    "float64": "<f8",
    **{f"uint{bits}": f"<u{bits // 8}" for bits in (8, 16, 32, 64)},
    **{f"int{bits}": f"<i{bits // 8}" for bits in (8, 16, 32, 64)},
}
_BITS: Final = (8, 16, 32, 64)


def pack_items(values: Collection[Any]) -> list[object] | None:
    r"""Return the entries of a list of numbers or strings as their kind and bytes; None where they stand one by one.

    >>> pack_items([True, False] * 8)
    ['bool', b'\x01\x00\x01\x00\x01\x00\x01\x00\x01\x00\x01\x00\x01\x00\x01\x00']
    """
    kinds = set(map(type, values)) if len(values) >= limits.COMPACT_ITEMS else set()
    if len(kinds) != 1:
        return None
    (kind,) = kinds
    if kind is str:
        try:
            return ["str", *dump_strings(list(values))]
        except UnicodeEncodeError:
            return None  # refused by name, one by one
    name = _number_kind(kind, values)
    return None if name is None else [name, np.array(list(values), _NUMBERS[name]).tobytes()]


def _number_kind(kind: type, values: Collection[Any]) -> str | None:
    """Return the name of the dtype that holds values of one type in the fewest bytes, the unsigned one if it can."""
    if kind is bool:
        return "bool"
    if kind is float:
        return "float64"
    if kind is not int:
        return None
    least, most = min(values), max(values)
    if least >= 0:
        return next((f"uint{bits}" for bits in _BITS if most < 1 << bits), None)
    return next((f"int{bits}" for bits in _BITS if -1 << bits - 1 <= least and most < 1 << bits - 1), None)


def unpack_items(items: list[Any], *, where: str) -> list[Any]:
    """Return the entries of which `pack_items` made these.

    Raises: ValueError, TypeError, KeyError or FormatError for anything that it doesn't make.
    """
    kind, content = items[0], items[1:]
    if kind == "str":
        values: list[Any] = Columns({"": content}, ("",), where).strings("", limit_nbytes=len(content[1])).tolist()
    else:
        (numbers,) = content
        values = np.frombuffer(numbers, _NUMBERS[kind]).tolist()
    if pack_items(values) != items:
        raise ValueError
    return values
