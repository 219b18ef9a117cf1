"""Collect the findings of a check: each violation once, and the bases of deltas.

Spec: REQ-OPN-009.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Final, Self

from ckptfmt.errors import CkptError, Code, StoreError

#: Maximum number of listed violations.
MOST_VIOLATIONS: Final = 10_000
#: The warning if there are more violations.
FULL: Final = f"more is wrong than the {MOST_VIOLATIONS} violations that are listed"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FoundReference:
    """A reference from a checkpoint to a base, and the result of the search for the base.

    Attributes:
        checkpoint: name of the checkpoint with the reference.
        name, digest: name and digest of the base in the reference.
        path: path of the base; None if the base was not found.
        reason: ``BASE_MISSING`` or ``BASE_MISMATCH`` if the base was not found, else empty.
    """

    checkpoint: str
    name: str
    digest: str
    path: str | None
    reason: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the members of the JSON report."""
        return {
            **dataclasses.asdict(self),
            "found": self.path is not None,
            "reason": self.reason or None,
        }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClosureMember:
    """A checkpoint that was checked because another checkpoint reads from it.

    Attributes:
        nbytes: number of bytes of this checkpoint read and compared with a digest.
        violation_count: number of violations in this checkpoint itself.
    """

    name: str
    digest: str
    nbytes: int
    violation_count: int

    @property
    def valid(self) -> bool:
        """Whether no violation was found."""
        return not self.violation_count

    def as_json(self) -> dict[str, Any]:
        """Return the members of the JSON report."""
        return {**dataclasses.asdict(self), "valid": self.valid}


@dataclasses.dataclass(slots=True, kw_only=True)
class Report:
    """The report of a check, true if no violation was found: ``if validate(path): ...``.

    Attributes:
        target: name of the checked checkpoint or run.
        kind: ``checkpoint`` or ``run``.
        violations: breaches of the specification, each as an error with code, place, clause and
            remedy. Violations in the closure are included, with the checkpoint's name at the start
            of the place.
        warnings: findings that the specification allows, but that are worth knowing.
        checkpoints: names of the checked checkpoints, with their manifest digests; without the
            closure.
        references: references of these checkpoints to bases.
        closure: checkpoints that were checked because of these references.
        nbytes: number of bytes read and compared with a digest, closure included.
        on_progress: called with the number of bytes just checked.
        share: the checked slice of each part's blocks: the number of the slice, from 0 on, and the
            number of slices. Documents and headers are checked in every slice.
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
        """Return an empty report of a checkpoint, to be merged into this report by `absorb`.

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
        """Add the number of bytes just checked, and report the progress."""
        self.nbytes += nbytes
        if self.on_progress is not None:
            self.on_progress(nbytes)

    def add(self, error: CkptError) -> None:
        """Add a violation, unless an equal violation is listed already.

        If the list is full, only a warning is added, once.
        """
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
        """Whether the list of violations is full. Half a million errors would need a gigabyte."""
        return len(self.violations) >= MOST_VIOLATIONS

    def absorb(self, other: Report) -> None:
        """Merge the findings of another report into this report.

        The callback of the progress isn't called: the other report has called the same callback.
        """
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
        found = (
            "valid"
            if self.valid
            else f"{len(self.violations)} violations, first {self.violations[0]}"
        )
        return f"Report({self.target!r}, {self.kind}, nbytes={self.nbytes}, {found})"

    @property
    def valid(self) -> bool:
        """Whether no violation was found."""
        return not self.violations

    @property
    def own_nbytes(self) -> int:
        """Number of checked bytes of the target itself."""
        return self.nbytes - sum(member.nbytes for member in self.closure)

    @property
    def own_violation_count(self) -> int:
        """Number of violations in the target itself."""
        return len(self.violations) - sum(member.violation_count for member in self.closure)

    def as_json(self) -> dict[str, object]:
        """Return the report as a mapping for JSON."""
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
        """Return a context that adds a violation to the report instead of raising the error.

        Args:
            directory: prefix of the error's place.
        """
        return _Collector(self, directory)


def is_violation(error: BaseException | None) -> bool:
    """Return whether an error describes the checked data.

    Errors of the store and of the floating-point environment don't describe the checked data.
    """
    return (
        isinstance(error, CkptError)
        and not isinstance(error, StoreError)
        and error.code != Code.FLOAT_ENVIRONMENT
    )


def without_frames(error: CkptError) -> CkptError:
    """Return an error that may be kept: without traceback, cause and context.

    The frames of a traceback keep their local variables alive. A thousand damaged blocks of 64 MiB
    would otherwise stay in memory.
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
