"""All modules, the sizes of files and functions, the language of docstrings. ``make house`` prints it."""

from __future__ import annotations

import ast
import collections
import sys
from pathlib import Path

from tests.house.file_list import list_files
from tests.house.language import Count, count_files
from tests.house.sources import ROOT

_SHOWN = 10


def count_functions(path: Path) -> dict[str, int]:
    """Return the number of lines of each function of a file without its docstring, by place."""
    lines: dict[str, int] = {}
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            has_docstring = ast.get_docstring(node) is not None
            begin = (node.body[0].end_lineno or node.lineno) + 1 if has_docstring else node.lineno
            place = f"{path.relative_to(ROOT).as_posix()}:{node.lineno} {node.name}"
            lines[place] = (node.end_lineno or node.lineno) - begin + 1
    return lines


def show_sizes(title: str, sizes: dict[str, int]) -> list[str]:
    """Return the lines on a distribution: three percentiles, and the largest ten."""
    ordered = sorted(sizes.values())
    marks = ", ".join(
        f"p{part} {ordered[min(len(ordered) - 1, len(ordered) * part // 100)]}"
        for part in (50, 90, 99)
    )
    largest = sorted(sizes.items(), key=lambda pair: -pair[1])[:_SHOWN]
    return [
        f"{title}: {len(sizes)}, lines {marks}",
        *(f"  {size:5} {place}" for place, size in largest),
        "",
    ]


def show_language(counts: dict[str, Count]) -> list[str]:
    """Return a table of the language of each folder, the worst first."""
    sums: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0, 0, 0])
    for path, count in counts.items():
        folder = "/".join(path.split("/")[:2])
        values = (count.words, count.headless, count.pronouns, count.dangling)
        sums[folder] = [one + other for one, other in zip(sums[folder], values, strict=True)]
    rows = sorted(sums.items(), key=lambda pair: -pair[1][1] / max(1, pair[1][0]))
    lines = [f"{'docstrings and comments':32} words  what/who  it/that  of.."]
    for folder, (words, headless, pronouns, dangling) in rows:
        rates = [1000 * count / max(1, words) for count in (headless, pronouns)]
        lines.append(f"{folder:32} {words:5} {rates[0]:9.1f} {rates[1]:8.1f} {dangling:5}")
    return lines


def main() -> None:
    """Print the report."""
    paths = sorted((ROOT / "ckptfmt").rglob("*.py"))
    files = {
        path.relative_to(ROOT).as_posix(): len(path.read_text("utf-8").splitlines())
        for path in paths
    }
    functions = {place: size for path in paths for place, size in count_functions(path).items()}
    lines = [
        *list_files(),
        "",
        *show_sizes("files", files),
        *show_sizes("functions", functions),
        *show_language(count_files()),
    ]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
