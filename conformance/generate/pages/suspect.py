"""Checkpoints saved because of a fault in the training; spec/companions/31-suspect.md."""

from __future__ import annotations

from conformance.generate.bases import flip, pop_at, set_at, small, two_writers
from conformance.generate.cases import Page
from conformance.generate.model import Checkpoint, Edit, checkpoint_name
from conformance.generate.pages.run import Run

__all__ = ["page"]

REASON = "step 800: grad_norm is nan"
WHY = "a mark that one reader sees and another doesn't sends the run on from weights that are NaN"
GOES_ON = (
    "the run goes on from the last checkpoint that nothing was wrong with, unless somebody chooses"
)
FIRST, SECOND, THIRD = (checkpoint_name(step, 1) for step in (200, 400, 800))


def page() -> Page:
    """Return the cases of suspect checkpoints."""
    made = Page("suspect")
    _accept(made)
    _refuse_members(made)
    _refuse_parts(made)
    _launch(made)
    return made


def _mark(reason: str = REASON) -> Edit:
    """Return an edit to mark a checkpoint, in its manifest and in the part of writer 0."""

    def edit(made: Checkpoint) -> None:
        for document in (made.part, made.manifest):
            document["features"]["reader"] = sorted([*document["features"]["reader"], "suspect"])
            document["suspect"] = reason

    return edit


def _labelled(made: Checkpoint) -> None:
    for document in (made.part, made.manifest):
        document["features"]["reader"] = ["labels", "suspect"]
        document.update(metrics={"loss": "17.5"}, tags=[], suspect=REASON)


def _accept(made: Page) -> None:
    for slug, plan, edit, says in (
        (
            "small",
            small(),
            _mark(),
            "a reason, behind the feature suspect; still a full checkpoint",
        ),
        ("labels", small(), _labelled, "a reason and a metric: two features"),
        (
            "writer-0",
            two_writers(),
            _mark(),
            "two writers; the part of writer 0 has the reason, that of writer 1 not",
        ),
        ("longest", small(), _mark("\U0001f642" * 1000), "a reason of 1000 characters"),
    ):
        clauses = "MAN-013 MAN-005 PRT-014 CMT-039 DEL-001"
        made.accept(
            slug,
            plan,
            clauses,
            says,
            why="who opens a suspect checkpoint by its name reads it",
            edit=edit,
        )


def _refuse(  # noqa: PLR0917 - a row of a table of cases
    made: Page,
    slug: str,
    of: str,
    edit: Edit,
    clauses: str,
    error: str,
    says: str,
    phase: str = "open",
) -> None:
    made.reject(slug, of, edit, clauses, error, says, why=WHY, bug="AMBIGUITY", phase=phase)


def _refuse_members(made: Page) -> None:
    for document, name in (("manifest", "the manifest"), ("part/0", "the part")):
        slug = document.partition("/")[0]
        edits: list[tuple[str, str, Edit]] = [
            ("unlisted", f"{name} has a reason without the feature",
             set_at(document, "features", "reader", value=[])),
            ("missing", f"{name} has the feature and no reason", pop_at(document, "suspect")),
            ("is-long", f"the reason of {name} has 1001 characters",
             set_at(document, "suspect", value="x" * 1001)),
            *((f"is-{kind}", f"the reason of {name} is {value!r}",
               set_at(document, "suspect", value=value))
              for kind, value in (("empty", ""), ("true", True), ("number", 1), ("null", None),
                                  ("list", ["nan"]))),
        ]  # fmt: skip
        for kind, says, edit in edits:
            _refuse(made, f"{slug}-{kind}", "small", edit, "MAN-013 DEL-001", "DOC_SCHEMA", says)


def _refuse_parts(made: Page) -> None:
    def of_both(checkpoint: Checkpoint) -> None:
        checkpoint.parts[1]["suspect"] = REASON
        checkpoint.parts[1]["features"]["reader"] = ["suspect"]

    says = "the part of writer 1 has the reason, too"
    _refuse(made, "of-writer-1", "writer-0", of_both, "PRT-014", "DOC_SCHEMA", says)
    other = set_at("part/0", "suspect", value="step 800: loss is nan")
    says = "the part has another reason"
    _refuse(made, "of-another-part", "small", other, "CMT-039", "DOC_MISMATCH", says, "validate")

    def unmark(checkpoint: Checkpoint) -> None:
        checkpoint.part["features"]["reader"] = []
        del checkpoint.part["suspect"]

    says = "the manifest is suspect, and the part isn't"
    _refuse(made, "nowhere", "small", unmark, "CMT-039 DEL-001", "DOC_MISMATCH", says, "validate")


def _three() -> Run:
    """Return a run of one launch with three checkpoints, of which the newest is suspect."""
    return Run().launch(1).save(200, 1).save(400, 1).save(800, 1, edit=_mark())


def _launch(made: Page) -> None:
    """Add launches of runs with suspect checkpoints."""

    def both() -> Run:
        return Run().launch(1).save(200, 1).save(400, 1, edit=_mark()).save(800, 1, edit=_mark())

    last = checkpoint_name(900, 2)
    damaged = _three()
    flip(
        next(
            path
            for path in damaged.files
            if path.startswith(SECOND) and path.endswith(".safetensors")
        ),
        -1,
    )(damaged.files)
    for slug, run, resume, passed, says in (
        ("launch-newest", _three(), SECOND, [THIRD], "the newest of three checkpoints is suspect"),
        ("launch-both", both(), FIRST, [THIRD, SECOND], ("the two newest of three checkpoints are"
        " suspect")),
        ("launch-between", both().save(1200, 1), checkpoint_name(1200, 1), [],
         "one that isn't is newer than they are"),
        ("launch-damaged", damaged, FIRST, [THIRD, SECOND], ("the newest is suspect, and the one"
        " before it is damaged")),
        ("launch-by-hand", _three().launch(2, of=THIRD, by="hand"), THIRD, [],
         "launch 2 began from the suspect one, by hand, and has saved nothing"),
        ("launch-by-hand-marked",
         _three().launch(2, of=THIRD, by="hand").save(900, 2, edit=_mark()), THIRD, [last],
         "launch 2 began from the suspect one, by hand, and what it saved is suspect"),
        ("launch-rolled-back", _three().launch(2, of=SECOND).save(900, 2, edit=_mark()), SECOND,
         [last], "launch 2 began before the suspect one, and its own checkpoint is suspect, too"),
        ("launch-repaired", _three().launch(2, of=SECOND).save(900, 2), last, [],
         "launch 2 began before the suspect one, and has saved"),
    ):  # fmt: skip
        chosen_by = "fallback" if slug == "launch-damaged" else "lineage"
        made.ask(
            slug, "", "open", {"launch": True}, "RUN-042 RUN-006 RUN-007", says, why=GOES_ON,
            files=run.files, bug="WRONG_RUN", features=["launch"],
            result={"launch": {"resume_from": resume, "chosen_by": chosen_by,
                               "passed_over": passed}},
        )  # fmt: skip
    alone = Run().launch(1).save(400, 1, edit=_mark()).save(800, 1, edit=_mark())
    for slug, clauses, error, is_launch in (
        ("launch-none", "RUN-042 RUN-010", "NO_VALID_CHECKPOINT", True),
        ("open-none", "RUN-042 RUN-020", "NOT_COMMITTED", False),
    ):
        made.reject(
            slug, "run/valid/simple", None, clauses, error, "both checkpoints are suspect",
            why=GOES_ON,
            bug="WRONG_RUN", files=alone.files, request={"launch": True} if is_launch else {},
            features=["launch"] if is_launch else [],
        )  # fmt: skip
