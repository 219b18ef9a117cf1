"""Every optimizer of torch goes on bit by bit, into a fresh one and into one that has run elsewhere."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ckptfmt
from ckptfmt.errors import StateError
from ckptfmt.state import State
from tests.adapters.double import load, save

OPTIMIZERS = {
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1),
    "Adagrad-fused": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "Adam-fused": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
    "Adam-tensor-lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1)),
    "Adam-foreach": lambda p: torch.optim.Adam(p, lr=0.1, foreach=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.01),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1, t0=1.0),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3, history_size=4),
    "LBFGS-wolfe": lambda p: torch.optim.LBFGS(
        p, lr=0.1, max_iter=3, line_search_fn="strong_wolfe"
    ),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD-momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "SparseAdam": lambda p: torch.optim.SparseAdam(p, lr=0.1),
    "Muon": lambda p: torch.optim.Muon(p, lr=0.1),
}
if not hasattr(torch.optim, "Muon"):  # came with torch 2.9
    del OPTIMIZERS["Muon"]
MATRICES_ONLY = {"Muon"}


class Net(nn.Module):
    def __init__(self, *, sparse, bias):
        super().__init__()
        self.table = nn.Embedding(6, 4, sparse=sparse)
        self.out = nn.Linear(4, 3, bias=bias)

    def forward(self, ids):
        return self.out(self.table(ids))


def make(name, seed):
    torch.manual_seed(seed)
    net = Net(sparse=name == "SparseAdam", bias=name not in MATRICES_ONLY)
    parameters = [net.table.weight] if name == "SparseAdam" else list(net.parameters())
    return net, OPTIMIZERS[name](parameters)


def train(net, optimizer, steps):
    for step in steps:
        ids = torch.tensor([step % 6, (step * 5 + 1) % 6])

        def closure(ids=ids):
            optimizer.zero_grad()
            loss = (net(ids) ** 2).sum()
            loss.backward()
            return loss

        optimizer.step(closure)


def bits(value):
    if isinstance(value, torch.Tensor):
        return (
            str(value.dtype),
            tuple(value.shape),
            str(value.device),
            value.detach().numpy().tobytes(),
        )
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [bits(item) for item in value]
    return value if not isinstance(value, float) else value.hex()


def everything(net, optimizer):
    return bits(net.state_dict()), bits(optimizer.state_dict())


@pytest.mark.parametrize("before", [0, 2], ids=["fresh", "stepped"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_goes_on_as_if_never_interrupted(name, before):
    net, optimizer = make(name, 1)
    train(net, optimizer, range(3))
    checkpoint = save(State(weights=net, optimizer=optimizer))
    saved = everything(net, optimizer)
    train(net, optimizer, range(3, 5))

    other, again = make(name, 2)
    train(other, again, range(before))
    load(State(weights=other, optimizer=again), checkpoint)

    assert everything(other, again) == saved
    train(other, again, range(3, 5))
    assert everything(other, again) == everything(net, optimizer)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_state_keeps_its_own_dtype(dtype):
    net = nn.Linear(3, 2).to(dtype)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for parameter in net.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.full_like(
            parameter, 1 / 3, dtype=torch.float32
        )
    checkpoint = save(State(weights=net, optimizer=optimizer))
    again = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    load(State(weights=net, optimizer=again), checkpoint)

    assert bits(again.state[net.weight]) == bits(optimizer.state[net.weight])


def test_groups_are_matched_by_names_whatever_their_order():
    net = Net(sparse=False, bias=True)
    a = {"params": [net.table.weight], "lr": 0.5}
    b = {"params": list(net.out.parameters()), "lr": 0.25, "weight_decay": 0.125}
    optimizer = torch.optim.AdamW([a, b], lr=1.0)
    train(net, optimizer, range(2))
    checkpoint = save(State(weights=net, optimizer=optimizer))
    table, weight, bias = (
        {"params": [p]} for p in (net.table.weight, net.out.weight, net.out.bias)
    )

    again = torch.optim.AdamW([bias, table, weight], lr=1.0)
    load(State(weights=net, optimizer=again), checkpoint)

    assert [(group["lr"], group["weight_decay"]) for group in again.param_groups] == [
        (0.25, 0.125),
        (0.5, 0.01),
        (0.25, 0.125),
    ]


def test_a_group_that_would_need_two_groups_options_is_refused():
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(
        [{"params": [net.weight], "lr": 0.5}, {"params": [net.bias], "lr": 0.25}]
    )
    checkpoint = save(State(weights=net, optimizer=optimizer))

    with pytest.raises(StateError) as caught:
        load(State(weights=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.5)), checkpoint)

    assert caught.value.code == "GROUP_MISMATCH"


def test_equal_tensor_options_of_two_groups_may_be_merged_and_unequal_may_not():
    net = nn.Linear(2, 2)

    def optimizer(bias_lr):
        groups = [
            {"params": [net.weight], "lr": torch.tensor(0.5)},
            {"params": [net.bias], "lr": torch.tensor(bias_lr)},
        ]
        return torch.optim.Adam(groups, lr=torch.tensor(1.0))

    equal, unequal = (save(State(weights=net, optimizer=optimizer(lr))) for lr in (0.5, 0.25))
    one_group = torch.optim.Adam(net.parameters(), lr=torch.tensor(1.0))
    rate = one_group.param_groups[0]["lr"]

    load(State(weights=net, optimizer=one_group), equal)
    assert one_group.param_groups[0]["lr"] is rate
    assert rate == 0.5
    with pytest.raises(StateError, match="GROUP_MISMATCH"):
        load(State(weights=net, optimizer=one_group), unequal)


def test_a_number_fills_a_live_tensor_option_and_a_tensor_replaces_a_number():
    net = nn.Linear(2, 2)
    number = save(State(weights=net, optimizer=torch.optim.Adam(net.parameters(), lr=0.25)))
    tensor = save(
        State(weights=net, optimizer=torch.optim.Adam(net.parameters(), lr=torch.tensor(0.125)))
    )
    live_tensor = torch.optim.Adam(net.parameters(), lr=torch.tensor(1.0))
    rate = live_tensor.param_groups[0]["lr"]
    live_number = torch.optim.Adam(net.parameters(), lr=1.0)

    load(State(weights=net, optimizer=live_tensor), number)
    load(State(weights=net, optimizer=live_number), tensor)

    assert live_tensor.param_groups[0]["lr"] is rate
    assert rate == 0.25
    assert torch.equal(live_number.param_groups[0]["lr"], torch.tensor(0.125))


def test_a_flag_is_taken_from_the_checkpoint_and_noted():
    net = nn.Linear(2, 2)
    checkpoint = save(
        State(weights=net, optimizer=torch.optim.Adam(net.parameters(), foreach=True))
    )
    live = torch.optim.Adam(net.parameters(), foreach=False)

    report = load(State(weights=net, optimizer=live), checkpoint)

    assert live.param_groups[0]["foreach"] is True
    assert any("foreach" in note for note in report.notes)


def test_an_option_that_was_not_saved_is_refused_unless_allowed():
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    checkpoint = save(State(weights=net, optimizer=optimizer))
    optimizer.param_groups[0]["mine"] = 3

    with pytest.raises(StateError, match="LEAF_MISSING"):
        load(State(weights=net, optimizer=optimizer), checkpoint)
    load(State(weights=net, optimizer=optimizer), checkpoint, allow={"missing"})

    assert optimizer.param_groups[0]["mine"] == 3


def test_live_state_that_was_not_saved_is_refused_unless_allowed():
    net, optimizer = make("Adam", 1)
    checkpoint = save(State(weights=net, optimizer=optimizer))
    train(net, optimizer, range(1))
    before = bits(optimizer.state_dict())

    with pytest.raises(StateError, match="LEAF_MISSING"):
        load(State(weights=net, optimizer=optimizer), checkpoint)
    load(State(weights=net, optimizer=optimizer), checkpoint, allow={"missing"})

    assert bits(optimizer.state_dict()) == before


def test_saved_state_of_a_parameter_that_is_gone_is_refused_unless_allowed():
    net, optimizer = make("SGD-momentum", 1)
    train(net, optimizer, range(1))
    checkpoint = save(State(weights=net, optimizer=optimizer))
    part = torch.optim.SGD(net.out.parameters(), lr=0.1, momentum=0.9, nesterov=True)

    with pytest.raises(StateError) as caught:
        load(State(weights=net, optimizer=part), checkpoint)
    load(State(weights=net, optimizer=part), checkpoint, allow={"unexpected"})

    assert caught.value.code in ("LEAF_UNEXPECTED", "TENSOR_UNEXPECTED")
    assert "table.weight" in str(caught.value)


def test_a_parameter_without_a_name_is_refused():
    net, stray = nn.Linear(2, 2), nn.Parameter(torch.zeros(5))

    with pytest.raises(StateError) as caught:
        save(State(weights=net, optimizer=torch.optim.SGD([*net.parameters(), stray], lr=0.1)))

    assert caught.value.code == "PARAMETER_UNNAMED"
    assert "(5,)" in str(caught.value)


def test_a_parameter_in_two_optimizers_is_refused():
    net = nn.Linear(2, 2)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for _ in range(2)]

    with pytest.raises(StateError, match="STATE_NAME"):
        save(State(weights=net, optimizer=optimizers))


def test_state_under_another_key_than_a_parameter_is_refused():
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.state["global"] = {"n": 1}  # type: ignore[index]

    with pytest.raises(StateError, match=r"STATE_UNSUPPORTED.*'global'"):
        save(State(weights=net, optimizer=optimizer))


def test_several_optimizers_keep_their_own_state():
    nets = {"gen": nn.Linear(2, 2), "dis": nn.Linear(3, 2)}
    optimizers = {key: torch.optim.Adam(net.parameters(), lr=0.1) for key, net in nets.items()}
    for key, net in nets.items():
        net(torch.ones(net.in_features)).sum().backward()
        optimizers[key].step()
    checkpoint = save(State(weights=nets, optimizer=optimizers))
    again = {key: torch.optim.Adam(net.parameters(), lr=0.2) for key, net in nets.items()}

    load(State(weights=nets, optimizer=again), checkpoint)

    assert ("optimizer", "gen/weight/exp_avg", "global") in checkpoint.tensors
    assert all(bits(again[key].state_dict()) == bits(optimizers[key].state_dict()) for key in nets)


class Wrapped(torch.optim.Optimizer):
    """As accelerate's AcceleratedOptimizer: made without torch's own __init__, everything handed on."""

    HELD_AS = "optimizer"

    def __init__(self, optimizer):
        setattr(self, self.HELD_AS, optimizer)

    wrapped = property(lambda self: getattr(self, self.HELD_AS))
    state = property(lambda self: self.wrapped.state)
    param_groups = property(lambda self: self.wrapped.param_groups)

    def state_dict(self):
        return self.wrapped.state_dict()

    def load_state_dict(self, state_dict):
        self.wrapped.load_state_dict(state_dict)


class WrappedAsByTorchft(Wrapped):
    """As torchft's OptimizerWrapper: it holds a manager besides."""

    HELD_AS = "optim"

    def __init__(self, optimizer):
        self.manager = object()
        super().__init__(optimizer)


