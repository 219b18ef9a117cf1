"""Which tensors of a checkpoint may be predicted from each other, as names and leaves say."""

import pytest
import torch
from torch import nn

import ckptfmt
from ckptfmt.codecs.prediction import Members, find_members
from ckptfmt.documents.tree import TensorRef


def members_of(path, state):
    """Save, and look at what was saved."""
    ckptfmt.save(path, state, step=1)
    with ckptfmt.open(path) as checkpoint:
        tensors = {
            tensor.key: (tensor.dtype, tensor.global_shape) for tensor in checkpoint.index.tensors
        }
        leaves = {
            (leaf.field, leaf.name, leaf.scope): checkpoint.leaf(leaf.field, leaf.name, leaf.scope)
            for leaf in checkpoint.index.leaves
            if leaf.field == "optimizer"
        }
        return find_members(tensors, leaves)


def stepped(make, *modules):
    optimizer = make([parameter for module in modules for parameter in module.parameters()])
    for module in modules:
        module(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return optimizer


def key(field, name):
    return field, name, "global"


def test_adamw_in_two_groups(tmp_path):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, bias=False))

    def make(_):
        groups = [
            {"params": model[0].parameters(), "lr": 0.5},
            {"params": model[1].parameters(), "amsgrad": True},
        ]
        return torch.optim.AdamW(groups)

    found = members_of(
        tmp_path / "run", ckptfmt.State(weights=model, optimizer=stepped(make, model))
    )

    assert {members.tensors["weight"]: members.kind for members in found} == {
        key("weights", name): "adam" for name in ("0.weight", "0.bias", "1.weight")
    }
    by_name = {members.tensors["weight"][1]: members for members in found}
    assert by_name["0.bias"].tensors == {
        "exp_avg": key("optimizer", "0.bias/exp_avg"),
        "exp_avg_sq": key("optimizer", "0.bias/exp_avg_sq"),
        "weight": key("weights", "0.bias"),
    }
    assert by_name["0.bias"].step == key("optimizer", "0.bias/step")
    assert (by_name["0.bias"].options["lr"], by_name["1.weight"].options["lr"]) == (0.5, 1e-3)
    assert by_name["1.weight"].tensors["max_exp_avg_sq"] == key(
        "optimizer", "1.weight/max_exp_avg_sq"
    )


def test_several_optimizers_and_modules(tmp_path):
    body, head = nn.Linear(3, 3), nn.Linear(3, 2)
    optimizers = {
        "slow/group": stepped(
            lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9), body
        ),
        "fast": stepped(torch.optim.Adam, head),
    }
    state = ckptfmt.State(weights={"body": body, "head": head}, optimizer=optimizers)
    found = {
        members.tensors["weight"][1]: members for members in members_of(tmp_path / "run", state)
    }

    assert {name: members.kind for name, members in found.items()} == {
        "body/weight": "sgd", "body/bias": "sgd", "head/weight": "adam", "head/bias": "adam"
    }  # fmt: skip
    momentum = found["body/weight"].tensors["momentum_buffer"]
    assert momentum[1].endswith("body/weight/momentum_buffer")
    assert (found["body/weight"].step, found["body/weight"].options["momentum"]) == (None, 0.9)


def test_what_has_no_moments_or_another_arithmetic_is_left_out(tmp_path):
    model = nn.Linear(3, 3)
    for number, make in enumerate(
        (
            lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            torch.optim.NAdam,
            torch.optim.Adagrad,
            lambda parameters: torch.optim.AdamW([parameter.double() for parameter in parameters]),
        )
    ):
        model.zero_grad()
        if number == 3:
            model = model.double()
            optimizer = torch.optim.AdamW(model.parameters())
            model(torch.ones(2, 3, dtype=torch.float64)).sum().backward()
            optimizer.step()
        else:
            optimizer = stepped(make, model)
        state = ckptfmt.State(weights=model, optimizer=optimizer)
        assert members_of(tmp_path / f"run{number}", state) == ()


