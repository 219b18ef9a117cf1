"""Open, read, reshard, write; spec/core/70-open-and-read.md."""

from __future__ import annotations

import functools
import itertools
import math
import struct
from collections.abc import Sequence
from typing import Any

from blake3 import blake3

from conformance.generate.bases import small
from conformance.generate.cases import Page
from conformance.generate.pages.index import pieces, quarters
from conformance.generate.plans import Plan, Tensor, box_bytes, expected, payload

__all__ = ["page"]

Bounds = Sequence[Sequence[int]]
ELSE = (
    "a reader that looks in the wrong box, block or row returns elements that are somebody else's"
)


def page() -> Page:
    """Return the cases of opening and reading."""
    made = Page("opening")
    _open(made)
    _folders(made)
    _read(made)
    _read_blocks(made)
    _read_scopes(made)
    _reshard(made)
    _write(made)
    _write_lists(made)
    _write_shapes(made)
    return made


def _open(made: Page) -> None:
    base = made.accept(
        "small",
        small(),
        "OPN-003 OPN-004 OPN-009 CKP-002 CKP-003 CKP-004 CKP-005",
        "one tensor, one leaf, one stream",
        why="it is what the others of this page differ from",
    )
    made.ask(
        "digest",
        "small",
        "open",
        {"digest": "blake3:" + base.digest.hex(), "verify": "all"},
        "OPN-001 RUN-011",
        "opened by the digest of its manifest",
        why="the digest names the checkpoint",
        result={"tensors": expected(base.plan)},
        bug="REFUSES_VALID",
    )
    made.reject(
        "digest-of-another",
        "small",
        None,
        "OPN-001 RUN-011",
        "DOC_DIGEST",
        "another digest is asked for than that of the manifest",
        bug="WRONG_RUN",
        why="an older checkpoint that is whole, put in the place of the newer one, is another run",
        request={"digest": "blake3:" + "0" * 64},
    )
    left = small()
    made.accept(
        "left-behind",
        left,
        "CKP-005 OPN-009",
        "files of another attempt, and some that nobody knows",
        why="a crashed attempt leaves files behind, and tools add their own",
        after=lambda files: files.update(
            {
                "index-ffffffffffffffff.msgpack": b"left",
                "parts/ffffffffffffffff-00000.msgpack": b"left",
                "weights-ffffffffffffffff-00000.safetensors": b"left",
                ".tmp-1234": b"",
                "signatures/a.sig": b"later",
                "exchange/0": b"",
                "condemned-0123456789abcdef": b"",
                "config.json": b"{}",
                "parts/ffffffffffffffff-00001.failure.json": b"left",
            }
        ),
    )


def _folders(made: Page) -> None:
    """Add folders in the place of files."""
    for slug, says, path in (
        ("register-is-a-folder", "a folder called manifest.json", "manifest.json"),
        (
            "index-is-a-folder",
            "a folder in the place of the index",
            "index-0123456789abcdef.msgpack",
        ),
        (
            "part-is-a-folder",
            "a folder in the place of a part",
            "parts/0123456789abcdef-00000.msgpack",
        ),
    ):
        made.reject(
            slug,
            "small",
            None,
            "CKP-002",
            "UNSAFE_FILE",
            says,
            bug="ESCAPE",
            why="what isn't a regular file is opened by accident, or hangs",
            after=functools.partial(_as_folder, path),
        )


def _as_folder(path: str, files: dict[str, bytes]) -> None:
    del files[path]
    files[f"{path}/x"] = b""


def _digest(tensor: Tensor, bounds: Bounds) -> str:
    begin = tuple(b for b, _ in bounds)
    return blake3(box_bytes(tensor, begin, tuple(e - b for b, e in bounds))).hexdigest()


