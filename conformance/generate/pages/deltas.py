"""Deltas; spec/delta/45-deltas.md: their documents, their bases, and reads across several steps."""

from __future__ import annotations

from blake3 import blake3

from conformance.generate.bases import pop_at, set_at
from conformance.generate.cases import Page
from conformance.generate.chains import (
    BASE,
    DELTA,
    SECOND,
    Chain,
    in_run,
)
from conformance.generate.model import Checkpoint, build
from conformance.generate.pages import delta_bases
from conformance.generate.pages.delta_scenes import (
    blocks,
    blocks_backwards,
    example,
    reject,
    same_of_same,
    third_step,
    two_writers,
)
from conformance.generate.plans import Stored, Tensor, whole
from conformance.generate.wire import Folded, Packed, Strings

__all__ = ["page"]


def page() -> Page:
    """Return the cases of deltas."""
    made = Page("deltas")
    link = example()
    _valid(made, link)
    _valid_chains(made, link)
    _valid_elsewhere(made, link)
    _manifests(made, link)
    _lists(made, link)
    _members(made, link)
    _extents(made, link)
    _groups(made, link)
    delta_bases.add(made, link)
    return made


def _accept(  # noqa: PLR0917 - a row of a table of cases
    made: Page, slug: str, clauses: str, says: str, link: Chain, why: str, place: str = DELTA
) -> None:
    made.accept(
        slug, link.delta, clauses, says, why=why, place=place, beside=link.beside, bug="WRONG_BYTES"
    )


def _valid(made: Page, link: Chain) -> None:
    why = "whoever loads a delta needn't know that it is one"
    _accept(
        made,
        "example",
        "DEL-001 DEL-002 DEL-003 DEL-004 DEL-005 DEL-006 DEL-007 DEL-008 DEL-009 DEL-010 DEL-012"
        " DEL-020 "
        "DEL-021 DEL-022 DEL-023 DEL-026 CMT-031 MAN-005 MAN-006 PRT-003 ENC-002 VER-007",
        "a block as it was, one that changed, and one that is predicted",
        link,
        why,
    )
    alone = Tensor(
        name="w",
        dtype="uint8",
        shape=(40,),
        content=b"\5" * 40,
        pieces=[whole((40,), stored=[Stored(encoding="planes", blocks=[b"\1\5"])])],
    )
    _accept(
        made,
        "alone",
        "DEL-001 DEL-003 MAN-005",
        "a delta without references",
        Chain(build(in_run(4, tensors=[alone])), {}),
        why,
    )
    raw = Tensor(name="r", shape=(2,), pieces=[whole((2,), stored=[Stored(encoding="raw")])])
    _accept(
        made,
        "raw-in-a-pack",
        "DEL-004 DEL-012 PRT-003",
        "a raw block in the pack, beside an encoded one",
        Chain(build(in_run(4, tensors=[alone, raw])), {}),
        why,
    )


def _valid_chains(made: Page, link: Chain) -> None:
    """Add deltas of several steps and writers."""
    why = "whoever loads a delta needn't know that it is one"
    _accept(
        made,
        "blocks",
        "DEL-004 DEL-023 PRT-006",
        "a box of three blocks: as it was, raw, and as it was",
        blocks(),
        why,
    )
    _accept(
        made,
        "blocks-backwards",
        "PRT-006",
        "a box of three blocks, the last of which lies first in the pack",
        blocks_backwards(),
        "blocks are numbered by what they are of the box, wherever a file has them",
    )
    second = third_step(link)
    _accept(
        made,
        "chain",
        "DEL-021 DEL-024 DEL-014 DEL-020",
        "step 5 reads from step 4 and from step 3",
        second,
        why,
        SECOND,
    )
    _accept(
        made,
        "same-of-same",
        "DEL-024 DEL-014 DEL-021",
        "a block that is step 4's, which is step 3's",
        same_of_same(),
        why,
        SECOND,
    )


def _valid_elsewhere(made: Page, link: Chain) -> None:
    """Add a base in another place."""
    why = "whoever loads a delta needn't know that it is one"
    _accept(
        made,
        "two-writers",
        "DEL-001 DEL-021 CMT-010",
        "a writer whose part is full, and one whose part is a delta's",
        two_writers(),
        why,
    )
    elsewhere = {f"elsewhere/{path}": content for path, content in link.beside.items()}
    made.accept(
        "bases-elsewhere",
        link.delta,
        "DEL-020",
        "a base that lies elsewhere, where the caller says",
        why=why,
        place=DELTA,
        beside=elsewhere,
        bug="REFUSES_VALID",
    )
    made.cases[-1].members["request"] = {"verify": "all", "bases": [f"../elsewhere/{BASE}"]}


