"""The sampler with mixtures, skips and tails: the oracle's samples, on any number of workers, resumed at any step."""

import copy
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfmt.data.sampler import Sampler
from ckptfmt.errors import CkptError, Code
from conformance.generate import course as oracle
from conformance.generate.pages.context import went_on
from tests.data.cursors import orders, skip_trees

BOOKS_AND_CODE = {"books": 20, "code": 7}
MIXTURE = {0: {"books": 5, "code": 3}, 40: {"books": 8, "code": 0}}


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def sampler_of(tree, *, worker=(0, 1)):
    """The sampler that a program would make for what `orders` draws; its skips are those that begin at 0."""
    options = {
        "global_batch": tree["plan"]["global_batch"],
        "seed": tree["order"]["seed"],
        "worker": worker,
    }
    if "mixture" not in tree:
        source = tree["sources"][0]
        return Sampler(source["n"], source=source["id"], tail=tree["plan"]["tail"], **options)
    stages = {stage["from_pos"]: stage["counts"] for stage in tree["mixture"]["stages"]}
    return Sampler(
        {source["id"]: source["n"] for source in tree["sources"]}, mixture=stages, **options
    )


def say_skip(sampler, skip):
    """Call `skip` as a program would for an entry of a cursor."""
    what = {"policy": skip["policy"], "reason": skip["reason"]}
    match skip["scope"]:
        case "pos":
            sampler.skip(positions=tuple(skip["range"]), **what)
        case "shard":
            shard = (skip["shard"], *skip["range"])
            sampler.skip(shard=shard, source=skip["source"], from_pos=skip["from_pos"], **what)
        case _:
            sampler.skip(
                samples=skip["ids"], source=skip["source"], from_pos=skip["from_pos"], **what
            )


def expected_step(tree, places, step, worker, workers):
    """The samples and weights that the oracle says for a worker's part of a step."""
    batch = tree["plan"]["global_batch"]
    part = oracle.worker_part(places[step * batch : (step + 1) * batch], worker, workers)
    samples = [(one.source, one.sample) if "mixture" in tree else one.sample for one in part]
    return samples, [int(one.use == "counts") for one in part]


def with_own_seed(tree):
    """A sampler orders the blocks of its mixture by its own seed."""
    if "mixture" not in tree:
        return tree
    return {**tree, "mixture": {**tree["mixture"], "seed": tree["order"]["seed"]}}


STEPS = 12


@given(orders().map(with_own_seed), st.integers(1, 8), st.integers(1, 8), st.integers(0, STEPS - 1))
def test_a_run_and_its_resumption_elsewhere_see_what_the_oracle_says(tree, workers, others, done):
    batch = tree["plan"]["global_batch"]
    workers, others = min(workers, batch), min(others, batch)
    places = list(oracle.course(tree, STEPS * batch))
    cursors = []
    for worker in range(workers):
        sampler = sampler_of(tree, worker=(worker, workers))
        for skip in tree["skips"]:
            say_skip(sampler, skip)
        batches = iter(sampler)
        for step in range(done):
            samples, weights = expected_step(tree, places, step, worker, workers)
            assert (next(batches), sampler.weights(step)) == (samples, weights)
            sampler.advance()
        cursors.append(sampler.state_dict())
    assert all(cursor == cursors[0] for cursor in cursors)
    assert cursors[0]["ledger"] == oracle.ledger_of(places[: done * batch])
    for worker in range(others):
        resumed = sampler_of(tree, worker=(worker, others))
        resumed.load_state_dict(cursors[0])
        assert resumed.state_dict() == cursors[0]
        for step, samples in zip(range(done, STEPS), resumed, strict=False):
            assert (samples, resumed.weights(step)) == expected_step(
                tree, places, step, worker, others
            )
        counts = [place.use for place in places[done * batch : (done + 1) * batch]].count("counts")
        assert resumed.weight_sum(done) == counts


