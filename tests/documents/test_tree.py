"""Trees: every value comes back exactly, and nothing else is taken."""

import math
import struct
import time
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ckptfmt import limits
from ckptfmt.documents.msgpk import dump_msgpack
from ckptfmt.documents.tree import (
    DeviceName,
    DtypeName,
    InlineArray,
    Size,
    TensorRef,
    dump_tree,
    find_difference,
    iter_values,
    parse_tree,
    repack_tree,
)
from ckptfmt.errors import Code, FormatError, StateError
from tests.builders import code_of, error_of


def again(value):
    return parse_tree(dump_tree(value, where="x"), where="x")


def parse_raw(value):
    return parse_tree(dump_msgpack(value), where="x")


EXACT: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    2**63 - 1,
    2**63,
    2**64 - 1,
    -(2**63),
    2**64,
    -(2**63) - 1,
    2**127,
    -(2**127),
    10**4000,
    "",
    "é\0\u202e",
    "a" * 70_000,
    b"",
    b"\xff" * 300,
    0.0,
    -0.0,
    5e-324,
    1.7976931348623157e308,
    math.inf,
    -math.inf,
    1j,
    complex(-0.0, math.inf),
    [],
    [[]],
    (),
    ((),),
    {},
    {1: 2, "1": 3},
    {(): ()},
    set(),
    frozenset({1, "a"}),
    OrderedDict(b=1, a=2),
    Counter({"a": -3}),
    deque([1]),
    deque(maxlen=0),
    deque([1, 2], 2),
    InlineArray("bfloat16", (2, 0), b""),
    InlineArray("int8", (), b"\7", scalar=True),
    InlineArray("int8", (), b"\7"),
    TensorRef("w", "torch"),
    DtypeName("float32"),
    DeviceName("cuda:0"),
    Size((1, 2**40)),
    Size(()),
    {"lr": [1e-3, (None, {2: {3, 4}})], None: True, 1.5: b"", "t": TensorRef("a", "numpy")},
]


def identity(value):  # noqa: PLR0911
    """What makes a value the same: type and bits, within containers too."""
    if isinstance(value, float):
        return float, struct.pack("<d", value)
    if isinstance(value, complex):
        return complex, struct.pack("<dd", value.real, value.imag)
    if isinstance(value, dict):
        return type(value), [(identity(key), identity(item)) for key, item in value.items()]
    if isinstance(value, deque):
        return deque, value.maxlen, [identity(item) for item in value]
    if isinstance(value, list | tuple):
        return type(value), [identity(item) for item in value]
    if isinstance(value, set | frozenset):
        return type(value), sorted(repr(identity(item)) for item in value)
    return type(value), value


@pytest.mark.parametrize("value", EXACT, ids=lambda value: f"{type(value).__name__}")
def test_values_come_back_exactly(value):
    """REQ-TRE-001, REQ-TRE-003."""
    assert identity(again(value)) == identity(value)


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.binary(max_size=20)
    | st.text(st.characters(codec="utf-8"), max_size=10)
    | st.complex_numbers(allow_nan=False)
)
TREES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(SCALARS, inner, max_size=4)
        | st.dictionaries(st.text("abc"), inner, max_size=4).map(OrderedDict)
        | st.frozensets(SCALARS, max_size=4)
        | st.sets(SCALARS, max_size=4)
        | st.lists(inner, max_size=4).map(deque)
    ),
    max_leaves=20,
)


@pytest.mark.parametrize(
    "value",
    [
        [-(2**63), 0, 2**64 - 1],
        [-(2**63) - 1, 0],
        (0, 2**64),
        [True, 1, None, "x"],
        [None, b"x", False],
        (True, True),
        [1, 2.0],
        ["x", "ü"],
    ],
)
def test_lists_of_plain_values_come_back_exactly(value):
    """REQ-TRE-003: those that are looked at as a whole, too."""
    assert identity(again([value, {"k": value}])) == identity([value, {"k": value}])


@given(TREES)
def test_trees_come_back_exactly(value):
    """REQ-TRE-001, REQ-TRE-003; and the bytes are a fixed point."""
    content = dump_tree(value, where="x")
    assert identity(parse_tree(content, where="x")) == identity(value)
    assert dump_tree(parse_tree(content, where="x"), where="x") == content
    assert find_difference(value, parse_tree(content, where="x")) is None


