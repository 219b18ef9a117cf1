"""Steps class by class: lanes whose bases have like exponents change alike."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ckptfmt.codecs.encodings.planes import (
    Lane,
    Words,
    apply_steps,
    dump_plane,
    dump_planes,
    steps_between,
    take_plane,
    take_planes,
)
from ckptfmt.codecs.encodings.sets import dump_low_bits, take_low_bits
from ckptfmt.codecs.encodings.sparse import dump_changes, take_changes
from ckptfmt.codecs.encodings.strings import Bytes, Source, pack_bits

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


#: So many lanes are sorted at once: they and their order stay in a processor's cache.
_PART: Final = 1 << 16
_CLASSES: Final = 32
#: A class smaller than these joins its neighbour: it would cost more than it tells.
_LEAST: Final = 1024
_LEAST_PART: Final = 64


def dump_classes(content: Words, base: Words, lane: Lane) -> bytes:
    """Return the zigzagged steps from base to content, class by class."""
    sorted_parts = []
    counts = np.zeros((0, 256), np.intp)
    for begin in range(0, base.size, _PART):
        order, part_counts = _sort(base[begin : begin + _PART], lane)
        steps = steps_between(content[begin : begin + _PART], base[begin : begin + _PART], lane)
        sorted_parts.append(steps[order])
        counts = np.vstack((counts, part_counts))
    cuts = _choose_cuts(counts.sum(axis=0))
    classes = (
        np.concatenate([part[span] for part, span in zip(sorted_parts, spans, strict=True)])
        for spans in _spans(counts, cuts)
    )
    return b"".join((bytes((len(cuts), *cuts)), *map(dump_steps, classes)))


def take_classes(source: Source, out: Words, base: Words, lane: Lane) -> None:
    """Fill `out` from base and the steps."""
    cut_count = source.take_byte()
    cuts = source.take(cut_count).tolist()
    if cut_count >= _CLASSES or any(a >= b for a, b in itertools.pairwise((0, *cuts))):
        raise source.refuse("cuts between classes don't increase, or are too many", "REQ-ENC-020")
    begins = range(0, base.size, _PART)
    sorts = [_sort(base[begin : begin + _PART], lane) for begin in begins]
    counts = np.array([part_counts for _, part_counts in sorts]).reshape(-1, 256)
    sorted_parts = [np.empty(order.size, lane.words) for order, _ in sorts]
    for spans in _spans(counts, cuts):
        steps = np.empty(sum(span.stop - span.start for span in spans), lane.words)
        take_steps(source, steps)
        begin = 0
        for part, span in zip(sorted_parts, spans, strict=True):
            end = begin + span.stop - span.start
            part[span] = steps[begin:end]
            begin = end
    for begin, part, (order, _) in zip(begins, sorted_parts, sorts, strict=True):
        steps = np.empty_like(part)
        steps[order] = part
        out[begin : begin + _PART] = apply_steps(steps, base[begin : begin + _PART], lane)


def _sort(base: Words, lane: Lane) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the lanes' order by key, those of one key as they stand, and how many there are of each key."""
    keys = _keys(base, lane)
    order = np.argsort(keys, kind="stable")
    return order, np.diff(np.searchsorted(keys[order], np.arange(257)))


def _spans(counts: NDArray[np.intp], cuts: list[int]) -> Iterator[list[slice]]:
    """Yield for each class that has lanes where they lie in each sorted part."""
    ends = np.concatenate((np.zeros((counts.shape[0], 1), np.intp), np.cumsum(counts, axis=1)), axis=1)
    for low, high in itertools.pairwise((0, *cuts, 256)):
        spans = [slice(begin, end) for begin, end in ends[:, [low, high]].tolist()]
        if any(span.start < span.stop for span in spans):
            yield spans


def _keys(base: Words, lane: Lane) -> Bytes:
    """Return the eight bits below the top one, or what there is of them, moved up."""
    if lane.nbytes == 1:
        return (base << 1).astype(np.uint8)
    return (base >> (8 * lane.nbytes - 9)).astype(np.uint8)


def _choose_cuts(counts: NDArray[np.intp]) -> list[int]:
    least = max(_LEAST, int(counts.sum()) // _LEAST_PART)
    cuts: list[int] = []
    size = 0
    # From above, where the lanes are many and change least.
    for key in range(255, 0, -1):
        size += int(counts[key])
        if size >= least and len(cuts) < _CLASSES - 1:
            cuts.insert(0, key)
            size = 0
    if cuts and size + counts[0] < least:
        del cuts[0]
    return cuts
