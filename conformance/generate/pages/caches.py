"""Documents of checkpoints whose files may be in caches of nodes; spec/companions/29-caches.md."""

from __future__ import annotations

from typing import Any

from conformance.generate.bases import RUN_ID, pop_at, set_at, small, two_writers
from conformance.generate.cases import Page
from conformance.generate.model import Checkpoint, Edit

__all__ = ["page"]

NAME = "step-00000003-l0001"
WHY = "where to look for a file is one thing for all readers, and no guess"


def page() -> Page:
    """Return the cases of durability."""
    made = Page("caches")
    _accept(made)
    _refuse_members(made)
    _refuse_parts(made)
    _refuse_files(made)
    return made


def _give(document: dict[str, Any], durability: object) -> None:
    """Set a document's durability, after the document's feature; None sets no durability."""
    features = set(document["features"]["reader"]) - {"caches"}
    document.pop("durability", None)
    if durability is not None:
        features.add("caches")
        document["durability"] = durability
    document["features"]["reader"] = sorted(features)


def _levels(manifest: str, *parts: str | None) -> Edit:
    """Return an edit that sets the durabilities of manifest and parts."""

    def edit(made: Checkpoint) -> None:
        _give(made.manifest, manifest)
        for part, durability in zip(made.parts, parts, strict=True):
            _give(part, durability)

    return edit


def _labelled(made: Checkpoint) -> None:
    for document in (made.part, made.manifest):
        document["features"]["reader"] = sorted([*document["features"]["reader"], "labels"])
        document["metrics"], document["tags"] = {"eval_loss": "2.5"}, []


def _both(edit: Edit, other: Edit) -> Edit:
    def edits(made: Checkpoint) -> None:
        edit(made)
        other(made)

    return edits


def _accept(made: Page) -> None:
    one = small(run_id=RUN_ID, launch=1)
    two = two_writers(run_id=RUN_ID, launch=1)
    for slug, plan, edit, clauses, says in (
        ("node", one, _levels("node", "node"), "MAN-012 MAN-005 DEL-001",
         "durability node; all files are there"),
        ("peers", one, _levels("peers", "peers"), "MAN-012 MAN-005 DEL-001",
         "durability peers; all files are there"),
        ("labels", one, _both(_levels("node", "node"), _labelled), "MAN-012 MAN-010 DEL-001",
         "durability, and a metric: two features, and still a full checkpoint"),
        ("weakest", two, _levels("node", "peers", "node"), "CMT-046 MAN-012",
         "the part of writer 1 is the weaker one"),
        ("one-at-home", two, _levels("peers", None, "peers"), "CMT-046 CMT-007",
         "the part of writer 0 has no durability, that of writer 1 has"),
    ):  # fmt: skip
        made.accept(
            slug,
            plan,
            f"{clauses} OPN-012",
            says,
            why=(
                "what was in a cache when it was committed may be at home by now, and is then"
                " read as any other"
            ),
            edit=edit,
            path=NAME,
            place=NAME,
        )


def _refuse_members(made: Page) -> None:
    for document, name in (("manifest", "the manifest"), ("part/0", "the part")):
        slug = document.partition("/")[0]
        edits: list[tuple[str, str, Edit]] = [
            ("unlisted", f"{name} has a durability without the feature",
             set_at(document, "features", "reader", value=[])),
            ("missing", f"{name} has the feature and no durability",
             pop_at(document, "durability")),
            *((f"is-{kind}", f"the durability of {name} is {value!r}",
               set_at(document, "durability", value=value))
              for kind, value in (("home", "home"), ("mirror", "mirror"), ("empty", ""),
                                  ("number", 1), ("null", None),
                                  ("list", ["node"]), ("capital", "Node"))),
        ]  # fmt: skip
        for kind, says, edit in edits:
            _refuse(made, f"{slug}-{kind}", "node", edit, "MAN-012 DEL-001", "DOC_SCHEMA", says)

    def leave_run(checkpoint: Checkpoint) -> None:
        for document in (checkpoint.manifest, checkpoint.index, *checkpoint.parts):
            document["run_id"] = document["launch"] = None

    says = "a durability outside of a run"
    _refuse(
        made,
        "outside-of-a-run",
        "node",
        leave_run,
        "MAN-012",
        "DOC_SCHEMA",
        says,
        place="checkpoint",
    )


def _refuse_parts(made: Page) -> None:
    for slug, of, says, edit in (
        ("stronger-than-its-part", "node", "the manifest says peers, and the part node",
         set_at("manifest", "durability", value="peers")),
        ("weaker-than-its-parts", "one-at-home", "the manifest says node, and the part peers",
         set_at("manifest", "durability", value="node")),
        ("nowhere", "node", "the manifest has a durability, and no part has one",
         _levels("node", None)),
        ("of-the-part-alone", "node", "the part has a durability, and the manifest has none",
         lambda c: _give(c.manifest, None)),
    ):  # fmt: skip
        phase = "open" if slug == "of-the-part-alone" else "validate"
        _refuse(made, slug, of, edit, "CMT-046 DEL-001", "DOC_MISMATCH", says, phase=phase)
    unsorted = set_at("part/0", "features", "reader", value=["labels", "caches"])
    _refuse(
        made,
        "unsorted",
        "labels",
        unsorted,
        "DEL-001",
        "DOC_SCHEMA",
        "the features of the part aren't sorted",
    )


def _refuse_files(made: Page) -> None:
    def remove(file: str, writer: int) -> Edit:
        def edit(checkpoint: Checkpoint) -> None:
            suffix = f"-{writer:05d}.safetensors"
            name = next(
                name for name in checkpoint.files if name.startswith(file) and name.endswith(suffix)
            )
            checkpoint.extra[name] = None

        return edit

    for slug, of, code, says, edit in (
        ("file-elsewhere", "node", "FILES_IN_CACHES", "the only shard isn't there",
         remove("weights", 0)),
        ("file-elsewhere-of-writer-1", "one-at-home", "FILES_IN_CACHES",
         "a shard of writer 1 isn't there, whose part has a durability", remove("weights", 1)),
        ("file-missing-of-writer-0", "one-at-home", "FILE_MISSING",
         "a shard of writer 0 isn't there, whose part has no durability", remove("weights", 0)),
    ):  # fmt: skip
        made.reject(
            slug,
            of,
            edit,
            "OPN-012 CKP-004",
            code,
            says,
            why="a file that never was at home isn't damage, and one that was is",
            bug="AMBIGUITY",
            phase="read",
            path=NAME,
            place=NAME,
        )


def _refuse(  # noqa: PLR0917 - a row of a table of cases
    made: Page,
    slug: str,
    of: str,
    edit: Edit,
    clauses: str,
    error: str,
    says: str,
    *,
    phase: str = "open",
    place: str = NAME,
) -> None:
    made.reject(
        slug,
        of,
        edit,
        clauses,
        error,
        says,
        why=WHY,
        bug="AMBIGUITY",
        phase=phase,
        path=place,
        place=place,
    )
