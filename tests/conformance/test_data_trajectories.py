"""Cells that read by a loader: the library passes, two oracles agree, and what loses its place in the data is seen."""

import dataclasses
import doctest
import importlib
import itertools
from typing import NamedTuple

import pytest

torch = pytest.importorskip("torch")

from ckptfmt.data.sampler import Sampler  # noqa: E402
from ckptfmt_conformance.trajectories import close_gang, data_cells, list_cells, run_cell  # noqa: E402
from ckptfmt_conformance.trajectories.feed import PREFETCH, READ_AHEAD, Feed  # noqa: E402
from ckptfmt_conformance.trajectories.foreign import StatefulLoader  # noqa: E402
from ckptfmt_conformance.trajectories.loaded import find_data_vacuity, find_idle_loader  # noqa: E402
from ckptfmt_conformance.trajectories.oracle import ledger_of, steps_of  # noqa: E402
from ckptfmt_conformance.trajectories.plans import PLANS, DataPlan, Skip, plan_of  # noqa: E402
from ckptfmt_conformance.trajectories.recipes import STEPS, Recipe  # noqa: E402
from conformance.generate import course  # noqa: E402
from tests.conformance.checkpointing import Forgetful, Library, Pickled, Swallowing  # noqa: E402

CELLS = {cell.id: cell for cell in list_cells() if cell.recipe.data}
KEPT = {name: cell for name, cell in CELLS.items() if not cell.control}
SAMPLE = [
    "t1/data/shuffled/epoch/0-to-2", "t1/data/carry/middle/5-to-0", "t1/data/drop/epoch/2-to-5",
    "t1/data/pad/before/0-to-2", "t1/data/mixed/switch/0-to-2", "t1/data/mixed-within/twice/2-to-5",
    "t1/data/quarantine-late/between/5-to-0", "t1/data/quarantine-mixed/often/2-to-5-to-0-to-2",
    "t1/foreign/loader/5/2-to-2", "t1/foreign/loader/3/0-to-0", "t1/foreign/count/6/0-to-0",
]  # fmt: skip
TOGETHER = [
    pytest.param("t2/data/quarantine-mixed/8-to-3-to-1-to-4", marks=pytest.mark.exhaustive), "t2/data/pad/1-to-3",
    "t1/foreign/loader/two", "t1/foreign/refused/loader-2-to-3",
    pytest.param("t1/foreign/refused/count-2-to-3", marks=pytest.mark.exhaustive),
]  # fmt: skip
MIXED = "t1/data/mixed/switch/0-to-2"
LATE = "t1/data/quarantine-late/after/2-to-5"


class Judged(NamedTuple):
    status: str
    said: str


def judge(name, checkpointing, directory, **changes):
    result = run_cell(dataclasses.replace(CELLS[name], **changes), checkpointing, directory)
    return Judged(result.status, result.divergence or "")


@pytest.fixture(scope="module", autouse=True)
def gang_ended():
    yield
    close_gang()


@pytest.mark.parametrize("name", ["plans", "oracle"])
def test_the_examples_are_true(name):
    result = doctest.testmod(importlib.import_module(f"ckptfmt_conformance.trajectories.{name}"))

    assert result.attempted
    assert result.failed == 0


def test_each_plan_meets_each_number_of_worker_processes():
    legs = {
        (cell.recipe.data, leg)
        for cell in KEPT.values()
        for leg in itertools.pairwise(cell.loaders)
    }

    assert data_cells.PLANS.keys() == PLANS.keys()
    assert legs >= set(itertools.product(PLANS, [(5, 0), (0, 2), (2, 5)]))
    assert {cell.recipe.data for cell in KEPT.values() if cell.claim == "T2"} >= {
        "carry",
        "drop",
        "pad",
        "mixed",
    }


# Two oracles


def entry_of(skip, plan):
    """What a cursor says of a skip."""
    scope = "pos" if skip.positions else "shard" if skip.shard else "sample"
    entry = {"scope": scope, "policy": skip.policy}
    if skip.positions:
        return entry | {"range": skip.positions}
    entry |= {"source": skip.source, "from_pos": skip.said * plan.batch}
    return entry | ({"range": skip.shard[1:]} if skip.shard else {"ids": skip.samples})


