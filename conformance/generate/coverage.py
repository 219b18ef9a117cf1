"""The table of coverage, spec/97-coverage.md: which cases and which tests show each clause."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from conformance.generate.cases import Case
from conformance.generate.clauses import ROOT, Clause, citing_tests, read_clauses
from conformance.generate.pages import all_cases

__all__ = ["NOT_BY_FILES", "cases_of", "find_gaps", "table_text", "write_table"]

TABLE = ROOT / "spec" / "97-coverage.md"

#: Clauses that bind a reader, and that no file shows, or shows by one outcome alone: why.
NOT_BY_FILES = {
    "REQ-VER-004": "each refused case",
    "REQ-OPN-002": "what isn't read",
    "REQ-OPN-008": "memory",
    "REQ-CTX-004": "live objects",
    "REQ-CUR-006": "going on",
    "REQ-CUR-007": "going on",
    "REQ-CUR-012": "going on",
    "REQ-CUR-013": "going on",
    "REQ-CUR-014": "going on",
    "REQ-CUR-016": "going on",
    "REQ-CUR-018": "going on",
    "REQ-CUR-023": "going on",
    "REQ-PRE-003": "the thread's arithmetic",
    "REQ-ERR-001": "each refused case",
    "REQ-ERR-002": "each refused case",
}

_HEAD = """\
# Coverage

Each clause, with the cases of the suite that have to be accepted or refused by it, and a test that cites it.
The table is generated from these pages, the vectors and the tests, by `python -m conformance.generate`.
With `--check`, that says whether the table is up to date.
Of several cases the first one is named, and how many more there are; of several tests the first one.

The column "Shown by" says what kind of thing shows the clause.

| Shown by | Means |
|---|---|
| files | a case that is accepted and one that is refused |
| contents | cases that are accepted: who reads the clause otherwise finds other bytes, or refuses what is whole |
| writer, committer, cleaner | whoever works by it, so that tests show it, and cases where it leaves a trace |
| nothing | it can't be tested, for the reason that stands with it |
| anything else | no file alone, but what is named; the tests show it |
"""

_ROLES = {"W": "writer", "C": "committer", "K": "cleaner"}


def cases_of(cases: Sequence[Case], outcome: str) -> dict[str, list[str]]:
    """Return the ids of the cases of an outcome, by the labels that they test."""
    found: dict[str, list[str]] = {}
    for case in cases:
        if case.members["expect"]["outcome"] == outcome:
            for label in case.members["requirements"]:
                found.setdefault(label, []).append(case.id)
    return found


def shown_by(clause: Clause, accepted: Sequence[str], refused: Sequence[str]) -> str:
    """Return what shows a clause; "" for a gap."""
    if not clause.is_testable:
        return "nothing"
    if accepted and refused:
        return "files"
    if clause.label in NOT_BY_FILES:
        return NOT_BY_FILES[clause.label]
    if "R" not in clause.roles:
        return ", ".join(_ROLES[role] for role in clause.roles)
    return "contents" if accepted and not clause.codes else ""


def find_gaps(cases: Sequence[Case]) -> list[str]:
    """Return what is wrong with the coverage: clauses that nothing shows, and excuses that aren't needed."""
    accepted, refused, tests = cases_of(cases, "accept"), cases_of(cases, "reject"), citing_tests()
    clauses = {clause.label: clause for clause in read_clauses()}
    wrong = [f"{label} is tested by a case, and no page has it" for label in {*accepted, *refused} - clauses.keys()]
    for label, clause in clauses.items():
        how = shown_by(clause, accepted.get(label, ()), refused.get(label, ()))
        if not how:
            wrong.append(f"{label} has no case that is {'refused' if accepted.get(label) else 'accepted'}")
        elif how not in ("files", "contents", "nothing") and label not in tests:
            wrong.append(f"{label} is shown by no case and by no test")
        if label in NOT_BY_FILES and how == "files":
            wrong.append(f"{label} is excused, and has cases of both kinds")
    return sorted(wrong)


def _cell(names: Sequence[str]) -> str:
    if not names:
        return ""
    return f"`{names[0]}`" + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def table_text(cases: Sequence[Case]) -> str:
    """Return the page."""
    accepted, refused, tests = cases_of(cases, "accept"), cases_of(cases, "reject"), citing_tests()
    lines = [_HEAD]
    page = ""
    for clause in read_clauses():
        if clause.page != page:
            page = clause.page
            lines += [
                f"\n## [{page.partition('-')[0]}]({page}.md)\n",
                "| Clause | Shown by | Accepted | Refused | Test |",
                "|---|---|---|---|---|",
            ]
        own = accepted.get(clause.label, []), refused.get(clause.label, [])
        # One test is enough here: a number would change with every test that is added.
        cells = [clause.label, shown_by(clause, *own), *map(_cell, own), _cell(tests.get(clause.label, [])[:1])]
        lines.append("| " + " | ".join(cells).replace("|  |", "| |").replace("|  |", "| |") + " |")
    return "\n".join(lines).replace("\n\n\n", "\n\n") + "\n"


def write_table(*, check: bool, path: Path = TABLE) -> int:
    """Write the table, or say whether it is up to date; return 1 for gaps, or if it isn't."""
    cases = all_cases()
    gaps = find_gaps(cases)
    for gap in gaps:
        print(gap)
    text = table_text(cases)
    if check:
        is_old = not path.is_file() or path.read_text("utf-8") != text
        if is_old:
            print(f"{path.name} isn't what is generated; run `python -m conformance.generate`")
        return int(is_old or bool(gaps))
    path.write_text(text, "utf-8")
    return int(bool(gaps))


if __name__ == "__main__":
    sys.exit(write_table(check="--check" in sys.argv[1:]))
