"""Small trainings, each with something of its own that changes tensors; and which of them may be copied late."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ckptfmt import State


@dataclasses.dataclass
class Training:
    """A state, and what one turn of the loop does to it.

    Attributes:
        state: what is saved.
        turn: does a turn, given its number.
        late: names that are copied beside the training once they are trusted; of whatever isn't
            named here, none is.
        refused: names that the report says are changed between save and step.
    """

    state: State
    turn: Callable[[int], None]
    late: set[str]
    refused: set[str] = dataclasses.field(default_factory=set)


def module(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def loss_of(net: Any, turn: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(turn)
    result: torch.Tensor = (net(torch.randn(4, 6, generator=generator)) ** 2).mean()
    return result


def turn_of(net: nn.Module, optimizer: Any) -> Callable[[int], None]:
    def turn(number: int) -> None:
        optimizer.zero_grad()
        loss_of(net, number).backward()
        optimizer.step()

    return turn


def names_of(net: nn.Module, *keys: str, prefix: str = "") -> set[str]:
    """Return the names of a module's parameters and of their optimizer's state."""
    names = [name for name, _ in net.named_parameters()]
    return {f"weights:{prefix}{name}" for name in names} | {
        f"optimizer:{prefix}{name}/{key}" for name in names for key in keys
    }


ADAM: Final = ("exp_avg", "exp_avg_sq")


def plain(make: Callable[[Any], Any], *keys: str) -> Callable[[], Training]:
    """Return a maker of the plainest training with an optimizer, whose state for each parameter has these keys."""

    def training() -> Training:
        net = module()
        optimizer = make(net.parameters())
        state = State(weights=net, optimizer=optimizer)
        return Training(state, turn_of(net, optimizer), names_of(net, *keys))

    return training


def adamw(parameters: Any, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=0.05, **options)


def lbfgs() -> Training:
    net = module()
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=3)

    def turn(number: int) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(net, number)
            loss.backward()
            return loss

        optimizer.step(closure)

    return Training(State(weights=net, optimizer=optimizer), turn, names_of(net))


def adversaries() -> Training:
    """Two modules, each with an optimizer, that step at different moments of a turn."""
    nets = {"generator": module(0), "critic": nn.Linear(3, 1)}
    optimizers = {name: adamw(net.parameters()) for name, net in nets.items()}

    def turn(number: int) -> None:
        for name in ("critic", "generator"):
            for net in nets.values():
                net.zero_grad()
            nets["critic"](nets["generator"](torch.full((2, 6), float(number)))).mean().backward()
            optimizers[name].step()

    late = set().union(*(names_of(net, *ADAM, prefix=f"{name}/") for name, net in nets.items()))
    return Training(State(weights=nets, optimizer=optimizers), turn, late)


def subset() -> Training:
    """An optimizer of the last layer alone; the first one is changed by hand, behind torch's back."""
    net = module()
    optimizer = adamw(net[2].parameters())
    step = turn_of(net, optimizer)

    def turn(number: int) -> None:
        with torch.no_grad():
            net[0].weight.data.mul_(0.9)
        step(number)

    return Training(
        State(weights=net, optimizer=optimizer), turn, _only(names_of(net, *ADAM), "2.")
    )


def frozen() -> Training:
    """The optimizer has all parameters, and those of the first layer get no gradient."""
    net = module()
    net[0].requires_grad_(requires_grad=False)
    optimizer = adamw(net.parameters())
    late = {f"weights:{name}" for name, _ in net.named_parameters()} | _only(
        names_of(net, *ADAM), "2."
    )
    return Training(State(weights=net, optimizer=optimizer), turn_of(net, optimizer), late)


def scaled() -> Training:
    net = module()
    optimizer = adamw(net.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)

    def turn(number: int) -> None:
        optimizer.zero_grad()
        scaler.scale(loss_of(net, number)).backward()
        scaler.unscale_(optimizer)
        if number % 3 == 2:
            net[0].weight.grad[0, 0] = torch.inf  # such a step is left out
        scaler.step(optimizer)
        scaler.update()

    return Training(
        State(weights=net, optimizer=optimizer, extra={"scaler": scaler}),
        turn,
        names_of(net, *ADAM),
    )


def accumulated() -> Training:
    """A step in every second turn: a save may be asked for while the one before is still copied."""
    net = module()
    optimizer = adamw(net.parameters())

    def turn(number: int) -> None:
        loss_of(net, number).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()

    return Training(State(weights=net, optimizer=optimizer), turn, names_of(net, *ADAM))


def scheduled() -> Training:
    """Schedulers put a wrapper of their own around the optimizer's step."""
    net = module()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (epoch + 1))
    cycle = torch.optim.lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, cycle_momentum=True)
    step = turn_of(net, optimizer)

    def turn(number: int) -> None:
        step(number)
        warm_up.step()
        cycle.step()

    extra = {"warm_up": warm_up}
    return Training(
        State(weights=net, optimizer=optimizer, extra=extra), turn, names_of(net, "momentum_buffer")
    )