class WrappedAsByFabric:
    """As Lightning Fabric's: no optimizer at first, a class that is made at run time, attributes handed on."""

    def __init__(self, optimizer):
        self._optimizer = optimizer
        self.__class__ = type("Fabric", (self.__class__, type(optimizer)), {})

    def __getattr__(self, name):
        return getattr(self._optimizer, name)

    def state_dict(self):
        return self._optimizer.state_dict()

    def load_state_dict(self, state_dict):
        self._optimizer.load_state_dict(state_dict)


@pytest.mark.parametrize(
    ("Wrapped", "depth"),
    [
        (Wrapped, 1),
        (Wrapped, 2),
        (WrappedAsByTorchft, 1),
        (WrappedAsByTorchft, 2),
        (WrappedAsByFabric, 1),
    ],
)
def test_wrapped_optimizer_was_saved_by_position(Wrapped, depth):  # noqa: N803
    def made(seed):
        torch.manual_seed(seed)
        net = nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        net(torch.ones(2)).sum().backward()
        optimizer.step()
        wrapper: Any = optimizer
        for _ in range(depth):
            wrapper = Wrapped(wrapper)
        return net, optimizer, wrapper

    net, optimizer, wrapper = made(0)
    checkpoint = save(
        State(weights=net, optimizer=wrapper, extra={"again": {"deep": Wrapped(optimizer)}})
    )
    names = {name for field, name, _ in checkpoint.tensors if field == "optimizer"}
    assert {"weight/exp_avg", "extra/again/deep/weight/exp_avg"} <= names
    assert not any(name.startswith("state/") for name in names)

    again, plain, other = made(1)
    load(
        State(weights=again, optimizer=other, extra={"again": {"deep": Wrapped(plain)}}), checkpoint
    )
    assert bits(plain.state_dict()) == bits(optimizer.state_dict())
    again, plain, _ = made(2)
    load(State(weights=again, optimizer=plain, extra={"again": {"deep": plain}}), checkpoint)
    assert bits(plain.state_dict()) == bits(optimizer.state_dict())


