"""torch's DataLoader as it is: counted where the loop takes batches, and gone on with by index."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

import ckptfmt
from ckptfmt.adapters.data_loaders import find_loaders
from ckptfmt.errors import CkptError, Code
from ckptfmt.store.memory import MemoryStore

DataLoader: Any = torch.utils.data.DataLoader
# Another test of this process may have imported JAX, which warns of forks.
pytestmark = pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")


class Samples(torch.utils.data.Dataset[Any]):
    """Numbers; each access is written down."""

    def __init__(self, count: int, *, noise: bool = False) -> None:
        self.count = count
        self.noise = noise
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> Any:
        self.read.append(int(number))
        return (int(number), int(torch.randint(1 << 30, ()))) if self.noise else int(number)


def state_of(loader: Any) -> ckptfmt.State:
    return ckptfmt.State(data=loader)


def moved(loader: Any, other: Any, *, seed: int = 9) -> ckptfmt.LoadReport:
    """Give another loader the position of the first, and the process its streams."""
    store = MemoryStore()
    ckptfmt.save(store, state_of(loader), step=1)
    torch.manual_seed(seed)
    random.seed(seed)
    return ckptfmt.load(store, state_of(other))


def followed(loader: Any) -> Any:
    (position,) = find_loaders(state_of(loader))
    return position


def lists(batches: Any) -> list[Any]:
    return [_plain(batch) for batch in batches]


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return value.tolist() if isinstance(value, torch.Tensor) else value


def told(call: Callable[..., object], *given: Any, **named: Any) -> CkptError:
    with pytest.raises(CkptError) as caught:
        call(*given, **named)
    return caught.value


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(
    sizes=st.tuples(st.integers(1, 13), st.none() | st.integers(1, 5), st.booleans()),
    kind=st.sampled_from(["shuffle", "sequential", "replacement", "generator"]),
    place=st.tuples(st.integers(0, 2), st.integers(0, 14)),
    seed=st.integers(0, 9),
)
def test_at_each_position_the_rest_is_that_of_a_loader_that_never_stopped(
    sizes: tuple[int, int | None, bool], kind: str, place: tuple[int, int], seed: int
) -> None:
    """Order, length, epochs and random numbers; and no sample of a batch taken is loaded. REQ-EPO-001."""
    count, batch_size, drop_last = sizes
    epochs, taken = place

    def make() -> tuple[Samples, Any]:
        data = Samples(count, noise=True)
        kinds: dict[str, Any] = {
            "shuffle": {"shuffle": True},
            "generator": {"shuffle": True, "generator": torch.Generator().manual_seed(1)},
            "replacement": {
                "sampler": torch.utils.data.RandomSampler(data, replacement=True, num_samples=9)
            },
            "sequential": {},
        }
        return data, DataLoader(
            data,
            batch_size=batch_size,
            drop_last=drop_last and batch_size is not None,
            **kinds[kind],
        )

    torch.manual_seed(seed)
    _, plain = make()  # what torch does
    right = [lists(plain) for _ in range(epochs + 2)]

    torch.manual_seed(seed)
    _, loader = make()
    followed(loader)
    assert [lists(loader) for _ in range(epochs)] == right[:epochs]
    batches = iter(loader)
    seen = lists(itertools.islice(batches, taken))
    data, other = make()
    assert moved(loader, other).step == 1
    assert followed(other).epoch == followed(loader).epoch
    rest = lists(other)
    if followed(loader).epoch == epochs:  # the epoch wasn't at its end
        assert seen + rest == right[epochs]
        assert len(other) == len(loader) == len(right[0])
        assert data.read == list(_numbers(rest))
        rest = lists(other)
    assert rest == right[epochs + 1]


def _numbers(batches: list[Any]) -> Iterator[int]:
    for numbers, _ in batches:
        yield from numbers if isinstance(numbers, list) else [numbers]


@pytest.mark.parametrize("lives", ["an epoch", "all epochs"])
def test_worker_processes_go_on_with_their_own_random_numbers(lives: str) -> None:
    """A batch of a worker process brings the states of its streams along."""

    def make() -> Any:
        return DataLoader(
            Samples(14, noise=True),
            batch_size=2,
            shuffle=True,
            num_workers=2,
            persistent_workers=lives == "all epochs",
        )

    torch.manual_seed(3)
    plain = make()
    right = [lists(plain) for _ in range(3)]
    for epochs, taken in ((0, 1), (1, 3), (1, 7), (2, 0)):
        torch.manual_seed(3)
        loader = make()
        followed(loader)
        for _ in range(epochs):
            lists(loader)
        batches = iter(loader) if taken else None
        seen = lists(next(batches) for _ in range(taken)) if batches is not None else []
        other = make()
        moved(loader, other)
        assert seen + lists(other) == right[epochs]
        if epochs < 2:
            assert lists(other) == right[epochs + 1]


def test_the_loop_sees_the_loader_as_it_was() -> None:
    """Neither the loader's samplers nor its class nor its arguments are other ones."""
    loader = DataLoader(Samples(10), batch_size=3, shuffle=True)
    before = {name: value for name, value in vars(loader).items() if name != "_get_iterator"}
    followed(loader)
    iterator = iter(loader)
    assert isinstance(iterator, torch.utils.data.dataloader._BaseDataLoaderIter)
    next(iterator)
    after = {name: value for name, value in vars(loader).items() if name != "_get_iterator"}
    assert before.keys() == after.keys()
    assert all(before[name] is after[name] for name in before)
    assert type(loader) is DataLoader
    assert (len(loader), len(iterator)) == (4, 4)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"count": 11}, "samples: saved 10, here 11"),
        ({"batch_size": 3}, "batch_size: saved 2, here 3"),
        ({"drop_last": True}, "drop_last: saved False, here True"),
        ({"shuffle": False}, "sampler: saved 'torch.utils.data.sampler.RandomSampler'"),
    ],
)
def test_another_loader_is_refused_before_anything_changes(
    options: dict[str, Any], said: str
) -> None:
    """REQ-EPO-003."""
    given: dict[str, Any] = {"count": 10, "batch_size": 2, "shuffle": True}
    loader = DataLoader(Samples(given.pop("count")), **given)
    followed(loader)
    next(iter(loader))
    changed = {"count": 10, **given, **options}
    other = DataLoader(Samples(changed.pop("count")), **changed)
    error = told(moved, loader, other)
    assert error.code == Code.CONFIG_IDENTITY
    assert said in str(error)
    assert len(lists(other)) == len(other)