def _manifests(made: Page, link: Chain) -> None:
    digest = link.delta.manifest["references"][0]["digest"]
    one = {"name": BASE, "digest": digest}
    many = [{"name": BASE, "digest": f"blake3:{number:064x}"} for number in range(33)]
    for slug, clauses, error, says, edit in (
        ("manifest-profile-full", "MAN-005", "PROFILE_MISMATCH", "profile is full",
         set_at("manifest", "profile", value="full")),
        ("manifest-no-features", "MAN-005", "PROFILE_MISMATCH", "no features",
         set_at("manifest", "features", "reader", value=[])),
        ("manifest-feature-unknown", "DOC-010 VER-002", "FEATURE_UNSUPPORTED",
         "the feature wavelets",
         set_at("manifest", "features", "reader", value=["cast", "deltas", "sparse", "wavelets"])),
        ("manifest-no-stored-nbytes", "DEL-027", "PROFILE_MISMATCH", "no stored_nbytes of weights",
         lambda c: c.manifest["fields"]["weights"].pop("stored_nbytes")),
        ("manifest-reference-path", "DEL-002 RUN-008", "DOC_SCHEMA UNSAFE_PATH",
         "a reference called ../elsewhere",
         set_at("manifest", "references", 0, "name", value="../elsewhere")),
        ("manifest-reference-twice", "DEL-002", "COLUMN_ORDER", "one digest under two names",
         set_at("manifest", "references", value=[one, one | {"name": SECOND}])),
        ("manifest-33-references", "DEL-021 LIM-001", "LIMIT_EXCEEDED DOC_SCHEMA", "33 references",
         set_at("manifest", "references", value=many)),
    ):  # fmt: skip
        bug = "ESCAPE" if "reference-" in slug else "AMBIGUITY"
        reject(made, slug, link, edit, clauses, error, f"in the manifest, {says}", bug=bug)
    why = "manifest and parts say the same of what has to be kept"
    reject(
        made,
        "manifest-lacks-feature",
        link,
        set_at("manifest", "features", "reader", value=["cast", "deltas"]),
        "IDX-001 DEL-001",
        "DOC_MISMATCH",
        "in the manifest, the features lack one that a part has",
        why=why,
    )


def _lists(made: Page, link: Chain) -> None:
    """Add contradictions between manifest and parts."""
    why = "manifest and parts say the same of what has to be kept"
    reject(
        made,
        "manifest-more-features",
        link,
        set_at("manifest", "features", "reader", value=["cast", "deltas", "sparse", "xor"]),
        "DEL-001",
        "DOC_MISMATCH",
        "in the manifest, a feature that no part has",
        why=why,
        phase="validate",
    )
    reject(
        made,
        "manifest-lacks-reference",
        link,
        set_at("manifest", "references", value=[]),
        "IDX-001 DEL-021",
        "DOC_MISMATCH REFERENCE_CLOSURE",
        "in the manifest, a reference is missing that a part has",
        why=why,
        bug="SILENT_DATA_LOSS",
    )
    reject(
        made,
        "stored-nbytes",
        link,
        set_at("manifest", "fields", "weights", "stored_nbytes", value=12),
        "MAN-006",
        "MANIFEST_SUMMARY",
        "stored_nbytes is 12, and the pack has 10 bytes",
        why=why,
        phase="validate",
    )


