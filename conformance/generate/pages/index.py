"""The index; spec/core/40-index-and-parts.md: tables, tiling of tensors, references by digest."""

from __future__ import annotations

import itertools
import zlib
from typing import Any

from conformance.generate.bases import RUN_ID, pop_at, set_at, small, two_writers
from conformance.generate.cases import Page
from conformance.generate.deflate import deflate
from conformance.generate.model import Checkpoint, Edit
from conformance.generate.plans import Box, Leaf, Piece, Plan, Stream, Tensor
from conformance.generate.tables import sharding_tables
from conformance.generate.wire import Folded, Packed, Strings

__all__ = ["page", "quarters"]

LOST = "a lost shard is an error, not a smaller tensor or memory that nobody initialised"
FORM = (
    "an entry that is out of range or order is read differently, or not at all, by another reader"
)


def pieces(*boxes: tuple[Box, int]) -> list[Piece]:
    """Return pieces of boxes and their writers."""
    return [Piece(writer=writer, begin=begin, shape=shape) for (begin, shape), writer in boxes]


def quarters(second: int = 0) -> Plan:
    """Return three tensors: in quarters, again in quarters, and cut like a pinwheel.

    Writer `second` writes half of the boxes.
    """
    cut = [
        (((0, 0), (2, 2)), 0),
        (((0, 2), (2, 2)), second),
        (((2, 0), (2, 2)), 0),
        (((2, 2), (2, 2)), second),
    ]
    pinwheel = [(((0, 0), (1, 2)), 0), (((0, 2), (2, 1)), second), (((1, 0), (2, 1)), 0),
                (((1, 1), (1, 1)), second),
                (((2, 1), (1, 2)), second)]  # fmt: skip
    return Plan(
        tensors=[
            Tensor(name="a", shape=(4, 4), pieces=pieces(*cut), aliases=("z",)),
            Tensor(name="b", dtype="int8", shape=(4, 4), pieces=pieces(*cut)),
            Tensor(name="c", dtype="int8", shape=(3, 3), pieces=pieces(*pinwheel)),
        ],
        leaves=[Leaf(field="config", value=["d"]), Leaf(field="topology", value=["d"])],
        streams=[
            Stream(name="noise", state=["t", 1]),
            Stream(name="noise", state=["t", 2], scope="lw/1", writers=(second,)),
        ],
        writer_count=1 + second,
    )


def page() -> Page:
    """Return the cases of the index."""
    made = Page("index")
    _valid(made)
    _valid_names(made)
    _valid_paths(made)
    _tables(made)
    _shardings(made)
    _uses(made)
    _tilings(made)
    _cuts(made)
    _order(made)
    _scopes(made)
    _origin(made)
    _members(made)
    return made


def _valid(made: Page) -> None:
    made.accept(
        "quarters",
        quarters(),
        "IDX-001 IDX-002 IDX-003 IDX-004 IDX-005 IDX-007 IDX-009 IDX-010 IDX-012 OPN-005",
        "a grid of two by two that two tensors share, and five boxes like a pinwheel",
        why="boxes that aren't a grid stand in other columns",
    )
    made.accept(
        "quarters-of-two",
        quarters(1),
        "IDX-002 IDX-004 OPN-005",
        "the same, of two writers in turn",
        why="writers are steps, one after the other",
    )
    made.accept(
        "two-writers",
        two_writers(),
        "IDX-001 IDX-003 IDX-008 CMT-014 CMT-016 TEN-007",
        "replicas that both writers wrote, scopes, aliases, an empty tensor, a scalar",
        why="the index names the lowest of those that wrote a box",
    )
    scopes = Plan(
        tensors=[
            Tensor(name="s", dtype="int8", shape=(1,), scope=scope, content=bytes([number]))
            for number, scope in enumerate(("global", "lw/2", "lw/10", "lw/999999999"))
        ]
    )
    made.accept(
        "scopes",
        scopes,
        "IDX-003 IDX-006 IDX-008",
        "one name in four scopes, lw/10 before lw/2",
        why="scopes compare as strings, and their numbers don't count",
    )


