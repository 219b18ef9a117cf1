"""An encoder of blocks for spec/delta/55-encodings.md: plain, slow, all choices left to callers."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

__all__ = [
    "LANES",
    "changes",
    "classes",
    "encode",
    "frame",
    "lanes",
    "number",
    "planes",
    "set_bytes",
    "sparse_plane",
    "steps_between",
    "string",
    "zstd_string",
]

#: Bytes of a lane, and whether lanes are sign and magnitude.
LANES: dict[str, tuple[int, bool]] = {
    **dict.fromkeys(("bfloat16", "float16", "complex32"), (2, True)),
    **dict.fromkeys(("float32", "complex64"), (4, True)),
    **dict.fromkeys(("float64", "complex128"), (8, True)),
    **dict.fromkeys(
        ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"), (1, True)
    ),
    **dict.fromkeys(("bool", "uint8", "int8", "float8_e8m0fnu", "float4_e2m1fn_x2"), (1, False)),
    **dict.fromkeys(("uint16", "int16"), (2, False)),
    **dict.fromkeys(("uint32", "int32"), (4, False)),
    **dict.fromkeys(("uint64", "int64"), (8, False)),
}

#: The byte for a class stored as changes.
AS_CHANGES = 255


def lanes(content: bytes, dtype: str) -> list[int]:
    """Return the lanes of a content."""
    width = LANES[dtype][0]
    return [
        int.from_bytes(content[at : at + width], "little") for at in range(0, len(content), width)
    ]


def steps_between(content: bytes, base: bytes, dtype: str) -> list[int]:
    """Return the steps from the lanes of a base to the lanes of a content."""
    width, is_signed = LANES[dtype]
    top = 1 << 8 * width - 1
    every = (1 << 8 * width) - 1

    def order(lane: int) -> int:
        return lane ^ (every >> 1) if is_signed and lane & top else lane

    found = []
    for after, before in zip(lanes(content, dtype), lanes(base, dtype), strict=True):
        difference = (order(after) - order(before)) & every
        difference -= (every + 1) if difference & top else 0
        found.append(2 * difference if difference >= 0 else -2 * difference - 1)
    return found


def number(value: int) -> bytes:
    """Return a number in groups of seven bits, a byte per group."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def string(content: bytes, *, kind: int | None = None) -> bytes:
    """Return a string, stored plainly or as a run of a byte."""
    if not content:
        return b""
    if kind == 1 or (kind is None and len(set(content)) == 1):
        return bytes([1, content[0]])
    return b"\0" + content


def frame(content: bytes, *, size: int | None = None) -> bytes:
    """Return a zstd frame (RFC 8878) of a single segment, with a block of a byte for each run."""
    nbytes = len(content) if size is None else size
    head = bytes([0x20, nbytes]) if nbytes < 256 else b"\x60" + (nbytes - 256).to_bytes(2, "little")
    runs = [(byte, len(list(group))) for byte, group in itertools.groupby(content)]
    blocks = b"".join(
        (int(at == len(runs) - 1) | 2 | count << 3).to_bytes(3, "little") + bytes([byte])
        for at, (byte, count) in enumerate(runs)
    )
    return b"\x28\xb5\x2f\xfd" + head + blocks


def zstd_string(content: bytes, made: bytes | None = None) -> bytes:
    """Return a string in a frame."""
    made = frame(content) if made is None else made
    return b"\2" + number(len(made)) + made


def _bits(bits: Iterable[int]) -> bytes:
    rows = list(bits)
    rows += [0] * (-len(rows) % 8)
    return bytes(
        sum(bit << i for i, bit in enumerate(rows[at : at + 8])) for at in range(0, len(rows), 8)
    )


def _low_bits(words: Sequence[int], k: int) -> bytes:
    whole = b"".join(bytes(word >> 8 * byte & 0xFF for word in words) for byte in range(k // 8))
    return whole + _bits(word >> bit & 1 for bit in range(k // 8 * 8, k) for word in words)


def set_bytes(places: Sequence[int], count: int, *, k: int = 0) -> bytes:
    """Return the set of `places` among `count`."""
    is_outside = 2 * len(places) > count
    listed = sorted(set(range(count)) - set(places)) if is_outside else sorted(places)
    head = number(2 * len(listed) + is_outside)
    if not listed:
        return head
    gaps = [after - before - 1 for before, after in zip([-1, *listed], listed, strict=False)]
    unary = [bit for gap in gaps for bit in [0] * (gap >> k) + [1]]
    return (
        head
        + bytes([k])
        + number(len(unary) - len(listed))
        + string(_bits(unary))
        + _low_bits(gaps, k)
    )


def sparse_plane(content: bytes) -> bytes:
    """Return a plane as the places of the nonzero bytes, followed by these bytes."""
    places = [at for at, byte in enumerate(content) if byte]
    return b"\3" + set_bytes(places, len(content)) + string(bytes(content[at] for at in places))


def planes(words: Sequence[int], width: int, *, plane: Any = string) -> bytes:
    """Return the planes of words."""
    return b"".join(
        plane(bytes(word >> 8 * byte & 0xFF for word in words)) for byte in range(width)
    )


def changes(steps: Sequence[int], width: int, *, levels: int = 1, k: int = 0) -> bytes:
    """Return the encoding of steps, most of them 0."""
    places = [at for at, step in enumerate(steps) if step]
    out = set_bytes(places, len(steps), k=k)
    if not places:
        return out
    moved = [steps[at] for at in places]
    out += string(_bits(1 - step % 2 for step in moved)) + bytes([levels])
    heights = [(step - 1) // 2 for step in moved]
    for level in range(1, levels + 1):
        out += set_bytes([at for at, height in enumerate(heights) if height >= level], len(heights))
        heights = [height for height in heights if height >= level]
    return out + (planes([height - levels for height in heights], width) if heights else b"")


def classes(
    steps: Sequence[int],
    base: bytes,
    dtype: str,
    *,
    cuts: Sequence[int] = (),
    k: Sequence[int] = (0,),
) -> bytes:
    """Return steps class by class; `k` gives the storage form of each class with lanes."""
    width = LANES[dtype][0]
    keys = [
        (lane >> 8 * width - 9) & 0xFF if width > 1 else (lane & 0x7F) << 1
        for lane in lanes(base, dtype)
    ]
    found: dict[int, list[tuple[int, int]]] = {}
    for at, key in enumerate(keys):
        found.setdefault(sum(cut <= key for cut in cuts), []).append((key, at))
    out = bytes([len(cuts), *cuts])
    for (_, members), how in zip(sorted(found.items()), k, strict=True):
        own = [steps[at] for _, at in sorted(members)]
        out += bytes([how])
        if how == AS_CHANGES:
            out += changes(own, width)
        elif how:
            out += string(_bits(step & 1 for step in own)) + _low_bits(
                [step >> 1 for step in own], how - 1
            )
        if how != AS_CHANGES:
            out += planes([step >> how for step in own], -(-(8 * width - how) // 8))
    return out


def encode(encoding: str, content: bytes, base: bytes, dtype: str) -> bytes:
    """Return a block in an encoding, with the simplest choices."""
    width = LANES[dtype][0]
    if encoding == "planes":
        return planes(lanes(content, dtype), width)
    if encoding == "xor":
        words = zip(lanes(content, dtype), lanes(base, dtype), strict=True)
        return planes([one ^ other for one, other in words], width)
    steps = steps_between(content, base, dtype)
    if encoding == "difference":
        return planes(steps, width)
    return changes(steps, width) if encoding == "sparse" else classes(steps, base, dtype)
