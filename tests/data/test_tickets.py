"""Samples issued ahead: each is consumed or discarded once, over resumes on any number of workers. REQ-PIP-003, REQ-PIP-004."""

import contextlib
import dataclasses
import itertools
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckptfmt
from ckptfmt import Checkpointer, Sampler, State
from ckptfmt.data.tickets import Ticket
from ckptfmt.errors import CkptError, Code
from ckptfmt.store.memory import MemoryStore
from conformance.generate import course as oracle
from tests.builders import error_of
from tests.data.cursors import orders
from tests.data.test_sampler_orders import sampler_of, say_skip, with_own_seed
from tests.interface.test_group import Allgather, run_writers


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def pipeline(n=10, *, worker=(0, 1), **options):
    return Sampler(n, global_batch=4, seed=0, worker=worker, pipeline=True, **options)


def positions(tickets):
    return [ticket.position for ticket in tickets]


def merged(workers):
    """The cursor that a save of all workers has, which is the same on each."""
    shares = [sampler.share() for sampler in workers]
    trees = []
    for sampler in workers:
        with sampler.merging(shares):
            trees.append(sampler.state_dict())
    assert all(tree == trees[0] for tree in trees)
    return trees[0]


# --- the model ------------------------------------------------------------------------------------

#: No move sequence issues as far as this position.
LAST = 260
MOVES = st.lists(
    st.tuples(
        st.sampled_from(["issue", "consume", "discard", "step", "save", "resume"]),
        st.integers(0, 99),
    ),
    max_size=20,
)


@given(orders(batch=4).map(with_own_seed), MOVES)
def test_each_sample_is_consumed_or_discarded_once(tree, moves: Any):
    """The model: sets of positions, by what became of them; the saved sets come back with a resume."""
    places = list(oracle.course(tree, LAST))
    now: dict[str, frozenset[int]] = {"consumed": frozenset(), "discarded": frozenset()}
    workers = [pipeline_of(tree)]
    held: list[list[Ticket]] = [[]]
    trained: list[list[Ticket]] = [[]]
    saved = now, workers[0].state_dict()
    for move, number in moves:
        at = number % len(workers)
        some = held[at][number % 3 :: 2]
        match move:
            case "issue":
                held[at] += workers[at].issue(1 + number % 3)
            case "consume":
                workers[at].consume(some)
                trained[at] += some
            case "discard":
                workers[at].discard(some)
                now = now | {"discarded": now["discarded"] | {*positions(some)}}
            case "step":
                for sampler in workers:
                    sampler.advance()
                now = now | {"consumed": now["consumed"] | {*positions(itertools.chain(*trained))}}
                trained = [[] for _ in workers]
            case "save":
                saved = now, merged(workers)
                check(*saved, places)
            case "resume":
                now, cursor = saved
                workers = [pipeline_of(tree, (i, 1 + number % 4)) for i in range(1 + number % 4)]
                for sampler in workers:
                    sampler.load_state_dict(cursor)
                    assert sampler.state_dict() == cursor
                held, trained = [[] for _ in workers], [[] for _ in workers]
                check_resumed(workers, now, places, held, cursor["commit"]["global_pos"])
        if move in ("consume", "discard"):
            held[at] = [one for one in held[at] if one not in some]
    check(now, merged(workers), places)


def pipeline_of(tree, worker=(0, 1)):
    """A sampler with the order and the skips of a drawn cursor."""
    sampler = sampler_of(tree, worker=worker)
    for skip in tree["skips"]:
        say_skip(sampler, skip)
    cursor = sampler.state_dict()
    cursor["pipeline"] = {"open": [], "discarded": cursor["ledger"]}
    return Sampler.from_state_dict(cursor, worker=worker)


def check(now, cursor, places):
    """A cursor has what the model has: nothing is open that is done, and everything else is open."""
    done = now["consumed"] | now["discarded"]
    end = cursor["commit"]["global_pos"]
    bounds = cursor["pipeline"]["open"]
    opened = {at for b, e in zip(bounds[::2], bounds[1::2], strict=True) for at in range(b, e)}
    counting = {at for at in range(end) if places[at].use == "counts"}
    assert opened == counting - done
    assert cursor["ledger"] == oracle.ledger_of([places[at] for at in now["consumed"]])
    assert cursor["pipeline"]["discarded"] == oracle.ledger_of(
        [places[at] for at in now["discarded"]]
    )


