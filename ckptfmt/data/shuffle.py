"""``feistel-v1``: the order of samples, as a pure function of length, seed, epoch and position.

The normative text, in unsigned integers; ``div`` rounds down, LE64 is eight bytes, little-endian:

    Given n in [1, 2^48], seed and epoch in [0, 2^64), and a position p in [0, n), the sample at p
    is found thus.

    1. a is the smallest integer with a * a >= n; b is the smallest integer with a * b >= n.
    2. The round keys K[0] to K[7] are the first 64 bytes of the BLAKE3 output (hash mode, extended)
       of the 18 ASCII bytes ``ckptfmt/feistel-v1`` followed by LE64(seed) and LE64(epoch), read as
       eight LE64.
    3. mix(x) is the finaliser of SplitMix64, all products modulo 2^64:
       x = (x xor (x >> 30)) * 0xBF58476D1CE4E5B9;
       x = (x xor (x >> 27)) * 0x94D049BB133111EB; x xor (x >> 31).
       F(i, x, m) = ((mix((x + K[i]) mod 2^64) >> 24) * m) >> 40; no intermediate value exceeds
       64 bits.
    4. l = p div b; r = p mod b. For i = 0 to 7: if i is even, l = (l + F(i, r, a)) mod a;
       if i is odd, r = (r + F(i, l, b)) mod b. Then p = l * b + r.
    5. If p >= n, go to step 4 with this p. Otherwise p is the sample.

    Position P in [0, ...) of the endless order is position P mod n of epoch P div n.

    Vectors: n, seed, epoch; the samples at 0, 1, 2, 3; the sample at n - 1.

        10               0                     0  3  1  4  2                                  7
        1000             1                     2  988  25  850  372                         936
        281474976710656  18446744073709551615  3  37976156300933  205035813167397
                                                  203094510729350  248246830510441
                                                                                 41421302834276

Step 4 permutes [0, a * b): each round adds to one half a function of the other half, and the
inverse subtracts the same terms in reverse order. Since a * b - n < a, step 5 seldom repeats: the
probability is below 1 / sqrt(n).

Source: alternating Feistel over Z_a x Z_b with cycle walking: J. Black, P. Rogaway, "Ciphers with
arbitrary finite domains", CT-RSA 2002; SplitMix64: G. Steele, D. Lea, C. Flood, OOPSLA 2014. A
shuffle, not a cipher.
"""

from __future__ import annotations

import functools
import math
import struct
from typing import Final, NamedTuple

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from ckptfmt import limits
from ckptfmt.errors import Code, err

ALG: Final = "feistel-v1"
ROUNDS: Final = 8

_MASK: Final = (1 << 64) - 1
_MIX_1: Final = 0xBF58476D1CE4E5B9
_MIX_2: Final = 0x94D049BB133111EB
#: Number of positions computed at once, small enough for scratch arrays to stay in the cache.
_CHUNK: Final = 1 << 14


class _Epoch(NamedTuple):
    """The result of steps 1 and 2 for one epoch."""

    a: int
    b: int
    keys: tuple[int, ...]


