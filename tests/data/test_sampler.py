"""The sampler: one order for every number of workers, and a cursor that only finished steps move."""

import dataclasses
import itertools
import sys
import types

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfmt.data.course import add_ledgers, ledger_of_samples
from ckptfmt.data.cursor import Ledger
from ckptfmt.data.sampler import Sampler
from ckptfmt.data.shuffle import sample_indices
from ckptfmt.errors import CkptError, Code
from tests.data.cursors import ledger_of_range


def flat(lists):
    return list(itertools.chain.from_iterable(lists))


def batches(sampler, count):
    return list(itertools.islice(sampler, count))


def global_batches(n, count, *, workers, global_batch, cursor=None, **options):
    """The samples of each step over all workers, as each worker's own sampler yields them."""
    each = []
    for worker in range(workers):
        sampler = Sampler(n, global_batch=global_batch, worker=(worker, workers), **options)
        if cursor is not None:
            sampler.load_state_dict(cursor)
        each.append(batches(sampler, count))
    return [flat(step) for step in zip(*each, strict=True)]


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)


@settings(max_examples=40)  # each on eight numbers of workers
@given(st.integers(1, 50), st.integers(8, 24), st.integers(0, 2**64 - 1))
def test_the_steps_are_the_same_on_any_number_of_workers(n, global_batch, seed):
    alone = global_batches(n, 5, workers=1, global_batch=global_batch, seed=seed)
    assert flat(alone) == sample_indices(n, seed=seed, begin=0, end=5 * global_batch).tolist()
    for workers in range(2, 9):
        assert global_batches(n, 5, workers=workers, global_batch=global_batch, seed=seed) == alone


def test_workers_of_an_uneven_batch_differ_by_one_sample_at_most():
    sizes = [len(batches(Sampler(100, global_batch=11, worker=(i, 4)), 1)[0]) for i in range(4)]
    assert sizes == [2, 3, 3, 3]


@pytest.mark.parametrize("global_batch", [1, 7, 10, 25])
def test_each_epoch_sees_each_sample_once_and_no_batch_is_short(global_batch):
    steps = batches(Sampler(10, global_batch=global_batch), 60)
    assert {len(step) for step in steps} == {global_batch}
    samples = flat(steps)
    for begin in range(0, len(samples) - 9, 10):
        assert sorted(samples[begin : begin + 10]) == list(range(10))


@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 15), st.integers(1, 8))
def test_resumed_is_uninterrupted_on_another_number_of_workers_too(n, global_batch, done, workers):
    workers = min(workers, global_batch)
    first = Sampler(n, global_batch=global_batch)
    expected = batches(first, done + 6)
    for _ in range(done):
        first.advance()
    cursor = first.state_dict()
    resumed = global_batches(n, 6, workers=workers, global_batch=global_batch, cursor=cursor)
    assert resumed == expected[done:]
    second = Sampler(n, global_batch=global_batch)
    second.load_state_dict(cursor)
    assert second.state_dict() == cursor
    for sampler in (first, second):
        sampler.commit(done + 3)
    assert second.state_dict() == first.state_dict()


def test_another_global_batch_goes_on_at_the_same_sample():
    first = Sampler(100, global_batch=10)
    first.commit(7)
    cursor = first.state_dict()
    second = Sampler(100, global_batch=4)
    second.load_state_dict(cursor)
    assert second.state_dict() == cursor
    assert (second.steps_done, second.position) == (7, 70)
    assert batches(second, 1)[0] == sample_indices(100, seed=0, begin=70, end=74).tolist()
    second.advance(2)
    assert second.state_dict()["commit"] == {
        "step": 9,
        "global_pos": 78,
        "epoch": 0,
        "pos_in_epoch": 78,
    }
    assert (
        second.state_dict()["ledger"]["set_digest"]
        == ledger_of_range("data", 100, seed=0, begin=0, end=78).set_digest
    )
    with pytest.raises(CkptError):
        second.indices(6)


def test_the_cursor_is_the_same_on_every_worker_and_names_none():
    cursors = []
    for workers in (1, 2, 5):
        for worker in range(workers):
            sampler = Sampler(17, global_batch=5, worker=(worker, workers))
            batches(sampler, worker)
            sampler.commit(4)
            cursors.append(sampler.state_dict())
    assert all(cursor == cursors[0] for cursor in cursors)


def test_the_ledger_is_that_of_the_samples_seen():
    """REQ-CUR-008: and not of those that were only fetched."""
    sampler = Sampler(6, global_batch=4, source="books")
    seen = batches(sampler, 5)[:3]
    sampler.commit(3)
    ledger = sampler.state_dict()["ledger"]
    assert sorted(flat(seen)) == sorted([*range(6)] * 2)
    both = [ledger_of_samples("books", epoch, np.arange(6)).set_digest for epoch in (0, 1)]
    lanes = [np.frombuffer(bytes.fromhex(digest), "<u8") for digest in both]
    assert bytes.fromhex(ledger["set_digest"]) == (lanes[0] + lanes[1]).astype("<u8").tobytes()


