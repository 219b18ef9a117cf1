"""More tensors in one process than one tree has room for, and values that grow towards its limits."""

import hashlib

import numpy as np
import pytest
import torch

import ckptfmt
from ckptfmt import limits


def test_what_writers_hold_is_no_tree_whose_items_are_limited(tmp_path, monkeypatch):
    """Each tensor was 13 to 17 values of one tree: 1,000,000 of them were reached at 59,000 tensors."""
    monkeypatch.setattr(limits, "TREE_ITEMS", 5000)
    experts = {f"experts.{number}.w": np.array([number], np.int32) for number in range(600)}
    ckptfmt.save(tmp_path, ckptfmt.State(weights=experts), step=1)
    live = {name: np.zeros(1, np.int32) for name in experts}
    ckptfmt.load(tmp_path, ckptfmt.State(weights=live))
    assert np.array_equal(np.concatenate(list(live.values())), np.arange(600))


def test_a_value_that_grows_towards_a_limit_is_reported_once_and_before(tmp_path, monkeypatch):
    """A list that got too long ended a training in its midst, without a word before."""
    monkeypatch.setattr(limits, "TREE_ITEMS", 2000)
    history: list[object] = []
    state = ckptfmt.State(extra={"history": history})
    with ckptfmt.Checkpointer(tmp_path, state, every=1, saver="inline") as checkpointer:
        for _ in checkpointer.steps(3):
            history += [None] * 400
        reports = [report for report in checkpointer.reports if report.startswith("LIMIT_NEAR")]
    assert len(reports) == 1
    assert "history" in reports[0]


def _training(count: int, seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a model and its AdamW after a step: `count` tensors in all, four for each parameter."""
    torch.manual_seed(seed)
    # In lists of 100: torch takes a time that is quadratic in their length.
    model = torch.nn.ModuleList(
        torch.nn.ParameterList(torch.randn(3) for _ in range(100)) for _ in range(count // 400)
    )
    optimizer = torch.optim.AdamW(model.parameters())
    _step(model, optimizer)
    return model, optimizer


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = parameter.detach() * 0.5
    optimizer.step()


def _contents(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[bytes]:
    states = [optimizer.state[parameter] for parameter in model.parameters()]
    rows = [
        list(model.parameters()),
        *([state[key] for state in states] for key in ("exp_avg", "exp_avg_sq", "step")),
    ]
    # Digests: what differs isn't printed bit by bit.
    return [
        hashlib.sha256(torch.stack([one.detach() for one in row]).numpy().tobytes()).digest()
        for row in rows
    ]


@pytest.mark.slow
@pytest.mark.parametrize("count", [3000, pytest.param(30_000, marks=pytest.mark.exhaustive)])
def test_a_state_of_thousands_of_tensors_is_resumed_bit_for_bit(tmp_path, count):
    """A mixture of experts has 30,000, and more: saved twice by a process beside the training, the second time by
    way of what the guard had learned of each of them."""
    model, optimizer = _training(count, seed=1)
    with ckptfmt.Checkpointer(
        tmp_path, ckptfmt.State(weights=model, optimizer=optimizer), every=1
    ) as checkpointer:
        for _ in checkpointer.steps(2):
            _step(model, optimizer)
    live = _training(count, seed=2)
    assert _contents(*live) != _contents(model, optimizer)
    with ckptfmt.Checkpointer(
        tmp_path, ckptfmt.State(weights=live[0], optimizer=live[1])
    ) as checkpointer:
        assert checkpointer.step == 2
    assert _contents(*live) == _contents(model, optimizer)
