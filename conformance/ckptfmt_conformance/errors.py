"""What keeps the suite itself from running: one sentence, and what to do about it."""

from __future__ import annotations

__all__ = ["SuiteError"]


class SuiteError(Exception):
    """The suite can't run as asked. It is never said of an implementation that fails.

    Attributes:
        detail: what is wrong, in one sentence.
        remedy: what to do about it, in one line.
    """

    def __init__(self, detail: str, *, remedy: str) -> None:
        super().__init__(detail)
        self.detail = detail
        self.remedy = remedy