def _valid_names(made: Page) -> None:
    """Add names and shapes of all kinds."""
    unicode = Plan(
        tensors=[
            Tensor(name=name, dtype="int8", shape=(1,))
            for name in ("\uffff", "😀", "a", "B", "e\u0301")
        ]
    )
    made.accept(
        "unicode-order",
        unicode,
        "IDX-003 IDX-011",
        "names that UTF-16 sorts otherwise than UTF-8",
        why="a reader that sorts by UTF-16 units refuses what is sorted by bytes",
    )
    made.accept(
        "names-of-two-forms",
        Plan(
            tensors=[
                Tensor(name=name, dtype="int8", shape=(1,))
                for name in ("e\u0301", "\u00e9", "\u212b")
            ]
        ),
        "IDX-011",
        "a composed name, a decomposed one of the same letter, and one that isn't in a normal form",
        why="names of tensors are bytes: only strings of JSON documents have a normal form",
    )
    made.accept(
        "empty-tensors",
        _empties(),
        "IDX-004 IDX-012 CMT-013",
        (
            "tensors without elements in no box, in one and in two; and an empty box of a tensor"
            " with"
            " elements"
        ),
        why="what has no elements is tiled by nothing, and is a tensor all the same",
    )
    many = [(((writer,), (1,)), writer) for writer in (2, 0, 3, 1)]
    made.accept(
        "writers-in-any-order",
        Plan(
            writer_count=4,
            tensors=[
                Tensor(
                    name="w",
                    dtype="int8",
                    shape=(4,),
                    pieces=pieces(
                        *[(((at,), (1,)), writer) for at, (_, writer) in enumerate(many)]
                    ),
                )
            ],
        ),
        "IDX-002 IDX-005",
        "four boxes of the writers 2, 0, 3, 1",
        why="writers are steps, modulo their number",
    )


def _valid_paths(made: Page) -> None:
    """Add names that resemble paths, numbers and other special strings."""
    made.accept(
        "dimensions",
        Plan(tensors=[Tensor(name="d", dtype="int8", shape=(1,) * 32), Tensor(name="s")]),
        "LIM-002 IDX-010",
        "a tensor of 32 dimensions, and a scalar",
        why="the most that is allowed has to be read",
    )
    made.accept(
        "name-of-4096",
        Plan(tensors=[Tensor(name="n" * 4096, dtype="int8", shape=(1,))]),
        "LIM-002 IDX-011",
        "a name of 4096 bytes",
        why="the longest that is allowed has to be read",
    )
    made.accept(
        "stray-paths",
        Plan(
            tensors=[
                Tensor(name=name, dtype="int8", shape=(1,))
                for name in (
                    "../../etc/passwd",
                    "/absolute",
                    "C:\\x",
                    "__metadata__",
                    "weights/lw/0/a",
                    "a~1b",
                )
            ]
        ),
        "IDX-011 SHD-009",
        "names that look like paths, scopes and escapes",
        why="a name is never a path, and nothing is derived from it",
        bug="ESCAPE",
    )


def _empties() -> Plan:
    return Plan(
        writer_count=2,
        tensors=[
            Tensor(name="whole", shape=(0, 3), pieces=pieces((((0, 0), (0, 3)), 0))),
            Tensor(
                name="halves",
                shape=(0, 4),
                pieces=pieces((((0, 0), (0, 2)), 0), (((0, 2), (0, 2)), 1)),
            ),
            Tensor(
                name="nobody", shape=(0,), pieces=[Piece(writer=0, begin=(), shape=(), ghost=True)]
            ),
            Tensor(name="uneven", shape=(3,), pieces=pieces((((0,), (3,)), 0), (((3,), (0,)), 1))),
        ],
    )


def _reject(  # noqa: PLR0917 - a row of a table of cases
    made: Page,
    slug: str,
    edit: Edit,
    clauses: str,
    error: str,
    says: str,
    *,
    why: str = FORM,
    bug: str = "AMBIGUITY",
) -> None:
    made.reject(slug, "quarters", edit, clauses, error, says, why=why, bug=bug)