def test_masters_in_a_module_of_their_own(tmp_path):
    masters, model = nn.Linear(3, 3), nn.Linear(3, 3).bfloat16()
    other = nn.Linear(3, 3)
    state = ckptfmt.State(
        weights={"masters": masters, "model": model, "other": nn.ModuleDict({"head": other})},
        optimizer=stepped(torch.optim.AdamW, masters),
    )
    found = members_of(tmp_path / "run", state)

    assert [members.tensors["copy"][1] for members in found] == ["model/weight", "model/bias"]
    assert [members.tensors["weight"][1] for members in found] == ["masters/weight", "masters/bias"]


def test_masters_without_an_optimizer(tmp_path):
    masters, model = nn.Linear(3, 3), nn.Linear(3, 3).half()
    found = members_of(
        tmp_path / "run", ckptfmt.State(weights={"masters": masters, "model": model})
    )

    assert [members.kind for members in found] == ["cast", "cast"]
    assert found[1].tensors == {
        "master": key("weights", "masters/weight"),
        "weight": key("weights", "model/weight"),
    }


def held(name, dtype="float32", shape=(3, 2)):
    return {key("optimizer", name): (dtype, shape)}


@pytest.fixture
def adam():
    """A parameter of 16 bits whose optimizer keeps its master."""
    tensors = {
        key("weights", "w"): ("bfloat16", (3, 2)),
        **held("w/exp_avg"), **held("w/exp_avg_sq"), **held("w/master_param"), **held("w/step", shape=()),
    }  # fmt: skip
    state = {
        name: TensorRef(f"w/{name}", "torch")
        for name in ("step", "exp_avg", "exp_avg_sq", "master_param")
    }
    leaves = {
        key("optimizer", "group/w/0123456789abcdef"): {
            "params": ["w"],
            "options": {"amsgrad": False, "lr": 0.1},
        },
        key("optimizer", "state/w"): state,
    }
    return tensors, leaves


def test_a_master_in_the_optimizers_state(adam):
    assert find_members(*adam) == (
        Members(
            kind="adam",
            tensors={
                "exp_avg": key("optimizer", "w/exp_avg"),
                "exp_avg_sq": key("optimizer", "w/exp_avg_sq"),
                "weight": key("optimizer", "w/master_param"),
                "copy": key("weights", "w"),
            },
            options={"amsgrad": False, "lr": 0.1},
            step=key("optimizer", "w/step"),
        ),
    )


@pytest.mark.parametrize(
    "change",
    [
        held("w/exp_avg", shape=(2, 3)),
        held("w/exp_avg_sq", dtype="bfloat16"),
        held("w/master_param", dtype="float64"),
        {key("weights", "w"): ("float64", (3, 2))},
    ],
    ids=str,
)
def test_members_have_one_shape_and_the_kinds_dtypes(adam, change):
    """REQ-PRE-001."""
    tensors, leaves = adam

    assert find_members({**tensors, **change}, leaves) == ()


def test_leaves_of_other_forms_are_passed_over(adam):
    tensors, leaves = adam
    group, state = leaves
    groups: list[object] = [
        {"params": "w", "options": {}},
        {"params": [1, None], "options": {}},
        {"params": ["w"]},
    ]
    for value in [*groups, None, []]:
        assert find_members(tensors, {**leaves, group: value}) == ()
    states: list[object] = [None, {}, {"exp_avg": 1.0}, {1: 2}]
    for value in states:
        assert find_members(tensors, {**leaves, state: value}) == ()
    twice = key("optimizer", "group/x/0123456789abcdef")
    assert len(find_members(tensors, {**leaves, twice: leaves[group]})) == 1


def test_a_step_may_be_a_plain_number(adam):
    tensors, leaves = adam
    state = key("optimizer", "state/w")
    (found,) = find_members(tensors, {**leaves, state: {**leaves[state], "step": 12}})

    assert found.step == 12.0


def test_two_tensors_that_may_be_the_copy_are_none(adam):
    tensors, leaves = adam
    tensors[key("weights", "w")] = "float32", (3, 2)
    copies = {key("weights", f"{name}/w"): ("bfloat16", (3, 2)) for name in ("a", "b")}
    (found,) = find_members({**tensors, **copies}, leaves)

    assert "copy" not in found.tensors
