"""It takes a part for its attempt's without asking: what a crashed attempt left is mixed in."""

from __future__ import annotations

from typing import Any

from ckptfmt_conformance.adapters.reference import Reference, original

CONVICTED_BY = ("parts/invalid/origin-attempt", "parts/invalid/origin-nonce", "parts/invalid/origin-step")

_part = original("ckptfmt.read.files:Part")
_part_path = original("ckptfmt.read.files:part_path")
_read_exactly = original("ckptfmt.read.files:read_exactly")


def _read_any_part(checkpoint: Any, number: int) -> Any:  # noqa: ANN401 - of the implementation
    entry = checkpoint.index.parts[number]
    path = _part_path(checkpoint.manifest.origin.attempt, number)
    part, _ = _part.parse(_read_exactly(checkpoint.store, path, entry.nbytes), where=path, digest=entry.digest)
    return part


class Broken(Reference):
    """See above."""

    replacements = (("ckptfmt.read.files:CheckpointFiles.read_part", _read_any_part),)
