"""Faults in reading: places, order, bases, and omitted checks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ckptfmt_conformance.adapters.reference import Box, Checkpoint, Reference, original
from ckptfmt_conformance.protocol import Rejected

_part = original("ckptfmt.read.files:Part")
_part_path = original("ckptfmt.read.files:part_path")
_read_exactly = original("ckptfmt.read.files:read_exactly")
_find = original("ckptfmt.read.files:Closure.find")
_read_register = original("ckptfmt.read.files:read_register")
_manifest = original("ckptfmt.read.files:Manifest")
_files = original("ckptfmt.read.files:CheckpointFiles")
_validate = original("ckptfmt:validate")


def _read_any_part(checkpoint: Any, number: int) -> Any:
    entry = checkpoint.index.parts[number]
    path = _part_path(checkpoint.manifest.origin.attempt, number)
    part, _ = _part.parse(
        _read_exactly(checkpoint.store, path, entry.nbytes), where=path, digest=entry.digest
    )
    return part


class AnotherAttempt(Reference):
    """It doesn't check a part's attempt, and mixes in parts of a crashed attempt."""

    convicted_by = (
        "parts/invalid/origin-attempt",
        "parts/invalid/origin-nonce",
        "parts/invalid/origin-step",
    )
    replacements = (("ckptfmt.read.files:CheckpointFiles.read_part", _read_any_part),)


class CountedParts(Reference):
    """It counts the files in `parts/`, and refuses files left by another attempt."""

    breaks = ("REQ-CKP-005",)
    convicted_by = ("opening/valid/left-behind",)

    def _open(self, path: Path, request: Mapping[str, Any]) -> Checkpoint:
        checkpoint = super()._open(path, request)
        if len(checkpoint.store.list_names("parts")) != len(checkpoint.index.parts):
            raise Rejected("FILE_MISSING", "parts", "open")
        return checkpoint


class JoinedBoxes(Reference):
    """It concatenates the saved boxes of a tensor, as if each box had whole rows."""

    breaks = ("REQ-OPN-005",)
    convicted_by = ("index/valid/quarters", "opening/valid/two-columns")

    def content(self, checkpoint: Checkpoint, key: tuple[str, str, str], box: Box) -> bytes:
        """Return the pieces of a box from each saved box, concatenated."""
        sharding = checkpoint.tensors[key].sharding
        pieces = (saved.intersect(box) for saved, _ in sharding)
        return b"".join(
            super(JoinedBoxes, self).content(checkpoint, key, piece)
            for piece in pieces
            if piece is not None
        )


class SwappedBounds(Reference):
    """It swaps the first and the last dimension of a box."""

    breaks = ("REQ-OPN-005",)
    convicted_by = ("opening/valid/read-a-column", "opening/valid/read-inside-one-box")

    def digest_of(self, checkpoint: Checkpoint, field: str, name: str, scope: str, box: Box) -> str:
        """Return the digest of another box."""
        return super().digest_of(
            checkpoint, field, name, scope, Box(box.begin[::-1], box.shape[::-1])
        )


class ColumnOrder(Reference):
    """It returns elements in column-major order."""

    breaks = ("REQ-TEN-001",)
    convicted_by = ("manifest/valid/small", "opening/valid/read-across-boxes")

    def content(self, checkpoint: Checkpoint, key: tuple[str, str, str], box: Box) -> bytes:
        """Return the bytes of a box, column by column."""
        content = super().content(checkpoint, key, box)
        if not content:
            return content
        elements = np.frombuffer(content, f"V{len(content) // box.element_count}")
        return elements.reshape(box.shape).tobytes(order="F")


class OneExtent(Reference):
    """It reads only the first extent of a box in a safetensors file, as writers write no other."""

    breaks = ("REQ-PRT-006", "REQ-OPN-005")
    convicted_by = ("parts/valid/two-extents",)

    def content(self, checkpoint: Checkpoint, key: tuple[str, str, str], box: Box) -> bytes:
        """Return the first extent's bytes, followed by zeros for all further extents."""
        content = super().content(checkpoint, key, box)
        for number in range(len(checkpoint.index.parts)):
            for held in checkpoint.open_part(number).iter_boxes():
                if held.key == key and len(held.extents) > 1 and not held.extents[1].is_encoded:
                    nbytes = held.extents[0].block_count * checkpoint.index.origin.block_nbytes
                    return content[:nbytes].ljust(len(content), b"\0")
        return content


