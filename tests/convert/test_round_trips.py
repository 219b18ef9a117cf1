"""Every direction there and back: no bit of a tensor and no kind of a value differs."""

import collections
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

import ckptfmt
from ckptfmt.dtypes import DTYPES
from tests.convert.made import (
    STRANGE_NAMES,
    all_dtypes,
    bits,
    done,
    frozen,
    reasons,
    save_dcp,
    state_of,
    stored,
    tensor_of,
    trained,
    trees,
)


@pytest.fixture
def run(tmp_path):
    """A checkpoint of a whole run, and what was saved."""
    live = trained()
    ckptfmt.save(tmp_path / "run", state_of(*live), step=3)
    return tmp_path / "run", live


# --- ckptfmt -> other -> ckptfmt ------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["torch", "dcp"])
def test_run_comes_back_into_live_objects(kind, run, tmp_path):
    path, (net, optimizer, scheduler) = run
    done(path, tmp_path / "there", "--to", kind)
    assert done(tmp_path / "there", tmp_path / "back", "--to", "ckptfmt")["step_key"] == "step"

    fresh = trained(seed=1)
    allow: Any = ("missing", "streams") if kind == "torch" else ("missing", "streams", "dtype")
    report: Any = ckptfmt.load(tmp_path / "back", state_of(*fresh), allow=allow)

    assert report.step == 3
    assert frozen(fresh[0].state_dict()) == frozen(net.state_dict())
    assert frozen(fresh[1].state_dict()) == frozen(optimizer.state_dict())
    assert frozen(fresh[2].state_dict()) == frozen(scheduler.state_dict())
    assert fresh[0].head.weight is fresh[0].embed.weight


def beside_optimizer(rows: Any) -> Any:
    """Leave out what a .pt file numbers, and a checkpoint names."""
    return {
        key: row
        for key, row in rows.items()
        if key[0] != "optimizer" or key[1].startswith("extra/")
    }


def test_torch_file_keeps_all_but_the_context(run, tmp_path):
    path, (_, optimizer, _) = run
    done(path, tmp_path / "there.pt")
    done(tmp_path / "there.pt", tmp_path / "back", "--to", "ckptfmt")

    before, after = (
        {kind: beside_optimizer(rows) for kind, rows in stored(at).items()}
        for at in (path, tmp_path / "back")
    )
    buffers = {key for key in before["tensors"] if key[1] == "mask"}
    assert after["tensors"] == {
        key: row for key, row in before["tensors"].items() if key not in buffers
    }
    assert after["leaves"] == before["leaves"]
    assert frozen(trees(tmp_path / "back")["optimizer"][""]) == frozen(optimizer.state_dict())


def test_dcp_directory_keeps_all_but_the_context_and_the_ties(run, tmp_path):
    path, _ = run
    said = done(path, tmp_path / "there", "--to", "dcp")
    done(tmp_path / "there", tmp_path / "back", "--to", "ckptfmt")

    before, after = stored(path), stored(tmp_path / "back")
    tied = before["tensors"]["weights", "embed.weight", "global"]
    assert tied[2] == ("head.weight",)
    untied = (*tied[:2], (), tied[3])
    wanted = {key: row for key, row in before["tensors"].items() if key[1] != "mask"}
    wanted["weights", "embed.weight", "global"] = wanted["weights", "head.weight", "global"] = (
        untied
    )
    assert after["tensors"] == wanted
    assert (
        reasons(said)["weights/head.weight"]
        == "tied to weights/embed.weight, and stored a second time"
    )


def test_every_dtype_passes_through_each_kind(tmp_path):
    ckptfmt.save(tmp_path / "all", ckptfmt.State(weights=all_dtypes()), step=1)
    before = stored(tmp_path / "all")["tensors"]
    assert {row[0] for row in before.values()} >= set(DTYPES) - {
        "float8_e8m0fnu",
        "float4_e2m1fn_x2",
    }
    for kind in ("torch", "dcp", "hf"):
        said = done(tmp_path / "all", tmp_path / kind, "--to", kind)
        done(tmp_path / kind, tmp_path / f"back-{kind}", "--to", "ckptfmt")

        after = stored(tmp_path / f"back-{kind}")["tensors"]
        left_out = {
            key
            for key, row in before.items()
            if kind == "hf" and row[0] in ("complex128", "complex32")
        }
        assert after == {key: row for key, row in before.items() if key not in left_out}
        for _, name, _ in left_out:
            assert "safetensors has no dtype" in reasons(said)[f"weights:{name}"]


