"""Tensors made of several: refused until registered, then filled in place."""

import pytest
import torch
from torch import nn

from ckptfmt.adapters.placing import load_trees
from ckptfmt.adapters.torch import tensors
from ckptfmt.errors import StateError
from ckptfmt.state import State
from tests.adapters.double import load, save


class Pair(torch.Tensor):
    """Codes with a scale, as quantised optimizer states are."""

    @staticmethod
    def __new__(cls, codes, scale):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self):
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, _context, _size, _stride):
        return cls(**inner)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale)
        raise NotImplementedError(func)


def pair(value):
    return Pair(torch.full((3,), value, dtype=torch.int8), torch.tensor(float(value)))


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setattr(tensors, "_REGISTERED", set())
    tensors.register_flatten(Pair)


def test_an_unregistered_class_is_refused_by_name_at_save_and_load(monkeypatch):
    monkeypatch.setattr(tensors, "_REGISTERED", set())
    with pytest.raises(StateError, match=r"STATE_UNSUPPORTED.*Pair.*register_flatten"):
        save(State(weights={"x": pair(1)}))
    plain = save(State(weights={"x": torch.zeros(3)}))
    with pytest.raises(StateError, match=r"STATE_UNSUPPORTED.*Pair"):
        load(State(weights={"x": pair(1)}), plain)


def test_a_class_without_the_protocol_cannot_be_registered():
    with pytest.raises(StateError, match="ARGUMENT"):
        tensors.register_flatten(torch.Tensor)


@pytest.mark.usefixtures("registered")
def test_in_a_tree():
    live, other = {"x": pair(3)}, {"x": pair(0)}
    inner = other["x"].codes

    checkpoint = save(State(weights=live))
    load(State(weights=other), checkpoint)

    assert other["x"].codes is inner
    assert inner.tolist() == [3, 3, 3]
    assert float(other["x"].scale) == 3.0
    assert sorted(load_trees(checkpoint)["weights"]["x"]) == ["ckptfmt.flattened", "codes", "scale"]
    with pytest.raises(StateError, match=r"STATE_UNSUPPORTED.*in place"):
        load(State(weights={}), checkpoint)


@pytest.mark.usefixtures("registered")
def test_in_an_optimizer():
    def make(value):
        net = nn.Linear(3, 1, bias=False)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        if value is not None:
            optimizer.state[net.weight]["momentum_buffer"] = pair(value)
        return net, optimizer

    net, optimizer = make(3)
    checkpoint = save(State(weights=net, optimizer=optimizer))
    other, again = make(0)
    load(State(weights=other, optimizer=again), checkpoint)
    fresh_net, fresh = make(None)

    assert again.state[other.weight]["momentum_buffer"].codes.tolist() == [3, 3, 3]
    with pytest.raises(StateError, match=r"STATE_UNSUPPORTED.*one step"):
        load(State(weights=fresh_net, optimizer=fresh), checkpoint)


@pytest.mark.usefixtures("registered")
def test_as_a_parameter():
    live, other = (nn.ParameterDict({"w": nn.Parameter(pair(value), requires_grad=False)}) for value in (3, 0))

    load(State(weights=other), save(State(weights=live)))

    assert other["w"].codes.tolist() == [3, 3, 3]
