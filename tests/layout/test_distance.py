"""How far two blocks are from each other: against exact arithmetic, for every dtype."""

import dataclasses
import math
import struct
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfmt.dtypes import DTYPES
from ckptfmt_tools.comparison import Change, Distance, measure

FLOATS = [
    name for name in DTYPES if name.startswith(("float", "bfloat")) and name != "float4_e2m1fn_x2"
]
INTEGERS = [name for name in DTYPES if name.startswith(("int", "uint"))]


def numpy_of(name):
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def values_of(name, content):
    """Exact values of elements: fractions, signed infinities, or NaN."""
    with np.errstate(invalid="ignore"):  # a signalling NaN
        values = np.frombuffer(content, numpy_of(name)).astype(np.float64).tolist()
    return [Fraction(value) if math.isfinite(value) else value for value in values]


def ladder(name):
    """All numbers of a narrow float dtype in order, by their bits; both zeros are one."""
    width = 8 * DTYPES[name].nbytes
    words = np.arange(1 << width, dtype=f"<u{width // 8}")
    values = words.view(numpy_of(name)).astype(np.float64)
    order = [
        word for word in np.argsort(values, kind="stable").tolist() if not math.isnan(values[word])
    ]
    steps, step = {}, 0
    for before, word in zip([None, *order], order, strict=False):
        step += before is not None and values[before] != values[word]
        steps[word] = step
    return steps


@pytest.mark.parametrize("name", [name for name in FLOATS if DTYPES[name].nbytes == 1])
def test_steps_are_those_on_the_ladder_of_all_floats(name):
    steps = ladder(name)
    words = np.array(sorted(steps), np.uint8)
    rng = np.random.default_rng(0)
    for one, other in zip(
        rng.choice(words, 300).tolist(), rng.choice(words, 300).tolist(), strict=True
    ):
        found = measure(memoryview(bytes([one])), memoryview(bytes([other])), name)
        expected = abs(steps[one] - steps[other]) if one != other else None
        assert found.max_ulps == expected, (one, other)


@given(st.sampled_from(FLOATS + INTEGERS), st.data())
def test_every_number_against_exact_arithmetic(name, data):
    nbytes = DTYPES[name].nbytes
    count = data.draw(st.integers(0, 5))
    one = data.draw(st.binary(min_size=count * nbytes, max_size=count * nbytes))
    other = data.draw(
        st.one_of(st.just(one), st.binary(min_size=count * nbytes, max_size=count * nbytes))
    )
    found = measure(memoryview(one), memoryview(other), name)

    rows = [
        [content[at : at + nbytes] for at in range(0, len(content), nbytes)]
        for content in (one, other)
    ]
    changed = [at for at in range(count) if rows[0][at] != rows[1][at]]
    assert (found.element_count, found.changed_count) == (count, len(changed))
    assert len(found.largest) == min(3, len(changed))
    assert {one.index[0] for one in found.largest} <= set(changed)
    assert [one.gap for one in found.largest] == sorted(
        (one.gap for one in found.largest), reverse=True
    )
    if name in INTEGERS:
        pairs = [
            tuple(int.from_bytes(row[at], "little", signed=name[0] == "i") for row in rows)
            for at in changed
        ]
        assert (found.max_abs, found.max_ulps) == (
            max((abs(a - b) for a, b in pairs), default=None),
            None,
        )
        return
    pairs = [
        tuple(values[at] for values in (values_of(name, one), values_of(name, other)))
        for at in changed
    ]
    numbers = [(a, b) for a, b in pairs if not (math.isnan(a) or math.isnan(b))]
    assert found.nan_count == len(pairs) - len(numbers)
    gaps = [math.inf if math.isinf(a) or math.isinf(b) else abs(a - b) for a, b in numbers]
    expected = max(gaps, default=None)
    assert found.max_abs == (None if expected is None else float(expected))
    farthest = max((*gaps, *[math.inf] * found.nan_count), default=None)
    assert [one.gap for one in found.largest[:1]] == ([] if farthest is None else [float(farthest)])
    for one_change in found.largest:
        at = one_change.index[0]
        assert [struct.pack("<d", value) for value in one_change.values] == [
            struct.pack("<d", float(values_of(name, row[at])[0])) for row in rows
        ] or any(value != value for value in one_change.values)  # noqa: PLR0124


