"""Trees; spec/core/15-trees.md. Most are requested alone, some within a checkpoint."""

from __future__ import annotations

from typing import Any

from conformance.generate.bases import small
from conformance.generate.cases import Page
from conformance.generate.model import Checkpoint, Edit
from conformance.generate.plans import Leaf, Plan, Tensor
from conformance.generate.tagged import tagged
from conformance.generate.wire import Raw, msgpack, packed

__all__ = ["page"]

ONE = bytes.fromhex("000000000000f03f")
TWO = bytes.fromhex("0000000000000040")
NAN = bytes.fromhex("01000000a0fbf97f")
ZERO = bytes(8)
MINUS_ZERO = bytes(7) + b"\x80"
INFINITY = bytes(6) + b"\xf0\x7f"


def page() -> Page:
    """Return the cases of trees."""
    made = Page("trees")
    _valid(made)
    _checkpoint(made)
    _leaves(made)
    _tags(made)
    _packed(made)
    _keys(made)
    _bytes(made)
    return made


def _set(*members: Any) -> list[Any]:
    """Return the tree of a set, with members in the order of their bytes."""
    return ["s", *sorted(members, key=msgpack)]


def _valid(made: Page) -> None:
    why = "a state that comes back as another type or value makes another run"
    for slug, clauses, says, tree in (
        ("scalars", "TRE-001", "what stands as itself",
         ["l", None, True, False, 0, -1, -(2**63), 2**64 - 1, "", "é", b"", b"\0\xff"]),
        ("floats", "TRE-001 TRE-003", ("floats by their bits: a NaN with payload, both zeros, an"
        " infinity, a denormal"),
         ["l",
          *(["f", content] for content in (NAN, ZERO, MINUS_ZERO, INFINITY, b"\1" + bytes(7)))]),
        ("complex", "TRE-001 TRE-003", "complex numbers, real part first",
         ["l", ["c", ONE + TWO], ["c", MINUS_ZERO * 2]]),
        ("big-integers", "TRE-001", "integers beyond 64 bits, of both signs",
         ["l", *(["i", value.to_bytes(nbytes, "little", signed=True)] for value, nbytes in (
             (2**64, 9), (-(2**63) - 1, 9), (2**71 - 1, 9), (-(2**127), 16)))]),
        ("sequences", "TRE-001", "lists, tuples and deques in each other",
         ["t", ["l"], ["t"], ["q", None, 1], ["q", 3, ["t", 1, 2], "x"], ["q", 0]]),
        ("dicts", "TRE-001 TRE-002 TRE-008", "dicts in their order, with keys of all allowed kinds",
         ["d", "b", 1, "a", 2, None, 3, 7, 4, ["f", ONE], 5, b"\0", 6, ["t", 1, ["t", "x"]], ["l"],
          ["z", 1, 2], 8]),
        ("ordered", "TRE-001", "an OrderedDict and a Counter, not sorted",
         ["l", ["O", "z", 1, "a", 2], ["C", "y", 3, "x", -1]]),
        ("sets", "TRE-001 TRE-005", ("sets, sorted as byte strings: 128 stands behind -1, and text"
        " before both"),
         ["l", ["s"], ["s", 1, 2, "a", 128, -1], ["z", ["t", 1, 2], ["t", 1, 3]]]),
        ("set-members", "TRE-009", ("sets of all that may be in one: scalars, a dtype, a device, a"
        " size, tuples of such"),
         ["l", ["s", ["D", "int8"], ["S", [2]], ["V", "cpu"], ["n", "int8", b"\7"],
                ["t", ["D", "int8"], ["z", 1]]],
          ["z", ["t"], None]]),
        ("set-of-numbers", "TRE-005", ("sets of numbers of several types, none of which equals"
        " another; of NaNs"),
         ["l", _set(1, 2, ["f", b"\0" * 6 + b"\xf4\x3f"], ["n", "bfloat16", b"\x40\x40"],
                    ["n", "int8", b"\4"]),
          _set(["f", NAN], ["f", NAN[:7] + b"\xff"], ["n", "float32", b"\0\0\xc0\x7f"]),
          _set(["S", [2, 3]], ["S", [3]], ["t", 2], ["t", 2, 3, 4], ["z", 2, 3])]),
        ("deque-longest", "TRE-001", "deques whose maxlen is 2^63 - 1",
         ["l", ["q", 2**63 - 1, 1], ["Q", 2**63 - 1, "uint8", bytes(16)]]),
        ("arrays", "TRE-001", "arrays with and without elements, a numpy scalar, a bfloat16",
         ["l", ["a", "int8", [2], b"\1\2"], ["a", "float32", [0, 3], b""],
          ["a", "int16", [], b"\1\0"], ["n", "int8", b"\7"], ["n", "bfloat16", b"\x80\x3f"]]),
        ("torch", "TRE-001", ("what only torch has: a dtype, a device, a size, a reference to a"
        " tensor"),
         ["l", ["D", "float32"], ["V", "cuda:0"], ["S", [2, 3]], ["S", []], ["T", "w", "torch"],
          ["T", "", "numpy"]]),
        ("deep", "TRE-007 LIM-002", "31 lists in each other around a tuple", _nested(31, ["t"])),
        ("list-of-tags", "TRE-001", "a list of strings that are tags", ["l", "l", "T", "f"]),
        ("packed", "TRE-010 TRE-011", "16 entries of each kind, in lists, tuples and deques",
         ["l", ["L", "bool", b"\1\0" * 8], ["U", "uint8", bytes(range(240, 256))],
          ["L", "uint16", b"\0\1" * 16],
          ["L", "uint32", b"\0\0\1\0" * 16], ["U", "uint64", b"\xff" * 128],
          ["L", "int8", b"\x80\x7f" * 8],
          ["L", "int16", b"\x7f\xff\1\0" * 8], ["L", "int32", b"\0\0\0\x80" * 16],
          ["L", "int64", b"\xff\xff\xff\x7f\xff\xff\xff\xff" * 16],
          ["Q", 17, "float64", (NAN + MINUS_ZERO) * 8],
          ["L", "str", packed([0, 2] * 8), "é" * 8], ["Q", None, "str", packed([0] * 16), ""]]),
        ("not-packed", "TRE-010", "15 entries, 16 of two types, and 16 integers that no kind holds",
         ["l", ["l", *([1] * 15)], ["l", *([1] * 15), True], ["t", *([-1, 2**63] * 8)],
          ["l", *([None] * 16)], ["q", None, *([["i", (2**64).to_bytes(9, "little")]] * 16)]]),
    ):  # fmt: skip
        made.ask(
            slug,
            "",
            "context",
            None,
            clauses,
            says,
            why=why,
            result={"tree": tagged(tree)},
            files={"tree.msgpack": msgpack(tree)},
        )


