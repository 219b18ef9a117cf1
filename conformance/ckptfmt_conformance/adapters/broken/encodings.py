"""Faults in the decoding of blocks."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import zstandard

from ckptfmt_conformance.adapters.reference import Reference, original

_take_frame = original("ckptfmt.codecs.strings:BlockBytes._take_frame")
_take = original("ckptfmt.read.reading:Reading._take")
_decode = original("ckptfmt.codecs.encodings:decode")
_lanes = original("ckptfmt.codecs.encodings:LANES")
_SCATTERED: Any = original("ckptfmt.codecs.lanes:_SCATTERED")
_take_set = original("ckptfmt.codecs.lanes:take_set")
#: The first bytes of a zstd frame.
_MAGIC = b"\x28\xb5\x2f\xfd"


class _Zstandard:
    """A zstandard module that removes the checksum from a frame before decompression."""

    def __getattr__(self, name: str) -> Any:
        return getattr(zstandard, name)

    def ZstdDecompressor(self) -> Any:  # noqa: N802 - any object of the implementation
        """Return this object."""
        return self

    def decompress(self, frame: Any, **options: Any) -> Any:
        """Return the content of a frame."""
        content = bytes(frame)
        if content[4] & 4:
            content = content[:4] + bytes([content[4] & ~4]) + content[5:-4]
        return zstandard.ZstdDecompressor().decompress(content, **options)


class AnyChecksum(Reference):
    """It doesn't compare the checksum of a frame."""

    breaks = ("REQ-ENC-024",)
    convicted_by = ("encodings/invalid/frame-checksum-wrong",)
    replacements = (("ckptfmt.codecs.strings:zstandard", _Zstandard()),)


def _take_plain(source: Any, nbytes: int) -> Any:
    taken = source.take

    def take(count: int) -> Any:
        content = taken(count)
        if count > 4 and bytes(content[:4]) == _MAGIC and content[4] & 7:
            raise source.refuse("a frame with more than it needs", "REQ-ENC-009")
        return content

    return _take_frame(_Watched(source, take), nbytes)


class _Watched:
    """A source with another function to take bytes."""

    def __init__(self, source: Any, take: Any) -> None:
        self.take = take
        self.take_number = source.take_number
        self.refuse = source.refuse


class PlainFrames(Reference):
    """It refuses frames with a checksum, and frames with a dictionary id of 0."""

    breaks = ("REQ-ENC-024",)
    convicted_by = (
        "encodings/valid/frame-checksum",
        "encodings/valid/frame-dictionary-0",
    )
    replacements = (("ckptfmt.codecs.strings:BlockBytes._take_frame", _take_plain),)


def _take_inflated(reading: Any, blocks: Any, content: memoryview) -> None:
    if bytes(content[:4]) == _MAGIC:
        inflated = zstandard.ZstdDecompressor().decompressobj().decompress(content)
        reading.boxes[blocks.box].place(
            blocks, memoryview(inflated.ljust(blocks.nbytes, b"\0")[: blocks.nbytes])
        )
    else:
        _take(reading, blocks, content)


class SniffedFrames(Reference):
    """It decompresses every block that begins like a zstd frame, including raw blocks."""

    breaks = ("REQ-ENC-003",)
    convicted_by = ("encodings/valid/raw-like-a-frame",)
    replacements = (("ckptfmt.read.reading:Reading._take", _take_inflated),)


_QUIET = 1 << 22


def _decode_as_floats(encoding: str, stored: memoryview, out: memoryview, **members: Any) -> None:
    _decode(encoding, stored, out, **members)
    if encoding != "raw" and members["dtype"] == "float32":
        # The change is made on integers: the machine decides whether a copied float becomes quiet.
        np.frombuffer(out, np.uint32)[np.isnan(np.frombuffer(out, np.float32))] |= np.uint32(_QUIET)


class QuietNans(Reference):
    """It decodes into floats, and copies them as floats: a signalling NaN becomes quiet."""

    breaks = ("REQ-ENC-022",)
    convicted_by = ("encodings/valid/bits",)
    replacements = (("ckptfmt.codecs.encodings:decode", _decode_as_floats),)


def _as_it_is(words: Any, lane: Any) -> Any:
    return words.view(f"<i{lane.nbytes}")


class StepsOfBits(Reference):
    """It computes differences of floats from their bit patterns, as for integers.

    Below zero, the order of bit patterns is reversed.
    """

    breaks = ("REQ-ENC-015",)
    convicted_by = ("encodings/valid/difference-dtypes",)
    replacements = (("ckptfmt.codecs.lanes:_ordered", _as_it_is),)


#: A lane of complex128 would be wider than any integer of numpy.
_wide = {
    name: dataclasses.replace(_lanes[name], nbytes=2 * _lanes[name].nbytes)
    for name in ("complex32", "complex64")
}


class WholeComplex(Reference):
    """It treats a complex element as one lane."""

    breaks = ("REQ-ENC-013",)
    convicted_by = ("encodings/valid/difference-dtypes", "encodings/valid/xor-dtypes")
    replacements = (("ckptfmt.codecs.encodings:LANES", _lanes | _wide),)


def _take_tight(source: Any, count: int) -> Any:
    if not count:
        return source.take(0)
    kind = source.take_byte()
    if kind != _SCATTERED:
        return source.take_string_of(kind, count)
    places = _take_set(source, count)
    listed = source.take_string(places.size)
    if (listed == 0).any():
        raise source.refuse("a listed zero", "REQ-ENC-012")
    found = np.zeros(count, np.uint8)
    found[places] = listed
    return found


class TightPlanes(Reference):
    """It refuses a zero among the listed bytes of a plane."""

    breaks = ("REQ-ENC-012",)
    convicted_by = ("encodings/valid/sparse-plane-zero",)
    replacements = (("ckptfmt.codecs.lanes:take_plane", _take_tight),)
