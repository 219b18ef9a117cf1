"""The order of samples and the digest of consumed samples; spec/context/64-cursor.md."""

from __future__ import annotations

import math
import struct

from blake3 import blake3

__all__ = ["ledger", "ledger_keys", "mix", "sample_at"]

_MASK = (1 << 64) - 1


def mix(x: int) -> int:
    """Return the finaliser of SplitMix64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK
    return x ^ (x >> 31)


def sample_at(count: int, seed: int, position: int) -> int:
    """Return the sample at a position of the endless order `feistel-v1` over `count` samples."""
    epoch, p = divmod(position, count)
    a = math.isqrt(count)
    a += a * a < count
    b = -(-count // a)
    keys = struct.unpack(
        "<8Q", blake3(b"ckptfmt/feistel-v1" + struct.pack("<QQ", seed, epoch)).digest(length=64)
    )
    while True:
        left, right = divmod(p, b)
        for i, key in enumerate(keys):
            x, most = (right, a) if i % 2 == 0 else (left, b)
            step = ((mix((x + key) & _MASK) >> 24) * most) >> 40
            if i % 2 == 0:
                left = (left + step) % a
            else:
                right = (right + step) % b
        p = left * b + right
        if p < count:
            return p


def ledger_keys(source: str, epoch: int) -> tuple[int, ...]:
    """Return the key words of an epoch of a source."""
    return struct.unpack(
        "<4Q", blake3(b"ckptfmt/ledger-v1" + struct.pack("<Q", epoch) + source.encode()).digest()
    )


def ledger(source: str, count: int, seed: int, end: int) -> str:
    """Return the digest of the multiset of the first `end` samples, by `mix64-add4-v1`."""
    sums = [0] * 4
    for position in range(end):
        epoch = position // count
        keys = ledger_keys(source, epoch)
        sample = sample_at(count, seed, position)
        sums = [
            (total + mix((sample + key) & _MASK)) & _MASK
            for total, key in zip(sums, keys, strict=True)
        ]
    return struct.pack("<4Q", *sums).hex()
