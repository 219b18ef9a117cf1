"""It doesn't look at the version of the format: a later one is read by the rules of this one."""

from __future__ import annotations

from typing import Any

from ckptfmt_conformance.adapters.reference import FORMAT_VERSION, Reference, original

CONVICTED_BY = (
    "documents/invalid/version",
    "index/invalid/version",
    "parts/invalid/version",
    "0.9/context/valid/streams",
    "0.9/run/valid/simple",
    "documents/invalid/version-1-of-10",
)

_check_version = original("ckptfmt.documents.canonical:check_version")


def _check_features_only(signed: dict[str, Any], where: str) -> None:
    _check_version({**signed, "format_version": FORMAT_VERSION}, where)


class Broken(Reference):
    """See above."""

    replacements = (
        ("ckptfmt.documents.canonical:check_version", _check_features_only),
        ("ckptfmt.documents.index:check_version", _check_features_only),
        ("ckptfmt.documents.part:check_version", _check_features_only),
    )
