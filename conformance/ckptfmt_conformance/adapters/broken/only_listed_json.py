"""It takes true, false and null in a shard's header for JSON that can't be parsed."""

from __future__ import annotations

from typing import Any

from ckptfmt_conformance.adapters.reference import CkptError, Code, Reference, original

BREAKS = ("REQ-SHD-011",)
CONVICTED_BY = (
    "shards/invalid/box-null",
    "shards/invalid/extent-true",
    "shards/invalid/offset-false",
    "shards/invalid/shape-null",
    "shards/invalid/tag-null",
)

_parse_header = original("ckptfmt.documents.shard:_parse_header")


def _has_other(value: Any) -> bool:  # noqa: ANN401 - of the implementation
    if isinstance(value, dict | list):
        return any(map(_has_other, value.values() if isinstance(value, dict) else value))
    return value is None or isinstance(value, bool)


def _parse(text: bytes, where: str) -> Any:  # noqa: ANN401 - of the implementation
    header = _parse_header(text, where)
    if _has_other(header):
        raise CkptError(Code.SHARD_HEADER_SYNTAX, "a value of another kind", where=where)
    return header


class Broken(Reference):
    """See above."""

    replacements = (("ckptfmt.documents.shard:_parse_header", _parse),)