def _tables(made: Page) -> None:
    for slug, clauses, says, table, column, value in (
        ("field-7", "IDX-002", "a field 7", "tensors", "field", Packed([0, 0, 7])),
        ("storage-2", "IDX-002", "a storage of 2", "tensors", "storage", Packed([0, 0, 2])),
        ("scope-beyond", "IDX-002", "a scope that isn't in scopes", "tensors", "scope",
         Packed([0, 0, 3])),
        ("ndim-33", "IDX-002 LIM-001", "33 dimensions", "tensors", "ndim", Packed([2, 2, 33])),
        ("shape-short", "IDX-002", "an extent less than there are dimensions", "tensors",
         "global_shape", Packed([4, 4, 4, 4, 3])),
        ("extent-beyond", "IDX-002 LIM-001", "an extent of 2^48 + 1", "tensors", "global_shape",
         Packed([4, 4, 4, 4, 3, 2**48 + 1])),
        ("sharding-beyond", "IDX-002", "a sharding that isn't there", "tensors", "sharding",
         Packed([0, 0, 2])),
        ("alias-of-nothing", "IDX-002", "an alias of a tensor that isn't there", "aliases",
         "tensor", Packed([3])),
        ("leaf-of-no-part", "IDX-002", "a leaf in part 2 of one", "leaves", "part", Packed([2, 0])),
        ("parts-digest-short", "IDX-002", "31 bytes for a digest", "parts", "digest", bytes(31)),
    ):  # fmt: skip

        def edit(
            c: Checkpoint, table: str = table, column: str = column, value: object = value
        ) -> None:
            c.kept.add(f"{table}/{column}")
            c.index[table][column] = value

        _reject(made, slug, edit, clauses, "COLUMN_FORM", f"in {table}, {says}")
    large = set_at("index", "tensors", "global_shape", value=Packed([2**40, 2**40, 4, 4, 3, 3]))
    _reject(
        made,
        "elements-beyond",
        large,
        "LIM-001 IDX-002",
        "COLUMN_FORM LIMIT_EXCEEDED BOX_BOUNDS TILING_GAP",
        "in tensors, 2^40 times 2^40 elements",
        bug="RESOURCE",
    )
    long = set_at("index", "tensors", "name", value=Strings(["a", "b", "c" * 4097]))
    _reject(
        made,
        "name-of-4097",
        long,
        "LIM-001 IDX-002",
        "COLUMN_FORM LIMIT_EXCEEDED",
        "in tensors, a name of 4097 bytes",
        bug="RESOURCE",
    )
    for slug, says, table, column in (
        ("column-missing", "the column storage of tensors is missing", "tensors", "storage"),
    ):
        _reject(made, slug, pop_at("index", table, column), "IDX-002 DOC-011", "DOC_SCHEMA", says)


def _shard(*rows: Any) -> Edit:
    """Return an edit that replaces the index's shardings: each a list of (begin, shape, writer)."""

    def edit(c: Checkpoint) -> None:
        shardings = [
            (tuple(((begin, shape), writer) for begin, shape, writer in boxes), len(boxes[0][0]))
            for boxes in rows
        ]
        c.index["shardings"] = sharding_tables(shardings, 1)

    return edit


CUT = [((0, 0), (2, 2), 0), ((0, 2), (2, 2), 0), ((2, 0), (2, 2), 0), ((2, 2), (2, 2), 0)]
WHEEL = [
    ((0, 0), (1, 2), 0),
    ((0, 2), (2, 1), 0),
    ((1, 0), (2, 1), 0),
    ((1, 1), (1, 1), 0),
    ((2, 1), (1, 2), 0),
]


def _other(rows: list[Any], at: int, *, begin: Any = None, shape: Any = None) -> list[Any]:
    rows = list(rows)
    rows[at] = (begin or rows[at][0], shape or rows[at][1], rows[at][2])
    return rows


def _shardings(made: Page) -> None:
    for slug, says, column, value in (
        ("part-step-beyond", "a step of 1, of one writer", "part", Packed([1, *[0] * 8])),
        ("part-short", "eight writers for nine boxes", "part", Packed([0] * 8)),
    ):
        _reject(
            made,
            slug,
            set_at("index", "shardings", column, value=value),
            "IDX-002 IDX-012",
            "COLUMN_FORM COLUMN_ORDER",
            f"in shardings, {says}",
        )
    _reject(
        made,
        "grid-as-boxes",
        _grid_as_boxes,
        "IDX-012",
        "COLUMN_ORDER",
        "a grid of two by two that stands as four boxes",
        why="a sharding has one form, so that equal ones are equal columns",
    )
    _reject(
        made,
        "sharding-twice",
        _twice,
        "IDX-009",
        "COLUMN_ORDER",
        "two tensors cut alike have a sharding each",
        why="an index is the same bytes from every committer",
    )