def _members(made: Page, link: Chain) -> None:
    digest = link.delta.part["references"][0]["digest"]
    for slug, clauses, error, says, key, value in (
        ("reference-path", "DEL-002", "UNSAFE_PATH", "a reference called ../elsewhere",
         "references", [{"name": "../elsewhere", "digest": digest}]),
        ("reference-twice", "DEL-002", "COLUMN_ORDER", "one digest under two names", "references",
         [{"name": BASE, "digest": digest}, {"name": SECOND, "digest": digest}]),
        ("reference-other", "IDX-001 DEL-021", "DOC_MISMATCH", ("a reference that the manifest"
        " doesn't list"),
         "references",
         [{"name": BASE, "digest": blake3(b"another").digest()}]),
        ("reference-renamed", "DEL-026 IDX-001", "DOC_MISMATCH", ("the reference with another name"
        " than in the manifest"),
         "references", [{"name": SECOND, "digest": digest}]),
        ("encodings-unsorted", "IDX-003 DEL-003", "COLUMN_ORDER",
         "encodings out of the registry's order", "encodings", ["sparse", "same"]),
        ("encoding-unknown", "DEL-003 ENC-001", "COLUMN_FORM FEATURE_UNSUPPORTED",
         "the encoding wavelets", "encodings", ["same", "wavelets"]),
    ):  # fmt: skip
        reject(
            made,
            slug,
            link,
            set_at("part/0", key, value=value),
            clauses,
            error,
            f"in the part, {says}",
            bug="ESCAPE" if error == "UNSAFE_PATH" else "AMBIGUITY",
        )
    for slug, clauses, error, says, value in (
        ("features-less", "DEL-001 VER-007", "DOC_SCHEMA", "lack cast", ["deltas", "sparse"]),
        (
            "features-more",
            "DEL-001 VER-007",
            "DOC_SCHEMA",
            "have xor, which doesn't occur",
            ["cast", "deltas", "sparse", "xor"],
        ),
        ("features-none", "DEL-001 DOC-011", "DOC_SCHEMA", "are none, in the part of a delta", []),
    ):
        reject(
            made,
            slug,
            link,
            set_at("part/0", "features", "reader", value=value),
            clauses,
            error,
            f"the features of the part {says}",
        )
    for table in ("stored", "groups"):
        reject(
            made,
            f"without-{table}",
            link,
            pop_at("part/0", table),
            "DOC-011",
            "DOC_SCHEMA",
            f"the part has no table {table}",
        )


def _extents(made: Page, link: Chain) -> None:
    """Add faults in the columns of extents.

    The rows are, in order: the weight, sparse; its copy, sparse and predicted; the bias, same.
    """
    for slug, clauses, error, says, table, column, value in (
        ("kind-of-the-pack", "PRT-003", "COLUMN_FORM", "the pack is of the kind safetensors",
         "files", "kind", Strings(["safetensors"])),
        ("pack-header-digest", "DEL-012", "COLUMN_FORM", "the pack's header has another digest",
         "files", "header_digest", bytes(32)),
        ("pack-nbytes", "PRT-007", "FILE_COVERAGE", ("the pack has a byte more than header and"
        " blocks"), "files",
         "nbytes", Packed([75])),
        ("same-in-a-file", "DEL-004", "COLUMN_FORM FILE_COVERAGE", ("a block that is the base's is"
        " in the pack"),
         "extents", "file", Packed([0, 0, 0])),
        ("base-missing", "DEL-006", "COLUMN_FORM", "a changed block names no base", "extents",
         "reference", Packed([0, 0, 1])),
        ("same-without-base", "DEL-006", "COLUMN_FORM", "a block that is the base's names no base",
         "extents", "reference", Packed([1, 0, 0])),
        ("base-and-predicted", "DEL-006", "COLUMN_FORM", "a predicted block names a base",
         "extents", "reference", Packed([1, 1, 1])),
        ("same-predicted", "DEL-006", "COLUMN_FORM", "a block that is the base's is predicted",
         "extents", "predicted", Packed([0, 1, 1])),
        ("first-predicted", "DEL-006", "COLUMN_FORM", "the first box of the group is predicted",
         "extents", "predicted", Packed([1, 1, 0])),
        ("stored-not-shorter", "DEL-005", "COLUMN_FORM", ("a block is stored in 24 bytes, and has"
        " as many"), "stored",
         "nbytes", Packed([24, 1])),
    ):  # fmt: skip

        def edit(
            c: Checkpoint, t: str = table, k: str = column, v: object = value, slug: str = slug
        ) -> None:
            c.part[t][k] = v
            if slug == "first-predicted":
                c.part["extents"]["reference"] = Packed([0, 0, 1])

        reject(made, slug, link, edit, clauses, error, f"in {table}, {says}")


def _groups(made: Page, link: Chain) -> None:
    none = {
        "kind": Strings(),
        "rule": [],
        "reference": Packed(),
        "member_count": Packed(),
        "box": Folded(),
    }
    for slug, clauses, says, edit in (
        ("group-kind", "DEL-009 PRE-001", "a group of the kind lion",
         set_at("part/0", "groups", "kind", value=Strings(["lion"]))),
        ("group-of-unequal", "DEL-009 PRE-001", "boxes of three and of six elements",
         set_at("part/0", "groups", "box", value=Folded([1, -1]))),
        ("group-none", "DEL-006", "no group, and a predicted block",
         set_at("part/0", "groups", value=none)),
        ("group-cast-with-base", "DEL-010", "a reference of cast, which needs none",
         set_at("part/0", "groups", "reference", value=Packed([1]))),
    ):  # fmt: skip
        reject(made, slug, link, edit, clauses, "COLUMN_FORM", f"in groups, {says}")
