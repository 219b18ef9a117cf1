"""The table of members, spec/appendix/96-fields.md: each document's members per format version."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from conformance.generate.clauses import ROOT

__all__ = ["fields_text", "write_fields"]

PAGE = ROOT / "spec" / "appendix" / "96-fields.md"

#: The schemas of each version, oldest first; the schemas of earlier versions are kept.
VERSIONS = {
    "0.1": ROOT / "spec" / "kept" / "0.1",
    "0.9": ROOT / "spec" / "kept" / "0.9",
    "0.10": ROOT / "spec" / "kept" / "0.10",
    "1.0": ROOT / "spec" / "schema",
}
#: Shared schemas are listed with the members that use them.
_SHARED = ("columns", "defs")

_HEAD = """\
# Fields

Each member of each document, version by version.
`python -m conformance.generate` generates the table from `schema/`, and from `kept/` for earlier
versions.
The page of a document describes the meaning of each member.

| Entry | Means |
|---|---|
| required | the member is in every document of the type, or in every such object of a document |
| in some | the schema requires the member in some forms, and may forbid the member in the rest |
| optional | the member may be left out |
| - | the version lacks the member |

A document with a member unknown to the document's version is refused (REQ-DOC-011).
A new member needs a feature or another version ([95](../core/95-versions-and-extensions.md)).
"""


class _Schemas:
    """The schemas of a version, by the names that schemas use for references."""

    def __init__(self, folder: Path) -> None:
        self._named = {
            path.name: json.loads(path.read_text("utf-8"))
            for path in sorted(folder.glob("*.schema.json"))
        }

    def documents(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the schemas of whole documents, each with the document's name in prose."""
        for name, schema in self._named.items():
            if name.removesuffix(".schema.json") not in _SHARED:
                yield name.removesuffix(".schema.json"), schema

    def members(self, schema: dict[str, Any], home: str, before: str = "") -> dict[str, str]:
        """Return the members below a schema: each path, and whether the member is required."""
        schema, home = self._resolved(schema, home)
        forms = schema.get("oneOf") or schema.get("anyOf")
        if forms:
            return _merged([self.members(form, home, before) for form in forms])
        found: dict[str, str] = {}
        for name, value in schema.get("properties", {}).items():
            found[before + name] = "required" if name in schema.get("required", ()) else "optional"
            found |= self.members(value, home, f"{before}{name}.")
        if "items" in schema and isinstance(schema["items"], dict):
            found |= self.members(schema["items"], home, f"{before.removesuffix('.')}[].")
        return found

    def _resolved(self, schema: dict[str, Any], home: str) -> tuple[dict[str, Any], str]:
        while "$ref" in schema:
            file, _, path = schema["$ref"].partition("#")
            home = file or home
            schema = self._named[home]
            for key in path.strip("/").split("/"):
                schema = schema[key]
        return schema, home


def _merged(forms: list[dict[str, str]]) -> dict[str, str]:
    """Return the members of several forms merged: a member missing in a form counts as optional."""
    forms = [form for form in forms if form]
    merged: dict[str, str] = {}
    for form in forms:
        for name in form:
            found = {other.get(name, "in some") for other in forms}
            merged[name] = found.pop() if len(found) == 1 else "in some"
    return merged


def fields_text() -> str:
    """Return the text of the page."""
    tables: dict[str, dict[str, dict[str, str]]] = {}
    for version, folder in VERSIONS.items():
        schemas = _Schemas(folder)
        for name, schema in schemas.documents():
            for member, how in schemas.members(schema, f"{name}.schema.json").items():
                tables.setdefault(name, {}).setdefault(member, {})[version] = how
    lines = [_HEAD]
    for name, members in tables.items():
        lines += [
            f"## {name}\n",
            "| Member | " + " | ".join(VERSIONS) + " |",
            "|---|" + "---|" * len(VERSIONS),
        ]
        lines += [
            f"| `{member}` | " + " | ".join(how.get(version, "-") for version in VERSIONS) + " |"
            for member, how in members.items()
        ]
        lines.append("")
    return "\n".join(lines)


def write_fields(*, check: bool, path: Path = PAGE) -> int:
    """Write or check the page, and return 1 for a page out of date."""
    text = fields_text()
    if not check:
        path.write_text(text, "utf-8")
        return 0
    is_old = not path.is_file() or path.read_text("utf-8") != text
    if is_old:
        print(f"{path.name} isn't what is generated; run `python -m conformance.generate`")
    return int(is_old)