def check_resumed(workers, now, places, held, end):
    """What was open comes first, and each sample is the oracle's."""
    done = now["consumed"] | now["discarded"]
    due = [at for at in range(end) if places[at].use == "counts" and at not in done]
    for number, sampler in enumerate(workers):
        held[number] = sampler.issue(2)
        assert positions(held[number]) == sorted(positions(held[number]))
        for one in held[number]:
            place = places[one.position]
            assert (one.source, one.epoch, one.sample) == (place.source, place.epoch, place.sample)
    got = positions(itertools.chain(*held))
    assert len({*got}) == len(got)
    assert {*due[: 2 * len(workers)]} == {at for at in got if at < end}


def test_the_oracle_notices_a_sample_that_is_lost():
    """Negative control of the model: a cursor without one open position isn't what the model has."""
    sampler = pipeline()
    sampler.consume(sampler.issue(8)[2:5])
    sampler.advance()
    cursor = sampler.state_dict()
    places = list(oracle.course(cursor, 8))
    now = {"consumed": frozenset({2, 3, 4}), "discarded": frozenset()}
    check(now, cursor, places)
    cursor["pipeline"]["open"] = [0, 2, 6, 8]
    with pytest.raises(AssertionError):
        check(now, cursor, places)


# --- one worker -----------------------------------------------------------------------------------


def test_what_was_under_way_is_issued_again_before_anything_new():
    sampler = pipeline()
    tickets = sampler.issue(6)
    sampler.consume([tickets[4], tickets[1]])
    sampler.discard([tickets[2]])
    sampler.advance()
    resumed = pipeline()
    resumed.load_state_dict(sampler.state_dict())
    assert resumed.state_dict() == sampler.state_dict()
    again = resumed.issue(5)
    assert positions(again) == [0, 3, 5, 6, 7]
    assert [(one.sample, one.epoch, one.source) for one in again[:1]] == [
        (tickets[0].sample, tickets[0].epoch, "data")
    ]


def test_a_ticket_is_consumed_once_its_step_is_counted_and_no_earlier():
    sampler = pipeline()
    tickets = sampler.issue(3)
    sampler.consume(tickets[:2])
    assert sampler.state_dict()["pipeline"]["open"] == [0, 3]
    sampler.commit(0)
    assert sampler.state_dict()["ledger"]["count"] == 0
    sampler.advance()
    assert sampler.state_dict()["pipeline"]["open"] == [2, 3]
    assert sampler.state_dict()["ledger"]["count"] == 2
    assert sampler.outstanding == tickets[2:]


def test_a_cursor_of_a_run_that_iterated_goes_on_with_tickets():
    before = Sampler(10, global_batch=4, seed=0, worker=(0, 1))
    before.advance(2)
    sampler = pipeline()
    sampler.load_state_dict(before.state_dict())
    assert sampler.state_dict() == before.state_dict()
    (ticket,) = sampler.issue(1)
    assert ticket.position == 8
    assert [ticket.sample] == before.indices(2)[:1]


def test_skipped_positions_are_never_issued():
    sampler = pipeline()
    first = sampler.issue(2)
    sampler.skip(positions=(3, 5), policy="hole")
    sampler.skip(samples=[9], policy="mask")
    assert positions(sampler.issue(4)) == [2, 5, 7, 8]
    sampler.consume(first)
    sampler.advance()
    resumed = Sampler.from_state_dict(sampler.state_dict(), worker=(0, 1))
    assert positions(resumed.issue(5)) == [2, 5, 7, 8, 9]
    error = error_of(lambda: sampler.skip(samples=[1], from_pos=7))
    assert (error.code, error.requirement) == (Code.ARGUMENT, "REQ-CUR-020")


def test_an_open_position_without_a_sample_is_refused():
    sampler = pipeline()
    sampler.skip(positions=(1, 2), policy="hole")
    sampler.issue(3)
    cursor = sampler.state_dict()
    assert cursor["pipeline"]["open"] == [0, 1, 2, 4]
    cursor["pipeline"]["open"] = [0, 4]
    error = error_of(lambda: pipeline().load_state_dict(cursor))
    assert (error.code, error.requirement) == (Code.CURSOR_FORM, "REQ-PIP-004")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda tickets: [tickets[0]], "was consumed or discarded already"),
        (lambda tickets: [tickets[1]], "was consumed or discarded already"),
        (lambda tickets: [tickets[2], tickets[2]], "is given twice"),
        (lambda tickets: [tickets[2], 7], "isn't a ticket"),
        (
            lambda tickets: [tickets[2], dataclasses.replace(tickets[3], position=99)],
            "wasn't issued",
        ),
        (lambda tickets: [tickets[2], dataclasses.replace(tickets[3], sample=5)], "already"),
        (lambda tickets: [tickets[2], *pipeline().issue(1)], "another launch"),
    ],
)
@pytest.mark.parametrize("name", ["consume", "discard"])
def test_a_wrong_ticket_is_refused_and_none_of_the_others_is_recorded(name, wrong, says):
    sampler = pipeline()
    tickets = sampler.issue(4)
    sampler.consume(tickets[:1])
    sampler.discard(tickets[1:2])
    before = sampler.state_dict()
    error = error_of(lambda: getattr(sampler, name)(wrong(tickets)))
    assert error.code is Code.ARGUMENT
    assert says in error.detail
    assert sampler.state_dict() == before
    assert sampler.outstanding == tickets[2:]


