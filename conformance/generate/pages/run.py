"""Runs and launches; spec/run/20-run.md. Each case opens a run and expects a resume point."""

from __future__ import annotations

from typing import Any

from conformance.generate.bases import RUN_ID, flip, set_at
from conformance.generate.cases import FileMap, Page
from conformance.generate.model import Checkpoint, Edit, build, checkpoint_name
from conformance.generate.plans import Plan, Tensor
from conformance.generate.wire import FORMAT_VERSION, json_document

__all__ = ["OTHER_RUN", "Run", "page", "record", "simple"]

OTHER_RUN = "0" * 32
NOBODY = f"blake3:{'0' * 64}"
HEAD = {"format_version": FORMAT_VERSION, "features": {"reader": [], "writer": []}}


class Run:
    """The files and checkpoints of a run."""

    def __init__(self, **members: Any) -> None:
        self.files: FileMap = {
            "run.json": json_document(HEAD | {"type": "run", "run_id": RUN_ID} | members)[0]
        }
        self.made: dict[str, Checkpoint] = {}

    def launch(
        self,
        number: int,
        *,
        of: str | None = None,
        by: str = "lineage",
        name: str = "",
        **members: Any,
    ) -> Run:
        """Add the record of a launch with the checkpoint `of` to resume from."""
        digest = self.made[of].digest.hex() if of in self.made else ""
        document = HEAD | {
            "type": "launch", "run_id": RUN_ID, "launch": number, "nonce": f"{number:032x}",
            "chosen_by": by,
            "resume_from": {"name": of, "digest": f"blake3:{digest}"} if of else None,
        }  # fmt: skip
        self.files[f"launches/{name or f'{number:04d}'}.json"] = json_document(document | members)[
            0
        ]
        return self

    def save(
        self, step: int, launch: int, *, name: str = "", register: bytes | None = None,
        run_id: str = RUN_ID, edit: Edit | None = None,
    ) -> Run:  # fmt: skip
        """Add a checkpoint with a tensor of the step."""
        name = name or checkpoint_name(step, launch)
        tensor = Tensor(name="w", dtype="int64", shape=(), content=step.to_bytes(8, "little"))
        made = build(
            Plan(
                tensors=[tensor],
                run_id=run_id,
                launch=launch,
                step=step,
                attempt=f"{step:016x}",
                nonce=f"{launch:032x}",
            )
        )
        made = made if edit is None else made.edited(edit)
        self.made[name] = made
        files = made.seal() | ({} if register is None else {"manifest.json": register})
        self.files |= {f"{name}/{path}": content for path, content in files.items()}
        return self

    def drop(self, path: str) -> Run:
        """Remove a file."""
        del self.files[path]
        return self


def page() -> Page:
    """Return the cases of runs."""
    made = Page("run")
    _valid(made)
    _valid_names(made)
    _valid_more(made)
    _identity(made)
    _records(made)
    _places(made)
    _orders(made)
    _lineage(made)
    return made


def record(kind: str, step: int, launch: int, /, **members: Any) -> bytes:
    """Return an abort record or a tombstone."""
    return json_document(
        HEAD | {"type": kind, "run_id": RUN_ID, "launch": launch, "step": step} | members
    )[0]


def simple() -> Run:
    """Return a run of a launch and two checkpoints."""
    return Run().launch(1).save(400, 1).save(800, 1)


def _accept(made: Page, slug: str, run: Run, comes: str, clauses: str, says: str, why: str) -> None:  # noqa: PLR0917 - a row of a table of cases
    made.accept(
        slug,
        run.made[comes],
        clauses,
        says,
        why=why,
        bug="WRONG_RUN",
        place=comes,
        beside=run.files,
        path="",
    )


