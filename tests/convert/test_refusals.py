"""What can't be converted is refused by name, and leaves nothing behind."""

import json
import os
import pickle
import shutil

import pytest
import safetensors.torch
import torch

import ckptfmt
from tests.convert.made import convert, done, refused, save_dcp, state_of, trained


class Foreign:
    """A class that no careful loader makes an object of."""


@pytest.fixture
def checkpoint(tmp_path):
    ckptfmt.save(tmp_path / "ckpt", ckptfmt.State(weights={"w": torch.ones(3)}), step=1)
    return tmp_path / "ckpt"


# --- paths and kinds ------------------------------------------------------------------------------


@pytest.mark.parametrize("make", ["file", "directory", "link"])
def test_target_that_is_there(make, checkpoint, tmp_path):
    target = tmp_path / "taken.pt"
    if make == "file":
        target.write_bytes(b"precious")
    elif make == "directory":
        target.mkdir()
    else:
        target.symlink_to("nowhere")

    assert refused(checkpoint, target)[0] == "STORE_EXISTS"
    assert target.is_symlink() or target.is_dir() or target.read_bytes() == b"precious"


def test_source_that_is_not_there(tmp_path):
    assert refused(tmp_path / "nothing", tmp_path / "a.pt")[0] == "FILE_MISSING"


