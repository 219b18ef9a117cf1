"""The course of positions against one that plays them through, one after another, in plain Python.

REQ-CUR-012, REQ-CUR-013, REQ-CUR-016, REQ-CUR-018.
"""

import ast
import dataclasses
import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfmt.data.course import COUNTS, HOLE, Course, add_ledgers
from ckptfmt.data.cursor import BatchPlan, Mixture, Source, Stage
from ckptfmt.data.cursor_map import PosSkip, SampleSkip, ShardSkip, Skip
from ckptfmt.data.shuffle import sample_indices
from ckptfmt.errors import CkptError, Code
from conformance.generate import course as oracle
from tests.data.cursors import USES, course_of, orders

POSITIONS = 60


def places(course, names, begin, end):
    stretch = course.stretch(begin, end)
    rows = zip(
        *(getattr(stretch, one.name).tolist() for one in dataclasses.fields(stretch)), strict=True
    )
    return [
        oracle.Place(names[source], epoch, sample, USES[use]) for source, epoch, sample, use in rows
    ]


def test_the_oracle_shares_nothing_with_the_library():
    for name in ("course", "order"):
        tree = ast.parse(Path(oracle.__file__).with_name(f"{name}.py").read_text("utf-8"))
        imported = {
            node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
        }
        imported |= {
            one.name
            for node in ast.walk(tree)
            if isinstance(node, ast.Import)
            for one in node.names
        }
        assert not [
            module for module in imported if module.split(".")[0] in ("ckptfmt", "numpy", "torch")
        ]


@given(orders(), st.integers(0, POSITIONS), st.integers(0, POSITIONS))
def test_any_range_of_positions_has_what_the_oracle_says(tree, begin, count):
    course, names = course_of(tree), [source["id"] for source in tree["sources"]]
    expected = list(oracle.course(tree, POSITIONS))
    end = min(POSITIONS, begin + count)
    assert places(course, names, begin, end) == expected[begin:end]
    assert places(course, names, 0, POSITIONS) == expected
    assert dict(zip(names, course.draws_before(begin), strict=True)) == oracle.positions(
        tree, begin
    )
    vector = course.sample_at(POSITIONS - 1)
    assert vector == (expected[-1].source, expected[-1].sample)
    if "mixture" not in tree:
        assert [course.epoch_at(at) for at in range(POSITIONS)] == [
            (one.epoch, one.drawn) for one in expected
        ]


@given(orders(), st.lists(st.integers(0, POSITIONS), max_size=3))
def test_the_ledger_of_what_counts_is_the_oracles_however_it_is_cut(tree, cuts):
    """REQ-CUR-021."""
    course, expected = course_of(tree), oracle.ledger_of(list(oracle.course(tree, POSITIONS)))
    edges = [0, *sorted(cuts), POSITIONS]
    pieces = [course.ledger(begin, end) for begin, end in itertools.pairwise(edges)]
    total = pieces[0]
    for piece in pieces[1:]:
        total = add_ledgers(total, piece)
    assert dataclasses.asdict(total) == expected


@given(orders(), st.integers(0, 40), st.data())
def test_a_skip_changes_nothing_before_it(tree, begin, data):
    """REQ-CUR-020: what was consumed can be computed from any later cursor."""
    names = [source["id"] for source in tree["sources"]]
    batch = 1 if tree["plan"]["tail"] == "carry" else tree["plan"]["global_batch"]
    begin = begin // batch * batch
    skip = {
        "scope": "sample", "policy": data.draw(st.sampled_from(["hole", "mask", "shift"])), "from_pos": begin,
        "reason": "", "source": names[-1], "ids": [data.draw(st.integers(0, 6))],
    }  # fmt: skip
    longer = {**tree, "skips": [*tree["skips"], skip]}
    assert places(course_of(longer), names, 0, begin) == places(course_of(tree), names, 0, begin)


@given(st.integers(1, 40), st.integers(0, 9), st.integers(0, 200), st.integers(0, 50))
def test_one_source_without_skips_has_the_plain_order(n, seed, begin, count):
    course = Course(
        [Source(id="a", fingerprint=None, n=n)], seed=seed, plan=BatchPlan(global_batch=4)
    )
    stretch = course.stretch(begin, begin + count)
    assert (
        stretch.samples.tolist()
        == sample_indices(n, seed=seed, begin=begin, end=begin + count).tolist()
    )
    assert stretch.epochs.tolist() == [position // n for position in range(begin, begin + count)]
    assert course.epoch_at(begin) == divmod(begin, n)


def test_what_is_shifted_out_comes_in_no_epoch_and_the_rest_once_in_each():
    skip = SampleSkip(policy="shift", from_pos=0, reason="", source="a", ids=(2, 5, 11))
    course = Course(
        [Source(id="a", fingerprint=None, n=12)],
        seed=3,
        plan=BatchPlan(global_batch=4),
        skips=[skip],
    )
    for epoch in range(4):
        samples = course.stretch(9 * epoch, 9 * epoch + 9).samples
        assert sorted(samples.tolist()) == [0, 1, 3, 4, 6, 7, 8, 9, 10]


@pytest.mark.parametrize("far", [10**6, 10**15, 2**62 - 2**62 % 10])
def test_far_positions_cost_no_more_than_near_ones(far):
    skips: list[Skip] = [
        ShardSkip(
            policy="shift", from_pos=100, reason="", source="a", shard="s", range=(1000, 60_000)
        ),
        SampleSkip(policy="hole", from_pos=100, reason="", source="b", ids=(1,)),
        PosSkip(policy="shift", reason="", range=(500, 1000)),
    ]
    mixture = Mixture(block=10, seed=1, stages=(Stage(from_pos=0, counts={"a": 7, "b": 3}),))
    sources = [Source(id=name, fingerprint=None, n=100_000) for name in ("a", "b")]
    course = Course(sources, seed=3, plan=BatchPlan(global_batch=4), mixture=mixture, skips=skips)
    stretch = course.stretch(far, far + 1000)
    a = stretch.sources == 0
    assert a.sum() == 700
    assert not ((stretch.samples[a] >= 1000) & (stretch.samples[a] < 60_000)).any()
    assert (
        len(set(zip(stretch.epochs[a].tolist(), stretch.samples[a].tolist(), strict=True))) == 700
    )
    assert (stretch.uses[stretch.samples != 1] == COUNTS).all()
    assert sum(course.draws_before(far)) == far


def test_holes_go_before_masks():
    skips: list[Skip] = [
        SampleSkip(policy="mask", from_pos=0, reason="", source="a", ids=(3,)),
        PosSkip(policy="hole", reason="", range=(0, 1)),
        SampleSkip(policy="mask", from_pos=0, reason="", source="a", ids=(3,)),
    ]
    course = Course(
        [Source(id="a", fingerprint=None, n=10)],
        seed=0,
        plan=BatchPlan(global_batch=4),
        skips=skips,
    )
    assert course.sample_at(0) == ("a", 3)
    assert course.stretch(0, 2).uses.tolist() == [HOLE, COUNTS]


def test_a_course_without_anything_left_is_refused():
    """REQ-CUR-019."""
    skip = ShardSkip(policy="shift", from_pos=0, reason="", source="a", shard="s", range=(0, 10))
    with pytest.raises(CkptError) as raised:
        Course(
            [Source(id="a", fingerprint=None, n=10)],
            seed=0,
            plan=BatchPlan(global_batch=4),
            skips=[skip],
        )
    assert (raised.value.code, raised.value.requirement) == (Code.CURSOR_FORM, "REQ-CUR-019")
