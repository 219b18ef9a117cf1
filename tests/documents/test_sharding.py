"""Shardings: one form for each, the same pieces however they are asked for, and their columns."""

import itertools
import time
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfmt import limits
from ckptfmt.box import Box
from ckptfmt.documents.packed import Columns, dump_packed
from ckptfmt.documents.sharding import Sharding, parse_shardings, rows_increase, sharding_columns
from ckptfmt.errors import Code
from ckptfmt.layout.tiling import check_sharding
from tests.builders import code_of, error_of, unpacked


def grid_of(*extents):
    """Return the boxes of a grid, in C order."""
    edges = [[0, *itertools.accumulate(axis)] for axis in extents]
    return [
        Box(tuple(a for a, _ in axes), tuple(b - a for a, b in axes))
        for axes in itertools.product(*(itertools.pairwise(axis) for axis in edges))
    ]


PINWHEEL = [
    Box((0, 0), (1, 2)),
    Box((0, 2), (2, 1)),
    Box((2, 1), (1, 2)),
    Box((1, 0), (2, 1)),
    Box((1, 1), (1, 1)),
]

axis = st.lists(st.integers(1, 4), min_size=1, max_size=4)
grids = st.lists(axis, max_size=3)


@st.composite
def any_boxes(draw):
    """Boxes of any kind: a grid, one of which a box was dropped or changed, or any at all; empty ones too."""
    extents = draw(grids)
    boxes = grid_of(*extents)
    kind = draw(st.sampled_from(["grid", "drop", "change", "any"]))
    ndim = len(extents)
    corner = st.tuples(*[st.integers(0, 6)] * ndim)
    if kind == "drop":
        boxes.pop(draw(st.integers(0, len(boxes) - 1)))
    if kind == "change":
        boxes[draw(st.integers(0, len(boxes) - 1))] = Box(draw(corner), draw(corner))
    if kind == "any":
        boxes = draw(st.lists(st.builds(Box, corner, corner), max_size=6))
    return extents, draw(st.permutations(list(dict.fromkeys(boxes))))


def pieces_of(boxes, part_count=5):
    return [(box, (7 * number) % part_count) for number, box in enumerate(boxes)]


@given(any_boxes())
def test_a_sharding_is_its_sorted_pieces(case):
    """REQ-IDX-003, REQ-IDX-012: and a grid exactly if it is all products of intervals from 0 on."""
    _, boxes = case
    pieces = pieces_of(boxes)
    sharding = Sharding.of(pieces)
    assert list(sharding) == sorted(pieces)
    assert [sharding[row] for row in range(len(pieces))] == sorted(pieces)
    assert sharding[-2:] == tuple(sorted(pieces)[-2:])
    assert len(sharding) == len(pieces)
    assert sharding.begin.tolist() == [list(box.begin) for box, _ in sorted(pieces)]
    assert sharding.box_shape.tolist() == [list(box.shape) for box, _ in sorted(pieces)]
    assert sharding == Sharding.of(reversed(pieces))
    assert hash(sharding) == hash(Sharding.of(reversed(pieces)))
    intervals = (
        [
            sorted({(box.begin[dim], box.shape[dim]) for box in boxes})
            for dim in range(len(boxes[0].begin))
        ]
        if (boxes)
        else [[]]
    )
    product = [[extent for _, extent in axis] for axis in intervals]
    is_grid = bool(boxes) and all(map(all, product)) and sorted(boxes) == grid_of(*product)
    assert (sharding.extents is not None) == is_grid
    if is_grid:
        assert [axis.tolist() for axis in sharding.extents or ()] == product


NO_GRIDS = {
    "a pinwheel": PINWHEEL,
    "the second row is cut elsewhere": [
        Box((0, 0), (1, 2)), Box((0, 2), (1, 2)), Box((1, 0), (1, 3)), Box((1, 3), (1, 1)),
    ],
    "the second row is as long, and has other shapes": [
        Box((0, 0), (1, 2)), Box((0, 2), (1, 2)), Box((1, 0), (1, 1)), Box((1, 2), (1, 2)),
    ],
    "one box of a row is higher": [
        Box((0, 0), (1, 1)), Box((0, 1), (2, 1)), Box((1, 0), (1, 1)), Box((1, 1), (1, 1)),
    ],
    "it doesn't begin at 0": [Box((1,), (1,)), Box((2,), (1,))],
    "one box that doesn't begin at 0": [Box((1,), (1,))],
    "a gap": [Box((0,), (1,)), Box((2,), (1,))],
    "an overlap": [Box((0,), (2,)), Box((1,), (2,))],
    "a row of another number": [Box((0, 0), (1, 2)), Box((0, 2), (1, 2)), Box((1, 0), (1, 4))],
    "an empty box": [Box((0,), (0,)), Box((0,), (2,))],
    "only an empty box": [Box((0, 0), (0, 3))],
    "no box": [],
}  # fmt: skip


