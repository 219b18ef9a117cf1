"""The small pure parts of the command line: sizes, names, views of values, the graph."""

import json
import math
from collections import Counter, OrderedDict, deque

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from ckptfmt.cli.console import bytes_text, clean, shorten, time_text
from ckptfmt.cli.log import draw_graph
from ckptfmt.cli.views import common_name, dump_view, iter_lines
from ckptfmt.documents.tree import DeviceName, DtypeName, InlineArray, Size, TensorRef

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.text()
    | st.binary(max_size=40)
)
TREES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.lists(inner).map(deque)
        | st.dictionaries(SCALARS, inner)
        | st.dictionaries(st.text(), inner).map(OrderedDict)
        | st.frozensets(SCALARS)
    ),
    max_leaves=20,
)


@hypothesis.given(TREES)
def test_every_value_has_a_view_in_json(value):
    view = dump_view(value)

    assert json.loads(json.dumps(view, allow_nan=False)) == view


@hypothesis.given(TREES)
def test_every_value_has_lines_that_play_no_tricks(value):
    for depth, key, text in iter_lines(value):
        assert depth >= 0
        assert (key + text).isprintable()


@pytest.mark.parametrize(
    ("value", "view"),
    [
        ((1 << 53) - 1, (1 << 53) - 1),
        (-(1 << 53), {"$int": "-0x20000000000000"}),
        (math.inf, {"$float": "inf"}),
        (1 - 2j, {"$complex": [1.0, -2.0]}),
        ({"$x": 1}, {"$map": [["$x", 1]]}),
        (Counter("aab"), {"a": 2, "b": 1}),
        (
            InlineArray("int8", (2,), b"\x01\x02"),
            {"$array": {"dtype": "int8", "shape": [2], "hex": "0102"}},
        ),
        (TensorRef("w", "torch"), {"$tensor": "w"}),
        (DtypeName("bfloat16"), {"$dtype": "bfloat16"}),
        (DeviceName("cuda:0"), {"$device": "cuda:0"}),
        (Size((2, 3)), {"$size": [2, 3]}),
    ],
)
def test_views(value, view):
    assert dump_view(value) == view


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (InlineArray("float32", (), np.float32(2.5).tobytes(), scalar=True), "float32 2.5"),
        (InlineArray("int64", (2,), np.array([1, 2]).tobytes()), "int64[2] 1, 2"),
        (InlineArray("uint8", (100,), bytes(100)), "uint8[100]"),
        (InlineArray("bfloat16", (1,), b"\x80\x3f"), "bfloat16[1] 1"),
        (bytes(5000), "4.9 KiB of bytes"),
        ((1,), "(1,)"),
        ([[], {1: 2}], "[[], {1: 2}]"),
        (1 << 5000, "an integer of 5001 bits"),
        ({3, 1}, "{1, 3}"),
        (deque([DtypeName("int8")]), "[int8]"),
        (Size((2, 3)), "Size[2, 3]"),
    ],
)
def test_lines(value, text):
    ((depth, key, shown),) = iter_lines({"key": value})

    assert (depth, key, shown) == (0, "key", text)


def test_integers_of_any_size_have_a_view():
    assert dump_view(1 << 20_000) == {"$int": hex(1 << 20_000)}


def test_few_lists_take_one_line_and_long_ones_many():
    assert len(list(iter_lines({"a": [1, 2, 3]}))) == 1
    assert len(list(iter_lines({"a": list(range(100))}))) == 101


@hypothesis.given(st.integers(min_value=0, max_value=1 << 80))
def test_sizes_stay_short(nbytes):
    text = bytes_text(nbytes)

    assert len(text) <= 10 or nbytes >= 1 << 70
    assert "1024.0" not in text or nbytes >= 1 << 70


@hypothesis.given(st.text(st.characters()))
def test_clean_text_is_printable_and_stays_clean(text):
    assert clean(text).isprintable()
    assert clean(clean(text)) == clean(text)


@hypothesis.given(st.text(), st.integers(min_value=1, max_value=50))
def test_short_text_is_short(text, width):
    assert len(shorten(text, width)) <= max(width, 0) or len(text) <= width


@hypothesis.given(st.integers(min_value=-(1 << 62), max_value=1 << 62))
def test_any_time_has_a_text(unix_s):
    assert time_text(unix_s)


@pytest.mark.parametrize(
    ("names", "common"),
    [
        (["w"], "w"),
        (["0"], "0"),
        (["lw/0", "lw/1"], "lw/{0..1}"),
        (["a.1.b.0", "a.1.b.1"], "a.1.b.{0..1}"),
        (["a.1", "a.3"], "a.*"),
        (["a.1", "a.01"], "a.*"),
        (["a.1/exp_avg", "a.2/exp_avg"], "a.{1..2}/exp_avg"),
        (["9" * 4999, "9" * 5000], "*"),
    ],
)
def test_names_in_common(names, common):
    assert common_name(names) == common


@pytest.mark.parametrize(
    ("nodes", "lines"),
    [
        ([], []),
        ([("a", None, "*")], [["*"]]),
        ([("a", "gone", "*")], [["*"]]),
        ([("b", None, "*"), ("a", None, "o")], [["*"], ["o"]]),
        (
            [("d", "a", "*"), ("c", "a", "o"), ("b", "a", "o"), ("a", None, "*")],
            [["*"], ["| o"], ["| | o"], ["| |/", "|/", "*"]],
        ),
        (
            [("e", "a", "*"), ("d", "b", "o"), ("c", "a", "o"), ("b", "a", "o"), ("a", None, "*")],
            [["*"], ["| o"], ["| | o"], ["| o |"], ["| |/", "|/", "*"]],
        ),
        (
            [("e", "b", "*"), ("d", "a", "o"), ("c", "b", "o"), ("b", "a", "*"), ("a", None, "*")],
            [["*"], ["| o"], ["| | o"], ["|_|/", "* |"], ["|/", "*"]],
        ),
        ([("a", "b", "*"), ("b", "a", "o")], [["*"], ["o"]]),
        ([("a", "a", "*")], [["*"]]),
    ],
)
def test_graphs(nodes, lines):
    assert draw_graph(nodes) == lines


@hypothesis.given(st.data())
def test_any_graph_is_drawn_with_one_mark_on_each_node(data):
    count = data.draw(st.integers(0, 12))
    nodes = [
        (str(n), data.draw(st.none() | st.integers(0, count).map(str)), "*") for n in range(count)
    ]

    for lines in draw_graph(nodes):
        assert lines[-1].count("*") == 1
        assert all(set(line) <= set("|/_ ") for line in lines[:-1])
