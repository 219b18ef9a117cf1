"""Who writes what."""

import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfmt.errors import CkptError, Code
from ckptfmt.write.image import assign_writers


@st.composite
def holdings(draw):
    """What up to five writers hold of up to twenty keys; each key has at least one holder."""
    held: list[list[tuple[tuple[str, str], int]]] = [[] for _ in range(draw(st.integers(1, 5)))]
    for key in range(draw(st.integers(0, 20))):
        nbytes = draw(st.integers(0, 100))
        for writer in draw(st.sets(st.integers(0, len(held) - 1), min_size=1)):
            held[writer].append((("weights", f"w{key}"), nbytes))
    return held


@given(holdings(), st.randoms())
def test_each_key_is_written_once_by_a_holder_whatever_the_order(held, shuffler):
    written = assign_writers(held)
    keys = [key for of_writer in written for key in of_writer]
    assert sorted(keys) == sorted({key for of_writer in held for key, _ in of_writer})
    assert all(
        keys <= {key for key, _ in of_writer} for keys, of_writer in zip(written, held, strict=True)
    )
    shuffled = [shuffler.sample(of_writer, len(of_writer)) for of_writer in held]
    assert assign_writers(shuffled) == written


@given(st.lists(st.integers(1, 1000), max_size=40), st.integers(1, 6))
def test_full_replicas_are_spread_within_the_bound_of_largest_first(sizes, writer_count):
    held = [[(key, nbytes) for key, nbytes in enumerate(sizes)]] * writer_count
    load = [sum(sizes[key] for key in keys) for keys in assign_writers(held)]
    # Largest first leaves the fullest at most one item above the emptiest.
    assert max(load) - min(load) <= max(sizes, default=0)


def test_a_sole_holder_is_counted_before_the_others_are_balanced():
    held = [[("only", 10), ("a", 12)], [("a", 12), ("b", 1)]]
    assert [sorted(keys) for keys in assign_writers(held)] == [["only"], ["a", "b"]]


def test_the_largest_goes_first():
    held = [[("a", 1), ("b", 1), ("c", 2)]] * 2
    assert [sorted(keys) for keys in assign_writers(held)] == [["c"], ["a", "b"]]


def test_ties_go_to_the_lower_key_and_writer():
    held = [[(key, 1) for key in "dcba"]] * 3
    assert [sorted(keys) for keys in assign_writers(held)] == [["a", "d"], ["b"], ["c"]]


def test_nobody_holds_nothing():
    assert assign_writers([]) == ()
    assert assign_writers([[], []]) == (frozenset(), frozenset())


def test_sizes_that_differ_are_refused():
    with pytest.raises(CkptError) as raised:
        assign_writers([[("a", 1)], [("a", 2)]])
    assert raised.value.code is Code.TENSOR_DIVERGED


def test_a_key_listed_twice_is_refused():
    with pytest.raises(CkptError) as raised:
        assign_writers([[("a", 1), ("a", 1)]])
    assert raised.value.code is Code.ARGUMENT


@pytest.mark.slow
def test_many_keys_on_many_writers_take_seconds():
    draw = random.Random(0)
    sizes = [draw.randrange(1 << 20) for _ in range(2000)]
    start = time.process_time()
    assign_writers([list(enumerate(sizes))] * 256)
    assert time.process_time() - start < 40
