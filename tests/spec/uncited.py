"""Which clauses no test cites yet. ``python -m tests.spec.uncited`` writes the list anew; it may only get shorter."""

import re

from tests.house.sources import python_files
from tests.spec.pages import LABEL, ROOT, clauses, fences

LIST = ROOT / "tests" / "spec" / "uncited.txt"

_HEADER = """\
# Clauses that no test cites yet. A test fails if one of these is cited, or if a clause is neither cited nor here.
# Lines are taken out, never put in: whoever adds a clause adds a test. To write it anew: python -m tests.spec.uncited
"""
_REFUSED = re.compile(r" -> [A-Z_0-9]+((?: REQ-[A-Z]{3}-[0-9]{3})+)$")


def cited_labels():
    """The labels that a test or an executed example cites."""
    found = set()
    for path in python_files("tests", "conformance"):
        found |= set(LABEL.findall(path.read_text("utf-8")))
    for fence in fences():
        found |= set(LABEL.findall(fence.tags.get("shows", "")))
        for _, line in fence.numbered_lines():
            match = _REFUSED.search(line)
            found |= set(LABEL.findall(match[1])) if match else set()
    return found


def uncited_labels():
    """The labels of the testable clauses that nothing cites."""
    testable = {
        clause.label for clause in clauses() if not clause.untestable and not clause.withdrawn
    }
    return testable - cited_labels()


def listed_labels():
    """The labels in the list."""
    return {
        line for line in LIST.read_text("utf-8").splitlines() if line and not line.startswith("#")
    }


if __name__ == "__main__":
    LIST.write_text(_HEADER + "".join(f"{label}\n" for label in sorted(uncited_labels())), "utf-8")
