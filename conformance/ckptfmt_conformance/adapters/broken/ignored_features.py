"""It doesn't look at reader features: what it doesn't know, it reads as if it did."""

from __future__ import annotations

from typing import Any

from ckptfmt_conformance.adapters.reference import Reference, original

CONVICTED_BY = ("parts/invalid/feature-unknown", "index/invalid/feature-unknown")

_check_version = original("ckptfmt.documents.canonical:check_version")


def _check_version_only(signed: dict[str, Any], where: str) -> None:
    _check_version({**signed, "features": {"reader": [], "writer": []}}, where)


class Broken(Reference):
    """See above."""

    replacements = (
        ("ckptfmt.documents.canonical:check_version", _check_version_only),
        ("ckptfmt.documents.index:check_version", _check_version_only),
        ("ckptfmt.documents.part:check_version", _check_version_only),
    )
