"""The decision register: manifest, abort record, tombstone, and the names of files."""

import copy
import dataclasses
import json
from typing import Any

import pytest

from ckptfmt import limits
from ckptfmt.documents.canonical import dump_document
from ckptfmt.documents.manifest import (
    FIELDS,
    Abort,
    FieldSummary,
    Manifest,
    Reference,
    Tombstone,
    checkpoint_name,
    failure_path,
    index_name,
    pack_name,
    parse_checkpoint_name,
    parse_register,
    part_path,
    pins_path,
    shard_name,
)
from ckptfmt.errors import Code
from tests.builders import ATTEMPT, RUN_ID, code_of, error_of, origin, parse_json

DIGEST = "blake3:" + "a" * 64
ABSENT = FieldSummary(reason="not given to State")


def manifest(**members):
    own = {
        "origin": origin(run_id=RUN_ID, launch=3),
        "saved_unix_s": 1_793_491_200,
        "fields": {**dict.fromkeys(FIELDS, FieldSummary(tensor_count=1, nbytes=2)), "data": ABSENT},
        "index_nbytes": 843,
        "index_digest": DIGEST,
    }
    return Manifest(**{**own, **members})


STORED = FieldSummary(tensor_count=1, nbytes=2, stored_nbytes=1)
DELTA: dict[str, Any] = {
    "fields": {**dict.fromkeys(FIELDS, STORED), "data": ABSENT},
    "features": ("deltas", "sparse"),
    "references": tuple(
        Reference(name=f"step-0000000{step}-l0001", digest=f"blake3:{step}" + "a" * 63)
        for step in (1, 2)
    ),
}


@pytest.mark.parametrize("members", [{}, DELTA], ids=["full", "delta"])
def test_registers_come_back(members):
    """REQ-MAN-001, REQ-MAN-005."""
    content = manifest(**members).dump()
    parsed = parse_register(content)
    assert isinstance(parsed, Manifest)
    assert parsed.dump() == content
    assert parsed.digest == json.loads(content)["digest"]
    for record in (
        Abort(run_id=RUN_ID, launch=3, step=7, reason="unfinished"),
        Abort(run_id=None, launch=None, step=0, reason="é" * 1000),
        Tombstone(run_id=None, launch=None, step=7, manifest_digest=DIGEST),
    ):
        assert parse_register(record.dump()) == record


def test_the_digest_of_the_manifest_covers_every_member():
    """REQ-DOC-009: two manifests that differ in anything have different names."""
    changed = [
        manifest(),
        manifest(saved_unix_s=0),
        manifest(index_nbytes=1),
        manifest(index_digest="blake3:" + "b" * 64),
        *(
            manifest(origin=origin(**{"run_id": RUN_ID, "launch": 3, **member}))
            for member in (
                {"step": 4},
                {"launch": 4},
                {"run_id": "0" * 32},
                {"nonce": "0" * 32},
                {"attempt": "f" * 16},
                {"writer_count": 2},
                {"block_nbytes": 8192},
            )
        ),
        manifest(fields={**dict.fromkeys(FIELDS, ABSENT)}),
        manifest(**DELTA),
        manifest(**{**DELTA, "features": ("deltas", "xor")}),
        manifest(**{**DELTA, "references": DELTA["references"][:1]}),
        manifest(
            **{**DELTA, "references": (Reference(name="step-00000009-l0001", digest=DIGEST),)}
        ),
        manifest(
            **{**DELTA, "references": (Reference(name="step-00000009-l0002", digest=DIGEST),)}
        ),
        manifest(
            **{
                **DELTA,
                "fields": {**DELTA["fields"], "rng": dataclasses.replace(STORED, stored_nbytes=0)},
            }
        ),
    ]
    assert len({json.loads(item.dump())["digest"] for item in changed}) == len(changed)


def edited(path, value, **members):
    """Return the register of a manifest with one member replaced; deleted if `value` is ..."""
    signed = copy.deepcopy(parse_json(manifest(**members).dump()))
    at = signed
    for key in path[:-1]:
        at = at[key]
    if value is ...:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return dump_document(signed)


