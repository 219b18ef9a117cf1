"""The lineage of a run: "What to resume from" (spec/run/25-resume.md), with "Launch and resume".

Some cases open the run; other cases request the checkpoint from which the next launch resumes, and
the checkpoints that the launch passes over.
"""

from __future__ import annotations

from typing import Any

from conformance.generate.bases import flip
from conformance.generate.cases import Page
from conformance.generate.chains import DELTA, Chain, base_plan, chain, placed, stored_as
from conformance.generate.model import checkpoint_name
from conformance.generate.pages.delta_scenes import BASE_SHARD, BIAS, NEXT, WEIGHT
from conformance.generate.pages.run import OTHER_RUN, Run, record, simple
from conformance.generate.plans import Stored, Tensor, whole

__all__ = ["page"]

#: Names of checkpoints in many runs of this module.
FIRST, SECOND, THIRD = (checkpoint_name(step, 1) for step in (200, 400, 800))
LINEAGE = "the lineage decides, and two implementations must not disagree about it"
OLDER = "a launch goes on from an older checkpoint, says so, and doesn't end for the damage of one"
JUMP = "a run that was rolled back would jump forward again, or begin anew"


def page() -> Page:
    """Return the cases of lineages."""
    made = Page("run")
    _overtaken(made)
    _beside(made)
    _first_candidate(made)
    _launch(made)
    _launch_damaged(made)
    _launch_lineage(made)
    _launch_lost(made)
    _launch_deltas(made)
    _launch_refused(made)
    return made


def _three() -> Run:
    """Return a run of one launch and three checkpoints."""
    return Run().launch(1).save(200, 1).save(400, 1).save(800, 1)


def _retire(run: Run, step: int, launch: int, /, **members: Any) -> Run:
    """Put a tombstone into the register of a checkpoint of the run."""
    name = checkpoint_name(step, launch)
    digest = "blake3:" + run.made[name].digest.hex()
    run.files = {
        path: content for path, content in run.files.items() if not path.startswith(f"{name}/")
    }
    run.files[f"{name}/manifest.json"] = record(
        "tombstone", step, launch, manifest_digest=digest, **members
    )
    return run


def _abort(run: Run, step: int, launch: int, /, **members: Any) -> Run:
    """Put an abort record into the register of a checkpoint of the run."""
    run.files[f"{checkpoint_name(step, launch)}/manifest.json"] = record(
        "abort", step, launch, **{"reason": "given up"} | members
    )
    return run


def _cut(run: Run, step: int, launch: int) -> Run:
    """Remove the last byte of a register, which makes the register unreadable."""
    name = f"{checkpoint_name(step, launch)}/manifest.json"
    run.files[name] = run.files[name][:-1]
    return run


def _damage(run: Run, *places: tuple[int, int]) -> Run:
    """Flip a bit of the tensor in checkpoints of the run."""
    for place in places:
        names = [path for path in run.files if path.startswith(f"{checkpoint_name(*place)}/")]
        flip(next(path for path in names if path.endswith(".safetensors")), -1)(run.files)
    return run


def _opens(  # noqa: PLR0917 - a row of a table of cases
    made: Page, slug: str, run: Run, comes: str, clauses: str, says: str, why: str = JUMP
) -> None:
    # A validation of a run also checks documents outside the lineage; these cases request no
    # validation.
    made.accept(
        slug, run.made[comes], clauses, says, why=why, bug="WRONG_RUN", place=comes,
        beside=run.files, path="", request={},
    )  # fmt: skip


def _refuses(  # noqa: PLR0917 - a row of a table of cases
    made: Page, slug: str, run: Run, clauses: str, error: str, says: str, *, launch: bool = False
) -> None:
    made.reject(
        slug, "run/valid/simple", None, clauses, error, says, why=LINEAGE, bug="WRONG_RUN",
        files=run.files,
        request={"launch": True} if launch else {}, features=["launch"] if launch else [],
    )  # fmt: skip


def _resumes(  # noqa: PLR0917 - a row of a table of cases
    made: Page, slug: str, files: Run | Chain, resume: str | None, passed: list[str], clauses: str,
    says: str, *, why: str = OLDER,
) -> None:  # fmt: skip
    given = files.files if isinstance(files, Run) else files.beside | placed(files.delta)
    made.ask(
        slug, "", "open", {"launch": True}, clauses, says, why=why, files=given, bug="WRONG_RUN",
        features=["launch"], result={
            "launch": {"resume_from": resume, "chosen_by": "fallback" if passed else "lineage",
                       "passed_over": passed}
        },
    )  # fmt: skip


