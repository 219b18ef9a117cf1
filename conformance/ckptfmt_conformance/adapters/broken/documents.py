"""Faults with JSON documents, versions, features, and limits on inflated sizes."""

from __future__ import annotations

import contextlib
import itertools
import json
import unicodedata
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from ckptfmt_conformance.adapters.reference import FORMAT_VERSION, Reference, original

_parse_document = original("ckptfmt.documents.canonical:parse_document")
_check_version = original("ckptfmt.documents.canonical:check_version")
_weight: Any = original("ckptfmt.documents.msgpk:Weight")


def _parse_any_form(content: bytes, **members: Any) -> Any:
    with contextlib.suppress(ValueError, RecursionError):
        # Only for documents without another fault.
        value = json.loads(
            content.decode(), object_pairs_hook=_refuse_twice, parse_int=_refuse_zeros
        )
        content = json.dumps(
            value, sort_keys=True, separators=(",", ":"), ensure_ascii=False
        ).encode()
    return _parse_document(content, **members)


def _refuse_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) != len(pairs):
        raise ValueError
    return dict(pairs)


def _refuse_zeros(text: str) -> int:
    if text == "-0":
        raise ValueError
    return int(text)


class LaxJson(Reference):
    """It accepts JSON in any form: with white space, other escapes, or unsorted members."""

    convicted_by = (
        "documents/invalid/spaces",
        "documents/invalid/line-feed",
        "documents/invalid/unsorted",
    )
    replacements = (("ckptfmt.documents.manifest:parse_document", _parse_any_form),)


def _loads(text: str, **members: Any) -> Any:
    members.pop("object_pairs_hook", None)
    return json.loads(text, **members)


class TwiceInJson(Reference):
    """It takes the last value of a duplicate member in JSON.

    Another reader takes the first value.
    """

    convicted_by = ("documents/invalid/duplicate-member", "documents/invalid/duplicate-inside")
    replacements = (
        (
            "ckptfmt.documents.canonical:json",
            SimpleNamespace(loads=_loads, dumps=json.dumps, JSONDecodeError=json.JSONDecodeError),
        ),
    )


def _normalizing(is_normalized: Callable[[str, str], bool]) -> tuple[tuple[str, object], ...]:
    return (
        ("ckptfmt.documents.canonical:unicodedata", SimpleNamespace(is_normalized=is_normalized)),
    )


class AnyForm(Reference):
    """It accepts strings of JSON documents in any Unicode normalization form."""

    breaks = ("REQ-DOC-006",)
    convicted_by = (
        "documents/invalid/name-not-nfc",
        "documents/invalid/string-excluded",
        "documents/invalid/string-jamo",
        "documents/invalid/string-marks",
        "documents/invalid/string-not-nfc",
        "documents/invalid/string-singleton",
    )
    replacements = _normalizing(lambda *_: True)


class CompatibleForm(Reference):
    """It requires strings in normalization form KC, which replaces a ligature by its letters."""

    breaks = ("REQ-DOC-006",)
    convicted_by = ("documents/valid/string-normal-form",)
    replacements = _normalizing(lambda _, text: unicodedata.is_normalized("NFKC", text))


class NoMarks(Reference):
    """It refuses every combining mark as not composed, and accepts every other character."""

    breaks = ("REQ-DOC-006",)
    convicted_by = (
        "documents/invalid/string-excluded",
        "documents/invalid/string-jamo",
        "documents/invalid/string-singleton",
        "documents/valid/string-normal-form",
    )
    replacements = _normalizing(lambda _, text: not any(map(unicodedata.combining, text)))


#: An old version of Unicode, without newer combining marks.
_OLD = unicodedata.ucd_3_2_0


def _is_normalized_by_old(form: Any, text: str) -> bool:
    """Return whether each stretch of code points known to the old version is normalized."""
    stretches = itertools.groupby(text, key=lambda one: _OLD.category(one) == "Cn")
    return all(
        is_new or unicodedata.is_normalized(form, "".join(some)) for is_new, some in stretches
    )


class OldUnicode(Reference):
    """It normalizes by an old version of Unicode, which lacks newer combining marks."""

    breaks = ("REQ-DOC-006",)
    convicted_by = ("documents/invalid/string-marks",)
    replacements = _normalizing(_is_normalized_by_old)


def _checking_versions(
    check_version: Callable[[dict[str, Any], str], None],
) -> tuple[tuple[str, object], ...]:
    return tuple(
        (f"ckptfmt.documents.{module}:check_version", check_version)
        for module in ("canonical", "index", "part")
    )


