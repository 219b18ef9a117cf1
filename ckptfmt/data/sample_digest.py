"""``mix64-add4-v1``: a digest of the multiset of consumed samples, so that none skipped, none repeated is checkable.

The normative text, in the words of ``feistel-v1`` (`ckptfmt.data.shuffle`):

    The key words K[0] to K[3] of an epoch of a source are the BLAKE3-256 digest of the 17 ASCII bytes
    ``ckptfmt/ledger-v1``, LE64(epoch) and the source's id in UTF-8, read as four LE64.
    A multiset of (source, epoch, sample) has four sums over its members: S[j] = sum of mix((sample + K[j]) mod 2^64),
    modulo 2^64. Its digest is LE64(S[0]) to LE64(S[3]), as 64 lower-case hex digits. The empty one is all zeros.

Digests of disjoint or repeated ranges add up, in any order and however they were cut: each worker may count its own.
It finds mistakes; who wants to can make two multisets of one digest.

Source: incremental hashing by addition: M. Bellare, D. Micciancio, EUROCRYPT 1997.
"""

from __future__ import annotations

import struct
from typing import Final

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from ckptfmt.data.shuffle import mix64, sample_indices
from ckptfmt.documents.cursor import Ledger

EMPTY: Final = Ledger(count=0, set_digest="0" * 64)

_LANES: Final = "<4Q"
_MASK: Final = (1 << 64) - 1
#: Positions at a time: bounds the memory of long ranges.
_CHUNK: Final = 1 << 16


def ledger_of_samples(source_id: str, epoch: int, samples: NDArray[np.integer]) -> Ledger:
    """Return the ledger of samples of one epoch, in whatever order they were consumed.

    Shapes: `samples` is (count,); one that comes twice counts twice.

    >>> once = ledger_of_samples("books", 0, np.array([3, 1, 2]))
    >>> once == ledger_of_samples("books", 0, np.array([1, 2, 3])), once == ledger_of_samples("books", 0, np.arange(3))
    (True, False)
    """
    key = blake3(b"ckptfmt/ledger-v1" + struct.pack("<Q", epoch) + source_id.encode()).digest()
    values = samples.astype(np.uint64)
    sums = [int(mix64(values + np.uint64(word)).sum(dtype=np.uint64)) for word in struct.unpack(_LANES, key)]
    return Ledger(count=len(values), set_digest=struct.pack(_LANES, *sums).hex())


def ledger_of_range(source_id: str, n: int, *, seed: int, begin: int, end: int) -> Ledger:
    """Return the ledger of the samples at the positions ``[begin, end)`` of the endless order ``feistel-v1``.

    Raises: ARGUMENT when an argument is out of range.

    >>> whole = ledger_of_range("books", 10, seed=7, begin=0, end=10)
    >>> whole == ledger_of_samples("books", 0, np.arange(10))
    True
    """
    ledger = EMPTY
    while begin < end:
        stop = min(end, begin + _CHUNK, (begin // n + 1) * n)
        samples = sample_indices(n, seed=seed, begin=begin, end=stop)
        ledger = add_ledgers(ledger, ledger_of_samples(source_id, begin // n, samples))
        begin = stop
    return ledger


def add_ledgers(first: Ledger, second: Ledger) -> Ledger:
    """Return the ledger of both multisets together."""
    words = zip(*(struct.unpack(_LANES, bytes.fromhex(one.set_digest)) for one in (first, second)), strict=True)
    sums = [(a + b) & _MASK for a, b in words]
    return Ledger(count=first.count + second.count, set_digest=struct.pack(_LANES, *sums).hex())
