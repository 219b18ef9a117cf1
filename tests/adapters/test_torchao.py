"""Torchao's low-bit optimizers come back with all bits, before their first step too."""

import warnings

import pytest
import torch

import ckptfmt
from ckptfmt.adapters.torch import register_flatten, tensors

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(
    ("optimizer", "of_state"),
    [
        ("AdamW8bit", "subclass_8bit.OptimState8bit"),
        ("AdamW4bit", "subclass_4bit.OptimState4bit"),
        ("AdamWFp8", "subclass_fp8.OptimStateFp8"),
    ],
)
def test_a_training_goes_on_from_a_fresh_optimizer(optimizer, of_state, tmp_path, monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optim = pytest.importorskip("torchao.optim")
    module, _, name = of_state.partition(".")
    monkeypatch.setattr(tensors, "_REGISTERED", set())
    kind = getattr(getattr(optim, module), name)
    register_flatten(kind)

    def make():
        torch.manual_seed(0)
        net = torch.nn.Linear(256, 256)
        return net, getattr(optim, optimizer)(net.parameters(), lr=1e-3)

    def train(net, live, steps):
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            net(torch.randn(4, 256, generator=generator)).square().mean().backward()
            live.step()
            live.zero_grad()

    with torch.compiler.set_stance("force_eager"):
        net, live = make()
        train(net, live, range(3))
        ckptfmt.save(tmp_path / "c", ckptfmt.State(weights=net, optimizer=live), step=3)
        train(net, live, range(3, 6))
        other, fresh = make()
        ckptfmt.load(tmp_path / "c", ckptfmt.State(weights=other, optimizer=fresh))
        assert type(fresh.state[other.weight]["exp_avg"]) is kind
        train(other, fresh, range(3, 6))

    assert torch.equal(other.weight, net.weight)
    for key in ("exp_avg", "exp_avg_sq"):
        ours, theirs = (each[key] for each in (fresh.state[other.weight], live.state[net.weight]))
        for attribute in theirs.__tensor_flatten__()[0]:
            assert torch.equal(
                getattr(ours, attribute).view(torch.uint8),
                getattr(theirs, attribute).view(torch.uint8),
            )
