"""Checks compiled from JSON Schemas: whether a value fits, in a tenth of a validator's time.

A validator of the package jsonschema finds all violations, with places and texts; nearly all
documents have none. A compiled check only finds out whether there are violations.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, Final, TypeAlias

#: A function that returns whether a JSON value without fractions fits.
Fits: TypeAlias = Callable[[Any], bool]

#: Keywords that constrain nothing.
_NOTES: Final = frozenset({"$comment", "$id", "$schema", "contentEncoding", "title"})
_OBJECTS: Final = frozenset(
    {"properties", "additionalProperties", "required", "propertyNames", "maxProperties"}
)
_ARRAYS: Final = frozenset({"prefixItems", "items", "minItems", "maxItems", "uniqueItems"})
_STRINGS: Final = frozenset({"pattern", "minLength", "maxLength"})
_INTEGERS: Final = frozenset({"minimum", "maximum"})
_TYPES: Final[dict[str, type]] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "boolean": bool,
    "null": type(None),
}


def compile_schema(schema: Any) -> Fits:
    """Return the check of a JSON Schema without references.

    The check takes values of `json.loads` without fractions: dicts, lists, strings, integers, bools
    and None. Lengths and numbers of members are compared before members.

    Raises: ValueError for a schema with a keyword that isn't known here.
    """
    if isinstance(schema, bool):
        return lambda _: schema
    checks: list[Fits] = []
    keywords = schema.keys() - _NOTES
    for keyword in ("type", "const", "enum", "anyOf", "oneOf"):
        if keyword in schema:
            checks.append(_COMPILERS[keyword](schema[keyword]))
            keywords -= {keyword}
    for known, compile_kind in (
        (_INTEGERS, _compile_integers),
        (_STRINGS, _compile_strings),
        (_ARRAYS, _compile_arrays),
        (_OBJECTS, _compile_objects),
    ):
        if keywords & known:
            checks.append(compile_kind(schema))
            keywords -= known
    if keywords:
        raise ValueError(f"no check is compiled from {sorted(keywords)}")
    return _all_of(checks)


def _all_of(checks: list[Fits]) -> Fits:
    if len(checks) == 1:
        return checks[0]
    return lambda value: all(check(value) for check in checks)


def _compile_type(names: str | list[str]) -> Fits:
    types = frozenset(_TYPES[name] for name in ([names] if isinstance(names, str) else names))
    return lambda value: type(value) in types


def _compile_enum(values: list[Any]) -> Fits:
    if not all(isinstance(value, str | int | None) for value in values):
        raise ValueError("no check is compiled from an enum of objects or arrays")
    # True equals 1 in Python, and not in JSON.
    known = frozenset((type(value), value) for value in values)
    scalars = frozenset(type(value) for value in values)
    return lambda value: type(value) in scalars and (type(value), value) in known


def _compile_any_of(schemas: list[Any]) -> Fits:
    checks = [compile_schema(schema) for schema in schemas]
    return lambda value: any(check(value) for check in checks)


def _compile_one_of(schemas: list[Any]) -> Fits:
    checks = [compile_schema(schema) for schema in schemas]
    return lambda value: sum(check(value) for check in checks) == 1


_COMPILERS: Final[dict[str, Callable[[Any], Fits]]] = {
    "type": _compile_type,
    "const": lambda value: _compile_enum([value]),
    "enum": _compile_enum,
    "anyOf": _compile_any_of,
    "oneOf": _compile_one_of,
}


def _compile_integers(schema: dict[str, Any]) -> Fits:
    minimum = schema.get("minimum", float("-inf"))
    maximum = schema.get("maximum", float("inf"))
    return lambda value: type(value) is not int or minimum <= value <= maximum


def _compile_strings(schema: dict[str, Any]) -> Fits:
    search = re.compile(schema.get("pattern", "")).search
    minimum = schema.get("minLength", 0)
    maximum = schema.get("maxLength", float("inf"))

    def check(value: Any) -> bool:
        if type(value) is not str:
            return True
        return minimum <= len(value) <= maximum and search(value) is not None

    return check


def _compile_arrays(schema: dict[str, Any]) -> Fits:
    firsts = [compile_schema(item) for item in schema.get("prefixItems", ())]
    rest = compile_schema(schema.get("items", True))
    minimum = schema.get("minItems", 0)
    maximum = schema.get("maxItems", float("inf"))
    is_unique = schema.get("uniqueItems", False)

    def check(value: Any) -> bool:
        if type(value) is not list:
            return True
        if not minimum <= len(value) <= maximum:
            return False
        if not all(first(item) for first, item in zip(firsts, value, strict=False)):
            return False
        if not all(rest(item) for item in value[len(firsts) :]):
            return False
        return not is_unique or len({json.dumps(item, sort_keys=True) for item in value}) == len(
            value
        )

    return check


def _compile_objects(schema: dict[str, Any]) -> Fits:
    known = {name: compile_schema(member) for name, member in schema.get("properties", {}).items()}
    other = compile_schema(schema.get("additionalProperties", True))
    name_fits = compile_schema(schema.get("propertyNames", True))
    required = frozenset(schema.get("required", ()))
    maximum = schema.get("maxProperties", float("inf"))

    def check(value: Any) -> bool:
        if type(value) is not dict:
            return True
        if len(value) > maximum or not required <= value.keys():
            return False
        return all(
            name_fits(name) and known.get(name, other)(member) for name, member in value.items()
        )

    return check