def test_an_order_of_another_epoch_is_refused() -> None:
    """`for epoch in range(E)` after a resume in epoch 1: set_epoch(0) gives other samples. REQ-EPO-003."""

    def make() -> Any:
        data = Samples(10)
        sampler: Any = torch.utils.data.DistributedSampler(data, num_replicas=1, rank=0)
        return DataLoader(data, batch_size=2, sampler=sampler)

    loader = make()
    followed(loader)
    lists(loader)
    loader.sampler.set_epoch(1)
    next(iter(loader))
    other = make()
    moved(loader, other)
    assert followed(other).epoch == 1
    other.sampler.set_epoch(0)
    error = told(iter, other)
    assert error.code == Code.CONFIG_IDENTITY
    assert "set_epoch()" in str(error)
    other = make()
    moved(loader, other)
    other.sampler.set_epoch(1)  # the remedy
    assert len(lists(other)) == 4


def test_two_iterators_at_once_are_refused() -> None:
    loader = DataLoader(Samples(10), batch_size=2)
    followed(loader)
    first = iter(loader)
    next(first)
    lists(loader)  # an evaluation on the loader of the training
    error = told(next, first)
    assert error.code == Code.ARGUMENT
    assert "isn't the loader's newest" in str(error)
    assert "evaluate on a loader of its own" in str(error)


def test_an_iterator_from_before_a_load_is_refused() -> None:
    loader = DataLoader(Samples(10), batch_size=2)
    followed(loader)
    old = iter(loader)
    next(old)
    moved(loader, loader)
    assert "a position was loaded" in str(told(next, old))
    assert lists(loader) == [[2, 3], [4, 5], [6, 7], [8, 9]]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_that_was_iterated_before_anybody_counted_is_refused(workers: int) -> None:
    loader = DataLoader(Samples(10), batch_size=2, num_workers=workers)
    batches = iter(loader)
    next(batches)
    error = told(ckptfmt.save, MemoryStore(), state_of(loader), step=1)
    assert error.code == Code.ARGUMENT
    assert "the batches taken weren't counted" in str(error)
    del batches
    ckptfmt.save(MemoryStore(), state_of(loader), step=1)


class Stream(torch.utils.data.IterableDataset[int]):
    """Twelve numbers."""

    def __iter__(self) -> Iterator[int]:
        order = list(range(12))
        random.shuffle(order)
        yield from order