def positions_of(n: int, *, seed: int, epoch: int, samples: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the positions of samples in their epoch, each below n: the inverse of `samples_at`.

    Raises: ARGUMENT if `n`, `seed` or `epoch` is out of range.

    >>> positions_of(10, seed=0, epoch=0, samples=np.array([7, 3])).tolist()
    [9, 0]
    """
    keys = _epoch(n, seed, epoch)
    p = _pass_back(keys, samples.astype(np.uint64))
    while len(beyond := np.flatnonzero(p >= n)):
        p[beyond] = _pass_back(keys, p[beyond])
    return p.astype(np.int64)


def samples_at(n: int, *, seed: int, epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the samples at positions of one epoch, each below n.

    Raises: ARGUMENT if `n`, `seed` or `epoch` is out of range.

    >>> samples_at(10, seed=0, epoch=0, positions=np.array([9, 0])).tolist()
    [7, 3]
    """
    return _walk(n, _epoch(n, seed, epoch), positions.astype(np.uint64)).astype(np.int64)


def sample_indices(n: int, *, seed: int, begin: int, end: int) -> NDArray[np.int64]:
    """Return the samples at the positions ``[begin, end)`` of the endless order.

    Shapes: the result is (end - begin,).
    Raises: ARGUMENT if an argument is out of range.

    >>> sample_indices(10, seed=0, begin=6, end=12).tolist()
    [9, 6, 0, 7, 4, 9]
    """
    if not 0 <= begin <= end:
        raise err(Code.ARGUMENT, f"[{begin}, {end}) is no range of positions")
    samples = np.empty(end - begin, np.int64)
    at = begin
    while at < end:
        epoch, p = divmod(at, n) if n > 0 else (0, 0)
        count = min(end - at, max(n, 1) - p, _CHUNK)
        positions = np.arange(p, p + count, dtype=np.uint64)
        samples[at - begin : at - begin + count] = _walk(n, _epoch(n, seed, epoch), positions)
        at += count
    return samples


def mix64(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return ``mix`` of each value (step 3)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(_MIX_1)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(_MIX_2)
    return values ^ (values >> np.uint64(31))


@functools.lru_cache(maxsize=64)
def _epoch(n: int, seed: int, epoch: int) -> _Epoch:
    if not 1 <= n <= limits.DIM:
        raise err(Code.ARGUMENT, f"an order of {n} samples: from 1 to {limits.DIM} are allowed")
    if not (0 <= seed <= _MASK and 0 <= epoch <= _MASK):
        raise err(Code.ARGUMENT, f"seed {seed} and epoch {epoch} must be in [0, 2^64)")
    a = math.isqrt(n - 1) + 1
    stream = blake3(b"ckptfmt/feistel-v1" + struct.pack("<QQ", seed, epoch)).digest(
        length=8 * ROUNDS
    )
    return _Epoch(a, -(-n // a), struct.unpack(f"<{ROUNDS}Q", stream))


def _walk(n: int, epoch: _Epoch, positions: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the samples at positions of one epoch."""
    p = _pass(epoch, positions)
    while len(beyond := np.flatnonzero(p >= n)):
        p[beyond] = _pass(epoch, p[beyond])
    return p


def _pass(epoch: _Epoch, p: NDArray[np.uint64]) -> NDArray[np.uint64]:
    a = np.uint64(epoch.a)
    b = np.uint64(epoch.b)
    left, right = np.divmod(p, b)
    keys = np.array(epoch.keys, np.uint64)
    for i in range(0, ROUNDS, 2):
        left = _add(left, mix64(right + keys[i]), a)
        right = _add(right, mix64(left + keys[i + 1]), b)
    return left * b + right


def _pass_back(epoch: _Epoch, p: NDArray[np.uint64]) -> NDArray[np.uint64]:
    a = np.uint64(epoch.a)
    b = np.uint64(epoch.b)
    left, right = np.divmod(p, b)
    keys = np.array(epoch.keys, np.uint64)
    for i in range(ROUNDS - 2, -1, -2):
        right = _subtract(right, mix64(left + keys[i + 1]), b)
        left = _subtract(left, mix64(right + keys[i]), a)
    return left * b + right


def _add(half: NDArray[np.uint64], mixed: NDArray[np.uint64], m: np.uint64) -> NDArray[np.uint64]:
    # Both terms are below m: a subtraction replaces the remainder, several times faster.
    total = half + (((mixed >> np.uint64(24)) * m) >> np.uint64(40))
    return np.where(total >= m, total - m, total)


def _subtract(
    half: NDArray[np.uint64], mixed: NDArray[np.uint64], m: np.uint64
) -> NDArray[np.uint64]:
    term = ((mixed >> np.uint64(24)) * m) >> np.uint64(40)
    return np.where(half >= term, half - term, half + m - term)
