"""Faults with trees, and with lists and sets in trees."""

from __future__ import annotations

import itertools
import json
from collections import deque
from typing import Any

from ckptfmt_conformance.adapters.reference import Reference, original

_decode_set = original("ckptfmt.documents.tree:_decode_set")
_is_key = original("ckptfmt.documents.tree:_is_key")
_decode_items = original("ckptfmt.documents.tree:_decode_items")
_decoders: Any = original("ckptfmt.documents.tree:_DECODERS")
_numbers: Any = original("ckptfmt.documents.packed:_NUMBERS")
_unpack_items = original("ckptfmt.documents.packed:unpack_items")
_pack_items = original("ckptfmt.documents.packed:pack_items")


class LostTuples(Reference):
    """It converts every tuple to a list, which breaks hashes and comparisons by type."""

    convicted_by = ("trees/valid/sequences", "trees/valid/deep")

    def tree_of(self, content: bytes) -> object:
        """Return a tree as tagged JSON, with lists for tuples."""
        return json.loads(json.dumps(super().tree_of(content)).replace('{"tuple":', '{"list":'))


def _round(members: dict[str, object]) -> dict[str, object]:
    if members.keys() == {"int"}:
        return {"int": str(int(float(str(members["int"]))))}
    return members


class RoundedIntegers(Reference):
    """It reads integers as doubles, as many JSON parsers do."""

    convicted_by = ("trees/valid/big-integers", "trees/valid/scalars")

    def tree_of(self, content: bytes) -> object:
        """Return a tree as tagged JSON, with large integers rounded."""
        return json.loads(json.dumps(super().tree_of(content)), object_hook=_round)


def _decode_any(items: list[Any], where: Any) -> Any:
    return _decode_set([["t", *item[1:]] if item[:1] == ["l"] else item for item in items], where)


def _is_any(_: object) -> bool:
    return True


class AnyMembers(Reference):
    """It accepts any member of a set, as a language with comparison by identity does."""

    breaks = ("REQ-TRE-009",)
    convicted_by = (
        "trees/invalid/set-of-lists",
        "trees/invalid/set-of-arrays",
        "trees/invalid/set-of-tensors",
        "trees/invalid/set-of-tuples-of-arrays",
    )
    replacements = (
        ("ckptfmt.documents.tree:_decode_set", _decode_any),
        ("ckptfmt.documents.tree:_is_member", _is_any),
    )


class KeysInSets(Reference):
    """It refuses members of a set that couldn't be keys of a dict."""

    breaks = ("REQ-TRE-009",)
    convicted_by = ("trees/valid/set-members",)
    replacements = (("ckptfmt.documents.tree:_is_member", _is_key),)


def _typed(member: Any) -> Any:
    return member


class TypedMembers(Reference):
    """It treats equal members of a set as different if their types differ."""

    breaks = ("REQ-TRE-005",)
    convicted_by = (
        "trees/invalid/set-1-and-scalar",
        "trees/invalid/set-of-tuples-of-scalars",
        "trees/invalid/set-scalar-zeros",
        "trees/invalid/set-scalars",
        "trees/invalid/set-size-and-tuple",
        "trees/invalid/set-true-and-scalar",
    )
    replacements = (("ckptfmt.documents.tree:_comparable", _typed),)


def _without_bound(maxlen: Any, values: list[Any]) -> deque[Any]:
    return deque(values, None if isinstance(maxlen, list) or (maxlen or 0) >= 1 << 63 else maxlen)


class LongerDeques(Reference):
    """It accepts any integer as the length of a deque."""

    breaks = ("REQ-TRE-001",)
    convicted_by = (
        "trees/invalid/deque-maxlen-2-63",
        "trees/invalid/deque-maxlen-2-64",
        "trees/invalid/packed-deque-maxlen-2-63",
    )
    replacements = (("ckptfmt.documents.tree:_bounded", _without_bound),)


def _write_apart(_: object) -> None:
    return None