@pytest.mark.parametrize("boxes", NO_GRIDS.values(), ids=NO_GRIDS)
def test_what_is_no_grid_stays_as_it_is(boxes):
    """REQ-IDX-012."""
    sharding = Sharding.of(pieces_of(boxes))
    assert sharding.extents is None
    assert list(sharding) == sorted(pieces_of(boxes))
    assert parse(sharding_columns([sharding], 5)) == [sharding]


def in_common(sharding, wanted):
    return [piece for piece in sharding if piece[0].intersect(wanted) is not None]


def test_the_ends_of_intervals_belong_to_the_next():
    """REQ-OPN-005: half-open intervals, on and beside each cut."""
    sharding = Sharding.of(pieces_of(grid_of([2, 3], [4, 1, 2])))
    for begin in itertools.product(range(6), range(8)):
        for shape in itertools.product(range(4), range(4)):
            wanted = Box(begin, shape)
            assert list(sharding.iter_common(wanted)) == in_common(sharding, wanted)


@given(any_boxes(), st.data())
def test_what_is_found_is_what_has_elements_in_common(case, data):
    """REQ-OPN-005: no piece too few, none too many, in their order."""
    extents, boxes = case
    sharding = Sharding.of(pieces_of(boxes))
    corner = st.tuples(*[st.integers(0, 9)] * len(extents))
    wanted = Box(data.draw(corner), data.draw(corner))
    assert list(sharding.iter_common(wanted)) == in_common(sharding, wanted)


@given(any_boxes(), st.data())
def test_a_box_is_found_by_what_it_is(case, data):
    """REQ-DEL-005: the part that stores it; of a box that isn't stored, none."""
    extents, boxes = case
    sharding = Sharding.of(pieces_of(boxes))
    for box, part in sharding:
        assert 0 in box.shape or sharding.part_of(box) == part
    corner = st.tuples(*[st.integers(0, 9)] * len(extents))
    wanted = Box(data.draw(corner), data.draw(corner))
    assert 0 in wanted.shape or sharding.part_of(wanted) == dict(sharding).get(wanted)


@given(any_boxes(), st.data())
def test_some_pieces_are_those_of_their_numbers(case, data):
    sharding = Sharding.of(pieces_of(case[1]))
    rows = data.draw(st.lists(st.integers(0, len(sharding) - 1) if len(sharding) else st.nothing()))
    assert list(sharding.iter_rows(np.array(rows, np.int64))) == [sharding[row] for row in rows]


def test_more_pieces_than_are_made_at_once():
    """REQ-OPN-005: 90,000 boxes of a grid, in chunks."""
    sharding = Sharding.grid([np.full(300, 2), np.full(300, 3)], np.arange(90_000))
    assert [part for _, part in sharding] == list(range(90_000))
    found = list(sharding.iter_common(Box((3, 4), (500, 700))))
    rows = [300 * i + j for i in range(1, 252) for j in range(1, 235)]
    assert found == [sharding[row] for row in rows]


@given(any_boxes(), any_boxes())
def test_shardings_are_equal_if_their_pieces_are(one, other):
    """REQ-IDX-009."""
    first, second = (Sharding.of(pieces_of(boxes)) for _, boxes in (one, other))
    assert (first == second) == (list(first) == list(second))
    assert first != Sharding.of([(box, part + 1) for box, part in first]) or not len(first)


def test_a_sharding_cannot_be_changed():
    for boxes in (grid_of([2, 2], [3]), PINWHEEL):
        sharding = Sharding.of(pieces_of(boxes))
        for array in (sharding.part, *(sharding.extents or (sharding.begin, sharding.box_shape))):
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 1


@given(st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=3), max_size=3), st.data())
def test_grids_are_judged_as_their_boxes(extents, data):
    """REQ-IDX-004: gap or box outside, and the first element that is in no box."""
    sums = [sum(axis) for axis in extents]
    shape = tuple(max(0, total + data.draw(st.sampled_from([0, 0, -1, 1]))) for total in sums)
    boxes = grid_of(*extents)
    outside = [dim for dim, extent in enumerate(shape) if sums[dim] > extent]
    missing = next(
        (
            i
            for i in np.ndindex(*shape)
            if not any(b.intersect(Box(i, (1,) * len(i))) for b in boxes)
        ),
        None,
    )
    sharding = Sharding.of(pieces_of(boxes))
    assert sharding.extents is not None
    code = code_of(lambda: check_sharding(sharding, shape, where="w"))
    if outside:
        assert code == Code.BOX_BOUNDS
    elif missing is None:
        assert code == "ok"
    else:
        assert code == Code.TILING_GAP
        assert (
            f"element {missing} "
            in error_of(lambda: check_sharding(sharding, shape, where="w")).detail
        )