@given(st.binary(min_size=8, max_size=8))
@example(struct.pack("<d", -0.0))
@example(bytes.fromhex("010000000000f87f"))  # quiet
@example(bytes.fromhex("010000000000f0ff"))  # signals, and is negative
def test_floats_keep_their_bits(bits):
    """Row 111; REQ-TRE-003: the payload of a NaN, its sign and whether it signals."""
    (value,) = struct.unpack("<d", bits)
    content = dump_tree([value, {"k": value}], where="x")
    assert content.count(struct.pack("<d", value)) == 2
    back = parse_tree(content, where="x")
    assert struct.pack("<d", back[0]) == struct.pack("<d", back[1]["k"]) == bits


def test_nan_keys_are_told_apart_by_their_bits():
    """REQ-TRE-002, REQ-TRE-003."""
    one, other = (struct.unpack("<d", bytes(6) + end)[0] for end in (b"\xf8\x7f", b"\xf9\x7f"))
    assert [struct.pack("<d", key) for key in again({one: 1, other: 2})] == [
        struct.pack("<d", k) for k in (one, other)
    ]


class Flag(int):
    pass


Point = namedtuple("Point", "x y")  # noqa: PYI024
UNSUPPORTED = [
    object(),
    Flag(1),
    Point(1, 2),
    defaultdict(int),
    np.float32(1),
    np.arange(3),
    bytearray(b"x"),
    memoryview(b"x"),
    range(3),
    iter([]),
    print,
    int,
    ...,
    type("Text", (str,), {})("x"),
    np.str_("x"),
    math.nan.hex,
    1 + 0 * Flag(1).real,
][:-1]


@pytest.mark.parametrize("value", UNSUPPORTED, ids=lambda value: type(value).__name__)
def test_values_without_a_form_are_refused_by_name(value):
    """REQ-TRE-006: subclasses too, for what came back would be something else."""
    error = error_of(lambda: dump_tree({"a": [value]}, where="config"))
    assert (error.code, type(error), error.where) == (
        Code.STATE_UNSUPPORTED,
        StateError,
        "config/a/0",
    )
    assert type(value).__name__ in error.detail


@pytest.mark.parametrize("text", ["\ud800", "a\udfff"])
def test_a_lone_surrogate_is_refused(text):
    """REQ-DOC-020."""
    assert code_of(lambda: dump_tree({"a": text}, where="x")) == Code.STATE_UNSUPPORTED
    assert code_of(lambda: dump_tree({text: 1}, where="x")) == Code.STATE_UNSUPPORTED


def nested(value, depth):
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "depth"),
    [
        (1, 32),
        ("x", 32),
        (1.0, 31),
        (2**70, 31),
        ((), 31),
        ({}, 31),
        (Size((1,)), 30),
        (InlineArray("int8", (1,), b"x"), 30),
    ],
)
def test_what_can_be_written_can_be_read_at_any_depth(value, depth):
    """REQ-TRE-007: a tagged value nests a level deeper than it looks."""
    assert again(nested(value, depth)) == nested(value, depth)
    assert code_of(lambda: dump_tree(nested(value, depth + 1), where="x")) == Code.DOC_DEPTH


def test_a_cycle_is_refused():
    """REQ-TRE-007."""
    cycle: list[object] = []
    cycle.append({"a": cycle})
    assert code_of(lambda: dump_tree(cycle, where="x")) == Code.DOC_DEPTH


def test_more_values_than_can_be_read_are_not_written(monkeypatch):
    """REQ-TRE-007: a float counts as three."""
    monkeypatch.setattr(limits, "TREE_ITEMS", 100)
    assert again([[0.5]] * 19) == [[0.5]] * 19
    error = error_of(lambda: dump_tree([[0.5]] * 20, where="config"))
    assert (error.code, error.where) == (Code.LIMIT_EXCEEDED, "config")


def test_a_history_of_losses_may_grow_for_ten_million_steps():
    """REQ-TRE-010: each float was an array of two, so that 333,000 of them were more than a tree may have."""
    history = {"loss": [0.1 + step for step in range(400_000)], "step": deque(range(400_000))}
    content = dump_tree(history, where="extra")
    assert len(content) < 12 * 400_000 + 100
    assert parse_tree(content, where="extra") == history


PACKED: dict[str, Any] = {
    "booleans": [True, False] * 8,
    "bytes": tuple(range(240, 256)),
    "64 bits": [2**64 - 1] * 16,
    "negative": deque([-(2**63)] * 16, 20),
    "minus zero": [-0.0] * 16,
    "a NaN of its own": [struct.unpack("<d", bytes.fromhex("0100000000f0ff7f"))[0]] * 16,
    "strings": ["a", "é", ""] * 6,
}