def _nested(depth: int, inner: Any) -> Any:
    for _ in range(depth):
        inner = ["l", inner]
    return inner


def _checkpoint(made: Page) -> None:
    plan = small()
    plan.leaves.append(
        Leaf(
            field="weights",
            name="extra",
            value=["d", "w", ["T", "w", "torch"], "h", ["T", "head", "numpy"]],
        )
    )
    plan.tensors = [Tensor(name="w", shape=(2, 3), aliases=("head",))]
    made.accept(
        "references",
        plan,
        "TRE-004",
        "a leaf that refers to a tensor by its name, and by its alias",
        why="an alias is a name, and a reader that looks at names only refuses what is whole",
    )
    why = "who restores it gets nothing, or another tensor"
    for slug, says, value in (
        ("reference-to-nothing", "a tensor v, which there isn't", ["d", "w", ["T", "v", "torch"]]),
        (
            "reference-in-a-list",
            "a tensor v, which there isn't, deep inside",
            ["l", ["t", ["q", None, ["T", "v", "numpy"]]]],
        ),
    ):
        made.reject(
            slug,
            "references",
            _leaf(value),
            "TRE-004",
            "TREE_REFERENCE",
            f"the leaf refers to {says}",
            why=why,
            phase="validate",
            bug="SILENT_DATA_LOSS",
        )
    made.reject(
        "reference-to-another-field",
        "references",
        _config(["T", "w", "torch"]),
        "TRE-004",
        "TREE_REFERENCE",
        "a leaf of config refers to a tensor of weights",
        why=why,
        phase="validate",
        bug="SILENT_DATA_LOSS",
    )


