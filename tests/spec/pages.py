"""The pages of the specification, cut into clauses, fences and prose."""

import functools
import re
from dataclasses import dataclass
from pathlib import Path

from conformance.generate.clauses import page_paths

ROOT = Path(__file__).parents[2]
SPEC = ROOT / "spec"
SCHEMA = SPEC / "schema"

#: The programs of this page run with those of docs/: tests/pages/test_examples_of_pages.py.
WALK = "05-first-tensor.md"

LABEL = re.compile(r"REQ-[A-Z]{3}-[0-9]{3}")
#: RFC 2119 and 8174, the longer ones first.
STRENGTH = re.compile(
    r"\b(MUST NOT|MUST|SHALL NOT|SHALL|SHOULD NOT|SHOULD|NOT"
    r" RECOMMENDED|RECOMMENDED|REQUIRED|OPTIONAL|MAY)\b"
)

_CLAUSE = re.compile(r"- (REQ-[A-Z]{3}-[0-9]{3}) (?:\[([WRCK]+)\] )?(.+)")
_FENCE = re.compile(r"```(\S*)((?: \S+)*)")


@dataclass(frozen=True)
class Clause:
    """One labelled clause: who it binds, its text, the codes behind the arrow, its notes."""

    label: str
    roles: str
    text: str
    codes: tuple[str, ...]
    notes: tuple[str, ...]
    place: str

    @property
    def withdrawn(self):
        return self.text.startswith("withdrawn")

    @property
    def untestable(self):
        return any(note.startswith("untestable: ") for note in self.notes)


@dataclass(frozen=True)
class Fence:
    """One fenced example: its language, its tags, its lines with their numbers on the page."""

    page: str
    line: int
    language: str
    tags: dict[str, str]
    content: str

    @property
    def place(self):
        return f"{self.page}:{self.line}"

    def numbered_lines(self):
        """The lines that aren't empty, with the number of each on the page."""
        return [
            (self.line + at, line)
            for at, line in enumerate(self.content.splitlines(), 1)
            if line.strip()
        ]


@dataclass(frozen=True)
class Page:
    name: str
    path: Path
    lines: tuple[str, ...]
    clauses: tuple[Clause, ...]
    fences: tuple[Fence, ...]
    #: (line number, line) of what is neither clause nor fence.
    prose: tuple[tuple[int, str], ...]


@functools.cache
def pages():
    return tuple(_parse(path) for path in page_paths(SPEC))


def page(name):
    return next(one for one in pages() if one.name == name)


def clauses():
    return [clause for one in pages() for clause in one.clauses]


def fences():
    return [fence for one in pages() if one.name != WALK for fence in one.fences]


def table(name, heading):
    """The cells of the one table of a page whose first column is called `heading`."""
    rows: list[list[str]] = []
    inside = False
    for line in page(name).lines:
        cells = (
            [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        )
        if cells and cells[0] == heading:
            assert not rows, f"{name} has two tables with the column {heading}"
            inside = True
        elif not cells:
            inside = False
        elif inside and set(cells[0]) - set("-: "):
            rows.append(cells)
    assert rows, f"{name} has no table with the column {heading}"
    return rows


def _parse(path):
    lines = path.read_text("utf-8").splitlines()
    found_clauses, found_fences, prose = [], [], []
    at = 0
    while at < len(lines):
        line = lines[at]
        if line.startswith("```"):
            end = next(n for n in range(at + 1, len(lines)) if lines[n].startswith("```"))
            opening = _FENCE.fullmatch(line)
            assert opening, f"{path.name}:{at + 1}: {line}"
            language, tags = opening.groups()
            found_fences.append(
                Fence(
                    path.name,
                    at + 1,
                    language,
                    dict(tag.partition("=")[::2] for tag in tags.split()),
                    "\n".join(lines[at + 1 : end]) + "\n",
                )
            )
            at = end + 1
        elif match := _CLAUSE.fullmatch(line):
            end = at + 1
            while end < len(lines) and lines[end].startswith("  "):
                end += 1
            found_clauses.append(_clause(match, lines[at + 1 : end], f"{path.name}:{at + 1}"))
            at = end
        else:
            prose.append((at + 1, line))
            at += 1
    return Page(
        path.name, path, tuple(lines), tuple(found_clauses), tuple(found_fences), tuple(prose)
    )


def _clause(match, notes, place):
    label, roles, text = match.groups()
    text, _, codes = text.partition(" -> ")
    return Clause(
        label=label,
        roles=roles or "",
        text=text,
        codes=tuple(codes.split(", ")) if codes else (),
        notes=tuple(note.strip() for note in notes),
        place=place,
    )
