"""A file of another program is recognised first, and refused in one sentence with a remedy that works."""

import json
import pathlib
import struct
import subprocess
import sys
import zipfile

import numpy as np
import pytest
import torch

import ckptfmt
from ckptfmt.errors import Code
from tests.convert.made import bits, convert, done, refused, save_dcp, trees

POINTER = (
    b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"4d" * 32 + b"\nsize 1340573\n"
)


@pytest.mark.parametrize(
    "name", ["model.safetensors", "pytorch_model.bin", "last.ckpt", "model.pt"]
)
def test_a_pointer_of_git_lfs_says_how_its_content_is_fetched(name, tmp_path):
    (tmp_path / name).write_bytes(POINTER)
    code, error = refused(tmp_path / name, tmp_path / "out", "--to", "ckptfmt")

    assert (code, "git lfs pull" in error["remedy"]) == ("FILE_MISSING", True)
    assert "1,340,573 bytes" in error["detail"]


@pytest.mark.parametrize(
    "name", ["model.safetensors", "model.safetensors.index.json", ".metadata", "__0_0.distcp"]
)
def test_a_pointer_of_git_lfs_in_a_directory_is_recognised(name, tmp_path):
    path = save_dcp({"w": torch.ones(3)}, tmp_path / "model")
    if name.startswith("model"):
        (path / ".metadata").unlink()
    (path / name).write_bytes(POINTER)
    code, error = refused(path, tmp_path / "out", "--to", "ckptfmt")

    assert (code, "git lfs pull" in error["remedy"]) == ("FILE_MISSING", True)
    assert error["where"].endswith(name)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("model.gguf", b"GGUF\x03\0\0\0" + bytes(64), "GGUF"),
        ("model.bin", b"GGUF\x03\0\0\0" + bytes(64), "GGUF"),
        ("model.bin", b"tjgg\x03\0\0\0" + bytes(64), "GGUF"),
        ("weights.h5", b"\x89HDF\r\n\x1a\n" + bytes(64), "HDF5"),
        ("model.pt", b"<!DOCTYPE html><html>Sign in</html>", "web page"),
        ("model.pt.gz", b"\x1f\x8b\x08" + bytes(64), "compressed"),
        ("weights.pkl", b"\x80\x04\x95" + bytes(64), "pickle"),
        ("weights.pt", b"", "empty"),
        ("weights.msgpack", b"\x82\xa6params" + bytes(64), "torch.save"),
    ],
)
def test_files_of_other_programs_are_named(name, content, said, tmp_path):
    (tmp_path / name).write_bytes(content)
    for kind in ([], ["--from", "torch"]):
        code, error = refused(tmp_path / name, tmp_path / "out", "--to", "ckptfmt", *kind)
        assert code in ("ARGUMENT", "FILE_NBYTES")
        assert said in error["detail"]
        assert error["remedy"] != Code[code].remedy


