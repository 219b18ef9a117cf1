"""Strict lists of expected failures: an id or pattern per line, ``#`` begins a comment.

A case on the list has to fail. If the case passes, the run is red until the entry is removed; so
the list never names a case that works. Unsupported and skipped cases keep their status.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from pathlib import Path

from ckptfmt_conformance.errors import SuiteError
from ckptfmt_conformance.judge import Status, Verdict

__all__ = ["Xfails"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Xfails:
    """A list of expected failures.

    Attributes:
        patterns: ids of cases, or shell-style patterns.
    """

    patterns: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Xfails:
        r"""Return the list in a text.

        >>> Xfails.parse("# known\nmanifest/invalid/*   # all of them\n").patterns
        ('manifest/invalid/*',)
        """
        lines = (line.partition("#")[0].strip() for line in text.splitlines())
        return cls(patterns=tuple(line for line in lines if line))

    @classmethod
    def read(cls, path: Path) -> Xfails:
        """Return the list in a file. Raises: SuiteError where the file can't be read."""
        try:
            return cls.parse(path.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise SuiteError(
                f"the list of expected failures can't be read: {error}",
                remedy="Give another file with --xfails.",
            ) from error

    def expects(self, case_id: str) -> bool:
        """Return whether a case is on the list."""
        return any(fnmatch.fnmatchcase(case_id, pattern) for pattern in self.patterns)

    def apply(self, case_id: str, verdict: Verdict) -> Verdict:
        """Return the verdict after the list is applied: XFAIL or XPASS for a case on the list."""
        if not self.expects(case_id):
            return verdict
        if verdict.status in (Status.FAIL, Status.ERROR):
            return Verdict(status=Status.XFAIL, message=verdict.message)
        if verdict.status is Status.PASS:
            return Verdict(
                status=Status.XPASS, message="it passes: take it off the list of expected failures"
            )
        return verdict

    def find_idle(self, case_ids: list[str]) -> tuple[str, ...]:
        """Return the patterns without an existing case.

        A misspelt pattern would excuse no failure.
        """
        return tuple(
            pattern
            for pattern in self.patterns
            if not any(fnmatch.fnmatchcase(case_id, pattern) for case_id in case_ids)
        )
