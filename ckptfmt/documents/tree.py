"""Trees: the exact plain values of a checkpoint. Spec: REQ-TRE-001 to REQ-TRE-006.

A tree is one msgpack value of the documents' profile. Simple scalars are stored directly.
Distinctions that msgpack would lose (tuple or list, float bits, key order, integers beyond 64 bits,
arrays) are kept by an array with a tag as its first entry.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import struct
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterator
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np

from ckptfmt import limits
from ckptfmt.documents.msgpk import count_items, dump_mapless, parse_msgpack
from ckptfmt.documents.packed import pack_items, unpack_items
from ckptfmt.dtypes import DTYPES, numpy_dtype
from ckptfmt.errors import Code, FormatError, err


@dataclasses.dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor of the same field and scope, by name; `kind` is ``torch`` or ``numpy``."""

    name: str
    kind: str


@dataclasses.dataclass(frozen=True, slots=True)
class InlineArray:
    """A small array within a tree, in C order, little-endian.

    `scalar` marks a NumPy scalar, not an array of rank 0.
    """

    dtype: str
    shape: tuple[int, ...]
    content: bytes
    scalar: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class DtypeName:
    """A dtype as a value, by its name."""

    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceName:
    """A device as a value, in torch's text form."""

    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class Size:
    """A torch.Size."""

    shape: tuple[int, ...]


T = TypeVar("T")

#: Largest number of a key's characters in messages.
_KEY_LENGTH: Final = 64
_INT64_MIN: Final = -(1 << 63)
_UINT64_MAX: Final = (1 << 64) - 1
#: Types with values always stored without a tag.
_UNCHANGED: Final[frozenset[type]] = frozenset({type(None), bool, bytes})

#: Types of plain values that contain no other values.
PLAIN: Final[frozenset[type]] = frozenset({type(None), bool, int, float, complex, str, bytes})

#: Types of keys for which equality as values and equality as trees are the same.
_PLAIN_KEYS: Final[frozenset[type]] = frozenset({str, bytes, int, type(None)})

#: Types with unpredictable hashes: Python randomises them, or there is a single value.
_SECRET_HASHES: Final[frozenset[type]] = frozenset({str, bytes, type(None)})

#: Codes of malformed packed entries; in a tree they become TREE_TAG.
_FORM_CODES: Final = (Code.COLUMN_FORM, Code.PACKED_FORM, Code.LIMIT_EXCEEDED)

#: msgpack's types for arrays and maps; values of other types need no decoding.
_CONTAINERS: Final[frozenset[type]] = frozenset({list, dict})

#: The place of a value: its container's place, and its key there. Only messages need the text.
_Where: TypeAlias = "str | Callable[[], str] | tuple[_Where, object]"


def dump_tree(value: object, *, where: str | Callable[[], str]) -> bytes:
    """Return the bytes of a tree.

    Args:
        value: None, bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset,
            OrderedDict, Counter, deque, or an object of this module's classes; exactly these types,
            no subclass.
        where: name of the value, for messages; or a function that returns the name.

    Raises: StateError(STATE_UNSUPPORTED) naming the first unsupported value;
        FormatError(LIMIT_EXCEEDED, DOC_DEPTH).
    Spec: REQ-TRE-001, REQ-TRE-003.

    >>> parse_tree(dump_tree((1, {"lr": -0.0}), where="x"), where="x")
    (1, {'lr': -0.0})
    """
    content = dump_mapless(_encode(value, where, 0))
    # A tree that a reader would reject must not be written. A value takes at least one byte, so
    # short trees need no count. Types and depth are checked above.
    if len(content) > limits.TREE_ITEMS:
        count_items(content, where=_place(where), limit_items=limits.TREE_ITEMS)
    if len(content) > limits.TREE_NBYTES:
        raise err(
            Code.LIMIT_EXCEEDED,
            f"{len(content)} bytes of plain values; put large data into tensors or arrays",
            where=_place(where),
            requirement="REQ-LIM-001",
        )
    return content