def run_remedy(error, tmp_path):
    """Run the Python of a remedy as a user would, in a directory of its own."""
    command = (
        error["remedy"]
        .removeprefix("In Python: ")
        .removeprefix("In Python, if you trust the file: ")
    )
    command, _, _ = command.partition("; then")
    program = f"import torch, numpy, ckptfmt; {command.rstrip('.')}"
    subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, check=True, env={"PYTHONPATH": str(ROOT)}
    )


ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["weights.npz", "weight.npy"])
def test_arrays_of_numpy_are_named_and_the_remedy_saves_them(name, tmp_path):
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    if name == "weight.npy":
        np.save(tmp_path / name, array)
    else:
        np.savez(tmp_path / name, array=array)
    code, error = refused(tmp_path / name, tmp_path / "out", "--to", "ckptfmt")

    assert (code, "numpy" in error["detail"]) == ("ARGUMENT", True)
    run_remedy(error, tmp_path)
    assert (
        ckptfmt.load(tmp_path / "imported", only="weights:*")["weights"]["array"].tolist()
        == array.tolist()
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_program_of_torchscript_is_named_and_the_remedy_takes_its_weights(tmp_path):
    torch.jit.save(
        torch.jit.trace(torch.nn.Linear(2, 3), torch.ones(1, 2)), str(tmp_path / "script.pt")
    )
    code, error = refused(tmp_path / "script.pt", tmp_path / "out", "--to", "ckptfmt")

    assert (code, "TorchScript" in error["detail"]) == ("ARGUMENT", True)
    run_remedy(error, tmp_path)
    assert done(tmp_path / "weights.pt", tmp_path / "out", "--to", "ckptfmt")["tensor_count"] == 2


def test_programs_of_other_versions_of_torch_are_named(tmp_path):
    for name, said in {
        "archive/model.json": "TorchScript",
        "archive/code/__torch__.py": "TorchScript",
        "archive/archive_format": "torch.export",
        "serialized_exported_program.json": "torch.export",
        "model/keras.json": "model/keras.json",
    }.items():
        with zipfile.ZipFile(tmp_path / "a.pt", "w") as made:
            made.writestr(name, b"{}")
        code, error = refused(tmp_path / "a.pt", tmp_path / "out", "--to", "ckptfmt")
        assert (code, said in error["detail"]) == ("ARGUMENT", True)


def test_content_counts_for_more_than_the_name(tmp_path):
    torch.save({"w": torch.ones(3)}, tmp_path / "named.safetensors")
    done(tmp_path / "named.safetensors", tmp_path / "ckpt", "--to", "ckptfmt")
    done(tmp_path / "ckpt", tmp_path / "w.safetensors")
    (tmp_path / "w.safetensors").rename(tmp_path / "named.bin")
    said = done(tmp_path / "named.bin", tmp_path / "again", "--to", "ckptfmt")

    assert said["source"]["kind"] == "hf"
    assert trees(tmp_path / "again")["weights"]["w"].tolist() == [1.0] * 3


def test_a_directory_of_torch_files_says_to_give_one_of_them(tmp_path):
    (tmp_path / "hf").mkdir()
    torch.save({"w": torch.ones(3)}, tmp_path / "hf" / "pytorch_model.bin")
    _, error = refused(tmp_path / "hf", tmp_path / "out", "--to", "ckptfmt")

    assert str(tmp_path / "hf" / "pytorch_model.bin") in error["remedy"]


def test_no_remedy_for_a_foreign_file_speaks_of_a_checkpoint_of_ours(tmp_path):
    """`Load another checkpoint of the run` was what a cut file of safetensors said."""
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", 900) + b"{")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"w": "../x"}})
    )
    path = save_dcp({"w": torch.ones(1000)}, tmp_path / "dcp")
    (path / "__0_0.distcp").write_bytes(b"x")
    torch.save(
        {"model": {"w": torch.ones(1)}, "x": {0: torch.ones(1), "0": torch.ones(1)}},
        tmp_path / "two.pt",
    )
    for name in ("a.safetensors", "hf", "dcp", "two.pt"):
        code, error = refused(tmp_path / name, tmp_path / "out", "--to", "ckptfmt")
        assert error["remedy"] != Code[code].remedy
        assert "checkpoint" not in error["remedy"]


# --- float4 ---------------------------------------------------------------------------------------


def test_float4_of_safetensors_is_taken_and_given_back(tmp_path):
    from safetensors.torch import load_file, save_file  # noqa: PLC0415

    packed = torch.arange(24, dtype=torch.uint8).reshape(3, 8).view(torch.float4_e2m1fn_x2)
    save_file({"w": packed, "scale": torch.ones(3)}, tmp_path / "a.safetensors")
    done(tmp_path / "a.safetensors", tmp_path / "ckpt", "--to", "ckptfmt", "--strict")
    said = done(tmp_path / "ckpt", tmp_path / "b.safetensors", "--only", "weights", "--strict")

    assert said["left_out"] == []
    assert bits(trees(tmp_path / "ckpt")["weights"]["w"]) == bits(packed)
    assert bits(load_file(tmp_path / "b.safetensors")["w"]) == bits(packed)


@pytest.mark.parametrize(("tag", "shape"), [("F4", [3]), ("F4", []), ("F6_E2M3", [4])])
def test_dtypes_of_safetensors_that_no_byte_holds_are_refused(tag, shape, tmp_path):
    nbytes = 2 if tag == "F4" else 3
    header = json.dumps({"w": {"dtype": tag, "shape": shape, "data_offsets": [0, nbytes]}}).encode()
    (tmp_path / "a.safetensors").write_bytes(
        struct.pack("<Q", len(header)) + header + bytes(nbytes)
    )

    assert "error" in convert(tmp_path / "a.safetensors", tmp_path / "out", "--to", "ckptfmt")
    assert not (tmp_path / "out").exists()