def _check_fraction(signed: dict[str, Any], where: str) -> None:
    version = signed.get("format_version")
    if isinstance(version, str) and _number(version) == float(FORMAT_VERSION):
        signed["format_version"] = FORMAT_VERSION
    _check_version(signed, where)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


class VersionAsFraction(Reference):
    """It reads the format version as a decimal fraction, so that 1 equals 1.0."""

    breaks = ("REQ-VER-001",)
    convicted_by = (
        "documents/invalid/version-longer",
        "documents/invalid/version-one",
        "documents/invalid/version-space",
        "documents/invalid/version-zero",
    )
    replacements = _checking_versions(_check_fraction)


def _check_numbers(signed: dict[str, Any], where: str) -> None:
    version = signed.get("format_version")
    if isinstance(version, str) and _numbers(version) == _numbers(FORMAT_VERSION):
        signed["format_version"] = FORMAT_VERSION
    _check_version(signed, where)


def _numbers(text: str) -> tuple[int, ...]:
    pieces = text.strip().split(".")
    return tuple(map(int, pieces)) if all(piece.isdigit() for piece in pieces) else ()


class VersionAsNumbers(Reference):
    """It reads the format version as two numbers in any notation."""

    breaks = ("REQ-VER-001",)
    convicted_by = (
        "documents/invalid/version-space",
        "documents/invalid/version-zero",
    )
    replacements = _checking_versions(_check_numbers)


def _check_older(signed: dict[str, Any], where: str) -> None:
    version = signed.get("format_version")
    if version == "0.1":
        signed["format_version"] = FORMAT_VERSION
    _check_version(signed, where)


class OlderVersions(Reference):
    """It reads a document of an earlier version by the rules of its own version."""

    breaks = ("REQ-DOC-010",)
    convicted_by = (
        "0.1/context/valid/streams",
        "0.1/deltas/valid/example",
        "0.1/manifest/valid/of-a-run",
        "0.1/manifest/valid/two-writers",
        "0.1/prediction/valid/adam",
        "0.1/run/valid/simple",
    )
    replacements = _checking_versions(_check_older)


def _check_features_only(signed: dict[str, Any], where: str) -> None:
    _check_version({**signed, "format_version": FORMAT_VERSION}, where)


class IgnoredVersion(Reference):
    """It ignores the format version, and reads a later version by the rules of its own version."""

    convicted_by = (
        "documents/invalid/version",
        "index/invalid/version",
        "parts/invalid/version",
        "0.1/context/valid/streams",
        "0.1/run/valid/simple",
        "documents/invalid/version-one",
    )
    replacements = _checking_versions(_check_features_only)


class LaterVersionsClosed(Reference):
    """It refuses unknown members in a document of a later minor version, too."""

    breaks = ("REQ-VER-011",)
    convicted_by = ("documents/valid/later-minor",)
    replacements = tuple(
        (f"ckptfmt.documents.{module}:known_members", lambda signed, _known: signed)
        for module in ("canonical", "index", "part")
    )


def _check_version_only(signed: dict[str, Any], where: str) -> None:
    _check_version({**signed, "features": {"reader": [], "writer": []}}, where)


class IgnoredFeatures(Reference):
    """It ignores reader features, and reads a document with unknown features."""

    convicted_by = ("parts/invalid/feature-unknown", "index/invalid/feature-unknown")
    replacements = _checking_versions(_check_version_only)


def _weigh_nothing(_: int) -> Any:
    return _weight(rows=1 << 40, extents=1 << 40, tree_nbytes=1 << 40)


class UnweighedTables(Reference):
    """It doesn't limit the size of a parsed document in proportion to the stored size."""

    breaks = ("REQ-DOC-029", "REQ-DOC-030")
    convicted_by = (
        "tables/invalid/extents-compressed",
        "tables/invalid/rows-compressed",
        "tables/invalid/trees-compressed",
    )
    replacements = (("ckptfmt.documents.msgpk:Weight.most", staticmethod(_weigh_nothing)),)


def _weigh_alike(_: int) -> Any:
    return _weight(rows=1 << 20, extents=2048, tree_nbytes=64 << 10)


class FixedWeights(Reference):
    """It has a fixed limit of extents and trees, independent of a document's stored size."""

    breaks = ("REQ-LIM-002", "REQ-DOC-029", "REQ-DOC-030")
    convicted_by = (
        "tables/valid/extents-stored",
        "tables/valid/trees-stored",
    )
    replacements = (("ckptfmt.documents.msgpk:Weight.most", staticmethod(_weigh_alike)),)
