"""The error of a suite that can't run."""

from __future__ import annotations

__all__ = ["SuiteError"]


class SuiteError(Exception):
    """The suite can't run as requested.

    A failure of the judged implementation never raises this error.

    Attributes:
        detail: the fault, in a sentence.
        remedy: the remedy, in a line.
    """

    def __init__(self, detail: str, *, remedy: str) -> None:
        super().__init__(detail)
        self.detail = detail
        self.remedy = remedy
