"""Rows that come and go in arrays of a constant number and size: kept over saves, stored as what was added."""

import functools
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckptfmt
from ckptfmt import Checkpointer, Rollouts, Saving, State
from ckptfmt.errors import Code
from tests.builders import error_of

COLUMNS = {"tokens": "int32", "reward": "float32"}


def made(capacity=4, length=2, **options):
    return Rollouts(COLUMNS, capacity=capacity, length=length, **options)


def row(key):
    """A row whose length and values tell its key."""
    return {"tokens": np.arange(key, key + key % 7), "reward": [key / 4]}


def content(rollouts):
    return {
        key: {name: one.tolist() for name, one in rollouts[key].items()} for key in list(rollouts)
    }


def expected(keys):
    return {key: {"tokens": list(range(key, key + key % 7)), "reward": [key / 4]} for key in keys}


MOVES = st.lists(
    st.tuples(st.sampled_from(["append", "pop", "load"]), st.integers(0, 30)), max_size=60
)


@given(MOVES, st.booleans())
def test_rows_are_those_of_a_dict(moves, evicts):
    """The model is a dict in the order of insertion; what a save was given stays as it was."""
    rollouts = made(evicts=evicts)
    model: dict[int, None] = {}
    given_out = []
    for move, key in moves:
        match move:
            case "append" if key in model or len(model) < 4 or evicts:
                rollouts.append(key, **row(key))
                model.pop(key, None)
                model[key] = None
                if len(model) > 4:
                    del model[next(iter(model))]
            case "append":
                error = error_of(functools.partial(rollouts.append, key, **row(key)))
                assert error.code is Code.ARGUMENT
            case "pop" if key in model:
                assert rollouts.pop(key)["tokens"].tolist() == row(key)["tokens"].tolist()
                del model[key]
            case "pop":
                with pytest.raises(KeyError):
                    rollouts.pop(key)
                rollouts.discard(key)
            case "load":
                saved = rollouts.state_dict()
                given_out.append((saved, [*model]))
                rollouts = made(evicts=evicts)
                rollouts.load_state_dict(saved)
        assert content(rollouts) == expected(model)
    for saved, keys in given_out:
        other = made()
        other.load_state_dict(saved)
        assert [*content(other).items()] == [*expected(keys).items()]


def test_a_save_stores_what_was_added(tmp_path: Path) -> None:
    columns = {"tokens": "int32"}
    rollouts = Rollouts(columns, capacity=6000, length=1024)
    state = State(weights={"w": np.zeros(4)}, extra={"rollouts": rollouts}, rng=False)
    rng = np.random.default_rng(0)
    stored = []
    with Checkpointer(
        tmp_path / "run", state, saving=Saving(delta="smallest", saver="thread")
    ) as saves:
        for step in range(4):
            for key in range(1000 * step, 1000 * step + (1000 if step < 3 else 10)):
                rollouts.append(key, tokens=rng.integers(0, 2**31, 1024))
            handle = saves.save(step=step + 1)
            assert handle is not None
            handle.wait(timeout_s=120)
            stored.append(sum(path.stat().st_size for path in Path(handle.path).rglob("*.pack")))
    # A thousand rows are 4 MB, ten rows lie in one or two blocks of 1 MiB.
    assert stored[0] == 0
    assert stored[1] < 6 << 20
    assert stored[2] < 6 << 20
    assert stored[3] < 3 << 20
    assert handle is not None
    again = Rollouts(columns, capacity=6000, length=1024)
    ckptfmt.load(
        handle.path, State(weights={"w": np.ones(4)}, extra={"rollouts": again}, rng=False)
    )
    assert list(again) == list(rollouts)
    assert all(
        np.array_equal(again[key]["tokens"], rollouts[key]["tokens"]) for key in (0, 999, 3009)
    )


def test_threads_append_and_pop_while_state_is_taken() -> None:
    rollouts = made(capacity=500, length=8)
    stop = threading.Event()
    taken = []

    def work(number):
        for turn in range(300):
            key = number * 1000 + turn
            rollouts.append(key, **row(key))
            if turn % 2:
                rollouts.pop(key - 1)

    def save():
        while not stop.is_set():
            saved = rollouts.state_dict()
            taken.append(
                (saved, {name: [one.copy() for one in saved["columns"][name]] for name in COLUMNS})
            )
            del taken[:-20]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    saver = threading.Thread(target=save)
    for thread in (saver, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    saver.join()
    for saved, copies in taken:
        for name in COLUMNS:
            assert all(map(np.array_equal, saved["columns"][name], copies[name]))
        other = made(capacity=500, length=8)
        other.load_state_dict(saved)
        assert content(other) == expected(list(other))


@pytest.mark.parametrize(
    "call",
    [
        lambda: made(capacity=0),
        lambda: Rollouts({}, capacity=1, length=1),
        lambda: Rollouts(COLUMNS, capacity=1, length={"tokens": 1}),
        lambda: made().append(1, tokens=[1]),
        lambda: made().append(-1, **row(1)),
        lambda: made().append(1 << 63, **row(1)),
        lambda: made().append(1, tokens=np.zeros(1000), reward=0),
    ],
)
def test_wrong_arguments_are_refused(call):
    assert error_of(call).code is Code.ARGUMENT


def test_rollouts_of_another_capacity_are_refused():
    error = error_of(lambda: made(capacity=64).load_state_dict(made().state_dict()))
    assert error.code is Code.CONFIG_IDENTITY
    assert "saved arguments" in error.remedy