class ExactStream(Stream):
    """Twelve numbers, in the same order from the same random numbers."""

    ckptfmt_exact = True


def test_an_iterable_data_set_is_refused_at_the_first_save_unless_it_is_exact() -> None:
    error = told(ckptfmt.save, MemoryStore(), state_of(DataLoader(Stream())), step=1)
    assert error.code == Code.STATE_UNSUPPORTED
    assert "ckptfmt_exact = True" in str(error)
    assert "StatefulDataLoader" in str(error)
    random.seed(4)
    right = [lists(DataLoader(ExactStream(), batch_size=5)) for _ in range(2)]
    for taken in range(4):
        random.seed(4)
        loader = DataLoader(ExactStream(), batch_size=5)
        followed(loader)
        batches = iter(loader)
        seen = lists(next(batches) for _ in range(taken))
        other = DataLoader(ExactStream(), batch_size=5)
        moved(loader, other)
        assert seen + lists(other) == right[0]
        assert lists(other) == right[1]


class DividedStream(torch.utils.data.IterableDataset[Any]):
    """Twelve numbers with noise, divided between the worker processes."""

    def __iter__(self) -> Iterator[Any]:
        worker: Any = torch.utils.data.get_worker_info()
        for number in range(worker.id, 12, worker.num_workers):
            yield number, int(torch.randint(1 << 30, ()))


def test_worker_processes_read_an_iterable_data_set_again() -> None:
    """CURSOR_FORM refused the first save. The data set declares its order by an attribute."""

    def make() -> Any:
        data: Any = DividedStream()
        data.ckptfmt_exact = True
        return DataLoader(data, batch_size=2, num_workers=2)

    torch.manual_seed(3)
    plain = make()
    right = [lists(plain) for _ in range(2)]
    for taken in (1, 4, 6):
        torch.manual_seed(3)
        loader = make()
        followed(loader)
        batches = iter(loader)
        seen = lists(next(batches) for _ in range(taken))
        other = make()
        report = moved(loader, other)
        assert seen + lists(other) == right[0]
        assert lists(other) == right[1]
        assert not any("worker process" in one for one in report.lowered_by)


def test_a_loader_out_of_order_is_refused() -> None:
    loader = DataLoader(Samples(4), num_workers=1, in_order=False)
    error = told(ckptfmt.save, MemoryStore(), state_of(loader), step=1)
    assert "in_order=False" in str(error)


class Restless(torch.utils.data.Sampler[int]):
    """Draws from Python's global stream for each sample."""

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[int]:
        left = list(range(10))
        while left:
            yield left.pop(random.randrange(len(left)))


def test_a_sampler_that_draws_all_along_claims_no_t1() -> None:
    """Its order isn't a function of the streams at the begin of an epoch."""
    data = Samples(10)
    loader = DataLoader(data, batch_size=2, sampler=Restless())
    followed(loader)
    batches = iter(loader)
    next(batches)
    assert not any("all through an epoch" in one for one in _doubts(loader, data, Restless()))
    next(batches)
    assert any("all through an epoch" in one for one in _doubts(loader, data, Restless()))


def _doubts(loader: Any, data: Any, sampler: Any) -> tuple[str, ...]:
    return moved(loader, DataLoader(data, batch_size=2, sampler=sampler)).lowered_by


def test_another_number_of_worker_processes_claims_no_t1_if_the_data_set_draws() -> None:
    for noise in (False, True):
        loader = DataLoader(Samples(8, noise=noise), batch_size=2, shuffle=True)
        followed(loader)
        next(iter(loader))
        other = DataLoader(Samples(8, noise=noise), batch_size=2, shuffle=True, num_workers=1)
        reasons = moved(loader, other).lowered_by
        assert any("num_workers=" in one for one in reasons) is noise


def test_batches_taken_a_step_ahead_are_refused() -> None:
    """A loop that holds the next batch while it trains would lose that batch at a resume."""
    loader = DataLoader(Samples(30), batch_size=2)
    model = torch.nn.Linear(1, 1)
    state = ckptfmt.State(weights=model, data=loader, config={})
    with ckptfmt.Checkpointer(MemoryStore(), state) as checkpointer:
        batches = iter(loader)
        following = next(batches)

        def train() -> None:
            nonlocal following
            for _ in range(10):
                with checkpointer.training_step():
                    following = next(batches)

        error = told(train)
        assert "a step ahead" in str(error)
    assert following.tolist() == [12, 13]
