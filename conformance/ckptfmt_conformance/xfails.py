"""Lists of expected failures: one id or pattern per line, ``#`` begins a comment. They are strict.

A case on the list has to fail. If it passes, the run is red until it is taken off the list; so a list is never longer
than what is broken. Unsupported and skipped cases stay what they are.
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
    """What is expected to fail.

    Attributes:
        patterns: ids, or patterns as of a shell.
    """

    patterns: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Xfails:
        r"""Return the list that a text holds.

        >>> Xfails.parse("# known\nmanifest/invalid/*   # all of them\n").patterns
        ('manifest/invalid/*',)
        """
        lines = (line.partition("#")[0].strip() for line in text.splitlines())
        return cls(patterns=tuple(line for line in lines if line))

    @classmethod
    def read(cls, path: Path) -> Xfails:
        """Return the list in a file. Raises: SuiteError where it can't be read."""
        try:
            return cls.parse(path.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise SuiteError(
                f"the list of expected failures can't be read: {error}", remedy="Give another file with --xfails."
            ) from error

    def expects(self, case_id: str) -> bool:
        """Say whether a case is on the list."""
        return any(fnmatch.fnmatchcase(case_id, pattern) for pattern in self.patterns)

    def apply(self, case_id: str, verdict: Verdict) -> Verdict:
        """Return a verdict in the light of the list."""
        if not self.expects(case_id):
            return verdict
        if verdict.status in (Status.FAIL, Status.ERROR):
            return Verdict(status=Status.XFAIL, message=verdict.message)
        if verdict.status is Status.PASS:
            return Verdict(status=Status.XPASS, message="it passes: take it off the list of expected failures")
        return verdict

    def find_idle(self, case_ids: list[str]) -> tuple[str, ...]:
        """Return the patterns that fit none of all cases that there are: a misspelt one would excuse nothing."""
        return tuple(
            pattern
            for pattern in self.patterns
            if not any(fnmatch.fnmatchcase(case_id, pattern) for case_id in case_ids)
        )
