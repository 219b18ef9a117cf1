"""What a check found: what is wrong, each thing once, and of deltas what they read from. Spec: REQ-OPN-009."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Final, Self

from ckptfmt.errors import CkptError, Code, StoreError

#: How many violations are listed.
MOST_VIOLATIONS: Final = 10_000
#: The warning where there are more.
FULL: Final = f"more is wrong than the {MOST_VIOLATIONS} violations that are listed"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FoundReference:
    """A checkpoint that another one reads from, and whether it is there.

    Attributes:
        checkpoint: name of the one that reads.
        name, digest: what it refers to.
        path: where that lies; None if it isn't there.
        reason: why it isn't: ``BASE_MISSING`` or ``BASE_MISMATCH``; empty if it is.
    """

    checkpoint: str
    name: str
    digest: str
    path: str | None
    reason: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the members for programs."""
        return {**dataclasses.asdict(self), "found": self.path is not None, "reason": self.reason or None}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClosureMember:
    """A checkpoint that was checked because another one reads from it.

    Attributes:
        nbytes: how many bytes of it were read and compared with a digest.
        violation_count: what is wrong with it by itself.
    """

    name: str
    digest: str
    nbytes: int
    violation_count: int

    @property
    def valid(self) -> bool:
        """Whether nothing was found wrong with it."""
        return not self.violation_count

    def as_json(self) -> dict[str, Any]:
        """Return the members for programs."""
        return {**dataclasses.asdict(self), "valid": self.valid}


@dataclasses.dataclass(slots=True, kw_only=True)
class Report:
    """The report of a check. It is true if nothing was found wrong: ``if validate(path): ...``.

    Attributes:
        target: name of what was checked.
        kind: ``checkpoint`` or ``run``.
        violations: breaches of the specification, each as an error with code, place, clause and remedy; those of the
            closure among them, their places below the names of its checkpoints.
        warnings: findings that are allowed, and worth knowing.
        checkpoints: names of the checkpoints that were checked, with their manifest digests; the closure's aren't here.
        references: the checkpoints that these read from.
        closure: the checkpoints that were checked for their sake.
        nbytes: how many bytes were read and compared with a digest, the closure's among them.
        on_progress: called with the number of bytes just checked.
        share: which slice of the blocks of each part is checked, from 0 on, and of how many slices; documents and
            headers are checked whatever the slice.
    """

    target: str
    kind: str
    share: tuple[int, int] = (0, 1)
    violations: list[CkptError] = dataclasses.field(default_factory=list)
    warnings: list[str] = dataclasses.field(default_factory=list)
    checkpoints: dict[str, str] = dataclasses.field(default_factory=dict)
    references: list[FoundReference] = dataclasses.field(default_factory=list)
    closure: list[ClosureMember] = dataclasses.field(default_factory=list)
    nbytes: int = 0
    on_progress: Callable[[int], None] | None = None
    _known: set[tuple[object, ...]] = dataclasses.field(default_factory=set)

    def begin(self, target: str | None = None) -> Self:
        """Return an empty report of a checkpoint that `absorb` takes over.

        Args:
            target: name of the checkpoint; None for the target of this report.
        """
        return type(self)(
            target=self.target if target is None else target,
            kind="checkpoint",
            on_progress=self.on_progress,
            share=self.share,
        )

    def count(self, nbytes: int) -> None:
        """Note that so many bytes were checked."""
        self.nbytes += nbytes
        if self.on_progress is not None:
            self.on_progress(nbytes)

    def add(self, error: CkptError) -> None:
        """Note what is wrong; what is known already isn't said again, though several need it."""
        known = (error.code, error.where, error.detail)
        if known in self._known:
            return
        if self.is_full:
            if FULL not in self.warnings:
                self.warnings.append(FULL)
            return
        self._known.add(known)
        self.violations.append(without_frames(error))

    @property
    def is_full(self) -> bool:
        """Whether so much is wrong that no more of it is listed: half a million errors take a gigabyte."""
        return len(self.violations) >= MOST_VIOLATIONS

    def absorb(self, other: Report) -> None:
        """Take over what another report found, on the way to the same end."""
        for error in other.violations:
            self.add(error)
        self.warnings += other.warnings
        self.checkpoints.update(other.checkpoints)
        self.references += other.references
        self.closure += other.closure
        self.nbytes += other.nbytes

    def __bool__(self) -> bool:
        return self.valid

    def __repr__(self) -> str:
        found = "valid" if self.valid else f"{len(self.violations)} violations, first {self.violations[0]}"
        return f"Report({self.target!r}, {self.kind}, nbytes={self.nbytes}, {found})"

    @property
    def valid(self) -> bool:
        """Whether nothing was found wrong."""
        return not self.violations

    @property
    def own_nbytes(self) -> int:
        """The number of bytes that were checked of the target itself."""
        return self.nbytes - sum(member.nbytes for member in self.closure)

    @property
    def own_violation_count(self) -> int:
        """The number of violations that are the target's own."""
        return len(self.violations) - sum(member.violation_count for member in self.closure)

    def as_json(self) -> dict[str, object]:
        """Return the report as a JSON-ready mapping."""
        return {
            "target": self.target,
            "kind": self.kind,
            "valid": self.valid,
            "violations": [violation.as_json() for violation in self.violations],
            "warnings": self.warnings,
            "checkpoints": self.checkpoints,
            "nbytes": self.nbytes,
            "references": [reference.as_json() for reference in self.references],
            "closure": [member.as_json() for member in self.closure],
        }

    def collect(self, directory: str = "") -> _Collector:
        """Return a context that adds an error to the violations instead of raising it.

        Args:
            directory: stands before its place.
        """
        return _Collector(self, directory)


def is_violation(error: BaseException | None) -> bool:
    """Return whether an error says something of what is checked, and not of who checks or of the store."""
    return isinstance(error, CkptError) and not isinstance(error, StoreError) and error.code != Code.FLOAT_ENVIRONMENT


def without_frames(error: CkptError) -> CkptError:
    """Return an error that is kept: its traceback, and those of what led to it, would keep alive what was at hand.

    A thousand damaged blocks of 64 MiB would otherwise stay in memory, each in the frames of its error.
    """
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


class _Collector:
    def __init__(self, report: Report, directory: str) -> None:
        self._report = report
        self._directory = directory

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, CkptError) or not is_violation(error):
            return False
        self._report.add(error.below(self._directory) if self._directory else error)
        return True