def _leaves(made: Page) -> None:
    """Add leaves that are no trees, and a leaf with a reference to an alias."""
    tied = Plan(
        tensors=[Tensor(name="w", dtype="int8", shape=(2,), aliases=("tied",))],
        leaves=[Leaf(field="weights", value=["d", "head", ["T", "tied", "torch"]])],
    )
    made.accept(
        "reference-to-an-alias",
        tied,
        "TRE-004 IDX-013",
        "a leaf refers to a tensor by its alias",
        why="an alias is another name of the tensor",
    )
    made.reject(
        "reference-in-a-stream",
        "references",
        _state(["l", ["T", "w", "torch"]]),
        "TRE-004",
        "TREE_REFERENCE",
        "a stream refers to a tensor",
        why="rng has no tensors",
        phase="validate",
        bug="SILENT_DATA_LOSS",
    )
    made.reject(
        "leaf-with-unknown-tag",
        "references",
        _leaf(["x"]),
        "TRE-001",
        "TREE_TAG",
        "a leaf with the tag x",
        why="a tag that isn't of the table could stand for a class to be built",
        phase="read",
        bug="WRONG_BYTES",
    )
    made.reject(
        "leaf-of-no-bytes",
        "references",
        _leaf(Raw(b"")),
        "DOC-021 TRE-001",
        "MSGPACK_SYNTAX",
        "a leaf of no bytes",
        why="there is no value in it",
        phase="read",
        bug="SILENT_DATA_LOSS",
    )


def _leaf(value: Any) -> Edit:
    def edit(made: Checkpoint) -> None:
        made.part["leaves"]["value"][0] = msgpack(value)

    return edit


def _config(value: Any) -> Edit:
    def edit(made: Checkpoint) -> None:
        made.part["leaves"]["value"][1] = msgpack(value)

    return edit


def _state(value: Any) -> Edit:
    def edit(made: Checkpoint) -> None:
        made.part["streams"]["state"][0] = msgpack(value)

    return edit


def _reject(  # noqa: PLR0917 - a row of a table of cases
    made: Page, slug: str, of: str, clauses: str, error: str, says: str, content: bytes, bug: str
) -> None:
    made.reject(
        slug,
        f"trees/valid/{of}",
        None,
        clauses,
        error,
        says,
        bug=bug,
        phase="read",
        kind="context",
        why="the set of forms is closed, so that one value has one tree, and no tree is code",
        files={"tree.msgpack": content},
        request={},
        features=[],
    )


def _tags(made: Page) -> None:
    for slug, of, says, tree in (
        ("empty-array", "sequences", "an array without a tag", []),
        ("unknown-tag", "sequences", "the tag x", ["x", 1]),
        ("integer-tag", "sequences", "an integer in the place of the tag", [1, 2]),
        ("map", "dicts", "a map of msgpack", {}),
        ("float-of-1-byte", "floats", "a float of one byte", ["f", b"\0"]),
        ("float-and-more", "floats", "a float with a third entry", ["f", ONE, 0]),
        ("complex-of-8-bytes", "complex", "a complex number of eight bytes", ["c", ONE]),
        ("integer-in-range", "big-integers", "1 as a big integer", ["i", b"\1"]),
        ("integer-with-zeros", "big-integers", "2^64 in ten bytes",
         ["i", (2**64).to_bytes(10, "little")]),
        ("array-short", "arrays", "an array of two elements in one byte",
         ["a", "int8", [2], b"\1"]),
        ("array-unknown-dtype", "arrays", "an array of float31", ["a", "float31", [], b"\0\0\0\0"]),
        ("array-negative", "arrays", "an extent of -1", ["a", "int8", [-1], b""]),
        ("array-of-33-dimensions", "arrays", "an array of 33 dimensions",
         ["a", "int8", [1] * 33, b"\0"]),
        ("array-too-long", "arrays", "an extent of 2^48 + 1 beside one of 0",
         ["a", "int8", [0, 2**48 + 1], b""]),
        ("array-tagged-shape", "arrays", "the shape as a tree, and not as a plain array",
         ["a", "int8", ["l", 1], b"\0"]),
        ("scalar-of-2", "arrays", "a scalar of two elements", ["n", "int8", b"\0\0"]),
        ("deque-too-long", "sequences", "a deque of two entries whose maxlen is 1", ["q", 1, 1, 2]),
        ("deque-without-maxlen", "sequences", "a deque that ends behind its tag", ["q"]),
        ("deque-maxlen-2-63", "deque-longest", "a deque whose maxlen is 2^63", ["q", 2**63, 1]),
        ("deque-maxlen-2-64", "deque-longest", ("a deque whose maxlen is 2^64, as an integer of"
        " nine bytes"),
         ["q", ["i", (2**64).to_bytes(9, "little")], 1]),
        ("packed-deque-maxlen-2-63", "deque-longest", "a packed deque whose maxlen is 2^63",
         ["Q", 2**63, "uint8", bytes(16)]),
        ("dict-odd", "dicts", "a key without a value", ["d", "a"]),
        ("dtype-unknown", "torch", "a dtype called float", ["D", "float"]),
        ("device-number", "torch", "a device that is a number", ["V", 0]),
        ("size-negative", "torch", "a size with an extent of -1", ["S", [-1]]),
        ("reference-of-another-kind", "torch", "a reference of the kind jax", ["T", "w", "jax"]),
    ):  # fmt: skip
        _reject(made, slug, of, "TRE-001", "TREE_TAG", says, msgpack(tree), "AMBIGUITY")


