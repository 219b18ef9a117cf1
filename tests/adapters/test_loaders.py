"""Other libraries' loaders: kept as they are, and never put back on another number of workers unseen. REQ-CUR-023."""

import itertools
import types
from typing import Any

import pytest
import torch

from ckptfmt.adapters.capture import capture
from ckptfmt.adapters.data_loaders import ConsumedSamples, ForeignLoader
from ckptfmt.api import load, save
from ckptfmt.data.sampler import Sampler
from ckptfmt.errors import CkptError, Code
from ckptfmt.state import PerWorker, State
from tests.adapters.double import checkpoint_of, restore


class StatefulLoader:
    """What torchdata's StatefulDataLoader promises: each worker's part of the data, and its own position in it."""

    def __init__(self, worker, worker_count, *, n=24):
        self.samples = range(worker, n, worker_count)
        self.yielded = 0
        self.asked = 0

    def __iter__(self):
        while self.yielded < len(self.samples):
            self.yielded += 1
            yield self.samples[self.yielded - 1]

    def state_dict(self):
        self.asked += 1
        return {
            "_num_yielded": self.yielded,
            "_sampler_iter_state": None,
            "fetcher_state": [0.5, "x"],
        }

    def load_state_dict(self, state_dict):
        self.yielded = state_dict["_num_yielded"]


def adapters(worker_count):
    return [
        ForeignLoader(
            StatefulLoader(worker, worker_count), lib="torchdata", worker_count=worker_count
        )
        for worker in range(worker_count)
    ]


def saved_after(batches, worker_count):
    each = adapters(worker_count)
    for adapter in each:
        list(itertools.islice(adapter, batches))
    states = [State(data=PerWorker(adapter)) for adapter in each]
    return checkpoint_of(
        *(capture(one, worker=i, worker_count=worker_count) for i, one in enumerate(states))
    )


def test_each_worker_goes_on_where_it_was():
    checkpoint = saved_after(3, 2)
    for worker, adapter in enumerate(adapters(2)):
        restore(State(data=PerWorker(adapter)), checkpoint, worker=worker, worker_count=2)
        assert adapter._loader.asked <= 1, "asking it starts its processes"
        assert next(iter(adapter)) == 2 * 3 + worker
        assert adapter.state_dict()["state"]["_num_yielded"] == 4


@pytest.mark.parametrize("worker_count", [1, 3])
def test_another_number_of_workers_is_refused(worker_count):
    checkpoint = saved_after(3, 2)
    for worker, adapter in enumerate(adapters(worker_count)):
        with pytest.raises(CkptError) as raised:
            restore(
                State(data=PerWorker(adapter)), checkpoint, worker=worker, worker_count=worker_count
            )
        assert raised.value.code is Code.LOADER_NOT_ELASTIC
        assert adapter._loader.yielded == 0


@pytest.mark.parametrize("worker_count", [1, 3])
def test_where_it_is_allowed_it_is_reported_and_the_loader_stays_as_it_is(worker_count):
    checkpoint = saved_after(3, 2)
    for worker, adapter in enumerate(adapters(worker_count)):
        state = State(data=PerWorker(adapter))
        report = restore(
            state, checkpoint, worker=worker, worker_count=worker_count, allow=["loader"]
        )
        assert adapter._loader.yielded == 0
        assert any(line.startswith("LOADER_NOT_ELASTIC at data:") for line in report.downgrades)
        assert report.claim == "S0"


def consumed(count):
    return types.SimpleNamespace(consumed_train_samples=count)


def count_checkpoint():
    states = [State(data=ConsumedSamples(consumed(640), worker_count=4)) for _ in range(4)]
    return checkpoint_of(*(capture(one, worker=i, worker_count=4) for i, one in enumerate(states)))


def test_a_count_of_the_run_is_put_back():
    args = consumed(0)
    restore(
        State(data=ConsumedSamples(args, worker_count=4)),
        count_checkpoint(),
        worker=0,
        worker_count=4,
    )
    assert args == consumed(640)


