"""The list of all modules in ARCHITECTURE.md, from their docstrings. ``python -m tests.house.file_list`` writes it."""

import ast
from pathlib import Path

from tests.house.sources import ROOT

HEADING = "## Every file"
PACKAGE = ROOT / "ckptfmt"


def purpose_of(path: Path) -> str:
    """Return the first sentence of a module's docstring."""
    docstring = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    return docstring.partition("\n\n")[0].replace("\n", " ").rstrip(".")


def file_list() -> str:
    """Return the section as it has to be."""
    paths = [
        path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"
    ]
    paths.sort(key=lambda path: (len(path.parts) > 1, path.as_posix()))
    lines = [f"- `{path.as_posix()}`: {purpose_of(PACKAGE / path)}" for path in paths]
    told = "From the docstrings; `python -m tests.house.file_list` writes this list anew."
    return "\n".join([HEADING, "", told, "", *lines, ""])


def written() -> tuple[str, str]:
    """Return what stands before the list in ARCHITECTURE.md, and the list."""
    before, heading, listed = (ROOT / "ARCHITECTURE.md").read_text("utf-8").partition(HEADING)
    return before, heading + listed


if __name__ == "__main__":
    (ROOT / "ARCHITECTURE.md").write_text(
        written()[0].rstrip() + "\n\n" + file_list(), encoding="utf-8"
    )
