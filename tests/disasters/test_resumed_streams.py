"""Disasters of random numbers, orders of samples and schedules: a resumed run goes on where it was."""

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch

import ckptfmt
from ckptfmt.checkpointer import Checkpointer
from ckptfmt.store.memory import MemoryStore
from tests.builders import code_of
from tests.interface.test_group import Allgather, run_writers
from tests.tiny import Tiny, seed

INLINE = ckptfmt.Saving(saver="inline")


def train(store, total, *, start, between=lambda: None, within=lambda: None):
    """Train up to a step, as a launch with random numbers of its own; return the losses.

    Args:
        between: called between the load and the first step.
        within: called in the first step.
    """
    tiny = Tiny(start)
    with Checkpointer(store, tiny.state, saving=INLINE) as checkpointer:
        between()
        batches = tiny.batches()
        first = checkpointer.step
        for step in checkpointer.steps(total):
            if step == first:
                within()
            tiny.train(step, next(batches))
    return tiny.losses


@pytest.fixture(scope="module")
def interrupted():
    """Return the files of a run that stopped after step 6, and the losses of the undisturbed run."""
    store = MemoryStore()
    train(store, 6, start=0)
    return store.snapshot(), train(MemoryStore(), 10, start=0)


def resumed(interrupted, **disturbances):
    """Return whether a resume has the losses of the undisturbed run."""
    files, expected = interrupted
    losses = train(MemoryStore.from_snapshot(files), 10, start=1, **disturbances)
    assert list(losses) == [6, 7, 8, 9]
    return losses == {step: expected[step] for step in losses}


def test_megatron_bridge_5257_no_draw_more_and_no_draw_less(interrupted):
    """A resumed run differed by a single random number, which the loader drew for its workers
    (Megatron-Bridge#5257).

    Loss by loss, the resumed run is the undisturbed run, although its loader draws as well.
    """
    assert resumed(interrupted)
    assert not resumed(interrupted, within=lambda: torch.empty((), dtype=torch.int64).random_())


def test_ms_swift_9935_a_later_seed_does_not_overwrite_restored_streams(interrupted):
    """The restored random numbers were overwritten by a seed that was set later, as the iterator
    began (ms-swift#9935).

    The streams are put back as the first step begins, after everything that seeds or draws before.
    """
    assert resumed(interrupted, between=lambda: seed(9935))
    assert not resumed(interrupted, within=lambda: seed(9935))


def test_accelerate_4283_and_3960_random_numbers_that_cannot_be_restored_are_an_error(tmp_path):
    """A failure to restore random numbers was logged as a remark, and the training went on with
    others (accelerate#4283, #3960).

    A damaged or missing stream is an error; a load that allows the difference claims less and
    names the stream.
    """
    own = random.Random(1)
    ckptfmt.save(tmp_path / "with", ckptfmt.State(rng={"own": own}), step=1)
    ckptfmt.save(tmp_path / "without", ckptfmt.State(data={"n": 1}), step=1)
    state = ckptfmt.State(data={"n": 0}, rng={"own": own})
    before = own.getstate()
    assert code_of(lambda: ckptfmt.load(tmp_path / "without", state)) == "STREAM_MISSING"
    report = ckptfmt.load(tmp_path / "without", state, allow=("streams",))
    assert own.getstate() == before
    assert report.claim != "T1"
    assert any("own" in reason for reason in report.lowered_by)

    (part,) = (tmp_path / "with" / "parts").iterdir()
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    state = ckptfmt.State(rng={"own": random.Random(2)})
    assert code_of(lambda: ckptfmt.load(tmp_path / "with", state)) == "DOC_DIGEST"


def test_megatron_lm_6858_each_process_gets_its_own_random_numbers(tmp_path):
    """Only one process of each group wrote its random numbers: after a resume the numbers of 252
    of 256 processes were wrong (Megatron-LM#6858).

    Each process saves its streams, and gets its own back.
    """
    count = 4
    streams = [np.random.Generator(np.random.PCG64(worker)) for worker in range(count)]
    gathers = [Allgather(count).of for _ in range(2)]

    def save(worker):
        state = ckptfmt.State(rng={"experts": streams[worker]})
        group: Any = {"writer": (worker, count), "agree": gathers[0](worker)}
        return ckptfmt.save(tmp_path / "c", state, step=1, **group)

    def load(worker):
        mine = np.random.Generator(np.random.PCG64(100 + worker))
        state = ckptfmt.State(rng={"experts": mine})
        group: Any = {"writer": (worker, count), "agree": gathers[1](worker)}
        ckptfmt.load(tmp_path / "c", state, **group)
        return mine.random(3).tolist()

    run_writers(count, save)
    found = run_writers(count, load)
    assert found == [stream.random(3).tolist() for stream in streams]
    assert len({tuple(draws) for draws in found}) == count


def test_transformers_39215_and_accelerate_4195_a_resume_does_not_replay_the_first_epoch():
    """A resume within a later epoch replayed the order of the first epoch, or drew another one,
    and nothing said so (transformers#39215, accelerate#4195).

    A plain shuffled loader goes on within the epoch, with the samples that are left.
    """
    count, batch = 20, 4

    def go(store, stop):
        seed(39215)
        seen: list[list[int]] = []
        numbers: Any = range(count)
        loader: Any = torch.utils.data.DataLoader(numbers, batch_size=batch, shuffle=True)
        state = ckptfmt.State(weights={"w": torch.zeros(1)}, data=loader)
        with Checkpointer(store, state, every=1, saving=INLINE) as checkpointer:
            for _ in checkpointer.epochs(3):
                for samples in loader:
                    if len(seen) == stop:
                        raise KeyboardInterrupt
                    seen.append(samples.tolist())
        return seen

    def killed(store, stop):
        with pytest.raises(KeyboardInterrupt):
            go(store, stop)

    whole = go(MemoryStore(), None)
    epochs = [list(itertools.chain(*whole[first : first + 5])) for first in (0, 5, 10)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(count))] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3  # a replay would be seen

    store = MemoryStore()
    killed(store, 8)
    rest = go(store, None)
    assert len(rest) in (7, 8)
    assert rest == whole[-len(rest) :]