def _overtaken(made: Page) -> None:
    """Add overtaken launches, and launches that aren't overtaken."""
    _opens(
        made, "overtaken", _retire(_three().launch(2, of=SECOND), 400, 1), THIRD, "RUN-006",
        "launch 2 has saved nothing, and what its record names was retired",
    )  # fmt: skip
    _opens(
        made, "overtaken-by-hand", _retire(_three().launch(2, of=SECOND, by="hand"), 400, 1), FIRST,
        "RUN-006",
        "launch 2 was chosen by hand and has saved nothing, and what its record names was retired",
    )  # fmt: skip
    saved = _three().launch(2, of=SECOND, by="fallback").save(500, 2)
    _opens(
        made, "resume-from-retired", _retire(saved, 400, 1), checkpoint_name(500, 2), "RUN-006",
        "launch 2 has saved step 500, and what its record names was retired",
    )  # fmt: skip
    both = _retire(
        _retire(_three().launch(2, of=SECOND, by="fallback").save(500, 2), 400, 1), 500, 2
    )
    _opens(
        made, "overtaken-but-retired", both, FIRST, "RUN-006",
        "launch 2 had saved step 500, which was retired, and so was what its record names",
    )  # fmt: skip
    unreadable = _cut(
        _retire(_three().launch(2, of=SECOND, by="fallback").save(500, 2), 400, 1), 500, 2
    )
    _refuses(
        made, "overtaken-but-unreadable", unreadable, "RUN-020 RUN-006 DOC-003", "DOC_SYNTAX",
        ("what the record of launch 2 names was retired, and the register of its only checkpoint"
        " lacks its last byte"),
    )  # fmt: skip


def _beside(made: Page) -> None:
    """Add damage outside the lineage."""
    _opens(
        made, "unreadable-beside",
        _cut(_three().launch(2, of=SECOND, by="fallback").save(500, 2), 800, 1),
        checkpoint_name(500, 2), "RUN-021 RUN-007",
        "launch 2 passed over step 800, whose register lacks its last byte, and has saved step 500",
    )  # fmt: skip
    _opens(
        made, "unreadable-beyond", _cut(_three().launch(2, of=SECOND, by="hand"), 800, 1), SECOND,
        "RUN-021 RUN-006",
        ("launch 2 was rolled back by hand from step 800, whose register lacks its last byte, and"
        " has saved nothing"),
    )  # fmt: skip
    twice = simple().launch(2, of=THIRD).save(1200, 2).launch(3, of=SECOND, by="hand").save(1600, 3)
    twice.launch(4, of=checkpoint_name(1200, 2), by="hand")
    _opens(
        made, "rolled-forward", twice, checkpoint_name(1200, 2), "RUN-006",
        "launch 3 was rolled back by hand, and launch 4 by hand again, to what launch 2 had saved",
    )  # fmt: skip


def _first_candidate(made: Page) -> None:
    """Add runs that open although the first candidate isn't whole."""
    for slug, clauses, error, says, run in (
        ("first-unreadable", "RUN-020 DOC-003", "DOC_SYNTAX",
         "the register of the newest checkpoint lacks its last byte", _cut(simple(), 800, 1)),
        ("abort-of-another-step", "MAN-002 RUN-020", "STEP_MISMATCH",
         "the register of step 800 holds an abort record of step 900",
         _abort(simple(), 800, 1, step=900)),
        ("tombstone-of-another-launch", "MAN-002 RUN-020", "STEP_MISMATCH",
         "the register of step 800 of launch 1 holds a tombstone of launch 2",
         _retire(simple(), 800, 1, launch=2)),
        ("tombstone-of-another-run", "RUN-003 RUN-020", "RUN_MISMATCH",
         "the register of step 800 holds a tombstone of another run",
         _retire(simple(), 800, 1, run_id=OTHER_RUN)),
        ("abort-without-run", "MAN-008 RUN-020", "DOC_SCHEMA",
         "the register of step 800 holds an abort record with the launch, and run_id is null",
         _abort(simple(), 800, 1, run_id=None)),
        ("abort-without-launch", "MAN-008 RUN-020", "DOC_SCHEMA",
         "the register of step 800 holds an abort record with the run_id, and launch is null",
         _abort(simple(), 800, 1, launch=None)),
        ("tombstone-without-run", "MAN-008 RUN-020", "DOC_SCHEMA",
         "the register of step 800 holds a tombstone with the launch, and run_id is null",
         _retire(simple(), 800, 1, run_id=None)),
        ("resume-from-digest", "RUN-022 RUN-020", "DOC_DIGEST",
         "launch 2 has saved nothing, and its record names step 400 with another digest",
         _other_digest()),
        ("resume-from-aborted", "RUN-022 RUN-020", "CHECKPOINT_ABORTED",
         ("launch 2 has saved nothing, and the register of what its record names holds an abort"
         " record"),
         _abort(_three().launch(2, of=SECOND), 400, 1)),
        ("all-retired", "MAN-001 RUN-020", "NOT_COMMITTED",
         "both checkpoints are retired", _retire(_retire(simple(), 800, 1), 400, 1)),
    ):  # fmt: skip
        _refuses(made, slug, run, clauses, error, says)


