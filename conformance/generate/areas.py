"""Files of the vectors: per area, a file of cases and a file of their contents.

`vectors/README.md` describes both formats. Neither a clock nor a random number enters the files:
equal cases give equal bytes.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from blake3 import blake3

from conformance.generate.cases import Case
from conformance.generate.kept import is_kept

#: Members of a case, in the order in which a person reads them.
_ORDER = (
    "id", "description", "derived_from", "edit", "requirements", "kind", "request", "path",
    "expect", "why", "bug_class", "roles", "spec", "profiles", "features", "source", "files",
)  # fmt: skip
#: Contents made of these bytes only are written as text, all other contents as base64.
_PLAIN = frozenset(range(0x20, 0x7F)) | {ord("\n")}
_WIDTH = 120


def dump_areas(cases: Iterable[Case]) -> dict[str, bytes]:
    """Return the files of all areas by their paths below the vectors' folder."""
    areas: dict[str, list[Case]] = {}
    for case in cases:
        areas.setdefault(case.id.partition("/")[0], []).append(case)
    return {
        name: text
        for area, of_area in areas.items()
        for name, text in _dump_area(area, of_area).items()
    }


def _dump_area(area: str, cases: Sequence[Case]) -> dict[str, bytes]:
    contents: dict[str, str] = {}
    rows = []
    for case in cases:
        files = {path: _key(content) for path, content in sorted(case.files.items())}
        members = json.loads(json.dumps(case.members | {"files": files}, sort_keys=True))
        rows.append({name: members[name] for name in _ORDER if name in members})
        for path, key in files.items():
            entry = json.dumps(_entry(case.files[path]))
            if contents.setdefault(key, entry) != entry:
                raise ValueError(f"{area}: two contents have the key {key}")
    lines = ",\n".join(f'"{key}": {entry}' for key, entry in contents.items())
    return {
        f"{area}.json": f"{_text(rows)}\n".encode(),
        f"files/{area}.json": f"{{\n{lines}\n}}\n".encode(),
    }


def _key(content: bytes) -> str:
    return blake3(content).hexdigest()[:16]


def _entry(content: bytes) -> dict[str, str]:
    if _PLAIN.issuperset(content):
        return {"text": content.decode()}
    return {"base64": base64.b64encode(content).decode()}


def _text(value: object, indent: str = "") -> str:
    """Return JSON text: a short value on a single line, else a line per member or entry."""
    line = json.dumps(value, ensure_ascii=False)
    if (
        not isinstance(value, dict | list)
        or not value
        or (indent and len(indent) + len(line) < _WIDTH)
    ):
        return line
    inner = indent + "  "
    if isinstance(value, dict):
        rows, (begin, end) = (
            [f"{json.dumps(name)}: {_text(value[name], inner)}" for name in value],
            "{}",
        )
    else:
        rows, (begin, end) = [_text(entry, inner) for entry in value], "[]"
    return f"{begin}\n{inner}" + f",\n{inner}".join(rows) + f"\n{indent}{end}"


def write_areas(cases: Sequence[Case], root: Path) -> None:
    """Write the files of all areas below `root`, and remove files of areas without cases."""
    made = dump_areas(cases)
    for name in _names(root) - made.keys():
        (root / name).unlink()
    for name, content in made.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)


def _names(root: Path) -> set[str]:
    """Return the generated files below `root`: all files except the vectors of earlier versions."""
    found = (
        path
        for pattern in ("*.json", "files/*.json")
        for path in root.glob(pattern)
        if not is_kept(path.stem)
    )
    return {path.relative_to(root).as_posix() for path in found}


def find_differences(cases: Sequence[Case], root: Path) -> list[str]:
    """Return a line for each case with a difference between the files below `root` and `cases`."""
    made = dump_areas(cases)
    there = {name: (root / name).read_bytes() for name in _names(root)}
    wrong = {name for name in made.keys() | there.keys() if made.get(name) != there.get(name)}
    found = []
    for area in sorted({name.removeprefix("files/").removesuffix(".json") for name in wrong}):
        lines = _explain(
            *(
                {name: files.get(name) for name in (f"{area}.json", f"files/{area}.json")}
                for files in (made, there)
            )
        )
        # Where every case is equal, only the writing differs: spaces, order, unused contents.
        found += lines or [
            f"{name} isn't written as it is generated"
            for name in sorted(wrong)
            if Path(name).stem == area
        ]
    return found


def _explain(made: dict[str, bytes | None], there: dict[str, bytes | None]) -> list[str]:
    try:
        wanted = _by_id(made)
        given = _by_id(there)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        return [f"{next(iter(there))} can't be read: {type(error).__name__}: {error}"]
    lines = []
    for name in sorted(wanted.keys() | given.keys()):
        one = wanted.get(name)
        other = given.get(name)
        if one is None or other is None:
            lines.append(
                f"{name} "
                + ("is missing" if other is None else "isn't among the cases that are generated")
            )
        elif one != other:
            names = sorted(
                member
                for member in one.keys() | other.keys()
                if one.get(member, ...) != other.get(member, ...)
            )
            lines.append(f"{name} isn't what is generated: {', '.join(names)}")
    return lines


def _by_id(area: dict[str, bytes | None]) -> dict[str, dict[str, Any]]:
    """Return the cases of an area by id, with the contents of their files."""
    cases, contents = (json.loads(text) if text is not None else None for text in area.values())
    found = {}
    for case in cases or ():
        files = {path: (contents or {}).get(key) for path, key in case["files"].items()}
        found[case["id"]] = case | files
    return found
