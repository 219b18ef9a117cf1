"""Faults of answers: the same answer to all questions, a wrong phase, or no answer."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptfmt_conformance.adapters.reference import Reference
from ckptfmt_conformance.protocol import Rejected, Unsupported


class Accepting(Reference):
    """It accepts every input without reading."""

    convicted_by = ("manifest/valid/small", "parts/valid/two-writers", "index/invalid/tiling-gap")

    def open(self, path: Path, request: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """Accept the checkpoint."""
        del path, request
        return {"tensors": {}}

    def parse(self, path: Path, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Accept the document."""
        del path, request
        return {}


class Refusing(Reference):
    """It refuses every input."""

    breaks = ("REQ-VER-006",)
    convicted_by = ("manifest/valid/small", "parts/valid/two-writers", "index/invalid/tiling-gap")

    def open(self, path: Path, request: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """Refuse the checkpoint."""
        del path, request
        raise Rejected("DOC_SYNTAX", None, "open")

    def parse(self, path: Path, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Refuse the document."""
        del path, request
        raise Rejected("DOC_SYNTAX", None, "open")


class Pleading(Reference):
    """It answers every question with "unsupported"."""

    breaks = ("REQ-VER-006",)
    convicted_by = ("manifest/valid/small", "index/invalid/tiling-gap")

    def open(self, path: Path, request: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """Raise Unsupported."""
        del path, request
        raise Unsupported("reading")


class Crashing(Reference):
    """It raises a foreign exception instead of a refusal."""

    breaks = ("REQ-ERR-001",)
    convicted_by = ("documents/invalid/empty", "index/invalid/tiling-gap")

    def open(self, path: Path, request: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """Open the checkpoint, or raise a foreign exception."""
        try:
            return super().open(path, request)
        except Rejected as answer:
            raise RuntimeError(f"unexpected {answer.code}") from answer


class Dying(Reference):
    """It exits the process instead of a refusal, which a shell can't tell from a refusal."""

    convicted_by = ("documents/invalid/empty", "index/invalid/tiling-gap")

    def open(self, path: Path, request: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """Open the checkpoint, or exit."""
        try:
            return super().open(path, request)
        except Rejected:
            os._exit(1)


class Hanging(Reference):
    """It never returns where a refusal is due."""

    convicted_by = ("documents/invalid/empty",)

    def open(self, path: Path, request: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """Open the checkpoint, or sleep."""
        try:
            return super().open(path, request)
        except Rejected:
            time.sleep(3600)
            raise


class Late(Reference):
    """It finds every fault, but only after handing out the content."""

    breaks = ("REQ-ERR-002",)
    convicted_by = (
        "documents/invalid/empty",
        "index/invalid/tiling-gap",
        "parts/invalid/block-digest",
    )

    def open(self, path: Path, request: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """Open the checkpoint, or refuse in a late phase."""
        try:
            return super().open(path, request)
        except Rejected as answer:
            raise Rejected(answer.code, answer.where, "validate") from answer


class WrongCode(Reference):
    """It reports every fault as a damaged document."""

    breaks = ("REQ-VER-004", "REQ-ERR-001")
    convicted_by = (
        "documents/invalid/empty",
        "index/invalid/tiling-gap",
        "parts/invalid/block-digest",
    )

    def open(self, path: Path, request: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """Open the checkpoint, or refuse with a constant code."""
        try:
            return super().open(path, request)
        except Rejected as answer:
            raise Rejected("DOC_DIGEST", answer.where, answer.phase) from answer


class Eager(Reference):
    """It reads every byte during opening, and reports the phase `open`."""

    breaks = ("REQ-OPN-002",)
    convicted_by = (
        "parts/invalid/block-digest",
        "shards/invalid/bit-in-last-byte",
        "prediction/invalid/base-without-weight",
    )

    def open(self, path: Path, request: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """Validate before opening, and report the phase `open`."""
        try:
            self.validate(path, request or {})
            return super().open(path, request)
        except Rejected as answer:
            raise Rejected(answer.code, answer.where, "open") from answer


class EarlyClaims(Reference):
    """It reports the phase `open` for every refusal."""

    convicted_by = (
        "parts/invalid/block-digest",
        "shards/invalid/bit-in-last-byte",
        "shards/invalid/tail",
        "deltas/invalid/stored-bit",
    )

    def open(self, path: Path, request: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """Open the checkpoint, or refuse with the phase `open`."""
        try:
            return super().open(path, request)
        except Rejected as answer:
            raise Rejected(answer.code, answer.where, "open") from answer
