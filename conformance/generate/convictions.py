"""Deliberate faults: broken adapters of the suite and mutants of the tests, read without import."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from conformance.generate.clauses import ROOT

__all__ = ["Conviction", "broken_adapters", "mutants"]

_BROKEN = ROOT / "conformance" / "ckptfmt_conformance" / "adapters" / "broken"
_MUTANTS = ROOT / "tests" / "mutants"


@dataclass(frozen=True, slots=True, kw_only=True)
class Conviction:
    """A deliberate fault: name, broken clauses, and the cases or test files that convict it."""

    name: str
    clauses: tuple[str, ...]
    by: tuple[str, ...]


def broken_adapters(folder: Path = _BROKEN) -> list[Conviction]:
    """Return the broken adapters with a `breaks` list of clauses."""
    found = []
    classes = (
        node
        for path in folder.glob("*.py")
        for node in ast.parse(path.read_text("utf-8")).body
        if isinstance(node, ast.ClassDef)
    )
    for one in classes:
        given = {
            node.targets[0].id: ast.literal_eval(node.value)
            for node in one.body
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
            if node.targets[0].id in ("breaks", "convicted_by")
        }
        if "breaks" in given:
            name = re.sub(r"(?<=.)(?=[A-Z])", "_", one.name).lower()
            found.append(
                Conviction(name=f"broken/{name}", clauses=given["breaks"], by=given["convicted_by"])
            )
    return sorted(found, key=lambda conviction: conviction.name)


def mutants(folder: Path = _MUTANTS) -> list[Conviction]:
    """Return the mutants: the entries of each module's `MUTANTS`."""
    return [
        Conviction(
            name=f"mutants/{path.stem}/{name}",
            clauses=given["clauses"],
            by=tuple(dict.fromkeys(f"tests/{test.partition('::')[0]}" for test in given["tests"])),
        )
        for path in sorted(folder.glob("*.py"))
        for name, given in _entries(ast.parse(path.read_text("utf-8")))
    ]


def _entries(module: ast.Module) -> Iterator[tuple[str, dict[str, tuple[str, ...]]]]:
    for node in module.body:
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if not (
            isinstance(target, ast.Name) and target.id == "MUTANTS" and isinstance(value, ast.Dict)
        ):
            continue
        for key, call in zip(value.keys, value.values, strict=True):
            if isinstance(key, ast.Constant) and isinstance(call, ast.Call):
                said = {word.arg: word.value for word in call.keywords}
                yield (
                    str(key.value),
                    {name: ast.literal_eval(said[name]) for name in ("clauses", "tests")},
                )
