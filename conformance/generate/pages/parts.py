"""Parts; spec/core/40-index-and-parts.md, "The part", and spec/writing/75-commit.md, "Merge"."""

from __future__ import annotations

from typing import Any

from blake3 import blake3

from conformance.generate.bases import set_at, two_writers
from conformance.generate.cases import Page
from conformance.generate.model import Checkpoint, Edit
from conformance.generate.pages import merging
from conformance.generate.plans import Piece, Plan, Tensor, whole
from conformance.generate.wire import Folded, Packed, Strings

__all__ = ["page"]

FORM = "an entry that is out of range is read differently, or not at all, by another reader"
COVERED = "every byte is covered by a digest, once; what no digest covers could be anything"


def page() -> Page:
    """Return the cases of parts."""
    made = Page("parts")
    _valid(made)
    _valid_copies(made)
    _columns(made)
    _forms(made)
    _files(made)
    _several(made)
    _extents(made)
    _blocks(made)
    _members(made)
    merging.add(made)
    return made


def boxes(**members: Any) -> Plan:
    """Return a checkpoint of one writer: two boxes of a tensor, a box of another, and a scalar."""
    halves = [
        Piece(writer=0, begin=(0, 0), shape=(2, 2)),
        Piece(writer=0, begin=(0, 2), shape=(2, 2)),
    ]
    return Plan(
        tensors=[
            Tensor(name="a", shape=(2, 4), pieces=halves),
            Tensor(name="b", dtype="uint8", shape=(10,), aliases=("tied",)),
            Tensor(name="c", dtype="float64", scope="lw/3"),
        ],
        **members,
    )


def _valid(made: Page) -> None:
    made.accept(
        "boxes",
        boxes(),
        (
            "STO-006 PRT-001 PRT-003 PRT-004 PRT-005 PRT-006 PRT-007 PRT-008 PRT-010 PRT-012"
            " IDX-002"
            " IDX-007"
        ),
        "one writer with two boxes of one tensor, a box of another and a scalar",
        why="it is what the invalid parts differ from",
    )
    made.accept(
        "two-writers",
        two_writers(),
        (
            "PRT-001 PRT-002 PRT-009 CMT-010 CMT-011 CMT-012 CMT-013 CMT-014 CMT-015 CMT-016"
            " CMT-017"
            " CMT-018"
        ),
        "two writers, who hold some tensors both",
        why="it is what parts that contradict each other differ from",
    )
    replica = Plan(
        writer_count=3,
        tensors=[
            Tensor(
                name="r",
                shape=(4,),
                pieces=[
                    Piece(
                        writer=0,
                        begin=(0,),
                        shape=(4,),
                        replica=True,
                        written=False,
                        digested=False,
                    ),
                    whole((4,), 1, replica=True),
                    Piece(writer=2, begin=(0,), shape=(4,), written=False, replica=True),
                ],
            ),
            Tensor(
                name="s",
                shape=(2,),
                pieces=[whole((2,), 0), Piece(writer=2, begin=(0,), shape=(2,), written=False)],
            ),
        ],
    )
    made.accept(
        "replicas",
        replica,
        "PRT-005 CMT-012 CMT-013 CMT-016",
        (
            "a declared replica with and without digests, and a copy that nobody declares, held and"
            " not written"
        ),
        why="who holds a piece needn't write it, and declared replicas needn't digest it",
    )


