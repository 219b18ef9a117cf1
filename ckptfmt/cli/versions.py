"""JSON for programs: every object says which library printed it, and which format that library reads."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from ckptfmt import limits

if TYPE_CHECKING:
    from collections.abc import Mapping


def version_members() -> dict[str, str]:
    """Return the members that every object begins with."""
    import ckptfmt

    return {"version": getattr(ckptfmt, "__version__", "unknown"), "format": limits.FORMAT_VERSION}


def print_json(members: Mapping[str, object]) -> None:
    """Print one object: ASCII, so that no terminal and no encoding changes it; no NaN."""
    print(json.dumps({**version_members(), **members}, indent=2, allow_nan=False))