def _uses(made: Page) -> None:
    """Add shardings and their tensors."""
    _reject(
        made,
        "sharding-order",
        _swapped,
        "IDX-009",
        "COLUMN_ORDER",
        "the sharding that the third tensor has stands first",
        why="an index is the same bytes from every committer",
    )
    _reject(
        made,
        "sharding-unused",
        _unused,
        "IDX-009",
        "COLUMN_ORDER",
        "a third sharding, which no tensor has",
        why="an index is the same bytes from every committer",
    )
    _reject(
        made,
        "other-rank",
        set_at("index", "tensors", "ndim", value=Packed([1, 3, 2])),
        "IDX-010 IDX-002",
        "COLUMN_FORM",
        "the first tensor has one dimension, its sharding two",
    )
    _reject(
        made,
        "boxes-unsorted",
        _shard(CUT, [WHEEL[1], WHEEL[0], *WHEEL[2:]]),
        "IDX-003",
        "COLUMN_ORDER COLUMN_FORM",
        "the first two boxes of the pinwheel are exchanged",
        why="an index is the same bytes from every committer",
    )


def _grid_as_boxes(c: Checkpoint) -> None:
    table = c.index["shardings"]
    table["form"] = Packed([0, 0])
    table["grid_shape"] = table["extent"] = Packed()
    table["begin"] = Folded([0, 0, 2, 0, 0, 0, -4, 0, *table["begin"]])
    table["box_shape"] = Packed([2] * 8 + list(table["box_shape"]))


def _twice(c: Checkpoint) -> None:
    _shard(CUT, CUT, WHEEL)(c)
    c.index["tensors"]["sharding"] = Packed([0, 1, 2])


def _swapped(c: Checkpoint) -> None:
    _shard(WHEEL, CUT)(c)
    c.index["tensors"]["sharding"] = Packed([1, 1, 0])


def _unused(c: Checkpoint) -> None:
    _shard(CUT, WHEEL, [((0,), (3,), 0)])(c)


def _tilings(made: Page) -> None:
    grid_a = [((0, 0), (2, 2), 0), ((0, 2), (2, 1), 0), ((2, 0), (2, 2), 0), ((2, 2), (2, 1), 0)]
    grid_b = [((0, 0), (2, 2), 0), ((0, 2), (2, 3), 0), ((2, 0), (2, 2), 0), ((2, 2), (2, 3), 0)]
    for slug, error, says, edit in (
        ("tiling-gap", "TILING_GAP", "a box of the pinwheel is one row shorter",
         _shard(CUT, _other(WHEEL, 2, shape=(1, 1)))),
        ("tiling-gap-inside", "TILING_GAP", "the middle of the pinwheel is missing",
         _shard(CUT, [*WHEEL[:3], WHEEL[4]])),
        ("tiling-overlap", "TILING_OVERLAP", "a box of the pinwheel is one column wider",
         _shard(CUT, _other(WHEEL, 2, shape=(2, 2)))),
        ("tiling-gap-and-overlap", "TILING_OVERLAP TILING_GAP",
         "a box of the pinwheel lies one row higher, so that the number of elements is right",
         _shard(CUT, _other(WHEEL, 4, begin=(1, 1)))),
        ("tiling-bounds", "BOX_BOUNDS", "a box of the pinwheel ends outside of its tensor",
         _shard(CUT, _other(WHEEL, 4, shape=(2, 2)))),
        ("tiling-no-box", "TILING_GAP", "no box at all for a tensor of nine elements", _no_box),
        ("tiling-grid-narrow", "TILING_GAP", "the grid is a column too narrow",
         _shard(grid_a, WHEEL)),
        ("tiling-grid-wide", "BOX_BOUNDS", "the grid is a column too wide", _shard(grid_b, WHEEL)),
    ):  # fmt: skip
        _reject(made, slug, edit, "IDX-004 CMT-015", error, says, why=LOST, bug="SILENT_DATA_LOSS")
    # The only box of a nonempty tensor is an empty box, as a sharded optimizer once wrote.
    empty = _shard(CUT, [((0, 0), (0, 3), 0)])
    _reject(
        made,
        "tiling-empty-box",
        empty,
        "IDX-004 IDX-012",
        "TILING_GAP COLUMN_FORM",
        why=LOST,
        says="one box without elements for a tensor of nine",
        bug="SILENT_DATA_LOSS",
    )