def test_grids_have_the_limits_of_other_boxes():
    """REQ-LIM-001: dimensions that are cut, and corners."""
    for ndim, code in ((limits.SPLIT_NDIM, "ok"), (limits.SPLIT_NDIM + 1, Code.LIMIT_EXCEEDED)):
        extents = [np.array([1, 1])] * ndim
        sharding = Sharding.grid(extents, np.zeros(1 << ndim, np.int64))
        assert (
            code_of(
                lambda sharding=sharding, ndim=ndim: check_sharding(
                    sharding, (2,) * ndim, where="w"
                )
            )
            == code
        )
    halves = [np.array([1, 1])] * 7
    long = np.ones((limits.CORNERS >> 15) + 1, np.int64)
    sharding = Sharding.grid([*halves, long], np.zeros(len(long) << 7, np.int64))
    shape = (2,) * 7 + (len(long),)
    assert code_of(lambda: check_sharding(sharding, shape, where="w")) == Code.LIMIT_EXCEEDED


@pytest.mark.parametrize(
    ("columns", "increase"),
    [
        ([[1, 2, 3]], True),
        ([[1, 1]], False),
        ([[2, 1]], False),
        ([[1, 1], [1, 2]], True),
        ([[1, 1], [2, 1]], False),
        ([[1, 1, 2], [1, 2, 0]], True),
        ([[1, 2, 2], [5, 3, 3]], False),
        ([[1, 1], [1, 1], [0, 1]], True),
        ([[7]], True),
        ([], False),
    ],
)
def test_rows_increase_by_the_first_column_that_differs(columns, increase):
    """REQ-IDX-003."""
    assert rows_increase([np.array(column) for column in columns]) == increase


# --- columns --------------------------------------------------------------------------------------


def parse(table, part_count=5):
    return parse_shardings(Columns({"shardings": table}, ("shardings",), "x"), part_count)


@given(st.lists(any_boxes(), max_size=5))
def test_shardings_come_back(cases):
    """REQ-IDX-012."""
    shardings = list(dict.fromkeys(Sharding.of(pieces_of(boxes)) for _, boxes in cases))
    assert parse(sharding_columns(shardings, 5)) == shardings


MIXED = [
    Sharding.of(pieces_of(boxes))
    for boxes in (grid_of([2, 3], [4]), PINWHEEL, grid_of(), grid_of([7]), [])
]


def test_columns_are_as_the_page_says():
    """REQ-IDX-012."""
    table: Any = sharding_columns(MIXED, 5)
    assert {key: unpacked(column) for key, column in table.items()} == {
        "ndim": [2, 2, 0, 1, 0],
        "form": [1, 0, 1, 1, 0],
        "box_count": [2, 5, 1, 1, 0],
        "grid_shape": [2, 1, 1],
        "extent": [2, 3, 4, 7],
        # (0, 0), (0, 2), (1, 0), (1, 1), (2, 1): down by 0, 0, 1, 0, 1; across by 0 - 0, 2 - 2, 0 -
        # 3, 1 - 1, 1 - 2
        "begin": [0, 0, 2, 0, 2, 0, 0, 5, 0, 1],
        "box_shape": [1, 2, 2, 1, 1, 2, 1, 1, 1, 2],
        # parts 0 2, 0 2 1 3 4, 0, 0: the difference to the one before, less 1, modulo 5
        "part": [0, 1, 2, 1, 3, 1, 0, 0, 4],
    }


def edited(key, change):
    table: Any = dict(sharding_columns(MIXED, 5))
    values = unpacked(table[key])
    table[key] = dump_packed(change(values) or values)
    return table


def put(row, value):
    return lambda values: values.__setitem__(row, value)


