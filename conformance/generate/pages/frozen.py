"""References to tensors of a frozen base; spec/companions/46-frozen-bases.md."""

from __future__ import annotations

from typing import Any

from blake3 import blake3

from conformance.generate.bases import set_at, small, two_writers
from conformance.generate.cases import Page
from conformance.generate.model import Checkpoint, Edit, build
from conformance.generate.plans import Leaf, Plan

__all__ = ["page"]

WHY = "a reader that misses a reference hands on a model without most of its weights"
LOCATION = "/models/base"
BASE = "~frozen"
NAME = "~frozen/layers.1.weight"
_MEMBERS = {
    "aliases": ["l"],
    "digest": blake3(bytes(24)).digest(),
    "dtype": "float32",
    "name_in_base": "model.layers.1.weight",
    "shape": ["l", 2, 3],
}


def page() -> Page:
    """Return the cases of references to a frozen base."""
    made = Page("frozen")
    _accept(made)
    _refuse(made)
    return made


def _tree(**members: Any) -> list[Any]:
    """Return the tree of a dict; a member that is ... is left out."""
    pairs = [(name, value) for name, value in sorted(members.items()) if value is not ...]
    return ["d", *(item for pair in pairs for item in pair)]


def _leaf(name: str, tree: Any, **members: Any) -> Leaf:
    return Leaf(field="weights", name=name, value=tree, **members)


def _base(**members: Any) -> Leaf:
    return _leaf(BASE, _tree(**{"kind": "ckptfmt.frozen_base", "location": LOCATION} | members))


def _reference(name: str = NAME, **members: Any) -> Leaf:
    return _leaf(name, _tree(**_MEMBERS | members))


def _with(plan: Plan, *leaves: Leaf) -> Plan:
    """Return a plan with further leaves."""
    plan.leaves = [*plan.leaves, *leaves]
    return plan


def _listed(made: Checkpoint) -> None:
    """Add the feature to the manifest, and to the parts with references, which stay full."""
    for document in (*made.parts, made.manifest):
        document["features"]["reader"] = sorted([*document["features"]["reader"], "frozen"])


def _accept(made: Page) -> None:
    clauses = "FRZ-001 FRZ-002 FRZ-003 FRZ-004 DEL-001 MAN-005"
    for slug, leaves, says in (
        ("small", [_base(), _reference()], "a reference to a tensor, and the location of the base"),
        (
            "aliases",
            [_base(), _reference(aliases=["l", "head.weight", "tail.weight"])],
            "a reference to a tied tensor with two further names",
        ),
        ("none", [_base()], "the location of a base, and no reference"),
        (
            "empty-name",
            [_base(), _reference(f"{BASE}/", name_in_base="", shape=["l"])],
            "a scalar with the empty name, here and in the base",
        ),
    ):
        made.accept(
            slug,
            _with(small(), *leaves),
            clauses,
            says,
            why="opening and checking a checkpoint of adapters needs no base",
            edit=_listed,
        )
    both = [_base(), _reference()]
    for leaf in both:
        leaf.writers = (0, 1)
    made.accept(
        "two-writers",
        _with(two_writers(), *both),
        clauses,
        "two writers that agree about a reference",
        why="each holder of a tensor refers to the base",
        edit=_listed,
    )


