"""Checks compiled from schemas agree with a validator of jsonschema: on vectors and on their mutations."""

import copy
import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from ckptfmt.documents.canonical import _fits, _validator, check_schema
from ckptfmt.documents.fit import compile_schema
from tests.builders import error_of
from tests.conformance.vectors import cases_by_id
from tests.documents.test_schema import DOCUMENTS, places

#: Values that are right in some places.
VALUES: list[Any] = [
    None,
    True,
    0,
    1,
    "",
    "x",
    "0" * 16,
    "A" * 300,
    [],
    ["x", "x"],
    {},
    [None] * 70,
]


def parse_document_of_integers(content: bytes) -> Any:
    """Return the value of a JSON text. Raises: ValueError if a number has a fraction."""
    return json.loads(content, parse_float=int, parse_constant=int)


def signed_of_vectors() -> list[dict[str, Any]]:
    """Return all JSON documents of the vectors, each once, whatever they hold."""
    contents = {
        content
        for case in cases_by_id().values()
        for path, content in case.files.items()
        if path.endswith(".json")
    }
    found = []
    for content in sorted(contents):
        try:
            signed = parse_document_of_integers(content)["signed"]
        except (ValueError, LookupError, TypeError, RecursionError):
            continue
        if isinstance(signed, dict) and signed.get("type") in DOCUMENTS:
            found.append(signed)
    return found


def test_they_agree_on_the_vectors():
    documents = signed_of_vectors()
    fitting = [document for document in documents if _fits(document["type"])(document)]
    others = [document for document in documents if not _fits(document["type"])(document)]

    assert not [one for one in fitting if list(_validator(one["type"]).iter_errors(one))]
    assert not [one for one in others if _validator(one["type"]).is_valid(one)]
    assert len(fitting) > 100
    assert len(others) > 100


@pytest.mark.parametrize("name", DOCUMENTS)
def test_they_agree_on_other_values_in_each_place(name):
    seen = set()
    for path in places(DOCUMENTS[name]):
        for value in VALUES:
            document = copy.deepcopy(DOCUMENTS[name])
            at = document
            for key in path[:-1]:
                at = at[key]
            at[path[-1]] = value
            fits = _fits(name)(document)
            assert fits is _validator(name).is_valid(document), (path, value)
            seen.add(fits)

    assert seen == {False, True}


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"const": 1}, [1], [True, 2, None]),
        ({"enum": [True, "x"]}, [True, "x"], [1, False]),
        ({"type": "integer"}, [1], [True, "1"]),
        ({"type": ["null", "boolean"]}, [None, False], [0, {}]),
        ({"minimum": 2, "maximum": 3}, [2, 3, "x", True], [1, 4]),
        ({"minLength": 1, "maxLength": 2, "pattern": "b"}, ["ab", 5], ["", "aa", "abb"]),
        ({"prefixItems": [{"const": 1}], "items": {"const": 2}}, [[], [1], [1, 2]], [[2], [1, 1]]),
        ({"minItems": 1, "maxItems": 2, "uniqueItems": True}, [[1, True]], [[], [1, 1], [1, 2, 3]]),
        ({"items": False}, [[], 1], [[1]]),
        ({"anyOf": [{"const": 1}, {"type": "string"}]}, [1, "x"], [2]),
        ({"oneOf": [{"minimum": 0}, {"minimum": 5}]}, [3], [6, "x", -1]),
        ({"required": ["a"], "maxProperties": 1}, [{"a": 1}, []], [{}, {"b": 1}, {"a": 1, "b": 1}]),
        (
            {"properties": {"a": {"const": 1}}, "additionalProperties": {"const": 2}},
            [{"a": 1, "b": 2}],
            [{"a": 2}, {"b": 1}],
        ),
        ({"propertyNames": {"maxLength": 1}, "title": "x"}, [{"a": 1}, 1], [{"aa": 1}]),
    ],
    ids=str,
)
def test_each_keyword_accepts_and_refuses(schema, right, wrong):
    fits, validator = compile_schema(schema), Draft202012Validator(schema)

    for value in right:
        assert fits(value) is validator.is_valid(value) is True, value
    for value in wrong:
        assert fits(value) is validator.is_valid(value) is False, value


@pytest.mark.parametrize("schema", [{"not": {}}, {"items": {"minLength": 1, "format": "date"}}])
def test_keywords_that_are_not_known_are_refused(schema):
    with pytest.raises(ValueError, match="no check is compiled"):
        compile_schema(schema)


def test_a_violation_still_has_place_and_clause():
    """The control: whatever doesn't fit goes on to the validator, which finds the place."""
    error = error_of(lambda: check_schema("run", {**DOCUMENTS["run"], "run_id": 1}, where="x"))

    assert error.where == "x#/signed/run_id"