def test_the_ledger_does_not_depend_on_when_it_was_brought_up_to_date():
    eager, lazy = Sampler(10**6, global_batch=40_000), Sampler(10**6, global_batch=40_000)
    for _ in range(5):
        eager.advance()
    lazy.commit(5)
    assert eager.state_dict() == lazy.state_dict()


def test_a_loaded_ledger_is_gone_on_with_not_worked_out_anew():
    """REQ-CUR-008: it is that of the run, and what was consumed before is known to the cursor alone."""
    sampler = Sampler(50, global_batch=8)
    sampler.commit(2)
    cursor = sampler.state_dict()
    cursor["ledger"]["set_digest"] = "01" + "00" * 31
    sampler.load_state_dict(cursor)
    sampler.advance()
    expected = add_ledgers(
        Ledger(count=16, set_digest=cursor["ledger"]["set_digest"]),
        ledger_of_range("data", 50, seed=0, begin=16, end=24),
    )
    assert sampler.state_dict()["ledger"] == dataclasses.asdict(expected)


def test_fetching_does_not_move_the_cursor():
    sampler = Sampler(100, global_batch=10)
    before = sampler.state_dict()
    batches(sampler, 50)
    assert sampler.state_dict() == before
    assert batches(sampler, 1) == batches(sampler, 1)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_dataloader_fetches_ahead_and_the_cursor_stays(num_workers):
    torch = pytest.importorskip("torch")

    def loader(sampler):
        return torch.utils.data.DataLoader(
            range(50), batch_sampler=sampler, num_workers=num_workers
        )

    expected = batches(Sampler(50, global_batch=8, seed=3), 12)
    sampler = Sampler(range(50), global_batch=8, seed=3)
    loaded = iter(loader(sampler))
    seen = []
    for _ in range(5):
        seen.append(next(loaded).tolist())
        sampler.advance()
    assert sampler.state_dict()["commit"]["global_pos"] == 40
    resumed = Sampler(range(50), global_batch=8, seed=3)
    resumed.load_state_dict(sampler.state_dict())
    seen += [batch.tolist() for batch in itertools.islice(loader(resumed), 7)]
    assert seen == expected
    sampler.load_state_dict(sampler.state_dict())
    with pytest.raises(CkptError) as raised:
        next(loaded)
    assert raised.value.code is Code.ARGUMENT


@given(
    st.integers(1, 50), st.integers(1, 4), st.integers(1, 5), st.integers(0, 3), st.integers(0, 5)
)
def test_micro_batches_are_the_pieces_of_each_step(n, workers, micro_batches, extra, done):
    """For loops that accumulate gradients: no piece is empty, and cursor and steps are as without them."""
    size = workers * micro_batches + extra
    for worker in range(workers):
        whole = Sampler(n, global_batch=size, worker=(worker, workers))
        pieces = Sampler(
            n, global_batch=size, worker=(worker, workers), micro_batches=micro_batches
        )
        for sampler in (whole, pieces):
            sampler.commit(done)
        found = batches(pieces, 3 * micro_batches)
        assert all(found)
        assert [
            flat(found[at : at + micro_batches]) for at in range(0, len(found), micro_batches)
        ] == batches(whole, 3)
        for sampler in (whole, pieces):
            sampler.check_fetched(done + 3)
            sampler.commit(done + 1)
        assert pieces.state_dict() == whole.state_dict()
        other = Sampler(n, global_batch=size, worker=(worker, workers), micro_batches=1)
        other.load_state_dict(pieces.state_dict())
        assert flat(batches(pieces, micro_batches)) == batches(other, 1)[0]


def test_a_step_is_fetched_once_its_first_micro_batch_is():
    """A skip mustn't change what a loader has in its hands."""
    sampler = Sampler(100, global_batch=4, worker=(0, 1), micro_batches=2)
    order = iter(sampler)
    next(order)
    sampler.skip(samples=[1], from_pos=2)
    with pytest.raises(CkptError, match="first batch"):
        next(order)


def test_an_iterator_from_before_a_load_is_refused():
    sampler = Sampler(50, global_batch=8)
    early, unused = iter(sampler), iter(sampler)
    next(early)
    cursor = Sampler(50, global_batch=8)
    cursor.commit(3)
    sampler.load_state_dict(cursor.state_dict())
    with pytest.raises(CkptError) as raised:
        next(early)
    assert raised.value.code is Code.ARGUMENT
    assert next(unused) == sampler.indices(3)


