"""Steps of a class: as changes where few are far from 0, or the bits that are noise apart from those that tell."""

from __future__ import annotations

from typing import Final

import numpy as np

from ckptfmt.codecs.encodings.lanes import Words
from ckptfmt.codecs.encodings.planes import dump_plane, dump_planes, take_plane, take_planes
from ckptfmt.codecs.encodings.sets import dump_low_bits, take_low_bits
from ckptfmt.codecs.encodings.sparse import dump_changes, take_changes
from ckptfmt.codecs.encodings.strings import Source, pack_bits

#: The first byte of steps that are stored as changes.
_CHANGES: Final = 0xFF
#: Where nine of ten steps are below this, most are 0 or next to it.
_NEAR: Final = 6
#: Bits of a long step that go through the entropy coder; those below are noise.
_TOLD_BITS: Final = 8
_SAMPLE_COUNT: Final = 1024


def dump_steps(steps: Words) -> bytes:
    """Return zigzagged steps, at least one."""
    sample = np.sort(steps[:: max(1, steps.size // _SAMPLE_COUNT)])
    typical = int(sample[sample.size * 9 // 10])
    if typical < _NEAR:
        places = np.flatnonzero(steps != 0)
        return bytes((_CHANGES,)) + dump_changes(places, steps.size, steps[places])
    low_bits = max(0, typical.bit_length() - _TOLD_BITS)
    word = steps.dtype.type
    out = [bytes((low_bits,))]
    if low_bits:
        out.append(dump_plane(pack_bits(steps & word(1))))
        out.append(dump_low_bits(steps >> word(1), low_bits - 1))
        steps = steps >> word(low_bits)
    out.append(dump_planes(steps, (8 * steps.itemsize - low_bits + 7) // 8))
    return b"".join(out)


def take_steps(source: Source, out: Words) -> None:
    """Fill `out` with steps."""
    low_bits = source.take_byte()
    if low_bits == _CHANGES:
        places, steps = take_changes(source, out.size, out.dtype)
        out[:] = 0
        out[places] = steps
        return
    bits = 8 * out.itemsize
    if low_bits >= bits:
        raise source.refuse(f"{low_bits} low bits of {bits}", "REQ-ENC-023")
    if not low_bits:
        take_planes(source, out)
        return
    word = out.dtype.type
    signs = source.unpack(take_plane(source, (out.size + 7) // 8), out.size)
    low = take_low_bits(source, low_bits - 1, out.size, out.dtype)
    take_planes(source, out, (bits - low_bits + 7) // 8)
    if low_bits % 8 and (out >> word(bits - low_bits)).any():
        raise source.refuse("high parts are too large", "REQ-ENC-023")
    out <<= word(low_bits - 1)
    out |= low
    out <<= word(1)
    out |= signs