def _packed(made: Page) -> None:
    for slug, clauses, says, tree in (
        ("list-of-16-integers", "TRE-010", "16 integers one by one", ["l", *range(16)]),
        ("tuple-of-16-floats", "TRE-010", "16 floats one by one", ["t", *([["f", ONE]] * 16)]),
        ("deque-of-16-strings", "TRE-010", "16 strings one by one", ["q", None, *("a" * 16)]),
        ("packed-15", "TRE-010", "15 packed booleans", ["L", "bool", bytes(15)]),
        ("packed-none", "TRE-010", "no entry, packed", ["L", "uint8", b""]),
        ("packed-too-wide", "TRE-011", "16 zeros in two bytes each", ["L", "uint16", bytes(32)]),
        ("packed-signed", "TRE-011", "16 zeros as signed ones", ["L", "int8", bytes(16)]),
        ("packed-bool-of-2", "TRE-011", "a boolean whose byte is 2", ["L", "bool", b"\2" * 16]),
        ("packed-cut", "TRE-011", "16 floats and a byte", ["U", "float64", bytes(129)]),
        ("packed-float32", "TRE-011", "floats of four bytes", ["L", "float32", bytes(64)]),
        ("packed-short-text", "TRE-011", "strings whose lengths go beyond their text",
         ["L", "str", packed([1] * 16), "a" * 15]),
        ("packed-within-a-character", "TRE-011", "strings that are cut within a character",
         ["L", "str", packed([1] * 16), "é" * 8]),
        ("packed-deque-too-long", "TRE-001", "a deque of 16 whose maxlen is 15",
         ["Q", 15, "uint8", bytes(16)]),
    ):  # fmt: skip
        _reject(made, slug, "packed", clauses, "TREE_TAG", says, msgpack(tree), "AMBIGUITY")


