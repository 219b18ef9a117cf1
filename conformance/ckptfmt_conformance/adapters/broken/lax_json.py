"""It takes JSON in any form: white space, other escapes and another order of members change nothing for it."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from ckptfmt_conformance.adapters.reference import Reference, original

CONVICTED_BY = ("documents/invalid/spaces", "documents/invalid/line-feed", "documents/invalid/unsorted")

_parse_document = original("ckptfmt.documents.canonical:parse_document")


def _parse_any_form(content: bytes, **members: Any) -> Any:  # noqa: ANN401 - whatever it returns
    with contextlib.suppress(ValueError, RecursionError):
        # Only where nothing else is wrong: that would be another fault.
        value = json.loads(content.decode(), object_pairs_hook=_refuse_twice, parse_int=_refuse_zeros)
        content = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    return _parse_document(content, **members)


def _refuse_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) != len(pairs):
        raise ValueError
    return dict(pairs)


def _refuse_zeros(text: str) -> int:
    if text == "-0":
        raise ValueError
    return int(text)


class Broken(Reference):
    """See above."""

    replacements = (("ckptfmt.documents.manifest:parse_document", _parse_any_form),)