def test_tickets_from_before_a_load_are_refused_and_come_anew():
    sampler = pipeline()
    tickets = sampler.issue(2)
    sampler.load_state_dict(sampler.state_dict())
    error = error_of(lambda: sampler.consume(tickets))
    assert error.code is Code.ARGUMENT
    assert "issue() returns open positions first" in error.remedy
    assert positions(sampler.issue(2)) == positions(tickets)


def test_a_ticket_passes_through_a_queue_of_processes():
    sampler = pipeline()
    sampler.consume(pickle.loads(pickle.dumps(sampler.issue(2))))
    sampler.advance()
    assert sampler.state_dict()["ledger"]["count"] == 2


def test_issue_and_iterating_refuse_each_other():
    iterated = Sampler(10, global_batch=4, worker=(0, 1))
    for call in (iterated.issue, lambda: iterated.consume([]), lambda: iterated.outstanding):
        error = error_of(call)
        assert error.code is Code.ARGUMENT
        assert "pipeline=True" in error.remedy
    sampler = pipeline()
    for call in (
        lambda: next(iter(sampler)),
        lambda: sampler.indices(0),
        lambda: sampler.weight_sum(0),
    ):
        assert error_of(call).code is Code.ARGUMENT
    sampler.issue(1)
    error = error_of(lambda: iterated.load_state_dict(sampler.state_dict()))
    assert error.code is Code.CONFIG_IDENTITY
    assert "pipeline" in error.detail


@pytest.mark.parametrize("count", [0, -1, 1.5, "3"])
def test_a_number_of_samples_is_a_whole_number(count):
    assert error_of(lambda: pipeline().issue(count)).code is Code.ARGUMENT


def test_too_many_open_tickets_are_refused(monkeypatch):
    monkeypatch.setattr("ckptfmt.limits.OPEN_POSITIONS", 8)
    sampler = pipeline()
    tickets = sampler.issue(8)
    error = error_of(lambda: sampler.issue(1))
    assert error.code is Code.ARGUMENT
    assert "discard()" in error.remedy
    sampler.discard(tickets[:1])
    assert positions(sampler.issue(1)) == [8]


def test_steps_that_consume_nothing_are_noticed_by_a_save():
    sampler = pipeline()
    tickets = sampler.issue(2)
    sampler.advance(600)
    error = error_of(sampler.state_dict)
    assert "consume(tickets)" in error.remedy
    sampler.consume(tickets)
    assert sampler.state_dict()["commit"]["step"] == 600


# --- threads --------------------------------------------------------------------------------------


def test_threads_issue_each_position_once():
    sampler = pipeline(1000)
    barrier = threading.Barrier(8)

    def work(number):
        barrier.wait()
        mine = []
        for turn in range(50):
            tickets = sampler.issue(1 + (turn + number) % 3)
            mine += tickets
            (sampler.consume if turn % 2 else sampler.discard)(tickets[:1])
        return mine

    with ThreadPoolExecutor(8) as pool:
        taken = list(itertools.chain(*pool.map(work, range(8))))
    assert sorted(positions(taken)) == list(range(len(taken)))
    sampler.advance()
    cursor = sampler.state_dict()
    assert cursor["ledger"]["count"] == cursor["pipeline"]["discarded"]["count"] == 200
    assert {*positions(sampler.outstanding)} <= {*positions(taken)}


# --- several workers ------------------------------------------------------------------------------


def test_a_worker_that_is_slower_leaves_its_positions_open():
    workers = [pipeline(100, worker=(i, 3)) for i in range(3)]
    fast, slow, _ = workers
    tickets = fast.issue(5)
    fast.consume(tickets[:4])
    slow.discard(slow.issue(1))
    for sampler in workers:
        sampler.advance()
    cursor = merged(workers)
    assert cursor["commit"]["global_pos"] == 13
    assert cursor["pipeline"]["open"] == [2, 3, 4, 6, 7, 9, 10, 13]
    resumed = [Sampler.from_state_dict(cursor, worker=(i, 2)) for i in range(2)]
    assert sorted(positions(resumed[0].issue(5) + resumed[1].issue(5))) == [
        2, 4, 5, 7, 8, 10, 11, 12, 13, 14
    ]  # fmt: skip


