"""An exported optimizer state is what `load_state_dict` takes: a loop in plain torch goes on as the run would have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import ckptfmt
from ckptfmt.adapters.live_trees import Encoder
from tests.convert.made import convert, done, frozen, reasons, trees


class Tied(nn.Module):
    """A net with a shared weight, a frozen parameter, and one that not every step reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.zeta = nn.Embedding(6, 4)
        self.alpha = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.rare = nn.Linear(4, 4)
        self.head = nn.Linear(4, 6)
        self.head.weight = self.zeta.weight
        self.norm.bias.requires_grad_(False)  # noqa: FBT003

    def forward(self, step: int) -> Any:
        hidden = self.norm(self.alpha(self.zeta(torch.arange(step, step + 3) % 6)))
        return self.head(self.rare(hidden) if step >= 4 else hidden)


def two_groups(net: Tied) -> Any:
    """No decay first, and parameters backwards: an order unlike the module's, and unlike that of names."""
    backwards = list(reversed([*net.parameters()]))
    return [
        {"params": [one for one in backwards if one.dim() < 2], "weight_decay": 0.0, "lr": 0.02},
        {"params": [one for one in backwards if one.dim() > 1]},
    ]


MAKERS: dict[str, Any] = {
    "AdamW of two groups": lambda net: torch.optim.AdamW(two_groups(net), lr=0.01),
    "SGD without momentum": lambda net: torch.optim.SGD(two_groups(net), lr=0.1),
    "SGD with momentum": lambda net: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
    "the frozen one left out": lambda net: torch.optim.Adam(
        [p for p in net.parameters() if p.requires_grad], lr=0.1
    ),
}


def make(name: str) -> tuple[Tied, Any]:
    torch.manual_seed(0)
    net = Tied()
    return net, MAKERS[name](net)


def train(net: Tied, optimizer: Any, steps: range) -> None:
    for step in steps:
        net(step).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def raw(net: nn.Module) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in net.state_dict().items()}


@pytest.mark.parametrize("way", ["file", "Python"])
@pytest.mark.parametrize("name", MAKERS)
def test_training_goes_on_in_plain_torch_as_if_it_had_never_stopped(
    name: str, way: str, tmp_path: Any
) -> None:
    net, optimizer = make(name)
    train(net, optimizer, range(3))
    ckptfmt.save(tmp_path / "run", ckptfmt.State(weights=net, optimizer=optimizer), step=3)
    before = optimizer.state_dict()
    train(net, optimizer, range(3, 8))

    other, again = make(name)
    if way == "file":
        done(tmp_path / "run", tmp_path / "model.pt")
        found = torch.load(tmp_path / "model.pt", weights_only=True)
    else:
        weights = ckptfmt.load(tmp_path / "run", only="weights:*")["weights"]
        found = {"weights": weights, "optimizer": ckptfmt.optimizer_state_dict(tmp_path / "run")}
    other.load_state_dict(found["weights"])
    again.load_state_dict(found["optimizer"])

    assert [group["params"] for group in found["optimizer"]["param_groups"]] == [
        group["params"] for group in before["param_groups"]
    ]
    assert found["optimizer"]["state"].keys() == before["state"].keys()
    train(other, again, range(3, 8))
    assert raw(other) == raw(net)


def adversaries() -> tuple[dict[str, nn.Module], dict[str, Any]]:
    torch.manual_seed(1)
    nets: dict[str, nn.Module] = {"gen": nn.Linear(3, 2), "dis": nn.Linear(4, 2)}
    optimizers = {key: torch.optim.Adam(net.parameters(), lr=0.1) for key, net in nets.items()}
    return nets, optimizers


def step_each(nets: Any, optimizers: Any) -> None:
    for key, net in nets.items():
        net(torch.ones(net.in_features)).sum().backward()
        optimizers[key].step()


@pytest.mark.parametrize("form", ["dict", "list"])
def test_each_of_several_optimizers_has_a_state_dict(form: str, tmp_path: Any) -> None:
    nets, live = adversaries()
    step_each(nets, live)
    given: Any = live if form == "dict" else [*live.values()]
    ckptfmt.save(tmp_path / "run", ckptfmt.State(weights=nets, optimizer=given), step=1)
    done(tmp_path / "run", tmp_path / "model.pt")
    done(tmp_path / "model.pt", tmp_path / "back", "--to", "ckptfmt", "--step", "1")

    found = torch.load(tmp_path / "model.pt", weights_only=True)["optimizer"]
    for number, key in enumerate(nets):
        place: Any = key if form == "dict" else number
        for state_dict in (
            found[place],
            ckptfmt.optimizer_state_dict(tmp_path / "run", place),
            ckptfmt.optimizer_state_dict(tmp_path / "back", place),
        ):
            again = adversaries()[1][key]
            again.load_state_dict(state_dict)
            assert frozen(again.state_dict()) == frozen(live[key].state_dict())
    fresh_nets, fresh = adversaries()
    ckptfmt.load(
        tmp_path / "back",
        ckptfmt.State(weights=fresh_nets, optimizer=fresh if form == "dict" else [*fresh.values()]),
    )
    for key, optimizer in fresh.items():
        assert frozen(optimizer.state_dict()) == frozen(live[key].state_dict())
    with pytest.raises(
        ckptfmt.CkptError, match="LEAF_MISSING.*'dis'" if form == "dict" else "LEAF_MISSING"
    ):
        ckptfmt.optimizer_state_dict(tmp_path / "run", "average")


