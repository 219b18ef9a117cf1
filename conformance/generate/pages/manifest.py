"""The register and its content; spec/core/30-manifest.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from conformance.generate.bases import RUN_ID, pop_at, put_file, replace, set_at, small, two_writers
from conformance.generate.cases import Page
from conformance.generate.model import Checkpoint, Edit, build
from conformance.generate.plans import Plan, Tensor
from conformance.generate.wire import FORMAT_VERSION, json_document

__all__ = ["page"]

NAME = "step-00000003-l0001"
OTHER = "blake3:" + "69" * 32


def page() -> Page:
    """Return the cases of the register."""
    made = Page("manifest")
    made.accept(
        "small",
        small(),
        "MAN-001 MAN-003 MAN-005 MAN-006 MAN-007 MAN-008 CKP-001 CKP-007",
        "outside of a run: run_id and launch are null, four fields absent",
        why="it is what the invalid registers differ from",
    )
    made.accept(
        "of-a-run",
        small(run_id=RUN_ID, launch=1),
        "MAN-002 MAN-008",
        "with run_id and launch, opened alone",
        why="a checkpoint that was copied out of its run is whole",
        path=NAME,
        place=NAME,
    )
    made.accept(
        "two-writers",
        two_writers(),
        "MAN-006 MAN-001 CKP-005",
        "tensors of two fields, aliases and scopes, which the summaries count row by row",
        why="a summary that counts aliases or writers twice isn't this one",
        after=lambda files: files.update({".tmp-left": b"", "notes.txt": b"mine", "parts/x": b""}),
    )
    made.accept(
        "empty-fields",
        Plan(tensors=[Tensor(name="w", shape=(0,))], empty=("rng", "data")),
        "MAN-003",
        "rng and data are present, and nothing is in them",
        why="present and empty is something else than absent",
    )
    _labels(made)
    _registers(made)
    _fields(made)
    _profile(made)
    _summaries(made)
    _index(made)
    _entry(made)
    return made


def _labelled(**members: Any) -> Edit:
    """Return an edit that sets metrics and tags, or sets `members` on the manifest only."""

    def edit(made: Checkpoint) -> None:
        for document in (made.part, made.manifest):
            document["features"]["reader"] = sorted([*document["features"]["reader"], "labels"])
            document["metrics"] = {"eval_loss": "2.5", "accuracy/top 1": "-1.25e-07"}
            document["tags"] = ["candidate", "v2"]
        made.manifest.update(members)

    return edit


def _labels(made: Page) -> None:
    """Add metrics and tags."""
    clauses = "MAN-010 MAN-011 MAN-005 PRT-014 CMT-039 DEL-001"
    made.accept(
        "labels",
        small(),
        clauses,
        "two metrics and two tags, behind the feature labels",
        why="they are what a run is searched by, and the profile is still full",
        edit=_labelled(),
    )
    made.accept(
        "labels-of-writer-0",
        two_writers(),
        clauses,
        "two writers; the part of writer 0 has metrics and tags, that of writer 1 has none",
        why="an evaluation often runs on one process alone",
        edit=_labelled(),
    )

    def only(key: str, value: Any) -> Edit:
        def edit(made: Checkpoint) -> None:
            for document in (made.part, made.manifest):
                document.update(metrics={}, tags=[])
                document[key] = value

        return edit

    many = {f"metric {number}": "1" for number in range(64)}
    numbers = {
        f"n{at}": text
        for at, text in enumerate(("0", "-0", "1e308", "5e-324", "0.1", "17976931348623157e+292"))
    }
    for slug, says, key, value in (
        (
            "metric-alone",
            "one metric, and no tag",
            "metrics",
            {"\U0001f642" * 100: "0.30000000000000004"},
        ),
        ("metric-numbers", "numbers in all spellings that there are", "metrics", numbers),
        ("metrics-64", "as many metrics as there may be", "metrics", many),
        (
            "tags-32",
            "as many tags as there may be, and no metric",
            "tags",
            [f"tag {number:02}" for number in range(32)],
        ),
    ):
        made.accept(
            slug,
            made.bases["labels"],
            "MAN-010 MAN-011",
            says,
            why="it is within the limits",
            edit=only(key, value),
        )
    _bad_labels(made)


def _bad_labels(made: Page) -> None:
    """Add metrics and tags forbidden in a manifest."""

    def reject(
        slug: str,
        clauses: str,
        says: str,
        edit: Edit,
        *,
        error: str = "DOC_SCHEMA",
        of: str = "labels",
        phase: str = "open",
    ) -> None:
        why = "what one reader takes for another number, or passes over, another one decides by"
        made.reject(slug, of, edit, clauses, error, says, why=why, bug="AMBIGUITY", phase=phase)

    for slug, says, members in (
        (
            "labels-unlisted",
            "metrics and tags without the feature",
            {"features": {"reader": [], "writer": []}},
        ),
        (
            "labels-empty",
            "the feature, and neither a metric nor a tag",
            {"metrics": {}, "tags": []},
        ),
    ):
        reject(slug, "MAN-010", says, _both(members))
    for key in ("metrics", "tags"):
        reject(
            f"labels-without-{key}",
            "MAN-010",
            f"the feature without {key}",
            pop_at("manifest", key),
        )
    for slug, value in (
        ("nan", "NaN"), ("nan-small", "nan"), ("infinity", "Infinity"), ("overflow", "1e309"),
        ("empty", ""),
        ("number", 2), ("null", None), ("plus", "+1"), ("hex", "0x1p3"), ("comma", "2,5"),
        ("point-last", "2."),
        ("point-first", ".5"), ("space", " 2"), ("capital", "1E3"), ("underscore", "1_000"),
        ("zeros", "007"), ("long", "0." + "1" * 31), ("digits", "\u0661"),
    ):  # fmt: skip
        says = f"the value of a metric is {value!r}"
        reject(
            f"metric-{slug}",
            "MAN-011",
            says,
            set_at("manifest", "metrics", "eval_loss", value=value),
        )
    for slug, says, key, value in (
        ("metric-name-empty", "a metric without a name", "metrics", {"": "1"}),
        ("metric-name-101", "the name of a metric has 101 characters", "metrics", {"x" * 101: "1"}),
        ("metrics-65", "65 metrics", "metrics", {f"m{number}": "1" for number in range(65)}),
        ("metrics-list", "metrics are a list", "metrics", ["eval_loss"]),
        ("tag-empty", "an empty tag", "tags", [""]),
        ("tag-101", "a tag of 101 characters", "tags", ["x" * 101]),
        ("tag-number", "a tag that is a number", "tags", [1]),
        ("tags-33", "33 tags", "tags", [f"t{number:02}" for number in range(33)]),
        ("tags-twice", "a tag twice", "tags", ["v2", "v2"]),
        ("tags-unsorted", "tags in another order", "tags", ["v2", "candidate"]),
        ("tags-map", "tags are a map", "tags", {"v2": "1"}),
    ):
        reject(slug, "MAN-011", says, set_at("manifest", key, value=value))
    reject(
        "tag-not-normal",
        "MAN-011 DOC-006",
        "a tag that isn't in normal form C",
        set_at("manifest", "tags", value=["e\u0301"]),
        error="DOC_STRING",
    )
    reject(
        "metric-fraction",
        "MAN-011 DOC-005",
        "the value of a metric is a number with a fraction",
        _fraction,
        error="DOC_NUMBER",
    )
    _bad_parts(reject)


def _both(members: dict[str, Any]) -> Edit:
    def edit(made: Checkpoint) -> None:
        made.manifest.update(members)

    return edit


def _fraction(made: Checkpoint) -> None:
    made.bend("manifest", inner=replace(b'"eval_loss":"2.5"', b'"eval_loss":2.5'))


def _bad_parts(reject: Callable[..., None]) -> None:
    """Add parts with invalid metrics and tags, or with metrics and tags unlike the manifest's."""

    def of_both(made: Checkpoint) -> None:
        made.parts[1].update(metrics={"eval_loss": "2.5"}, tags=[])
        made.parts[1]["features"]["reader"] = ["labels"]

    reject(
        "labels-of-writer-1",
        "PRT-014",
        "the part of writer 1 has a metric, too",
        of_both,
        of="labels-of-writer-0",
    )
    for slug, says, key, value in (
        (
            "part-metric-nan",
            "in the part, the value of a metric is NaN",
            "metrics",
            {"eval_loss": "NaN"},
        ),
        (
            "part-metric-number",
            "in the part, the value of a metric is an integer",
            "metrics",
            {"eval_loss": 2},
        ),
        (
            "part-tags-unsorted",
            "in the part, tags are in another order",
            "tags",
            ["v2", "candidate"],
        ),
        ("part-tag-not-normal", "in the part, a tag isn't in normal form C", "tags", ["e\u0301"]),
    ):
        reject(slug, "PRT-014 MAN-011", says, set_at("part/0", key, value=value))
    for slug, says, edit in (
        (
            "metric-of-another-part",
            "a metric has another value in the part",
            set_at("part/0", "metrics", "eval_loss", value="2.4"),
        ),
        (
            "metric-other-spelling",
            "a metric is spelled otherwise in the part",
            set_at("part/0", "metrics", "eval_loss", value="2.50"),
        ),
        (
            "tag-of-another-part",
            "the part has one tag less",
            set_at("part/0", "tags", value=["v2"]),
        ),
    ):
        reject(slug, "CMT-039", says, edit, error="DOC_MISMATCH", phase="validate")

    def unlabelled(made: Checkpoint) -> None:
        made.part["features"]["reader"].remove("labels")
        del made.part["metrics"], made.part["tags"]

    reject(
        "labels-nowhere",
        "CMT-039 DEL-001",
        "the part has neither metrics nor tags",
        unlabelled,
        error="DOC_MISMATCH",
        phase="validate",
    )


