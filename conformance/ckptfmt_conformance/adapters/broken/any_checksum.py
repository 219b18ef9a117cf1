"""It doesn't compare the checksum of a frame."""

from __future__ import annotations

from typing import Any

from ckptfmt_conformance.adapters.reference import Reference, original

BREAKS = ("REQ-ENC-024",)
CONVICTED_BY = ("encodings/invalid/frame-checksum-wrong",)

zstandard: Any = original("ckptfmt.codecs.strings:zstandard")


class _Zstandard:
    """Takes the checksum from a frame before it is read."""

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - of the implementation
        return getattr(zstandard, name)

    def ZstdDecompressor(self) -> Any:  # noqa: ANN401, N802 - of the implementation
        """Return itself."""
        return self

    def decompress(self, frame: Any, **options: Any) -> Any:  # noqa: ANN401 - of the implementation
        """Return the content."""
        content = bytes(frame)
        if content[4] & 4:
            content = content[:4] + bytes([content[4] & ~4]) + content[5:-4]
        return zstandard.ZstdDecompressor().decompress(content, **options)


class Broken(Reference):
    """See above."""

    replacements = (("ckptfmt.codecs.strings:zstandard", _Zstandard()),)
