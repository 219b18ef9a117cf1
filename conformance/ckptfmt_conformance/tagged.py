"""Trees as tagged JSON, the form of trees in cases and in answers of adapters, for any language.

Null, booleans, strings and integers up to 2^53 - 1 represent themselves. Every other value is an
object named after its type: ``{"float": "3ff0000000000000"}`` has the bits of a float, the highest
first. README.md has the table.
"""

from __future__ import annotations

from typing import Any, Final

__all__ = ["from_tree"]

#: Tags of trees with values as entries, and the names of the types.
_SEQUENCES: Final = {"l": "list", "t": "tuple", "s": "set", "z": "frozenset"}
#: The smallest number of entries of a packed list; spec/core/90-limits.md.
_COMPACT_ITEMS: Final = 16
#: Tags of trees with keys and values alternately as entries, and the names of the types.
_MAPPINGS: Final = {"d": "dict", "O": "ordered_dict", "C": "counter"}


def from_tree(tree: object) -> Any:  # noqa: PLR0911 - any value of JSON, a return for each form
    """Return a tree in msgpack form as tagged JSON.

    Raises: ValueError for a value other than a tree.

    >>> from_tree(["t", 1, ["f", bytes(8)]])
    {'tuple': [1, {'float': '0000000000000000'}]}
    """
    if tree is None or isinstance(tree, bool | str):
        return tree
    if isinstance(tree, int):
        return tree if abs(tree) < 1 << 53 else {"int": str(tree)}
    if isinstance(tree, bytes):
        return {"bytes": tree.hex()}
    if not isinstance(tree, list) or not tree or not isinstance(tree[0], str):
        raise ValueError("an array without a tag")
    tag = tree[0]
    items = tree[1:]
    if tag in ("l", "t") and _is_to_be_packed(items):
        raise ValueError(f"{len(items)} numbers or strings stand one by one (REQ-TRE-010)")
    if tag in _SEQUENCES:
        return {_SEQUENCES[tag]: [from_tree(item) for item in items]}
    if tag in _MAPPINGS:
        pairs = zip(items[::2], items[1::2], strict=True)
        return {_MAPPINGS[tag]: [[from_tree(key), from_tree(value)] for key, value in pairs]}
    if tag in ("L", "U") and items:
        return {
            "list" if tag == "L" else "tuple": [
                from_tree(item) for item in _unpacked(items[0], items[1:])
            ]
        }
    if tag == "Q" and len(items) > 1:
        return {
            "deque": [from_tree(item) for item in _unpacked(items[1], items[2:])],
            "maxlen": items[0],
        }
    if tag == "q" and items:
        if _is_to_be_packed(items[1:]):
            raise ValueError(f"{len(items) - 1} numbers or strings stand one by one (REQ-TRE-010)")
        return {"deque": [from_tree(item) for item in items[1:]], "maxlen": items[0]}
    return _from_atom(tag, items)


# A return for each form.
def _from_atom(tag: str, items: list[Any]) -> dict[str, Any]:  # noqa: PLR0911
    """Return the tagged JSON of a form without trees as entries."""
    match tag, items:
        case "f", [bytes(bits)]:
            return {"float": bits[::-1].hex()}
        case "c", [bytes(bits)]:
            return {"complex": [bits[7::-1].hex(), bits[:7:-1].hex()]}
        case "i", [bytes(content)]:
            return {"int": str(int.from_bytes(content, "little", signed=True))}
        case "a", [str(dtype), list(shape), bytes(content)]:
            return {"array": content.hex(), "dtype": dtype, "shape": shape}
        case "n", [str(dtype), bytes(content)]:
            return {"scalar": content.hex(), "dtype": dtype}
        case "T", [str(name), str(kind)]:
            return {"tensor": name, "kind": kind}
        case (("D" | "V"), [str(name)]):
            return {"dtype" if tag == "D" else "device": name}
        case "S", [list(shape)]:
            return {"size": shape}
    raise ValueError(f"{tag!r} is no tag, or holds the wrong things")


def _is_to_be_packed(items: list[Any]) -> bool:
    """Return whether the entries of a list have to be packed. Spec: REQ-TRE-010."""
    if len(items) < _COMPACT_ITEMS:
        return False
    if all(isinstance(item, list) and item[:1] == ["f"] for item in items):
        return True
    types = set(map(type, items))
    return types in ({bool}, {str}) or (types == {int} and _integer_kind(items) is not None)


def _integer_kind(values: list[int]) -> str | None:
    """Return the first kind for all of the integers; None if there is none.

    Spec: REQ-TRE-011.
    """
    least = min(values)
    most = max(values)
    for bits in (8, 16, 32, 64):
        if least >= 0 and most < 1 << bits:
            return f"uint{bits}"
        if least < 0 and -(1 << bits - 1) <= least and most < 1 << bits - 1:
            return f"int{bits}"
    return None


def _unpacked(kind: str, content: list[Any]) -> list[Any]:
    """Return the entries of a packed list, each as a tree.

    Raises: ValueError where the list has too few entries to be packed, or isn't packed as the first
    kind that holds all entries.
    """
    entries = _entries(kind, content)
    if len(entries) < _COMPACT_ITEMS:
        raise ValueError(f"{len(entries)} entries are packed (REQ-TRE-010)")
    if "int" in kind and _integer_kind(entries) != kind:
        raise ValueError(
            f"entries are packed as {kind} that {_integer_kind(entries)} holds (REQ-TRE-011)"
        )
    return entries


def _entries(kind: str, content: list[Any]) -> list[Any]:
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
