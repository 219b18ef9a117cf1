"""What the demo's trainer asks for: which stream decides what, and whose samples are whose."""

import dataclasses
import random

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from ckptfmt.data.sampler import Sampler  # noqa: E402
from ckptfmt_tools.demo.settings import make_settings  # noqa: E402
from ckptfmt_tools.demo.task import (  # noqa: E402
    Augmentation,
    Task,
    TinyGPT,
    draw_augmentation,
    make_batch,
    read_text,
)

SETTINGS = dataclasses.replace(make_settings(quick=True), width=32, context=32, text_nbytes=8 << 10)
TEXT = read_text(text_nbytes=SETTINGS.text_nbytes, chunk_nbytes=SETTINGS.chunk_nbytes)


@pytest.fixture(autouse=True)
def own_streams():
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    seed_all(1)
    yield
    random.setstate(before[0])
    np.random.set_state(before[1])  # noqa: NPY002
    torch.set_rng_state(before[2])


def seed_all(seed):
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)


def numpy_state():
    state = np.random.get_state(legacy=False)["state"]  # noqa: NPY002
    return state["key"].tolist(), state["pos"]


@pytest.mark.parametrize(
    ("seed", "decided"),
    [(random.seed, "begin"), (np.random.seed, "masked"), (torch.manual_seed, "dropout")],
    ids=["python", "numpy", "torch"],
)
def test_each_stream_decides_one_thing_of_every_step(seed, decided):
    expected = [dataclasses.asdict(draw_augmentation(SETTINGS)) for _ in range(5)]
    seed_all(1)
    seed(2)
    found = [dataclasses.asdict(draw_augmentation(SETTINGS)) for _ in range(5)]

    for ours, theirs in zip(expected, found, strict=True):
        assert {name for name in ours if ours[name] != theirs[name]} == {decided}


def test_what_a_step_draws_stays_within_bounds():
    drawn = [draw_augmentation(SETTINGS) for _ in range(200)]

    assert {one.begin for one in drawn} <= set(range(SETTINGS.chunk_nbytes - SETTINGS.context))
    assert all(0 <= one.masked < SETTINGS.masked for one in drawn)
    assert all(0 <= one.dropout < SETTINGS.dropout for one in drawn)


def test_a_window_is_its_sample_s_bytes_and_its_targets_the_next_ones():
    augmentation = Augmentation(begin=7, masked=0.0, dropout=0.0)
    tokens, targets = make_batch(TEXT, [3, 0], augmentation, SETTINGS)

    for row, sample in enumerate((3, 0)):
        window = list(TEXT.chunk(sample)[7 : 7 + SETTINGS.context + 1])
        assert tokens[row].tolist() == window[:-1]
        assert targets[row].tolist() == window[1:]


def test_noise_is_drawn_anew_for_each_microbatch_and_leaves_numpy_s_stream_alone():
    augmentation = Augmentation(begin=0, masked=0.5, dropout=0.0)
    before = numpy_state()
    first, second = (make_batch(TEXT, [0], augmentation, SETTINGS) for _ in range(2))

    assert not torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    assert numpy_state() == before


def test_positions_of_any_step_are_taken_in_the_order_of_the_data():
    model = TinyGPT(SETTINGS)
    sampler = Sampler(TEXT, global_batch=SETTINGS.global_batch, seed=SETTINGS.seed, worker=(0, 1))
    task = Task(model, TEXT, sampler, SETTINGS)
    for step in range(2):
        task.begin_step()
        begin = step * SETTINGS.global_batch
        for part in (range(begin, begin + 5), range(begin + 5, begin + SETTINGS.global_batch)):
            _, count = task.loss_of(model, part)
            assert count == len(part) * SETTINGS.context
        assert task.taken == sampler.indices(step)

    assert model.byte_counts.sum() == 2 * SETTINGS.global_batch * SETTINGS.context
