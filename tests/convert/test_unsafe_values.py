"""A value that isn't safe is named by its key, and what doesn't need it is converted without it."""

import argparse
import http
import pathlib
import pickle

import numpy as np
import pytest
import torch

from tests.convert.made import done, frozen, refused, save_dcp, trees


class Settings:
    """A class of somebody's program."""

    def __init__(self) -> None:
        self.lr = 1e-3


class Table(dict):  # type: ignore[type-arg]
    """A mapping of somebody's program."""


VALUES = {
    "pathlib.": pathlib.Path("/data"),
    "argparse.Namespace": argparse.Namespace(lr=0.1, out=pathlib.Path("x")),
    "Settings": Settings(),
    "Table": Table(a=1),
    "numpy.": np.float64(0.5),
    "numpy._core": np.arange(3),
    "relu": torch.nn.functional.relu,
    "getattr": Settings().__init__,  # type: ignore[misc]
    "Linear": torch.nn.Linear(2, 2),
    "enum": http.HTTPStatus.OK,
}


@pytest.mark.parametrize("old", [False, True], ids=["zip", "old form"])
@pytest.mark.parametrize("kind", VALUES)
def test_an_unsafe_value_elsewhere_does_not_hold_up_the_weights(kind, old, tmp_path):
    net = torch.nn.Linear(3, 2)
    value = {
        "state_dict": net.state_dict(),
        "hyper_parameters": {"lr": 0.1, "deep": [1, {"root": VALUES[kind]}]},
    }
    torch.save(value, tmp_path / "a.ckpt", _use_new_zipfile_serialization=not old)

    code, error = refused(tmp_path / "a.ckpt", tmp_path / "out", "--to", "ckptfmt")
    assert (code, error["where"]) == ("STATE_UNSUPPORTED", "hyper_parameters/deep/1/root")
    assert kind in error["detail"] or kind in ("enum", "getattr")
    assert "--only weights" in error["remedy"]

    done(tmp_path / "a.ckpt", tmp_path / "out", "--to", "ckptfmt", "--only", "weights")
    done(tmp_path / "a.ckpt", tmp_path / "w.pt", "--only", "weights")
    said = done(tmp_path / "a.ckpt", tmp_path / "w.safetensors")
    assert frozen(trees(tmp_path / "out")["weights"]) == frozen(dict(net.state_dict()))
    assert any("hyper_parameters" in entry["what"] for entry in said["left_out"])


def test_an_unsafe_value_among_the_weights_is_refused_whatever_is_asked_for(tmp_path):
    torch.save({"model": torch.nn.Linear(2, 2), "epoch": 3}, tmp_path / "a.pt")
    for options in ([], ["--only", "weights"]):
        code, error = refused(tmp_path / "a.pt", tmp_path / "out", "--to", "ckptfmt", *options)
        assert (code, error["where"]) == ("STATE_UNSUPPORTED", "model")
        assert "--only weights" not in error["remedy"]


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_a_tensor_that_cannot_be_converted_is_named_beside_weights_that_can(tmp_path):
    value = {"model": {"w": torch.ones(2)}, "mask": {"m": torch.eye(3).to_sparse()}}
    torch.save(value, tmp_path / "a.pt")

    assert refused(tmp_path / "a.pt", tmp_path / "out", "--to", "ckptfmt")[1]["where"] == "mask/m"
    done(tmp_path / "a.pt", tmp_path / "out", "--to", "ckptfmt", "--only", "weights")
    torch.save({"w": torch.ones(2), "m": torch.eye(3).to_sparse()}, tmp_path / "b.pt")
    code, error = refused(tmp_path / "b.pt", tmp_path / "b", "--to", "ckptfmt", "--only", "weights")
    assert (code, error["where"]) == ("STATE_UNSUPPORTED", "m")


def test_a_dcp_directory_with_an_unsafe_value(tmp_path):
    path = save_dcp({"model": {"w": torch.ones(3)}, "config": Settings()}, tmp_path / "dcp")
    code, error = refused(path, tmp_path / "out", "--to", "ckptfmt")

    assert (code, "config" in error["where"], "Settings" in error["detail"]) == (
        "STATE_UNSUPPORTED",
        True,
        True,
    )
    done(path, tmp_path / "out", "--to", "ckptfmt", "--only", "weights")
    assert trees(tmp_path / "out")["weights"]["w"].tolist() == [1.0] * 3


def test_a_field_without_entries_is_no_checkpoint(tmp_path):
    """`--only weights` of a file that has none made a checkpoint of no tensors."""
    torch.save({"ema": {"w": torch.ones(2)}, "epoch": 3}, tmp_path / "a.pt")
    code, error = refused(
        tmp_path / "a.pt", tmp_path / "out", "--to", "ckptfmt", "--only", "weights"
    )

    assert (code, "--field KEY=weights" in error["remedy"]) == ("ARGUMENT", True)


def test_unsafe_values_are_never_made(tmp_path):
    """A pickle that calls something is read to its end: nothing in it is called, whichever field is wanted."""

    class Call:
        def __reduce__(self):
            return pathlib.Path.touch, (tmp_path / "executed",)

    torch.save({"model": {"w": torch.ones(2)}, "x": Call()}, tmp_path / "a.pt")
    assert pickle.loads(pickle.dumps(Call())) is None
    (tmp_path / "executed").unlink()

    refused(tmp_path / "a.pt", tmp_path / "out", "--to", "ckptfmt")
    done(tmp_path / "a.pt", tmp_path / "out", "--to", "ckptfmt", "--only", "weights")

    assert not (tmp_path / "executed").exists()