def test_who_never_says_that_a_step_is_done_is_told_at_the_save():
    sampler = Sampler(50, global_batch=8)
    loop = iter(sampler)
    for _ in range(600):
        next(loop)
    with pytest.raises(CkptError) as raised:
        sampler.state_dict()
    assert raised.value.code is Code.ARGUMENT
    assert "advance()" in raised.value.remedy
    sampler.commit(0)
    assert sampler.state_dict()["commit"]["step"] == 0


def test_the_cursor_does_not_go_back():
    sampler = Sampler(50, global_batch=8)
    sampler.commit(3)
    sampler.commit(3)
    for call in (lambda: sampler.commit(2), lambda: sampler.advance(-1)):
        with pytest.raises(CkptError) as raised:
            call()
        assert raised.value.code is Code.ARGUMENT
    assert sampler.steps_done == 3


def cursor_of(**options):
    sampler = Sampler(
        **{"dataset": 50, "global_batch": 8, "seed": 3, "fingerprint": "one", **options}
    )
    sampler.commit(9)
    return sampler.state_dict()


@pytest.mark.parametrize(
    "change", [{"dataset": 51}, {"seed": 4}, {"source": "other"}, {"fingerprint": "two"}]
)
def test_a_cursor_of_other_data_is_refused(change):
    sampler = Sampler(50, global_batch=8, seed=3, fingerprint="one")
    before = sampler.state_dict()
    with pytest.raises(CkptError) as raised:
        sampler.load_state_dict(cursor_of(**change))
    assert raised.value.code is Code.CONFIG_IDENTITY
    assert str(next(iter(change.values()))) in raised.value.detail
    assert sampler.state_dict() == before


def test_a_cursor_of_another_order_is_refused():
    cursor = cursor_of()
    cursor["order"]["vector_check"]["id"] = (cursor["order"]["vector_check"]["id"] + 1) % 50
    with pytest.raises(CkptError) as raised:
        Sampler(50, global_batch=8, seed=3).load_state_dict(cursor)
    assert raised.value.code is Code.CURSOR_FORM
    assert raised.value.requirement == "REQ-CUR-006"
    cursor["order"]["alg"] = "feistel-v2"
    with pytest.raises(CkptError) as raised:
        Sampler(50, global_batch=8, seed=3).load_state_dict(cursor)
    assert raised.value.code is Code.FEATURE_UNSUPPORTED


@pytest.mark.parametrize(("saved", "live"), [("one", None), (None, "one")])
def test_a_fingerprint_that_one_side_lacks_is_kept(saved, live):
    sampler = Sampler(50, global_batch=8, seed=3, fingerprint=live)
    sampler.load_state_dict(cursor_of(fingerprint=saved))
    sampler.advance()
    assert sampler.state_dict()["sources"][0]["fingerprint"] == "one"


@pytest.mark.parametrize(
    "options",
    [
        {"dataset": 0},
        {"dataset": []},
        {"global_batch": 0},
        {"seed": -1},
        {"seed": 1 << 64},
        {"worker": (2, 2)},
        {"worker": (-1, 2)},
        {"worker": (0, 9)},
        {"micro_batches": 0},
        {"micro_batches": 9},
        {"micro_batches": 3, "worker": (0, 3)},
    ],
)
def test_arguments_out_of_range_are_refused(options):
    with pytest.raises(CkptError) as raised:
        Sampler(**{"dataset": 50, "global_batch": 8, **options})
    assert raised.value.code is Code.ARGUMENT


def test_the_worker_is_that_of_torch_distributed_where_it_is_initialised(monkeypatch):
    fake = types.SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: True,
        get_rank=lambda: 1,
        get_world_size=lambda: 2,
    )
    monkeypatch.setitem(sys.modules, "torch.distributed", fake)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert batches(Sampler(50, global_batch=8), 3) == batches(
        Sampler(50, global_batch=8, worker=(1, 2)), 3
    )
    assert batches(Sampler(50, global_batch=8, worker=(0, 1)), 1) == [
        Sampler(50, global_batch=8, worker=(0, 1)).indices(0)
    ]
    fake.get_world_size = lambda: 9
    with pytest.raises(CkptError) as raised:
        batches(Sampler(50, global_batch=8), 1)
    assert raised.value.code is Code.ARGUMENT


def test_a_launched_worker_without_torch_distributed_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.distributed", None)
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(CkptError) as raised:
        batches(Sampler(50, global_batch=8), 1)
    assert raised.value.code is Code.WRITERS_UNKNOWN
    assert batches(Sampler(50, global_batch=8, worker=(3, 4)), 1)
