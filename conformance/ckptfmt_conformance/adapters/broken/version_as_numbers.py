"""It reads the version of the format as two numbers, however they are written."""

from __future__ import annotations

from typing import Any

from ckptfmt_conformance.adapters.reference import FORMAT_VERSION, Reference, original

BREAKS = ("REQ-VER-001",)
CONVICTED_BY = (
    "documents/invalid/version-space",
    "documents/invalid/version-zero",
)

_check_version = original("ckptfmt.documents.canonical:check_version")


def _check_any(signed: dict[str, Any], where: str) -> None:
    version = signed.get("format_version")
    if isinstance(version, str) and _numbers(version) == _numbers(FORMAT_VERSION):
        signed["format_version"] = FORMAT_VERSION
    _check_version(signed, where)


def _numbers(text: str) -> tuple[int, ...]:
    pieces = text.strip().split(".")
    return tuple(map(int, pieces)) if all(piece.isdigit() for piece in pieces) else ()


class Broken(Reference):
    """See above."""

    replacements = (
        ("ckptfmt.documents.canonical:check_version", _check_any),
        ("ckptfmt.documents.index:check_version", _check_any),
        ("ckptfmt.documents.part:check_version", _check_any),
    )