def test_wrapper_with_state_of_its_own_goes_by_its_protocol():
    class Counting(Wrapped):
        calls = 5

        def state_dict(self):
            return {**super().state_dict(), "calls": self.calls}

        def load_state_dict(self, state_dict):
            self.calls = state_dict["calls"]
            super().load_state_dict(
                {key: value for key, value in state_dict.items() if key != "calls"}
            )

    net = nn.Linear(2, 2)
    checkpoint = save(
        State(weights=net, optimizer=Counting(torch.optim.SGD(net.parameters(), lr=0.1)))
    )
    again = Counting(torch.optim.SGD(net.parameters(), lr=0.2))
    again.calls = 0
    load(State(weights=net, optimizer=again), checkpoint)

    assert (again.calls, again.param_groups[0]["lr"]) == (5, 0.1)


@pytest.mark.parametrize("how", ["save", "run"])
def test_optimizer_that_is_saved_by_position_is_named(how, tmp_path, caplog):
    """Nobody knew, until parameters stood in another order, or FSDP2 made other pieces of them."""

    class Counting(Wrapped):
        def state_dict(self):
            return {**super().state_dict(), "calls": 5}

    net = nn.Linear(2, 2)
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    for optimizer, is_told in ((Counting(inner), True), (Wrapped(inner), False)):
        caplog.clear()
        state = State(weights=net, optimizer={"main": optimizer})
        if how == "save":
            ckptfmt.save(tmp_path / str(is_told), state, step=1)
        else:
            with ckptfmt.Checkpointer(
                tmp_path / str(is_told), state, saver="inline"
            ) as checkpointer:
                checkpointer.restore_rng()
                checkpointer.end_step(1)
                found = [
                    report
                    for report in checkpointer.reports
                    if report.startswith("SAVED_BY_POSITION")
                ]
                assert len(found) == is_told
        told = [
            line for line in caplog.messages if "SAVED_BY_POSITION: optimizer:main is a " in line
        ]
        assert len(told) == is_told