def test_an_optimizer_among_the_extras_has_one(tmp_path: Any) -> None:
    net, optimizer = make("SGD with momentum")
    train(net, optimizer, range(2))
    ckptfmt.save(tmp_path / "run", ckptfmt.State(weights=net, extra={"inner": optimizer}), step=2)

    done(tmp_path / "run", tmp_path / "model.pt")

    found = torch.load(tmp_path / "model.pt", weights_only=True)["extra"]["inner"]
    make("SGD with momentum")[1].load_state_dict(found)
    assert frozen(found) == frozen(optimizer.state_dict())


def test_an_order_that_is_not_in_the_checkpoint_is_said(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an older ckptfmt saved has the names sorted: the file keeps them by names, and Python has a named error."""
    capture = Encoder.leaf_of

    def sort_names(encoder: Any, name: str, tree: Any) -> Any:
        if isinstance(tree, dict) and "params" in tree:
            tree = {"params": sorted(tree["params"]), "options": tree["options"]}
        return capture(encoder, name, tree)

    monkeypatch.setattr(Encoder, "leaf_of", sort_names)
    net, optimizer = make("AdamW of two groups")
    train(net, optimizer, range(2))
    ckptfmt.save(tmp_path / "old", ckptfmt.State(weights=net, optimizer=optimizer), step=2)

    with pytest.raises(
        ckptfmt.CkptError, match=r"GROUP_MISMATCH.*order.*State with the live model and optimizer"
    ):
        ckptfmt.optimizer_state_dict(tmp_path / "old")
    assert convert(tmp_path / "old", tmp_path / "a.pt", "--only", "weights", "--strict")[
        "tensor_count"
    ]
    assert "order" in reasons(done(tmp_path / "old", tmp_path / "model.pt"))["optimizer"]
    assert (
        trees(tmp_path / "old")["optimizer"].keys()
        == torch.load(tmp_path / "model.pt")["optimizer"].keys()
    )
    other, again = make("AdamW of two groups")
    ckptfmt.load(tmp_path / "old", ckptfmt.State(weights=other, optimizer=again))
    assert frozen(again.state_dict()) == frozen(optimizer.state_dict())


@pytest.mark.parametrize(
    "keys", [(), (0,)], ids=["optimizer", "optimizer_states, as Lightning has it"]
)
def test_an_imported_optimizer_has_one_beside_other_entries(
    keys: tuple[int, ...], tmp_path: Any
) -> None:
    net, optimizer = make("AdamW of two groups")
    train(net, optimizer, range(2))
    saved = (
        {"optimizer_states": [optimizer.state_dict()]}
        if keys
        else {"optimizer": optimizer.state_dict()}
    )
    torch.save({"state_dict": net.state_dict(), "epoch": 3, **saved}, tmp_path / "a.pt")
    done(tmp_path / "a.pt", tmp_path / "imported", "--to", "ckptfmt")

    found = ckptfmt.optimizer_state_dict(tmp_path / "imported", *keys)

    make("AdamW of two groups")[1].load_state_dict(found)
    assert frozen(found) == frozen(optimizer.state_dict())


@pytest.mark.parametrize("mixed", [False, True])
def test_state_that_torch_will_convert_is_warned_of(
    *, mixed: bool, tmp_path: Any, caplog: Any
) -> None:
    """`load_state_dict` of torch made float32 moments of a bfloat16 model bfloat16, where the page said same bits."""
    net = nn.Linear(4, 4).bfloat16()
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, 4).bfloat16()).float().sum().backward()
    optimizer.step()
    for state in optimizer.state.values() if mixed else ():
        state["exp_avg"] = torch.rand(state["exp_avg"].shape)
    ckptfmt.save(tmp_path / "run", ckptfmt.State(weights=net, optimizer=optimizer), step=1)

    caplog.clear()
    ckptfmt.optimizer_state_dict(tmp_path / "run")

    said = [
        record.getMessage() for record in caplog.records if "load_state_dict" in record.getMessage()
    ]
    assert len(said) == mixed
    assert not mixed or "exp_avg is float32, and its parameter bfloat16" in said[0]
    again = torch.optim.AdamW(net.parameters())
    ckptfmt.load(tmp_path / "run", ckptfmt.State(weights=net, optimizer=again))
    assert frozen(again.state_dict()["state"]) == frozen(optimizer.state_dict()["state"])