def _record(kind: str, **members: Any) -> bytes:
    head = {
        "type": kind,
        "format_version": FORMAT_VERSION,
        "features": {"reader": [], "writer": []},
    }
    return json_document(head | {"run_id": None, "launch": None, "step": 3} | members)[0]


def _registers(made: Page) -> None:
    why = "files are no checkpoint; the register alone decides"
    for slug, error, says, content in (
        ("none", "NOT_COMMITTED", "all files but the register", None),
        (
            "abort",
            "CHECKPOINT_ABORTED",
            "an abort record in the register",
            _record("abort", reason="given up"),
        ),
        (
            "tombstone",
            "CHECKPOINT_RETIRED",
            "a tombstone in the register",
            _record("tombstone", manifest_digest=OTHER),
        ),
    ):
        made.reject(
            f"register-{slug}",
            "small",
            put_file("manifest.json", content),
            "MAN-001",
            error,
            says,
            why=why,
            bug="WRONG_RUN",
        )
    for slug, says, record in (
        ("abort-without-reason", "an abort record without a reason", _record("abort")),
        ("abort-empty-reason", "an abort record with an empty reason", _record("abort", reason="")),
        (
            "tombstone-without-digest",
            "a tombstone without the manifest's digest",
            _record("tombstone"),
        ),
        ("failure", "a failure record in the register", _record("failure")),
    ):
        made.reject(
            slug,
            "small",
            put_file("manifest.json", record),
            "MAN-001 DOC-011 MAN-003",
            "DOC_SCHEMA",
            says,
            bug="AMBIGUITY",
            why="who finds a decision has to be able to read it",
        )