def _other_digest(**members: Any) -> Run:
    """Return a run whose second launch names a checkpoint with the digest of another."""
    run = _three()
    resume = {"name": SECOND, "digest": "blake3:" + run.made[THIRD].digest.hex()}
    return run.launch(2, of=SECOND, resume_from=resume, **members)


def _launch(made: Page) -> None:
    """Add launches that pass over no checkpoint."""
    _resumes(
        made,
        "launch-newest",
        simple(),
        THIRD,
        [],
        "RUN-006",
        "the next launch of a run of two checkpoints",
    )
    _resumes(made, "launch-first", Run(), None, [], "RUN-006 RUN-010", "the first launch of a run")
    _resumes(
        made, "launch-second", Run().launch(1), None, [], "RUN-006 RUN-010",
        "the next launch of a run whose first one has saved nothing",
    )  # fmt: skip
    _resumes(
        made, "launch-aborted", _abort(_three(), 800, 1), SECOND, [], "RUN-006 RUN-007",
        "the greatest step was aborted",
        why="what was never committed isn't damaged, and nothing was passed over",
    )  # fmt: skip
    undecided = _three().drop(f"{THIRD}/manifest.json")
    _resumes(
        made, "launch-unfinished", undecided, SECOND, [], "RUN-006 RUN-007",
        "the greatest step has no register",
        why="what was never committed isn't damaged, and nothing was passed over",
    )  # fmt: skip
    retired = _retire(_three().launch(2, of=SECOND, by="hand"), 400, 1)
    _resumes(
        made, "launch-resume-from-retired", retired, FIRST, [], "RUN-006 RUN-007",
        "launch 2 was chosen by hand and has saved nothing, and what its record names was retired",
        why="what was retired isn't damaged, and nothing was passed over",
    )  # fmt: skip


def _launch_damaged(made: Page) -> None:
    """Add launches with a newest candidate that isn't whole."""
    foreign = simple().save(1200, 1, run_id=OTHER_RUN)
    moved = simple().save(800, 1, name=checkpoint_name(900, 1))
    for slug, clauses, says, run, older, passed in (
        ("launch-damaged", "RUN-012", "the newest checkpoint has a damaged block",
         _damage(simple(), (800, 1)), SECOND, THIRD),
        ("launch-unreadable", "RUN-007", ("the register of the newest checkpoint lacks its last"
        " byte"),
         _cut(simple(), 800, 1), SECOND, THIRD),
        ("launch-foreign", "RUN-003", "the newest checkpoint is of another run", foreign,
         THIRD, checkpoint_name(1200, 1)),
        ("launch-moved", "MAN-002", ("the checkpoint of step 800 lies under the name of step 900,"
        " too"), moved,
         THIRD, checkpoint_name(900, 1)),
        ("launch-abort-of-another-step", "MAN-002", ("the register of step 800 holds an abort"
        " record of step 900"),
         _abort(simple(), 800, 1, step=900), SECOND, THIRD),
        ("launch-tombstone-of-another-run", "RUN-003", ("the register of step 800 holds a"
        " tombstone of another run"),
         _retire(simple(), 800, 1, run_id=OTHER_RUN), SECOND, THIRD),
        ("launch-abort-without-run", "MAN-008",
         "the register of step 800 holds an abort record with the launch, and run_id is null",
         _abort(simple(), 800, 1, run_id=None), SECOND, THIRD),
    ):  # fmt: skip
        _resumes(made, slug, run, older, [passed], f"{clauses} RUN-006", says)


