"""The JSON Schemas of ``spec/schema``, and the check against them. Spec: REQ-DOC-011."""

from __future__ import annotations

import functools
import json
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptfmt.errors import Code, err

if TYPE_CHECKING:
    from jsonschema import Draft202012Validator


def schema_text(name: str) -> str:
    """Return the text of ``<name>.schema.json``: from the wheel, or from the source tree beside the package."""
    shipped = resources.files("ckptfmt") / "_schema" / f"{name}.schema.json"
    if shipped.is_file():
        return shipped.read_text("utf-8")
    return (Path(__file__).parents[2] / "spec" / "schema" / f"{name}.schema.json").read_text("utf-8")


@functools.cache
def _validator(name: str) -> Draft202012Validator:
    # Imported here: a tenth of a second that a program which only saves to a path needn't pay at import.
    from jsonschema import Draft202012Validator  # noqa: PLC0415
    from jsonschema.validators import extend  # noqa: PLC0415

    whole = Draft202012Validator.VALIDATORS["items"]

    def check_items(validator: Any, items: Any, instance: Any, schema: Any) -> Any:  # noqa: ANN401 - as jsonschema has it
        """Look at the items of an array that isn't too long; of others, a wrong item more makes no difference."""
        is_long = isinstance(instance, list) and len(instance) > schema.get("maxItems", len(instance))
        return () if is_long else whole(validator, items, instance, schema)

    schema = _inline(json.loads(schema_text(name)), json.loads(schema_text("defs"))["$defs"])
    with_items: type[Draft202012Validator] = extend(Draft202012Validator, {"items": check_items})  # type: ignore[no-untyped-call]
    return with_items(schema)


def _inline(schema: Any, definitions: dict[str, Any]) -> Any:  # noqa: ANN401 - any JSON
    """Return the schema of a JSON document with its definitions in the place of references to them.

    All of them are in ``defs.schema.json``, beside none stands anything, and none leads back to itself. To look them up
    takes longer than all else that is checked of a manifest: 1.6 ms in place of 0.6.
    """
    if isinstance(schema, list):
        return [_inline(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inline(definitions[schema["$ref"].removeprefix("defs.schema.json#/$defs/")], definitions)
    return {key: _inline(value, definitions) for key, value in schema.items()}


def check_schema(name: str, value: object, *, where: str) -> None:
    """Raise unless `value` fits the schema `name`; the first violation in document order is the one reported.

    Strings have passed `check_string` before, so that a pattern's ``$`` can't match before a newline, and numbers are
    integers, so that ``1.0`` can't pass as one.

    Raises: FormatError(DOC_SCHEMA), with the JSON pointer and the clause that the schema names.
    """
    violations = sorted(_validator(name).iter_errors(value), key=lambda violation: [str(p) for p in violation.path])
    if not violations:
        return
    first = violations[0]
    pointer = "".join(f"/{step}" for step in first.absolute_path)
    schema = first.schema if isinstance(first.schema, dict) else {}
    raise err(
        Code.DOC_SCHEMA,
        first.message[:300],
        where=f"{where}#/signed{pointer}",
        requirement=schema.get("$comment", "REQ-DOC-011").split()[0],
    )