def _reject(  # noqa: PLR0917 - a row of a table of cases
    made: Page, slug: str, edit: Edit, clauses: str, error: str, says: str, why: str, bug: str
) -> None:
    made.reject(slug, "small", edit, clauses, error, says, why=why, bug=bug)


def _fields(made: Page) -> None:
    why = (
        "what isn't saved is a decision that can be read, not an oversight that is found at restore"
    )

    def edit(slug: str, says: str, change: Edit) -> None:
        _reject(made, slug, change, "MAN-003", "DOC_SCHEMA", says, why, "SILENT_DATA_LOSS")

    edit("field-missing", "rng isn't there", lambda c: c.manifest["fields"].pop("rng"))
    edit(
        "no-reason",
        "data is absent without a reason",
        set_at("manifest", "fields", "data", value={"state": "absent"}),
    )
    edit(
        "empty-reason",
        "the reason is empty",
        set_at("manifest", "fields", "data", "reason", value=""),
    )
    edit(
        "reason-of-1001",
        "a reason of 1001 characters",
        set_at("manifest", "fields", "data", "reason", value="x" * 1001),
    )


def _profile(made: Page) -> None:
    why = "who reads full checkpoints only goes by the profile"

    def edit(slug: str, error: str, says: str, change: Edit) -> None:
        _reject(made, slug, change, "MAN-005", error, says, why, "AMBIGUITY")

    reference = {"name": NAME, "digest": OTHER}
    edit(
        "profile-delta",
        "PROFILE_MISMATCH",
        "profile is delta, and nothing else is",
        set_at("manifest", "profile", value="delta"),
    )
    made.reject(
        "features-in-full",
        "small",
        set_at("manifest", "features", "reader", value=["deltas"]),
        "MAN-005",
        "PROFILE_MISMATCH",
        "the feature deltas",
        why=why,
        bug="AMBIGUITY",
        features=["deltas"],
    )
    edit(
        "references-in-full",
        "PROFILE_MISMATCH",
        "a reference",
        set_at("manifest", "references", value=[reference]),
    )
    edit(
        "stored-in-full",
        "PROFILE_MISMATCH",
        "stored_nbytes of a field",
        set_at("manifest", "fields", "weights", "stored_nbytes", value=24),
    )
    for slug, key, value, clauses in (
        ("writer-count", "writer_count", 1_000_001, "LIM-001"),
        ("block-nbytes-small", "block_nbytes", 2048, "TEN-005 LIM-001"),
        ("block-nbytes-large", "block_nbytes", 2**27, "TEN-005 LIM-001"),
        ("block-nbytes-odd", "block_nbytes", 5000, "TEN-005"),
        ("step-negative", "step", -1, "DOC-005 DOC-011"),
        ("run-id-alone", "run_id", RUN_ID, "MAN-008"),
        ("launch-alone", "launch", 1, "MAN-008"),
        ("attempt-upper-case", "attempt", "0123456789ABCDEF", "CKP-001"),
        ("attempt-path", "attempt", "../3456789abcdef", "CKP-001"),
        ("features-twice", "features", {"reader": [], "writer": ["a.b", "a.b"]}, "VER-008"),
        ("features-form", "features", {"reader": [], "writer": ["Upper"]}, "VER-008"),
    ):  # fmt: skip
        made.reject(
            slug,
            "small",
            set_at("manifest", key, value=value),
            clauses,
            "DOC_SCHEMA",
            f"{key} is {value!r}",
            why="what is out of its range isn't what a writer meant",
            bug="AMBIGUITY",
        )