def _launch_lineage(made: Page) -> None:
    """Add launches that follow the lineage down."""
    saved = checkpoint_name(500, 2)

    def second(**members: Any) -> Run:
        return _three().launch(2, of=SECOND, by="fallback", **members).save(500, 2)

    _resumes(
        made, "launch-smaller-steps", _damage(second(), (500, 2)), SECOND, [saved], "RUN-006",
        "launch 2 went on from step 400 of launch 1, and its only checkpoint has a damaged block",
    )  # fmt: skip
    _resumes(
        made, "launch-smaller-steps-down", _damage(second(), (500, 2), (400, 1)), FIRST,
        [saved, SECOND], "RUN-006",
        "launch 2 went on from step 400 of launch 1, and both checkpoints have a damaged block",
    )  # fmt: skip
    _resumes(
        made, "launch-smaller-steps-retired", _retire(_damage(second(), (500, 2)), 400, 1), FIRST,
        [saved], "RUN-006",
        ("launch 2 went on from step 400 of launch 1, which is retired; its only checkpoint has a"
        " damaged block"),
    )  # fmt: skip
    _resumes(
        made, "launch-smaller-steps-unreadable", _cut(_damage(second(), (500, 2)), 400, 1), FIRST,
        [saved, SECOND], "RUN-006", "as before, and the register of step 400 lacks its last byte",
    )  # fmt: skip
    _resumes(
        made, "launch-resume-from-digest", _other_digest(by="hand"), FIRST, [SECOND], "RUN-022",
        "launch 2 has saved nothing, and its record names step 400 with another digest",
        why="the digest counts, and not the name: what lies under it is another checkpoint",
    )  # fmt: skip
    _resumes(
        made, "launch-resume-from-aborted",
        _abort(_three().launch(2, of=SECOND, by="hand"), 400, 1), FIRST, [SECOND],
        "RUN-022", ("launch 2 has saved nothing, and the register of what its record names holds"
        " an abort record"),
    )  # fmt: skip
    lost = _three().launch(2, of=SECOND, by="hand")
    lost.files = {
        path: content for path, content in lost.files.items() if not path.startswith(SECOND)
    }
    _resumes(
        made, "launch-resume-from-lost", lost, FIRST, [SECOND], "RUN-022",
        "launch 2 has saved nothing, and what its record names isn't there",
    )  # fmt: skip
    deep = (
        simple()
        .launch(2, of=THIRD)
        .save(900, 2)
        .save(1200, 2)
        .launch(3, of=checkpoint_name(900, 2), by="hand")
    )
    deep.save(1000, 3)
    down = [(1000, 3), (900, 2), (800, 1)]
    _resumes(
        made, "launch-down", _damage(deep, *down), SECOND,
        [checkpoint_name(*place) for place in down], "RUN-006",
        "of three launches the checkpoints on the lineage have damaged blocks, but for the oldest",
    )  # fmt: skip


def _spoil(run: Run, number: int) -> Run:
    """Flip a bit of the record of a launch."""
    flip(f"launches/{number:04d}.json", 150)(run.files)
    return run


