"""Tensors made of several: refused until registered, then filled in place."""

from typing import Any

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
        return torch.Tensor._make_wrapper_subclass(
            cls, codes.shape, dtype=torch.float32, device=codes.device
        )

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
    fresh: dict[str, Any] = {}
    load(State(weights=fresh), checkpoint)
    assert type(fresh["x"]) is Pair
    assert (fresh["x"].codes.tolist(), float(fresh["x"].scale)) == ([3, 3, 3], 3.0)


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
    load(State(weights=fresh_net, optimizer=fresh), checkpoint)

    assert again.state[other.weight]["momentum_buffer"].codes.tolist() == [3, 3, 3]
    assert type(fresh.state[fresh_net.weight]["momentum_buffer"]) is Pair
    assert fresh.state[fresh_net.weight]["momentum_buffer"].codes.tolist() == [3, 3, 3]


def with_method(**members):
    """Return a class like `Pair` with other methods, registered, and a checkpoint of one such tensor."""
    kind = type("Other", (Pair,), members)
    tensors.register_flatten(kind)
    return kind, save(
        State(weights={"x": kind(torch.full((3,), 3, dtype=torch.int8), torch.tensor(3.0))})
    )


@pytest.mark.usefixtures("registered")
def test_a_context_of_plain_values_comes_back():
    seen = []

    def unflatten(cls, inner, context, size, stride):
        seen.append((context, size, stride))
        return cls(**inner)

    context = [True, torch.bfloat16, torch.Size([3]), {"block": 256}]
    members = {"__tensor_flatten__": lambda _: (["codes", "scale"], context)}
    kind, checkpoint = with_method(**members, __tensor_unflatten__=classmethod(unflatten))

    fresh: dict[str, Any] = {}
    load(State(weights=fresh), checkpoint)

    assert seen == [(context, torch.Size([3]), (1,))]
    assert type(fresh["x"]) is kind


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    ("members", "said"),
    {
        "a context that isn't plain": (
            {"__tensor_flatten__": lambda _: (["codes", "scale"], object())},
            "in place",
        ),
        "no way back": ({"__tensor_unflatten__": None}, "no __tensor_unflatten__"),
        "an exception": ({"__tensor_unflatten__": lambda *_: 1 // 0}, "ZeroDivisionError"),
        "copies": (
            {
                "__tensor_unflatten__": classmethod(
                    lambda cls, inner, *_: cls(**{k: v + 0 for k, v in inner.items()})
                )
            },
            "keep the tensors",
        ),
    }.values(),
)
def test_what_cannot_be_made_anew_is_filled_in_place_only(members, said):
    kind, checkpoint = with_method(**members)

    with pytest.raises(
        StateError, match=f"STATE_UNSUPPORTED.*{said}.*Create the tensor before the load"
    ):
        load(State(weights={}), checkpoint)
    live = {"x": kind(torch.zeros(3, dtype=torch.int8), torch.tensor(0.0))}
    load(State(weights=live), checkpoint)
    assert live["x"].codes.tolist() == [3, 3, 3]


def test_a_class_that_is_not_registered_here_says_so(monkeypatch):
    monkeypatch.setattr(tensors, "_REGISTERED", {Pair})
    checkpoint = save(State(weights={"x": pair(3)}))
    monkeypatch.setattr(tensors, "_REGISTERED", set())

    with pytest.raises(StateError, match=r"Pair, which isn't registered.*register_flatten"):
        load(State(weights={}), checkpoint)


@pytest.mark.usefixtures("registered")
def test_a_checkpoint_that_has_the_class_alone_is_filled_in_place(monkeypatch):
    """What ckptfmt saved before it kept the context."""
    monkeypatch.setattr(
        "ckptfmt.adapters.torch._form_of",
        lambda _encoder, value, _name: tensors.kind_of(type(value)),
    )
    checkpoint = save(State(weights={"x": pair(3)}))

    live = {"x": pair(0)}
    load(State(weights=live), checkpoint)
    assert live["x"].codes.tolist() == [3, 3, 3]
    with pytest.raises(StateError, match=r"STATE_UNSUPPORTED.*in place"):
        load(State(weights={}), checkpoint)


@pytest.mark.usefixtures("registered")
def test_as_a_parameter():
    live, other = (
        nn.ParameterDict({"w": nn.Parameter(pair(value), requires_grad=False)}) for value in (3, 0)
    )

    load(State(weights=other), save(State(weights=live)))

    assert other["w"].codes.tolist() == [3, 3, 3]