@pytest.mark.parametrize("kind", ["torch", "dcp", "hf"])
def test_tensors_of_many_chunks(kind, tmp_path, monkeypatch):
    monkeypatch.setattr("ckptfmt_tools.convert.content.CHUNK_NBYTES", 64)
    weights = {
        "rows": tensor_of("float64", (13, 11)),
        "deep": tensor_of("int16", (3, 5, 7, 2)),
        "long": tensor_of("uint8", (1001,)),
        "wide": tensor_of("bfloat16", (1, 300)),
    }
    ckptfmt.save(tmp_path / "ckpt", ckptfmt.State(weights=weights), step=1, block_nbytes=4096)
    done(tmp_path / "ckpt", tmp_path / kind, "--to", kind, "--only", "weights")
    done(tmp_path / kind, tmp_path / "back", "--to", "ckptfmt")

    assert stored(tmp_path / "back")["tensors"] == stored(tmp_path / "ckpt")["tensors"]


@pytest.mark.parametrize("kind", ["torch", "dcp", "hf"])
def test_names_are_kept_as_they_are(kind, tmp_path):
    weights = {name: torch.full((2,), float(number)) for number, name in enumerate(STRANGE_NAMES)}
    ckptfmt.save(tmp_path / "names", ckptfmt.State(weights=weights), step=1)
    done(tmp_path / "names", tmp_path / kind, "--to", kind, "--only", "weights")
    done(tmp_path / kind, tmp_path / "back", "--to", "ckptfmt")

    assert frozen(trees(tmp_path / "back")["weights"]) == frozen(weights)