@pytest.mark.parametrize("value", PACKED.values(), ids=PACKED)
def test_many_of_a_kind_are_one_array_of_bytes(value):
    """REQ-TRE-010, REQ-TRE-011."""
    content = dump_tree(value, where="x")
    found = parse_tree(content, where="x")
    assert type(found) is type(value)
    assert list(map(type, found)) == list(map(type, value))
    assert dump_tree(found, where="x") == content
    assert content[1:3] in (b"\xa1L", b"\xa1U", b"\xa1Q")


@pytest.mark.parametrize(
    "value",
    [
        [True] * 15,
        [1, True] * 8,
        [2**63, -1] * 8,
        [2**64] * 16,
        [None] * 16,
        [b""] * 16,
        [1, 1.0] * 8,
    ],
    ids=repr,
)
def test_what_isnt_many_of_a_kind_stands_one_by_one(value):
    """REQ-TRE-010."""
    content = dump_tree(value, where="x")
    assert b"\xa1l" in content[:6]
    assert repr(parse_tree(content, where="x")) == repr(value)


@given(
    st.lists(
        st.one_of(st.integers(-(2**65), 2**65), st.floats(), st.text(), st.booleans()), max_size=40
    )
)
def test_any_list_comes_back_however_it_is_stored(value):
    """REQ-TRE-010."""
    content = dump_tree(value, where="x")
    found = parse_tree(content, where="x")
    assert dump_tree(found, where="x") == content
    assert list(map(type, found)) == list(map(type, value))


def test_a_large_tree_is_neither_written_nor_read(monkeypatch):
    """REQ-TRE-007."""
    monkeypatch.setattr(limits, "TREE_NBYTES", 1000)
    assert code_of(lambda: dump_tree(b"x" * 1000, where="x")) == Code.LIMIT_EXCEEDED
    assert code_of(lambda: parse_tree(bytes(1001), where="x")) == Code.LIMIT_EXCEEDED


