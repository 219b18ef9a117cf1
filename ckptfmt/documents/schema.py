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

__all__ = ["check_schema", "schema_text"]


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
    from referencing import Registry, Resource  # noqa: PLC0415

    definitions = Resource.from_contents(json.loads(schema_text("defs")))
    registry: Registry[Any] = Registry().with_resource("defs.schema.json", definitions)
    return Draft202012Validator(json.loads(schema_text(name)), registry=registry)


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