REFUSED = {
    "a third form": (edited("form", put(0, 2)), Code.COLUMN_FORM, "REQ-IDX-002"),
    "a part that isn't there": (edited("part", put(0, 5)), Code.COLUMN_FORM, "REQ-IDX-002"),
    "a part too few": (edited("part", lambda v: v[:-1]), Code.COLUMN_FORM, "REQ-IDX-002"),
    "an interval too few": (edited("extent", lambda v: v[:-1]), Code.COLUMN_FORM, "REQ-IDX-002"),
    "an interval too many": (edited("extent", lambda v: [*v, 1]), Code.COLUMN_FORM, "REQ-IDX-002"),
    "an empty interval": (edited("extent", put(0, 0)), Code.COLUMN_FORM, "REQ-IDX-002"),
    "a grid of more boxes": (edited("grid_shape", lambda v: [1, 2, *v[2:]]), "ok", None),
    "a grid of fewer boxes": (edited("box_count", put(3, 2)), Code.COLUMN_FORM, "REQ-IDX-002"),
    "a scalar of no box": (edited("box_count", put(2, 0)), Code.COLUMN_FORM, "REQ-IDX-002"),
    "dimensions of no boxes": (edited("ndim", put(4, 1)), Code.COLUMN_FORM, "REQ-IDX-002"),
    "a number of a box too few": (
        edited("begin", lambda v: v[:-1]),
        Code.COLUMN_FORM,
        "REQ-IDX-002",
    ),
    "an extent of a box too many": (
        edited("box_shape", lambda v: [*v, 1]),
        Code.COLUMN_FORM,
        "REQ-IDX-002",
    ),
    "a box that begins before 0": (edited("begin", put(0, 1)), Code.COLUMN_FORM, "REQ-IDX-002"),
    "a box that begins too far": (
        edited("begin", put(0, 2 * limits.DIM)),
        Code.COLUMN_FORM,
        "REQ-IDX-002",
    ),
    "a step that is too long": (
        edited("begin", put(0, 2 * limits.DIM + 1)),
        Code.COLUMN_FORM,
        "REQ-IDX-002",
    ),
    "steps that wrap around": (
        edited("begin", lambda v: [2 * limits.DIM] * len(v)),
        Code.COLUMN_FORM,
        "REQ-IDX-002",
    ),
    "boxes that aren't sorted": (
        edited("begin", lambda v: [0, 2, 1, *v[3:]]),
        Code.COLUMN_ORDER,
        "REQ-IDX-003",
    ),
}
REFUSED["boxes that are a grid"] = (
    {
        "ndim": dump_packed([1]),
        "form": dump_packed([0]),
        "box_count": dump_packed([2]),
        "grid_shape": dump_packed([]),
        "extent": dump_packed([]),
        "begin": dump_packed([0, 0]),
        "box_shape": dump_packed([2, 3]),
        "part": dump_packed([0, 0]),
    },
    Code.COLUMN_ORDER,
    "REQ-IDX-012",
)
REFUSED["boxes of no dimensions"] = (
    {
        "ndim": dump_packed([0]),
        "form": dump_packed([0]),
        "box_count": dump_packed([2]),
        "grid_shape": dump_packed([]),
        "extent": dump_packed([]),
        "begin": dump_packed([]),
        "box_shape": dump_packed([]),
        "part": dump_packed([0, 0]),
    },
    Code.COLUMN_ORDER,
    "REQ-IDX-012",
)
REFUSED["two equal shardings"] = (
    sharding_columns([MIXED[0]] * 2, 5),
    Code.COLUMN_ORDER,
    "REQ-IDX-009",
)


@pytest.mark.parametrize(("table", "code", "requirement"), REFUSED.values(), ids=REFUSED)
def test_other_columns_are_refused(table, code, requirement):
    """REQ-IDX-002, REQ-IDX-003, REQ-IDX-009, REQ-IDX-012."""
    if code == "ok":
        assert code_of(lambda: parse(table)) == code
        return
    error = error_of(lambda: parse(table))
    assert (error.code, error.requirement) == (code, requirement)
    assert error.where.startswith("x#/shardings")


@pytest.mark.parametrize(("ndim", "length"), [(1, 1 << 40), (2, 1 << 20), (32, 4), (40, 2)])
def test_a_grid_of_many_boxes_is_refused_before_it_is_built(ndim, length):
    """Row 96; REQ-LIM-001: 2^40 boxes in a few bytes, whatever number of them is said."""
    for box_count in (1 << 40, limits.BOXES, 1):
        table = {
            "ndim": dump_packed([ndim]),
            "form": dump_packed([1]),
            "box_count": dump_packed([box_count]),
            "grid_shape": dump_packed([length] * ndim),
            "extent": dump_packed([1] * min(length * ndim, 1 << 22)),
            "begin": dump_packed([]),
            "box_shape": dump_packed([]),
            "part": dump_packed([0]),
        }
        begin = time.process_time()
        tracemalloc.start()
        assert code_of(lambda table=table: parse(table)) in {Code.COLUMN_FORM, Code.LIMIT_EXCEEDED}
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
        tracemalloc.stop()
        assert time.process_time() - begin < 20
