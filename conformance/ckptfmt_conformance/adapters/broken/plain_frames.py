"""It refuses frames with a checksum, and frames that state a dictionary id of 0."""

from __future__ import annotations

from typing import Any

from ckptfmt_conformance.adapters.reference import Reference, original

BREAKS = ("REQ-ENC-024",)
CONVICTED_BY = (
    "encodings/valid/frame-checksum",
    "encodings/valid/frame-dictionary-0",
)

_take_frame = original("ckptfmt.codecs.strings:Source._take_frame")


def _take_plain(source: Any, nbytes: int) -> Any:  # noqa: ANN401 - of the implementation
    taken = source.take

    def take(count: int) -> Any:  # noqa: ANN401 - of the implementation
        content = taken(count)
        if count > 4 and bytes(content[:4]) == b"\x28\xb5\x2f\xfd" and content[4] & 7:
            raise source.refuse("a frame with more than it needs", "REQ-ENC-009")
        return content

    return _take_frame(_Watched(source, take), nbytes)


class _Watched:
    """A source whose bytes are looked at."""

    def __init__(self, source: Any, take: Any) -> None:  # noqa: ANN401 - of the implementation
        self.take = take
        self.take_number = source.take_number
        self.refuse = source.refuse


class Broken(Reference):
    """See above."""

    replacements = (("ckptfmt.codecs.strings:Source._take_frame", _take_plain),)
