"""A step takes its share of a sampler: loops that take more or fewer batches, as people port them, are refused."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import ckptfmt
from ckptfmt.checkpointer import Checkpointer
from ckptfmt.errors import CkptError, Code
from ckptfmt.store.memory import MemoryStore
from tests.tiny import Tiny


@pytest.fixture(autouse=True)
def _no_long_farewells(monkeypatch: pytest.MonkeyPatch) -> None:
    """End worker processes that outlive their iterator after 0.2 s instead of torch's 5 s."""
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.2)


#: A data set that draws nothing.
POINTS: Any = torch.arange(100.0)

Loop = Callable[[Checkpointer, torch.utils.data.DataLoader[Any]], None]


def accumulates(checkpointer: Checkpointer, loader: Any) -> None:
    batches = iter(loader)
    for _ in checkpointer.steps(20):
        for _ in range(4):
            next(batches)


def accumulates_in_epochs(checkpointer: Checkpointer, loader: Any) -> None:
    """The iterator is made anew for each epoch of four steps, so that it never runs far ahead."""
    while checkpointer.step < 20:
        for number, _ in zip(range(16), loader, strict=False):
            if number % 4 == 3:
                with checkpointer.training_step():
                    pass


def accumulates_from_an_iterator_of_each_step(checkpointer: Checkpointer, loader: Any) -> None:
    for _ in checkpointer.steps(20):
        batches = iter(loader)
        for _ in range(4):
            next(batches)


def leaves_out_what_is_bad(checkpointer: Checkpointer, loader: Any) -> None:
    for number, _ in enumerate(loader):
        if number == 7:
            continue
        with checkpointer.training_step() as step:
            pass
        if step == 19:
            break


def trains_twice_on_each(checkpointer: Checkpointer, loader: Any) -> None:
    batches = iter(loader)
    for step in checkpointer.steps(20):
        if step % 2 == 0:
            next(batches)


def takes(count: int) -> Loop:
    def loop(checkpointer: Checkpointer, loader: Any) -> None:
        batches = iter(loader)
        for _ in checkpointer.steps(20):
            for _ in range(count):
                next(batches)

    return loop


def loader_of(sampler: ckptfmt.Sampler, num_workers: int) -> Any:
    return torch.utils.data.DataLoader(POINTS, batch_sampler=sampler, num_workers=num_workers)


def train(loop: Loop, num_workers: int = 0, **options: Any) -> Checkpointer:
    sampler = ckptfmt.Sampler(100, global_batch=8, worker=(0, 1), **options)
    state = ckptfmt.State(weights={"w": torch.zeros(2)}, data=sampler)
    with Checkpointer(MemoryStore(), state, saver="inline", every=5) as checkpointer:
        loop(checkpointer, loader_of(sampler, num_workers))
    assert (checkpointer.step, sampler.steps_done) == (20, 20)
    return checkpointer


def refused(loop: Loop, num_workers: int, **options: Any) -> str:
    with pytest.raises(CkptError) as caught:
        train(loop, num_workers, **options)
    assert caught.value.code is Code.ARGUMENT
    return str(caught.value)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    "loop", [accumulates, accumulates_in_epochs, accumulates_from_an_iterator_of_each_step]
)
def test_gradient_accumulation_without_micro_batches_is_refused_at_its_second_step(
    loop: Loop, num_workers: int
) -> None:
    """It claimed T1, and the resume trained on batches that the run had had."""
    text = refused(loop, num_workers)
    assert "step 1 took 4 batches of the sampler" in text
    assert "pass micro_batches=4 to Sampler" in text


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_remedy_of_gradient_accumulation_works(num_workers: int) -> None:
    train(takes(4), num_workers, micro_batches=4)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_batch_that_no_step_trains_on_is_refused_at_the_next_step(num_workers: int) -> None:
    text = refused(leaves_out_what_is_bad, num_workers)
    assert "step 7 took 2 batches of the sampler" in text
    assert "Sampler.skip" in text


