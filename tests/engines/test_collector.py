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


def test_a_load_of_many_tensors_begins_few_collections():
    """Each of them may go through all objects of the process."""
    names = [f"w{number}" for number in range(600)]
    store = MemoryStore()
    ckptfmt.save(store, ckptfmt.State(weights={name: np.zeros(4) for name in names}), step=1)
    live = ckptfmt.State(weights={name: np.ones(4) for name in names})
    begun: list[int] = []

    def note(phase, info):
        if phase == "start":
            begun.append(info["generation"])

    gc.collect()
    gc.callbacks.append(note)
    try:
        ckptfmt.load(store, live)
    finally:
        gc.callbacks.remove(note)
    assert len(begun) < 12
