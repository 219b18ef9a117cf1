"""The language of docstrings and comments, counted. ``python -m tests.house.language`` lowers the bounds of files."""

from __future__ import annotations

import ast
import dataclasses
import io
import re
import tokenize
from pathlib import Path
from typing import Final

from tests.house.sources import ROOT

#: The files above the bounds, each with its numbers of today: they may sink, and not rise.
LIST: Final = Path(__file__).with_name("language.txt")
#: The bounds of a file: words without a noun and pronouns, for 1,000 words, as in projects that
#: read well.
HEADLESS_BOUND: Final = 2.0
PRONOUN_BOUND: Final = 30.0
#: A file with few words may have so many of each.
_FREE: Final = 2

_WORD: Final = re.compile(r"[A-Za-z']+")
_HEADLESS: Final = re.compile(r"\b(what|whatever|who|whoever|whose|whom)\b", re.IGNORECASE)
_PRONOUN: Final = re.compile(r"\b(it|its|that|those|these|one|ones|others?|else)\b", re.IGNORECASE)
#: A line on an attribute or argument that goes on from a sentence elsewhere.
_DANGLING: Final = re.compile(r"^[a-z_, *]+: (of|as for|likewise)\b", re.MULTILINE)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """The counts of one file.

    Attributes:
        words: the number of words.
        headless: the number of "what", "who" and their kind.
        pronouns: the number of "it", "that", "one" and their kind.
        dangling: the number of lines on attributes and arguments that begin with "of", "as for" or
            "likewise".
    """

    words: int
    headless: int
    pronouns: int
    dangling: int

    @classmethod
    def of(cls, source: str) -> Count:
        """Return the counts of a file's docstrings and comments."""
        text = "\n".join(_texts(source))
        return cls(
            words=len(_WORD.findall(text)),
            headless=len(_HEADLESS.findall(text)),
            pronouns=len(_PRONOUN.findall(text)),
            dangling=len(_DANGLING.findall(text)),
        )

    @property
    def rates(self) -> tuple[float, float, int]:
        """Headless words and pronouns for 1,000 words, rounded up to tenths, and the dangling lines."""
        return self._rate(self.headless), self._rate(self.pronouns), self.dangling

    def is_above(self, bounds: tuple[float, float, int]) -> bool:
        """Return whether a number is above its bound."""
        free = (self.headless <= _FREE, self.pronouns <= _FREE, False)
        return any(
            rate > bound and not few
            for rate, bound, few in zip(self.rates, bounds, free, strict=True)
        )

    def _rate(self, count: int) -> float:
        return -(-count * 10_000 // max(1, self.words)) / 10


def list_paths() -> list[str]:
    """Return the paths of the source files of the three distributions."""
    return [
        path.relative_to(ROOT).as_posix()
        for folder in ("ckptfmt", "conformance", "tools")
        for path in sorted((ROOT / folder).rglob("*.py"))
    ]


def count_files() -> dict[str, Count]:
    """Return the counts of every source file of the three distributions, by its path."""
    return {path: Count.of((ROOT / path).read_text("utf-8")) for path in list_paths()}


def read_list() -> dict[str, tuple[float, float, int]]:
    """Return the bounds of the files in the list, by path."""
    rows = (
        line.split()
        for line in LIST.read_text("utf-8").splitlines()
        if line and not line.startswith("#")
    )
    return {
        path: (float(headless), float(pronouns), int(dangling))
        for path, headless, pronouns, dangling in rows
    }


def write_list() -> None:
    """Write the list anew: bounds sink to the numbers of today, and files within the common bounds leave it."""
    before = read_list() if LIST.exists() else None
    lines = ["# path, headless words and pronouns per 1,000 words, dangling lines; see language.py"]
    for path, count in count_files().items():
        bounds = count.rates
        if before is not None:
            known = before.get(path, (HEADLESS_BOUND, PRONOUN_BOUND, 0))
            bounds = (min(known[0], bounds[0]), min(known[1], bounds[1]), min(known[2], bounds[2]))
        if count.is_above((HEADLESS_BOUND, PRONOUN_BOUND, 0)):
            lines.append(f"{path} {bounds[0]} {bounds[1]} {bounds[2]}")
    LIST.write_text("\n".join(lines) + "\n", "utf-8")


def _texts(source: str) -> list[str]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]
    texts = [text for node in nodes if (text := ast.get_docstring(node))]
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return texts + [
        token.string
        for token in tokens
        if token.type == tokenize.COMMENT and "noqa" not in token.string
    ]


if __name__ == "__main__":
    write_list()