def cursor_of(plan):
    """What the generator of the vectors needs to know of a plan."""
    cursor = {
        "plan": {"global_batch": plan.batch, "tail": plan.tail},
        "order": {"seed": plan.seed},
        "sources": [{"id": name, "n": n} for name, n in plan.sources],
        "skips": [entry_of(skip, plan) for skip in plan.skips],
    }
    stages = [
        {"from_pos": begin, "counts": counts} for begin, counts in (plan.mixture or {}).items()
    ]
    mixture = (
        {"block": sum(plan.stages[0][1]), "seed": plan.seed, "stages": stages} if stages else None
    )
    return cursor | ({"mixture": mixture} if mixture else {})


@pytest.mark.parametrize("batch", [6, 16])
@pytest.mark.parametrize("name", PLANS)
def test_the_oracle_of_the_cells_is_that_of_the_vectors(name, batch):
    plan = plan_of(name, batch)
    uses = {None: "hole", 0: "masked", 1: "counts"}
    steps = steps_of(plan, STEPS)
    places = list(course.course(cursor_of(plan), STEPS * plan.batch))

    found = [
        (one.source, one.epoch, one.sample, uses[one.weight]) for step in steps for one in step
    ]
    assert found == [(one.source, one.epoch, one.sample, one.use) for one in places]
    ledger = course.ledger_of(places)
    assert ledger_of(steps) == (ledger["count"], ledger["set_digest"])


# The library


@pytest.mark.parametrize("name", SAMPLE)
def test_the_library_passes(name, tmp_path):
    assert judge(name, Library(), tmp_path) == ("PASS", "")


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("name", TOGETHER)
def test_of_several_processes_too(name, tmp_path):
    assert judge(name, Library(), tmp_path) == ("PASS", "")


class NothingLoaded(Library):
    def load(self, path, state):
        del path, state


@pytest.mark.parametrize("name", [MIXED, "t1/foreign/loader/3/0-to-0"])
def test_nothing_restored_is_seen(name, tmp_path):
    result = judge(name, NothingLoaded(), tmp_path)

    assert result.status == "FAIL"
    assert "right after load 1): parameter/" in result.said


@pytest.mark.parametrize(
    ("name", "said"), [(MIXED, "sampler"), ("t1/foreign/count/3/0-to-0", "foreign-loaders")]
)
def test_what_has_no_sampler_is_unsupported(name, said, tmp_path):
    assert judge(name, Forgetful(), tmp_path) == ("UNSUPPORTED", said)


# What loses its place


class Other(Pickled):
    """The library's sampler, changed, and saved by what doesn't look at what comes back, as the library does."""

    def __init__(self, kind):
        self.kind = kind

    def sampler(self, plan, worker):
        made = super().sampler(plan, worker)
        made.__class__ = self.kind
        return made


class OtherOrder(Sampler):
    """Each step's samples come the other way round."""

    def __iter__(self):
        for batch in super().__iter__():
            yield batch[::-1]


class Unmasked(Sampler):
    """Every sample counts."""

    def weights(self, step):
        return [1] * len(super().weights(step))


class NoLedger(Sampler):
    """The ledger counts nothing."""

    def state_dict(self):
        cursor = super().state_dict()
        return cursor | {"ledger": cursor["ledger"] | {"count": 0, "set_digest": "0" * 64}}


class Slow(Sampler):
    """The cursor is a step behind."""

    def state_dict(self):
        cursor = super().state_dict()
        return cursor | {"commit": cursor["commit"] | {"step": max(0, self.steps_done - 1)}}


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        (MIXED, OtherOrder, "step 1 of the uninterrupted run has [('"),
        ("t1/data/pad/before/0-to-2", Unmasked, "step 5 of the uninterrupted run has [('data', "),
        (
            MIXED,
            NoLedger,
            "after 1 steps the ledger of the uninterrupted run isn't that of what it consumed",
        ),
        (MIXED, Slow, "after 1 steps of 6 the cursor of the uninterrupted run says "),
    ],
)
def test_another_order_than_the_oracles_is_seen(name, kind, said, tmp_path):
    result = judge(name, Other(kind), tmp_path)

    assert result.status == "FAIL"
    assert result.said.startswith(said)