def _read(made: Page) -> None:
    made.accept(
        "quarters",
        quarters(1),
        "OPN-005",
        "tensors of two writers, in quarters and in a pinwheel",
        why="it is what boxes are read from",
    )
    plan = made.bases["quarters"].plan
    for slug, of, bounds, says in (
        ("inside-one-box", 0, [[0, 1], [0, 2]], "a row of one box"),
        ("across-boxes", 0, [[1, 3], [1, 3]], "the middle, of which each box has one element"),
        ("one-element", 0, [[3, 4], [3, 4]], "the last element"),
        ("a-column", 0, [[0, 4], [2, 3]], "a column through two boxes"),
        ("whole", 0, [[0, 4], [0, 4]], "all of it"),
        ("nothing", 0, [[2, 2], [0, 4]], "no rows"),
        ("across-the-pinwheel", 2, [[0, 2], [1, 3]], "a box that three of five have a part of"),
        ("by-alias", 0, [[0, 2], [0, 4]], "two rows, by another name of the tensor"),
    ):
        tensor = plan.tensors[of]
        name = "weights/z" if slug == "by-alias" else f"weights/{tensor.name}"
        made.ask(
            f"read-{slug}",
            "quarters",
            "read",
            {"tensor": name, "box": bounds},
            "OPN-005 OPN-007 TEN-001" + (" IDX-013" if slug == "by-alias" else ""),
            f"read {says}",
            why=ELSE,
            result={"blake3": _digest(tensor, bounds)},
        )
    long = Plan(
        tensors=[
            Tensor(name="b", dtype="int16", shape=(2, 1100)),
            Tensor(name="s", dtype="float64"),
        ]
    )
    made.accept(
        "blocks",
        long,
        "OPN-005 TEN-005",
        "a tensor of two blocks, and a scalar",
        why="it is what is read from below",
    )


def _read_blocks(made: Page) -> None:
    """Add boxes of tensors of several blocks."""
    long = Plan(
        tensors=[
            Tensor(name="b", dtype="int16", shape=(2, 1100)),
            Tensor(name="s", dtype="float64"),
        ]
    )
    for slug, bounds, says in (
        ("last-of-a-block", [[1, 2], [947, 949]], "an element on each side of a block's end"),
        ("short-block", [[1, 2], [1000, 1100]], "elements of the last block, which is short"),
    ):
        made.ask(
            f"read-{slug}",
            "blocks",
            "read",
            {"tensor": "weights/b", "box": bounds},
            "OPN-005 OPN-006 TEN-005",
            f"read {says}",
            why=ELSE,
            result={"blake3": _digest(long.tensors[0], bounds)},
        )
    made.ask(
        "read-scalar",
        "blocks",
        "read",
        {"tensor": "weights/s", "box": []},
        "OPN-005",
        "read a scalar",
        why=ELSE,
        result={"blake3": _digest(long.tensors[1], [])},
    )
    scoped = Plan(
        tensors=[
            Tensor(name="w", dtype="int8", shape=(4,), scope=scope, content=bytes([n] * 4))
            for n, scope in enumerate(("global", "lw/0", "lw/1"))
        ]
    )
    made.accept(
        "scopes",
        scoped,
        "OPN-005 IDX-008",
        "one name in three scopes",
        why="it is what is read from below",
    )


def _read_scopes(made: Page) -> None:
    """Add scopes, and damage."""
    scoped = Plan(
        tensors=[
            Tensor(name="w", dtype="int8", shape=(4,), scope=scope, content=bytes([n] * 4))
            for n, scope in enumerate(("global", "lw/0", "lw/1"))
        ]
    )
    made.ask(
        "read-scope",
        "scopes",
        "read",
        {"tensor": "weights/w@lw/1", "box": [[1, 3]]},
        "OPN-005 CTX-003",
        "read the tensor of one scope of three",
        why=ELSE,
        result={"blake3": _digest(scoped.tensors[2], [[1, 3]])},
    )

    def damage(files: dict[str, bytes]) -> None:
        name = next(path for path in files if path.endswith(".safetensors"))
        files[name] = files[name][:-1] + b"\xff"

    made.reject(
        "read-damaged-block",
        "blocks",
        None,
        "OPN-006 TEN-006",
        "BLOCK_DIGEST",
        "read elements of a damaged block",
        why="a caller that has seen wrong weights can't unsee them",
        phase="read",
        kind="read",
        after=damage,
        request={"tensor": "weights/b", "box": [[1, 2], [1090, 1091]]},
    )