def _valid_copies(made: Page) -> None:
    """Add copies, keys and blocks."""
    keys = Plan(
        tensors=[
            Tensor(name=name, dtype="int8", shape=(2,), scope=scope, content=bytes([number, 7]))
            for number, (name, scope) in enumerate(
                (("__metadata__", "global"), ("k", "lw/0"), ("k", "lw/1"), ("k#1", "global"))
            )
        ]
    )
    made.accept(
        "keys",
        keys,
        "PRT-012 SHD-009 PRT-010",
        "names that are taken in the shard, so that keys have numbers",
        why="a reader that finds boxes by their names finds others",
    )
    made.accept(
        "two-blocks",
        Plan(tensors=[Tensor(name="b", dtype="uint8", shape=(4100,))]),
        "PRT-005 PRT-006",
        "a box of two blocks, of which the last has four bytes",
        why="the last block may be short",
    )
    made.accept(
        "blocks",
        Plan(
            tensors=[
                Tensor(name="b", dtype="int16", shape=(3, 1400)),
                Tensor(name="x", dtype="uint8", shape=(4096,)),
            ]
        ),
        "PRT-005 PRT-006 TEN-005 TEN-006",
        "boxes of three blocks and of exactly one",
        why="a block begins where the box's bytes say, whatever a row is",
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
    made.reject(slug, "boxes", edit, clauses, error, says, why=why, bug=bug)


def _columns(made: Page) -> None:
    for slug, clauses, error, says, table, column, value in (
        ("begin-beyond", "PRT-004", "BOX_BOUNDS", "a box that begins outside", "boxes", "begin",
         Packed([0, 0, 0, 3, 0])),
        ("shape-beyond", "PRT-004", "BOX_BOUNDS", "a box that ends outside", "boxes", "cut_shape",
         Packed([0, 3, 0, 4, 0])),
        ("cut-shape-spelled-out", "PRT-013", "COLUMN_FORM", ("the whole extent of a tensor, not as"
        " 0"), "boxes",
         "cut_shape", Packed([0, 3, 0, 3, 11])),
        ("cut-shape-spelled-out-first", "PRT-013", "COLUMN_FORM", ("the first extent of a box in"
        " full, not as 0"),
         "boxes", "cut_shape", Packed([3, 3, 0, 3, 0])),
        ("replica-2", "IDX-002", "COLUMN_FORM", "a replica of 2", "boxes", "replica",
         Packed([0, 0, 2, 0])),
        ("digest-count-less", "PRT-005", "EXTENT_COVERAGE", "a block without a digest", "boxes",
         "digest_count", Packed([0, 2, 1, 1])),
        ("box-count-less", "IDX-002", "COLUMN_FORM", "a box that belongs to no tensor", "tensors",
         "box_count", Packed([1, 1, 1])),
        ("scope-beyond", "IDX-002", "COLUMN_FORM", "a scope that isn't in scopes", "tensors",
         "scope", Packed([0, 0, 2])),
        ("extent-of-no-box", "IDX-002", "COLUMN_FORM", "an extent of box 4 of four", "extents",
         "box", Folded([3, -4, 0, 2])),
        ("extent-of-no-file", "IDX-002", "COLUMN_FORM", "an extent in file 1 of one", "extents",
         "file", Packed([0, 0, 0, 1])),
        ("digests-odd", "IDX-002", "COLUMN_FORM EXTENT_COVERAGE", "127 bytes for four digests",
         "digests", "", bytes(127)),
    ):  # fmt: skip

        def edit(
            c: Checkpoint, table: str = table, column: str = column, value: object = value
        ) -> None:
            if column:
                c.part[table][column] = value
            else:
                c.part[table] = value

        _reject(made, slug, edit, clauses, error, f"in {table}, {says}")


def _forms(made: Page) -> None:
    _reject(
        made,
        "column-missing",
        lambda c: c.part["extents"].pop("gap_nbytes"),
        "IDX-002 DOC-011",
        "DOC_SCHEMA",
        "the column gap_nbytes of extents is missing",
    )
    _reject(
        made,
        "tensors-unsorted",
        set_at("part/0", "tensors", "name", value=Strings("bac")),
        "IDX-003",
        "COLUMN_ORDER",
        "the tensors a and b change places",
    )
    _reject(
        made,
        "scopes-unused",
        set_at("part/0", "scopes", value=["global", "lw/3", "lw/4"]),
        "IDX-007",
        "COLUMN_ORDER",
        "a scope that nothing is in",
    )
    _reject(
        made,
        "scope-form",
        set_at("part/0", "scopes", value=["global", "lw/03"]),
        "IDX-006",
        "SCOPE_FORM",
        "the scope lw/03",
    )

    for slug, clauses, error, says, edit in (
        ("boxes-no-map", "IDX-014 DOC-011", "DOC_SCHEMA", "boxes are no map",
         set_at("part/0", "boxes", value=[])),
        ("kind-no-column", "IDX-014 DOC-026", "COLUMN_FORM", "the kinds of files are a plain array",
         set_at("part/0", "files", "kind", value=["safetensors"])),
        ("digests-text", "IDX-014", "COLUMN_FORM", "digests are text",
         set_at("part/0", "digests", value="00")),
        ("saved-unix-s-text", "IDX-014 DOC-011", "DOC_SCHEMA", "saved_unix_s is text",
         set_at("part/0", "saved_unix_s", value="1")),
        ("order-profile-first", "IDX-014 MAN-005", "PROFILE_MISMATCH",
         "encodings are raw and planes, and step is text",
         lambda c: c.part.update(encodings=["raw", "planes"], step="3")),
        ("order-writer-first", "IDX-014 DOC-011", "DOC_SCHEMA", ("writer is text, and a scope is"
        " lw/03"),
         lambda c: c.part.update(writer="0", scopes=["global", "lw/03"])),
    ):  # fmt: skip
        _reject(made, slug, edit, clauses, error, says)


def _files(made: Page) -> None:
    why = "a name of this form can't leave the directory or meet another attempt's file"
    for slug, name in (
        ("file-above", "../weights-0123456789abcdef-00000.safetensors"),
        ("file-backslash", "..\\weights-0123456789abcdef-00000.safetensors"),
        ("file-empty", ""),
        ("file-reserved", "con.safetensors"),
        ("file-trailing-dot", "weights-0123456789abcdef-00000.safetensors."),
        ("file-of-another-writer", "weights-0123456789abcdef-00001.safetensors"),
        ("file-of-another-attempt", "weights-ffffffffffffffff-00000.safetensors"),
        ("file-six-digits", "weights-0123456789abcdef-000000.safetensors"),
    ):
        _reject(
            made,
            slug,
            set_at("part/0", "files", "name", 0, value=name),
            "CKP-001 STO-006",
            "UNSAFE_PATH",
            f"the shard is called {name!r}",
            why=why,
            bug="ESCAPE",
        )
    for slug, kind in (("kind-pack", "pack"),):
        _reject(
            made,
            slug,
            set_at("part/0", "files", "kind", 0, value=kind),
            "PRT-003",
            "COLUMN_FORM",
            f"the shard is of the kind {kind}",
            why="a full checkpoint has safetensors files only",
        )
    _reject(
        made,
        "file-twice",
        _second_file,
        "IDX-003",
        "COLUMN_ORDER",
        "one file has two rows",
        why="a file that is listed twice is read twice, and covered once",
    )
    for slug, says, column, value in (
        ("file-nbytes-more", "a byte more than header and extents have", "nbytes", 1),
        ("file-nbytes-less", "a byte less than header and extents have", "nbytes", -1),
        ("header-nbytes-less", "a header of a byte less", "header_nbytes", -1),
    ):
        _reject(
            made,
            slug,
            _more(column, value),
            "PRT-007",
            "FILE_COVERAGE",
            f"in files, {says}",
            why=COVERED,
            bug="DAMAGE_UNSEEN",
        )


def _more(column: str, value: int) -> Edit:
    """Return an edit to increase a column of the first row of `files`."""

    def edit(c: Checkpoint) -> None:
        c.part["files"][column][0] += value

    return edit


def _second_file(c: Checkpoint) -> None:
    table = c.part["files"]
    for key in table:
        table[key] = (
            table[key] * 2
            if isinstance(table[key], bytes)
            else type(table[key])([*table[key], *table[key]])
        )


def _in_two(c: Checkpoint) -> None:
    """Give the only box, of two blocks, an extent for each of them."""
    c.part["extents"] |= {
        "box": Folded([0, -1]), "block_begin": Packed([0, 1]), "block_count": Packed([1, 1]),
        "key": Strings(["", ""]),
        "file": Packed([0, 0]), "gap_nbytes": Packed([0, 0]), "encoding": Packed([0, 0]),
    }  # fmt: skip


def _several(made: Page) -> None:
    """Add a box with two extents in a safetensors file, which the file's header can't express."""
    two = Plan(tensors=[Tensor(name="w", dtype="uint8", shape=(6000,))])
    made.accept(
        "two-extents", two, "PRT-006 OPN-005", ("a box of two blocks with an extent for each, in a"
        " safetensors file"),
        why="who reads elements takes them from all extents of a box", edit=_in_two, request={},
    )  # fmt: skip
    made.reject(
        "two-extents-checked", "two-extents", None, "SHD-010 PRT-010", "SHARD_MISMATCH",
        "a box of two blocks with an extent for each, of which the shard's header has one",
        why="other tools go by the header", phase="validate",
    )  # fmt: skip


def _extents(made: Page) -> None:
    nothing = Plan(tensors=[Tensor(name=name, dtype="int8", shape=(0,)) for name in "ab"])
    made.accept(
        "no-bytes", nothing, "IDX-003 PRT-006 PRT-007", "two boxes without bytes in one file",
        why="of extents that begin at the same byte the order of boxes decides",
    )  # fmt: skip
    made.reject(
        "no-bytes-unsorted", "no-bytes", set_at("part/0", "extents", "box", value=Folded([1, -2])),
        "IDX-003", "COLUMN_ORDER", "the extents of two boxes without bytes change places",
        why="one content has one form", bug="AMBIGUITY",
    )  # fmt: skip
    _reject(
        made,
        "gap",
        set_at("part/0", "extents", "gap_nbytes", 1, value=1),
        "PRT-007",
        "FILE_COVERAGE",
        "a byte lies before the second extent",
        why=COVERED,
        bug="DAMAGE_UNSEEN",
    )
    why = "a block that no extent has, or two have, is memory that nobody wrote, or written twice"
    for slug, says, column, value in (
        (
            "block-begin",
            "the only block of a box is its second",
            "block_begin",
            Packed([1, 0, 0, 0]),
        ),
        (
            "block-count-more",
            "two blocks of a box that has one",
            "block_count",
            Packed([2, 1, 1, 1]),
        ),
        ("box-twice", "two extents of one box, none of another", "box", Folded([3, -4, -1, 1])),
    ):
        _reject(
            made,
            slug,
            set_at("part/0", "extents", column, value=value),
            "PRT-006",
            "EXTENT_COVERAGE FILE_COVERAGE",
            f"in extents, {says}",
            why=why,
            bug="SILENT_DATA_LOSS",
        )
    made.reject(
        "block-count-less",
        "two-blocks",
        set_at("part/0", "extents", "block_count", value=Packed([1])),
        "PRT-006",
        "EXTENT_COVERAGE FILE_COVERAGE",
        "one of two blocks has an extent",
        why=why,
        bug="SILENT_DATA_LOSS",
    )
    _reject(
        made,
        "digests-none",
        _undigested,
        "PRT-005",
        "EXTENT_COVERAGE",
        "a written box has no digests",
        why=COVERED,
        bug="DAMAGE_UNSEEN",
    )


def _blocks(made: Page) -> None:
    """Add blocks without extents or digests."""
    _reject(
        made,
        "key-is-name",
        set_at("part/0", "extents", "key", 0, value="c"),
        "PRT-012",
        "COLUMN_FORM",
        "the key of a box is written out, though it is its tensor's name",
    )
    made.reject(
        "key-twice",
        "keys",
        lambda c: c.part["extents"]["key"].__setitem__(2, "k#2"),
        "PRT-010 SHD-010",
        "SHARD_MISMATCH",
        "two boxes have one key",
        phase="validate",
        why="a tool that goes by keys finds one of the two",
    )
    why = "a kind of damage that only whole blocks show"

    def digest_of_another(c: Checkpoint) -> None:
        digests = c.part["digests"]
        c.part["digests"] = digests[:64] + blake3(b"other").digest() + digests[96:]

    made.reject(
        "block-digest",
        "boxes",
        digest_of_another,
        "TEN-006 OPN-006",
        "BLOCK_DIGEST",
        "the digest of a block is that of other bytes",
        why=why,
        phase="read",
    )


def _undigested(c: Checkpoint) -> None:
    c.part["boxes"]["digest_count"][0] = 0
    c.part["digests"] = c.part["digests"][32:]


def _members(made: Page) -> None:
    for slug, error, clauses, says, edit in (
        ("type-index", "DOC_SCHEMA", "DOC-011", "its type is index",
         set_at("part/0", "type", value="index")),
        ("member-missing", "DOC_SCHEMA", "DOC-011", "no digests", lambda c: c.part.pop("digests")),
        ("member-of-deltas", "DOC_SCHEMA", "DOC-011", "a table groups, which only deltas have",
         set_at("part/0", "groups", value={})),
        ("writer-beyond", "DOC_SCHEMA", "DOC-011", "it is of writer 1 of one",
         set_at("part/0", "writer", value=1)),
        ("feature-unknown", "FEATURE_UNSUPPORTED", "DOC-010 VER-002",
         "it needs the feature wavelets",
         set_at("part/0", "features", "reader", value=["wavelets"])),
        ("version", "VERSION_UNSUPPORTED", "DOC-010 VER-001", "format_version is 9.0",
         set_at("part/0", "format_version", value="9.0")),
        ("encodings-more", "PROFILE_MISMATCH", "MAN-005", "the encoding planes is listed",
         set_at("part/0", "encodings", value=["raw", "planes"])),
        ("references", "PROFILE_MISMATCH", "MAN-005", "a reference, without the feature",
         set_at("part/0", "references",
                value=[{"name": "step-00000002-l0001", "digest": bytes(32)}])),
        ("absent-long", "MANIFEST_FIELDS", "PRT-009 MAN-003", "a reason of 1001 characters",
         set_at("part/0", "absent", "data", value="x" * 1001)),
    ):  # fmt: skip
        _reject(made, slug, edit, clauses, error, f"in the part, {says}")
    made.reject(
        "features-without-deltas",
        "boxes",
        set_at("part/0", "features", "reader", value=["deltas"]),
        "DOC-011",
        "DOC_SCHEMA",
        "in the part, it needs the feature deltas, and has no column of them",
        why=FORM,
        bug="AMBIGUITY",
        features=["deltas"],
    )
