"""What is made for others, others load; what others made in pieces is joined."""

import json
from typing import Any

import pytest
import safetensors.torch
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader

import ckptfmt
from tests.convert.made import (
    Net,
    bits,
    done,
    frozen,
    load_dcp,
    reasons,
    state_of,
    stored,
    trained,
    trees,
)
from tests.resharding.launch import launch


@pytest.fixture
def run(tmp_path):
    """A checkpoint of a whole run, and the net that was saved."""
    live = trained()
    ckptfmt.save(tmp_path / "run", state_of(*live), step=3)
    return tmp_path / "run", live


def test_torch_loads_the_weights_into_a_module(run, tmp_path):
    path, (net, _, _) = run
    done(path, tmp_path / "weights.pt", "--only", "weights")

    fresh = Net(seed=1)
    fresh.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))

    assert frozen(fresh.state_dict()) == frozen(net.state_dict())


def test_torch_file_is_a_sound_zip_archive_in_which_ties_are_kept(run, tmp_path):
    import zipfile  # noqa: PLC0415

    path, _ = run
    done(path, tmp_path / "all.pt")

    content = (tmp_path / "all.pt").read_bytes()
    with zipfile.ZipFile(tmp_path / "all.pt") as archive:
        assert archive.testzip() is None
        # Who reads the archive as a stream meets the checksum behind the contents, and never the
        # directory.
        for record in archive.infolist():
            descriptor = archive.read(record) + b"PK\x07\x08" + record.CRC.to_bytes(4, "little")
            assert descriptor in content[record.header_offset :] or not record.flag_bits & 8
    mapped = torch.load(tmp_path / "all.pt", weights_only=True, mmap=True)["weights"]
    assert mapped["embed.weight"].data_ptr() == mapped["head.weight"].data_ptr()


def test_dcp_loads_the_weights_into_a_module(run, tmp_path):
    path, (net, _, _) = run
    done(path, tmp_path / "dcp", "--to", "dcp", "--only", "weights")

    fresh = Net(seed=1).state_dict()
    load_dcp(fresh, tmp_path / "dcp")

    assert frozen(fresh) == frozen(net.state_dict())


def test_dcp_reads_a_tensor_that_was_written_in_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr("ckptfmt_tools.convert.content.CHUNK_NBYTES", 64)
    whole = torch.arange(13 * 11, dtype=torch.float64).reshape(13, 11)
    ckptfmt.save(
        tmp_path / "ckpt", ckptfmt.State(weights={"w": whole, "s": torch.tensor(2.5)}), step=1
    )
    done(tmp_path / "ckpt", tmp_path / "dcp", "--to", "dcp", "--only", "weights")

    read = {"w": torch.zeros(13, 11, dtype=torch.float64), "s": torch.zeros(())}
    load_dcp(read, tmp_path / "dcp")
    done(tmp_path / "dcp", tmp_path / "back", "--to", "ckptfmt")

    assert bits(read["w"]) == bits(whole)
    assert read["s"] == 2.5
    described: Any = FileSystemReader(tmp_path / "dcp").read_metadata().state_dict_metadata["w"]
    assert len(described.chunks) > 13
    assert frozen(trees(tmp_path / "back")["weights"]["w"]) == bits(whole)


def test_safetensors_loads_the_weights_into_a_module(run, tmp_path):
    path, (net, _, _) = run
    said = done(path, tmp_path / "hf", "--to", "hf")

    fresh = Net(seed=1)
    missing, unexpected = safetensors.torch.load_model(fresh, tmp_path / "hf" / "model.safetensors")
    assert not missing
    assert not unexpected
    assert frozen(fresh.state_dict()) == frozen(net.state_dict())
    assert reasons(said)["weights:head.weight"] == "tied to embed.weight, which is stored once"


def test_shards_of_a_hugging_face_directory_hold_the_limit_and_are_found_by_the_index(tmp_path):
    weights = {f"layer.{number}": torch.full((100,), float(number)) for number in range(7)}
    ckptfmt.save(tmp_path / "ckpt", ckptfmt.State(weights=weights), step=1)
    done(
        tmp_path / "ckpt",
        tmp_path / "hf",
        "--to",
        "hf",
        "--max-shard-size",
        "1KB",
        "--only",
        "weights",
    )

    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    names = [f"model-{number:05d}-of-00004.safetensors" for number in range(1, 5)]
    assert sorted(path.name for path in (tmp_path / "hf").iterdir()) == [
        "README.md",
        *names,
        "model.safetensors.index.json",
    ]
    assert index["metadata"] == {"total_size": 2800}
    read = {name: safetensors.torch.load_file(tmp_path / "hf" / name) for name in names}
    assert all(sum(tensor.nbytes for tensor in file.values()) <= 1000 for file in read.values())
    assert frozen({name: read[file][name] for name, file in index["weight_map"].items()}) == frozen(
        weights
    )


def test_tensor_larger_than_the_limit_has_a_file_of_its_own(tmp_path):
    weights = {"a": torch.zeros(1), "b": torch.zeros(1000), "c": torch.zeros(1)}
    ckptfmt.save(tmp_path / "ckpt", ckptfmt.State(weights=weights), step=1)
    done(tmp_path / "ckpt", tmp_path / "hf", "--to", "hf", "--max-shard-size", "100B")

    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == 3


def test_statistics_of_several_workers_are_those_of_the_first(tmp_path):
    # As BatchNorm's under DistributedDataParallel: each worker has its own, and a module has room
    # for one.
    import numpy as np  # noqa: PLC0415

    from ckptfmt.store import LocalStore  # noqa: PLC0415
    from tests.builders import save, snapshot, tensor  # noqa: PLC0415

    sources = [
        tensor("mean", np.full(2, float(worker)), scope=f"lw/{worker}") for worker in range(2)
    ]
    save(LocalStore(tmp_path / "ckpt", writable=True), snapshot(*sources))
    said = done(tmp_path / "ckpt", tmp_path / "weights.pt", "--only", "weights")

    assert torch.load(tmp_path / "weights.pt")["mean"].tolist() == [0.0, 0.0]
    assert list(reasons(said)) == ["weights:mean (lw/1)"]


@pytest.mark.dist
def test_shards_of_two_processes_are_joined(tmp_path):
    launched = launch("tests.convert.scenes", ["fsdp_save"], world_size=2, scratch=tmp_path)
    names, _ = launched.of("fsdp_save")
    done(tmp_path / "dcp", tmp_path / "ckpt", "--to", "ckptfmt")

    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    tensors = stored(tmp_path / "ckpt")["tensors"]
    found = trees(tmp_path / "ckpt")
    assert sorted(found["weights"]) == names
    assert frozen(found["weights"]) == frozen(whole["model"])
    assert frozen(
        {name: row["exp_avg"] for name, row in found["optimizer"][""]["state"].items()}
    ) == frozen(whole["moments"])
    assert frozen(found["optimizer"]["extra/others"]) == frozen(whole["others"])
    assert found["optimizer"]["extra/epoch"] == 2
    assert {key[2] for key in tensors} == {"global"}
