"""Trees as tagged JSON, so that cases can describe a tree for readers in every language.

Null, booleans, strings and integers up to 2^53 - 1 stand for themselves; every other value is an
object of one member or of a few, named after the type: `{"float": "3ff0000000000000"}` has the bits
of a float, the highest first.
"""

from __future__ import annotations

from typing import Any

__all__ = ["tagged"]

_ROWS = {"l": "list", "t": "tuple", "s": "set", "z": "frozenset", "L": "list", "U": "tuple"}
_PAIRS = {"d": "dict", "O": "ordered_dict", "C": "counter"}


def tagged(tree: Any) -> Any:  # noqa: PLR0911 - any tree, as msgpack has it; one answer for each form
    """Return the tagged JSON of a tree.

    >>> tagged(["t", 1, ["f", bytes.fromhex("000000000000f03f")]])
    {'tuple': [1, {'float': '3ff0000000000000'}]}
    """
    match tree:
        case None | bool() | str():
            return tree
        case int():
            return tree if abs(tree) < 1 << 53 else {"int": str(tree)}
        case bytes():
            return {"bytes": tree.hex()}
        case ["f", bytes() as content]:
            return {"float": content[::-1].hex()}
        case ["c", bytes() as content]:
            return {"complex": [content[7::-1].hex(), content[:7:-1].hex()]}
        case ["i", bytes() as content]:
            return {"int": str(int.from_bytes(content, "little", signed=True))}
        case ["l" | "t" | "s" | "z" as tag, *items]:
            return {_ROWS[tag]: [tagged(item) for item in items]}
        case ["d" | "O" | "C" as tag, *items]:
            return {
                _PAIRS[tag]: [
                    [tagged(k), tagged(v)] for k, v in zip(items[::2], items[1::2], strict=True)
                ]
            }
        case ["q", most, *items]:
            return {"deque": [tagged(item) for item in items], "maxlen": most}
        case ["L" | "U" as tag, kind, *content]:
            return {_ROWS[tag]: [tagged(item) for item in _unpacked(kind, content)]}
        case ["Q", most, kind, *content]:
            return {"deque": [tagged(item) for item in _unpacked(kind, content)], "maxlen": most}
    return _leaf(tree)


def _leaf(tree: list[Any]) -> dict[str, Any]:
    match tree:
        case ["a", dtype, shape, content]:
            return {"array": content.hex(), "dtype": dtype, "shape": shape}
        case ["n", dtype, content]:
            return {"scalar": content.hex(), "dtype": dtype}
        case ["T", name, kind]:
            return {"tensor": name, "kind": kind}
        case ["D", name]:
            return {"dtype": name}
        case ["V", name]:
            return {"device": name}
        case ["S", extents]:
            return {"size": extents}
    raise ValueError(f"no tree: {tree!r}")


def _unpacked(kind: str, content: list[Any]) -> list[Any]:
    """Return packed entries as separate trees."""
    if kind == "str":
        (width, lengths), text = content
        count = len(lengths) // width
        whole = text.encode()
        entries = list[Any]()
        at = 0
        for row in range(count):
            nbytes = sum(lengths[plane * count + row] << 8 * plane for plane in range(width))
            entries.append(whole[at : at + nbytes].decode())
            at += nbytes
        return entries
    (numbers,) = content
    width = 1 if kind == "bool" else int(kind.lstrip("uintfloa")) // 8
    cut = [numbers[at : at + width] for at in range(0, len(numbers), width)]
    if kind == "float64":
        return [["f", one] for one in cut]
    integers = [int.from_bytes(one, "little", signed=kind.startswith("int")) for one in cut]
    return [one == 1 for one in integers] if kind == "bool" else integers