def _rows(shape: Sequence[int], parts: int, axis: int) -> list[Bounds]:
    """Return the boxes of a tensor cut along an axis, of unequal sizes where necessary."""
    ends = [shape[axis] * i // parts for i in range(parts + 1)]
    return [
        [list(cut) if at == axis else [0, extent] for at, extent in enumerate(shape)]
        for cut in itertools.pairwise(ends)
    ]


def _reshard(made: Page) -> None:
    seven = Plan(
        writer_count=3,
        tensors=[
            Tensor(
                name="w",
                shape=(7, 5),
                pieces=pieces((((0, 0), (3, 5)), 0), (((3, 0), (2, 5)), 1), (((5, 0), (2, 5)), 2)),
            )
        ],
    )
    made.accept(
        "three-uneven-rows",
        seven,
        "OPN-005 IDX-004",
        "seven rows, of three writers",
        why="it is what is cut anew",
    )
    columns = Plan(
        writer_count=2,
        tensors=[
            Tensor(
                name="w",
                dtype="bfloat16",
                shape=(4, 6, 2),
                pieces=pieces((((0, 0, 0), (4, 3, 2)), 0), (((0, 3, 0), (4, 3, 2)), 1)),
            )
        ],
    )
    made.accept(
        "two-columns",
        columns,
        "OPN-005 IDX-004",
        "columns of two writers",
        why="it is what is cut anew",
    )
    strided = Plan(
        writer_count=2,
        tensors=[
            Tensor(
                name="w",
                dtype="int8",
                shape=(8, 2),
                pieces=pieces(*[(((2 * i, 0), (2, 2)), i % 2) for i in range(4)]),
            )
        ],
    )
    made.accept(
        "strided",
        strided,
        "OPN-005 IDX-004",
        "two boxes of each of two writers, in turn",
        why="it is what is cut anew",
    )
    for of, plan, targets in (
        ("three-uneven-rows", seven, ((2, 0), (8, 0), (5, 1))),
        ("two-columns", columns, ((4, 1), (2, 2))),
        ("strided", strided, ((2, 0), (3, 0), (2, 1))),
    ):
        tensor = plan.tensors[0]
        for parts, axis in targets:
            boxes = _rows(tensor.shape, parts, axis)
            made.ask(
                f"reshard-{of}-to-{parts}-of-axis-{axis}",
                of,
                "reshard",
                {"tensor": "weights/w", "boxes": boxes},
                "OPN-005 OPN-007",
                f"cut {of.replace('-', ' ')} into {parts} along axis {axis}",
                why=ELSE,
                result={"digests": [_digest(tensor, box) for box in boxes]},
            )


def _ask_to_write(
    made: Page,
    slug: str,
    clauses: str,
    says: str,
    tensors: dict[str, tuple[str, tuple[int, ...]]],
    *,
    leaves: dict[str, Any] | None = None,
    **members: Any,
) -> None:
    """Add a case with a state to write; the written checkpoint has to contain the state.

    Args:
        leaves: the tagged JSON of all leaves, if leaves are compared.
    """
    made_of = {
        key: Tensor(name="x", dtype=dtype, shape=shape) for key, (dtype, shape) in tensors.items()
    }
    found = {
        key: {"dtype": one.dtype, "shape": list(one.shape),
              "blake3": blake3(one.content).hexdigest(),
              "first16": payload(math.prod(one.shape) * one.width)[:16].hex()}
        for key, one in made_of.items()
    }  # fmt: skip
    request = {
        "tensors": {
            key: {"dtype": one.dtype, "shape": list(one.shape)} for key, one in made_of.items()
        }
    } | members
    made.ask(
        slug,
        "",
        "write",
        request,
        clauses,
        says,
        why="what a writer writes, another's reader has to read",
        result={"tensors": found, "step": members["step"]}
        | ({} if leaves is None else {"leaves": leaves}),
        files={},  # nothing is read: the state is in the request
    )


def _write(made: Page) -> None:
    written = "CKP-007 DOC-001 DOC-022 IDX-002 MAN-005 PRT-007 SHD-001 SHD-008 TEN-006"
    _ask_to_write(
        made,
        "write-two",
        written,
        "two tensors",
        {"weights/a": ("float32", (2, 3)), "weights/b": ("int64", (5,))},
        step=7,
    )
    _ask_to_write(
        made,
        "write-fields",
        written,
        "tensors of two fields, and a configuration",
        {"weights/w": ("float32", (4,)), "optimizer/w_exp_avg": ("float32", (4,))},
        step=0,
        config={"lr": 1, "name": "x"},
    )


#: Lists that are packed, of each kind, and lists that aren't packed: short or of mixed kinds.
LISTS: dict[str, list[Any]] = {
    "flags": [True, False] * 8,
    "uint8": [*range(240, 256)],
    "uint16": [*range(256, 272)],
    "uint32": [1 << 16] * 16,
    "uint64": [1 << 32] * 16,
    "int8": [-1] * 16,
    "int16": [*range(-1000, 1000, 125)],
    "int32": [-(1 << 31), *range(15)],
    "int64": [-(1 << 40), *range(99)],
    "floats": [0.5, -2.5] * 8,
    "strings": ["", "\u00e9", "loss"] * 6,
    "fifteen": [*range(15)],
    "mixed": [*range(16), 0.5],
    "lists": [[number] for number in range(16)],
}


def _tagged(value: Any) -> Any:
    """Return a value of JSON as tagged JSON."""
    match value:
        case float():
            return {"float": struct.pack(">d", value).hex()}
        case list():
            return {"list": [_tagged(entry) for entry in value]}
        case dict():
            return {"dict": [[name, _tagged(member)] for name, member in value.items()]}
    return value


def _write_lists(made: Page) -> None:
    """Add states with long lists, a kind per state: a failure then names the unpacked kind."""
    tensors = {"weights/a": ("int8", (2,))}
    for name, value in LISTS.items():
        config = {name: value}
        _ask_to_write(
            made, f"write-list-{name}", "TRE-010 TRE-011 DOC-022 TEN-006",
            ("a configuration with"
            f" {'a list of lists' if name == 'lists' else f'a list, {name}, of {len(value)}'}"),
            tensors, leaves={"config/": _tagged(config)}, step=4, config=config,
        )  # fmt: skip


def _write_shapes(made: Page) -> None:
    """Add more states."""
    written = "CKP-007 DOC-001 DOC-022 IDX-002 MAN-005 PRT-007 SHD-001 SHD-008 TEN-006"
    _ask_to_write(
        made,
        "write-dtypes",
        written + " SHD-002 TEN-004 TEN-007",
        "a tensor of each of thirteen dtypes, one of which safetensors lacks",
        {
            f"weights/{name}": (name, (3,))
            for name in (
                "uint8",
                "int8",
                "uint16",
                "int16",
                "uint32",
                "int32",
                "uint64",
                "int64",
                "float16",
                "bfloat16",
                "float32",
                "float64",
                "complex128",
            )
        },
        step=1,
    )
    _ask_to_write(
        made,
        "write-odd-shapes",
        written,
        "a scalar, tensors without elements, one of many blocks",
        {
            "weights/scalar": ("float64", ()),
            "weights/empty": ("int8", (0, 3)),
            "weights/long": ("uint8", (1_100_000,)),
        },
        step=2,
    )
    _ask_to_write(
        made,
        "write-names",
        written + " SHD-009 IDX-011",
        "names that are taken, empty, beyond ASCII, or with a backslash",
        {
            "weights/__metadata__": ("int8", (1,)),
            "weights/": ("int8", (2,)),
            "weights/..\\x": ("int8", (3,)),
            "weights/é漢": ("int8", (4,)),
        },
        step=3,
    )
