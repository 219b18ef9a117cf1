"""Exact tiling against a brute-force count of the boxes above each element."""

import itertools
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfmt import limits
from ckptfmt.box import Box
from ckptfmt.errors import CkptError, Code
from ckptfmt.layout.tiling import check_bounds, check_tiling


def arrays(boxes, ndim, dtype=np.int64):
    begin = np.array([box.begin for box in boxes], dtype).reshape(len(boxes), ndim)
    return begin, np.array([box.shape for box in boxes], dtype).reshape(len(boxes), ndim)


def verdict(shape, boxes, dtype=np.int64):
    """What check_tiling says: None, or the code and the element that it names."""
    try:
        check_tiling(shape, *arrays(boxes, len(shape), dtype), where="w")
    except CkptError as error:
        assert error.where == "w"
        assert error.requirement == "REQ-IDX-004"
        if error.code is Code.BOX_BOUNDS:
            return error.code
        return error.code, error.detail.split(" is in ")[0]
    return None


def oracle(shape, boxes):
    if not all(Box.whole(shape).contains(box) for box in boxes):
        return Code.BOX_BOUNDS
    count = np.zeros(shape, int)
    for box in boxes:
        count[box.relative_to(Box.whole(shape))] += 1
    for index in np.ndindex(*shape):
        if count[index] != 1:
            code = Code.TILING_GAP if count[index] == 0 else Code.TILING_OVERLAP
            return code, f"element {index}"
    return None


@st.composite
def partitions(draw):
    """A shape of at most four dimensions and its boxes after up to eight random guillotine cuts."""
    shape = tuple(draw(st.lists(st.integers(0, 6), min_size=0, max_size=4)))
    boxes = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, 8)) if shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, box.shape[dim]))
        for low, extent in ((0, at), (at, box.shape[dim] - at)):
            begin = (*box.begin[:dim], box.begin[dim] + low, *box.begin[dim + 1 :])
            boxes.append(Box(begin, (*box.shape[:dim], extent, *box.shape[dim + 1 :])))
    return shape, draw(st.permutations(boxes))


@st.composite
def mutated(draw):
    shape, boxes = draw(partitions())
    row = draw(st.integers(0, len(boxes) - 1))
    box = boxes[row]
    kind = draw(
        st.sampled_from(["drop", "duplicate", "shift", "grow"] if shape else ["drop", "duplicate"])
    )
    if kind == "drop":
        return shape, boxes[:row] + boxes[row + 1 :]
    if kind == "duplicate":
        return shape, [*boxes, box]
    dim, by = draw(st.integers(0, len(shape) - 1)), draw(st.sampled_from([-1, 1]))
    begin, extent = list(box.begin), list(box.shape)
    if kind == "shift":
        begin[dim] = max(0, begin[dim] + by)
    else:
        extent[dim] = max(0, extent[dim] + by)
    return shape, [*boxes[:row], Box(tuple(begin), tuple(extent)), *boxes[row + 1 :]]


@given(partitions(), st.sampled_from([np.int64, np.uint64, np.uint8]))
def test_a_partition_tiles(case, dtype):
    shape, boxes = case
    assert verdict(shape, boxes, dtype) is None


@given(mutated(), st.sampled_from([np.int64, np.uint64, np.uint8]))
def test_a_mutated_partition_is_judged_as_counting_does(case, dtype):
    shape, boxes = case
    assert verdict(shape, boxes, dtype) == oracle(shape, boxes)


small_boxes = st.lists(
    st.builds(Box, *[st.tuples(st.integers(0, 3), st.integers(0, 3))] * 2), max_size=6
)


@given(small_boxes)
def test_any_boxes_are_judged_as_counting_does(boxes):
    assert verdict((4, 4), boxes) == oracle((4, 4), boxes)


def test_a_pinwheel_tiles_though_no_cut_divides_it():
    boxes = [
        Box((0, 0), (1, 2)),
        Box((0, 2), (2, 1)),
        Box((2, 1), (1, 2)),
        Box((1, 0), (2, 1)),
        Box((1, 1), (1, 1)),
    ]
    assert verdict((3, 3), boxes) is None


def test_scalars():
    assert verdict((), [Box((), ())]) is None
    assert verdict((), []) == (Code.TILING_GAP, "element ()")
    assert verdict((), [Box((), ())] * 2) == (Code.TILING_OVERLAP, "element ()")


