"""Which bytes to read: against an oracle that looks at every element."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfmt.arithmetic.plan import iter_chunks, plan_blocks, plan_pieces, strides_of
from ckptfmt.box import Box


def boxes_in(shape):
    """Return a strategy of boxes with elements within `shape`."""

    def span(extent):
        pairs = st.tuples(st.integers(0, extent - 1), st.integers(1, extent))
        return pairs.map(lambda pair: (pair[0], min(pair[1], extent - pair[0])))

    spans = [span(extent) for extent in shape]
    return st.tuples(*spans).map(lambda pairs: Box(tuple(p[0] for p in pairs), tuple(p[1] for p in pairs)))


SHAPES = st.lists(st.integers(1, 7), max_size=4).map(tuple)


@given(
    SHAPES.flatmap(lambda shape: st.tuples(st.just(shape), boxes_in(shape))),
    st.sampled_from([1, 2, 4, 8, 16]),
    st.sampled_from([1, 2, 16, 64, 4096]),
)
def test_blocks_hold_every_wanted_element_and_no_block_too_many(pair, element_nbytes, block_nbytes):
    """REQ-OPN-006: whole blocks, first to last that is wanted; also blocks smaller than an element or a row."""
    shape, wanted = pair
    base = tuple(3 * axis for axis in range(len(shape)))
    stored = Box(base, shape)
    moved = Box(tuple(a + b for a, b in zip(base, wanted.begin, strict=True)), wanted.shape)
    count = int(np.prod(shape, dtype=int))
    numbers = np.arange(count).reshape(shape)[wanted.relative_to(Box.whole(shape))].reshape(-1)
    byte_numbers = (numbers[:, None] * element_nbytes + np.arange(element_nbytes)).reshape(-1)
    needed = byte_numbers // block_nbytes
    blocks = plan_blocks(stored, moved, element_nbytes, block_nbytes)
    assert (blocks.block_begin, blocks.block_end) == (needed.min(), needed.max() + 1)
    assert blocks.byte_begin == blocks.block_begin * block_nbytes
    assert blocks.byte_end == min(count * element_nbytes, blocks.block_end * block_nbytes)


@given(
    SHAPES.flatmap(lambda shape: st.tuples(st.just(shape), boxes_in(shape))),
    st.sampled_from([1, 3, 8]),
    st.integers(1, 64),
)
def test_chunks_tile_what_is_wanted(pair, element_nbytes, chunk_nbytes):
    """REQ-OPN-008: none is larger than asked, unless one element is; in C order, each element once."""
    shape, wanted = pair
    seen = np.zeros(shape, int)
    order = []
    for chunk in iter_chunks(wanted, element_nbytes, chunk_nbytes):
        assert chunk.element_count * element_nbytes <= max(chunk_nbytes, element_nbytes)
        seen[chunk.relative_to(Box.whole(shape))] += 1
        order.append(chunk.begin)
    expected = np.zeros(shape, int)
    expected[wanted.relative_to(Box.whole(shape))] = 1
    assert (seen == expected).all()
    assert order == sorted(order)


@given(
    st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.integers(1, n), max_size=4), boxes_in((n,))))
)
def test_pieces_are_what_stored_and_wanted_have_in_common(triple):
    """REQ-OPN-005."""
    extent, cuts, wanted = triple
    edges = sorted({0, *cuts, extent})
    sharding = tuple((Box((a,), (b - a,)), number) for number, (a, b) in enumerate(itertools.pairwise(edges)))
    reads = plan_pieces(sharding, wanted)
    assert [list(range(read.wanted.begin[0], read.wanted.end[0])) for read in reads] == [
        common
        for box, _ in sharding
        if (common := [n for n in range(box.begin[0], box.end[0]) if wanted.begin[0] <= n < wanted.end[0]])
    ]
    assert all(dict(sharding)[read.stored] == read.part for read in reads)


def test_nothing_wanted_reads_nothing():
    sharding = ((Box((0, 0), (4, 4)), 0),)
    for wanted in (Box((0, 0), (0, 4)), Box((4, 4), (0, 0)), Box((2, 2), (2, 0))):
        assert plan_pieces(sharding, wanted) == ()


def test_a_scalar_is_one_piece():
    sharding = ((Box((), ()), 3),)
    (read,) = plan_pieces(sharding, Box((), ()))
    assert read.part == 3
    assert list(iter_chunks(Box((), ()), 16, 1)) == [Box((), ())]
    assert plan_blocks(read.stored, read.wanted, 8, 4096).byte_end == 8


@pytest.mark.parametrize(("shape", "strides"), [((), ()), ((3,), (8,)), ((2, 3), (24, 8)), ((2, 1, 3), (24, 24, 8))])
def test_strides(shape, strides):
    """REQ-TEN-001."""
    assert strides_of(shape, 8) == strides
