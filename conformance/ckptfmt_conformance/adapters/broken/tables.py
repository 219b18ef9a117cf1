"""Faults with the tables of index and parts: form, order, names and limits."""

from __future__ import annotations

import posixpath
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptfmt_conformance.adapters.reference import CkptError, Code, Reference, original
from ckptfmt_conformance.protocol import Rejected

_check_version = original("ckptfmt.documents.canonical:check_version")
_columns = original("ckptfmt.documents.packed:Columns")
_parse_origin = original("ckptfmt.documents.tables:parse_origin")
_check_scopes = original("ckptfmt.documents.tables:check_scopes")
_place_extents = original("ckptfmt.documents.holdings:place_extents")
_check_increasing = original("ckptfmt.documents.packed:Columns.check_increasing")
_parse_holdings = original("ckptfmt.documents.part:parse_holdings")
_strings = original("ckptfmt.documents.packed:Columns.strings")


class ColumnsEverywhere(Reference):
    """It reports every member of a wrong type in an index or part as a malformed column."""

    breaks = ("REQ-IDX-014",)
    convicted_by = (
        "index/invalid/saved-unix-s-negative",
        "index/invalid/tensors-no-map",
        "parts/invalid/boxes-no-map",
        "parts/invalid/saved-unix-s-text",
    )

    def open(self, path: Any, request: Any) -> Any:
        """Refuse with the code of columns."""
        try:
            return super().open(path, request)
        except Rejected as answer:
            is_table = "msgpack" in str(answer.where) and answer.code == "DOC_SCHEMA"
            raise Rejected(
                "COLUMN_FORM" if is_table else answer.code, answer.where, answer.phase
            ) from answer


_COLUMNS = ("COLUMN_FORM", "MANIFEST_FIELDS", "SCOPE_FORM", "UNSAFE_PATH")


class SchemaAlone(Reference):
    """It refuses every fault of an index or part with one code, as a JSON Schema validator does."""

    breaks = ("REQ-IDX-014",)
    convicted_by = (
        "index/invalid/absent-no-map",
        "index/invalid/dtypes-of-integers",
        "index/invalid/scopes-no-list",
        "parts/invalid/digests-text",
        "parts/invalid/kind-no-column",
        "parts/invalid/scope-form",
    )

    def open(self, path: Any, request: Any) -> Any:
        """Refuse with the code of documents."""
        try:
            return super().open(path, request)
        except Rejected as answer:
            raise Rejected(
                "DOC_SCHEMA" if answer.code in _COLUMNS else answer.code, answer.where, answer.phase
            ) from answer


def _check_late(signed: Any, where: str) -> Any:
    columns = _columns(signed, tuple(signed), where)
    if "aliases" not in signed:
        raise CkptError(Code.DOC_SCHEMA, "no aliases")
    _parse_origin(columns)
    return _check_version(signed, where)


class MembersFirst(Reference):
    """It checks members before the version, and the origin before the profile."""

    breaks = ("REQ-IDX-014", "REQ-DOC-010")
    convicted_by = (
        "index/invalid/order-version-first",
        "parts/invalid/order-profile-first",
    )
    replacements = (
        ("ckptfmt.documents.index:check_version", _check_late),
        ("ckptfmt.documents.part:check_version", _check_late),
    )


def _parse_late(columns: Any) -> Any:
    _check_scopes(columns)
    return _parse_origin(columns)


class TablesFirst(Reference):
    """It checks the tables of an index or part before the members common to all documents."""

    breaks = ("REQ-IDX-014",)
    convicted_by = (
        "index/invalid/order-clock-first",
        "index/invalid/order-origin-first",
        "parts/invalid/order-writer-first",
    )
    replacements = (("ckptfmt.documents.tables:parse_origin", _parse_late),)


def _place_any(rows: Any, nbytes: Any, files: Any) -> Any:
    try:
        return _place_extents(rows, nbytes, files)
    except CkptError as error:
        if error.code != "COLUMN_ORDER":
            raise
        return files.header_nbytes[rows.file]


class AnyOrder(Reference):
    """It accepts the rows of a table in any order."""

    breaks = ("REQ-IDX-003",)
    convicted_by = ("parts/invalid/no-bytes-unsorted",)
    replacements = (("ckptfmt.documents.holdings:place_extents", _place_any),)


def _check_others(columns: Any, name: str, rows: Any, **members: Any) -> None:
    if not columns.place("").endswith("#/groups/"):
        _check_increasing(columns, name, rows, **members)


class AnyGroups(Reference):
    """It accepts the groups of a part in any order."""

    breaks = ("REQ-IDX-003",)
    convicted_by = ("prediction/invalid/groups-unsorted",)
    replacements = (("ckptfmt.documents.packed:Columns.check_increasing", _check_others),)


