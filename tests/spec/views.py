"""The JSON view of the msgpack documents: byte strings as lower-case hex, everything else as it is."""

import functools
import json
import re

from tests.spec.pages import SCHEMA

HEX = re.compile(r"([0-9a-f]{2})*")


@functools.cache
def load_schema(name):
    return json.loads((SCHEMA / f"{name}.schema.json").read_text("utf-8"))


def resolve(schema):
    """What a schema says after its references: all of it in one map."""
    while "$ref" in schema:
        file, pointer = schema["$ref"].split("#")
        target = load_schema(file.removesuffix(".schema.json"))
        for step in pointer.strip("/").split("/"):
            target = target[step]
        schema = target | {key: value for key, value in schema.items() if key not in {"$ref", "$comment"}}
    return schema


def view_of(value):
    """The JSON view of a msgpack document's signed map."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {key: view_of(member) for key, member in value.items()}
    return [view_of(member) for member in value] if isinstance(value, list) else value


def properties_of(schema):
    """What a schema says of members; of alternatives all that any of them has, the last one's where they differ."""
    known = dict(schema.get("properties", {}))
    for one in schema.get("oneOf", []):
        known |= properties_of(resolve(one))
    return known


def document_of(view, schema):
    """The signed map of a JSON view; the schema says which strings are bytes. What it doesn't know stays as it is."""
    schema = resolve(schema)
    if isinstance(view, str):
        # An edit may put something else there.
        is_hex = schema.get("contentEncoding") == "base16" and HEX.fullmatch(view)
        return bytes.fromhex(view) if is_hex else view
    if isinstance(view, dict):
        known = properties_of(schema)
        return {key: document_of(member, known.get(key, {})) for key, member in view.items()}
    if isinstance(view, list):
        prefix = schema.get("prefixItems", [])
        rest = schema.get("items") or {}
        return [document_of(member, prefix[at] if at < len(prefix) else rest) for at, member in enumerate(view)]
    return view