PRESENT = {"state": "present", "tensor_count": 0, "nbytes": 0, "stream_count": 0, "leaf_count": 0}
REFERENCE = {"name": "step-00000001-l0001", "digest": DIGEST}
EDITS = [
    *((("fields", field), ..., Code.DOC_SCHEMA, "REQ-MAN-003") for field in FIELDS),
    (("fields", "more"), PRESENT, Code.DOC_SCHEMA, "REQ-MAN-003"),
    (("fields", "rng"), {"state": "absent"}, Code.DOC_SCHEMA, "REQ-MAN-003"),
    (("fields", "rng"), {"state": "absent", "reason": ""}, Code.DOC_SCHEMA, "REQ-MAN-003"),
    (("fields", "rng"), {"state": "absent", "reason": "x" * 1001}, Code.DOC_SCHEMA, "REQ-MAN-003"),
    (("fields", "rng"), {**PRESENT, "reason": "x"}, Code.DOC_SCHEMA, "REQ-MAN-003"),
    (("fields", "rng"), {**PRESENT, "state": "lost"}, Code.DOC_SCHEMA, "REQ-MAN-003"),
    (("fields", "rng"), {**PRESENT, "nbytes": -1}, Code.DOC_SCHEMA, "REQ-MAN-003"),
    (("fields", "rng"), {**PRESENT, "nbytes": True}, Code.DOC_SCHEMA, "REQ-MAN-003"),
    (("fields", "rng"), None, Code.DOC_SCHEMA, "REQ-MAN-003"),
    (("fields", "rng"), {**PRESENT, "stored_nbytes": -1}, Code.DOC_SCHEMA, "REQ-MAN-003"),
    (("fields", "rng"), {**PRESENT, "stored_nbytes": 0}, Code.PROFILE_MISMATCH, "REQ-MAN-005"),
    (("profile",), "delta", Code.PROFILE_MISMATCH, "REQ-MAN-005"),
    (("profile",), "partial", Code.DOC_SCHEMA, "REQ-MAN-005"),
    (("features", "reader"), ["deltas"], Code.PROFILE_MISMATCH, "REQ-MAN-005"),
    (("references",), [REFERENCE], Code.PROFILE_MISMATCH, "REQ-MAN-005"),
    (("references",), [DIGEST], Code.DOC_SCHEMA, "REQ-DEL-002"),
    (("references",), None, Code.DOC_SCHEMA, "REQ-LIM-001"),
    (("references",), [REFERENCE] * 33, Code.DOC_SCHEMA, "REQ-LIM-001"),
    (("index", "name"), "index-ffffffffffffffff.msgpack", Code.UNSAFE_PATH, "REQ-CKP-001"),
    (("index", "name"), "../index-0123456789abcdef.msgpack", Code.DOC_SCHEMA, "REQ-CKP-001"),
    (("index", "name"), "/etc/passwd", Code.DOC_SCHEMA, "REQ-CKP-001"),
    (("index", "name"), "..\\x", Code.DOC_SCHEMA, "REQ-CKP-001"),
    (
        ("index", "name"),
        "s3://bucket/index-0123456789abcdef.msgpack",
        Code.DOC_SCHEMA,
        "REQ-CKP-001",
    ),
    (("index", "name"), "index-0123456789ABCDEF.msgpack", Code.DOC_SCHEMA, "REQ-CKP-001"),
    (("index", "name"), "index-0123456789abcdef.msgpack.", Code.DOC_SCHEMA, "REQ-CKP-001"),
    (("index", "name"), "", Code.DOC_SCHEMA, "REQ-CKP-001"),
    (("index", "nbytes"), ..., Code.DOC_SCHEMA, "REQ-MAN-007"),
    (("index", "nbytes"), -1, Code.DOC_SCHEMA, None),
    (("index", "digest"), "md5:" + "a" * 64, Code.DOC_SCHEMA, "REQ-DOC-009"),
    (("index", "digest"), "crc32:0", Code.DOC_SCHEMA, "REQ-DOC-009"),
    (("index", "digest"), DIGEST.upper(), Code.DOC_SCHEMA, "REQ-DOC-009"),
    (("index", "digest"), DIGEST[:-1], Code.DOC_SCHEMA, "REQ-DOC-009"),
    (("index", "digest"), "blake3:" + "\u0663" * 64, Code.DOC_SCHEMA, "REQ-DOC-009"),
    (("index", "more"), 1, Code.DOC_SCHEMA, "REQ-MAN-007"),
    (("step",), -1, Code.DOC_SCHEMA, "REQ-DOC-005"),
    (("step",), True, Code.DOC_SCHEMA, "REQ-DOC-005"),
    (("step",), "3", Code.DOC_SCHEMA, "REQ-DOC-005"),
    (("launch",), True, Code.DOC_SCHEMA, "REQ-RUN-002"),
    (("run_id",), "F" * 32, Code.DOC_SCHEMA, "REQ-RUN-001"),
    (("nonce",), None, Code.DOC_SCHEMA, "REQ-RUN-002"),
    (("attempt",), "A1B2C3D4E5F60718", Code.DOC_SCHEMA, "REQ-CKP-001"),
    (("writer_count",), 0, Code.DOC_SCHEMA, "REQ-LIM-001"),
    (("writer_count",), 1_000_001, Code.DOC_SCHEMA, "REQ-LIM-001"),
    (("block_nbytes",), 2048, Code.DOC_SCHEMA, "REQ-TEN-005"),
    (("block_nbytes",), 1 << 27, Code.DOC_SCHEMA, "REQ-TEN-005"),
    (("block_nbytes",), 5000, Code.DOC_SCHEMA, "REQ-TEN-005"),
    (("saved_unix_s",), "now", Code.DOC_SCHEMA, None),
    (("more",), 1, Code.DOC_SCHEMA, "REQ-MAN-001"),
    (("type",), "index", Code.DOC_SCHEMA, "REQ-DOC-011"),
    (("type",), "run", Code.DOC_SCHEMA, "REQ-DOC-011"),
    (("type",), "abort", Code.DOC_SCHEMA, None),
]