def test_a_tensor_without_elements_is_tiled_by_nothing_and_by_empty_boxes():
    assert verdict((3, 0), []) is None
    assert verdict((3, 0), [Box((1, 0), (1, 0))]) is None
    assert verdict((3, 0), [Box((1, 0), (3, 0))]) is Code.BOX_BOUNDS


def test_the_largest_dimensions_do_not_overflow():
    side = limits.DIM
    shape = (side, side, side)
    halves = [Box((0, 0, 0), (side // 2, side, side)), Box((side // 2, 0, 0), (side // 2, side, 7))]
    rest = Box((side // 2, 0, 7), (side // 2, side, side - 7))
    last = Box((side // 2, 5, 7), (side // 2, side - 5, side - 7))
    assert verdict(shape, [*halves, rest], np.uint64) is None
    assert verdict(shape, [*halves, last]) == (Code.TILING_GAP, f"element ({side // 2}, 0, 7)")
    assert verdict(shape, [*halves, rest, last]) == (
        Code.TILING_OVERLAP,
        f"element ({side // 2}, 5, 7)",
    )


@pytest.mark.parametrize(
    ("begin", "shape"), [((1 << 64) - 1, 1), (1, (1 << 64) - 1), (1 << 63, 1 << 63), (5, 0)]
)
def test_sums_that_wrap_around_are_out_of_bounds(begin, shape):
    with pytest.raises(CkptError) as raised:
        check_bounds(
            (4,), np.array([[begin]], np.uint64), np.array([[shape]], np.uint64), where="w"
        )
    assert raised.value.code is Code.BOX_BOUNDS


@pytest.mark.parametrize("shape", [(limits.DIM + 1,), (-1,), (1,) * (limits.NDIM + 1)])
def test_a_shape_beyond_the_limits_is_refused(shape):
    with pytest.raises(CkptError) as raised:
        check_tiling(shape, *arrays([], len(shape)), where="w")
    assert raised.value.code is Code.LIMIT_EXCEEDED


def test_dimensions_that_are_not_cut_do_not_count():
    ndim = limits.SPLIT_NDIM + 1
    shape = (2,) * ndim
    cells = [Box(corner, (1,) * ndim) for corner in itertools.product((0, 1), repeat=ndim)]
    with pytest.raises(CkptError) as raised:
        check_tiling(shape, *arrays(cells, ndim), where="w")
    assert raised.value.code is Code.LIMIT_EXCEEDED
    assert raised.value.requirement == "REQ-LIM-001"
    whole_last = [
        Box((*corner, 0), (*(1,) * (ndim - 1), 2))
        for corner in itertools.product((0, 1), repeat=ndim - 1)
    ]
    assert verdict(shape, whole_last) is None
    assert verdict(shape, whole_last[:-1]) == (
        Code.TILING_GAP,
        f"element {(*(1,) * (ndim - 1), 0)}",
    )


def test_an_empty_box_cuts_nothing():
    ndim = limits.SPLIT_NDIM + 1
    whole, empty = Box((0,) * ndim, (2,) * ndim), Box((1,) * ndim, (0,) * ndim)
    assert verdict((2,) * ndim, [whole, empty]) is None


def test_sums_are_not_taken_in_a_narrow_type():
    assert verdict((250,), [Box((200,), (100,))], np.uint8) is Code.BOX_BOUNDS
    assert verdict((250,), [Box((0,), (200,)), Box((200,), (50,))], np.uint8) is None


def test_arrays_of_another_rank_are_refused():
    with pytest.raises(CkptError) as raised:
        check_tiling((2, 2), np.zeros((1, 1), np.int64), np.zeros((1, 1), np.int64), where="w")
    assert raised.value.code is Code.ARGUMENT


def cells_of_a_million():
    rows = np.stack(np.meshgrid(np.arange(1000), np.arange(1000), indexing="ij"), axis=-1).reshape(
        -1, 2
    )
    return np.random.default_rng(0).permutation(rows)


@pytest.mark.slow
def test_a_million_boxes_take_seconds():
    begin = cells_of_a_million()
    for shape, rows in (((1000, 1000), begin), ((1_000_000,), begin @ np.array([[1000], [1]]))):
        ones = np.ones_like(rows)
        start = time.process_time()
        check_tiling(shape, rows, ones, where="w")
        assert time.process_time() - start < 40
        ones[17] = 2
        with pytest.raises(CkptError):
            check_tiling(shape, rows, ones, where="w")
