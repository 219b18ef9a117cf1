"""feistel-v1 against an independent implementation, as a permutation, and as a shuffle."""

import struct

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from ckptfmt import limits
from ckptfmt.data.shuffle import positions_of, sample_indices, samples_at
from ckptfmt.errors import CkptError, Code


def written_down(n, seed, epoch, p):
    """The normative text, step by step, with nothing of the library."""
    a = next(x for x in range(max(0, int(n**0.5) - 2), 1 << 25) if x * x >= n)
    b = next(x for x in range(n // a, n // a + 2) if a * x >= n)
    message = b"ckptfmt/feistel-v1" + seed.to_bytes(8, "little") + epoch.to_bytes(8, "little")
    keys = struct.unpack("<8Q", blake3(message).digest(length=64))

    def mix(x):
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31

    while True:
        left, right = p // b, p % b
        for i in range(8):
            m, other = (a, right) if i % 2 == 0 else (b, left)
            term = (mix((other + keys[i]) % 2**64) >> 24) * m
            assert term < 2**64
            if i % 2 == 0:
                left = (left + (term >> 40)) % a
            else:
                right = (right + (term >> 40)) % b
        p = left * b + right
        if p < n:
            return p


lengths = st.one_of(
    st.integers(1, 300), st.integers(1, limits.DIM), st.sampled_from([limits.DIM, limits.DIM - 1])
)
words = st.integers(0, 2**64 - 1)


@given(lengths, words, st.integers(0, 2**64 - 1), st.data())
def test_both_ways_agree_and_the_inverse_undoes_them(n, seed, epoch, data):
    p = data.draw(st.integers(0, n - 1))
    sample = written_down(n, seed, epoch, p)
    assert samples_at(n, seed=seed, epoch=epoch, positions=np.array([p])).tolist() == [sample]
    assert sample_indices(n, seed=seed, begin=epoch * n + p, end=epoch * n + p + 1).tolist() == [
        sample
    ]
    assert positions_of(n, seed=seed, epoch=epoch, samples=np.array([sample])).tolist() == [p]


@given(lengths, words, words, st.data())
def test_many_samples_are_found_as_each_of_them_is(n, seed, epoch, data):
    places = np.array(data.draw(st.lists(st.integers(0, n - 1), max_size=9)), np.int64)
    samples = samples_at(n, seed=seed, epoch=epoch, positions=places)
    assert samples.tolist() == [written_down(n, seed, epoch, p) for p in places.tolist()]
    assert (positions_of(n, seed=seed, epoch=epoch, samples=samples) == places).all()


@pytest.mark.parametrize(
    ("n", "seed", "epoch", "first", "last"),
    [
        (10, 0, 0, [3, 1, 4, 2], 7),
        (1000, 1, 2, [988, 25, 850, 372], 936),
        (
            1 << 48,
            (1 << 64) - 1,
            3,
            [37976156300933, 205035813167397, 203094510729350, 248246830510441],
            41421302834276,
        ),
    ],
)
def test_the_vectors_of_the_text(n, seed, epoch, first, last):
    places = np.array([0, 1, 2, 3, n - 1])
    assert samples_at(n, seed=seed, epoch=epoch, positions=places).tolist() == [*first, last]
    assert [written_down(n, seed, epoch, p) for p in (0, n - 1)] == [first[0], last]


@pytest.mark.parametrize("n", [*range(1, 70), 100, 101, 255, 256, 257, 4095, 4096, 4097, 99_991])
def test_each_epoch_has_each_sample_once(n):
    samples = sample_indices(n, seed=n, begin=0, end=2 * n)
    assert (np.sort(samples[:n]) == np.arange(n)).all()
    assert (np.sort(samples[n:]) == np.arange(n)).all()
    assert n < 10 or (samples[:n] != samples[n:]).any()


@given(st.integers(1, 50), words, st.integers(0, 200), st.integers(0, 200))
def test_a_range_is_its_positions(n, seed, begin, count):
    expected = [written_down(n, seed, *divmod(p, n)) for p in range(begin, begin + count)]
    assert sample_indices(n, seed=seed, begin=begin, end=begin + count).tolist() == expected


def test_a_range_longer_than_a_chunk_is_its_pieces():
    whole = sample_indices(10**6, seed=3, begin=999_000, end=1_040_000)
    pieces = [
        sample_indices(10**6, seed=3, begin=b, end=b + 8200)
        for b in range(999_000, 1_040_000, 8200)
    ]
    assert (whole == np.concatenate(pieces)).all()


def chi_square(counts):
    expected = counts.sum() / counts.size
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("n", [3, 4, 5, 7, 10, 16, 17])
def test_over_many_seeds_each_sample_is_as_likely_at_each_position(n):
    counts = np.zeros((n, n))
    for seed in range(2000):
        counts[np.arange(n), sample_indices(n, seed=seed, begin=0, end=n)] += 1
    # (n - 1)^2 degrees of freedom; five standard deviations and some room for the smallest n.
    freedom = (n - 1) ** 2
    assert chi_square(counts) < freedom + 5 * (2 * freedom) ** 0.5 + 5


def test_all_orders_of_a_few_samples_occur():
    orders = {tuple(sample_indices(4, seed=seed, begin=0, end=4).tolist()) for seed in range(1000)}
    assert len(orders) == 24


def test_a_long_order_shows_no_pattern():
    n = 1 << 17
    samples = sample_indices(n, seed=11, begin=0, end=n)
    blocks = np.zeros((32, 32))
    np.add.at(blocks, (np.arange(n) * 32 // n, samples * 32 // n), 1)
    assert chi_square(blocks) < 31**2 + 5 * (2 * 31**2) ** 0.5
    neighbours = np.corrcoef(samples[:-1], samples[1:])[0, 1]
    assert abs(neighbours) < 5 / n**0.5
    assert abs((np.diff(samples) == 1).sum() - 1) < 6
    other_epoch = sample_indices(n, seed=11, begin=n, end=2 * n)
    assert (samples == other_epoch).sum() < 8
    assert (samples == sample_indices(n, seed=12, begin=0, end=n)).sum() < 8


@pytest.mark.parametrize(
    ("n", "seed", "position"),
    [(0, 0, 0), (-1, 0, 0), (limits.DIM + 1, 0, 0), (5, -1, 0), (5, 1 << 64, 0), (5, 0, -1)],
)
def test_what_is_out_of_range_is_refused(n, seed, position):
    with pytest.raises(CkptError) as raised:
        sample_indices(n, seed=seed, begin=position, end=position + 1)
    assert raised.value.code is Code.ARGUMENT
