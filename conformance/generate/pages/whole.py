"""The conditions of a whole checkpoint, point by point; spec/validate/35-whole.md.

Each fault is requested twice: by a validation of the whole checkpoint, and by a launch, which has
to pass over the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from blake3 import blake3

from conformance.generate.bases import RUN_ID, flip, pop_at, put_file, set_at
from conformance.generate.cases import FileMap, Page
from conformance.generate.model import Checkpoint, Edit, build, checkpoint_name
from conformance.generate.pages.context import cursor, tree_of
from conformance.generate.pages.run import Run
from conformance.generate.plans import Leaf, Piece, Plan, Stream, Tensor, whole
from conformance.generate.wire import Packed, Strings, msgpack

__all__ = ["page"]

ONE_LIST = "a launch that takes it for whole, and one that passes it over, make two runs of one"
OLD, NEW = (checkpoint_name(step, 1) for step in (400, 800))
LOADER = {"kind": "ckptfmt.foreign_loader", "v": 1, "lib": "megatron", "version": "", "per": "run",
          "worker_count": 2,
          "state": {"consumed_train_samples": 640}}  # fmt: skip
WEIGHTS = "weights-0000000000000800-00000.safetensors"


def page() -> Page:
    """Return the cases of whole checkpoints."""
    made = Page("whole")
    _accept(made)
    for fault in _FAULTS:
        _refuse(made, fault)
    _unknown(made)
    return made


def _newest() -> Checkpoint:
    """Return a checkpoint of step 800 from two writers, with content for each point of the list."""
    halves = [
        Piece(writer=0, begin=(0, 0), shape=(3, 4)),
        Piece(writer=1, begin=(3, 0), shape=(3, 4)),
    ]
    copy = Piece(writer=1, begin=(0,), shape=(3,), written=False)
    both = (0, 1)
    plan = Plan(
        tensors=[
            Tensor(name="embedding", shape=(6, 4), aliases=("head",), pieces=halves),
            Tensor(name="bias", dtype="int16", shape=(3,), pieces=[whole((3,)), copy]),
            Tensor(name="moment", shape=(2,), field="optimizer", pieces=[whole((2,), 1)]),
        ],
        leaves=[
            Leaf(field="config", value=["d", "width", 3], writers=both),
            Leaf(
                field="optimizer",
                name="state",
                value=["d", "m", ["T", "moment", "torch"]],
                writers=both,
            ),
            Leaf(field="data", value=tree_of(cursor()), writers=both),
            Leaf(field="data", name="other", value=tree_of(LOADER), writers=both),
        ],
        streams=[
            Stream(name="noise", state=["t", 1]),
            Stream(name="noise", state=["t", 2], scope="lw/1", writers=(1,)),
        ],
        writer_count=2,
        run_id=RUN_ID,
        launch=1,
        step=800,
        attempt=f"{800:016d}",
    )
    return build(plan)


def _run(newest: Checkpoint, after: Callable[[FileMap], object] | None = None) -> Run:
    """Return a run of two checkpoints, of which `newest` is the newer."""
    run = Run().launch(1).save(400, 1)
    run.made[NEW] = newest
    files = newest.seal()
    if after is not None:
        after(files)
    run.files |= {f"{NEW}/{path}": content for path, content in files.items()}
    return run


def _resumes(made: Page, slug: str, run: Run, resume: str, clauses: str, says: str) -> None:  # noqa: PLR0917 - a row of a table of cases
    passed = [NEW] if resume == OLD else []
    made.ask(
        f"launch-{slug}", "", "open", {"launch": True}, clauses, says, why=ONE_LIST,
        files=run.files, bug="WRONG_RUN", features=["launch"],
        result={
            "launch": {"resume_from": resume, "chosen_by": "fallback" if passed else "lineage",
                       "passed_over": passed}
        },
    )  # fmt: skip


def _accept(made: Page) -> None:
    newest = _newest()
    old = Run().launch(1).save(400, 1).files
    clauses = "CKP-008 RUN-006 RUN-012"
    says = "two writers, with something for each point of the list"
    made.accept("newest", newest, "CKP-008 OPN-009", says, why="it is what the others differ from",
                place=NEW,
                beside=old)  # fmt: skip
    _resumes(made, "newest", _run(newest), NEW, clauses, says)
    litter = _run(newest)
    litter.files |= {
        f"{NEW}/notes.txt": b"mine",
        f"{NEW}/weights-ffffffffffffffff-00000.safetensors": b"left",
        f"{NEW}/parts/ffffffffffffffff-00000.msgpack": b"left",
        f"labels/{NEW}-0001.json": b"{}",
        "ledger/0001.json": b"{}",
    }
    says = (
        "files that no document names, and a record of labels and a ledger entry that can't be read"
    )
    _resumes(made, "litter", litter, NEW, clauses, f"beside it are {says}")
    other = newest.edited(_stream(["l", ["f", bytes(8)]]))
    _resumes(
        made,
        "stream-of-no-generator",
        _run(other),
        NEW,
        clauses,
        "no generator has a state like that of a stream",
    )
    elsewhere = cursor()
    elsewhere["order"]["vector_check"]["id"] += 1
    elsewhere = newest.edited(_data(elsewhere))
    _resumes(
        made,
        "other-order",
        _run(elsewhere),
        NEW,
        clauses,
        "the cursor names another sample than the order gives",
    )


def _refuse(made: Page, fault: _Fault) -> None:
    newest = _newest()
    damaged = newest if fault.edit is None else newest.edited(fault.edit)
    run = _run(damaged, fault.after)
    made.reject(
        fault.slug, "whole/valid/newest", None, f"{fault.clauses} CKP-008 OPN-009", fault.error,
        fault.says, why=ONE_LIST, phase=fault.phase, path=NEW, files=run.files,
    )  # fmt: skip
    _resumes(
        made,
        fault.slug,
        run,
        OLD,
        f"{fault.clauses} CKP-008 RUN-006 RUN-012",
        f"of the newest, {fault.says}",
    )


def _unknown(made: Page) -> None:
    """Add candidates of a later version, or with an unknown feature."""
    newest = _newest()
    later = cursor() | {"v": 2}
    for slug, edit, error, says in (
        ("feature", set_at("manifest", "features", "reader", value=["nobody.knows"]),
         "FEATURE_UNSUPPORTED", "its manifest needs a feature that no reader knows"),
        ("version", _of_both("format_version", "9.0"), "VERSION_UNSUPPORTED",
         "it is of version 9.0"),
        ("cursor", _data(later), "VERSION_UNSUPPORTED", "its cursor is of version 2"),
    ):  # fmt: skip
        made.reject(
            f"launch-unknown-{slug}", "whole/valid/launch-newest", None, "VER-010 RUN-006", error,
            f"of the newest checkpoint, {says}", why=("nobody found it damaged, and a newer"
            " program goes on from it"),
            bug="WRONG_RUN", files=_run(newest.edited(edit)).files, request={"launch": True},
            features=["launch"],
        )  # fmt: skip
    says = "of the newest checkpoint, the cursor is of version 2, and a block is damaged"
    _resumes(made, "unknown-and-damaged", _run(newest.edited(_data(later)), flip(WEIGHTS, -1)), OLD,
             "VER-010 CKP-008",
             says)  # fmt: skip
    beside = (
        Run()
        .launch(1)
        .save(400, 1, edit=set_at("manifest", "features", "reader", value=["nobody.knows"]))
    )
    beside.save(800, 1)
    _resumes(made, "unknown-behind", beside, NEW, "VER-010 RUN-006",
             "the older of two checkpoints needs a feature that no reader knows")  # fmt: skip


# --- the faults, in the order of the list ---------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fault:
    """A fault that keeps a checkpoint from being whole: an edit before or after signing."""

    slug: str
    clauses: str
    error: str
    says: str
    phase: str = "open"
    edit: Edit | None = None
    after: Callable[[FileMap], object] | None = None


def _leaf(name: str, value: Any) -> Edit:
    """Return an edit of a leaf's value in both parts."""

    def edit(c: Checkpoint) -> None:
        for part in c.parts:
            part["leaves"]["value"][list(part["leaves"]["name"]).index(name)] = msgpack(value)

    return edit


