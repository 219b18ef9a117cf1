"""The collector is out of the way while loads are planned and saves described, and only then."""

import contextlib
import gc
import os
import threading

import numpy as np
import pytest

import ckptfmt
from ckptfmt.errors import CkptError
from ckptfmt.stage import collector
from ckptfmt.stage.collector import collector_paused
from ckptfmt.store.memory import MemoryStore

#: Not Python's own, so that a test sees whose they are.
THRESHOLDS = (650, 9, 11)


@pytest.fixture(autouse=True)
def _thresholds():
    before = gc.get_threshold()
    gc.set_threshold(*THRESHOLDS)
    yield
    gc.set_threshold(*before)
    gc.enable()


def collections_of_garbage():
    """Return how many collections begin while garbage is made."""

    def make():
        for _ in range(20_000):
            row: list[object] = []
            row.append(row)

    return count_collections(make)


def test_it_is_paused_and_afterwards_as_it_was():
    assert collections_of_garbage() > 10
    with collector_paused():
        assert collections_of_garbage() == 0
    assert gc.get_threshold() == THRESHOLDS
    with pytest.raises(KeyError), collector_paused():
        raise KeyError
    assert gc.get_threshold() == THRESHOLDS


def test_what_the_program_sets_meanwhile_stays():
    with collector_paused():
        gc.disable()
    assert not gc.isenabled()
    with collector_paused():
        gc.enable()
        gc.set_threshold(77, 7, 7)
    assert gc.isenabled()
    assert gc.get_threshold() == (77, 7, 7)
    gc.set_threshold(0)
    with collector_paused():
        pass
    assert gc.get_threshold()[0] == 0


def test_pauses_of_several_threads_may_overlap_in_any_way():
    """The one that began first ends first, while another has seen that it is off already."""
    first, second = collector_paused(), collector_paused()
    with contextlib.ExitStack() as stack:
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert collections_of_garbage() == 0
        stack.callback(second.__exit__, None, None, None)
    assert gc.get_threshold() == THRESHOLDS


def test_a_process_that_is_forked_in_a_pause_has_none():
    """As a data loader's is, which is asked for its state; and another thread may just be at the pause's lock."""
    in_lock, may_end = threading.Event(), threading.Event()

    def hold():
        with collector._Paused.lock:
            in_lock.set()
            may_end.wait(20)

    with collector_paused():
        thread = threading.Thread(target=hold)
        thread.start()
        in_lock.wait(20)
        child = os.fork()
        if not child:
            try:
                ended = gc.get_threshold() == THRESHOLDS
                with collector_paused():
                    ended &= gc.get_threshold()[0] == 0
                os._exit(0 if ended and gc.get_threshold() == THRESHOLDS else 1)
            finally:
                os._exit(2)
        may_end.set()
        thread.join()
        assert gc.get_threshold()[0] == 0
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert gc.get_threshold() == THRESHOLDS


def test_the_rest_of_a_pause_in_a_forked_process_changes_nothing():
    child = None
    with collector_paused():
        child = os.fork()
    if not child:
        os._exit(0 if gc.get_threshold() == THRESHOLDS else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_load_leaves_it_on_whether_it_succeeds_or_not():
    store = MemoryStore()
    ckptfmt.save(store, ckptfmt.State(weights={"w": np.arange(6.0)}), step=1)
    ckptfmt.load(store, ckptfmt.State(weights={"w": np.zeros(6)}))
    assert gc.get_threshold() == THRESHOLDS
    with pytest.raises(CkptError):
        ckptfmt.load(store, ckptfmt.State(weights={"w": np.zeros(7)}))
    assert gc.get_threshold() == THRESHOLDS


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
    checkpointer.save(step=checkpointer.step + 1).wait()