def test_an_optimizer_with_its_own_protocol_goes_by_it():
    class Counting(torch.optim.SGD):
        calls = 0

        def state_dict(self):
            return {**super().state_dict(), "calls": self.calls}

        def load_state_dict(self, state_dict):
            state_dict = dict(state_dict)
            self.calls = state_dict.pop("calls")
            super().load_state_dict(state_dict)

    net = nn.Linear(2, 2)
    optimizer = Counting(net.parameters(), lr=0.1, momentum=0.9)
    net(torch.ones(2)).sum().backward()
    optimizer.step()
    optimizer.calls = 5
    checkpoint = save(State(weights=net, optimizer=optimizer))
    again = Counting(copy.deepcopy(net).parameters(), lr=0.2, momentum=0.9)

    load(State(weights=net, optimizer=again), checkpoint)

    assert again.calls == 5
    assert bits(again.state_dict()) == bits(optimizer.state_dict())


def test_a_protocol_that_changes_what_it_loads_is_found_out():
    class Own(torch.optim.SGD):  # torch's own load casts the fp32 state to the parameter's bfloat16
        def state_dict(self):
            return super().state_dict()

    net = nn.Linear(2, 2).to(torch.bfloat16)
    optimizer = Own(net.parameters(), lr=0.1, momentum=0.9)
    for parameter in net.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.full(parameter.shape, 1 / 3)
    checkpoint = save(State(weights=net, optimizer=optimizer))

    with pytest.raises(StateError, match="READ_BACK"):
        load(State(weights=net, optimizer=Own(net.parameters(), lr=0.1, momentum=0.9)), checkpoint)