def _data(value: dict[str, Any]) -> Edit:
    """Return an edit of the cursor in both parts."""

    def edit(c: Checkpoint) -> None:
        for part in c.parts:
            rows = zip(part["leaves"]["field"], part["leaves"]["name"], strict=True)
            part["leaves"]["value"][list(rows).index((3, ""))] = msgpack(tree_of(value))

    return edit


def _stream(value: Any) -> Edit:
    """Return an edit of a stream's state."""

    def edit(c: Checkpoint) -> None:
        c.parts[0]["streams"]["state"][0] = msgpack(value)

    return edit


def _reasons(reason: str) -> Edit:
    """Return an edit of the reason in index and manifest."""

    def edit(c: Checkpoint) -> None:
        c.index["absent"]["provenance"] = reason
        c.manifest["fields"]["provenance"]["reason"] = reason

    return edit


def _present(c: Checkpoint) -> None:
    """List a field as present in index and manifest although every part lacks the field."""
    del c.index["absent"]["provenance"]
    counts = ("tensor_count", "nbytes", "stream_count", "leaf_count")
    c.manifest["fields"]["provenance"] = {"state": "present"} | dict.fromkeys(counts, 0)


def _header(old: bytes, new: bytes) -> Edit:
    """Return an edit of a shard's header, with a matching digest."""

    def edit(c: Checkpoint) -> None:
        content = c.files[WEIGHTS]
        if content.count(old) != 1 or len(old) != len(new):
            raise ValueError(f"{old!r} can't be replaced by {new!r}")
        c.files[WEIGHTS] = content.replace(old, new)
        files = c.parts[0]["files"]
        row = list(files["name"]).index(WEIGHTS)
        digest = blake3(c.files[WEIGHTS][: files["header_nbytes"][row]]).digest()
        files["header_digest"] = (
            files["header_digest"][: 32 * row] + digest + files["header_digest"][32 * row + 32 :]
        )

    return edit