def _summaries(made: Page) -> None:
    why = "who lists checkpoints reads the summaries alone"
    for slug, field, key, value in (
        ("tensor-count", "weights", "tensor_count", 2), ("nbytes", "weights", "nbytes", 23),
        ("stream-count", "rng", "stream_count", 0), ("leaf-count", "config", "leaf_count", 2),
    ):  # fmt: skip
        made.reject(
            f"summary-{slug}",
            "small",
            set_at("manifest", "fields", field, key, value=value),
            "MAN-006",
            "MANIFEST_SUMMARY",
            f"{key} of {field} is {value}",
            why=why,
            bug="SILENT_DATA_LOSS",
        )
    made.reject(
        "summary-reason",
        "small",
        set_at("manifest", "fields", "data", "reason", value="lost"),
        "MAN-006",
        "MANIFEST_SUMMARY",
        "another reason than the index has",
        why=why,
        bug="AMBIGUITY",
    )
    absent = {"state": "absent", "reason": "not given"}
    made.reject(
        "summary-absent",
        "small",
        set_at("manifest", "fields", "config", value=absent),
        "MAN-006 MAN-003",
        "MANIFEST_SUMMARY",
        "config is absent, and the index has a leaf of it",
        why=why,
        bug="SILENT_DATA_LOSS",
    )
    made.reject(
        "summary-present",
        "small",
        lambda c: c.index["absent"].pop("data"),
        "MAN-006 MAN-003 CMT-017",
        "MANIFEST_SUMMARY",
        "data is absent in the manifest, and not in the index",
        why=why,
    )