def _keys(made: Page) -> None:
    for slug, clauses, error, says, tree in (
        ("key-twice", "TRE-002", "DOC_DUPLICATE_KEY", "one key twice", ["d", "a", 1, "a", 2]),
        ("key-1-and-true", "TRE-002", "DOC_DUPLICATE_KEY", "the keys 1 and True",
         ["d", 1, None, True, None]),
        ("key-1-and-1.0", "TRE-002", "DOC_DUPLICATE_KEY", "the keys 1 and 1.0",
         ["O", 1, None, ["f", ONE], None]),
        ("key-zeros", "TRE-002", "DOC_DUPLICATE_KEY", "the keys 0.0 and -0.0",
         ["d", ["f", ZERO], None, ["f", MINUS_ZERO], None]),
        ("key-tuples", "TRE-002", "DOC_DUPLICATE_KEY", "the keys (1,) and (True,)",
         ["d", ["t", 1], 0, ["t", True], 0]),
        ("key-list", "TRE-008", "TREE_TAG", "a list as a key", ["d", ["l"], None]),
        ("key-tensor", "TRE-008", "TREE_TAG", "a reference to a tensor as a key",
         ["d", ["T", "w", "torch"], None]),
        ("key-tuple-of-list", "TRE-008", "TREE_TAG", "a tuple with a list inside as a key",
         ["d", ["t", ["l"]], None]),
        ("set-unsorted", "TRE-005", "TREE_TAG", "a set that isn't sorted", ["s", 2, 1]),
        ("set-twice", "TRE-005", "TREE_TAG", "a member twice", ["s", 1, 1]),
        ("set-of-lists", "TRE-009", "TREE_TAG", "a list in a set", ["s", ["l", 1]]),
        ("set-of-tensors", "TRE-009", "TREE_TAG", "a reference to a tensor in a set",
         ["s", ["T", "w", "torch"]]),
        ("set-of-arrays", "TRE-009", "TREE_TAG", "an array in a frozenset",
         ["z", ["a", "int8", [1], b"\1"]]),
        ("set-of-tuples-of-arrays", "TRE-009", "TREE_TAG", "a tuple with an array inside in a set",
         ["s", ["t", ["a", "int8", [1], b"\1"]]]),
        ("set-1-and-true", "TRE-005", "TREE_TAG", "a set of 1 and True", ["s", 1, True]),
        ("set-1-and-1.0", "TRE-005", "TREE_TAG", "a set of 1 and 1.0", _set(1, ["f", ONE])),
        ("set-1-and-scalar", "TRE-005", "TREE_TAG", "a set of 1 and numpy's 1",
         _set(1, ["n", "int8", b"\1"])),
        ("set-scalars", "TRE-005", "TREE_TAG", "a set of 1 as int8 and as bfloat16",
         _set(["n", "bfloat16", b"\x80\x3f"], ["n", "int8", b"\1"])),
        ("set-scalar-zeros", "TRE-005", "TREE_TAG", "a set of 0.0 and -0.0 as float32",
         _set(["n", "float32", bytes(4)], ["n", "float32", b"\0\0\0\x80"])),
        ("set-true-and-scalar", "TRE-005", "TREE_TAG", "a set of True and numpy's True",
         ["s", ["n", "bool", b"\1"], True]),
        ("set-size-and-tuple", "TRE-005", "TREE_TAG", "a set of torch.Size((2, 3)) and (2, 3)",
         _set(["S", [2, 3]], ["t", 2, 3])),
        ("set-of-tuples-of-scalars", "TRE-005", "TREE_TAG", ("a frozenset of the tuples of 1 and"
        " of numpy's 1"),
         ["z", *_set(["t", 1], ["t", ["n", "int16", b"\1\0"]])[1:]]),
    ):  # fmt: skip
        of = "sets" if slug.startswith("set") else "dicts"
        _reject(made, slug, of, clauses, error, says, msgpack(tree), "WRONG_BYTES")


def _bytes(made: Page) -> None:
    for slug, clauses, error, says, content in (
        ("two-values", "DOC-021", "MSGPACK_SYNTAX", "a second value behind the first", b"\xc0\xc0"),
        ("no-value", "DOC-021", "MSGPACK_SYNTAX", "no bytes at all", b""),
        ("not-shortest", "DOC-022", "DOC_NOT_CANONICAL", "127 in two bytes", b"\x92\xa1l\xcc\x7f"),
        ("msgpack-float", "DOC-020", "MSGPACK_TYPE", "a float of msgpack",
         b"\xcb\x7f\xf8" + bytes(6)),
        ("extension", "DOC-020", "MSGPACK_TYPE", "an extension", b"\xd4\x01\x00"),
        ("depth-33", "TRE-007 LIM-001", "DOC_DEPTH", "33 lists in each other",
         msgpack(_nested(33, None))),
        ("depth-2000", "TRE-007 LIM-001", "DOC_DEPTH", "2000 lists in each other",
         b"\x92\xa1l" * 2000 + b"\xc0"),
        ("claims-4g", "DOC-023", "MSGPACK_SYNTAX", "an array of 2^32 - 1 entries",
         b"\xdd" + b"\xff" * 4),
    ):  # fmt: skip
        bug = (
            "CRASH"
            if slug.startswith("depth")
            else "RESOURCE"
            if slug == "claims-4g"
            else "AMBIGUITY"
        )
        _reject(
            made,
            slug,
            "deep" if slug.startswith("depth") else "scalars",
            clauses,
            error,
            says,
            content,
            bug,
        )