def _longer(files: FileMap) -> None:
    files[WEIGHTS] += b"\0"


def _without_alias(c: Checkpoint) -> None:
    c.index["aliases"] = {"tensor": Packed(), "name": Strings()}


def _of_both(key: str, value: Any) -> Edit:
    """Return an edit of a value in all documents."""

    def edit(c: Checkpoint) -> None:
        for document in (c.manifest, c.index, *c.parts):
            document[key] = value

    return edit


def _flip_padding(files: FileMap) -> None:
    """Flip a bit of the last byte before the elements."""
    flip(WEIGHTS, 7 + int.from_bytes(files[WEIGHTS][:8], "little"))(files)


_FAULTS = (
    _Fault(slug="register-member", clauses="DOC-011", error="DOC_SCHEMA",
           says="the manifest has a member too many", edit=set_at("manifest", "extra", value=1)),
    _Fault(slug="register-of-another-step", clauses="MAN-002", error="STEP_MISMATCH",
           says="it is of step 900, and its name says 800", edit=_of_both("step", 900)),
    _Fault(slug="index-missing", clauses="CKP-004", error="FILE_MISSING",
           says="the index isn't there", edit=lambda c: put_file(c.index_name, None)(c)),
    _Fault(slug="index-summary", clauses="MAN-006", error="MANIFEST_SUMMARY",
           says="the manifest counts a tensor more than the index has",
           edit=set_at("manifest", "fields", "weights", "tensor_count", value=3)),
    _Fault(slug="part-missing", clauses="CKP-004", error="FILE_MISSING",
           says="the part of writer 1 isn't there",
           edit=lambda c: put_file(c.part_name(1), None)(c)),
    _Fault(slug="part-without-stream", clauses="OPN-004 IDX-001", error="DOC_MISMATCH",
           says="the index names writer 0 for a stream that writer 1 has",
           edit=set_at("index", "streams", "part", 1, value=0)),
    _Fault(slug="absent-for-another-reason", clauses="CMT-017 IDX-001", error="DOC_MISMATCH",
           phase="validate",
           says="index and manifest give another reason than the parts why provenance is absent",
           edit=_reasons("nobody knows")),
    _Fault(slug="absent-in-one-part", clauses="CMT-017 IDX-001", error="DOC_MISMATCH",
           phase="validate",
           says=("index and manifest say that provenance is absent, for which writer 1 gives no"
           " reason"),
           edit=pop_at("part/1", "absent", "provenance")),
    _Fault(slug="absent-in-all-parts", clauses="CMT-017 IDX-001", error="DOC_MISMATCH",
           phase="validate",
           says=("index and manifest say that provenance is present, and both parts why it is"
           " absent"), edit=_present),
    _Fault(slug="alias-left-out", clauses="CMT-011 IDX-001", error="DOC_MISMATCH", phase="validate",
           says="the index leaves out an alias that both parts have", edit=_without_alias),
    _Fault(slug="leaf-of-the-higher", clauses="CMT-014 IDX-001", error="DOC_MISMATCH",
           phase="validate", says="the index names writer 1 for a leaf that both writers have",
           edit=set_at("index", "leaves", "part", 0, value=1)),
    _Fault(slug="leaf-diverged", clauses="CMT-014", error="LEAF_DIVERGED", phase="validate",
           says="the two writers have other values of one leaf",
           edit=lambda c: c.parts[1]["leaves"]["value"].__setitem__(
               list(c.parts[1]["leaves"]["name"]).index("state"), msgpack(["d", "m", None]))),
    _Fault(slug="shard-missing", clauses="CKP-004", error="FILE_MISSING", phase="read",
           says="a shard isn't there", after=lambda files: files.pop(WEIGHTS)),
    _Fault(slug="shard-longer", clauses="CKP-003", error="FILE_NBYTES", phase="read",
           says="a shard has a byte too many", after=_longer),
    _Fault(slug="header-damaged", clauses="PRT-008", error="HEADER_DIGEST", phase="read",
           says="a bit of a shard's padding is flipped", after=_flip_padding),
    _Fault(slug="header-of-another-key", clauses="SHD-010", error="SHARD_MISMATCH",
           phase="validate", says="a shard's header calls a tensor otherwise than the part",
           edit=_header(b'"bias"', b'"base"')),
    _Fault(slug="header-of-another-dtype", clauses="SHD-010", error="SHARD_MISMATCH",
           phase="validate", says="a shard's header gives a tensor another dtype than the part",
           edit=_header(b'"I16"', b'"U16"')),
    _Fault(slug="block-damaged", clauses="OPN-006", error="BLOCK_DIGEST", phase="read",
           says="a bit of a block is flipped", after=flip(WEIGHTS, -1)),
    _Fault(slug="leaf-no-tree", clauses="TRE-001", error="TREE_TAG", phase="read",
           says="a leaf is no tree", edit=_leaf("state", ["x"])),
    _Fault(slug="stream-no-tree", clauses="TRE-001", error="TREE_TAG", phase="read",
           says="the state of a stream is no tree", edit=_stream(["x"])),
    _Fault(slug="leaf-refers-to-nothing", clauses="TRE-004", error="TREE_REFERENCE",
           phase="validate", says="a leaf refers to a tensor that isn't there",
           edit=_leaf("state", ["d", "m", ["T", "w", "torch"]])),
    _Fault(slug="cursor-form", clauses="CUR-002", error="CURSOR_FORM", phase="validate",
           says="the cursor has a member too many", edit=_data(cursor() | {"world_size": 8})),
    _Fault(slug="loader-form", clauses="CUR-022", error="CURSOR_FORM", phase="validate",
           says="another loader's position is of no worker",
           edit=_leaf("other", tree_of(LOADER | {"worker_count": 0}))),
)  # fmt: skip