SCHEDULERS = {
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 2, 4]),
    "ExponentialLR": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
    "CosineAnnealingLR": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 9),
    "CosineAnnealingWarmRestarts": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(
        o, 3
    ),
    "CyclicLR": lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.01, 0.1),
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "SequentialLR": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [
            torch.optim.lr_scheduler.LinearLR(o, total_iters=2),
            torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
        ],
        [2],
    ),
    "ChainedScheduler": lambda o: torch.optim.lr_scheduler.ChainedScheduler(
        [torch.optim.lr_scheduler.ExponentialLR(o, 0.9), torch.optim.lr_scheduler.StepLR(o, 2)]
    ),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.05),
}


# SequentialLR of torch 2.7 warns of what it does itself.
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step:UserWarning")
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_go_on(name):
    def make_all():
        net = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        return net, optimizer, SCHEDULERS[name](optimizer)

    def rates(optimizer, scheduler, count):
        found = []
        for _ in range(count):
            optimizer.step()
            scheduler.step()
            found.append([group["lr"].hex() for group in optimizer.param_groups])
        return found

    net, optimizer, scheduler = make_all()
    rates(optimizer, scheduler, 3)
    if any(map(callable, scheduler.state_dict().values())):
        with pytest.raises(StateError, match=r"STATE_UNSUPPORTED at extra:scheduler/anneal_func"):
            save(State(weights=net, optimizer=optimizer, extra={"scheduler": scheduler}))
        pytest.skip("this torch's SWALR has a function in its state_dict: it is refused by name")
    checkpoint = save(State(weights=net, optimizer=optimizer, extra={"scheduler": scheduler}))
    net, again, fresh = make_all()

    load(State(weights=net, optimizer=again, extra={"scheduler": fresh}), checkpoint)

    assert rates(again, fresh, 4) == rates(optimizer, scheduler, 4)