def _shrink(net: Any) -> Callable[..., None]:
    def shrink(*_: object) -> None:
        net[0].weight.data.mul_(0.5)

    return shrink


def hooked_instance() -> Training:
    net = module()
    optimizer = adamw(net.parameters())
    optimizer.register_step_pre_hook(_shrink(net))
    return Training(
        State(weights=net, optimizer=optimizer), turn_of(net, optimizer), names_of(net, *ADAM)
    )


def hooked_all() -> Training:
    """A hook of all optimizers, registered before there was a checkpointer."""
    net = module()
    optimizer = adamw(net.parameters())
    shrink = _shrink(net)
    register_optimizer_step_pre_hook(lambda at, *_: shrink() if at is optimizer else None)
    return Training(
        State(weights=net, optimizer=optimizer), turn_of(net, optimizer), names_of(net, *ADAM)
    )


def bounded_embedding() -> Training:
    """An embedding's forward pass shortens its rows."""
    net: Any = nn.Sequential(nn.Embedding(6, 8, max_norm=0.5), nn.Linear(8, 3))
    optimizer = adamw(net.parameters())

    def turn(number: int) -> None:
        optimizer.zero_grad()
        net(torch.tensor([number % 6, 1])).square().mean().backward()
        optimizer.step()

    late = names_of(net, *ADAM) - {"weights:0.weight"}
    return Training(State(weights=net, optimizer=optimizer), turn, late, {"weights:0.weight"})


def normed() -> Training:
    net: Any = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    optimizer = adamw(net.parameters())
    return Training(
        State(weights=net, optimizer=optimizer), turn_of(net, optimizer), names_of(net, *ADAM)
    )


def averaged() -> Training:
    net = module()
    optimizer = adamw(net.parameters())
    mean = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    step = turn_of(net, optimizer)

    def turn(number: int) -> None:
        mean.update_parameters(net)
        step(number)

    return Training(
        State(weights=net, optimizer=optimizer, extra={"mean": mean}), turn, names_of(net, *ADAM)
    )


def written_by_data() -> Training:
    """Each turn begins with a write that torch's count of writes doesn't see."""
    net = module()
    optimizer = adamw(net.parameters())
    step = turn_of(net, optimizer)

    def turn(number: int) -> None:
        net[2].weight.data.clamp_(-0.1, 0.1 - number / 100)
        step(number)

    late = names_of(net, *ADAM) - {"weights:2.weight"}
    return Training(State(weights=net, optimizer=optimizer), turn, late, {"weights:2.weight"})


def beside_arrays() -> Training:
    """Arrays, and plain values that are changed where they are."""
    net = module()
    optimizer = adamw(net.parameters())
    extra: dict[str, Any] = {"array": np.zeros(64), "list": [0], "nested": {"a": {"b": [1.5]}}}
    step = turn_of(net, optimizer)

    def turn(number: int) -> None:
        extra["array"] += 1
        extra["list"].append(number)
        extra["nested"]["a"]["b"][0] *= 2
        step(number)

    return Training(
        State(weights=net, optimizer=optimizer, extra=extra), turn, names_of(net, *ADAM)
    )


def in_backward() -> Training:
    """Each parameter has an optimizer of its own that steps as soon as its gradient is there."""
    net = module()
    optimizers = {name: adamw([parameter]) for name, parameter in net.named_parameters()}
    for name, parameter in net.named_parameters():

        def step(_: object, optimizer: Any = optimizers[name]) -> None:
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)

    turn = lambda number: loss_of(net, number).backward()  # noqa: E731
    return Training(State(weights=net, optimizer=optimizers), turn, names_of(net, *ADAM))


def copied() -> Training:
    net, optimizer = copy.deepcopy(_stepped())
    return Training(
        State(weights=net, optimizer=optimizer), turn_of(net, optimizer), names_of(net, *ADAM)
    )


def unpickled() -> Training:
    net, optimizer = pickle.loads(pickle.dumps(_stepped()))
    return Training(
        State(weights=net, optimizer=optimizer), turn_of(net, optimizer), names_of(net, *ADAM)
    )


def _stepped() -> tuple[nn.Module, torch.optim.Optimizer]:
    net = module()
    optimizer = adamw(net.parameters())
    turn_of(net, optimizer)(0)
    return net, optimizer


class Foreign:
    """An optimizer that torch doesn't know as one."""

    def __init__(self, net: nn.Module) -> None:
        self.net = net
        self.momentum = {
            name: torch.zeros_like(parameter) for name, parameter in net.named_parameters()
        }

    def zero_grad(self) -> None:
        self.net.zero_grad()

    def step(self) -> None:
        for name, parameter in self.net.named_parameters():
            self.momentum[name].mul_(0.9).add_(parameter.grad)  # type: ignore[arg-type]
            parameter.data.sub_(self.momentum[name])

    def state_dict(self) -> dict[str, Any]:
        return {"momentum": self.momentum}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.momentum = state["momentum"]


def foreign() -> Training:
    net = module()
    optimizer = Foreign(net)
    return Training(State(weights=net, optimizer=optimizer), turn_of(net, optimizer), set())