REFUSED = {
    "a map": ({"a": 1}, Code.TREE_TAG),
    "a map within": (["l", {}], Code.TREE_TAG),
    "no tag": ([], Code.TREE_TAG),
    "a tag that is no string": ([1, 2], Code.TREE_TAG),
    "a tag that is an array": ([["l"]], Code.TREE_TAG),
    "an unknown tag": (["x"], Code.TREE_TAG),
    "a tag of two letters": (["ll"], Code.TREE_TAG),
    "float: no bytes": (["f"], Code.TREE_TAG),
    "float: 7 bytes": (["f", bytes(7)], Code.TREE_TAG),
    "float: 9 bytes": (["f", bytes(9)], Code.TREE_TAG),
    "float: text": (["f", "12345678"], Code.TREE_TAG),
    "float: two": (["f", bytes(8), bytes(8)], Code.TREE_TAG),
    "complex: 8 bytes": (["c", bytes(8)], Code.TREE_TAG),
    "integer: none": (["i"], Code.TREE_TAG),
    "integer: empty": (["i", b""], Code.TREE_TAG),
    "integer: small": (["i", b"\1"], Code.TREE_TAG),
    "integer: 2^64-1": (["i", (2**64 - 1).to_bytes(9, "little", signed=True)], Code.TREE_TAG),
    "integer: a byte too many": (["i", (2**64).to_bytes(10, "little", signed=True)], Code.TREE_TAG),
    "integer: a number": (["i", 5], Code.TREE_TAG),
    "dict: half a pair": (["d", 1], Code.TREE_TAG),
    "dict: key twice": (["d", 1, 2, 1, 3], Code.DOC_DUPLICATE_KEY),
    "dict: 1 and true": (["d", 1, 2, True, 3], Code.DOC_DUPLICATE_KEY),
    "dict: 1 and 1.0": (["d", 1, 2, ["f", struct.pack("<d", 1)], 3], Code.DOC_DUPLICATE_KEY),
    "dict: 0.0 and -0.0": (
        ["d", ["f", bytes(8)], 2, ["f", bytes(7) + b"\x80"], 3],
        Code.DOC_DUPLICATE_KEY,
    ),
    "dict: a NaN twice": (
        ["d", ["f", bytes(6) + b"\xf8\x7f"], 2, ["f", bytes(6) + b"\xf8\x7f"], 3],
        Code.DOC_DUPLICATE_KEY,
    ),
    "dict: a list as key": (["d", ["l"], 1], Code.TREE_TAG),
    "dict: a dict as key": (["d", ["d"], 1], Code.TREE_TAG),
    "OrderedDict: key twice": (["O", "a", 2, "a", 3], Code.DOC_DUPLICATE_KEY),
    "Counter: key twice": (["C", "a", 2, "a", 3], Code.DOC_DUPLICATE_KEY),
    "Counter: half a pair": (["C", "a"], Code.TREE_TAG),
    "set: out of order": (["s", 2, 1], Code.TREE_TAG),
    "set: member twice": (["s", 1, 1], Code.TREE_TAG),
    "set: 1 and true": (["s", 1, True], Code.TREE_TAG),
    "set: a list": (["s", ["l"]], Code.TREE_TAG),
    "frozenset: out of order": (["z", 2, 1], Code.TREE_TAG),
    "deque: no maxlen": (["q"], Code.TREE_TAG),
    "deque: maxlen too small": (["q", 1, 1, 2], Code.TREE_TAG),
    "deque: maxlen negative": (["q", -1], Code.TREE_TAG),
    "deque: maxlen true": (["q", True, 1], Code.TREE_TAG),
    "deque: maxlen 2^64-1": (["q", 2**64 - 1], Code.TREE_TAG),
    "deque: maxlen as text": (["q", "3"], Code.TREE_TAG),
    "array: nothing": (["a"], Code.TREE_TAG),
    "array: unknown dtype": (["a", "object", [1], b"x"], Code.TREE_TAG),
    "array: too few bytes": (["a", "int16", [2], b"xxx"], Code.TREE_TAG),
    "array: shape isn't a list": (["a", "int8", 1, b"x"], Code.TREE_TAG),
    "array: negative extent": (["a", "int8", [-1], b""], Code.TREE_TAG),
    "array: true as extent": (["a", "int8", [True], b"x"], Code.TREE_TAG),
    "array: 33 dimensions": (["a", "int8", [1] * 33, b"x"], Code.TREE_TAG),
    "array: extent over 2^48": (["a", "int8", [0, 2**48 + 1], b""], Code.TREE_TAG),
    "array: text": (["a", "int8", [1], "x"], Code.TREE_TAG),
    "scalar: too many bytes": (["n", "int8", b"xx"], Code.TREE_TAG),
    "scalar: dtype isn't text": (["n", 1, b"x"], Code.TREE_TAG),
    "tensor: unknown kind": (["T", "w", "jax"], Code.TREE_TAG),
    "tensor: name isn't text": (["T", 1, "torch"], Code.TREE_TAG),
    "tensor: no kind": (["T", "w"], Code.TREE_TAG),
    "tensor: kind is an array": (["T", "w", ["l"]], Code.TREE_TAG),
    "dtype: unknown": (["D", "float31"], Code.TREE_TAG),
    "device: bytes": (["V", b"cpu"], Code.TREE_TAG),
    "size: a number": (["S", 3], Code.TREE_TAG),
    "size: negative": (["S", [-3]], Code.TREE_TAG),
}


@pytest.mark.parametrize(("value", "code"), REFUSED.values(), ids=REFUSED)
def test_other_forms_are_refused(value, code):
    """REQ-TRE-001, REQ-TRE-002, REQ-TRE-005: alone, and deep within."""
    for outer in (value, ["l", 1, value], ["d", "a", value], ["t", ["q", None, value]]):
        error = error_of(lambda outer=outer: parse_raw(outer))
        assert (error.code, type(error)) == (code, FormatError)


RAW = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 300)
    | st.sampled_from([2**63, 2**64 - 1, -(2**63)])
    | st.sampled_from([*"flticdOCszqanTDVS", "int8", "float32", "torch"])
    | st.binary(max_size=17),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.tuples(st.sampled_from([*"flticdOCszqanTDVS"]), st.lists(inner, max_size=5)).map(
            lambda pair: [pair[0], *pair[1]]
        )
    ),
    max_leaves=15,
)


@given(RAW)
def test_whatever_is_parsed_dumps_to_the_same_bytes(value):
    """REQ-TRE-001: no two trees for one value, and nothing but a CkptError for what is no tree."""
    content = dump_msgpack(value)
    try:
        parsed = parse_tree(content, where="x")
    except FormatError:
        return
    assert dump_tree(parsed, where="x") == content


