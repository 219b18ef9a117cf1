"""What a target can't hold is listed, each with its reason; with --strict, nothing is written then."""

import numpy as np
import pytest
import safetensors.torch
import torch

import ckptfmt
from ckptfmt.adapters.torch.tensors import TORCH_DTYPES
from ckptfmt.store import LocalStore
from tests.builders import leaf, save, snapshot, tensor
from tests.convert.made import done, frozen, reasons, refused, state_of, tensor_of, trained, trees


@pytest.fixture
def run(tmp_path):
    ckptfmt.save(tmp_path / "run", state_of(*trained()), step=3)
    return tmp_path / "run"


CONTEXT = {
    "digests",
    "rng:numpy (lw/0)",
    "rng:python (lw/0)",
    "rng:torch.cpu (lw/0)",
    "provenance:",
    "topology:",
    "topology:local",
    "weights:mask",
}


def test_torch_file_holds_everything_but_the_context(run, tmp_path):
    assert reasons(done(run, tmp_path / "a.pt")).keys() == CONTEXT


def test_dcp_directory_has_kinds_and_ties_of_its_own(run, tmp_path):
    said = reasons(done(run, tmp_path / "dcp", "--to", "dcp"))

    assert said.keys() >= CONTEXT
    assert said["weights/head.weight"] == "tied to weights/embed.weight, and stored a second time"


def test_what_torch_flattens_comes_back_otherwise(tmp_path):
    plain = {
        "w": torch.ones(1),
        "t": (torch.ones(1), 2),
        3: {"x": 1},
        "none": {},
        "deep": [{"y": (1, [torch.ones(2)])}],
    }
    ckptfmt.save(tmp_path / "ckpt", ckptfmt.State(weights=plain), step=1)
    said = reasons(done(tmp_path / "ckpt", tmp_path / "dcp", "--to", "dcp", "--only", "weights"))

    assert said == {
        "t": "a tuple comes back as a list",
        "3": "a key that isn't a string comes back as one",
        "none": "what is empty doesn't come back",
        "deep/0/y": "a tuple comes back as a list",
    }
    done(tmp_path / "dcp", tmp_path / "back", "--to", "ckptfmt")
    back = trees(tmp_path / "back")
    assert frozen(back["optimizer"]["extra/deep"]) == frozen([{"y": [1, [torch.ones(2)]]}])


def test_hugging_face_directory_holds_weights_alone(run, tmp_path):
    said = reasons(done(run, tmp_path / "hf", "--to", "hf"))

    fields = {what.partition(":")[0] for what in said}
    assert fields == {
        "digests",
        "step 3",
        "rng",
        "provenance",
        "topology",
        "data",
        "config",
        "optimizer",
        "weights",
    }
    assert {what for what in said if what.startswith("weights:")} == {
        "weights:mask",
        "weights:head.weight",
    }


@pytest.mark.parametrize("kind", ["torch", "dcp", "hf"])
def test_strict_refuses_before_anything_is_written(kind, run, tmp_path):
    code, error = refused(run, tmp_path / "a", "--to", kind, "--strict")

    assert (code, "left out" in error["detail"]) == ("STATE_UNSUPPORTED", True)


def test_strict_passes_what_is_whole(tmp_path):
    ckptfmt.save(tmp_path / "ckpt", ckptfmt.State(weights={"w": torch.ones(3)}), step=1)
    for kind in ("torch", "dcp", "hf"):
        assert (
            done(tmp_path / "ckpt", tmp_path / kind, "--to", kind, "--only", "weights", "--strict")[
                "left_out"
            ]
            == []
        )


def test_values_that_a_careful_torch_load_refuses(tmp_path):
    config = {
        "lr": np.float64(0.5),
        "ok": 1,
        "deep": [1, {"array": np.arange(3), "fine": "x"}],
        "fixed": frozenset("a"),
    }
    ckptfmt.save(
        tmp_path / "ckpt", ckptfmt.State(weights={"w": torch.ones(1)}, config=config), step=1
    )
    said = reasons(done(tmp_path / "ckpt", tmp_path / "a.pt"))

    assert torch.load(tmp_path / "a.pt", weights_only=True)["config"] == {
        "ok": 1,
        "deep": [1, {"fine": "x"}],
    }
    numpy = "torch.load(weights_only=True) refuses numpy's arrays and scalars"
    assert (said["config:lr"], said["config:deep/1/array"]) == (numpy, numpy)
    assert said["config:fixed"] == "torch.load(weights_only=True) refuses such a frozenset"