def test_the_widest_numbers_do_not_overflow():
    low, high = struct.pack("<q", -(1 << 63)), struct.pack("<q", (1 << 63) - 1)
    assert measure(memoryview(low), memoryview(high), "int64").max_abs == (1 << 64) - 1
    one, other = struct.pack("<d", -math.inf), struct.pack("<d", math.inf)
    found = measure(memoryview(one), memoryview(other), "float64")
    assert (found.max_abs, found.max_ulps) == (math.inf, 2 * 0x7FF0000000000000)


@pytest.mark.parametrize("name", [name for name in FLOATS if DTYPES[name].nbytes > 1])
def test_signalling_nans_are_counted_without_a_warning(name):
    # The lowest bit alone in the fraction: quiet NaNs have the highest one.
    info = ml_dtypes.finfo(numpy_of(name))
    word = ((1 << info.nexp) - 1 << info.nmant) + 1
    content = word.to_bytes(info.bits // 8, "little")
    found = measure(memoryview(bytes(len(content))), memoryview(content), name)
    assert (found.changed_count, found.nan_count, found.max_abs) == (1, 1, None)


def test_both_zeros_are_one_number():
    one, other = (np.array([value], "<f4").data.cast("B") for value in (0.0, -0.0))
    found = measure(one, other, "float32")
    largest = (Change(index=(0,), values=(0.0, -0.0), gap=0.0),)
    assert found == Distance(
        element_count=1,
        changed_count=1,
        max_abs=0.0,
        max_ulps=0,
        ulp_counts=(1,),
        max_rel=0.0,
        largest=largest,
    )
    assert found.median_ulps == 0


def test_steps_are_counted_by_their_digits():
    one = np.ones(9, np.float32)
    other = (one.view(np.uint32) + np.array([0, 1, 1, 1, 2, 3, 4, 7, 1 << 20], np.uint32)).view(
        np.float32
    )
    found = measure(one.data.cast("B"), other.data.cast("B"), "float32")
    assert found.ulp_counts == (0, 3, 2, 2, *([0] * 17), 1)
    assert (found.median_ulps, found.max_ulps) == (3, 1 << 20)
    assert found.add(found).median_ulps == 3
    assert Distance().median_ulps is None


@pytest.mark.parametrize("name", ["complex64", "complex128"])
def test_a_complex_element_counts_once(name):
    one, other = (
        np.array([1 + 1j, 2 + 2j, 3], name),
        np.array([2 + 4j, 2 + 2j, complex(3, np.nan)], name),
    )
    found = measure(one.data.cast("B"), other.data.cast("B"), name)
    assert (found.element_count, found.changed_count, found.nan_count, found.max_abs) == (
        3,
        2,
        1,
        3.0,
    )
    found = measure(one[2:].data.cast("B"), other[2:].data.cast("B"), name)
    assert dataclasses.replace(found, largest=()) == Distance(
        element_count=1, changed_count=1, nan_count=1
    )
    assert [change.gap for change in found.largest] == [math.inf]


@pytest.mark.parametrize("name", ["bool", "float4_e2m1fn_x2", "complex32"])
def test_what_numpy_has_no_dtype_for(name):
    nbytes = DTYPES[name].nbytes
    one, other = bytes(3 * nbytes), bytes(2 * nbytes) + b"\1" + bytes(nbytes - 1)
    found = measure(memoryview(one), memoryview(other), name)
    assert (found.element_count, found.changed_count) == (3, 1)
    assert (found.max_abs is None) == (name != "complex32")


def test_distances_add_up():
    one = Distance(element_count=2, changed_count=1, max_abs=3)
    other = Distance(element_count=5, changed_count=2, nan_count=1)
    assert one.add(other) == Distance(element_count=7, changed_count=3, nan_count=1, max_abs=3)
    assert other.add(one) == one.add(other)