@pytest.mark.parametrize("num_workers", [0, 2])
def test_two_steps_of_one_batch_are_refused_at_the_second(num_workers: int) -> None:
    """With worker processes, which fetch ahead, as much as without."""
    assert "step 1 took 0 batches of the sampler" in refused(trains_twice_on_each, num_workers)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_step_that_takes_one_of_four_micro_batches_is_refused(num_workers: int) -> None:
    assert "step 0 took 1 micro-batches" in refused(takes(1), num_workers, micro_batches=4)


# --- no false alarms ------------------------------------------------------------------------------


def prefetches(checkpointer: Checkpointer, loader: Any) -> None:
    """As nanoGPT does; the last step fetches nothing."""
    batches = iter(loader)
    next(batches)
    for step in checkpointer.steps(20):
        if step < 19:
            next(batches)


def prefetches_in_epochs(checkpointer: Checkpointer, loader: Any) -> None:
    """As accelerate does: one batch ahead, of an iterator for each epoch."""
    while checkpointer.step < 20:
        batches = iter(loader)
        next(batches)
        for _ in range(5):
            next(batches)
            with checkpointer.training_step():
                pass


def prefetches_in_epochs_of_one_step(checkpointer: Checkpointer, loader: Any) -> None:
    while checkpointer.step < 20:
        batches = iter(loader)
        next(batches)
        next(batches)
        with checkpointer.training_step():
            pass


def fetches_by_fives(checkpointer: Checkpointer, loader: Any) -> None:
    """Several batches at a time, which are trained on one after the other."""
    batches = iter(loader)
    some: list[Any] = []
    for _ in checkpointer.steps(20):
        some = some or [next(batches) for _ in range(5)]
        some.pop(0)


def looks_at_a_batch(checkpointer: Checkpointer, loader: Any) -> None:
    """At a batch of an iterator of its own: before the training, and now and then."""
    next(iter(loader))
    batches = iter(loader)
    for step in checkpointer.steps(20):
        next(batches)
        if step % 3 == 0:
            next(iter(loader))


def makes_an_iterator_for_each_step(checkpointer: Checkpointer, loader: Any) -> None:
    for _ in checkpointer.steps(20):
        next(iter(loader))


def fetches_in_a_thread(checkpointer: Checkpointer, loader: Any) -> None:
    """Through a queue that another thread fills."""
    filled: queue.Queue[Any] = queue.Queue(maxsize=6)
    is_over = threading.Event()

    def fill() -> None:
        for batch in loader:
            while not is_over.is_set():
                try:
                    filled.put(batch, timeout=0.1)
                    break
                except queue.Full:
                    continue
            if is_over.is_set():
                return

    thread = threading.Thread(target=fill)
    thread.start()
    try:
        for _ in checkpointer.steps(20):
            filled.get()
    finally:
        is_over.set()
        thread.join()


def takes_outside_of_the_step(checkpointer: Checkpointer, loader: Any) -> None:
    for _ in loader:
        with checkpointer.training_step() as step:
            pass
        if step == 19:
            break


def counts_by_tens(checkpointer: Checkpointer, loader: Any) -> None:
    for number, _ in zip(range(1, 21), loader, strict=False):
        if number % 10 == 0:
            checkpointer.end_step(number)


RIGHT = [
    prefetches,
    prefetches_in_epochs,
    prefetches_in_epochs_of_one_step,
    fetches_by_fives,
    looks_at_a_batch,
    makes_an_iterator_for_each_step,
    fetches_in_a_thread,
    takes_outside_of_the_step,
    counts_by_tens,
]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("loop", RIGHT)
def test_loops_that_take_their_share_are_not_refused(loop: Loop, num_workers: int) -> None:
    assert train(loop, num_workers).reports == ()


