"""The collector is out of the way while a load is planned, and only then."""

import contextlib
import gc

import numpy as np
import pytest

import ckptfmt
from ckptfmt.engines.collector import collector_paused
from ckptfmt.errors import CkptError
from ckptfmt.store.memory import MemoryStore


@pytest.fixture(autouse=True)
def _enabled():
    gc.enable()
    yield
    gc.enable()


@pytest.mark.parametrize("was_enabled", [True, False])
def test_it_is_afterwards_as_it_was(was_enabled):
    if not was_enabled:
        gc.disable()
    with collector_paused():
        assert not gc.isenabled()
    assert gc.isenabled() == was_enabled
    with pytest.raises(KeyError), collector_paused():
        raise KeyError
    assert gc.isenabled() == was_enabled


def test_pauses_of_several_threads_may_overlap_in_any_way():
    """The one that began first ends first, while another has seen that it is off already."""
    first, second = collector_paused(), collector_paused()
    with contextlib.ExitStack() as stack:
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert not gc.isenabled()
        stack.callback(second.__exit__, None, None, None)
    assert gc.isenabled()


def test_a_load_leaves_it_on_whether_it_succeeds_or_not():
    store = MemoryStore()
    ckptfmt.save(store, ckptfmt.State(weights={"w": np.arange(6.0)}), step=1)
    ckptfmt.load(store, ckptfmt.State(weights={"w": np.zeros(6)}))
    assert gc.isenabled()
    with pytest.raises(CkptError):
        ckptfmt.load(store, ckptfmt.State(weights={"w": np.zeros(7)}))
    assert gc.isenabled()


NAMES = [f"w{number}" for number in range(600)]


def count_collections(work):
    """Return how many collections begin meanwhile: each of them may go through all objects of the process."""
    begun: list[int] = []

    def note(phase, info):
        if phase == "start":
            begun.append(info["generation"])

    gc.collect()
    gc.callbacks.append(note)
    try:
        work()
    finally:
        gc.callbacks.remove(note)
    return len(begun)


def test_a_load_of_many_tensors_begins_few_collections():
    store = MemoryStore()
    ckptfmt.save(store, ckptfmt.State(weights={name: np.zeros(4) for name in NAMES}), step=1)
    live = ckptfmt.State(weights={name: np.ones(4) for name in NAMES})
    assert count_collections(lambda: ckptfmt.load(store, live)) < 12


@pytest.mark.parametrize("mode", ["off", "smallest"])
def test_a_save_of_many_tensors_begins_few_collections(tmp_path, mode):
    arrays = {name: np.zeros(40, np.float32) for name in NAMES}
    delta = {"mode": mode, "restore_budget": 100.0}
    with ckptfmt.Checkpointer(
        tmp_path / "run", ckptfmt.State(weights=arrays), delta=delta, saver="thread"
    ) as checkpointer:
        for _ in range(3):
            save_next(checkpointer, arrays)
        found = [count_collections(lambda: save_next(checkpointer, arrays)) for _ in range(4)]
    assert max(found) < 12


def save_next(checkpointer, arrays):
    for array in arrays.values():
        array[:3] += 1
    checkpointer.step += 1
    checkpointer.save().wait()
