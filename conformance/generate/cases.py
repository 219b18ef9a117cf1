"""Cases: their members and files, and the builders by which the pages' modules add cases."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from conformance.generate.model import Checkpoint, Edit, build
from conformance.generate.plans import Plan, expected
from conformance.generate.profiles import profiles_of_case
from conformance.generate.wire import FORMAT_VERSION

__all__ = ["BUG_CLASSES", "Case", "Page"]

#: The harm that a failure does to users of the reader.
BUG_CLASSES = {
    "AMBIGUITY": "two readers take one file for different things",
    "CRASH": "the reader dies instead of answering",
    "DAMAGE_UNSEEN": "damaged or exchanged bytes pass for what was saved",
    "ESCAPE": "the reader touches a file that isn't of the checkpoint",
    "REFUSES_VALID": "a checkpoint that is whole can't be read",
    "RESOURCE": "a small file costs much memory or time",
    "SILENT_DATA_LOSS": "something that was saved is missing, and nobody is told",
    "WRONG_BYTES": "something else than what was saved is handed on",
    "WRONG_RUN": "a run goes on from another state than it should",
}

#: The generator's own version. The content of a released case never changes within a version.
VERSION = "1"

FileMap = dict[str, bytes]


@dataclass(slots=True, kw_only=True)
class Case:
    """A case of the vectors.

    Attributes:
        members: the case's JSON members.
        files: the files of the case, by path.
    """

    members: dict[str, Any]
    files: FileMap

    @property
    def id(self) -> str:
        """Area, outcome and name."""
        return str(self.members["id"])


@dataclass(slots=True)
class Page:
    """The cases of a page or area of the specification."""

    name: str
    cases: list[Case] = field(default_factory=list)
    bases: dict[str, Checkpoint] = field(default_factory=dict)
    module: str = ""

    def __post_init__(self) -> None:
        """Record the name of the module that makes the cases."""
        caller = inspect.stack()[2].filename
        self.module = f"generate/pages/{PurePosixPath(caller).name}"

    def accept(
        self,
        slug: str,
        made: Plan | Checkpoint,
        clauses: str,
        says: str,
        *,
        why: str,
        bug: str = "REFUSES_VALID",
        edit: Edit | None = None,
        place: str = "",
        beside: FileMap | None = None,
        path: str | None = None,
        tensors: dict[str, Any] | None = None,
        features: Sequence[str] | None = None,
        after: Callable[[FileMap], object] | None = None,
        request: dict[str, Any] | None = None,
    ) -> Checkpoint:
        """Add a checkpoint for every reader to read completely.

        Args:
            slug: the case's name.
            clauses: labels without `REQ-`, separated by spaces.
            says: a description of the content, in one line.
            edit: the edit of the checkpoint.
            place: the directory of the checkpoint among the files.
            beside: further files.
            path: the path to open, if not the checkpoint.
            tensors: the expected tensors, if different from the plan.
            after: a change of the files at the end.
            request: the request; by default, a validation of everything.

        Returns: the checkpoint, for cases derived from this case.
        """
        checkpoint = build(made) if isinstance(made, Plan) else made
        if edit is not None:
            checkpoint = checkpoint.edited(edit)
        files = dict(beside or {}) | _placed(checkpoint.seal(), place)
        if after is not None:
            after(files)
        self._add(
            f"{self.name}/valid/{slug}",
            clauses,
            says,
            files,
            expect={
                "outcome": "accept",
                "tensors": expected(checkpoint.plan) if tensors is None else tensors,
            },
            path=(place if path is None else path) or ".",
            bug=bug,
            why=why,
            request={"verify": "all"} if request is None else request,
            features=checkpoint.manifest["features"]["reader"] if features is None else features,
        )
        self.bases[slug] = checkpoint
        return checkpoint

    def reject(  # noqa: PLR0917 - a row of a table of cases
        self,
        slug: str,
        of: str,
        edit: Edit | None,
        clauses: str,
        error: str,
        says: str,
        *,
        why: str,
        bug: str = "DAMAGE_UNSEEN",
        phase: str = "open",
        after: Callable[[FileMap], object] | None = None,
        place: str = "",
        beside: FileMap | None = None,
        path: str | None = None,
        files: FileMap | None = None,
        request: dict[str, Any] | None = None,
        kind: str = "open",
        features: Sequence[str] | None = None,
        page: str = "",
    ) -> None:
        """Add a checkpoint to refuse, made from a valid checkpoint by a single edit.

        Args:
            of: the slug of the valid case, or the id of a case on another page.
            edit: the edit before digests and sizes are computed again.
            error: the code; several codes, separated by spaces, where the specification allows
                several.
            after: a change of the files after signing.
            files: all files, if made elsewhere.
            request: the request; by default, a validation of everything.
            page: the page with the example, for a case of the kind `parse`.
        """
        base = self.bases.get(of)
        if files is None:
            if base is None:
                raise ValueError(f"{slug}: no checkpoint {of}")
            made = base.edited(edit) if edit is not None else base
            files = dict(beside or {}) | _placed(made.seal(), place)
        if after is not None:
            after(files)
        codes = error.split()
        self._add(
            f"{self.name}/invalid/{slug}",
            clauses,
            says,
            files,
            expect={
                "outcome": "reject",
                "error": codes[0] if len(codes) == 1 else codes,
                "phase": phase,
            },
            path=(place if path is None else path) or ".",
            bug=bug,
            why=why,
            kind=kind,
            request={"verify": "all"} if request is None else request,
            edit=says,
            derived_from=of if "/" in of else f"{self.name}/valid/{of}",
            page=page,
            features=(base.manifest["features"]["reader"] if base else [])
            if features is None
            else features,
        )

    def ask(  # noqa: PLR0917 - a row of a table of cases
        self,
        slug: str,
        of: str,
        kind: str,
        request: dict[str, Any] | None,
        clauses: str,
        says: str,
        *,
        why: str,
        result: dict[str, Any],
        files: FileMap | None = None,
        bug: str = "WRONG_BYTES",
        place: str = "",
        beside: FileMap | None = None,
        features: Sequence[str] | None = None,
        page: str = "",
    ) -> None:
        """Add a case with a request besides opening, and the expected answer."""
        base = self.bases.get(of)
        if files is None:
            if base is None:
                raise ValueError(f"{slug}: no checkpoint {of}")
            files = dict(beside or {}) | _placed(base.seal(), place)
        self._add(
            f"{self.name}/valid/{slug}",
            clauses,
            says,
            files,
            expect={"outcome": "accept", **result},
            path=place or ".",
            bug=bug,
            why=why,
            request=request,
            kind=kind,
            page=page,
            features=(base.manifest["features"]["reader"] if base else [])
            if features is None
            else features,
        )

    def _add(
        self,
        name: str,
        clauses: str,
        says: str,
        files: FileMap,
        *,
        expect: dict[str, Any],
        path: str,
        bug: str,
        why: str,
        request: dict[str, Any] | None,
        features: Sequence[str],
        kind: str = "open",
        edit: str | None = None,
        derived_from: str | None = None,
        page: str = "",
    ) -> None:
        if bug not in BUG_CLASSES:
            raise ValueError(f"{name}: no class of bugs is called {bug}")
        members = {
            "id": name,
            "description": says,
            "requirements": [f"REQ-{label}" for label in clauses.split()],
            "kind": kind,
            "roles": ["writer"] if kind == "write" else ["reader"],
            "spec": FORMAT_VERSION,
            "features": list(features),
            "derived_from": derived_from,
            "edit": edit,
            "path": path,
            "expect": expect,
            "bug_class": bug,
            "why": why,
            "source": {"generator": self.module, "version": VERSION},
        }
        members["profiles"] = profiles_of_case(members | {"files": files}, page)
        self.cases.append(
            Case(members=members | ({} if request is None else {"request": request}), files=files)
        )


def _placed(files: FileMap, place: str) -> FileMap:
    return {f"{place}/{path}": content for path, content in files.items()} if place else files