def test_what_belongs_to_one_worker(tmp_path):
    tensors = [
        tensor("w", np.zeros(2)),
        *(tensor("w", np.ones(2), scope=f"lw/{worker}") for worker in range(2)),
    ]
    leaves = [leaf("data", {"seen": 1}, scope="lw/0")]
    save(LocalStore(tmp_path / "ckpt", writable=True), snapshot(*tensors, leaves=leaves))
    said = reasons(done(tmp_path / "ckpt", tmp_path / "a.pt"))

    assert torch.load(tmp_path / "a.pt").keys() == {"weights", "step"}
    assert {"weights:w (lw/0)", "weights:w (lw/1)", "data: (lw/0)"} <= said.keys()


def test_dtypes_and_names_that_safetensors_lacks(tmp_path):
    weights = {"c": tensor_of("complex128"), "__metadata__": torch.ones(1), "w": torch.ones(2)}
    ckptfmt.save(tmp_path / "ckpt", ckptfmt.State(weights=weights), step=1)
    said = reasons(done(tmp_path / "ckpt", tmp_path / "hf", "--to", "hf", "--only", "weights"))

    assert said == {
        "weights:c": "safetensors has no dtype complex128",
        "weights:__metadata__": "safetensors keeps this name for itself",
    }
    assert safetensors.torch.load_file(tmp_path / "hf" / "model.safetensors").keys() == {"w"}


@pytest.mark.parametrize("kind", ["torch", "dcp"])
def test_dtypes_that_this_torch_lacks(kind, tmp_path, monkeypatch):
    weights = {"old": torch.ones(1), "new": tensor_of("float8_e5m2")}
    ckptfmt.save(tmp_path / "ckpt", ckptfmt.State(weights=weights), step=1)
    monkeypatch.delitem(TORCH_DTYPES, "float8_e5m2")
    said = reasons(done(tmp_path / "ckpt", tmp_path / kind, "--to", kind, "--only", "weights"))

    assert said == {"new": f"this torch ({torch.__version__}) has no dtype float8_e5m2"}


def test_what_a_torch_file_has_beside_its_values(tmp_path):
    memory = torch.arange(6.0)
    made = {
        "w": torch.nn.Parameter(torch.ones(2)),
        "all": memory,
        "half": memory[:3],
        "other": torch.ones(1),
    }
    torch.save({"model": torch.nn.Linear(2, 2).state_dict(), "ema": made}, tmp_path / "a.pt")
    said = reasons(done(tmp_path / "a.pt", tmp_path / "ckpt", "--to", "ckptfmt"))

    assert said.keys() == {
        "model: _metadata",
        "ema/w: requires_grad",
        "ema/all: the memory that it shares with ema/half",
    } or said.keys() == {
        "model: _metadata",
        "ema/w: requires_grad",
        "ema/half: the memory that it shares with ema/all",
    }


def test_what_lies_beside_the_weights_of_a_hugging_face_directory(tmp_path):
    (tmp_path / "hf").mkdir()
    safetensors.torch.save_file(
        {"w": torch.ones(1)}, tmp_path / "hf" / "model.safetensors", {"made": "by hand"}
    )
    (tmp_path / "hf" / "config.json").write_text("{}")
    said = reasons(done(tmp_path / "hf", tmp_path / "ckpt", "--to", "ckptfmt"))

    assert said.keys() == {"config.json", "model.safetensors:__metadata__/made"}


def test_fields_that_a_source_lacks_are_absent_with_the_reason(tmp_path):
    torch.save({"w": torch.ones(1)}, tmp_path / "a.pt")
    done(tmp_path / "a.pt", tmp_path / "ckpt", "--to", "ckptfmt", "--step", "7")

    with ckptfmt.open(tmp_path / "ckpt") as checkpoint:
        assert checkpoint.step == 7
        found = {field: entry.reason for field, entry in checkpoint.manifest.fields.items()}
    assert found.pop("weights") is None
    assert set(found.values()) == {"imported from a torch.save file"}