def _valid(made: Page) -> None:
    greatest = "with the greatest step of all, a run that was rolled back would jump forward again"
    _accept(
        made,
        "simple",
        simple(),
        checkpoint_name(800, 1),
        "RUN-001 RUN-002 RUN-003 RUN-005 RUN-006 RUN-008 RUN-015 RUN-020",
        "one launch with two checkpoints",
        "the newest is what a run goes on from",
    )
    rolled = simple().launch(2, of=checkpoint_name(800, 1)).save(1200, 2)
    rolled.launch(3, of=checkpoint_name(400, 1), by="hand").save(600, 3)
    _accept(
        made,
        "rolled-back",
        rolled,
        checkpoint_name(600, 3),
        "RUN-006",
        "launch 3 was rolled back by hand, and has saved step 600",
        greatest,
    )
    bare = (
        simple()
        .launch(2, of=checkpoint_name(800, 1))
        .save(1200, 2)
        .launch(3, of=checkpoint_name(400, 1), by="hand")
    )
    _accept(
        made,
        "rolled-back-unsaved",
        bare,
        checkpoint_name(400, 1),
        "RUN-006",
        "launch 3 was rolled back by hand, and has saved nothing",
        greatest,
    )
    numbers = Run().launch(1).save(99_999_999, 1).save(100_000_000, 1)
    _accept(
        made,
        "numbers",
        numbers,
        checkpoint_name(100_000_000, 1),
        "RUN-009 RUN-008",
        "steps of eight and of nine digits",
        "as text, the smaller one is the greater",
    )
    later = (
        Run()
        .launch(9999)
        .save(400, 9999)
        .launch(10_000, of=checkpoint_name(400, 9999))
        .save(800, 10_000)
    )
    _accept(
        made,
        "launch-of-five-digits",
        later,
        checkpoint_name(800, 10_000),
        "RUN-009 RUN-005 RUN-008",
        "launch 10000 goes on from launch 9999",
        "as text, the older one is the newer",
    )


def _valid_names(made: Page) -> None:
    """Add names and numbers."""
    aborted = simple().save(1200, 1, register=record("abort", 1200, 1, reason="given up"))
    _accept(
        made,
        "aborted",
        aborted,
        checkpoint_name(800, 1),
        "RUN-006 MAN-001",
        "the greatest step was aborted",
        "an attempt that was given up is no checkpoint",
    )
    unfinished = simple().save(1200, 1).drop(f"{checkpoint_name(1200, 1)}/manifest.json")
    _accept(
        made,
        "unfinished",
        unfinished,
        checkpoint_name(800, 1),
        "RUN-006 MAN-001",
        "the greatest step has no register",
        "files are no checkpoint",
    )
    names = (
        simple()
        .save(1300, 1, name="latest")
        .save(1400, 1, name="step-1400-l1")
        .save(1500, 1, name="step-000001500-l0001")
    )
    names.files |= {
        "notes.txt": b"mine",
        "savers/0001-00000-0123456789abcdef": b"",
        "launches/notes.txt": b"",
    }
    _accept(
        made,
        "other-names",
        names,
        checkpoint_name(800, 1),
        "RUN-008 CKP-005 RUN-017",
        "whole checkpoints under names of another form",
        "only names of the one form are looked at",
    )


def _valid_more(made: Page) -> None:
    """Add further runs."""
    greatest = "with the greatest step of all, a run that was rolled back would jump forward again"
    fell = (
        Run()
        .launch(1)
        .save(400, 1)
        .save(800, 1)
        .launch(2, of=checkpoint_name(400, 1), by="fallback")
        .save(500, 2)
    )
    _accept(
        made,
        "fallback",
        fell,
        checkpoint_name(500, 2),
        "RUN-007 RUN-006",
        "launch 2 passed over a checkpoint that was damaged, and has saved step 500",
        greatest,
    )
    _accept(
        made,
        "writer-features",
        Run(features={"reader": [], "writer": ["references"]}).launch(1).save(400, 1),
        checkpoint_name(400, 1),
        "VER-002 VER-003",
        "a feature that only writers and cleaners must know",
        "a reader isn't concerned with it",
    )


def _reject(  # noqa: PLR0917 - a row of a table of cases
    made: Page, slug: str, run: Run, clauses: str, error: str, says: str, *, why: str,
    path: str = "", bug: str = "WRONG_RUN",
    phase: str = "open", of: str = "simple",
) -> None:  # fmt: skip
    made.reject(
        slug,
        of,
        None,
        clauses,
        error,
        says,
        why=why,
        bug=bug,
        phase=phase,
        files=run.files,
        path=path,
        features=[],
    )


