"""It compares steps and launches as text: with one more digit, the greater number is the smaller."""

from __future__ import annotations

import dataclasses
from typing import Any

from ckptfmt_conformance.adapters.reference import Reference, original

BREAKS = ("REQ-RUN-009",)
CONVICTED_BY = ("run/valid/numbers", "run/valid/launch-of-five-digits")

_iter_lineage = original("ckptfmt.run.lineage:iter_lineage")


class _Text(int):
    """A number that is ordered by its digits, as they stand in a name."""

    def __lt__(self, other: int) -> bool:
        return str(int(self)) < str(int(other))

    def __gt__(self, other: int) -> bool:
        return str(int(self)) > str(int(other))

    def __le__(self, other: int) -> bool:
        return str(int(self)) <= str(int(other))

    def __neg__(self) -> _Backwards:
        return _Backwards(self)


class _Backwards(_Text):
    """The same, the greatest first."""

    def __lt__(self, other: int) -> bool:
        return _Text.__gt__(self, other)


def _iter_by_text(launches: list[Any], entries: list[Any]) -> Any:  # noqa: ANN401 - of the implementation
    return _iter_lineage(
        [dataclasses.replace(one, launch=_Text(one.launch)) for one in launches],
        [dataclasses.replace(one, step=_Text(one.step), launch=_Text(one.launch)) for one in entries],
    )


class Broken(Reference):
    """See above."""

    replacements = (("ckptfmt.run.lineage:iter_lineage", _iter_by_text),)
