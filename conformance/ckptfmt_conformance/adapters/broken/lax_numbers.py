"""It takes any number in a shard's header that is an integer by its value."""

from __future__ import annotations

from typing import Any

from ckptfmt_conformance.adapters.reference import Reference, original

BREAKS = ("REQ-SHD-004",)
CONVICTED_BY = (
    "shards/invalid/minus-zero",
    "shards/invalid/digits-21",
)


class _Json:
    """Reads integers as Python does."""

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - of the implementation
        return getattr(_json, name)

    def loads(self, text: str, **options: Any) -> Any:  # noqa: ANN401 - of the implementation
        """Read a text."""
        return _json.loads(text, **options | {"parse_int": int})


_json: Any = original("ckptfmt.documents.shard:json")


class Broken(Reference):
    """See above."""

    replacements = (("ckptfmt.documents.shard:json", _Json()),)