def _no_box(c: Checkpoint) -> None:
    c.index["shardings"] = sharding_tables([(tuple(((b, s), w) for b, s, w in CUT), 2), ((), 0)], 1)


def _cuts(made: Page) -> None:
    """Add a tensor cut in the largest allowed number of dimensions, and in one dimension more."""
    corners = itertools.product((0, 1), repeat=8)
    cut = [Piece(writer=0, begin=(*corner, 0), shape=(1,) * 9) for corner in corners]
    made.accept(
        "cut-in-8",
        Plan(tensors=[Tensor(name="w", dtype="int8", shape=(*(2,) * 8, 1), pieces=cut)]),
        "LIM-001 LIM-002 IDX-004", "a tensor that is cut in eight of its nine dimensions",
        why="a checkpoint within the limits has to be read",
    )  # fmt: skip

    def cut_once_more(c: Checkpoint) -> None:
        c.index["tensors"]["global_shape"][-1] = 2
        c.manifest["fields"]["weights"]["nbytes"] = 512
        c.index["shardings"].update(
            box_count=Packed([512]),
            grid_shape=Packed([2] * 9),
            extent=Packed([1] * 18),
            part=Packed([0] * 512),
        )

    made.reject(
        "cut-in-9", "cut-in-8", cut_once_more, "LIM-001", "LIMIT_EXCEEDED",
        "in the index, the tensor has two elements in its last dimension, and is cut there, too",
        why="the corners of boxes double with each dimension that is cut", bug="RESOURCE",
    )  # fmt: skip

    def cut_often(c: Checkpoint) -> None:
        c.index["tensors"]["global_shape"][0] = 2049
        c.manifest["fields"]["weights"]["nbytes"] = 2049 << 7
        c.index["shardings"].update(
            box_count=Packed([2049 << 7]), grid_shape=Packed([2049, *[2] * 7, 1]),
            extent=Packed([1] * (2049 + 14 + 1)), part=Packed([0] * (2049 << 7)),
        )  # fmt: skip
        # With the usual compression, the column of parts would exceed the limit of inflation.
        c.bend("index", stream=lambda stream: deflate(zlib.decompress(stream), longest=40))

    made.reject(
        "corners-beyond", "cut-in-8", cut_often, "LIM-001", "LIMIT_EXCEEDED",
        "in the index, the tensor is of 2049 boxes by 128, which have 2^26 and 32768 corners",
        why="who looks at each corner needs gigabytes for it", bug="RESOURCE",
    )  # fmt: skip


def _order(made: Page) -> None:
    why = "a row that is there twice, or not where it is looked for, is two answers to one question"
    for slug, says, edit in (
        ("tensors-unsorted", "the tensors b and a change places",
         set_at("index", "tensors", "name", value=Strings("bac"))),
        ("tensors-twice", "two rows of the tensor b",
         set_at("index", "tensors", "name", value=Strings("bbc"))),
        ("leaves-unsorted", "topology before config",
         set_at("index", "leaves", "field", value=Packed([5, 4]))),
        ("aliases-twice", "one alias twice", set_at("index", "aliases", value={
            "tensor": Packed([0, 0]), "name": Strings(["z", "z"])})),
    ):  # fmt: skip
        _reject(made, slug, edit, "IDX-003", "COLUMN_ORDER", says, why=why, bug="AMBIGUITY")


def _scopes(made: Page) -> None:
    for slug, error, clauses, value in (
        ("scope-leading-zero", "SCOPE_FORM", "IDX-006", ["global", "lw/0", "lw/01"]),
        ("scope-beyond-1e9", "SCOPE_FORM", "IDX-006", ["global", "lw/0", "lw/1000000000"]),
        ("scope-rank", "SCOPE_FORM", "IDX-006", ["global", "lw/0", "rank/1"]),
        ("scopes-unsorted", "COLUMN_ORDER", "IDX-003", ["global", "lw/1", "lw/0"]),
        ("scopes-unused", "COLUMN_ORDER", "IDX-007", ["global", "lw/0", "lw/1", "lw/2"]),
    ):
        _reject(
            made,
            slug,
            set_at("index", "scopes", value=value),
            clauses,
            error,
            f"scopes are {', '.join(value)}",
        )
    for slug, error, clauses, value in (
        ("dtype-unknown", "COLUMN_FORM", "TEN-003 IDX-002", ["float31", "int8"]),
    ):
        _reject(
            made,
            slug,
            set_at("index", "dtypes", value=value),
            clauses,
            error,
            f"dtypes are {', '.join(value)}",
        )