def test_two_processes_of_one_worker_may_not_both_issue():
    """Of tensor parallelism, say: one issues, and passes the samples on."""
    first, other = pipeline(worker=(0, 2)), pipeline(worker=(0, 2))
    second = pipeline(worker=(1, 2))
    first.issue(2)
    assert merged([first, other, second])["pipeline"]["open"] == [0, 3]
    other.issue(1)
    error = error_of(lambda: merged([first, other, second]))
    assert error.code is Code.ARGUMENT
    error = error_of(lambda: merged([first]))
    assert error.code is Code.WRITERS_DIVERGED


def test_the_share_of_one_worker_is_no_cursor():
    sampler = pipeline(worker=(0, 2))
    sampler.issue(1)
    error = error_of(lambda: pipeline().load_state_dict(sampler.state_dict()))
    assert error.code is Code.CURSOR_FORM


def test_skips_of_several_workers_come_before_their_tickets():
    sampler = pipeline(worker=(0, 2))
    sampler.skip(samples=[3])
    assert positions(sampler.issue(1)) == [2]
    assert error_of(lambda: sampler.skip(samples=[5])).code is Code.ARGUMENT


def run_of(writers, store, allgather, body, **options):
    """Each writer's result of a body in a launch of a run."""

    def write(writer):
        sampler = pipeline(100, worker=(writer, writers))
        state = State(weights={"w": np.arange(4.0)}, data=sampler, rng=False)
        with Checkpointer(
            store, state, every=1, saver="inline", writer=(writer, writers),
            agree=allgather.of(writer), **options,
        ) as checkpointer:  # fmt: skip
            return body(writer, sampler, checkpointer)

    return run_writers(writers, write)


def test_a_run_of_several_workers_resumes_on_another_number():
    store = MemoryStore()

    def train(writer, sampler, checkpointer):
        tickets = sampler.issue(3 + writer)
        for _ in checkpointer.steps(1):
            sampler.consume(tickets[1:])
        return positions(tickets[:1])

    assert run_of(3, store, Allgather(3), train) == [[0], [1], [2]]

    def resume(_, sampler, checkpointer):
        report = checkpointer.load_report
        assert report.claim == "S1"
        assert any("pipeline" in reason for reason in report.lowered_by)
        return positions(sampler.issue(4))

    # Worker 0 issued 0, 3, 6; worker 1 had 1, 4, 7, 10; worker 2 had 2, 5, 8, 11, 14.
    first, second = run_of(2, store, Allgather(2), resume)
    assert first == [0, 2, 12, 15]
    assert second == [1, 9, 13, 16]


def test_a_sampler_that_one_process_lacks_is_refused_on_all():
    store, allgather = MemoryStore(), Allgather(2)

    def write(writer):
        data = pipeline(worker=(0, 2)) if writer == 0 else None
        state = State(weights={"w": np.arange(4.0)}, data=data, rng=False)
        with pytest.raises(CkptError) as raised:
            ckptfmt.save(store, state, step=1, writer=(writer, 2), agree=allgather.of(writer))
        return raised.value.code

    assert run_writers(2, write) == [Code.WRITERS_DIVERGED] * 2


def test_one_process_issues_for_all():
    store, allgather = MemoryStore(), Allgather(2)

    def write(writer):
        sampler = pipeline()
        if writer == 0:
            sampler.issue(3)
        state = State(weights={"w": np.arange(4.0)}, data=ckptfmt.FirstWorker(sampler), rng=False)
        ckptfmt.save(store, state, step=1, writer=(writer, 2), agree=allgather.of(writer))

    run_writers(2, write)
    resumed = pipeline()
    ckptfmt.load(store, State(weights={"w": np.zeros(4)}, data=resumed, rng=False))
    assert positions(resumed.issue(4)) == [0, 1, 2, 3]


def test_a_save_without_an_exchange_refuses_shares(tmp_path: Path):
    state = State(weights={"w": np.arange(4.0)}, data=pipeline(worker=(0, 2)), rng=False)
    attempt = ckptfmt.SaveAttempt.begin(step=1, writer_count=2)
    error = error_of(lambda: attempt.write_part(tmp_path / "s", state, writer=0))
    assert error.code is Code.ARGUMENT
    assert "worker=(0, 1)" in error.remedy
    with contextlib.suppress(FileNotFoundError):
        assert not list((tmp_path / "s").iterdir())