def test_a_loader_that_keeps_its_worker_processes_primes_them_for_each_iterator() -> None:
    sampler = ckptfmt.Sampler(100, global_batch=8, worker=(0, 1))
    loader: Any = torch.utils.data.DataLoader(
        POINTS, batch_sampler=sampler, num_workers=2, persistent_workers=True, prefetch_factor=3
    )
    with Checkpointer(MemoryStore(), ckptfmt.State(data=sampler), saver="inline") as checkpointer:
        prefetches_in_epochs(checkpointer, loader)


# --- what was in hand when the streams came back --------------------------------------------------


def forward_before_the_step(
    checkpointer: Checkpointer, run: Tiny, batches: Iterator[torch.Tensor]
) -> None:
    for batch in batches:
        loss = run.net(batch).square().mean()
        with checkpointer.training_step() as step:
            run.optimizer.zero_grad()
            loss.backward()
            run.optimizer.step()
        run.losses[step] = float(loss.detach()).hex()
        if step == 11:
            break


def batch_before_the_step(
    checkpointer: Checkpointer, run: Tiny, batches: Iterator[torch.Tensor]
) -> None:
    for batch in batches:
        with checkpointer.training_step() as step:
            run.train(step, batch)
        if step == 11:
            break


def batch_before_the_loop(
    checkpointer: Checkpointer, run: Tiny, batches: Iterator[torch.Tensor]
) -> None:
    batch = next(batches)
    for step in checkpointer.steps(12):
        run.train(step, batch)
        batch = next(batches)


def all_within(checkpointer: Checkpointer, run: Tiny, batches: Iterator[torch.Tensor]) -> None:
    """A batch is looked at before, by an iterator of its own, and a forward pass made of it."""
    run.net(next(run.batches()))
    for step in checkpointer.steps(12):
        run.train(step, next(batches))


class Exact(torch.utils.data.Dataset[Any]):
    """Samples that draw nothing."""

    def __len__(self) -> int:
        return 37

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.arange(4, dtype=torch.float32) + index


IN_HAND = [
    (forward_before_the_step, True, False, False),
    (forward_before_the_step, False, False, False),
    (forward_before_the_step, True, True, True),
    (batch_before_the_step, True, False, False),
    (batch_before_the_step, False, False, True),
    (batch_before_the_step, True, True, True),
    (batch_before_the_loop, True, False, False),
    (batch_before_the_loop, False, False, True),
    (all_within, True, False, True),
    (all_within, False, False, True),
]


@pytest.mark.parametrize(("loop", "draws", "has_restored", "is_same"), IN_HAND)
def test_a_first_batch_drawn_with_other_streams_claims_no_t1(
    loop: Any, *, draws: bool, has_restored: bool, is_same: bool
) -> None:
    """A forward pass outside of `training_step`, or a transform that draws: the resume claimed T1 in another run."""

    def start(store: Any, number: int, stop: int = 99) -> tuple[Tiny, Checkpointer]:
        run = Tiny(number)
        if not draws:
            run.loader = torch.utils.data.DataLoader(Exact(), batch_sampler=run.sampler)
        with Checkpointer(store, run.state, saver="inline", every=5) as checkpointer:
            if stop < 12:
                run.optimizer.register_step_post_hook(lambda *_: _stop_at(run, stop))
            batches = run.batches()
            if has_restored:
                checkpointer.restore_rng()
            with contextlib.suppress(KeyboardInterrupt):
                loop(checkpointer, run, batches)
        return run, checkpointer

    undisturbed, _ = start(MemoryStore(), 0)
    store = MemoryStore()
    start(store, 0, 7)
    second, checkpointer = start(store, 1)
    report = checkpointer.load_report
    assert report is not None
    assert min(second.losses) == 5
    same = all(second.losses[step] == undisturbed.losses[step] for step in range(5, 12))
    assert same is is_same
    assert (report.claim == "T1") is same
    assert (
        any("before the RNG streams were put back" in reason for reason in report.lowered_by)
        is not same
    )


def _stop_at(run: Tiny, updates: int) -> None:
    run.updates = getattr(run, "updates", 0) + 1  # type: ignore[attr-defined]
    if run.updates == updates:  # type: ignore[attr-defined]
        raise KeyboardInterrupt
