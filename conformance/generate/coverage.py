"""The table of coverage, spec/appendix/97-coverage.md: examples and convicted faults per clause."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from conformance.generate.cases import Case
from conformance.generate.clauses import ROOT, Clause, citing_tests, read_clauses
from conformance.generate.convictions import Conviction, broken_adapters, mutants
from conformance.generate.pages import all_cases

__all__ = ["find_gaps", "table_text", "write_table"]

TABLE = ROOT / "spec" / "appendix" / "97-coverage.md"

_HEAD = """\
# Coverage

For each clause, the table names an accepted example, a refused example, and a citing test.
`python -m conformance.generate` generates the table from the pages, the cases and the tests.
With `--check`, the command reports a table out of date, and testable clauses without examples.
A cell gives the first name and the number of further names; the last column gives one test.

Where a file can show the clause, the examples are cases of the suite, `conformance/vectors/`.
No file can show how a reader handles whole contents, or how an implementation writes,
commits or cleans up.
For such a clause, the refused example is an implementation with one fault that breaks the clause:

| Refused | Means |
|---|---|
| `page/invalid/...` | a file that every reader has to refuse |
| `broken/...` | a broken adapter of the suite, convicted by the cases named in the adapter |
| `mutants/...` | the reference implementation with one fault, convicted by the named tests |

The accepted example is then the convicting case or test: a conforming implementation passes it.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The evidence for a clause."""

    clause: Clause
    accepted: tuple[str, ...]
    refused: tuple[str, ...]
    tests: tuple[str, ...]


def _rows(cases: Sequence[Case]) -> list[Row]:
    accepted = _cases_of(cases, "accept")
    refused = _cases_of(cases, "reject")
    broken = _by_clause(broken_adapters())
    wrong = _by_clause(mutants())
    tests = citing_tests()
    rows = []
    for clause in read_clauses():
        label = clause.label
        convicted = broken.get(label) or wrong.get(label) or []
        cited = tuple(tests.get(label, ()))
        judges = dict.fromkeys(name for one in convicted for name in one.by)
        rows.append(
            Row(
                clause=clause,
                accepted=tuple(accepted.get(label) or judges),
                refused=tuple(refused.get(label) or (one.name for one in convicted)),
                tests=cited,
            )
        )
    return rows


def _cases_of(cases: Sequence[Case], outcome: str) -> dict[str, list[str]]:
    """Return the ids of the cases of an outcome by tested label, whole checkpoints first."""
    found: dict[str, list[str]] = {}
    for case in sorted(cases, key=lambda case: case.members["kind"] == "parse"):
        if case.members["expect"]["outcome"] == outcome:
            for label in case.members["requirements"]:
                found.setdefault(label, []).append(case.id)
    return found


def _by_clause(convictions: Iterable[Conviction]) -> dict[str, list[Conviction]]:
    found: dict[str, list[Conviction]] = {}
    for conviction in convictions:
        for label in conviction.clauses:
            found.setdefault(label, []).append(conviction)
    return found


def find_gaps(cases: Sequence[Case]) -> list[str]:
    """Return the gaps of the coverage: clauses without evidence, and names of unknown clauses."""
    rows = _rows(cases)
    labels = {row.clause.label for row in rows}
    named = {label: one.name for one in (*broken_adapters(), *mutants()) for label in one.clauses}
    named |= {label: case.id for case in cases for label in case.members["requirements"]}
    wrong = [
        f"{name} names {label}, and no page has it"
        for label, name in named.items()
        if label not in labels
    ]
    for row in rows:
        if row.clause.is_testable:
            wrong += [f"{row.clause.label} has nothing that is accepted"] * (not row.accepted)
            wrong += [f"{row.clause.label} has nothing that is refused"] * (not row.refused)
    return sorted(wrong)


def _cell(names: Sequence[str]) -> str:
    if not names:
        return ""
    return f"`{names[0]}`" + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def table_text(cases: Sequence[Case]) -> str:
    """Return the text of the page."""
    lines = [_HEAD]
    page = ""
    for row in _rows(cases):
        if row.clause.page != page:
            page = row.clause.page
            lines += [
                f"\n## [{page.rpartition('/')[2][:2]}](../{page})\n",
                "| Clause | Accepted | Refused | Test |",
                "|---|---|---|---|",
            ]
        # One test is enough here: a number would change with every added test.
        own = [_cell(row.accepted), _cell(row.refused), _cell(row.tests[:1])]
        if not row.clause.is_testable:
            own = ["can't be tested: its page says why", "", own[2]]
        lines.append(
            ("| " + " | ".join([row.clause.label, *own]) + " |")
            .replace("|  |", "| |")
            .replace("|  |", "| |")
        )
    return "\n".join(lines).replace("\n\n\n", "\n\n") + "\n"


def write_table(*, check: bool, path: Path = TABLE) -> int:
    """Write or check the table, and return 1 for gaps or a table out of date."""
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
