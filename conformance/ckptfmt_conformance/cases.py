"""Cases: one folder each, with a ``case.json`` and the input that it speaks of."""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ckptfmt_conformance.errors import SuiteError

__all__ = ["KINDS", "PHASES", "Case", "Expectation", "load_cases", "select_cases", "vectors_root"]

#: What an adapter can be asked.
KINDS: Final = ("open", "read", "reshard", "write", "context", "parse", "trajectory")
#: When a reader may find what is wrong, in this order.
PHASES: Final = ("open", "read", "validate")

CASE_NAME: Final = "case.json"

_MEMBERS: Final[dict[str, Any]] = {
    "id": str,
    "description": str,
    "requirements": list,
    "kind": str,
    "roles": list,
    "spec": str,
    "features": list,
    "derived_from": (str, type(None)),
    "edit": (str, list, type(None)),
    "expect": dict,
    "bug_class": str,
    "why": str,
    "source": dict,
}
_OPTIONAL: Final[dict[str, Any]] = {"path": (str, type(None)), "request": (dict, type(None))}
_REMEDY: Final = "Install the wheel again, or generate the vectors anew; a released case is never edited."


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """What must come of a case.

    Attributes:
        outcome: ``accept``, or ``reject``.
        errors: of a refusal, the codes that will do.
        phase: of a refusal, the last phase in which it may come; "" if that doesn't matter.
        members: of what is accepted, what the result must hold.
    """

    outcome: str
    errors: tuple[str, ...] = ()
    phase: str = ""
    members: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One question to an implementation, and the answer that is due.

    Attributes:
        id: its place below the vectors, such as ``manifest/invalid/tiling-gap``.
        description: what is in it, in one line.
        requirements: the clauses that it tests.
        kind: one of `KINDS`.
        roles: who has to pass it.
        spec: version of the format that it is written in.
        features: reader features that it needs.
        derived_from: the valid case that it was made from.
        edit: what was done to that.
        path: what is opened, below the folder.
        request: what is asked of it.
        expect: what must come of it.
        bug_class: what kind of harm it is that a failure does.
        why: that harm, in one sentence.
        source: what generated it.
        folder: where it lies.
    """

    id: str
    description: str
    requirements: tuple[str, ...] = ()
    kind: str
    roles: tuple[str, ...] = ("reader",)
    spec: str = ""
    features: tuple[str, ...] = ()
    derived_from: str | None = None
    edit: str | list[Any] | None = None
    path: str = "input"
    request: Mapping[str, Any] | None = None
    expect: Expectation
    bug_class: str = ""
    why: str = ""
    source: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    folder: Path

    @property
    def input(self) -> Path:
        """Where that lies which is opened."""
        return self.folder / self.path


def vectors_root() -> Path:
    """Return the folder of the vectors: in the package where it is installed, beside it in a checkout.

    Raises: SuiteError where there are none.
    """
    package = Path(__file__).parent
    for root in (package / "vectors", package.parent / "vectors"):
        if root.is_dir():
            return root
    raise SuiteError("there are no vectors in this installation", remedy="Install the wheel of ckptfmt again.")


def load_cases(root: Path) -> tuple[Case, ...]:
    """Return all cases below a folder, sorted by id.

    Raises: SuiteError for a case that isn't of the form that README.md gives.
    """
    if not root.is_dir():
        raise SuiteError(f"{root} is no folder", remedy="Give the folder of the vectors with --vectors.")
    folders = [Path(folder) for folder, _, names in os.walk(root) if CASE_NAME in names]
    return tuple(sorted((_load_case(root, folder) for folder in folders), key=lambda case: case.id))


def select_cases(cases: Iterable[Case], *, patterns: Sequence[str] = (), kinds: Sequence[str] = ()) -> tuple[Case, ...]:
    """Return the cases whose id fits one of the patterns, and whose kind is one of these; none given: all."""
    return tuple(
        case
        for case in cases
        if (not kinds or case.kind in kinds)
        and (not patterns or any(fnmatch.fnmatchcase(case.id, pattern) for pattern in patterns))
    )


def _load_case(root: Path, folder: Path) -> Case:
    path = folder / CASE_NAME
    try:
        members = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise SuiteError(f"{path} can't be read: {error}", remedy=_REMEDY) from error
    _check_members(path, members)
    expected = folder.relative_to(root).as_posix()
    if members["id"] != expected:
        raise SuiteError(f"{path}: the id is {members['id']!r}, the place {expected!r}", remedy=_REMEDY)
    return Case(
        **{
            **members,
            **{name: tuple(members[name]) for name in ("requirements", "roles", "features")},
            "path": members.get("path") or "input",
            "expect": _parse_expectation(path, members["expect"]),
            "folder": folder,
        }
    )


def _check_members(path: Path, members: object) -> None:
    """Raise unless a case has the members that it should. Raises: SuiteError."""
    if not isinstance(members, dict):
        raise SuiteError(f"{path} isn't a JSON object", remedy=_REMEDY)
    for name, kind in _MEMBERS.items():
        if not isinstance(members.get(name, ...), kind):
            raise SuiteError(f"{path}: {name} is missing, or of the wrong type", remedy=_REMEDY)
    for name, value in members.items():
        if name not in _MEMBERS and not isinstance(value, _OPTIONAL.get(name, ())):
            raise SuiteError(f"{path}: {name} is unknown, or of the wrong type", remedy=_REMEDY)
    if members["kind"] not in KINDS:
        raise SuiteError(f"{path}: {members['kind']!r} is no kind of case", remedy=_REMEDY)


def _parse_expectation(path: Path, members: Mapping[str, Any]) -> Expectation:
    """Return what is expected. Raises: SuiteError."""
    outcome, phase = members.get("outcome"), members.get("phase", "")
    codes = members.get("error", [])
    errors = (codes,) if isinstance(codes, str) else tuple(codes)
    if outcome not in ("accept", "reject") or (phase and phase not in PHASES) or bool(errors) != (outcome == "reject"):
        raise SuiteError(f"{path}: it doesn't say what to expect", remedy=_REMEDY)
    rest = {name: value for name, value in members.items() if name not in ("outcome", "error", "phase")}
    return Expectation(outcome=outcome, errors=errors, phase=phase, members=rest)
