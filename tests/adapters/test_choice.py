"""Loads that are about some tensors only, and loads into live names that aren't the saved ones."""

import itertools
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

import ckptfmt
from ckptfmt import State
from ckptfmt.adapters.load_plan import Only, Renaming
from ckptfmt.adapters.torch.tensors import TORCH_DTYPES
from ckptfmt.dtypes import numpy_dtype
from ckptfmt.errors import Code, StateError
from tests.adapters.double import load, save
from tests.builders import error_of


class Net(nn.Module):
    """An encoder with a buffer, and a head; `encoder` is its name, as versions of a program differ in it."""

    head: nn.Linear
    encoder: nn.Sequential
    backbone: nn.Sequential

    def __init__(self, seed, encoder="encoder"):
        super().__init__()
        torch.manual_seed(seed)
        self.add_module(encoder, nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
        self.head = nn.Linear(4, 2)
        self.path = encoder

    def forward(self, values):
        return self.head(getattr(self, self.path)(values))


def stepped(net, kind=torch.optim.AdamW, **options):
    """Return an optimizer of two groups that has made a step."""
    encoder = {"params": list(getattr(net, net.path).parameters()), "lr": 0.25}
    groups = [encoder, {"params": list(net.head.parameters())}]
    optimizer = kind(groups, lr=0.5, **options)
    net(torch.rand(5, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def bits(value):
    if isinstance(value, torch.Tensor):
        return (
            str(value.dtype),
            tuple(value.shape),
            value.detach().reshape(-1).view(torch.uint8).numpy().tobytes(),
        )
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    return value


def everything(net, optimizer):
    """Return weights by name, and state by name, with the encoder always called so."""
    state = {name: optimizer.state[parameter] for name, parameter in net.named_parameters()}
    found = {"weights": bits(net.state_dict()), "state": bits(state)}
    found = {
        part: {k.replace(net.path, "encoder"): v for k, v in values.items()}
        for part, values in found.items()
    }
    return {**found, "lr": [group["lr"] for group in optimizer.param_groups]}


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "fitting"),
    [
        ("*", {"w:enc.0.a", "w:enc.10.a", "o:enc.0.a/exp_avg", "o:extra/ema/enc.0.a", "d:"}),
        ("enc", {"w:enc.0.a", "w:enc.10.a", "o:enc.0.a/exp_avg"}),
        ("enc.1", set()),
        ("enc.?", {"w:enc.0.a", "o:enc.0.a/exp_avg"}),
        ("enc.[01]*", {"w:enc.0.a", "w:enc.10.a", "o:enc.0.a/exp_avg"}),
        ("weights:enc.0.a", {"w:enc.0.a"}),
        ("optimizer:*", {"o:enc.0.a/exp_avg", "o:extra/ema/enc.0.a"}),
        ("extra/ema", {"o:extra/ema/enc.0.a"}),
        ("data:*", {"d:"}),
        ("ENC", set()),
    ],
)
def test_patterns(pattern, fitting):
    fields = {"w": "weights", "o": "optimizer", "d": "data"}
    names = ["w:enc.0.a", "w:enc.10.a", "o:enc.0.a/exp_avg", "o:extra/ema/enc.0.a", "d:"]
    only = Only(pattern)
    assert {name for name in names if only.fits(fields[name[0]], name[2:])} == fitting


@pytest.mark.parametrize("patterns", [(), "", ["enc", ""], [3]])
def test_patterns_that_say_nothing_are_refused(patterns):
    assert error_of(lambda: Only(patterns)).code == Code.ARGUMENT


@pytest.mark.parametrize("rename", [3, {"a": 1}, {1: "a"}, ["ab"]])
def test_renames_that_are_none_are_refused(rename):
    assert error_of(lambda: Renaming(rename)).code == Code.ARGUMENT


def test_a_function_that_returns_no_name_is_refused():
    error = error_of(lambda: Renaming(lambda _: cast("str", None)).saved_name("w"))
    assert (error.code, error.where) == (Code.ARGUMENT, "rename=")


def test_a_prefix_with_its_joint_is_replaced_as_it_stands():
    renaming = Renaming({"module.": "", "gen/": "generator/"})
    names = ["module.a", "modules.a", "module", "gen/a", "gen"]
    assert [renaming.saved_name(name) for name in names] == [
        "a",
        "modules.a",
        "module",
        "generator/a",
        "gen",
    ]
    assert Renaming({"a": "b", "b": "a"}).saved_name("a.w") == "b.w"
    assert Renaming({"a": "b", "c": "d"}).unused() == {"a", "c"}


# --- only -----------------------------------------------------------------------------------------


@pytest.fixture
def saved():
    net = Net(1)
    optimizer = stepped(net)
    state = State(
        weights=net,
        optimizer=optimizer,
        data={"position": 3},
        extra={"calls": 7, "ema": {"a": np.ones(2)}},
    )
    return save(state), everything(net, optimizer)


def test_some_tensors_with_their_state_and_nothing_else(saved):
    checkpoint, expected = saved
    net = Net(2)
    optimizer = stepped(net)
    before = everything(net, optimizer)
    optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = 0.125
    extra: dict[str, Any] = {"calls": 1, "ema": {"a": np.zeros(2)}}
    data = {"position": 0}
    torch.manual_seed(5)
    stream = torch.get_rng_state()

    report = load(
        State(weights=net, optimizer=optimizer, data=data, extra=extra), checkpoint, only="encoder"
    )

    after = everything(net, optimizer)
    for part in ("weights", "state"):
        for name, value in after[part].items():
            assert value == (expected if name.startswith("encoder") else before)[part][name]
    assert after["lr"] == [0.25, 0.125]
    assert (data, extra["calls"], extra["ema"]["a"].tolist()) == ({"position": 0}, 1, [0, 0])
    assert torch.equal(torch.get_rng_state(), stream)
    # Weight and bias of the head with their state, the head's group, data, calls and a.
    assert report.left_count == 2 + 2 + 1 + 1 + 1 + 1
    assert report.claim == "S0"
    assert any("only=" in line and "8 tensors and values" in line for line in report.lowered_by)
    assert report.downgrades == ()


def test_a_part_claims_no_more_than_its_bytes_even_with_the_cursor():
    def state(seed):
        return State(weights=Net(seed), data=ckptfmt.Sampler(100, global_batch=4, seed=3))

    checkpoint = save(state(1))
    assert load(state(2), checkpoint).claim == "S1"
    assert load(state(2), checkpoint, only=["encoder", "data:*"]).claim == "S0"


def test_a_group_of_which_one_parameter_is_left_keeps_its_options():
    net = Net(1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    checkpoint = save(State(weights=net, optimizer=optimizer))
    again = torch.optim.SGD(net.parameters(), lr=0.125, momentum=0.9)
    load(State(weights=net, optimizer=again), checkpoint, only="encoder")
    assert again.param_groups[0]["lr"] == 0.125
    load(State(weights=net, optimizer=again), checkpoint, only=["encoder", "head"])
    assert again.param_groups[0]["lr"] == 0.5


def test_what_is_not_chosen_may_be_missing_unexpected_and_of_another_shape():
    checkpoint = save(State(weights=Net(1)))
    net = Net(2)
    net.head = nn.Linear(4, 9)
    net.add_module("more", nn.Linear(2, 2))
    expected = bits(Net(1).encoder.state_dict())

    report = load(State(weights=net), checkpoint, only="encoder")

    assert bits(net.encoder.state_dict()) == expected
    assert report.left_count == 4


def test_what_is_chosen_may_not_be_missing_nor_unexpected():
    checkpoint = save(State(weights=Net(1)))
    net = Net(2)
    net.encoder = nn.Sequential(nn.Linear(3, 4))
    error = error_of(lambda: load(State(weights=net), checkpoint, only="encoder"))
    assert (error.code, "5 " in str(error) or "encoder.1" in str(error)) == (
        Code.TENSOR_UNEXPECTED,
        True,
    )
    net.encoder = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    assert (
        error_of(lambda: load(State(weights=net), checkpoint, only="encoder")).code
        == Code.TENSOR_MISSING
    )


def test_a_pattern_that_fits_nothing_is_an_error_unless_allowed():
    checkpoint = save(State(weights=Net(1)))
    error = error_of(lambda: load(State(weights=Net(2)), checkpoint, only=["encoder", "haed"]))
    assert (error.code, error.where) == (Code.TENSOR_MISSING, "only='haed'")
    assert "'weights:*'" in str(
        error_of(lambda: load(State(weights=Net(2)), checkpoint, only="weights"))
    )
    report = load(State(weights=Net(2)), checkpoint, only=["encoder", "haed"], allow=["missing"])
    assert any("haed" in line for line in report.downgrades)


def test_one_entry_of_a_mapping_and_one_of_a_tree_within(saved):
    checkpoint, _ = saved
    extra: dict[str, Any] = {"calls": 1, "ema": {"a": np.zeros(2)}}
    load(State(weights=Net(2), extra=extra), checkpoint, only="extra/ema/a")
    assert (extra["calls"], extra["ema"]["a"].tolist()) == (1, [1, 1])

    arrays = {"a": np.arange(3), "b": np.arange(4), "n": 5}
    mixed = save(State(weights=arrays))
    target = {"a": np.zeros(3, int), "b": np.zeros(4, int), "n": 0}
    report = load(State(weights=target), mixed, only="b")
    assert [np.asarray(target[key]).tolist() for key in "abn"] == [[0, 0, 0], [0, 1, 2, 3], 0]
    assert report.left_count == 2
    named = {"b": np.zeros(4, int), "z": np.zeros(1)}
    assert load(State(weights=named), mixed, only=["b"]).left_count == 1
    assert named["b"].tolist() == [0, 1, 2, 3]


def test_random_streams_are_loaded_if_chosen():
    torch.manual_seed(1)
    checkpoint = save(State(weights=Net(1)))
    saved = torch.get_rng_state()
    torch.manual_seed(2)
    load(State(weights=Net(1)), checkpoint, only=["rng:torch*", "head"])
    assert torch.equal(torch.get_rng_state(), saved)


def test_trees_of_some_tensors(tmp_path):
    net = Net(1)
    optimizer = stepped(net)
    mapping = {"a": np.arange(3), "b": {"c": np.ones(2), "d": 4}}
    ckptfmt.save(
        tmp_path, State(weights=net, optimizer=optimizer, data=mapping, config={"lr": 1}), step=1
    )

    trees: Any = ckptfmt.load(tmp_path, only=["head", "data:b/c"])

    assert trees.keys() == {"weights", "optimizer", "data"}
    assert bits(trees["weights"]) == {
        f"head.{key}": value for key, value in bits(net.head.state_dict()).items()
    }
    assert {"state/head.weight", "state/head.bias"} < trees["optimizer"].keys()
    assert all("encoder" not in key for key in trees["optimizer"])
    assert [key.startswith("group/head") for key in trees["optimizer"]].count(True) == 1
    assert trees["data"].keys() == {"b"}
    assert trees["data"]["b"].keys() == {"c"}
    assert trees["data"]["b"]["c"].tolist() == [1, 1]
    assert error_of(lambda: ckptfmt.load(tmp_path, rename={"a": "b"})).code == Code.ARGUMENT
    assert error_of(lambda: ckptfmt.load(tmp_path, only="haed")).code == Code.TENSOR_MISSING


# --- rename ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rename",
    [{"backbone": "encoder"}, lambda name: name.replace("backbone", "encoder")],
    ids=["mapping", "function"],
)
@pytest.mark.parametrize("fresh", [True, False])
def test_a_module_of_another_name_takes_weights_state_and_options(saved, rename, fresh):
    checkpoint, expected = saved
    net = Net(2, "backbone")
    optimizer = stepped(net)
    if fresh:
        optimizer.state.clear()
    for group in optimizer.param_groups:
        group["lr"] = 0.125
    extra = {"calls": 0, "ema": {"a": np.zeros(2)}}

    report = load(
        State(weights=net, optimizer=optimizer, data={"position": 0}, extra=extra),
        checkpoint,
        rename=rename,
    )

    assert everything(net, optimizer) == expected
    assert ("weights:backbone.0.weight", "weights:encoder.0.weight") in report.renamed
    assert all(old.replace("backbone", "encoder") == new for old, new in report.renamed)
    assert not any("head" in old for old, _ in report.renamed)
    assert report.downgrades == ()


def test_without_the_rename_both_names_are_named():
    checkpoint = save(State(weights=Net(1)))
    assert (
        error_of(lambda: load(State(weights=Net(2, "backbone")), checkpoint)).code
        == Code.TENSOR_MISSING
    )
    error = error_of(
        lambda: load(State(weights=Net(2, "backbone")), checkpoint, rename={"backbone": "enc"})
    )
    assert error.code == Code.TENSOR_MISSING
    assert "backbone.0.weight" in str(error)
    assert "enc.0.weight" in str(error)


def test_keys_that_are_no_live_names_are_refused_before_anything_changes():
    checkpoint = save(State(weights=Net(1)))
    net = Net(2)
    before = bits(net.state_dict())
    error = error_of(
        lambda: load(State(weights=net), checkpoint, rename={"encoder": "encoder", "tail": "head"})
    )
    assert (error.code, error.where) == (Code.ARGUMENT, "rename=")
    assert "'tail'" in str(error)
    assert bits(net.state_dict()) == before


def test_several_live_names_may_take_one_saved_tensor_and_its_state():
    """As in experts that begin as copies of one layer."""
    dense: Any = nn.ModuleDict({"mlp": nn.Linear(2, 2)})
    optimizer = torch.optim.AdamW(dense.parameters())
    dense["mlp"](torch.ones(2)).sum().backward()
    optimizer.step()
    checkpoint = save(State(weights=dense, optimizer=optimizer))
    experts: Any = nn.ModuleDict({"0": nn.Linear(2, 2), "1": nn.Linear(2, 2)})
    again = torch.optim.AdamW(experts.parameters())

    report = load(
        State(weights=experts, optimizer=again), checkpoint, rename={"0": "mlp", "1": "mlp"}
    )

    for expert in experts.values():
        assert bits(expert.state_dict()) == bits(dense["mlp"].state_dict())
        assert bits(again.state[expert.weight]) == bits(optimizer.state[dense["mlp"].weight])
    assert (
        again.state[experts["0"].weight]["exp_avg"]
        is not again.state[experts["1"].weight]["exp_avg"]
    )
    assert len(report.renamed) == 4
    assert report.downgrades == ()


def test_a_live_name_that_meets_one_by_accident_leaves_another_unexpected():
    checkpoint = save(State(weights={"a": np.ones(2), "b": np.zeros(2)}))
    live = {"a": np.zeros(2), "b": np.zeros(2)}
    assert (
        error_of(lambda: load(State(weights=live), checkpoint, rename={"b": "a"})).code
        == Code.TENSOR_UNEXPECTED
    )
    load(State(weights=live), checkpoint, rename={"b": "a", "a": "b"})
    assert [live["a"].tolist(), live["b"].tolist()] == [[0, 0], [1, 1]]


def test_extras_and_their_optimizers_are_renamed_by_their_own_names():
    net = Net(1)
    optimizer = stepped(net)
    checkpoint = save(State(weights={"gen": net}, extra={"opt": optimizer, "count": 3}))
    other = Net(2)
    again = stepped(other)
    extra = {"optimizer": again, "n": 0}

    report = load(
        State(weights=other, extra=extra),
        checkpoint,
        rename={"": "gen/", "extra/optimizer": "extra/opt", "extra/n": "extra/count"},
    )

    assert bits(other.state_dict()) == bits(net.state_dict())
    assert extra["n"] == 3
    assert bits(again.state[other.head.weight]) == bits(optimizer.state[net.head.weight])
    assert ("optimizer:extra/n", "optimizer:extra/count") in report.renamed


def test_patterns_go_by_saved_names():
    checkpoint = save(State(weights=Net(1)))
    net = Net(2, "backbone")
    report = load(State(weights=net), checkpoint, only="encoder", rename={"backbone": "encoder"})
    assert bits(net.backbone.state_dict()) == bits(Net(1).encoder.state_dict())
    assert report.left_count == 2


# --- dtypes ---------------------------------------------------------------------------------------

FLOATS = [name for name in TORCH_DTYPES if "float" in name and not name.endswith("_x2")]
PAIRS = list(itertools.permutations(FLOATS, 2))
VALUES = [0.0, -0.0, 1.0, -1.5, 3.75, 1e-8, 60000.0, 1e30, float("inf"), float("nan")]


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_every_pair_of_floats_is_converted_as_torch_does(source, target):
    whole = torch.tensor(VALUES, dtype=torch.float64).to(TORCH_DTYPES[source])
    checkpoint = save(State(weights={"w": whole}))
    live = torch.ones(len(VALUES)).to(TORCH_DTYPES[target])

    error = error_of(lambda: load(State(weights={"w": live}), checkpoint))
    assert error.code == Code.DTYPE_MISMATCH
    report = load(State(weights={"w": live}), checkpoint, allow=["dtype"])

    assert bits(live) == bits(whole.to(TORCH_DTYPES[target]))
    assert [f"saved as {source}, here {target}" in line for line in report.downgrades] == [True]
    assert report.claim == "S0"


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_every_pair_of_floats_in_numpy(source, target):
    whole = np.array([0.0, -0.0, 1.0, 2.0, 0.5, np.nan]).astype(numpy_dtype(source))
    checkpoint = save(State(weights={"w": whole}))
    live = np.ones(6).astype(numpy_dtype(target))

    load(State(weights={"w": live}), checkpoint, allow=["dtype"])

    expected = whole.astype(np.float32).astype(numpy_dtype(target))
    np.testing.assert_array_equal(live.astype(np.float64), expected.astype(np.float64))


@pytest.mark.parametrize(("source", "target"), [("float4_e2m1fn_x2", "float32"), ("float32", "float4_e2m1fn_x2"),
                                                ("complex64", "float32")])  # fmt: skip
def test_conversions_that_there_are_not_are_refused_before_anything_changes(source, target):
    if {source, target} - TORCH_DTYPES.keys():
        pytest.skip("this torch lacks the dtype")
    whole = {"a": torch.ones(2), "w": torch.zeros(16, dtype=torch.uint8).view(TORCH_DTYPES[source])}
    checkpoint = save(State(weights=whole))
    live = {"a": torch.zeros(2), "w": torch.zeros(whole["w"].numel(), dtype=torch.uint8)}
    element_nbytes = torch.empty(0, dtype=TORCH_DTYPES[target]).element_size()
    live["w"] = live["w"].repeat(element_nbytes).view(TORCH_DTYPES[target])

    error = error_of(lambda: load(State(weights=live), checkpoint, allow=["dtype"]))

    assert error.code == Code.STATE_UNSUPPORTED
    assert source in str(error)
    assert target in str(error)
    assert live["a"].tolist() == [0, 0]


def test_an_optimizer_goes_on_in_the_dtype_that_its_parameters_were_converted_to():
    """State that had the dtype of its parameter follows it, for kernels want one for both; other state doesn't."""
    net = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(3)).sum().backward()
    optimizer.step()
    optimizer.state[net.weight]["wide"] = torch.ones(2, 3, dtype=torch.float64)
    checkpoint = save(State(weights=net, optimizer=optimizer))

    for live in ("none", "there"):
        half = nn.Linear(3, 2).bfloat16()
        again = torch.optim.AdamW(half.parameters())
        if live == "there":
            half(torch.ones(3).bfloat16()).sum().backward()
            again.step()
        report = load(State(weights=half, optimizer=again), checkpoint, allow=["dtype"])

        state = again.state[half.weight]
        for key in ("exp_avg", "exp_avg_sq"):
            assert bits(state[key]) == bits(optimizer.state[net.weight][key].bfloat16())
            line = f"optimizer:weight/{key}: saved as float32, here bfloat16"
            assert any(line in said for said in report.downgrades)
        assert bits(state["step"]) == bits(optimizer.state[net.weight]["step"])
        assert state.pop("wide").dtype == torch.float64
        half(torch.ones(3).bfloat16()).sum().backward()
        again.step()