def parse_tree(content: bytes, *, where: str) -> Any:
    """Return the value of a tree's bytes.

    Raises: FormatError(TREE_TAG and the codes of a msgpack document).
    Spec: REQ-TRE-001, REQ-TRE-002.
    """
    if len(content) > limits.TREE_NBYTES:
        raise err(
            Code.LIMIT_EXCEEDED,
            f"a tree of {len(content)} bytes",
            where=where,
            requirement="REQ-LIM-001",
        )
    return _decode(parse_msgpack(content, where=where, limit_items=limits.TREE_ITEMS), where)


#: The tags of packed lists, by the tags of lists with an entry each.
_PACKED_TAGS: Final = {"l": "L", "t": "U", "q": "Q"}
#: The tags of other values whose entries are trees.
_OTHER_TAGS: Final = frozenset("dOCsz")


def repack_tree(content: bytes) -> bytes:
    """Return a tree of format 0.9, which packs no lists, in the form of format 1.0.

    Bytes without the form of a tree are returned as given: the reader of the tree names the fault.
    """
    try:
        value = parse_msgpack(content, where="", limit_items=limits.TREE_ITEMS)
    except FormatError:
        return content
    return dump_mapless(_repacked(value))


def _repacked(node: Any) -> Any:
    """Return a node of a tree with packed lists. A node without the form of a tree stays."""
    if not isinstance(node, list) or not node or not isinstance(node[0], str):
        return node
    tag, *items = node
    if tag in _PACKED_TAGS.values():
        return ["", *items]  # no tag of 0.9, and none of any version
    if tag not in _PACKED_TAGS and tag not in _OTHER_TAGS:
        return node
    before = items[:1] if tag == "q" else []
    entries = [_repacked(item) for item in items[len(before) :]]
    if tag in ("s", "z") and _increases(items):
        entries.sort(key=dump_mapless)
    packed = pack_items([_plain(entry) for entry in entries]) if tag in _PACKED_TAGS else None
    return [tag, *before, *entries] if packed is None else [_PACKED_TAGS[tag], *before, *packed]


def _increases(entries: list[Any]) -> bool:
    """Return whether trees are sorted as byte strings."""
    return all(before < after for before, after in itertools.pairwise(map(dump_mapless, entries)))


def _plain(entry: Any) -> Any:
    """Return the float of an entry with the form of a float; any other entry as given."""
    match entry:
        case ["f", bytes(content)] if len(content) == 8:
            return struct.unpack("<d", content)[0]
    return entry