def _identity(made: Page) -> None:
    why = "two jobs must not each found a run in one place"
    for slug, clauses, error, says, members in (
        ("run-id-upper-case", "RUN-001", "DOC_SCHEMA", "run_id is in upper case",
         {"run_id": RUN_ID.upper()}),
        ("run-id-short", "RUN-001", "DOC_SCHEMA", "run_id has 31 digits", {"run_id": RUN_ID[1:]}),
        ("run-member", "RUN-001 DOC-011", "DOC_SCHEMA", "a member owner", {"owner": "me"}),
        ("run-version", "DOC-010 VER-001", "VERSION_UNSUPPORTED", "format_version is 9.0",
         {"format_version": "9.0"}),
        ("run-feature", "DOC-010 VER-002", "FEATURE_UNSUPPORTED", "it needs the feature packs",
         {"features": {"reader": ["packs"], "writer": []}}),
        ("run-features-65", "VER-008", "DOC_SCHEMA", "65 features",
         {"features": {"reader": [], "writer": [f"a.b{number}" for number in range(65)]}}),
    ):  # fmt: skip
        _reject(
            made,
            slug,
            Run(**members).launch(1).save(400, 1),
            clauses,
            error,
            f"in run.json, {says}",
            why=why,
        )
    run = simple()
    flip("run.json", 90)(run.files)
    _reject(
        made,
        "run-bit",
        run,
        "DOC-009",
        "DOC_DIGEST DOC_SCHEMA DOC_SYNTAX",
        "one bit of run.json is another",
        why=why,
        bug="DAMAGE_UNSEEN",
    )


def _records(made: Page) -> None:
    why = "a record that can't be read, or isn't of this run, decides nothing"
    first = checkpoint_name(400, 1)
    for slug, clauses, error, says, members in (
        ("launch-number", "RUN-005", "RUN_MISMATCH", "launch is 3, in 0002.json", {"launch": 3}),
        ("launch-of-another-run", "RUN-003", "RUN_MISMATCH", "run_id is another's",
         {"run_id": OTHER_RUN}),
        ("launch-nonce", "RUN-002", "DOC_SCHEMA", "nonce has four digits", {"nonce": "0011"}),
        ("launch-chosen-by", "RUN-007", "DOC_SCHEMA", "chosen_by is chance",
         {"chosen_by": "chance"}),
        ("launch-without-digest", "RUN-006", "DOC_SCHEMA", "resume_from has no digest",
         {"resume_from": {"name": first}}),
        ("launch-name-of-another-form", "RUN-008", "DOC_SCHEMA",
         "resume_from is step-000000400-l0001, of nine digits",
         {"resume_from": {"name": "step-000000400-l0001", "digest": "blake3:" + "0" * 64}}),
        ("launch-name-of-five-digits", "RUN-008", "DOC_SCHEMA",
         "resume_from is step-00000400-l00001",
         {"resume_from": {"name": "step-00000400-l00001", "digest": "blake3:" + "0" * 64}}),
        ("launch-elsewhere", "RUN-006", "DOC_SCHEMA", "resume_from is ../elsewhere",
         {"resume_from": {"name": "../elsewhere", "digest": "blake3:" + "0" * 64}}),
    ):  # fmt: skip
        run = Run().launch(1).save(400, 1).launch(2, of=first, **members)
        _reject(made, slug, run, clauses, error, f"in launches/0002.json, {says}", why=why)
    cut = Run().launch(1).save(400, 1).launch(2, of=first)
    cut.files["launches/0002.json"] = cut.files["launches/0002.json"][:-1]
    _reject(
        made,
        "launch-cut",
        cut,
        "DOC-003 RUN-006",
        "DOC_SYNTAX",
        "launches/0002.json lacks its last byte",
        why=why,
    )


def _places(made: Page) -> None:
    why = "a directory that was copied over another would pass for it"
    name = checkpoint_name(900, 1)
    for slug, says, path in (
        ("step-of-another", "the run is opened", ""),
        ("step-of-another-opened", "it is opened", name),
    ):
        _reject(
            made,
            slug,
            simple().save(800, 1, name=name),
            "MAN-002 RUN-008",
            "STEP_MISMATCH",
            f"the checkpoint of step 800 lies under the name of step 900, and {says}",
            why=why,
            path=path,
        )
    other = (
        simple().save(800, 1, name=checkpoint_name(800, 2)).launch(2, of=checkpoint_name(400, 1))
    )
    _reject(
        made,
        "launch-of-another",
        other,
        "MAN-002 RUN-008",
        "STEP_MISMATCH",
        "a checkpoint of launch 1 lies under the name of launch 2",
        why=why,
    )
    foreign = simple().save(1200, 1, run_id=OTHER_RUN)
    for slug, says, path in (
        ("foreign", "the run is opened", ""),
        ("foreign-opened", "it is opened", checkpoint_name(1200, 1)),
    ):
        _reject(
            made,
            slug,
            foreign,
            "RUN-003",
            "RUN_MISMATCH",
            f"the checkpoint of step 1200 is of another run, and {says}",
            why="weights of another run are weights of another model",
            path=path,
        )


