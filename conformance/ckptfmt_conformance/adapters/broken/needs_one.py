"""It begins no launch on a run that has no checkpoint yet."""

from __future__ import annotations

from typing import Any

from ckptfmt_conformance.adapters.reference import Reference
from ckptfmt_conformance.protocol import Rejected

BREAKS = ("REQ-RUN-006",)
CONVICTED_BY = ("run/valid/launch-first", "run/valid/launch-second")


class Broken(Reference):
    """See above."""

    def launch(self, path: Any) -> dict[str, Any]:  # noqa: ANN401 - a path
        """Refuse to begin from nothing."""
        found = super().launch(path)
        if found["resume_from"] is None:
            raise Rejected("NO_VALID_CHECKPOINT", str(path), "open")
        return found