def _order(self: Any) -> Any:
    return np.argsort(self.box, kind="stable")


class BlocksAsStored(Reference):
    """It takes the blocks of a box in the order of the file."""

    breaks = ("REQ-PRT-006",)
    convicted_by = ("deltas/valid/blocks-backwards",)
    replacements = (("ckptfmt.documents.extents:Extents.order", _order),)


def _find_nothing(*_: object, **__: object) -> Iterator[Exception]:
    return iter(())


class UncheckedBlocks(Reference):
    """It doesn't compare blocks with their digests, and returns damaged content."""

    convicted_by = ("parts/invalid/block-digest",)
    replacements = (("ckptfmt.read.files:StoredBox.iter_damages", _find_nothing),)


def _place_unchecked(reading: Any, blocks: Any, content: memoryview) -> None:
    reading.boxes[blocks.box].place(blocks, content)


class CheckingOnDemand(Reference):
    """It checks blocks only on a request to verify everything, and reports the phase `read`."""

    breaks = ("REQ-OPN-006",)
    convicted_by = ("parts/invalid/block-digest", "shards/invalid/bit-in-first-byte")

    # A full check uses a separate method.
    replacements = (("ckptfmt.read.reading:Reading._take", _place_unchecked),)

    def open(self, path: Path, request: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """Open the checkpoint, and report the phase `read` for faults found by validation."""
        try:
            return super().open(path, request)
        except Rejected as answer:
            raise Rejected(
                answer.code, answer.where, "open" if answer.phase == "open" else "read"
            ) from answer


def _equals(self: Any, other: Any) -> bool:
    return bool(self.digest == other.digest)


def _hash(self: Any) -> int:
    return hash(self.digest)


class DigestsAlone(Reference):
    """It compares references by their digests, and ignores their names."""

    breaks = ("REQ-DEL-026",)
    convicted_by = ("deltas/invalid/reference-renamed",)
    replacements = (
        ("ckptfmt.documents.manifest:Reference.__eq__", _equals),
        ("ckptfmt.documents.manifest:Reference.__hash__", _hash),
    )


def _find_any(closure: Any, reference: Any) -> Any:
    place = closure._store.beside(reference.name)  # noqa: SLF001 - a fault needs no interface
    return place if isinstance(_read_register(place), _manifest) else _find(closure, reference)


def _open_any(store: Any, reference: Any, closure: Any) -> Any:
    return _files(store, closure=closure, title=reference.name)


class ReplacedBase(Reference):
    """It accepts any checkpoint in the place of a base.

    A delta on another base is another state.
    """

    convicted_by = ("deltas/invalid/base-made-again", "deltas/invalid/of-itself")
    replacements = (
        ("ckptfmt.read.files:Closure.find", _find_any),
        ("ckptfmt.read.files:_open_base", _open_any),
    )


def _bases_beside(checkpoint: Checkpoint, path: Path) -> list[str]:
    return [one.name for one in checkpoint.manifest.references if (path.parent / one.name).is_dir()]


class WholeBases(Reference):
    """It refuses a base with any damage or any extra file, even outside the needed bytes."""

    breaks = ("REQ-DEL-007", "REQ-OPN-009")
    convicted_by = (
        "deltas/valid/base-beyond-bit",
        "deltas/valid/base-beyond-key",
        "deltas/valid/base-beyond-lost",
        "deltas/valid/base-beyond-tree",
        "deltas/valid/base-extra-files",
    )

    def open(self, path: Path, request: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """Open the checkpoint, and validate its bases."""
        answer = super().open(path, request)
        with self._open(path, request or {}) as checkpoint:
            names = _bases_beside(checkpoint, path)
        for name in names:
            report = _validate(path.parent / name)
            if report.violations:
                raise Rejected(report.violations[0].code, None, "open")
            if report.warnings:
                raise Rejected("DOC_MISMATCH", None, "open")
        return answer


def _check_nothing(*_: object) -> None:
    return None


class OwnBytesOnly(Reference):
    """It validates a delta without those bytes of its bases that its blocks don't need."""

    breaks = ("REQ-OPN-009",)
    convicted_by = (
        "deltas/invalid/base-beyond-bit",
        "deltas/invalid/base-beyond-key",
        "deltas/invalid/base-beyond-lost",
        "deltas/invalid/base-beyond-tree",
    )
    replacements = (("ckptfmt.read.verify:_Verification.check_closure", _check_nothing),)