class Capturable(torch.optim.SGD):
    """Says that its steps may be replayed from a graph, where no hook runs."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.05, momentum=0.9)
        for group in self.param_groups:
            group["capturable"] = True


def shared_optimizers() -> Training:
    """Two optimizers have one layer in common, which is changed at two moments of a turn."""
    net = module()
    first, second = torch.optim.SGD(net.parameters(), lr=0.05), adamw(net[2].parameters())

    def turn(number: int) -> None:
        for optimizer in (first, second):
            optimizer.zero_grad()
            loss_of(net, number).backward()
            optimizer.step()

    shared = _only(names_of(net, *ADAM), "2.")
    of_second = {name.replace("optimizer:", "optimizer:extra/second/") for name in shared}
    state = State(weights=net, optimizer=first, extra={"second": second})
    return Training(state, turn, names_of(net) | of_second)


class _Odd(nn.Module):
    """Parameters of all layouts and sizes: strided, of two bytes, of sixteen, of one element, of none, tied."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.strided = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.turned = nn.Parameter(torch.randn(5, 7).t())
        self.short = nn.Parameter(torch.randn(300, dtype=torch.bfloat16))
        self.wide = nn.Parameter(torch.randn(9, dtype=torch.complex128))
        self.scale = nn.Parameter(torch.ones(()))
        self.none = nn.Parameter(torch.zeros(0, 3))
        self.tied = self.short

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        parts = [
            self.strided(values.reshape(2, 3, 2, 2).repeat(1, 1, 2, 2)),
            self.turned,
            self.short,
            self.wide,
        ]
        return torch.stack([part.abs().float().square().sum() for part in parts]) * self.scale


def odd_tensors() -> Training:
    net = _Odd()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.001, momentum=0.9)
    late = names_of(net, "momentum_buffer") - {"optimizer:scale/momentum_buffer"}
    return Training(
        State(weights=net, optimizer=optimizer), turn_of(net, optimizer), _without(late, "none")
    )


def everything() -> Training:
    """Something of most kinds at once."""
    net: Any = nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3), nn.Embedding(4, 3, max_norm=0.1)
    )
    first, last = (
        adamw(net[0].parameters(), fused=True),
        adamw([*net[1].parameters(), *net[2].parameters()]),
    )
    table = torch.optim.SGD(net[3].parameters(), lr=0.1)
    extra = {"mean": AveragedModel(net), "array": np.zeros(64), "list": [0]}

    def turn(number: int) -> None:
        net.zero_grad()
        values = torch.randn(4, 6, generator=torch.Generator().manual_seed(number))
        (net[:3](values) + net[3](torch.tensor(number % 4))).square().mean().backward()
        for optimizer in (first, last, table):
            optimizer.step()
        extra["mean"].update_parameters(net)  # type: ignore[attr-defined]
        extra["array"] += 1  # type: ignore[operator]
        extra["list"].append(number)  # type: ignore[attr-defined]

    late = names_of(net, *ADAM) - {
        "weights:3.weight",
        "optimizer:3.weight/exp_avg",
        "optimizer:3.weight/exp_avg_sq",
    }
    state = State(
        weights=net, optimizer={"first": first, "last": last, "table": table}, extra=extra
    )
    return Training(state, turn, late, {"weights:3.weight"})


def _without(names: set[str], part: str) -> set[str]:
    return {name for name in names if part not in name}


def _only(names: set[str], prefix: str) -> set[str]:
    return {name for name in names if name.partition(":")[2].startswith(prefix)}


TRAININGS: Final[dict[str, Callable[[], Training]]] = {
    "AdamW, foreach": plain(lambda parameters: adamw(parameters, foreach=True), *ADAM),
    "AdamW, one by one": plain(lambda parameters: adamw(parameters, foreach=False), *ADAM),
    "AdamW, fused": plain(lambda parameters: adamw(parameters, fused=True), *ADAM),
    "SGD with momentum": plain(
        lambda them: torch.optim.SGD(them, lr=0.05, momentum=0.9), "momentum_buffer"
    ),
    "LBFGS": lbfgs,
    "two optimizers in turn": adversaries,
    "two optimizers with a layer in common": shared_optimizers,
    "optimizer of a subset": subset,
    "frozen parameters": frozen,
    "gradient scaler": scaled,
    "gradient accumulation": accumulated,
    "schedulers around the step": scheduled,
    "hook of the optimizer": hooked_instance,
    "hook of all optimizers": hooked_all,
    "embedding with max_norm": bounded_embedding,
    "batch norm": normed,
    "averaged model": averaged,
    "writes through .data": written_by_data,
    "arrays and plain values": beside_arrays,
    "optimizers in backward": in_backward,
    "odd tensors": odd_tensors,
    "something of most kinds": everything,
    "deep copy": copied,
    "unpickled": unpickled,
    "foreign optimizer": foreign,
    "capturable optimizer": lambda: dataclasses.replace(plain(Capturable)(), late=set()),
}