def test_source_that_is_no_checkpoint(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.pt").write_text("no checkpoint")

    assert refused(tmp_path / "empty", tmp_path / "a.pt")[0] == "ARGUMENT"
    assert refused(tmp_path / "text.pt", tmp_path / "b", "--to", "ckptfmt")[0] == "ARGUMENT"


@pytest.mark.parametrize("options", [(), ("--from", "torch"), ("--from", "hf")])
def test_source_that_is_no_file_or_leads_nowhere(options, tmp_path):
    """A bare error, or for a named pipe, an endless wait."""
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").write_text("no directory")
    os.mkfifo(tmp_path / "pipe")
    codes = [
        refused(tmp_path / name, tmp_path / "out", "--to", "ckptfmt", *options)[0]
        for name in ("loop", "file/x", "pipe")
    ]
    assert codes == ["STORE_IO", "FILE_MISSING", "UNSAFE_FILE"]


def test_target_behind_a_loop_of_links(checkpoint, tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    target = tmp_path / "loop" / "a.pt"
    assert convert(checkpoint, target)["error"]["code"] == "STORE_IO"
    said = convert(checkpoint, tmp_path / "a.pt", "--statement", str(target))
    assert said["error"]["code"] == "ARGUMENT"


def test_kind_of_the_target_must_be_known(checkpoint, tmp_path):
    code, error = refused(checkpoint, tmp_path / "what")

    assert (code, "--to" in error["remedy"]) == ("ARGUMENT", True)


def test_target_within_its_source(checkpoint):
    said = convert(checkpoint, checkpoint / "inner.pt")

    assert said["error"]["code"] == "ARGUMENT"
    assert not (checkpoint / "inner.pt").exists()


def test_target_among_the_files_of_a_run(tmp_path):
    """The run was invalid afterwards."""
    torch.save({"model": {"w": torch.ones(1)}}, tmp_path / "a.pt")
    with ckptfmt.Checkpointer(tmp_path / "run", ckptfmt.State(data={"a": 1}), saver="inline") as it:
        it.save(step=1)
    before = sorted(tmp_path.rglob("*"))
    for name in ("step-00000009-l0001", "step-00000001-l0001/best", "labels"):
        target = tmp_path / "run" / name
        assert refused(tmp_path / "a.pt", target, "--to", "ckptfmt")[0] == "CHECKPOINT_EXISTS"
    assert sorted(tmp_path.rglob("*")) == before


def test_copy_of_a_checkpoint(checkpoint, tmp_path):
    assert refused(checkpoint, tmp_path / "copy", "--to", "ckptfmt")[0] == "ARGUMENT"


def test_checkpoint_that_is_not_committed(checkpoint, tmp_path):
    (checkpoint / "manifest.json").unlink()

    assert refused(checkpoint, tmp_path / "a.pt")[0] == "NOT_COMMITTED"


def test_damaged_checkpoint_leaves_no_target(checkpoint, tmp_path):
    (shard,) = checkpoint.glob("weights-*")
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    for kind in ("torch", "dcp", "hf"):
        assert refused(checkpoint, tmp_path / f"a.{kind}", "--to", kind)[0] == "BLOCK_DIGEST"


@pytest.mark.parametrize(
    "options",
    [
        ("--only", "nonsense"),
        ("--only", "data"),
        ("--max-shard-size", "5 elephants"),
        ("--max-shard-size", "0"),
        ("--step", "-1"),
        ("--step", str(1 << 53)),
    ],
)
def test_arguments_out_of_range(options, checkpoint, tmp_path):
    assert refused(checkpoint, tmp_path / "a", "--to", "torch", *options)[0] == "ARGUMENT"


def test_options_that_say_nothing_here(checkpoint, tmp_path):
    assert refused(checkpoint, tmp_path / "a.pt", "--step", "3")[0] == "ARGUMENT"
    assert refused(checkpoint, tmp_path / "a.pt", "--field", "w=extra")[0] == "ARGUMENT"


def test_only_weights_go_to_hugging_face(tmp_path):
    ckptfmt.save(tmp_path / "run", state_of(*trained()), step=1)

    assert (
        refused(tmp_path / "run", tmp_path / "hf", "--to", "hf", "--only", "optimizer")[0]
        == "ARGUMENT"
    )


# --- torch.save -----------------------------------------------------------------------------------


def test_truncated_torch_file(tmp_path):
    torch.save({"w": torch.ones(1000)}, tmp_path / "a.pt")
    whole = (tmp_path / "a.pt").read_bytes()
    for nbytes in (4, 100, len(whole) // 2, len(whole) - 1):
        (tmp_path / "cut.pt").write_bytes(whole[:nbytes])
        assert refused(tmp_path / "cut.pt", tmp_path / "b", "--to", "ckptfmt")[0] == "FILE_NBYTES"


def test_pickle_with_a_foreign_class_is_never_executed(tmp_path):
    torch.save({"w": torch.ones(3), "config": Foreign()}, tmp_path / "a.pt")
    code, error = refused(tmp_path / "a.pt", tmp_path / "b", "--to", "ckptfmt")

    assert (code, "Foreign" in error["detail"]) == ("STATE_UNSUPPORTED", True)


@pytest.mark.parametrize(
    "tensor",
    [
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.5, 0, torch.qint8),
        lambda: torch.ones(3, device="meta"),
    ],
    ids=["sparse", "quantized", "meta"],
)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_tensor_that_is_not_its_elements_alone(tensor, tmp_path):
    torch.save({"model": {"layer.w": tensor()}}, tmp_path / "a.pt")
    code, error = refused(tmp_path / "a.pt", tmp_path / "b", "--to", "ckptfmt")

    assert (code, "layer.w" in str(error["where"])) == ("STATE_UNSUPPORTED", True)


def test_value_that_a_checkpoint_has_no_form_for(tmp_path):
    torch.save(
        {"model": {"w": torch.ones(1)}, "state": {"raw": bytearray(b"x")}}, tmp_path / "a.pt"
    )
    code, error = refused(tmp_path / "a.pt", tmp_path / "b", "--to", "ckptfmt")

    assert (code, "bytearray" in error["detail"]) == ("STATE_UNSUPPORTED", True)


@pytest.mark.parametrize("value", [[1, 2], 5, {1: torch.ones(1)}], ids=["list", "int", "keys"])
def test_torch_file_that_is_no_mapping_of_names(value, tmp_path):
    torch.save(value, tmp_path / "a.pt")

    assert refused(tmp_path / "a.pt", tmp_path / "b", "--to", "ckptfmt")[0] == "ARGUMENT"


def test_keys_that_give_two_tensors_one_name(tmp_path):
    torch.save(
        {"model": {"w": torch.ones(1)}, "state": {0: torch.ones(1), "0": torch.ones(2)}},
        tmp_path / "a.pt",
    )

    assert refused(tmp_path / "a.pt", tmp_path / "b", "--to", "ckptfmt")[0] == "STATE_NAME"


def test_mapping_that_contains_itself(tmp_path):
    value: dict[str, object] = {"w": torch.ones(1)}
    value["again"] = value
    torch.save(value, tmp_path / "a.pt")

    assert refused(tmp_path / "a.pt", tmp_path / "b", "--to", "ckptfmt")[0] == "DOC_DEPTH"


@pytest.mark.parametrize("rule", ["model", "model=nonsense", "nothing=weights"])
def test_rules_for_fields_that_fit_nothing(rule, tmp_path):
    torch.save({"model": {"w": torch.ones(1)}}, tmp_path / "a.pt")

    assert (
        refused(tmp_path / "a.pt", tmp_path / "b", "--to", "ckptfmt", "--field", rule)[0]
        == "ARGUMENT"
    )


# --- DCP ------------------------------------------------------------------------------------------


def test_metadata_with_a_foreign_class_is_never_executed(tmp_path):
    path = save_dcp({"w": torch.ones(3)}, tmp_path / "dcp")
    metadata = pickle.loads((path / ".metadata").read_bytes())
    metadata.planner_data = Foreign()
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    code, error = refused(path, tmp_path / "b", "--to", "ckptfmt")

    assert (code, "Foreign" in error["detail"]) == ("STATE_UNSUPPORTED", True)


def test_metadata_that_calls_something(tmp_path):
    path = save_dcp({"w": torch.ones(3)}, tmp_path / "dcp")
    (path / ".metadata").write_bytes(b"cos\nsystem\n(S'touch executed'\ntR.")

    assert refused(path, tmp_path / "b", "--to", "ckptfmt")[0] == "STATE_UNSUPPORTED"


def test_value_in_a_dcp_directory_that_is_not_plain(tmp_path):
    path = save_dcp({"w": torch.ones(3), "config": Foreign()}, tmp_path / "dcp")

    assert refused(path, tmp_path / "b", "--to", "ckptfmt")[0] == "STATE_UNSUPPORTED"


@pytest.mark.parametrize("damage", ["metadata", "file", "missing"])
def test_truncated_dcp_directory(damage, tmp_path):
    path = save_dcp({"w": torch.ones(1000)}, tmp_path / "dcp")
    name = ".metadata" if damage == "metadata" else "__0_0.distcp"
    content = (path / name).read_bytes()
    if damage == "missing":
        (path / name).unlink()
    else:
        (path / name).write_bytes(content[: len(content) // 2])

    code, _ = refused(path, tmp_path / "b", "--to", "ckptfmt")
    assert code == ("FILE_MISSING" if damage == "missing" else "FILE_NBYTES")


def test_dcp_directory_that_lacks_a_chunk(tmp_path):
    path = save_dcp({"w": torch.ones(10)}, tmp_path / "dcp")
    metadata = pickle.loads((path / ".metadata").read_bytes())
    metadata.state_dict_metadata["w"].size = torch.Size([11])
    (path / ".metadata").write_bytes(pickle.dumps(metadata))

    assert refused(path, tmp_path / "b", "--to", "ckptfmt")[0] == "TILING_GAP"


def test_dcp_directory_that_names_a_file_elsewhere(tmp_path):
    path = save_dcp({"w": torch.ones(10)}, tmp_path / "dcp")
    metadata = pickle.loads((path / ".metadata").read_bytes())
    for stored in metadata.storage_data.values():
        stored.relative_path = "../secret"
    (path / ".metadata").write_bytes(pickle.dumps(metadata))

    assert refused(path, tmp_path / "b", "--to", "ckptfmt")[0] == "UNSAFE_PATH"


def test_names_that_torch_joins_to_one(tmp_path):
    ckptfmt.save(
        tmp_path / "ckpt",
        ckptfmt.State(weights={"a.b": torch.ones(1), "a": {"b": torch.ones(2)}}),
        step=1,
    )

    assert refused(tmp_path / "ckpt", tmp_path / "dcp", "--to", "dcp")[0] == "STATE_NAME"


# --- Hugging Face ---------------------------------------------------------------------------------


@pytest.fixture
def hf(tmp_path):
    """A directory of two files and an index."""
    weights = {"a": torch.ones(10), "b": torch.ones(10)}
    ckptfmt.save(tmp_path / "of", ckptfmt.State(weights=weights), step=1)
    done(tmp_path / "of", tmp_path / "hf", "--to", "hf", "--max-shard-size", "40")
    shutil.rmtree(tmp_path / "of")
    return tmp_path / "hf"


def test_hugging_face_file_that_is_missing(hf, tmp_path):
    (hf / "model-00002-of-00002.safetensors").unlink()
    code, error = refused(hf, tmp_path / "b", "--to", "ckptfmt")

    assert (code, error["where"].endswith("model-00002-of-00002.safetensors")) == (
        "FILE_MISSING",
        True,
    )


def test_hugging_face_index_that_is_missing(hf, tmp_path):
    (hf / "model.safetensors.index.json").unlink()
    assert refused(hf, tmp_path / "b", "--to", "ckptfmt")[0] == "FILE_MISSING"
    (hf / "model-00002-of-00002.safetensors").unlink()
    assert refused(hf, tmp_path / "b", "--to", "ckptfmt")[0] == "FILE_MISSING"


def test_hugging_face_tensor_that_is_missing(hf, tmp_path):
    safetensors.torch.save_file({"c": torch.ones(1)}, hf / "model-00002-of-00002.safetensors")

    assert refused(hf, tmp_path / "b", "--to", "ckptfmt")[0] == "SHARD_MISMATCH"


@pytest.mark.parametrize(
    ("index", "code"),
    [
        ("{", "DOC_SYNTAX"),
        ("[]", "DOC_SCHEMA"),
        ('{"weight_map": 3}', "DOC_SCHEMA"),
        (json.dumps({"weight_map": {"a": "../a.safetensors"}}), "UNSAFE_PATH"),
        (json.dumps({"weight_map": {"a": 5}}), "UNSAFE_PATH"),
    ],
)
def test_hugging_face_index_that_is_wrong(index, code, hf, tmp_path):
    (hf / "model.safetensors.index.json").write_text(index)

    assert refused(hf, tmp_path / "b", "--to", "ckptfmt")[0] == code


@pytest.mark.parametrize("nbytes", [0, 5, 60, 100])
def test_hugging_face_file_that_is_not_whole(nbytes, hf, tmp_path):
    path = hf / "model-00001-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:nbytes])

    code = "SHARD_HEADER_SYNTAX" if nbytes else "FILE_NBYTES"
    assert refused(hf, tmp_path / "b", "--to", "ckptfmt")[0] == code