def test_several_writers_become_one(tmp_path):
    # What is in pieces of several processes, uneven ones and columns among them, is put together.
    import threading  # noqa: PLC0415

    from ckptfmt.box import Box  # noqa: PLC0415
    from tests.builders import ArraySource  # noqa: PLC0415

    whole = np.arange(7 * 5, dtype=np.float64).reshape(7, 5)
    boxes = [(Box((0, 0), (7, 2)),), (Box((0, 2), (3, 3)), Box((3, 2), (4, 3)))]

    def save(writer):
        source = ArraySource(
            field="weights",
            name="w",
            array=whole,
            boxes=boxes[writer],
            dtype="float64",
            global_shape=(7, 5),
        )
        ckptfmt.save(
            tmp_path / "pieces",
            ckptfmt.State(weights={"w": source}),
            step=1,
            writer=(writer, 2),
            agree="token",
        )

    threads = [threading.Thread(target=save, args=(writer,)) for writer in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done(tmp_path / "pieces", tmp_path / "one.pt", "--only", "weights")

    assert bits(torch.load(tmp_path / "one.pt")["w"]) == bits(torch.from_numpy(whole))


# --- other -> ckptfmt -> other --------------------------------------------------------------------


def nested():
    net, optimizer, scheduler = trained()
    return {
        "model": net.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "epoch": 3,
        "plain": {
            "list": [1, 2.5, "x", None, True],
            "tuple": (1, (2,)),
            "big": 1 << 200,
            "complex": 1 - 2j,
            "bytes": b"\x00\xff",
            "set": {1, 2},
            "ordered": collections.OrderedDict(b=1, a=2),
            "dtype": torch.bfloat16,
            "device": torch.device("cpu"),
            "size": torch.Size([2, 3]),
            "zero": -0.0,
            "nan": float("nan"),
        },
        "columns": torch.arange(24.0).reshape(4, 6).t()[1:, ::2],
        "conj": torch.complex(torch.arange(3.0), torch.ones(3)).conj(),
    }


def test_torch_file_comes_back_with_its_values(tmp_path):
    before = nested()
    torch.save(before, tmp_path / "a.pt")
    done(tmp_path / "a.pt", tmp_path / "ckpt", "--to", "ckptfmt")
    done(tmp_path / "ckpt", tmp_path / "b.pt")

    after = torch.load(tmp_path / "b.pt", weights_only=True)
    others = {key: value for key, value in before.items() if key not in ("model", "optimizer")}
    assert frozen(after["extra"]) == frozen(others)
    assert frozen(after["optimizer"]) == frozen(before["optimizer"])
    assert frozen(after["weights"])[1] == frozen(before["model"])[1]


def test_torch_file_keeps_what_shares_memory(tmp_path):
    shared = torch.arange(6.0).reshape(2, 3)
    torch.save({"a": shared, "b": shared, "c": shared[:]}, tmp_path / "a.pt")
    done(tmp_path / "a.pt", tmp_path / "ckpt", "--to", "ckptfmt")
    done(tmp_path / "ckpt", tmp_path / "b.pt", "--only", "weights")

    after = torch.load(tmp_path / "b.pt", weights_only=True)
    assert {tensor.data_ptr() for tensor in after.values()} == {after["a"].data_ptr()}
    assert frozen(after) == frozen({"a": shared, "b": shared, "c": shared})


def test_tensor_shared_within_a_tree_is_stored_once(tmp_path):
    shared = torch.arange(6.0)
    torch.save(
        {"model": {"w": torch.ones(2)}, "ema": {"x": [shared, {"y": shared}]}}, tmp_path / "a.pt"
    )
    done(tmp_path / "a.pt", tmp_path / "ckpt", "--to", "ckptfmt")
    done(tmp_path / "ckpt", tmp_path / "b.pt")

    assert len(stored(tmp_path / "ckpt")["tensors"]) == 2
    first, second = torch.load(tmp_path / "b.pt")["extra"]["ema"]["x"]
    assert first.data_ptr() == second["y"].data_ptr()


def test_dcp_directory_comes_back_with_its_values(tmp_path):
    net, optimizer, _ = trained()
    before = {
        "model": net.state_dict(),
        "optim": optimizer.state_dict(),
        "epoch": 3,
        "all": all_dtypes(),
    }
    save_dcp(before, tmp_path / "a")
    done(tmp_path / "a", tmp_path / "ckpt", "--to", "ckptfmt")
    done(tmp_path / "ckpt", tmp_path / "b", "--to", "dcp")

    done(tmp_path / "a", tmp_path / "a.pt")
    done(tmp_path / "b", tmp_path / "b.pt")
    first, second = (torch.load(tmp_path / name, weights_only=True) for name in ("a.pt", "b.pt"))
    assert frozen({**first, "step": 0}) == frozen(second)
    assert frozen(first["extra"]["all"]) == frozen(before["all"])
    assert frozen(first["weights"])[1] == frozen(before["model"])[1]


def test_hugging_face_directory_comes_back_file_by_file(tmp_path):
    before = {name: tensor for name, tensor in all_dtypes().items() if fits(name)}
    (tmp_path / "a").mkdir()
    safetensors.torch.save_file(
        before, tmp_path / "a" / "model.safetensors", metadata={"format": "pt"}
    )
    done(tmp_path / "a", tmp_path / "ckpt", "--to", "ckptfmt", "--strict")
    said = done(tmp_path / "ckpt", tmp_path / "b", "--to", "hf", "--only", "weights", "--strict")

    assert said["left_out"] == []
    assert frozen(safetensors.torch.load_file(tmp_path / "b" / "model.safetensors")) == frozen(
        before
    )


def test_foreign_kinds_become_each_other(tmp_path):
    weights = {"w": tensor_of("float32"), "b": tensor_of("bfloat16", (4,))}
    torch.save(weights, tmp_path / "a.pt")
    done(tmp_path / "a.pt", tmp_path / "hf", "--to", "hf", "--max-shard-size", "50B")
    done(tmp_path / "hf", tmp_path / "dcp", "--to", "dcp", "--only", "weights")
    done(tmp_path / "dcp", tmp_path / "b.pt", "--only", "weights")

    assert frozen(torch.load(tmp_path / "b.pt")) == frozen(weights)


def fits(name):
    dtype = DTYPES[name.partition(".")[0]]
    return dtype.safetensors is not None and dtype.safetensors in safetensors.torch._TYPES