def _refuse(made: Page) -> None:
    def unlisted(checkpoint: Checkpoint) -> None:
        for document in (*checkpoint.parts, checkpoint.manifest):
            document["features"]["reader"] = []

    clauses = "FRZ-001 DEL-001"

    def refuse(slug: str, edit: Edit, error: str, says: str) -> None:
        made.reject(slug, "small", edit, clauses, error, says, why=WHY, bug="SILENT_DATA_LOSS")

    refuse("unlisted", unlisted, "DOC_SCHEMA DOC_MISMATCH", "neither document lists the feature")
    part = set_at("part/0", "features", "reader", value=[])
    refuse("part-unlisted", part, "DOC_SCHEMA", "the part doesn't list the feature")
    manifest = set_at("manifest", "features", "reader", value=[])
    refuse("manifest-unlisted", manifest, "DOC_MISMATCH", "the manifest doesn't list the feature")
    made.accept(
        "control",
        small(),
        "FRZ-001",
        "no reference, and no feature",
        why="a checkpoint without references is the same with and without this page",
    )
    for slug, document, error in (
        ("manifest-listed", "manifest", "DOC_MISMATCH"),
        ("part-listed", "part/0", "DOC_SCHEMA DOC_MISMATCH"),
    ):
        edit = set_at(document, "features", "reader", value=["frozen"])
        made.reject(
            slug, "control", edit, clauses, error,
            "the feature is listed, and there is no reference", why=WHY, bug="AMBIGUITY",
        )  # fmt: skip
    for slug, leaves, clause, error, says in _wrong_leaves():
        files = _with(small(), *leaves)
        made.reject(
            slug, "small", None, clause, error, says, why=WHY, bug="AMBIGUITY",
            files=_built(files), features=["frozen"],
        )  # fmt: skip


def _built(plan: Plan) -> dict[str, bytes]:
    return build(plan).edited(_listed).seal()


def _wrong_leaves() -> list[tuple[str, list[Leaf], str, str, str]]:
    """Return rows of cases: the leaves, the clause, the code and a description."""
    stored = f"{BASE}/w"
    rows: list[tuple[str, list[Leaf], str, str, str]] = [
        ("no-base", [_reference()], "FRZ-002", "FROZEN_FORM", "a reference, and no location"),
        ("base-kind", [_base(kind="base"), _reference()], "FRZ-002", "FROZEN_FORM",
         "the location has another kind"),
        ("base-location", [_base(location=...), _reference()], "FRZ-002", "FROZEN_FORM",
         "the location is missing"),
        ("base-empty", [_base(location=""), _reference()], "FRZ-002", "FROZEN_FORM",
         "the location is empty"),
        ("base-member", [_base(digest=bytes(32)), _reference()], "FRZ-002", "FROZEN_FORM",
         "the location has a further member"),
        ("scope", [_base(), _leaf(NAME, _tree(**_MEMBERS), scope="lw/0")], "FRZ-002", "FROZEN_FORM",
         "a reference of one worker"),
        ("name-stored", [_base(), _reference(stored)], "FRZ-004", "TENSOR_DIVERGED",
         "a tensor is stored, and taken from a base"),
        ("alias-stored", [_base(), _reference(aliases=["l", "w"])], "FRZ-004",
         "TENSOR_DIVERGED", "another name of a reference is the name of a stored tensor"),
        ("alias-twice", [_base(), _reference(aliases=["l", "tail.weight"]),
                         _reference(f"{BASE}/tail.weight")], "FRZ-004", "TENSOR_DIVERGED",
         "a name of two references"),
    ]  # fmt: skip
    for slug, members, says in (
        ("not-a-dict", None, "a reference is a string"),
        ("digest-short", {"digest": bytes(31)}, "the digest has 31 bytes"),
        ("digest-text", {"digest": "blake3:" + bytes(32).hex()}, "the digest is text"),
        ("dtype", {"dtype": "float31"}, "an unknown dtype"),
        ("shape-negative", {"shape": ["l", -1]}, "a negative extent"),
        ("shape-bool", {"shape": ["l", True]}, "an extent that is true"),
        ("shape-dims", {"shape": ["L", "uint8", bytes([1] * 33)]}, "33 dimensions"),
        ("aliases-order", {"aliases": ["l", "b", "a"]}, "aliases out of order"),
        ("aliases-twice", {"aliases": ["l", "a", "a"]}, "an alias twice"),
        ("aliases-number", {"aliases": ["l", 1]}, "an alias that is a number"),
        ("name-in-base", {"name_in_base": 1}, "a name in the base that is a number"),
        ("member-missing", {"name_in_base": ...}, "no name in the base"),
        ("member-more", {"nbytes": 24}, "a further member"),
    ):
        leaf = _leaf(NAME, "x") if members is None else _reference(**members)
        rows.append((slug, [_base(), leaf], "FRZ-003", "FROZEN_FORM", says))
    return rows
