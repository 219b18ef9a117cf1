"""The files of the repository, as the tests of the house read them."""

import ast
import functools
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


@functools.cache
def repository_files() -> tuple[Path, ...]:
    """What is committed or about to be: everything but what git ignores."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split("\0")
    return tuple(sorted(path for name in listed if name and (path := ROOT / name).is_file()))


def python_files(*folders: str) -> list[Path]:
    """The modules under `folders`."""
    return [
        path
        for path in repository_files()
        if path.suffix == ".py" and path.relative_to(ROOT).parts[0] in folders
    ]


@functools.cache
def parse(path: Path) -> ast.Module:
    """The syntax tree of a module."""
    return ast.parse(path.read_text("utf-8"), filename=str(path))


def imported_modules(tree: ast.Module) -> set[str]:
    """The absolute names of all modules that a module imports, at its top or inside a function."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
    return names