@pytest.mark.parametrize(
    ("path", "value", "code", "requirement"), EDITS, ids=lambda item: str(item)[:40]
)
def test_wrong_manifests_are_refused(path, value, code, requirement):
    """Rows 18, 26, 29, 31 to 34, 37 to 40; the clause is the one of the row."""
    error = error_of(lambda: parse_register(edited(path, value)))
    assert error.code == code
    assert error.where.startswith("manifest.json#/signed")
    # The schema may name the clause of a member deeper within; what counts is that it names one.
    assert error.requirement
    if requirement and path[0] not in ("fields", "run_id", "launch"):
        assert error.requirement == requirement


DELTA_EDITS = [
    (("profile",), "full", Code.PROFILE_MISMATCH, "REQ-MAN-005"),
    (("features", "reader"), [], Code.PROFILE_MISMATCH, "REQ-MAN-005"),
    (("features", "reader"), ["sparse"], Code.PROFILE_MISMATCH, "REQ-MAN-005"),
    (("features", "reader"), ["sparse", "deltas"], Code.PROFILE_MISMATCH, "REQ-MAN-005"),
    (("features", "reader"), ["deltas", "deltas"], Code.DOC_SCHEMA, "REQ-VER-008"),
    (("features", "reader"), ["deltas", "wavelets"], Code.FEATURE_UNSUPPORTED, "REQ-DOC-010"),
    (("features", "reader"), ["deltas", "references"], Code.FEATURE_UNSUPPORTED, "REQ-DOC-010"),
    (("fields", "rng"), PRESENT, Code.PROFILE_MISMATCH, "REQ-DEL-027"),
    (("fields", "data", "stored_nbytes"), 0, Code.DOC_SCHEMA, "REQ-MAN-003"),
    (("references", 0, "name"), "step-000000001-l0001", Code.UNSAFE_PATH, "REQ-DEL-002"),
    (("references", 0, "name"), "../step-00000001-l0001", Code.DOC_SCHEMA, "REQ-RUN-008"),
    (("references", 0, "name"), "latest", Code.DOC_SCHEMA, "REQ-RUN-008"),
    (("references", 0, "digest"), "a" * 64, Code.DOC_SCHEMA, "REQ-DOC-009"),
    (("references", 0, "digest"), ..., Code.DOC_SCHEMA, "REQ-DEL-002"),
    (("references", 0, "step"), 1, Code.DOC_SCHEMA, "REQ-DEL-002"),
    (("references", 0, "digest"), "blake3:" + "f" * 64, Code.COLUMN_ORDER, "REQ-DEL-002"),
    (("references", 0, "digest"), DELTA["references"][1].digest, Code.COLUMN_ORDER, "REQ-DEL-002"),
]


@pytest.mark.parametrize(
    ("path", "value", "code", "requirement"), DELTA_EDITS, ids=lambda item: str(item)[:40]
)
def test_wrong_manifests_of_deltas_are_refused(path, value, code, requirement):
    """REQ-MAN-005, REQ-DEL-001, REQ-DEL-002."""
    error = error_of(lambda: parse_register(edited(path, value, **DELTA)))
    assert (error.code, error.requirement) == (code, requirement)
    assert error.where.startswith("manifest.json#/signed")


def test_what_a_checkpoint_stores_is_all_of_it_or_what_it_says():
    """REQ-MAN-006."""
    assert (manifest().profile, manifest().nbytes, manifest().stored_nbytes) == ("full", 12, 12)
    delta = manifest(**DELTA)
    assert (delta.profile, delta.nbytes, delta.stored_nbytes) == ("delta", 12, 6)


