"""Which field the entries of a foreign file go to."""

import pytest
import torch

import ckptfmt
from tests.convert.made import done, frozen, stored, trees


def weight():
    return torch.arange(2.0)


@pytest.fixture
def fields_of(tmp_path):
    """Save, convert, and return the names of tensors and values by field."""

    def fields_of(value, *options):
        torch.save(value, tmp_path / "a.pt")
        done(tmp_path / "a.pt", tmp_path / "ckpt", "--to", "ckptfmt", *options)
        found = stored(tmp_path / "ckpt")
        return {f"{field}:{name}" for field, name, _ in (*found["tensors"], *found["leaves"])}

    return fields_of


@pytest.mark.parametrize(
    "key", ["weights", "model", "module", "state_dict", "model_state_dict", "net"]
)
def test_usual_names_of_weights(key, fields_of):
    assert fields_of({key: {"layer.w": weight()}, "epoch": 1}) == {
        "weights:layer.w",
        "optimizer:extra/epoch",
    }


@pytest.mark.parametrize("key", ["optimizer", "optim", "optimizer_state_dict", "optim_state_dict"])
def test_usual_names_of_optimizers(key, fields_of):
    value = {"state": {0: {"step": weight()}}, "param_groups": [{"lr": 0.1, "params": [0]}]}

    assert fields_of({"model": {"w": weight()}, key: value}) == {
        "weights:w",
        "optimizer:",
        "optimizer:state/0/step",
    }


def test_mapping_of_tensors_alone_is_weights(fields_of):
    assert fields_of({"model": weight(), "a.b": weight()}) == {"weights:model", "weights:a.b"}


def test_extra_state_of_modules_is_part_of_weights(fields_of):
    assert fields_of({"w": weight(), "layer._extra_state": {"scale": 2}}) == {
        "weights:w",
        "weights:layer._extra_state",
    }


def test_everything_else_is_extra(fields_of):
    assert fields_of({"ema": {"w": weight()}, "step": 3}) == {
        "optimizer:extra/ema",
        "optimizer:extra/ema/w",
        "optimizer:extra/step",
    }


def test_caller_says_otherwise(fields_of):
    assert fields_of(
        {"ema": {"w": weight()}, "model": 3}, "--field", "ema=weights", "--field", "model=extra"
    ) == {
        "weights:w",
        "optimizer:extra/model",
    }


def test_caller_says_what_all_of_it_is(fields_of):
    assert fields_of({"a": {"w": weight()}, "b": weight(), "c": 1}, "--field", "weights") == {
        "weights:",
        "weights:a/w",
        "weights:b",
    }


def test_several_modules_have_the_names_that_a_state_of_them_has(fields_of):
    value = {"net": {"w": weight()}, "model": {"w": weight(), "b": weight()}}

    assert fields_of(value) == {"weights:net/w", "weights:model/w", "weights:model/b"}


def test_imported_weights_load_into_a_module(tmp_path):
    saved, fresh = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    torch.save({"state_dict": saved.state_dict(), "epoch": 4}, tmp_path / "a.pt")
    done(tmp_path / "a.pt", tmp_path / "ckpt", "--to", "ckptfmt", "--only", "weights")

    ckptfmt.load(tmp_path / "ckpt", ckptfmt.State(weights=fresh), allow=("streams",))

    assert frozen(fresh.state_dict()) == frozen(saved.state_dict())


def test_imported_optimizer_is_what_load_state_dict_takes(tmp_path):
    module = torch.nn.Linear(3, 2)
    saved, fresh = (torch.optim.AdamW(module.parameters()) for _ in range(2))
    module(torch.ones(3)).sum().backward()
    saved.step()
    torch.save({"model": module.state_dict(), "optimizer": saved.state_dict()}, tmp_path / "a.pt")
    done(tmp_path / "a.pt", tmp_path / "ckpt", "--to", "ckptfmt")

    fresh.load_state_dict(trees(tmp_path / "ckpt")["optimizer"])

    assert frozen(fresh.state_dict()) == frozen(saved.state_dict())
