"""The clauses on the specification's pages, and the citing tests of each clause."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ROOT", "Clause", "citing_tests", "page_paths", "read_clauses"]

ROOT = Path(__file__).parents[2]

_CLAUSE = re.compile(r"- (REQ-[A-Z]{3}-[0-9]{3}) (?:\[([WRCK]+)\] )?(.+)")
_LABEL = re.compile(r"REQ-[A-Z]{3}-[0-9]{3}")
_FENCE = re.compile(r"```\w* *(.*)")
#: The folders of the specification's pages, in the order in which a reader meets them.
_FOLDERS = (
    "", "core", "writing", "validate", "delta", "run", "context", "companions", "appendix",
)  # fmt: skip


def page_paths(spec: Path = ROOT / "spec") -> list[Path]:
    """Return the paths of all pages: chapter by chapter, by number within a chapter."""
    return [path for folder in _FOLDERS for path in sorted((spec / folder).glob("*.md"))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Clause:
    """A labelled clause: page, bound roles, codes behind the arrow, and whether it is testable.

    `page` is the path of the page below `spec/`.
    """

    label: str
    page: str
    roles: str
    codes: tuple[str, ...]
    is_testable: bool


def read_clauses(spec: Path = ROOT / "spec") -> list[Clause]:
    """Return all clauses in the order of the pages."""
    found = []
    for path in page_paths(spec):
        lines = path.read_text("utf-8").splitlines()
        for number, line in enumerate(lines):
            match = _CLAUSE.fullmatch(line)
            if match:
                label, roles, text = match.groups()
                notes = " ".join(lines[number + 1 : number + 4]).partition("- REQ-")[0]
                found.append(
                    Clause(
                        label=label,
                        page=path.relative_to(spec).as_posix(),
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
    for path in page_paths(root / "spec"):
        inside = False
        for line in path.read_text("utf-8").splitlines():
            opening = _FENCE.fullmatch(line)
            inside = inside != bool(opening) if opening else inside
            shown = line if (opening and "shows=" in line) or (inside and " -> " in line) else ""
            for label in _LABEL.findall(shown):
                found.setdefault(label, set()).add(f"examples of {path.name}")
    return {label: sorted(names) for label, names in found.items()}
