"""The list of all modules with the first sentences of their docstrings. ``make house`` prints it."""

import ast
from pathlib import Path

from tests.house.sources import ROOT

PACKAGE = ROOT / "ckptfmt"
TOOLS = ROOT / "tools" / "ckptfmt_tools"


def purpose_of(path: Path) -> str:
    """Return the first sentence of a module's docstring."""
    docstring = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    return docstring.partition("\n\n")[0].replace("\n", " ").rstrip(".")


def list_files() -> list[str]:
    """Return a line for each module of the package and then of the tools, the top level first."""
    return [*_list(PACKAGE), *_list(TOOLS)]


def _list(package: Path) -> list[str]:
    paths = [path for path in package.rglob("*.py") if path.name != "__init__.py"]
    names = {path.relative_to(package).as_posix(): path for path in paths}
    ordered = sorted(names, key=lambda name: ("/" in name, name))
    return [f"{name:34} {purpose_of(names[name])}" for name in ordered]
