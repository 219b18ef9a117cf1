"""The state that is saved is a real one, of the size that was asked for."""

import time

import pytest
import torch

from benchmarks.state import Trainer, plan_width


@pytest.fixture(scope="module")
def trainer():
    threads = torch.get_num_threads()
    yield Trainer(1_000_000, threads=1)
    torch.set_num_threads(threads)


def test_the_default_is_the_state_that_goals_are_about():
    assert 66 * 3 * 4 * plan_width(1_600_000_000) ** 2 == pytest.approx(1.6e9, rel=0.01)


def test_weights_and_moments_and_step_counts_are_there(trainer):
    workload = trainer.describe()

    assert (workload["tensors"], workload["step_counts"]) == (198, 66)
    assert workload["nbytes"] == sum(tensor.nbytes for tensor in trainer.tensors().values())
    assert workload["nbytes"] == pytest.approx(1_000_000, rel=0.2)


def test_a_step_changes_all_of_it(trainer):
    before = {name: tensor.clone() for name, tensor in trainer.tensors().items()}

    trainer.step()

    assert not [
        name for name, tensor in trainer.tensors().items() if torch.equal(tensor, before[name])
    ]


def test_what_waits_before_the_update_is_told_apart_from_it(trainer):
    hook = trainer.optimizer.register_step_pre_hook(lambda *_: time.sleep(0.2))
    trainer.watch_last()
    times = trainer.step()
    hook.remove()

    assert 0.2 <= times.guard_s < 0.2 + times.update_s + 1
    assert trainer.step().guard_s < 0.1