@given(orders(), st.integers(1, 5), st.integers(0, 5))
def test_a_sampler_of_a_cursor_alone_goes_on_as_the_oracle_says(tree, workers, done):
    """Of a cursor by whatever writer: the blocks of its mixture may have another seed than its order."""
    batch = tree["plan"]["global_batch"]
    workers = min(workers, batch)
    order = {"alg": "feistel-v1", **tree["order"]}
    cursor = went_on(
        {"kind": "ckptfmt.data_cursor", "v": 1, **copy.deepcopy(tree), "order": order}, done
    )
    places = list(oracle.course(tree, (done + 3) * batch))
    for worker in range(workers):
        sampler = Sampler.from_state_dict(cursor, worker=(worker, workers))
        assert sampler.state_dict() == cursor
        for step in range(done, done + 3):
            samples, weights = expected_step(tree, places, step, worker, workers)
            assert (sampler.indices(step), sampler.weights(step)) == (samples, weights)
            part = oracle.worker_part(places[step * batch : (step + 1) * batch], worker, workers)
            assert sampler.epochs(step) == [place.epoch for place in part]
        sampler.advance()
        assert sampler.state_dict()["ledger"] == oracle.ledger_of(places[: (done + 1) * batch])


def test_a_sampler_of_a_cursor_alone_refuses_what_is_no_cursor_of_the_order():
    """REQ-CUR-006, REQ-CUR-014."""
    cursor = Sampler(BOOKS_AND_CODE, mixture=MIXTURE, global_batch=4, worker=(0, 1)).state_dict()
    vector = cursor["order"]["vector_check"]
    for wrong in (
        {
            **cursor,
            "order": {
                **cursor["order"],
                "vector_check": {**vector, "id": 6 if vector["id"] != 6 else 5},
            },
        },
        {**cursor, "plan": {**cursor["plan"], "tail": "drop"}},
    ):
        with pytest.raises(CkptError) as raised:
            Sampler.from_state_dict(wrong, worker=(0, 1))
        assert raised.value.code is Code.CURSOR_FORM
    with pytest.raises(CkptError) as raised:
        Sampler.from_state_dict(cursor, worker=(0, 5))
    assert raised.value.code is Code.ARGUMENT


