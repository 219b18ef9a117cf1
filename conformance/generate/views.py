"""The JSON view of msgpack documents (spec/appendix/98-notation.md): byte strings are hex there."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

from conformance.generate.clauses import ROOT

__all__ = ["document_of", "load_schema", "resolve"]

SCHEMA = ROOT / "spec" / "schema"

_HEX = re.compile(r"([0-9a-f]{2})*")

Schema = dict[str, Any]


@functools.cache
def load_schema(name: str) -> Schema:
    """Return a schema of the specification by its document's name."""
    found: Schema = json.loads((SCHEMA / f"{name}.schema.json").read_text("utf-8"))
    return found


def resolve(schema: Schema) -> Schema:
    """Return a schema with all references resolved and merged into one map."""
    while "$ref" in schema:
        file, pointer = schema["$ref"].split("#")
        target = load_schema(file.removesuffix(".schema.json"))
        for step in pointer.strip("/").split("/"):
            target = target[step]
        schema = target | {
            key: value for key, value in schema.items() if key not in {"$ref", "$comment"}
        }
    return schema


def _properties_of(schema: Schema) -> dict[str, Schema]:
    """Return a schema's members; the last alternative wins where alternatives differ."""
    known = dict(schema.get("properties", {}))
    for one in schema.get("oneOf", []):
        known |= _properties_of(resolve(one))
    return known


def document_of(view: Any, schema: Schema) -> Any:
    """Return the signed map of a view: strings become bytes where the schema says so."""
    schema = resolve(schema)
    if isinstance(view, str):
        # An edit may put another value there.
        is_hex = schema.get("contentEncoding") == "base16" and _HEX.fullmatch(view)
        return bytes.fromhex(view) if is_hex else view
    if isinstance(view, dict):
        known = _properties_of(schema)
        return {key: document_of(member, known.get(key, {})) for key, member in view.items()}
    if isinstance(view, list):
        prefix = schema.get("prefixItems", [])
        rest = schema.get("items") or {}
        return [
            document_of(member, prefix[at] if at < len(prefix) else rest)
            for at, member in enumerate(view)
        ]
    return view