def is_near_limit(content: bytes) -> bool:
    """Return whether a dumped tree uses more than half of the allowed bytes or values."""
    if len(content) <= limits.TREE_ITEMS // 2:  # a value takes at least one byte
        return len(content) > limits.TREE_NBYTES // 2
    try:
        count_items(content, where="", limit_items=limits.TREE_ITEMS // 2)
    except FormatError:
        return True
    return len(content) > limits.TREE_NBYTES // 2


def find_difference(left: object, right: object, path: str = "") -> str | None:
    """Return the path of the first difference between two trees, or None.

    >>> find_difference({"a": [1, 2]}, {"a": [1, 3]})
    '/a/1'
    """
    if type(left) is type(right):
        if isinstance(left, dict) and isinstance(right, dict) and list(left) == list(right):
            pairs: Iterator[tuple[object, object, object]] = (
                (key, left[key], right[key]) for key in left
            )
        elif (
            isinstance(left, list | tuple)
            and isinstance(right, list | tuple)
            and len(left) == len(right)
        ):
            pairs = ((index, *pair) for index, pair in enumerate(zip(left, right, strict=True)))
        else:
            same = dump_tree(left, where=path) == dump_tree(right, where=path)
            return None if same else path or "/"
        return next(
            (found for key, a, b in pairs if (found := find_difference(a, b, _below(path, key)))),
            None,
        )
    return path or "/"


def iter_values(value: object) -> Iterator[object]:
    """Yield every value of a tree except containers and keys of dicts."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            waiting += reversed(value.values())
        elif isinstance(value, list | tuple | deque):
            waiting += reversed(value)
        elif isinstance(value, set | frozenset):
            waiting += value
        else:
            yield value


def iter_references(value: object) -> Iterator[TensorRef]:
    """Yield every reference to a tensor in a tree.

    Plain values cost no Python step, only a check of types.
    """
    waiting: list[object] = [value]
    while waiting:
        value = waiting.pop()
        if type(value) is TensorRef:
            yield value
            continue
        children: Collection[object] = ()
        if isinstance(value, dict):
            children = value.values()
        elif isinstance(value, list | tuple | deque | set | frozenset):
            children = value
        if not PLAIN.issuperset(map(type, children)):
            waiting += [child for child in children if type(child) not in PLAIN]


def _below(where: str, key: object) -> str:
    """Return the place of the value with a key in a container, for messages."""
    try:
        text = str(key)[:_KEY_LENGTH]
    except ValueError:  # Python refuses to print an integer of more than 4,300 digits.
        text = f"({type(key).__name__})"
    return f"{where}/{text}"


# --- encode ---------------------------------------------------------------------------------------


def _encode(value: Any, where: _Where, depth: int) -> object:
    kind = type(value)
    if kind in _UNCHANGED:
        return value
    if kind is str:
        return value if value.isascii() else _check_text(value, where)
    if kind is int and _INT64_MIN <= value <= _UINT64_MAX:
        return value
    encoder = _ENCODERS.get(kind)
    if encoder is None:
        raise err(
            Code.STATE_UNSUPPORTED,
            f"a value of type {kind.__module__}.{kind.__qualname__} has no form in a checkpoint",
            where=_place(where),
            requirement="REQ-TRE-001",
        )
    _check_depth(depth + 1, where)
    return encoder(value, where, depth + 1)


def _place(where: _Where) -> str:
    """Return the text of a place for messages."""
    if isinstance(where, str):
        return where
    return _below(_place(where[0]), where[1]) if isinstance(where, tuple) else where()


def _check_depth(depth: int, where: _Where) -> None:
    """Check that a msgpack array is allowed at this depth. Spec: REQ-DOC-023."""
    if depth > limits.MSGPACK_DEPTH:
        raise err(
            Code.DOC_DEPTH,
            f"nests deeper than {limits.MSGPACK_DEPTH}",
            where=_place(where),
            requirement="REQ-DOC-023",
            remedy="Flatten the value, or break its cycle.",
        )


def _check_text(text: str, where: _Where) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise err(
            Code.STATE_UNSUPPORTED,
            "a string with a lone surrogate",
            where=_place(where),
            requirement="REQ-DOC-020",
            remedy=(
                "Save the string as bytes (os.fsencode for a path), or decode its source as UTF-8."
            ),
        ) from None
    return text


def _are_unchanged(values: Collection[Any]) -> bool:
    """Return whether all values are stored without a tag.

    Long lists of integers are checked fast.
    """
    kinds = set(map(type, values))
    if kinds == {int}:
        return bool(min(values) >= _INT64_MIN and max(values) <= _UINT64_MAX)
    return kinds <= _UNCHANGED


def _big_int(value: int) -> bytes:
    return value.to_bytes(
        (value if value >= 0 else ~value).bit_length() // 8 + 1, "little", signed=True
    )


def _encode_items(tag: str, compact_tag: str) -> _Encoder:
    def encode(value: Any, where: _Where, depth: int) -> object:
        packed = pack_items(value) if len(value) >= limits.COMPACT_ITEMS else None
        if packed is not None:
            _check_depth(depth + (packed[0] == "str"), where)
            return [compact_tag, *packed]
        if _are_unchanged(value):
            return [tag, *value]
        return [tag, *[_encode(item, (where, index), depth) for index, item in enumerate(value)]]

    return encode


def _encode_deque(value: deque[Any], where: _Where, depth: int) -> object:
    packed = pack_items(value)
    if packed is not None:
        _check_depth(depth + (packed[0] == "str"), where)
        return ["Q", value.maxlen, *packed]
    return [
        "q",
        value.maxlen,
        *(_encode(item, (where, index), depth) for index, item in enumerate(value)),
    ]


def _encode_set(tag: str) -> _Encoder:
    def encode(value: Any, where: _Where, depth: int) -> object:
        strange = next((item for item in value if not _is_member(item)), None)
        if strange is not None:
            kind = type(strange)
            raise err(
                Code.STATE_UNSUPPORTED,
                (
                    f"a member of type {kind.__module__}.{kind.__qualname__} of a set has no form"
                    " in"
                    " a checkpoint"
                ),
                where=_place(where),
                requirement="REQ-TRE-009",
            )
        _check_hashes(value, where)
        members = sorted((_encode(item, (where, item), depth) for item in value), key=dump_mapless)
        if any(a == b for a, b in itertools.pairwise(members)):
            # NaN is unequal to itself: a Python set can contain the same bits twice, a checkpoint
            # can't.
            raise err(
                Code.STATE_UNSUPPORTED,
                "a set with one value twice",
                where=_place(where),
                requirement="REQ-TRE-005",
            )
        return [tag, *members]

    return encode


def _encode_pairs(tag: str) -> _Encoder:
    def encode(value: Any, where: _Where, depth: int) -> object:
        _check_hashes(value, where)  # a dict that a reader may reject isn't written
        flat: list[object] = [tag]
        for key, item in value.items():
            if type(key) is not str and not _is_key(key):
                kind = type(key)
                raise err(
                    Code.STATE_UNSUPPORTED,
                    (
                        f"a key of type {kind.__module__}.{kind.__qualname__} has no form in a"
                        " checkpoint"
                    ),
                    where=_place(where),
                    requirement="REQ-TRE-008",
                )
            below = (where, key)
            flat += (
                key if type(key) is str and key.isascii() else _encode(key, below, depth),
                item if type(item) is str and item.isascii() else _encode(item, below, depth),
            )
        return flat

    return encode


def _is_key(value: object) -> bool:
    """Return whether a value may be a key: a plain scalar, or a tuple or frozenset of keys."""
    if type(value) in (tuple, frozenset):
        return all(map(_is_key, value))  # type: ignore[call-overload]
    return value is None or type(value) in (bool, int, float, complex, str, bytes)


def _is_member(value: object) -> bool:
    """Return whether a value may be in a set: a scalar, or a tuple or frozenset of such values."""
    if type(value) in (tuple, frozenset):
        return all(map(_is_member, value))  # type: ignore[call-overload]
    is_scalar = isinstance(value, DtypeName | DeviceName | Size) or (
        isinstance(value, InlineArray) and value.scalar
    )
    return is_scalar or _is_key(value)


def _encode_inline(value: InlineArray, where: _Where, depth: int) -> object:
    if value.scalar:
        return ["n", value.dtype, value.content]
    _check_depth(depth + 1, where)
    return ["a", value.dtype, list(value.shape), value.content]


def _encode_size(value: Size, where: _Where, depth: int) -> object:
    _check_depth(depth + 1, where)
    return ["S", list(value.shape)]


#: A function of a value, its place, and the depth of the returned msgpack array.
_Encoder: TypeAlias = "Callable[[Any, _Where, int], object]"

_ENCODERS: Final[dict[type, _Encoder]] = {
    int: lambda value, _where, _depth: ["i", _big_int(value)],  # integers beyond 64 bits
    float: lambda value, _where, _depth: ["f", struct.pack("<d", value)],
    complex: lambda value, _where, _depth: ["c", struct.pack("<dd", value.real, value.imag)],
    list: _encode_items("l", "L"),
    tuple: _encode_items("t", "U"),
    set: _encode_set("s"),
    frozenset: _encode_set("z"),
    dict: _encode_pairs("d"),
    OrderedDict: _encode_pairs("O"),
    Counter: _encode_pairs("C"),
    deque: _encode_deque,
    InlineArray: _encode_inline,
    TensorRef: lambda value, _where, _depth: ["T", value.name, value.kind],
    DtypeName: lambda value, _where, _depth: ["D", value.name],
    DeviceName: lambda value, _where, _depth: ["V", value.name],
    Size: _encode_size,
}


def _one_by_one(items: list[Any], where: _Where) -> list[Any]:
    """Return the entries of an unpacked list.

    Raises: FormatError(TREE_TAG) if the list has to be packed.
    """
    values = _decode_items(items, where)
    if len(values) >= limits.COMPACT_ITEMS and pack_items(values) is not None:
        raise err(
            Code.TREE_TAG,
            f"{len(values)} entries of one kind aren't packed",
            where=_place(where),
            requirement="REQ-TRE-010",
        )
    return values


# --- decode ---------------------------------------------------------------------------------------


def _decode(value: object, where: _Where) -> Any:
    if isinstance(value, dict):
        raise err(
            Code.TREE_TAG, "a map stands in a tree", where=_place(where), requirement="REQ-TRE-001"
        )
    if not isinstance(value, list):
        return value
    decoder = _DECODERS.get(value[0]) if value and isinstance(value[0], str) else None
    try:
        if decoder is not None:
            return decoder(value[1:], where)
    except (ValueError, TypeError, IndexError, KeyError, OverflowError, struct.error):
        pass
    raise err(
        Code.TREE_TAG,
        f"{str(value[:1])[:64]} is no tag, or holds the wrong things",
        where=_place(where),
        requirement="REQ-TRE-001",
    )


def _decode_items(items: list[object], where: _Where) -> list[Any]:
    if _CONTAINERS.isdisjoint(map(type, items)):
        return items
    return [
        _decode(item, (where, index)) if type(item) in _CONTAINERS else item
        for index, item in enumerate(items)
    ]


def _decode_pairs(items: list[object], where: _Where) -> list[tuple[Any, Any]]:
    if len(items) % 2:
        raise ValueError
    keys = items[::2]
    values = items[1::2]
    if set(map(type, keys)) <= _PLAIN_KEYS:  # usual: keys are equal as values if equal as trees
        are_unique = len(set(keys)) == len(keys)
    else:
        trees = keys
        keys = _decode_items(keys, where)
        if not all(map(_is_key, keys)):
            raise TypeError
        _check_hashes(keys, where)
        are_unique = len(set(keys)) == len(keys) == len({dump_mapless(key) for key in trees})
    if not are_unique:
        raise err(
            Code.DOC_DUPLICATE_KEY,
            "a dict has one key twice",
            where=_place(where),
            requirement="REQ-TRE-002",
        )
    if _CONTAINERS.isdisjoint(map(type, values)):
        return list(zip(keys, values, strict=True))
    return [(key, _decode(item, (where, key))) for key, item in zip(keys, values, strict=True)]


def _decode_set(items: list[object], where: _Where) -> list[Any]:
    encoded = [dump_mapless(item) for item in items]
    if any(a >= b for a, b in itertools.pairwise(encoded)):
        raise ValueError
    decoded = _decode_items(items, where)
    # A frozenset's members were checked when it was decoded. Another check at each level would take
    # quadratic time.
    if not all(type(item) is frozenset or _is_member(item) for item in decoded):
        raise ValueError
    values = list(map(_comparable, decoded))
    _check_hashes(values, where)
    if len(set(values)) != len(decoded):
        raise ValueError
    return decoded


def _comparable(member: Any) -> Any:
    """Return a value that stands for a set's member when members are compared as values.

    Spec: REQ-TRE-005.
    """
    match member:
        case tuple() | frozenset():
            return type(member)(map(_comparable, member))
        case Size():
            return member.shape
        case InlineArray(dtype="complex32"):
            return complex(*np.frombuffer(member.content, "<f2").tolist())
        case InlineArray(dtype=dtype) if dtype != "float4_e2m1fn_x2":  # two numbers in one element
            return np.frombuffer(member.content, numpy_dtype(dtype))[0]
    return member


def _check_hashes(values: Collection[Any], where: _Where) -> None:
    """Raise if too many keys or members have equal hashes: dict and set would be quadratic.

    Python's hashes of numbers, and of tuples of numbers, are predictable.

    Raises: FormatError(LIMIT_EXCEEDED). Spec: REQ-TRE-007.
    """
    if len(values) <= limits.EQUAL_HASHES or set(map(type, values)) <= _SECRET_HASHES:
        return
    hashes = sorted(map(hash, values))
    if any(a == b for a, b in zip(hashes, hashes[limits.EQUAL_HASHES :], strict=False)):
        raise err(
            Code.LIMIT_EXCEEDED,
            f"more than {limits.EQUAL_HASHES} keys or members have one hash",
            where=_place(where),
            requirement="REQ-TRE-007",
        )


def _decode_big_int(items: list[object], _where: _Where) -> int:
    (content,) = items
    value = int.from_bytes(_exactly(bytes, content), "little", signed=True)
    if _INT64_MIN <= value <= _UINT64_MAX or _big_int(value) != content:
        raise ValueError
    return value


def _unpack(items: list[object], where: _Where) -> list[Any]:
    """Return packed entries.

    Raises: ValueError for malformed entries, and for exceeded limits of columns.
    """
    try:
        return unpack_items(items, where=_place(where))
    except FormatError as error:
        if error.code in _FORM_CODES:
            raise ValueError from None
        raise


def _bounded(maxlen: object, values: list[Any]) -> deque[Any]:
    if maxlen is not None and _exactly(int, maxlen) < len(values):
        raise ValueError
    return deque(values, None if maxlen is None else _exactly(int, maxlen))


def _decode_array(items: list[object], _where: _Where) -> InlineArray:
    dtype, shape, content = items
    extents = _shape(shape)
    if len(_exactly(bytes, content)) != math.prod(extents) * DTYPES[_dtype(dtype)].nbytes:
        raise ValueError
    return InlineArray(_dtype(dtype), extents, _exactly(bytes, content))


def _decode_scalar(items: list[object], _where: _Where) -> InlineArray:
    dtype, content = items
    if len(_exactly(bytes, content)) != DTYPES[_dtype(dtype)].nbytes:
        raise ValueError
    return InlineArray(_dtype(dtype), (), _exactly(bytes, content), scalar=True)


def _decode_tensor(items: list[object], _where: _Where) -> TensorRef:
    name, kind = items
    if kind not in ("torch", "numpy"):
        raise ValueError
    return TensorRef(_exactly(str, name), _exactly(str, kind))


def _exactly(kind: type[T], value: object) -> T:
    if type(value) is not kind:
        raise TypeError
    return value


def _dtype(value: object) -> str:
    if _exactly(str, value) not in DTYPES:
        raise ValueError
    return str(value)


def _shape(value: object) -> tuple[int, ...]:
    extents = tuple(_exactly(int, extent) for extent in _exactly(list, value))
    if len(extents) > limits.NDIM or any(not 0 <= extent <= limits.DIM for extent in extents):
        raise ValueError
    return extents


_DECODERS: Final[dict[str, Callable[[list[object], _Where], Any]]] = {
    "f": lambda items, _where: struct.unpack("<d", _exactly(bytes, *items))[0],
    "c": lambda items, _where: complex(*struct.unpack("<dd", _exactly(bytes, *items))),
    "i": _decode_big_int,
    "l": _one_by_one,
    "t": lambda items, where: tuple(_one_by_one(items, where)),
    "L": _unpack,
    "U": lambda items, where: tuple(_unpack(items, where)),
    "Q": lambda items, where: _bounded(items[0], _unpack(items[1:], where)),
    "s": lambda items, where: set(_decode_set(items, where)),
    "z": lambda items, where: frozenset(_decode_set(items, where)),
    "d": lambda items, where: dict(_decode_pairs(items, where)),
    "O": lambda items, where: OrderedDict(_decode_pairs(items, where)),
    "C": lambda items, where: Counter(dict(_decode_pairs(items, where))),
    "q": lambda items, where: _bounded(items[0], _one_by_one(items[1:], where)),
    "a": _decode_array,
    "n": _decode_scalar,
    "T": _decode_tensor,
    "D": lambda items, _where: DtypeName(_dtype(*items)),
    "V": lambda items, _where: DeviceName(_exactly(str, *items)),
    "S": lambda items, _where: Size(_shape(*items)),
}
