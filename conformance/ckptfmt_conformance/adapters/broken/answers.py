"""How it answers: everything alike, in a wrong phase, or not at all."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptfmt_conformance.adapters.reference import Reference
from ckptfmt_conformance.protocol import Rejected, Unsupported


class Accepting(Reference):
    """It accepts everything, and reads nothing."""

    convicted_by = ("manifest/valid/small", "parts/valid/two-writers", "index/invalid/tiling-gap")

    def open(self, path: Path, request: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """Accept it."""
        del path, request
        return {"tensors": {}}

    def parse(self, path: Path, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Accept it."""
        del path, request
        return {}


class Refusing(Reference):
    """It refuses everything."""

    breaks = ("REQ-VER-006",)
    convicted_by = ("manifest/valid/small", "parts/valid/two-writers", "index/invalid/tiling-gap")

    def open(self, path: Path, request: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """Refuse it."""
        del path, request
        raise Rejected("DOC_SYNTAX", None, "open")

    def parse(self, path: Path, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Refuse it."""
        del path, request
        raise Rejected("DOC_SYNTAX", None, "open")


class Pleading(Reference):
    """It says of everything that it doesn't support that."""

    breaks = ("REQ-VER-006",)
    convicted_by = ("manifest/valid/small", "index/invalid/tiling-gap")

    def open(self, path: Path, request: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """Say no more."""
        del path, request
        raise Unsupported("reading")


class Crashing(Reference):
    """It dies of what it should refuse, with an error that isn't its own."""

    breaks = ("REQ-ERR-001",)
    convicted_by = ("documents/invalid/empty", "index/invalid/tiling-gap")

    def open(self, path: Path, request: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """Open it, or crash."""
        try:
            return super().open(path, request)
        except Rejected as answer:
            raise RuntimeError(f"unexpected {answer.code}") from answer


class Dying(Reference):
    """Its process ends at what it should refuse; to a shell that looks like a refusal."""

    convicted_by = ("documents/invalid/empty", "index/invalid/tiling-gap")

    def open(self, path: Path, request: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """Open it, or leave."""
        try:
            return super().open(path, request)
        except Rejected:
            os._exit(1)


class Hanging(Reference):
    """It never comes back from what it should refuse."""

    convicted_by = ("documents/invalid/empty",)

    def open(self, path: Path, request: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """Open it, or wait."""
        try:
            return super().open(path, request)
        except Rejected:
            time.sleep(3600)
            raise


class Late(Reference):
    """It finds everything, but only once it has handed out what it read."""

    breaks = ("REQ-ERR-002",)
    convicted_by = ("documents/invalid/empty", "index/invalid/tiling-gap", "parts/invalid/block-digest")

    def open(self, path: Path, request: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """Open it, or say too late what is wrong."""
        try:
            return super().open(path, request)
        except Rejected as answer:
            raise Rejected(answer.code, answer.where, "validate") from answer


class WrongCode(Reference):
    """It says of all that is wrong that the document is damaged."""

    breaks = ("REQ-VER-004", "REQ-ERR-001")
    convicted_by = ("documents/invalid/empty", "index/invalid/tiling-gap", "parts/invalid/block-digest")

    def open(self, path: Path, request: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """Open it, or say the same as ever."""
        try:
            return super().open(path, request)
        except Rejected as answer:
            raise Rejected("DOC_DIGEST", answer.where, answer.phase) from answer


class Eager(Reference):
    """It reads every byte while it opens, and says so."""

    breaks = ("REQ-OPN-002",)
    convicted_by = (
        "parts/invalid/block-digest",
        "shards/invalid/bit-in-last-byte",
        "prediction/invalid/base-without-weight",
    )

    def open(self, path: Path, request: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """Read and check all there is, and call that opening."""
        try:
            self.validate(path, request or {})
            return super().open(path, request)
        except Rejected as answer:
            raise Rejected(answer.code, answer.where, "open") from answer


class EarlyClaims(Reference):
    """It says of everything that it refuses that it found it while it opened."""

    convicted_by = (
        "parts/invalid/block-digest",
        "shards/invalid/bit-in-last-byte",
        "shards/invalid/tail",
        "deltas/invalid/stored-bit",
    )

    def open(self, path: Path, request: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """Open it, or claim that opening found what is wrong."""
        try:
            return super().open(path, request)
        except Rejected as answer:
            raise Rejected(answer.code, answer.where, "open") from answer