class NeverPacks(Reference):
    """It never packs lists, and writes each entry separately."""

    breaks = ("REQ-TRE-010",)
    convicted_by = (
        "opening/valid/write-list-flags",
        "opening/valid/write-list-floats",
        "opening/valid/write-list-int16",
        "opening/valid/write-list-strings",
        "opening/valid/write-list-uint8",
    )
    replacements = (("ckptfmt.documents.tree:pack_items", _write_apart),)


def _pack_widest(values: Any) -> Any:
    packed = _pack_items(values)
    if packed is None or "int" not in packed[0]:
        return packed
    return ["int64", b"".join(value.to_bytes(8, "little", signed=True) for value in values)]


class PacksWidest(Reference):
    """It writes the integers of packed lists in eight bytes each, for any values."""

    breaks = ("REQ-TRE-011",)
    convicted_by = (
        "opening/valid/write-list-int16",
        "opening/valid/write-list-int8",
        "opening/valid/write-list-uint64",
        "opening/valid/write-list-uint8",
    )
    replacements = (("ckptfmt.documents.tree:pack_items", _pack_widest),)


class PackedEarly(Reference):
    """It requires packed lists from fifteen entries on."""

    breaks = ("REQ-TRE-010",)
    convicted_by = (
        "trees/invalid/packed-15",
        "trees/valid/not-packed",
    )
    replacements = (("ckptfmt.limits:COMPACT_ITEMS", 15),)


class _AsItIs:
    """An object that equals any packed list."""

    def __ne__(self, other: object) -> bool:
        """Return False for any object."""
        return False

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        """Return True for any object."""
        return True


def _pack_nothing(_: Any) -> Any:
    return _AsItIs()


def _take_any(items: list[Any], where: Any) -> Any:
    return _decode_items(items, where)


class PackedAtWill(Reference):
    """It accepts lists packed or not, with numbers of any dtype."""

    breaks = ("REQ-TRE-010", "REQ-TRE-011")
    convicted_by = (
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
    replacements = (
        ("ckptfmt.documents.packed:pack_items", _pack_nothing),
        ("ckptfmt.documents.tree:_one_by_one", _take_any),
        ("ckptfmt.documents.tree:_DECODERS", {**_decoders, "l": _take_any}),
        ("ckptfmt.documents.packed:_NUMBERS", {**_numbers, "float32": "<f4"}),
    )


class OneByOne(Reference):
    """It doesn't support packed lists."""

    breaks = ("REQ-TRE-010",)
    convicted_by = ("trees/valid/packed",)
    replacements = (
        (
            "ckptfmt.documents.tree:_DECODERS",
            {tag: one for tag, one in _decoders.items() if tag not in "LUQ"},
        ),
    )


def _unpack_whole(items: list[Any], where: Any) -> list[Any]:
    if items[0] == "str":
        text = items[2].encode()
        ends = [0, *itertools.accumulate(items[1][1])]
        return [text[begin:end].decode(errors="replace") for begin, end in itertools.pairwise(ends)]
    if items[0] == "float64":
        items = [items[0], items[1][: len(items[1]) // 8 * 8]]
    found: list[Any] = _unpack_items(items, where=str(where))
    return found


def _unpack_tuple(items: list[Any], where: Any) -> tuple[Any, ...]:
    return tuple(_unpack_whole(items, where))


class CutLists(Reference):
    """It reads the readable part of a packed list, and omits the rest."""

    breaks = ("REQ-TRE-011",)
    convicted_by = (
        "trees/invalid/packed-cut",
        "trees/invalid/packed-short-text",
        "trees/invalid/packed-within-a-character",
    )
    replacements = (
        ("ckptfmt.documents.tree:_DECODERS", {**_decoders, "L": _unpack_whole, "U": _unpack_tuple}),
    )


def _decode_deque(items: list[Any], where: Any) -> deque[Any]:
    return deque(_unpack_items(items[1:], where=str(where)), items[0])


class LongDeques(Reference):
    """It accepts a packed deque with more entries than `maxlen`, and drops the first entries."""

    breaks = ("REQ-TRE-001",)
    convicted_by = ("trees/invalid/packed-deque-too-long",)
    replacements = (("ckptfmt.documents.tree:_DECODERS", {**_decoders, "Q": _decode_deque}),)
