"""Cases of the suite.

Each area has a file of cases and a file of contents; see ``vectors/README.md``.
"""

from __future__ import annotations

import base64
import dataclasses
import fnmatch
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Final

from ckptfmt_conformance.errors import SuiteError

__all__ = ["KINDS", "PHASES", "Case", "Expectation", "load_cases", "select_cases", "vectors_root"]

#: The kinds of questions to an adapter.
KINDS: Final = ("open", "read", "reshard", "write", "context", "parse", "trajectory")
#: The phases in which a reader may find a fault, in order.
PHASES: Final = ("open", "read", "validate")

#: The folder of the contents, below the vectors. Each file there has the name of the file of its
#: cases.
_CONTENTS: Final = "files"
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
    "path": str,
    "expect": dict,
    "bug_class": str,
    "why": str,
    "source": dict,
    "files": dict,
}
_OPTIONAL: Final[dict[str, Any]] = {"request": (dict, type(None)), "profiles": list}
_REMEDY: Final = (
    "Install the wheel again, or generate the vectors anew; a released case is never edited."
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """The expected result of a case.

    Attributes:
        outcome: ``accept``, or ``reject``.
        errors: the permitted codes of a refusal; empty for ``accept``.
        phase: the last phase in which a refusal may come; "" if any phase is right.
        members: the required members of an accepted case's result.
    """

    outcome: str
    errors: tuple[str, ...] = ()
    phase: str = ""
    members: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A question to an implementation, and the expected answer.

    Attributes:
        id: area, outcome and name, such as ``manifest/invalid/tiling-gap``.
        description: the content of the case, in a line.
        requirements: the tested clauses.
        kind: an entry of `KINDS`.
        roles: the roles of implementations that have to pass the case.
        spec: the version of the format in which the case is written.
        profiles: the profiles that an implementation needs to be asked; none for a
            trajectory, and for a checkpoint of an earlier version.
        features: the required reader features.
        derived_from: the id of the valid case from which the case was made; None for none.
        edit: the change to the valid case.
        path: the path to open, below the folder of the written files; ``.`` for the folder.
        request: the request to the adapter; None for none.
        expect: the expected result.
        bug_class: the kind of harm from a failure.
        why: the harm, in a sentence.
        source: the generator of the case.
        files: the contents of the files, by their paths.
    """

    id: str
    description: str
    requirements: tuple[str, ...] = ()
    kind: str
    roles: tuple[str, ...] = ("reader",)
    spec: str = ""
    profiles: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    derived_from: str | None = None
    edit: str | list[Any] | None = None
    path: str = "."
    request: Mapping[str, Any] | None = None
    expect: Expectation
    bug_class: str = ""
    why: str = ""
    source: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    files: Mapping[str, bytes] = dataclasses.field(default_factory=dict, repr=False)

    def write_files(
        self, folder: Path, change: Callable[[str, bytes], bytes] | None = None
    ) -> Path:
        """Write the files below a folder, and return the path to open.

        Args:
            change: returns the content to write, given a path and the case's content.
        """
        for name, content in self.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if change is None else change(name, content))
        return folder / self.path


def vectors_root() -> Path:
    """Return the folder of the vectors: in the installed package, or beside the package.

    Raises: SuiteError where there are none.
    """
    package = Path(__file__).parent
    for root in (package / "vectors", package.parent / "vectors"):
        if root.is_dir():
            return root
    raise SuiteError(
        "there are no vectors in this installation",
        remedy="Install the wheel of ckptfmt-conformance again.",
    )


def load_cases(root: Path) -> tuple[Case, ...]:
    """Return all cases below a folder, sorted by id.

    Raises: SuiteError for a case without the form of the vectors' README.md.
    """
    if not root.is_dir():
        raise SuiteError(
            f"{root} is no folder", remedy="Give the folder of the vectors with --vectors."
        )
    areas = list(root.glob("*.json"))
    if not areas:
        raise SuiteError(
            f"{root} has no areas: no *.json",
            remedy="Give the folder of the vectors with --vectors.",
        )
    found = [case for path in areas for case in _load_area(path)]
    return tuple(sorted(found, key=lambda case: case.id))


def select_cases(
    cases: Iterable[Case],
    *,
    patterns: Sequence[str] = (),
    kinds: Sequence[str] = (),
    profiles: Sequence[str] = (),
) -> tuple[Case, ...]:
    """Return the cases whose id fits a pattern, of a kind in `kinds`, for the given profiles.

    A case is for profiles if the case needs none but these. An empty `patterns`, `kinds` or
    `profiles` selects all cases.
    """
    return tuple(
        case
        for case in cases
        if (not kinds or case.kind in kinds)
        and (not profiles or set(case.profiles) <= set(profiles))
        and (not patterns or any(fnmatch.fnmatchcase(case.id, pattern) for pattern in patterns))
    )


def _load_area(path: Path) -> list[Case]:
    """Return the cases of an area. Raises: SuiteError."""
    cases = _read_json(path, list)
    contents = _read_contents(path.parent / _CONTENTS / path.name) if cases else {}
    found: dict[str, Case] = {}
    for number, members in enumerate(cases):
        case = _parse_case(f"{path}, case {number}", members, contents)
        if case.id in found or not case.id.startswith(f"{path.stem}/"):
            raise SuiteError(
                f"{path}: the id {case.id!r} is there twice, or of another area", remedy=_REMEDY
            )
        found[case.id] = case
    return list(found.values())


def _read_json(path: Path, kind: type[list[Any] | dict[str, Any]]) -> Any:
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SuiteError(f"{path} can't be read: {error}", remedy=_REMEDY) from error
    if not isinstance(value, kind):
        raise SuiteError(
            f"{path} isn't a JSON {'array' if kind is list else 'object'}", remedy=_REMEDY
        )
    return value


def _read_contents(path: Path) -> dict[str, bytes]:
    """Return the contents of an area's files, by their keys. Raises: SuiteError."""
    found = {}
    for key, entry in _read_json(path, dict).items():
        match entry:
            case {"text": str(text)} if len(entry) == 1:
                found[key] = text.encode()
            case {"base64": str(text)} if len(entry) == 1:
                found[key] = _decode(path, key, text)
            case _:
                raise SuiteError(f"{path}: {key} has neither text nor base64", remedy=_REMEDY)
    return found


def _decode(path: Path, key: str, text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise SuiteError(f"{path}: {key} isn't base64: {error}", remedy=_REMEDY) from error


def _parse_case(where: str, members: dict[str, Any], contents: Mapping[str, bytes]) -> Case:
    """Return a case. Raises: SuiteError."""
    _check_members(where, members)
    where = f"{where}, {members['id']}"
    for name, key in members["files"].items():
        if not _is_inside(name) or key not in contents:
            raise SuiteError(
                f"{where}: the file {name!r} has no content, or no place", remedy=_REMEDY
            )
    if not _is_inside(members["path"]):
        raise SuiteError(f"{where}: the path {members['path']!r} leads elsewhere", remedy=_REMEDY)
    return Case(
        **{
            **members,
            **{name: tuple(members[name]) for name in ("requirements", "roles", "features")},
            "profiles": tuple(members.get("profiles", _profiles_of(members))),
            "expect": _parse_expectation(where, members["expect"]),
            "files": {name: contents[key] for name, key in members["files"].items()},
        }
    )


def _profiles_of(members: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the profiles of a case of an earlier version, which names none: of runs, R-run."""
    is_run = members["path"] == "." and "run.json" in members["files"]
    return ("R-run",) if is_run else ()


def _is_inside(path: str) -> bool:
    """Return whether a path stays below the folder where it starts."""
    place = PurePosixPath(path)
    return not place.is_absolute() and ".." not in place.parts and "\0" not in path


def _check_members(where: str, members: object) -> None:
    """Check the members of a case: names, types and kind. Raises: SuiteError."""
    if not isinstance(members, dict):
        raise SuiteError(f"{where} isn't a JSON object", remedy=_REMEDY)
    for name, kind in _MEMBERS.items():
        if not isinstance(members.get(name, ...), kind):
            raise SuiteError(f"{where}: {name} is missing, or of the wrong type", remedy=_REMEDY)
    for name, value in members.items():
        if name not in _MEMBERS and not isinstance(value, _OPTIONAL.get(name, ())):
            raise SuiteError(f"{where}: {name} is unknown, or of the wrong type", remedy=_REMEDY)
    if members["kind"] not in KINDS:
        raise SuiteError(f"{where}: {members['kind']!r} is no kind of case", remedy=_REMEDY)


def _parse_expectation(where: str, members: Mapping[str, Any]) -> Expectation:
    """Return the expected result of a case. Raises: SuiteError."""
    outcome = members.get("outcome")
    phase = members.get("phase", "")
    codes = members.get("error", [])
    errors = (codes,) if isinstance(codes, str) else tuple(codes)
    if (
        outcome not in ("accept", "reject")
        or (phase and phase not in PHASES)
        or bool(errors) != (outcome == "reject")
    ):
        raise SuiteError(f"{where}: it doesn't say what to expect", remedy=_REMEDY)
    rest = {
        name: value for name, value in members.items() if name not in ("outcome", "error", "phase")
    }
    return Expectation(outcome=outcome, errors=errors, phase=phase, members=rest)
