"""The encodings of blocks: their registry, and the conversion between content and stored bytes.

Spec: page 55.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from ckptfmt.codecs.lanes import (
    LANES,
    Lane,
    Words,
    apply_steps,
    dump_changes,
    dump_classes,
    dump_planes,
    steps_between,
    take_changes,
    take_classes,
    take_planes,
)
from ckptfmt.codecs.strings import BlockBytes
from ckptfmt.errors import Code, err

#: The closed registry. Each name except the first is also a reader feature.
#: Spec: REQ-ENC-001, REQ-ENC-002.
ENCODINGS: Final = ("raw", "planes", "xor", "difference", "sparse", "classes")
#: Encodings that store the change since a base.
NEEDS_BASE: Final = frozenset({"xor", "difference", "sparse", "classes"})
#: Encodings that keep up with a store of a few hundred megabytes per second.
QUICK: Final = ("raw", "planes", "xor", "difference", "sparse")

#: Number of pieces and least size in bytes of a sample.
_SAMPLE_PIECES: Final = 4
_SAMPLE_NBYTES: Final = 1 << 17
#: Below this share of changed lanes, only the encodings that list the changed lanes are tried.
_FEW_CHANGES: Final = 0.3
#: Sizes within this factor of the smallest count as equal; the fastest encoding among them is used.
_GOOD: Final = 1.01


def encode(
    encoding: str, content: memoryview, *, dtype: str, base: memoryview | None = None
) -> bytes:
    """Return the stored bytes of a block.

    Args:
        encoding: name of the encoding, out of `ENCODINGS`.
        content: content of the block, whole elements.
        dtype: dtype of the elements, a name of `ckptfmt.dtypes.DTYPES`.
        base: base of the block, of equal size; needed by `NEEDS_BASE`, otherwise ignored.

    Raises: StateError(ARGUMENT). Spec: page 55.

    >>> encode("planes", memoryview(bytes.fromhex("0180028003800480")), dtype="bfloat16").hex()
    '00010203040180'
    """
    if encoding == "raw":
        return bytes(content)
    lane = _lane_of(encoding, dtype, content.nbytes, base)
    words = _words(content, lane)
    if base is None or encoding == "planes":
        return dump_planes(words)
    return _dump(encoding, words, _words(base, lane), lane)


def decode(
    encoding: str,
    stored: memoryview,
    out: memoryview,
    *,
    dtype: str,
    base: memoryview | None = None,
    where: str,
) -> None:
    """Decode a block's stored bytes into `out`.

    Each size is checked before bytes are read, allocated or decompressed: allocations stay within a
    few times the size of `out` and `stored` together. After an error the content of `out` is
    undefined.

    Args:
        encoding: name of the encoding, out of `ENCODINGS`.
        stored: bytes that `encode` returned.
        out: writable memory of exactly the content's size.
        dtype: dtype of the elements.
        base: base of the block, of equal size, for `NEEDS_BASE`. A wrong base gives wrong content
            and no error.
        where: name of the block in errors.

    Raises: FormatError(ENCODED_FORM), StateError(ARGUMENT). Spec: REQ-ENC-005.
    """
    source = BlockBytes(stored, where)
    if encoding == "raw":
        np.frombuffer(out, np.uint8)[:] = source.take(out.nbytes)
    else:
        lane = _lane_of(encoding, dtype, out.nbytes, base)
        words = _words(out, lane)
        if base is None or encoding == "planes":
            take_planes(source, words)
        else:
            _take(encoding, source, words, _words(base, lane), lane)
    source.check_end()


def choose(
    content: memoryview, *, dtype: str, base: memoryview | None = None, among: Sequence[str] = QUICK
) -> tuple[str, bytes]:
    """Return the encoding with the fewest bytes, and the bytes; `("raw", b"")` if none pays.

    The encodings are compared on a sample of the block.

    Args:
        content: content of the block, whole elements.
        dtype: dtype of the elements.
        base: base of the block, of equal size, or None.
        among: candidate encodings: `QUICK`, or `ENCODINGS` for the fewest bytes.

    Raises: StateError(ARGUMENT).
    """
    tried = [name for name in among if name != "raw" and (name in NEEDS_BASE) <= (base is not None)]
    if not tried or not content.nbytes:
        return "raw", b""
    if base is not None:
        lane = _lane_of("xor", dtype, content.nbytes, base)
        changed = _words(content, lane) != _words(base, lane)
        few = np.count_nonzero(changed) <= _FEW_CHANGES * changed.size
        named = [str(name) for name in ("sparse", "classes") if name in tried]
        if few and named:
            tried = named if changed.any() else named[:1]
    best = tried[0] if len(tried) == 1 else _best(tried, content, dtype, base)
    stored = encode(best, content, dtype=dtype, base=base)
    return (best, stored) if len(stored) < content.nbytes else ("raw", b"")


def _best(tried: Sequence[str], content: memoryview, dtype: str, base: memoryview | None) -> str:
    bases = None if base is None else _sample(base)
    contents = _sample(content)
    costs = {name: len(encode(name, contents, dtype=dtype, base=bases)) for name in tried}
    # The registry is sorted by speed. A caller that allows `classes` wants the fewest bytes.
    good = min(costs.values()) * (1 if "classes" in tried else _GOOD)
    return next(name for name in sorted(costs, key=ENCODINGS.index) if costs[name] <= good)


def _sample(content: memoryview) -> memoryview:
    """Return a sample of pieces from all over a block: an eighth, or all of a short block."""
    piece = max(content.nbytes // 8, _SAMPLE_NBYTES) // _SAMPLE_PIECES // 16 * 16
    stride = content.nbytes // _SAMPLE_PIECES // 16 * 16
    if stride <= piece:
        return content
    view = content.cast("B")
    return memoryview(
        b"".join(view[at * stride : at * stride + piece] for at in range(_SAMPLE_PIECES))
    )


def _lane_of(encoding: str, dtype: str, nbytes: int, base: memoryview | None) -> Lane:
    lane = LANES.get(dtype)
    if lane is None or encoding not in ENCODINGS:
        raise err(
            Code.ARGUMENT, f"no encoding {encoding!r} of {dtype!r}", requirement="REQ-ENC-001"
        )
    if nbytes % lane.nbytes:
        raise err(Code.ARGUMENT, f"{nbytes} bytes aren't whole elements of {dtype}")
    if encoding in NEEDS_BASE and (base is None or base.nbytes != nbytes):
        detail = "no base" if base is None else f"a base of {base.nbytes} bytes"
        raise err(Code.ARGUMENT, f"{detail} for {nbytes} bytes by {encoding}")
    return lane


def _words(content: memoryview, lane: Lane) -> Words:
    return np.frombuffer(content, np.uint8).view(lane.words)


def _dump(encoding: str, words: Words, base: Words, lane: Lane) -> bytes:
    match encoding:
        case "xor":
            return dump_planes(words ^ base)
        case "difference":
            return dump_planes(steps_between(words, base, lane))
        case "sparse":
            places = np.flatnonzero(words != base)
            if places.size == words.size:
                return dump_changes(places, words.size, steps_between(words, base, lane))
            return dump_changes(
                places, words.size, steps_between(words[places], base[places], lane)
            )
    return dump_classes(words, base, lane)


def _take(encoding: str, source: BlockBytes, out: Words, base: Words, lane: Lane) -> None:
    match encoding:
        case "xor":
            take_planes(source, out)
            out ^= base
        case "difference":
            take_planes(source, out)
            out[:] = apply_steps(out, base, lane)
        case "sparse":
            places, steps = take_changes(source, out.size, lane.words)
            if places.size == out.size:
                out[:] = apply_steps(steps, base, lane)
                return
            if out.__array_interface__["data"] != base.__array_interface__["data"]:
                out[:] = base
            out[places] = apply_steps(steps, base[places], lane)
        case _:
            take_classes(source, out, base, lane)