@pytest.mark.parametrize("members", [{}, DELTA], ids=["full", "delta"])
@pytest.mark.parametrize("key", parse_json(manifest().dump()))
def test_no_member_may_be_missing(key, members):
    """Row 29; REQ-DOC-011, REQ-MAN-001; of a document without a type no feature is known: REQ-VER-007."""
    code = Code.FEATURE_UNSUPPORTED if members and key == "type" else Code.DOC_SCHEMA
    assert code_of(lambda: parse_register(edited((key,), ..., **members))) == code


def test_a_manifest_with_all_references_that_may_be_is_small():
    """REQ-MAN-004, REQ-LIM-002."""
    references = tuple(
        Reference(name=checkpoint_name(10**17 + number, 10**17), digest=f"blake3:{number:064x}")
        for number in range(limits.REFERENCES)
    )
    content = manifest(**{**DELTA, "references": references}).dump()
    assert len(content) < 8192
    parsed = parse_register(content)
    assert isinstance(parsed, Manifest)
    assert parsed.references == references


def test_a_register_over_64_kib_is_neither_written_nor_read():
    """Row 4; REQ-MAN-004."""
    signed = parse_json(manifest().dump())
    content = dump_document({**signed, "more": ["x" * 4000] * 17})
    assert len(content) > limits.MANIFEST_NBYTES
    error = error_of(lambda: parse_register(content))
    assert error.code == Code.LIMIT_EXCEEDED
    large = manifest(fields=dict.fromkeys(FIELDS, FieldSummary(reason="x" * 10_000)))
    assert error_of(large.dump).requirement == "REQ-MAN-004"


@pytest.mark.parametrize(
    "record",
    [
        Abort(run_id=None, launch=None, step=0, reason="x"),
        Tombstone(run_id=None, launch=None, step=0, manifest_digest=DIGEST),
    ],
)
def test_wrong_records_are_refused(record):
    """REQ-MAN-001, REQ-MAN-003."""
    signed = parse_json(record.dump())
    for key in signed:
        assert code_of(
            lambda key=key: parse_register(
                dump_document({k: v for k, v in signed.items() if k != key})
            )
        ) == (Code.DOC_SCHEMA)
    for key, value in {"attempt": "a" * 16, "step": -1, "run_id": "x", "launch": "1"}.items():
        assert (
            code_of(
                lambda key=key, value=value: parse_register(dump_document({**signed, key: value}))
            )
            == Code.DOC_SCHEMA
        )
    for reason in ("", "x" * 1001, None):
        if isinstance(record, Abort):
            content = dump_document({**signed, "reason": reason})
            assert code_of(lambda content=content: parse_register(content)) == Code.DOC_SCHEMA


@pytest.mark.parametrize(
    ("step", "launch"),
    [(0, 0), (1200, 3), (99_999_999, 9999), (100_000_000, 10_000), (10**15, 10**9)],
)
def test_names_of_checkpoints_come_back(step, launch):
    """REQ-RUN-008, REQ-RUN-009."""
    assert parse_checkpoint_name(checkpoint_name(step, launch)) == (step, launch)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "step-1200-l3",
        "step-000001200-l0003",
        "step-00001200-l00003",
        "step-00001200-l0003\n",
        "step-00001200-l0003/",
        "latest",
        "Step-00001200-l0003",
        "step-00001200",
        "step-\u0660\u0660\u0660\u0660\u0661\u0662\u0660\u0660-l\u0660\u0660\u0660\u0663",
        "step--0001200-l0003",
        ".step-00001200-l0003",
        "step-" + "9" * 60 + "-l0003",
        "step-00001200-l0003.tmp",
        "../step-00001200-l0003",
    ],
)
def test_other_names_are_no_checkpoints(name):
    """Rows 31, 37 and 40; REQ-RUN-008."""
    assert parse_checkpoint_name(name) is None


def test_files_have_the_attempt_in_their_names():
    """REQ-CKP-001."""
    assert index_name(ATTEMPT) == "index-0123456789abcdef.msgpack"
    assert part_path(ATTEMPT, 3) == "parts/0123456789abcdef-00003.msgpack"
    assert part_path(ATTEMPT, 123_456) == "parts/0123456789abcdef-123456.msgpack"
    assert failure_path(ATTEMPT, 3) == "parts/0123456789abcdef-00003.failure.json"
    assert shard_name("weights", ATTEMPT, 3) == "weights-0123456789abcdef-00003.safetensors"
    assert pack_name("weights", ATTEMPT, 3) == "weights-0123456789abcdef-00003.pack"
    assert pins_path(ATTEMPT, 123_456) == "parts/0123456789abcdef-123456.pins.json"