def test_differences_are_found_by_path():
    """REQ-CMT-014."""
    assert find_difference({"a": [1, {"b": 2}]}, {"a": [1, {"b": 3}]}) == "/a/1/b"
    assert find_difference((1, 2), [1, 2]) == "/"
    assert find_difference({"a": 1, "b": 2}, {"b": 2, "a": 1}) == "/"
    assert find_difference({"a": 0.0}, {"a": -0.0}) == "/a"
    assert find_difference({10**5000: 1}, {10**5000: 2}) == "/(int)"
    assert find_difference([math.nan], [math.nan]) is None


def test_values_are_listed_without_keys():
    refs = [TensorRef(name, "torch") for name in "abcd"]
    value = {
        "k": [refs[0], (refs[1], {1: refs[2]}), deque([refs[3]])],
        TensorRef("key", "torch"): 1,
    }
    assert [item for item in iter_values(value) if isinstance(item, TensorRef)] == refs


def test_a_huge_integer_costs_little():
    """A tree may hold an integer of many digits, which Python refuses to print; as a key too."""
    begin = time.process_time()
    assert again({10**5000: [10**5000], (10**5000,): 1}) == {10**5000: [10**5000], (10**5000,): 1}
    assert time.process_time() - begin < 20


@pytest.mark.parametrize(
    "key", [TensorRef("a", "numpy"), (1, TensorRef("a", "numpy")), DtypeName("float32")]
)
def test_a_key_is_a_plain_scalar_or_a_tuple_of_such(key):
    """REQ-TRE-008."""
    with pytest.raises((StateError, FormatError)) as caught:
        dump_tree({key: 1}, where="x")
    assert caught.value.code == Code.STATE_UNSUPPORTED
    forged = dump_msgpack(["d", ["T", "a", "numpy"], 1])
    with pytest.raises((StateError, FormatError)) as caught:
        parse_tree(forged, where="x")
    assert caught.value.code == Code.TREE_TAG


@pytest.mark.parametrize(
    "member",
    [TensorRef("w", "torch"), InlineArray("int8", (1,), b"\x01"), (1, (TensorRef("w", "numpy"),))],
    ids=str,
)
def test_what_would_not_come_back_is_no_member_of_a_set(member):
    """REQ-TRE-009: whatever could be hashed was taken."""
    assert code_of(lambda: dump_tree({member}, where="x")) == Code.STATE_UNSUPPORTED


def test_scalars_of_all_kinds_are_members_of_a_set():
    """REQ-TRE-009."""
    value = {
        DtypeName("int8"),
        DeviceName("cpu"),
        Size((2,)),
        InlineArray("int8", (), b"\x07", scalar=True),
        (1, "x"),
    }

    assert parse_tree(dump_tree(value, where="x"), where="x") == value


# --- trees of format 0.9 --------------------------------------------------------------------------


def unpacked(value):
    """The tree of a value as format 0.9 wrote it: an entry of a list is a tree of its own."""
    if isinstance(value, list | tuple):
        return ["l" if isinstance(value, list) else "t", *map(unpacked, value)]
    if isinstance(value, dict):
        return ["d", *(unpacked(item) for pair in value.items() for item in pair)]
    if isinstance(value, frozenset):
        return ["z", *sorted(map(unpacked, value), key=dump_msgpack)]
    return ["f", struct.pack("<d", value)] if isinstance(value, float) else value


@pytest.mark.parametrize(
    "value",
    [
        list(range(40)),
        tuple(float(n) / 3 for n in range(16)),
        [str(n) for n in range(15)],
        {"a": ["x"] * 16, "b": [list(range(-20, 20)), None, (True,) * 17]},
        frozenset({tuple(range(16)), tuple(range(17)), "a"}),
        [1, "mixed"] * 20,
    ],
    ids=["numbers", "fractions", "texts", "dict", "set", "mixed"],
)
def test_a_tree_without_packed_lists_is_put_into_the_form_of_today(value):
    content = repack_tree(dump_msgpack(unpacked(value)))

    assert content == dump_tree(value, where="x")
    found = parse_tree(content, where="x")
    assert found == value
    assert dump_tree(found, where="x") == content


@pytest.mark.parametrize(
    "tree", [["L", "uint8", bytes(range(16))], ["s", 2, 1], ["l", ["U", "bool", bytes(16)]]]
)
def test_what_was_no_tree_in_its_version_stays_none(tree):
    with pytest.raises(FormatError, match="TREE_TAG"):
        parse_tree(repack_tree(dump_msgpack(tree)), where="x")


def test_bytes_that_are_no_tree_stay_as_they_are():
    assert repack_tree(b"\xc1") == b"\xc1"
