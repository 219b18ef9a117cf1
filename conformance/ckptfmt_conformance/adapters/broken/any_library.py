"""It makes a string of whatever another loader's library and version are."""

from __future__ import annotations

from typing import Any

from ckptfmt_conformance.adapters.reference import Reference, original

BREAKS = ("REQ-CUR-022",)
CONVICTED_BY = (
    "context/invalid/loader-lib-none",
    "context/invalid/loader-lib-of-4097",
    "context/invalid/loader-version-number",
)

_cursor_map: Any = original("ckptfmt.documents.cursor:CursorMap")


class _Map(_cursor_map):  # type: ignore[misc]
    """A map whose names are looked at otherwise, where it is a loader's."""

    __slots__ = ()

    def text(self, name: str) -> str:
        """Return a string."""
        return str(self.members.get(name)) if self.clause == "REQ-CUR-022" else super().text(name)


class Broken(Reference):
    """See above."""

    replacements = (("ckptfmt.documents.cursor:CursorMap", _Map),)