@given(orders().map(with_own_seed), st.integers(0, 8), st.data())
def test_a_skip_that_is_said_in_the_middle_is_that_of_the_cursor(tree, done, data):
    """REQ-CUR-020: the samples before it stay what they were, and those after it are the oracle's."""
    batch, lengths = (
        tree["plan"]["global_batch"],
        {source["id"]: source["n"] for source in tree["sources"]},
    )
    tree = {**tree, "skips": []}
    begin = done * batch
    skip = data.draw(skip_trees(lengths, unit=1 if tree["plan"]["tail"] == "carry" else batch))
    if skip["scope"] == "pos":
        skip["range"] = [begin, begin + skip["range"][1] - skip["range"][0]]
    else:
        skip["from_pos"] = begin
    sampler = sampler_of(tree)
    for _ in range(done):
        sampler.advance()
    say_skip(sampler, skip)
    before, after = (
        list(oracle.course(tree, 60)),
        list(oracle.course({**tree, "skips": [skip]}, 60)),
    )
    assert before[:begin] == after[:begin]
    resumed = sampler_of(tree)
    resumed.load_state_dict(sampler.state_dict())
    assert resumed.state_dict()["skips"] == [skip]
    for one in (sampler, resumed):
        for step in range(done, 60 // batch):
            assert (one.indices(step), one.weights(step)) == expected_step(tree, after, step, 0, 1)


def mixed(**options):
    return Sampler(
        **{
            "dataset": BOOKS_AND_CODE,
            "mixture": MIXTURE,
            "global_batch": 4,
            "seed": 7,
            "worker": (0, 1),
            **options,
        }
    )


def cursor_of(sampler, steps):
    sampler.commit(steps)
    return sampler.state_dict()


def refusal(call):
    with pytest.raises(CkptError) as raised:
        call()
    return raised.value.code


@pytest.mark.parametrize(
    "options",
    [
        {"dataset": {"books": 20, "code": 8}},
        {"dataset": {"code": 7, "books": 20}},
        {"dataset": 20, "mixture": None},
        {"seed": 8},
        {"mixture": {0: {"books": 3, "code": 5}, 40: {"books": 8, "code": 0}}},
        {"mixture": {0: {"books": 5, "code": 3}, 48: {"books": 8, "code": 0}}},
        {"mixture": {"books": 5, "code": 3}},
        {"fingerprint": {"books": "other"}},
    ],
)
def test_a_cursor_of_another_mixture_is_refused(options):
    """REQ-CUR-020: also where only stages that have begun are others."""
    cursor = cursor_of(mixed(fingerprint={"books": "one"}), 12)
    assert refusal(lambda: mixed(**options).load_state_dict(cursor)) is Code.CONFIG_IDENTITY


def test_a_stage_that_a_shift_reaches_over_may_not_be_another():
    """REQ-CUR-020: it decides where the positions from 8 on are, of which 20 to 39 are still to come."""
    sampler = mixed()
    sampler.skip(positions=(8, 56), policy="shift")
    sampler.advance(5)
    cursor = sampler.state_dict()
    other = {0: {"books": 5, "code": 3}, 48: {"books": 1, "code": 7}}

    assert refusal(lambda: mixed(mixture=other).load_state_dict(cursor)) is Code.CONFIG_IDENTITY

    after = {0: {"books": 5, "code": 3}, 40: {"books": 8, "code": 0}, 56: {"books": 1, "code": 7}}
    going_on = mixed(mixture=after)
    going_on.load_state_dict(cursor)
    assert [going_on.indices(step) for step in range(5, 10)] == [
        sampler.indices(step) for step in range(5, 10)
    ]


def test_stages_that_have_not_begun_may_be_others():
    """REQ-CUR-020."""
    cursor = cursor_of(mixed(), 10)
    other = mixed(mixture={0: {"books": 5, "code": 3}, 48: {"books": 1, "code": 7}})
    other.load_state_dict(cursor)
    assert other.state_dict() == cursor
    other.advance(2)
    assert [name for name, _ in other.indices(12)].count("code") >= 3


def test_a_mixture_gives_exactly_its_counts():
    names = [name for step in itertools.islice(mixed(), 12) for name, _ in step]
    assert [names[at : at + 8].count("code") for at in range(0, 48, 8)] == [3] * 5 + [0]


@pytest.mark.parametrize(
    ("change", "requirement"),
    [
        (
            lambda cursor: cursor["order"]["vector_check"].update(
                id=cursor["order"]["vector_check"]["id"] ^ 1
            ),
            "006",
        ),
        (
            lambda cursor: (
                cursor["sources"][0].update(pos=48),
                cursor["sources"][1].update(pos=16),
            ),
            "014",
        ),
    ],
)
def test_a_cursor_of_another_order_is_refused(change, requirement):
    """REQ-CUR-006, REQ-CUR-014."""
    cursor = cursor_of(mixed(), 16)
    change(cursor)
    with pytest.raises(CkptError) as raised:
        mixed().load_state_dict(cursor)
    assert (raised.value.code, raised.value.requirement) == (
        Code.CURSOR_FORM,
        f"REQ-CUR-{requirement}",
    )


def test_a_cursor_that_tells_another_epoch_is_refused():
    """REQ-CUR-014: with samples removed, only who computes the order knows."""
    sampler = Sampler(10, global_batch=4, worker=(0, 1))
    sampler.skip(samples=[1, 2], policy="shift")
    cursor = cursor_of(sampler, 5)
    assert (cursor["commit"]["epoch"], cursor["commit"]["pos_in_epoch"]) == (2, 4)
    cursor["commit"] |= {"epoch": 2, "pos_in_epoch": 0}
    with pytest.raises(CkptError) as raised:
        Sampler(10, global_batch=4, worker=(0, 1)).load_state_dict(cursor)
    assert (raised.value.code, raised.value.requirement) == (Code.CURSOR_FORM, "REQ-CUR-014")


@pytest.mark.parametrize("tail", ["drop", "pad_masked"])
def test_with_a_tail_that_ends_epochs_the_batch_stays(tail):
    cursor = cursor_of(Sampler(10, global_batch=4, tail=tail), 5)
    assert (
        refusal(lambda: Sampler(10, global_batch=5, tail=tail).load_state_dict(cursor))
        is Code.CONFIG_IDENTITY
    )
    assert (
        refusal(lambda: Sampler(10, global_batch=4).load_state_dict(cursor)) is Code.CONFIG_IDENTITY
    )


@pytest.mark.parametrize(
    "options",
    [
        {"mixture": None},
        {"mixture": {}},
        {"mixture": {"books": 1}},
        {"mixture": {"books": 1, "web": 1}},
        {"mixture": {"books": 0, "code": 0}},
        {"mixture": {"books": 1.5, "code": 1}},
        {"mixture": {8: {"books": 5, "code": 3}}},
        {"mixture": {0: {"books": 5, "code": 3}, 12: {"books": 5, "code": 3}}},
        {"mixture": {0: {"books": 5, "code": 3}, 8: {"books": 5, "code": 4}}},
        {"mixture": {0: {"books": 5, "code": 3}, "books": 8}},
        {"mixture": {"books": 1 << 16, "code": 1}},
        {"dataset": 20},
        {"dataset": {}},
        {"tail": "drop"},
        {"fingerprint": "one"},
        {"dataset": 3, "mixture": None, "tail": "drop"},
        {"dataset": 3, "mixture": None, "tail": "wrap"},
        {"dataset": 3, "mixture": None, "fingerprint": {"data": "one"}},
    ],
)
def test_arguments_of_no_order_are_refused(options):
    assert refusal(lambda: mixed(**options)) is Code.ARGUMENT


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"samples": [1], "positions": (8, 9)},
        {"samples": [1]},
        {"samples": [], "source": "books"},
        {"samples": [20], "source": "books"},
        {"samples": [1], "source": "web"},
        {"samples": [1], "source": "books", "from_pos": 7},
        {"samples": [1], "source": "books", "policy": "twice"},
        {"shard": ("x", 3, 3), "source": "books"},
        {"shard": ("x", 0, 20), "source": "books", "policy": "shift"},
        {"positions": (9, 9)},
        {"positions": (7, 9)},
    ],
)
def test_a_skip_that_cannot_be_is_refused_and_nothing_changes(options):
    """REQ-CUR-020."""
    sampler = mixed()
    sampler.advance(2)
    before = sampler.state_dict()
    assert refusal(lambda: sampler.skip(**options)) is Code.ARGUMENT
    assert sampler.state_dict() == before


