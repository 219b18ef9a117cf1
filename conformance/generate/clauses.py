"""The clauses on the specification's pages, and the citing tests of each clause."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ROOT", "Clause", "citing_tests", "read_clauses"]

ROOT = Path(__file__).parents[2]

_CLAUSE = re.compile(r"- (REQ-[A-Z]{3}-[0-9]{3}) (?:\[([WRCK]+)\] )?(.+)")
_LABEL = re.compile(r"REQ-[A-Z]{3}-[0-9]{3}")
_FENCE = re.compile(r"```\w* *(.*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Clause:
    """A labelled clause: page, bound role, codes behind the arrow, and whether it is testable."""

    label: str
    page: str
    roles: str
    codes: tuple[str, ...]
    is_testable: bool


def read_clauses(spec: Path = ROOT / "spec") -> list[Clause]:
    """Return all clauses in the order of the pages."""
    found = []
    for path in sorted(spec.glob("*.md")):
        lines = path.read_text("utf-8").splitlines()
        for number, line in enumerate(lines):
            match = _CLAUSE.fullmatch(line)
            if match:
                label, roles, text = match.groups()
                notes = " ".join(lines[number + 1 : number + 4]).partition("- REQ-")[0]
                found.append(
                    Clause(
                        label=label,
                        page=path.stem,
                        roles=roles or "",
                        codes=tuple(text.partition(" -> ")[2].split(", "))
                        if " -> " in text
                        else (),
                        is_testable="untestable: " not in notes
                        and not text.startswith("withdrawn"),
                    )
                )
    return found


def citing_tests(root: Path = ROOT) -> dict[str, list[str]]:
    """Return the citing tests of each label: files below `tests/`, and pages with examples."""
    found: dict[str, set[str]] = {}
    for path in sorted((root / "tests").rglob("*.py")):
        place = path.relative_to(root / "tests")
        if place.parts[0] not in ("conformance", "mutants"):
            for label in _LABEL.findall(path.read_text("utf-8")):
                found.setdefault(label, set()).add(place.as_posix())
    for path in sorted((root / "spec").glob("*.md")):
        inside = False
        for line in path.read_text("utf-8").splitlines():
            opening = _FENCE.fullmatch(line)
            inside = inside != bool(opening) if opening else inside
            shown = line if (opening and "shows=" in line) or (inside and " -> " in line) else ""
            for label in _LABEL.findall(shown):
                found.setdefault(label, set()).add(f"examples of {path.name}")
    return {label: sorted(names) for label, names in found.items()}