def test_a_grad_scaler_goes_on():
    def make_scaler():
        return torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=7)

    net, scaler = nn.Linear(2, 2), make_scaler()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for value in (1.0, np.inf, 1.0):
        optimizer.zero_grad()
        scaler.scale((net(torch.ones(2)) * value).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    checkpoint = save(State(weights=net, extra={"scaler": scaler}))
    again = make_scaler()

    load(State(weights=net, extra={"scaler": again}), checkpoint)

    assert again.state_dict() == scaler.state_dict()
    assert again.get_scale() == 32.0


def test_live_state_of_another_dtype_or_shape_is_replaced():
    net, optimizer = make("SGD-momentum", 1)
    train(net, optimizer, range(1))
    checkpoint = save(State(weights=net, optimizer=optimizer))
    other, again = make("SGD-momentum", 2)
    again.state[other.out.weight]["momentum_buffer"] = torch.zeros(3, 4, dtype=torch.float64)
    again.state[other.out.bias]["momentum_buffer"] = torch.zeros(7)

    load(State(weights=other, optimizer=again), checkpoint)

    assert everything(other, again) == everything(net, optimizer)


def test_a_single_live_value_that_was_not_saved_is_refused_or_kept():
    net, optimizer = make("SGD-momentum", 1)
    train(net, optimizer, range(1))
    checkpoint = save(State(weights=net, optimizer=optimizer))
    optimizer.state[net.out.bias]["other"] = 1

    with pytest.raises(StateError, match=r"LEAF_MISSING.*other"):
        load(State(weights=net, optimizer=optimizer), checkpoint)
    report = load(State(weights=net, optimizer=optimizer), checkpoint, allow={"missing"})

    assert optimizer.state[net.out.bias]["other"] == 1
    assert report.claim == "S0"


def test_keys_of_state_stand_in_the_saved_order():
    net, optimizer = make("Adam", 1)
    train(net, optimizer, range(1))
    checkpoint = save(State(weights=net, optimizer=optimizer))
    for parameter, state in optimizer.state.items():
        optimizer.state[parameter] = dict(reversed(state.items()))

    load(State(weights=net, optimizer=optimizer), checkpoint)

    assert list(optimizer.state[net.out.bias]) == [
        "step",
        "exp_avg",
        "exp_avg_sq",
        "max_exp_avg_sq",
    ]


def test_an_optimizer_in_extra_has_names_of_its_own():
    def make_both():
        net = nn.Linear(2, 2)
        optimizers = [torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9) for lr in (0.1, 0.2)]
        return net, optimizers

    net, (inner, outer) = make_both()
    net(torch.ones(2)).sum().backward()
    inner.step()
    outer.step()
    checkpoint = save(State(weights=net, optimizer=inner, extra={"outer": outer}))
    other, (inner_again, outer_again) = make_both()

    load(State(weights=other, optimizer=inner_again, extra={"outer": outer_again}), checkpoint)

    assert ("optimizer", "extra/outer/weight/momentum_buffer", "global") in checkpoint.tensors
    assert bits(outer_again.state_dict()) == bits(outer.state_dict())
    assert bits(inner_again.state_dict()) == bits(inner.state_dict())


def test_two_optimizers_of_one_parameter_have_names_of_their_own():
    """The one without a state got the other's moments, under T1."""

    def build():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(1, 3), nn.Linear(3, 1))
        warm = torch.optim.AdamW(net[1].parameters(), lr=3e-2)
        return net, warm, torch.optim.AdamW(net.parameters(), lr=1e-2)

    net, warm, full = build()
    for optimizer in (warm, warm, full):
        net(torch.ones(4, 1)).square().mean().backward()
        optimizer.step()
        net.zero_grad()
    with pytest.raises(StateError, match=r"STATE_NAME at optimizer:full.*extra=\{'full'"):
        save(State(weights=net, optimizer={"warm": warm, "full": full}))
    checkpoint = save(State(weights=net, optimizer=warm, extra={"full": full}))

    other, its_warm, its_full = build()
    load(State(weights=other, optimizer=its_warm, extra={"full": its_full}), checkpoint)

    for mine, theirs in ((warm, its_warm), (full, its_full)):
        members = zip(mine.param_groups[0]["params"], theirs.param_groups[0]["params"], strict=True)
        for left, right in members:
            for key, value in mine.state[left].items():
                assert torch.equal(value, theirs.state[right][key])


def test_an_object_under_the_key_group_is_no_group():
    """The load took the object for a group of parameters: a KeyError."""

    def build():
        net = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return State(weights=net, optimizer={"opt": optimizer, "group": [schedule]}), schedule

    state, schedule = build()
    state.optimizer["opt"].step()
    schedule.step()
    checkpoint = save(state)
    state, schedule = build()
    load(state, checkpoint)
    assert schedule.last_epoch == 1