def test_a_count_of_the_run_is_put_back_elsewhere_only_where_it_is_allowed():
    args = consumed(0)
    adapter = ConsumedSamples(args, worker_count=2)
    state = State(data=adapter)
    with pytest.raises(CkptError) as raised:
        restore(state, count_checkpoint(), worker=0, worker_count=2)
    assert raised.value.code is Code.LOADER_NOT_ELASTIC
    assert args == consumed(0)
    report = restore(state, count_checkpoint(), worker=0, worker_count=2, allow=["loader"])
    assert args == consumed(640)
    assert report.claim == "S0"
    assert adapter.state_dict()["worker_count"] == 2


def test_writers_may_be_more_than_workers():
    """REQ-CUR-023: of tensor parallelism, say, where two writers share a worker's samples."""
    each = [ConsumedSamples(consumed(640), worker_count=2) for _ in range(4)]
    saved = checkpoint_of(
        *(
            capture(State(data=one), worker=number, worker_count=4)
            for number, one in enumerate(each)
        )
    )
    args = consumed(0)

    restore(State(data=ConsumedSamples(args, worker_count=2)), saved, worker=0, worker_count=4)

    assert args == consumed(640)
    with pytest.raises(CkptError) as raised:
        restore(State(data=ConsumedSamples(args, worker_count=4)), saved, worker=0, worker_count=4)
    assert raised.value.code is Code.LOADER_NOT_ELASTIC


def test_a_plain_value_takes_no_position_of_another_number_of_workers():
    """REQ-CUR-023: not by way of a dict, either."""
    with pytest.raises(CkptError) as raised:
        restore(State(data={}), count_checkpoint(), worker=0, worker_count=2)
    assert raised.value.code is Code.LOADER_NOT_ELASTIC


def test_the_adapter_alone_refuses_as_well():
    position = adapters(2)[0].state_dict()
    with pytest.raises(CkptError) as raised:
        adapters(3)[0].load_state_dict(position)
    assert (raised.value.code, raised.value.requirement) == (Code.LOADER_NOT_ELASTIC, "REQ-CUR-023")


def test_a_position_of_another_library_is_refused():
    position = adapters(1)[0].state_dict()
    other = ForeignLoader(StatefulLoader(0, 1), lib="streaming", worker_count=1)
    counts = ConsumedSamples(consumed(0), names=("consumed_valid_samples",), worker_count=1)
    for adapter, saved in (
        (other, position),
        (counts, ConsumedSamples(consumed(1), worker_count=1).state_dict()),
    ):
        with pytest.raises(CkptError) as raised:
            adapter.load_state_dict(saved)
        assert raised.value.code is Code.CONFIG_IDENTITY


def test_a_loader_with_a_sampler_is_refused_with_what_to_write_instead(tmp_path):
    """It would be saved as nothing, or be replaced by a saved value."""
    sampler = Sampler(8, global_batch=2, seed=0)
    numbers: Any = range(8)
    with_sampler: Any = torch.utils.data.DataLoader(numbers, batch_sampler=sampler)
    save(tmp_path / "c", State(data=sampler), step=0)
    for state in (
        State(data=with_sampler),
        State(data={"train": with_sampler}),
        State(data=PerWorker(with_sampler)),
    ):
        for action in (
            lambda s=state: save(tmp_path / "d", s, step=0),
            lambda s=state: load(tmp_path / "c", s),
        ):
            with pytest.raises(CkptError) as raised:
                action()
            assert raised.value.code is Code.STATE_UNSUPPORTED
            assert "State(data=loader.batch_sampler)" in raised.value.remedy
    with pytest.raises(CkptError) as raised:
        load(tmp_path / "c", State(data=torch.utils.data.DataLoader(numbers)))
    assert raised.value.code is Code.CONFIG_IDENTITY
    assert "isn't that of a DataLoader" in raised.value.detail
