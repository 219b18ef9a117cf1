"""Negative controls: leave any one thing out of a restore, and the comparison of the demo fails.

One process, inside this one: what is left out doesn't depend on how many there are.
"""

import dataclasses
import itertools
import random
import shutil

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from ckptfmt.data.sampler import Sampler  # noqa: E402
from ckptfmt.documents.manifest import checkpoint_name  # noqa: E402
from ckptfmt_conformance.elastic import Plan, Trainer  # noqa: E402
from ckptfmt_tools.demo.journal import compare, journal_path, read_journal  # noqa: E402
from ckptfmt_tools.demo.judge import digest_state  # noqa: E402
from ckptfmt_tools.demo.settings import ITEMS, make_settings  # noqa: E402
from ckptfmt_tools.demo.train import make_scheduler, train  # noqa: E402

SETTINGS = dataclasses.replace(
    make_settings(steps=12, quick=True), width=32, context=32, text_nbytes=24 << 10
)
RESUMED = 6

# What the first divergence is to name for each item.
NAMED = {
    "python": "the random-number stream python",
    "numpy": "the random-number stream numpy",
    "torch.cpu": "the random-number stream torch.cpu",
    "optimizer.step": "the optimizer's step",
    "optimizer.exp_avg": "the optimizer's exp_avg",
    "optimizer.exp_avg_sq": "the optimizer's exp_avg_sq",
    "scheduler": "the scheduler (learning rate)",
    "cursor": "the data cursor",
    "buffer": "the buffer byte_counts",
    "trainer": "the trainer",
}


@pytest.fixture(autouse=True)
def own_streams():
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    yield
    random.setstate(before[0])
    np.random.set_state(before[1])  # noqa: NPY002
    torch.set_rng_state(before[2])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    directory = tmp_path_factory.mktemp("undisturbed")
    train(SETTINGS, str(directory / "run"), directory / "journals", "undisturbed")
    return directory


def entries_of(directory, name):
    return read_journal(journal_path(directory / "journals", name, 0)).entries


def compare_resumed(undisturbed, directory, **options):
    """Resume a copy of the run, and compare the steps from there on."""
    shutil.copytree(undisturbed / "run", directory / "run")
    resume = checkpoint_name(RESUMED, 1)
    train(
        SETTINGS,
        str(directory / "run"),
        directory / "journals",
        "resumed",
        resume=resume,
        **options,
    )
    reference, candidate = entries_of(undisturbed, "undisturbed"), entries_of(directory, "resumed")
    return compare([reference], [candidate], first=RESUMED, steps=SETTINGS.steps)


def test_every_item_has_its_control():
    assert NAMED.keys() == set(ITEMS)


def test_with_nothing_left_out_all_is_identical(undisturbed, tmp_path):
    same = compare_resumed(undisturbed, tmp_path)

    assert same.identical, same.explain()
    assert same.identical_steps() == SETTINGS.steps - RESUMED


@pytest.mark.parametrize("item", ITEMS)
def test_with_one_thing_left_out_the_comparison_fails(undisturbed, tmp_path, item):
    same = compare_resumed(undisturbed, tmp_path, without=item)

    assert not same.identical
    assert f"after step {RESUMED}," in same.explain()
    assert same.explain().endswith(f"most likely not restored: {NAMED[item]}")


@pytest.mark.parametrize("item", ITEMS)
def test_what_is_left_out_changes_what_is_learnt(undisturbed, tmp_path, item):
    """Not only its own digest: the demo really trains with each thing that it restores."""
    same = compare_resumed(undisturbed, tmp_path, without=item)

    last = {one.name for one in same.differences if one.step == SETTINGS.steps}
    assert {name for name in last if name.startswith("parameter/")}


def test_the_run_exercises_what_it_restores(undisturbed):
    entries = entries_of(undisturbed, "undisturbed")
    changing = [name for name in entries[1].digests if not name.startswith("schedule/group")]

    for before, after in itertools.pairwise(entries[1:]):
        still = [name for name in changing if before.digests[name] == after.digests[name]]
        assert not still, f"step {after.step} leaves {still} as it was"


def test_the_run_goes_through_its_data_more_than_once(undisturbed):
    header = read_journal(journal_path(undisturbed / "journals", "undisturbed", 0)).header
    assert header is not None
    resumed, done = RESUMED * SETTINGS.global_batch, SETTINGS.steps * SETTINGS.global_batch

    assert resumed < header.sample_count < done


# The digests


@pytest.fixture
def objects():
    model = torch.nn.Linear(2, 2)
    model.register_buffer("counts", torch.zeros(2, dtype=torch.int64))
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = make_scheduler(optimizer, SETTINGS)
    trainer = Trainer(
        model,
        optimizer,
        Plan(workers=1, microbatch=2),
        lambda model, _: (model(torch.ones(2)).sum(), 2),
    )
    trainer.step()
    scheduler.step()
    return model, optimizer, scheduler, Sampler(8, global_batch=2), trainer


def bit_flipped(tensor):
    content = tensor.data.reshape(-1).view(torch.uint8)
    content[0] ^= 1


def tensors_of(objects):
    model, optimizer, *_ = objects
    yield from model.parameters()
    yield from model.buffers()
    for state in optimizer.state.values():
        yield from state.values()


def test_a_bit_flipped_in_any_tensor_changes_one_digest(objects):
    before = digest_state(*objects)
    for tensor in tensors_of(objects):
        bit_flipped(tensor)
        after = digest_state(*objects)
        assert len({name for name in before if before[name] != after[name]}) == 1
        bit_flipped(tensor)
    assert digest_state(*objects) == before


def test_a_zero_that_changes_its_sign_changes_the_digest(objects):
    weight = objects[0].weight
    weight.data[0, 0] = 0.0
    before = digest_state(*objects)
    weight.data[0, 0] = -0.0

    assert digest_state(*objects)["parameter/weight"] != before["parameter/weight"]


@pytest.mark.parametrize(
    ("draw", "name"),
    [
        (random.random, "rng/python"),
        (np.random.random, "rng/numpy"),
        (lambda: torch.rand(1), "rng/torch.cpu"),
    ],
    ids=["python", "numpy", "torch"],
)
def test_one_number_drawn_changes_one_stream(objects, draw, name):
    before = digest_state(*objects)
    draw()
    after = digest_state(*objects)

    assert {other for other in before if before[other] != after[other]} == {name}


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda objects: objects[1].param_groups[0].update(lr=1.0), "schedule/group 0"),
        (lambda objects: vars(objects[2]).update(last_epoch=9), "schedule/scheduler"),
        (lambda objects: objects[3].advance(), "cursor/data"),
        (lambda objects: vars(objects[4]).update(steps_done=2), "trainer/state"),
        (lambda objects: objects[4].window.push((torch.zeros(1), torch.zeros(1))), "trainer/state"),
    ],
    ids=["learning rate", "scheduler", "cursor", "trainer", "sums under way"],
)
def test_options_scheduler_cursor_and_trainer_have_a_digest_each(objects, change, name):
    before = digest_state(*objects)
    change(objects)
    after = digest_state(*objects)

    assert {other for other in before if before[other] != after[other]} == {name}
