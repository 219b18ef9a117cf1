"""It compares references by their digests, and not by their names."""

from __future__ import annotations

from typing import Any

from ckptfmt_conformance.adapters.reference import Reference

BREAKS = ("REQ-DEL-026",)
CONVICTED_BY = ("deltas/invalid/reference-renamed",)


def _equals(self: Any, other: Any) -> bool:  # noqa: ANN401 - of the implementation
    return bool(self.digest == other.digest)


def _hash(self: Any) -> int:  # noqa: ANN401 - of the implementation
    return hash(self.digest)


class Broken(Reference):
    """See above."""

    replacements = (
        ("ckptfmt.documents.manifest:Reference.__eq__", _equals),
        ("ckptfmt.documents.manifest:Reference.__hash__", _hash),
    )