class Fetched(Sampler):
    """What is loaded stands where the loader had fetched to."""

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.advance(READ_AHEAD)


class OldSkips(Sampler):
    """What is loaded has those skips only that were said at the beginning."""

    def load_state_dict(self, state_dict):
        skips = [skip for skip in state_dict["skips"] if skip.get("from_pos") == 0]
        lengths = {source["id"]: source["n"] for source in state_dict["sources"]}
        fresh = Sampler(lengths["data"], source="data", global_batch=6, seed=5, worker=(0, 1))
        for skip in skips:
            fresh.skip(samples=skip["ids"], policy=skip["policy"], from_pos=0)
        fresh.advance(state_dict["commit"]["step"])
        super().load_state_dict(fresh.state_dict())


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        (MIXED, Fetched, "(right after load 1): cursor/commit/global_pos is 48, should be 36"),
        (LATE, OldSkips, "most likely not restored: the data cursor, the data cursor's skips"),
    ],
)
def test_a_cursor_that_comes_back_elsewhere_is_seen(name, kind, said, tmp_path):
    result = judge(name, Other(kind), tmp_path)

    assert result.status == "FAIL"
    assert said in result.said


class Quiet(Fetched):
    """Says that it stands where it was loaded, and stands elsewhere."""

    loaded = None

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.loaded = dict(state_dict)

    def advance(self, steps=1):
        self.loaded = None
        super().advance(steps)

    def state_dict(self):
        return self.loaded or super().state_dict()


def test_a_cursor_that_says_one_thing_and_does_another_is_seen(tmp_path):
    result = judge(MIXED, Other(Quiet), tmp_path)

    assert result.status == "FAIL"
    assert "at step 7 (after load 1)" in result.said


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["loader", "count"])
def test_a_position_that_another_number_of_workers_takes_is_seen(kind, tmp_path):
    result = judge(f"t1/foreign/refused/{kind}-2-to-3", Swallowing(), tmp_path)

    assert result == (
        "FAIL",
        "rank 0: the loader's position was loaded by 3 workers, which didn't save it",
    )


def test_a_position_of_other_worker_processes_is_refused_by_the_stand_in():
    state = StatefulLoader(1, 0).state_dict()

    with pytest.raises(ValueError, match="a position of 0 worker processes, and there are 2"):
        StatefulLoader(1, 2).load_state_dict(state)


# A cell that proves nothing


def plan_cell(plan, monkeypatch, step):
    monkeypatch.setitem(PLANS, "shuffled", lambda batch: dataclasses.replace(plan, batch=batch))
    return dataclasses.replace(CELLS[MIXED], recipe=Recipe(data="shuffled"), cuts=((step, 0),))


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (
            DataPlan(sources=(("data", 500),), batch=6),
            "no source begins anew at the interruption or after it",
        ),
        (
            DataPlan(
                sources=(("data", 30),),
                batch=6,
                skips=(Skip(said=0, policy="hole", positions=(3, 4)),),
            ),
            "the skips change nothing after the interruption",
        ),
        (
            DataPlan(sources=(("data", 30),), batch=6, tail="drop"),
            "the tail changes nothing after the interruption",
        ),
        (
            DataPlan(sources=(("a", 30), ("b", 30)), batch=6, stages=((0, (3, 3)), (36, (3, 3)))),
            "the later stages change nothing after the interruption",
        ),
    ],
)
def test_a_plan_that_does_not_exercise_what_it_has_is_found(plan, said, monkeypatch):
    assert find_data_vacuity(CELLS[MIXED]) is None
    assert find_data_vacuity(plan_cell(plan, monkeypatch, 7)) == said


@pytest.mark.parametrize("processes", [0, 2])
def test_a_feed_is_full_when_it_has_been_taken_from(processes):
    plan = plan_of("shuffled", 6)
    feed = Feed(Library().sampler(plan, (0, 1)), plan, "mlp", processes)

    assert find_idle_loader(feed.ahead, processes)
    feed.take()
    assert feed.ahead == processes * PREFETCH + READ_AHEAD
    assert find_idle_loader(feed.ahead, processes) is None
    feed.restart()
    assert feed.ahead == 0
