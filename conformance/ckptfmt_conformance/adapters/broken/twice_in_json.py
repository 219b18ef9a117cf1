"""Of a member that stands twice in JSON, it takes the last: another reader takes the first."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

from ckptfmt_conformance.adapters.reference import Reference

CONVICTED_BY = ("documents/invalid/duplicate-member", "documents/invalid/duplicate-inside")


def _loads(text: str, **members: Any) -> Any:  # noqa: ANN401 - any value of JSON
    members.pop("object_pairs_hook", None)
    return json.loads(text, **members)


class Broken(Reference):
    """See above."""

    replacements = (
        (
            "ckptfmt.documents.canonical:json",
            SimpleNamespace(loads=_loads, dumps=json.dumps, JSONDecodeError=json.JSONDecodeError),
        ),
    )