def test_a_skip_of_what_was_fetched_ends_the_iterators_and_a_later_one_does_not():
    sampler = mixed()
    early = iter(sampler)
    next(early)
    next(early)
    sampler.skip(samples=[3], source="code", from_pos=8)
    assert next(early) == sampler.indices(2)
    sampler.skip(samples=[3], source="books")
    assert refusal(lambda: next(early)) is Code.ARGUMENT
    again = iter(sampler)
    assert next(again) == sampler.indices(0)
    sampler.skip(samples=[4], source="books")
    assert refusal(lambda: next(again)) is Code.ARGUMENT


def test_loading_takes_the_skips_of_the_cursor():
    sampler = mixed()
    cursor = cursor_of(mixed(), 3)
    sampler.skip(samples=[1], source="books")
    sampler.load_state_dict(cursor)
    assert sampler.state_dict()["skips"] == []


class Pairs:
    """A map-style data set of a mixture: the batch says which samples were asked for."""

    def __getitem__(self, key):
        return key


def as_pairs(batch):
    return batch


@pytest.mark.filterwarnings(
    "ignore:This DataLoader will create 5 worker"
)  # more than a small machine has cores
@pytest.mark.parametrize(("before", "after"), [(0, 2), (2, 5), (5, 0)])
def test_a_dataloader_with_its_queues_full_resumes_with_the_same_samples(before, after):
    """What was fetched ahead, by however many processes, is not consumed: REQ-CUR-005."""
    torch = pytest.importorskip("torch")

    def loader(sampler, num_workers):
        ahead = {"prefetch_factor": 4} if num_workers else {}
        return torch.utils.data.DataLoader(
            Pairs(), batch_sampler=sampler, num_workers=num_workers, collate_fn=as_pairs, **ahead
        )

    def run(sampler, steps, num_workers):
        batches = iter(loader(sampler, num_workers))
        seen = []
        for _ in range(steps):
            seen.append(next(batches))
            sampler.advance()
        assert sampler._progress.steps_fetched - sampler.steps_done == 4 * num_workers
        return seen, sampler.state_dict()

    def skipped():
        sampler = mixed()
        sampler.skip(samples=[2], source="books", policy="shift", from_pos=16)
        sampler.skip(samples=[0, 1], source="code", policy="mask", from_pos=8)
        return sampler

    expected = list(itertools.islice(skipped(), 14))
    seen, cursor = run(skipped(), 6, before)
    assert cursor["commit"]["global_pos"] == 24
    resumed = mixed()
    resumed.load_state_dict(cursor)
    assert seen + run(resumed, 8, after)[0] == expected