def _index(made: Page) -> None:
    why = "a name of this form can't leave the directory or meet another attempt's file"
    for slug, error, value in (
        ("index-of-another-attempt", "UNSAFE_PATH", "index-ffffffffffffffff.msgpack"),
        ("index-above", "DOC_SCHEMA UNSAFE_PATH", "../index-0123456789abcdef.msgpack"),
        ("index-absolute", "DOC_SCHEMA UNSAFE_PATH", "/etc/passwd"),
        ("index-url", "DOC_SCHEMA UNSAFE_PATH", "file:index-0123456789abcdef.msgpack"),
    ):
        made.reject(
            slug,
            "small",
            set_at("manifest", "index", "name", value=value),
            "CKP-001",
            error,
            f"the name of the index is {value}",
            why=why,
            bug="ESCAPE",
        )
    why = "the index is what the manifest names, or the checkpoint isn't whole"
    for key in ("nbytes", "name", "digest"):
        made.reject(
            f"index-without-{key}",
            "small",
            pop_at("manifest", "index", key),
            "MAN-007",
            "DOC_SCHEMA",
            f"{key} of the index is missing",
            why=why,
        )
    made.reject(
        "index-md5",
        "small",
        _kept("index/digest", "md5:" + "0" * 32),
        "MAN-007 DOC-009",
        "DOC_SCHEMA",
        "the digest of the index is an MD5",
        why=why,
    )
    made.reject(
        "index-digest",
        "small",
        _kept("index/digest", OTHER),
        "MAN-007 OPN-003",
        "DOC_DIGEST",
        "the digest of the index is another",
        why=why,
    )


def _entry(made: Page) -> None:
    """Add faults in the manifest's entry for the index."""
    why = "the index is what the manifest names, or the checkpoint isn't whole"
    made.reject(
        "index-nbytes",
        "small",
        _kept("index/nbytes", 100),
        "MAN-007 CKP-003",
        "FILE_NBYTES",
        "the index has 100 bytes, says the manifest",
        why=why,
    )
    made.reject(
        "index-nbytes-beyond",
        "small",
        _kept("index/nbytes", 2**40),
        "DOC-008 LIM-001 CKP-003",
        "LIMIT_EXCEEDED FILE_NBYTES DOC_SCHEMA",
        "the index has 2^40 bytes, says the manifest",
        bug="RESOURCE",
        why="a reader that allocates what a document says can be made to allocate anything",
    )
    made.reject(
        "index-missing",
        "small",
        lambda c: c.extra.update({c.index_name: None}),
        "CKP-004",
        "FILE_MISSING",
        "the index isn't there",
        why=why,
        bug="SILENT_DATA_LOSS",
    )
    size = len(build(small()).seal()[build(small()).index_name])
    others = (build(small(step=step)).seal() for step in range(4, 100))
    other = next(files for files in others if len(files[build(small()).index_name]) == size)
    made.reject(
        "index-of-another-step",
        "small",
        lambda c: c.extra.update({c.index_name: other[c.index_name]}),
        "OPN-003 MAN-007",
        "DOC_DIGEST",
        "the index is that of another checkpoint, of the same size",
        why=why,
    )


def _kept(place: str, value: object) -> Edit:
    def edit(made: Checkpoint) -> None:
        made.kept.add(place)
        made.manifest["index"][place.partition("/")[2]] = value

    return edit