def _origin(made: Page) -> None:
    why = "an index of another attempt speaks of other files"
    for key, value in (
        ("step", 4), ("nonce", "f" * 32), ("attempt", "f" * 16), ("block_nbytes", 8192),
        ("saved_unix_s", 1),
    ):  # fmt: skip
        _reject(
            made,
            f"origin-{key.replace('_', '-')}",
            set_at("index", key, value=value),
            "IDX-001",
            "DOC_MISMATCH",
            f"{key} is {value}, and another in the manifest",
            why=why,
            bug="WRONG_BYTES",
        )
    _reject(
        made,
        "origin-run-id",
        lambda c: c.index.update(run_id=RUN_ID, launch=1),
        "IDX-001",
        "DOC_MISMATCH",
        "the index is of a run, and the manifest of none",
        why=why,
        bug="WRONG_BYTES",
    )


def _members(made: Page) -> None:
    for slug, error, clauses, says, edit in (
        ("type-part", "DOC_SCHEMA", "DOC-011", "its type is part",
         set_at("index", "type", value="part")),
        ("member-unknown", "DOC_SCHEMA", "DOC-011", "a member colour",
         set_at("index", "colour", value=None)),
        ("writer-count-0", "DOC_SCHEMA", "DOC-011 LIM-001", "no writers",
         set_at("index", "writer_count", value=0)),
        ("version", "VERSION_UNSUPPORTED", "DOC-010 VER-001", "format_version is 9.0",
         set_at("index", "format_version", value="9.0")),
        ("feature-unknown", "FEATURE_UNSUPPORTED", "DOC-010 VER-002",
         "it needs the feature wavelets",
         set_at("index", "features", "reader", value=["wavelets"])),
        ("feature-of-parts", "FEATURE_UNSUPPORTED", "VER-002", ("it needs the feature deltas,"
        " which an index never does"),
         set_at("index", "features", "reader", value=["deltas"])),
        ("scopes-no-list", "COLUMN_FORM", "IDX-014", "scopes is text",
         set_at("index", "scopes", value="global")),
        ("dtypes-of-integers", "COLUMN_FORM", "IDX-014", "a dtype is 7",
         set_at("index", "dtypes", value=[7])),
        ("tensors-no-map", "DOC_SCHEMA", "IDX-014 DOC-011", "tensors is an array",
         set_at("index", "tensors", value=[])),
        ("absent-no-map", "MANIFEST_FIELDS", "IDX-014", "absent is an array",
         set_at("index", "absent", value=[])),
        ("saved-unix-s-negative", "DOC_SCHEMA", "IDX-014 DOC-011", "saved_unix_s is -1",
         set_at("index", "saved_unix_s", value=-1)),
        ("order-version-first", "VERSION_UNSUPPORTED", "IDX-014 DOC-010",
         "format_version is 9.0, and aliases are missing",
         lambda c: [c.index.update(format_version="9.0"), c.index.pop("aliases")]),
        ("order-origin-first", "DOC_SCHEMA", "IDX-014 DOC-011", ("step is text, and a scope is"
        " lw/00"),
         lambda c: c.index.update(step="3", scopes=["global", "lw/00"])),
        ("order-clock-first", "DOC_SCHEMA", "IDX-014 DOC-011", ("saved_unix_s is -1, and a scope"
        " is lw/00"),
         lambda c: c.index.update(saved_unix_s=-1, scopes=["global", "lw/00"])),
        ("absent-unknown", "MANIFEST_FIELDS", "MAN-003", "an eighth field is absent",
         set_at("index", "absent", "loss", value="x")),
        ("absent-control", "MANIFEST_FIELDS", "PRT-009 MAN-003", "a reason with U+0007",
         set_at("index", "absent", "data", value="\a")),
    ):  # fmt: skip
        _reject(made, slug, edit, clauses, error, f"in the index, {says}")
    small_scope = small()
    made.accept(
        "writer-features",
        small_scope,
        "VER-002 VER-008",
        "features that only writers need to know",
        edit=lambda c: [
            d["features"].update(writer=["me.experiment"]) for d in (c.manifest, c.index, *c.parts)
        ],
        why="a reader isn't concerned with what only writers have to understand",
    )
