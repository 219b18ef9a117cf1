"""It takes a document of an earlier version for one of its own."""

from __future__ import annotations

from typing import Any

from ckptfmt_conformance.adapters.reference import FORMAT_VERSION, Reference, original

BREAKS = ("REQ-DOC-010",)
CONVICTED_BY = (
    "0.9/context/valid/streams",
    "0.9/deltas/valid/example",
    "0.9/manifest/valid/of-a-run",
    "0.9/manifest/valid/two-writers",
    "0.9/prediction/valid/adam",
    "0.9/run/valid/simple",
)

_check_version = original("ckptfmt.documents.canonical:check_version")


def _check_any(signed: dict[str, Any], where: str) -> None:
    version = signed.get("format_version")
    if isinstance(version, str) and version in ("0.1", "0.9"):
        signed["format_version"] = FORMAT_VERSION
    _check_version(signed, where)


class Broken(Reference):
    """See above."""

    replacements = (
        ("ckptfmt.documents.canonical:check_version", _check_any),
        ("ckptfmt.documents.index:check_version", _check_any),
        ("ckptfmt.documents.part:check_version", _check_any),
    )
