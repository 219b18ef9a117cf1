"""It decompresses whatever begins like a zstd frame, a raw block too."""

from __future__ import annotations

from typing import Any

import zstandard

from ckptfmt_conformance.adapters.reference import Reference, original

BREAKS = ("REQ-ENC-003",)
CONVICTED_BY = ("encodings/valid/raw-like-a-frame",)

_MAGIC = b"\x28\xb5\x2f\xfd"

_take = original("ckptfmt.read.reading:Reading._take")


def _take_inflated(reading: Any, blocks: Any, content: memoryview) -> None:  # noqa: ANN401 - of the implementation
    if bytes(content[:4]) == _MAGIC:
        inflated = zstandard.ZstdDecompressor().decompressobj().decompress(content)
        reading.boxes[blocks.box].place(blocks, memoryview(inflated.ljust(blocks.nbytes, b"\0")[: blocks.nbytes]))
    else:
        _take(reading, blocks, content)


class Broken(Reference):
    """See above."""

    replacements = (("ckptfmt.read.reading:Reading._take", _take_inflated),)
