"""The multiset digest of consumed samples."""

import struct

import numpy as np
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from ckptfmt.data.course import EMPTY, add_ledgers, ledger_of_samples
from ckptfmt.data.shuffle import sample_indices
from tests.data.cursors import ledger_of_range


def written_down(source, members):
    """The normative text with nothing of the library; members are (epoch, sample)."""
    sums = [0] * 4
    for epoch, sample in members:
        keys = struct.unpack(
            "<4Q",
            blake3(b"ckptfmt/ledger-v1" + epoch.to_bytes(8, "little") + source.encode()).digest(),
        )
        for j, key in enumerate(keys):
            x = (sample + key) % 2**64
            x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
            x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
            sums[j] = (sums[j] + (x ^ x >> 31)) % 2**64
    return struct.pack("<4Q", *sums).hex()


def test_the_vector_of_the_text():
    ledger = ledger_of_range("books", 10, seed=0, begin=0, end=12)
    members = [
        (p // 10, int(sample))
        for p, sample in enumerate(sample_indices(10, seed=0, begin=0, end=12))
    ]
    assert ledger.count == 12
    assert ledger.set_digest == written_down("books", members)


@given(st.integers(1, 60), st.integers(0, 300), st.lists(st.integers(0, 300), max_size=4))
def test_however_a_range_is_cut_its_ledger_is_the_same(n, end, cuts):
    edges = sorted({0, end, *(cut for cut in cuts if cut <= end)})
    pieces = [
        ledger_of_range("s", n, seed=1, begin=a, end=b)
        for a, b in zip(edges, edges[1:] or edges, strict=False)
    ]
    total = EMPTY
    for piece in reversed(pieces):
        total = add_ledgers(total, piece)
    assert total == ledger_of_range("s", n, seed=1, begin=0, end=end)


def test_order_is_left_out_and_nothing_else_is():
    samples = np.arange(20)
    ledger = ledger_of_samples("s", 0, samples)
    assert ledger_of_samples("s", 0, samples[::-1]) == ledger
    others = [
        ledger_of_samples("t", 0, samples),
        ledger_of_samples("s", 1, samples),
        ledger_of_samples("s", 0, samples[:-1]),
        ledger_of_samples("s", 0, np.append(samples[:-1], 0)),
        ledger_of_samples("s", 0, np.append(samples, 0)),
    ]
    assert len({other.set_digest for other in others} | {ledger.set_digest}) == 6


def test_a_long_range_is_cut_where_it_must_be():
    n = 70_000
    expected = add_ledgers(
        ledger_of_samples("s", 0, np.arange(n)), ledger_of_samples("s", 1, np.arange(n))
    )
    assert ledger_of_range("s", n, seed=4, begin=0, end=2 * n) == expected