def _place_apart(rows: Any, nbytes: Any, files: Any) -> Any:
    begins = _place_extents(rows, nbytes, files)
    places = list(zip(rows.file.tolist(), begins.tolist(), strict=True))
    if len(set(places)) != len(places):
        raise CkptError(Code.COLUMN_ORDER, "two extents in one place", where="extents")
    return begins


class OnePlaceEach(Reference):
    """It treats two empty extents at one byte as overlapping."""

    breaks = ("REQ-IDX-003",)
    convicted_by = ("parts/valid/no-bytes",)
    replacements = (("ckptfmt.documents.holdings:place_extents", _place_apart),)


def _parse_for_bounds(*arguments: Any, **options: Any) -> Any:
    try:
        return _parse_holdings(*arguments, **options)
    except CkptError as error:
        raise CkptError(
            Code.BOX_BOUNDS if error.requirement == "REQ-PRT-013" else error.code, "boxes"
        ) from error


class BoundsForForm(Reference):
    """It reports a redundant full shape of a box as a box outside its tensor."""

    breaks = ("REQ-PRT-013",)
    convicted_by = (
        "parts/invalid/cut-shape-spelled-out",
        "parts/invalid/cut-shape-spelled-out-first",
    )
    replacements = (("ckptfmt.documents.part:parse_holdings", _parse_for_bounds),)


def _check_nothing(*_: object, **__: object) -> None:
    return None


class AcceptedGap(Reference):
    """It doesn't check that boxes tile their tensor, and returns uninitialized memory in gaps."""

    convicted_by = (
        "index/invalid/tiling-gap",
        "index/invalid/tiling-gap-inside",
        "index/invalid/tiling-overlap",
    )
    replacements = (
        ("ckptfmt.read.files:check_index_tiling", _check_nothing),
        ("ckptfmt.layout.merge:check_sharding", _check_nothing),
    )


class AnyCorners(Reference):
    """It doesn't limit the number of corners of a tensor's boxes."""

    breaks = ("REQ-LIM-001",)
    convicted_by = ("index/invalid/corners-beyond",)
    replacements = (("ckptfmt.limits:CORNERS", 1 << 62),)


class FewCuts(Reference):
    """It refuses tensors cut in more than seven dimensions."""

    breaks = ("REQ-LIM-002",)
    convicted_by = ("index/valid/cut-in-8",)
    replacements = (("ckptfmt.limits:SPLIT_NDIM", 7),)


class ManyCuts(Reference):
    """It doesn't limit the number of cut dimensions of a tensor."""

    breaks = ("REQ-LIM-001",)
    convicted_by = ("index/invalid/cut-in-9",)
    replacements = (("ckptfmt.limits:SPLIT_NDIM", 32),)


_MOST_NBYTES = 255


def _short_strings(columns: Any, key: str, **members: Any) -> Any:
    most = min(_MOST_NBYTES, members.pop("limit_nbytes", _MOST_NBYTES))
    return _strings(columns, key, limit_nbytes=most, **members)


class ShortNames(Reference):
    """It refuses names of more than 255 bytes, as a file system does."""

    breaks = ("REQ-LIM-002",)
    convicted_by = ("index/valid/name-of-4096",)
    replacements = (("ckptfmt.documents.packed:Columns.strings", _short_strings),)


class NormalNames(Reference):
    """It normalizes the names of tensors to form C."""

    breaks = ("REQ-IDX-011",)
    convicted_by = ("index/valid/names-of-two-forms", "index/valid/unicode-order")

    def open(self, path: Path, request: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """Open the checkpoint, and rename all tensors."""
        answer = super().open(path, request)
        tensors = {
            unicodedata.normalize("NFC", name): one for name, one in answer["tensors"].items()
        }
        return {**answer, "tensors": tensors}


class TidiedNames(Reference):
    """It treats the name of a tensor as a path, and normalizes the path."""

    breaks = ("REQ-IDX-011",)
    convicted_by = ("index/valid/stray-paths",)

    def open(self, path: Path, request: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """Open the checkpoint, and rename its tensors."""
        answer = super().open(path, request)
        return {
            **answer,
            "tensors": {posixpath.normpath(name): one for name, one in answer["tensors"].items()},
        }


def _find_by_name(self: Any, field: str, name: str, scope: str = "global") -> Any:
    return self.tensors.get((field, name, scope))


class NamesOnly(Reference):
    """It finds a tensor by its name, but not by an alias."""

    breaks = ("REQ-IDX-013",)
    convicted_by = (
        "opening/valid/read-by-alias",
        "trees/valid/reference-to-an-alias",
    )
    replacements = (("ckptfmt.read.files:CheckpointFiles.find", _find_by_name),)