# --- modules that come from meta ------------------------------------------------------------------


class TiedNet(nn.Module):
    """Weights that are one tensor under two names, and buffers of both kinds."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.arange(3.0))
        self.register_buffer("cache", torch.arange(2.0), persistent=False)


def test_meta_is_refused_and_to_empty_is_filled_wholly():
    checkpoint = save(State(weights=(net := TiedNet())))
    with torch.device("meta"):
        empty = TiedNet()
    error = error_of(lambda: load(State(weights=empty), checkpoint))
    assert error.code == Code.META_DESTINATION
    assert "to_empty" in str(error)

    empty.to_empty(device="cpu")
    empty.head.weight = empty.embed.weight
    for tensor in (*empty.parameters(), *empty.buffers()):
        tensor.data.fill_(77)
    report = load(State(weights=empty), checkpoint)

    assert bits(empty.state_dict()) == bits(net.state_dict())
    assert empty.head.weight is empty.embed.weight
    assert bits(empty.cache) == bits(net.cache)
    assert report.downgrades == ()


def test_a_non_persistent_buffer_that_was_not_saved_is_reported():
    net = TiedNet()
    del net.cache
    checkpoint = save(State(weights=net))
    report = load(State(weights=TiedNet()), checkpoint)
    assert [line for line in report.downgrades if "weights:cache" in line and "not saved" in line]
    assert report.claim != "T1"


def test_weights_that_are_no_longer_tied_are_filled_and_reported():
    """`to_empty` makes two parameters of a tied one: they would drift apart, step by step."""
    checkpoint = save(State(weights=(net := TiedNet())))
    apart = TiedNet()
    apart.head.weight = nn.Parameter(torch.zeros(5, 3))

    report = load(State(weights=apart), checkpoint)

    assert bits(apart.head.weight) == bits(net.embed.weight) == bits(apart.embed.weight)
    assert any("weights:head.weight" in line and "tied" in line for line in report.downgrades)


def test_a_state_error_is_one():
    with pytest.raises(StateError):
        Only("")
