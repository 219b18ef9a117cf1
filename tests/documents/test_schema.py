"""The JSON Schemas: that each of their constraints bites, and that they say what the code says."""

import copy
import json
from typing import Any

import pytest

from ckptfmt.documents.canonical import check_schema, schema_text
from ckptfmt.documents.manifest import FIELDS
from ckptfmt.dtypes import DTYPES
from ckptfmt.errors import Code
from tests.builders import NONCE, RUN_ID, code_of, error_of

FEATURES: dict[str, Any] = {"reader": [], "writer": []}
DIGEST = "blake3:" + "a" * 64
HEAD = {"format_version": "1.0", "features": FEATURES, "run_id": RUN_ID, "launch": 3}
PRESENT = {"state": "present", "tensor_count": 0, "nbytes": 0, "stream_count": 0, "leaf_count": 0}
DOCUMENTS: dict[str, dict[str, Any]] = {
    "run": {"type": "run", **{key: HEAD[key] for key in ("format_version", "features", "run_id")}},
    "launch": {
        "type": "launch",
        **HEAD,
        "nonce": NONCE,
        "chosen_by": "hand",
        "resume_from": {"name": "step-00000400-l0001", "digest": DIGEST},
    },
    "abort": {"type": "abort", **HEAD, "step": 0, "reason": "x"},
    "tombstone": {"type": "tombstone", **HEAD, "step": 0, "manifest_digest": DIGEST},
    "failure": {
        "type": "failure",
        "format_version": "1.0",
        "features": FEATURES,
        "attempt": "a" * 16,
        "writer": 0,
        "code": "NO_SPACE",
        "detail": "",
        "where": None,
        "requirement": "REQ-CMT-004",
        "remedy": "",
    },
    "manifest": {
        "type": "manifest",
        **HEAD,
        "nonce": NONCE,
        "step": 0,
        "attempt": "a" * 16,
        "writer_count": 1,
        "block_nbytes": 4096,
        "saved_unix_s": 0,
        "profile": "full",
        "references": [],
        "fields": {
            field: {"state": "absent", "reason": "x"} if field == "data" else PRESENT
            for field in FIELDS
        },
        "index": {"name": "index-" + "a" * 16 + ".msgpack", "nbytes": 0, "digest": DIGEST},
    },
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_the_example_fits(name):
    """REQ-DOC-011."""
    check_schema(name, DOCUMENTS[name], where="x")


def places(value, path=()):
    """Yield the path of every member of an object, at any depth."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield (*path, key)
            yield from places(item, (*path, key))


WRONG_VALUES: list[Any] = [
    None,
    True,
    -1,
    2**53,
    "",
    "x\u0660",
    [],
    {},
    [{}],
    {"x": 1},
    "A" * 64,
    0.5,
]


@pytest.mark.parametrize(
    ("name", "path"),
    [(name, path) for name, value in DOCUMENTS.items() for path in places(value)],
    ids=lambda item: item if isinstance(item, str) else ".".join(item),
)
def test_every_member_is_required_closed_and_typed(name, path):
    """REQ-DOC-011: dropped, joined by an unknown one, and of other types."""

    def change(edit):
        document = copy.deepcopy(DOCUMENTS[name])
        at = document
        for key in path[:-1]:
            at = at[key]
        edit(at)
        return code_of(lambda: check_schema(name, document, where="x"))

    assert change(lambda at: at.pop(path[-1])) == Code.DOC_SCHEMA
    assert change(lambda at: at.update(unknown=1)) == Code.DOC_SCHEMA
    accepted = [
        value
        for value in WRONG_VALUES
        if change(lambda at, value=value: at.update({path[-1]: value})) != Code.DOC_SCHEMA
    ]
    assert accepted == [
        value for value in WRONG_VALUES if any(value is right for right in also_right(name, path))
    ]


def also_right(name, path):
    """Those of the values above that are right in this place."""
    nothing, bidi, letters, empty, none = (
        WRONG_VALUES[4],
        WRONG_VALUES[5],
        WRONG_VALUES[10],
        WRONG_VALUES[6],
        None,
    )
    if path[-1] == "resume_from" or (path[-1] == "run_id" and name not in {"run", "launch"}):
        return [none]
    if path[-1] == "launch" and name != "launch":
        return [none]
    return {
        "detail": [nothing, bidi, letters],
        "remedy": [nothing, bidi, letters],
        "where": [none, nothing, bidi, letters],
        "requirement": [none],
        "reason": [bidi, letters],
        "code": [letters],
        "references": [empty],
        "reader": [empty],
        "writer": [empty] if "features" in path else [],
    }.get(path[-1], [])


@pytest.mark.parametrize("name", [*DOCUMENTS, "defs", "columns", "index", "part", "cursor"])
def test_every_schema_is_one(name):
    from jsonschema import Draft202012Validator  # noqa: PLC0415

    Draft202012Validator.check_schema(json.loads(schema_text(name)))


def test_the_schema_knows_the_dtypes_and_fields_of_the_code():
    """REQ-TEN-003, REQ-MAN-003."""
    columns = json.loads(schema_text("columns"))["$defs"]
    assert columns["dtypes"]["items"]["enum"] == list(DTYPES)
    assert columns["absent"]["propertyNames"]["enum"] == list(FIELDS)


def test_the_first_violation_is_named_by_pointer_and_clause():
    document = copy.deepcopy(DOCUMENTS["manifest"])
    document["index"]["digest"] = "md5:"
    error = error_of(lambda: check_schema("manifest", document, where="manifest.json"))
    assert (error.where, error.requirement) == ("manifest.json#/signed/index/digest", "REQ-DOC-009")


def test_no_object_of_the_documents_is_open():
    """Row 26."""

    def check(schema, where):
        if isinstance(schema, dict):
            if schema.get("type") == "object" and "properties" in schema:
                assert schema.get("additionalProperties") is False, where
                optional = {"durability", "metrics", "pipeline", "suspect", "tags"}
                assert set(schema["properties"]) - set(schema["required"]) <= optional, where
            for key, value in schema.items():
                check(value, f"{where}/{key}")
        if isinstance(schema, list):
            for number, value in enumerate(schema):
                check(value, f"{where}/{number}")

    for name in [*DOCUMENTS, "index", "part", "cursor"]:
        check(json.loads(schema_text(name)), name)
