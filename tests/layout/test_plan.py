"""Which bytes to read: against an oracle that looks at every element."""

import itertools
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfmt.box import Box
from ckptfmt.documents.sharding import Sharding
from ckptfmt.layout.read_plan import (
    BlockRange,
    cut_range,
    find_blocks,
    iter_chunks,
    iter_stored_boxes,
    plan_requests,
    strides_of,
)


def boxes_in(shape):
    """Return a strategy of boxes with elements within `shape`."""

    def span(extent):
        pairs = st.tuples(st.integers(0, extent - 1), st.integers(1, extent))
        return pairs.map(lambda pair: (pair[0], min(pair[1], extent - pair[0])))

    spans = [span(extent) for extent in shape]
    return st.tuples(*spans).map(
        lambda pairs: Box(tuple(p[0] for p in pairs), tuple(p[1] for p in pairs))
    )


SHAPES = st.lists(st.integers(1, 7), max_size=4).map(tuple)


@given(
    SHAPES.flatmap(
        lambda shape: st.tuples(st.just(shape), st.lists(boxes_in(shape), min_size=1, max_size=3))
    ),
    st.sampled_from([1, 2, 4, 8, 16]),
    st.sampled_from([1, 2, 3, 5, 16, 64, 4096]),
)
def test_blocks_are_those_with_a_wanted_element_and_no_others(pair, element_nbytes, block_nbytes):
    """REQ-OPN-005: no block between two rows of a column slice; also blocks smaller than an element or a row."""
    shape, wanted = pair
    base = tuple(3 * axis for axis in range(len(shape)))
    stored = Box(base, shape)
    moved = [
        Box(tuple(a + b for a, b in zip(base, box.begin, strict=True)), box.shape) for box in wanted
    ]
    count = int(np.prod(shape, dtype=int))
    needed = set()
    for box in wanted:
        numbers = np.arange(count).reshape(shape)[box.relative_to(Box.whole(shape))].reshape(-1)
        needed |= set(
            ((numbers[:, None] * element_nbytes + np.arange(element_nbytes)) // block_nbytes).flat
        )
    ranges = find_blocks(stored, moved, element_nbytes, block_nbytes)
    assert [block for begin, end in ranges for block in range(begin, end)] == sorted(needed)
    assert all(behind < begin for (_, behind), (begin, _) in itertools.pairwise(ranges))


RANGES = st.lists(
    st.tuples(st.sampled_from("ab"), st.integers(0, 3), st.integers(1, 9)), max_size=12
)


@given(RANGES, st.integers(1, 5), st.integers(1, 40), st.integers(0, 20))
def test_requests_hold_every_run_once_and_keep_the_limits(
    drawn, block_nbytes, request_nbytes, gap_nbytes
):
    """REQ-OPN-008: cut between blocks only; not longer than asked but for one block; no longer gap than asked."""
    ranges, ends = [], {"a": 0, "b": 0}
    for number, (path, gap, block_count) in enumerate(drawn):
        begin = ends[path] + gap * 5
        ranges.append(
            BlockRange(path, begin, block_count * block_nbytes, number, number * block_nbytes)
        )
        ends[path] = ranges[-1].byte_end
    requests = plan_requests(
        random.Random(0).sample(ranges, len(ranges)),
        block_nbytes=block_nbytes,
        request_nbytes=request_nbytes,
        gap_nbytes=gap_nbytes,
    )
    found = [
        (r.path, r.box, r.byte_begin + n, r.box_byte_begin + n)
        for q in requests
        for r in q.ranges
        for n in range(r.nbytes)
    ]
    expected = [
        (r.path, r.box, r.byte_begin + n, r.box_byte_begin + n)
        for r in ranges
        for n in range(r.nbytes)
    ]
    assert sorted(found) == sorted(expected)
    for request in requests:
        first, last = request.ranges[0], request.ranges[-1]
        assert (request.path, request.byte_begin, request.nbytes) == (
            first.path,
            first.byte_begin,
            last.byte_end - first.byte_begin,
        )
        assert request.nbytes <= max(request_nbytes, block_nbytes)
        assert all(
            0 <= b.byte_begin - a.byte_end <= gap_nbytes
            for a, b in itertools.pairwise(request.ranges)
        )
        assert all(
            (r.box_byte_begin - r.box * block_nbytes) % block_nbytes == 0 for r in request.ranges
        )
    ordered = [(request.path, request.byte_begin) for request in requests]
    assert ordered == sorted(ordered)


def test_neighbours_are_read_at_once():
    """What lies side by side, of many small pieces, is one request, and so is what a small gap parts."""
    ranges = [BlockRange("a", 100 * number, 90, number, 0) for number in range(50)]
    (request,) = plan_requests(ranges, block_nbytes=4096, request_nbytes=1 << 20, gap_nbytes=10)
    assert (request.byte_begin, request.nbytes, len(request.ranges)) == (0, 4990, 50)
    assert len(plan_requests(ranges, block_nbytes=4096, request_nbytes=1 << 20, gap_nbytes=9)) == 50


@given(
    SHAPES.flatmap(
        lambda shape: st.tuples(
            st.just(shape), *[st.integers(0, int(np.prod(shape, dtype=int)))] * 2
        )
    ),
    st.sampled_from([1, 4]),
)
def test_a_range_is_cut_into_the_boxes_that_it_is(triple, element_nbytes):
    """Each element of the range in one box, in order, and each box's bytes one behind the other."""
    shape, *ends = triple
    begin, end = sorted(ends)
    base = tuple(5 * axis for axis in range(len(shape)))
    cuts = cut_range(Box(base, shape), begin * element_nbytes, end * element_nbytes, element_nbytes)
    numbers = np.arange(int(np.prod(shape, dtype=int))).reshape(shape)
    at = begin
    for byte_begin, box in cuts:
        assert byte_begin == at * element_nbytes
        found = numbers[box.relative_to(Box(base, shape))].reshape(-1).tolist()
        assert found == list(range(at, at + len(found)))
        assert found
        at += len(found)
    assert at == end
    assert len(cuts) <= max(1, 2 * len(shape) - 1)


@given(
    SHAPES.flatmap(lambda shape: st.tuples(st.just(shape), boxes_in(shape))),
    st.sampled_from([1, 3, 8]),
    st.integers(1, 64),
)
def test_chunks_tile_what_is_wanted(pair, element_nbytes, chunk_nbytes):
    """None is larger than asked, unless one element is; in C order, each element once."""
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
    st.integers(1, 9).flatmap(
        lambda n: st.tuples(st.just(n), st.lists(st.integers(1, n), max_size=4), boxes_in((n,)))
    )
)
def test_boxes_read_are_what_stored_and_wanted_have_in_common(triple):
    """REQ-OPN-005."""
    extent, cuts, wanted = triple
    edges = sorted({0, *cuts, extent})
    sharding = Sharding.of(
        (Box((a,), (b - a,)), number) for number, (a, b) in enumerate(itertools.pairwise(edges))
    )
    reads = tuple(iter_stored_boxes(sharding, wanted))
    assert [list(range(common.begin[0], common.end[0])) for _, _, common in reads] == [
        common
        for box, _ in sharding
        if (
            common := [
                n for n in range(box.begin[0], box.end[0]) if wanted.begin[0] <= n < wanted.end[0]
            ]
        )
    ]
    assert all(dict(sharding)[stored] == part for stored, part, _ in reads)


def test_nothing_wanted_reads_nothing():
    sharding = Sharding.of([(Box((0, 0), (4, 4)), 0)])
    for wanted in (Box((0, 0), (0, 4)), Box((4, 4), (0, 0)), Box((2, 2), (2, 0))):
        assert tuple(iter_stored_boxes(sharding, wanted)) == ()


def test_a_scalar_is_one_box():
    sharding = Sharding.of([(Box((), ()), 3)])
    ((stored, part, common),) = iter_stored_boxes(sharding, Box((), ()))
    assert part == 3
    assert list(iter_chunks(Box((), ()), 16, 1)) == [Box((), ())]
    assert find_blocks(stored, [common], 8, 4096) == ((0, 1),)
    assert cut_range(stored, 0, 8, 8) == ((0, Box((), ())),)


@pytest.mark.parametrize(
    ("shape", "strides"), [((), ()), ((3,), (8,)), ((2, 3), (24, 8)), ((2, 1, 3), (24, 24, 8))]
)
def test_strides(shape, strides):
    """REQ-TEN-001."""
    assert strides_of(shape, 8) == strides