def _launch_lost(made: Page) -> None:
    """Add launches with unreadable records; work independent of the record goes on."""
    why = "one bad bit in a launch record must not close a run, nor bring back what was rolled back"
    saved = checkpoint_name(500, 2)

    def second(by: str = "lineage") -> Run:
        return _three().launch(2, of=SECOND, by=by).save(500, 2)

    _opens(
        made, "launch-record-bit", _spoil(second(), 2), saved, "RUN-045",
        "one bit of the record of launch 2 is another, which has saved step 500", why,
    )  # fmt: skip
    _opens(
        made, "launch-record-bit-below", _spoil(second().launch(3, of=saved).save(600, 3), 2),
        checkpoint_name(600, 3), "RUN-045",
        "one bit of the record of launch 2 is another; launch 3 went on from it", why,
    )  # fmt: skip
    _opens(
        made, "launch-record-bit-beside", _spoil(second("hand").launch(3, of=THIRD, by="hand"), 2),
        THIRD, "RUN-045",
        "one bit of the record of launch 2 is another; launch 3 went back to launch 1 by hand", why,
    )  # fmt: skip
    bare = _spoil(_three().launch(2, of=SECOND), 2)
    _refuses(
        made, "launch-record-bit-unsaved", bare, "RUN-045 RUN-020",
        "DOC_DIGEST DOC_SCHEMA DOC_SYNTAX",
        "one bit of the record of launch 2 is another, which has saved nothing",
    )  # fmt: skip
    for slug, run, resume, chosen_by, passed, says in (
        ("launch-lost", _spoil(second(), 2), saved, "lineage", [], "launch 2 has saved step 500"),
        ("launch-lost-unsaved", bare, THIRD, "fallback", [], "launch 2 has saved nothing"),
        ("launch-lost-bound", _damage(_spoil(second(), 2), (500, 2)), SECOND, "fallback", [saved],
         "the only checkpoint of launch 2 has a damaged block; step 800 of launch 1 is beyond it"),
        ("launch-lost-first", _spoil(Run().launch(1), 1), None, "lineage", [],
         "it is the first, and nothing is saved"),
    ):  # fmt: skip
        made.ask(
            slug, "", "open", {"launch": True}, "RUN-045 RUN-007", ("the record of a launch can't"
            f" be read: {says}"),
            why=why, files=run.files, bug="WRONG_RUN", features=["launch"],
            result={"launch": {"resume_from": resume, "chosen_by": chosen_by,
                               "passed_over": passed}},
        )  # fmt: skip


def _launch_deltas(made: Page) -> None:
    """Add a delta with a damaged base, where the delta reads the damage and elsewhere."""
    pieces = [whole((2, 3), stored=[Stored(encoding="raw")])]
    anew = Tensor(name="weight", shape=(2, 3), content=NEXT, pieces=pieces)

    def link() -> Chain:
        made = chain(base_plan(BIAS, WEIGHT), stored_as("same", BIAS, BIAS.content), anew)
        made.beside.update(Run().launch(1).files)
        return made

    other = link()
    flip(BASE_SHARD, -1)(other.beside)
    _resumes(
        made, "launch-base-not-needed", other, DELTA, [], "RUN-012",
        ("the base of the newest checkpoint, a delta, has a damaged block that the delta doesn't"
        " read"),
        why="damage in what a checkpoint doesn't read is no reason to go back",
    )  # fmt: skip
    needed = link()
    flip(BASE_SHARD, -len(WEIGHT.content) - 1)(needed.beside)
    made.reject(
        "launch-base-needed", "run/valid/launch-base-not-needed", None, "RUN-012 RUN-010",
        "NO_VALID_CHECKPOINT",
        "the base has a damaged block that the delta reads", why=OLDER, bug="DAMAGE_UNSEEN",
        files=needed.beside | placed(needed.delta), request={"launch": True}, features=["launch"],
    )  # fmt: skip


def _launch_refused(made: Page) -> None:
    """Add launches without a checkpoint to resume from, which must not begin anew."""
    gone = _retire(Run().launch(1).save(400, 1).launch(2, of=SECOND, by="hand"), 400, 1)
    ring = Run().launch(1).launch(2).launch(3)
    for number, other in ((2, 3), (3, 2)):
        resume = {"name": checkpoint_name(500, other), "digest": "blake3:" + "0" * 64}
        ring.launch(number, by="hand", resume_from=resume)
    for slug, clauses, error, says, run in (
        ("launch-none-whole", "RUN-010", "NO_VALID_CHECKPOINT", ("both checkpoints have a damaged"
        " block"),
         _damage(simple(), (400, 1), (800, 1))),
        ("launch-resume-from-gone", "RUN-010", "NO_VALID_CHECKPOINT",
         ("launch 2 was chosen by hand, and its record names the only checkpoint, which was"
         " retired"), gone),
        ("launch-ring", "RUN-010 RUN-022", "NO_VALID_CHECKPOINT",
         "the records of launches 2 and 3 name checkpoints of each other, which aren't there",
         ring),
        ("launch-record-of-another-run", "RUN-003", "RUN_MISMATCH", ("the record of launch 2 is of"
        " another run"),
         simple().launch(2, of=THIRD, run_id=OTHER_RUN)),
        ("launch-unrecorded", "RUN-015", "FILE_MISSING", ("a checkpoint is of launch 2, which has"
        " no record"),
         simple().save(1200, 2)),
    ):  # fmt: skip
        _refuses(made, slug, run, clauses, error, says, launch=True)