def test_torchtitan_816_and_megatron_bridge_5637_fewer_processes_skip_no_sample(tmp_path):
    """A run of four data-parallel processes went on with two, and the positions of the other two
    were dropped in silence (torchtitan#816, Megatron-Bridge#5637).

    One position counts for all processes: on any number of processes each sample comes once.
    """
    size, batch = 48, 8

    def make(worker, count):
        return ckptfmt.Sampler(size, global_batch=batch, seed=816, worker=(worker, count))

    def steps(samplers, begin, end):
        return [[number for one in samplers for number in one.indices(step)]
                for step in range(begin, end)]  # fmt: skip

    four = [make(worker, 4) for worker in range(4)]
    expected = steps(four, 0, 6)
    for sampler in four:
        sampler.advance(3)
    gather = Allgather(4).of
    run_writers(
        4,
        lambda worker: ckptfmt.save(
            tmp_path / "c",
            ckptfmt.State(data=four[worker], rng=False),
            step=3,
            writer=(worker, 4),
            agree=gather(worker),
        ),
    )
    two = [make(worker, 2) for worker in range(2)]
    gather = Allgather(2).of
    run_writers(
        2,
        lambda worker: ckptfmt.load(
            tmp_path / "c",
            ckptfmt.State(data=two[worker], rng=False),
            writer=(worker, 2),
            agree=gather(worker),
        ),
    )
    assert [sampler.steps_done for sampler in two] == [3, 3]
    rest = steps(two, 3, 6)
    assert [sorted(step) for step in rest] == [sorted(step) for step in expected[3:]]
    seen = [number for step in expected[:3] + rest for number in step]
    assert sorted(seen) == list(range(size))


def test_accelerate_3938_and_torchft_309_a_batch_counts_when_it_was_trained_on():
    """The position in the data counted batches that were fetched ahead, and a resume skipped or
    repeated a batch (accelerate#3938, torchft#309).

    Batches count at the end of their step, however many are fetched ahead.
    """

    def go(store, stop, ahead):
        sampler = ckptfmt.Sampler(40, global_batch=4, seed=3938, worker=(0, 1))
        trained = []
        state = ckptfmt.State(weights={"w": np.zeros(1)}, data=sampler)
        with Checkpointer(store, state, every=1, saving=INLINE) as checkpointer:
            batches = iter(sampler)
            queue: list[Any] = []
            for _ in checkpointer.steps(stop):
                while len(queue) <= ahead:
                    queue.append(next(batches))
                trained.append(queue.pop(0))
        return trained

    whole = go(MemoryStore(), 10, 0)
    store = MemoryStore()
    assert go(store, 4, 3) + go(store, 10, 2) == whole


def test_nemo_rl_3599_no_prompt_under_way_is_lost():
    """A position in the data skipped prompts that were under way at the save, most of them the
    long ones (NeMo-RL#3599).

    Prompts count one by one: a prompt that was issued and not trained comes again after a resume.
    """

    store, count = MemoryStore(), 24

    def begin():
        sampler = ckptfmt.Sampler(count, global_batch=4, seed=3, worker=(0, 1), pipeline=True)
        return sampler, Checkpointer(store, ckptfmt.State(data=sampler), saving=INLINE)

    sampler, checkpointer = begin()
    with checkpointer:
        for _ in checkpointer.steps(1):
            tickets = sampler.issue(10)
            trained = [tickets[at] for at in (9, 3, 5)]  # the short answers, out of order
            sampler.consume(trained)
            sampler.discard([tickets[7]])
    over = {one.position for one in [*trained, tickets[7]]}

    sampler, checkpointer = begin()
    with checkpointer:
        rest = sampler.issue(count - 4)
        under_way = [one.position for one in tickets if one.position not in over]
        assert [one.position for one in rest[:6]] == under_way
    samples = [one.sample for one in [*trained, tickets[7], *rest]]
    assert sorted(samples) == list(range(count))


def test_pytorch_162591_and_torch_points3d_630_the_learning_rate_goes_on():
    """A chain of schedules, or the constructor of a schedule, set another learning rate at a
    resume (pytorch#162591, torch-points3d#630).

    The learning rates of the resumed run are those of the undisturbed run.
    """
    schedules = torch.optim.lr_scheduler

    def go(store, stop):
        weight = torch.nn.Parameter(torch.ones(1))
        weight.grad = torch.ones(1)
        optimizer = torch.optim.SGD([weight], lr=0.5)
        warmup = schedules.LinearLR(optimizer, start_factor=0.25, total_iters=4)
        decay = schedules.CosineAnnealingLR(optimizer, T_max=8)
        scheduler = schedules.SequentialLR(optimizer, [warmup, decay], milestones=[4])
        state = ckptfmt.State(
            weights={"w": weight}, optimizer=optimizer, extra={"scheduler": scheduler}
        )
        rates = []
        with Checkpointer(store, state, saving=INLINE) as checkpointer:
            for _ in checkpointer.steps(stop):
                rates.append(optimizer.param_groups[0]["lr"])
                optimizer.step()
                scheduler.step()
        return rates, weight.item()

    whole, weight = go(MemoryStore(), 12)
    assert len(set(whole)) > 8
    for stop in (3, 4, 7):
        store = MemoryStore()
        first, _ = go(store, stop)
        rest, found = go(store, 12)
        assert (first + rest, found) == (whole, weight)