def _orders(made: Page) -> None:
    """Add checkpoints with several faults at once, and checkpoints with a broken `run.json`."""
    why = (
        "a reader that looks in another order says another code, and nobody can tell what is"
        " wrong first"
    )
    name = checkpoint_name(900, 1)
    other = set_at("index", "nonce", value="f" * 32)
    moved = simple().save(800, 1, name=name, run_id=OTHER_RUN, edit=other)
    foreign = simple().save(1200, 1, run_id=OTHER_RUN, edit=other)
    for slug, run, clauses, error, says, path in (
        ("order-step-first", moved, "MAN-002 RUN-003 IDX-001", "STEP_MISMATCH",
         ("a checkpoint of step 800 and of another run, whose index has another nonce, lies under"
         " the name of step 900"),
         name),
        ("order-run-second", foreign, "RUN-003 IDX-001", "RUN_MISMATCH",
         "a checkpoint is of another run, and its index has another nonce",
         checkpoint_name(1200, 1)),
    ):  # fmt: skip
        _reject(
            made,
            slug,
            run,
            f"{clauses} VER-004",
            error,
            f"{says}, and it is opened",
            why=why,
            path=path,
        )
    made.reject(
        "order-digest-third", "run/valid/simple", None, "MAN-002 OPN-001 VER-004", "STEP_MISMATCH",
        ("the checkpoint of step 800 lies under the name of step 900, and is opened with another"
        " digest"),
        why=why, path=name, files=simple().save(800, 1, name=name).files,
        request={"digest": NOBODY},
    )  # fmt: skip
    retired = record("tombstone", 800, 1, manifest_digest=NOBODY)
    _reject(
        made, "order-retired-first", simple().save(900, 1, register=retired),
        "MAN-001 MAN-002 VER-004", "CHECKPOINT_RETIRED",
        ("the register of step 900 holds a tombstone of step 800, and the checkpoint is opened by"
        " itself"),
        why=why, path=name,
    )  # fmt: skip
    last = checkpoint_name(800, 1)
    garbage = simple()
    garbage.files["run.json"] = b"x"
    made.accept(
        "damaged-run-json-opened", garbage.made[last], "MAN-002 RUN-008",
        "run.json can't be read, and a checkpoint is opened by itself",
        why="the damage isn't the checkpoint's", bug="WRONG_RUN", place=last, beside=garbage.files,
    )  # fmt: skip
    renamed = simple().save(800, 1, name=name)
    renamed.files["run.json"] = b"x"
    _reject(
        made, "damaged-run-json-step-of-another", renamed, "MAN-002 RUN-008", "STEP_MISMATCH",
        ("run.json can't be read, and the checkpoint of step 800, under the name of step 900, is"
        " opened by itself"),
        why="a directory that was copied over another would pass for it", path=name,
    )  # fmt: skip


def _lineage(made: Page) -> None:
    why = (
        "without the record, a run would begin anew, or go on from what a rollback had left behind"
    )
    _reject(
        made,
        "without-run-json",
        simple().drop("run.json"),
        "RUN-015",
        "FILE_MISSING NOT_COMMITTED",
        "launches and checkpoints, and no run.json",
        why=why,
    )
    _reject(
        made,
        "launch-without-record",
        simple().save(1200, 2),
        "RUN-015",
        "FILE_MISSING",
        "a checkpoint of launch 2, which has no record",
        why=why,
    )
    _reject(
        made,
        "no-checkpoint",
        Run().launch(1),
        "MAN-001 RUN-020",
        "NOT_COMMITTED",
        "a run without any checkpoint",
        why="there is nothing to open",
    )
    damaged = Run().launch(1).save(400, 1)
    shard = next(path for path in damaged.files if path.endswith(".safetensors"))
    flip(shard, -1)(damaged.files)
    _reject(
        made,
        "none-whole",
        damaged,
        "RUN-020 OPN-006",
        "BLOCK_DIGEST",
        "the only checkpoint has a damaged block",
        why="who opens a run leaves no record, so it opens the first candidate or none",
        phase="read",
        bug="DAMAGE_UNSEEN",
    )
    lost = Run().launch(1).save(400, 1).launch(2, of=checkpoint_name(400, 1), by="hand")
    for path in [path for path in lost.files if path.startswith("step-")]:
        lost.drop(path)
    _reject(
        made,
        "resume-from-lost",
        lost,
        "RUN-022 RUN-020",
        "NOT_COMMITTED",
        "what the newest launch names isn't there",
        why="silently beginning at step 0 costs a run",
        bug="SILENT_DATA_LOSS",
    )
