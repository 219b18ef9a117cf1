"""The interface of torch_checkpointing's CheckpointManager, with checkpoints of ckptfmt."""

import dataclasses
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfmt

managers: Any = pytest.importorskip("torch_checkpointing.checkpoint_manager")
ItemSpec: Any = pytest.importorskip("torch_checkpointing.schema").ItemSpec
layouts: Any = pytest.importorskip("torch_checkpointing.checkpoint_layout")
files: Any = pytest.importorskip("torch_checkpointing.storage.filesystem")
CkptfmtCheckpointManager: Any = pytest.importorskip(
    "ckptfmt.plugins.torch_checkpointing"
).CkptfmtCheckpointManager
Config: Any = managers.CheckpointManager.Config
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
WORKER = Path(__file__).with_name("torch_checkpointing_worker.py")


def trained():
    torch.manual_seed(1)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4, 3)).square().mean().backward()
    optimizer.step()
    return model, optimizer


def payload_of(model, optimizer):
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict  # noqa: PLC0415

    return {
        "model": model.state_dict(),
        "optimizer": get_optimizer_state_dict(model, optimizer),
        "step": 10,
        "note": {"lr": [1.5, None], "name": "a"},
    }


def bits(tree):
    if isinstance(tree, torch.Tensor):
        return tree.dtype, tuple(tree.shape), tree.detach().reshape(-1).view(torch.uint8).tolist()
    if isinstance(tree, dict):
        return {key: bits(value) for key, value in tree.items()}
    return [bits(item) for item in tree] if isinstance(tree, list | tuple) else tree


def zeros(tree):
    if isinstance(tree, torch.Tensor):
        return torch.zeros_like(tree)
    if isinstance(tree, dict):
        return {key: zeros(value) for key, value in tree.items()}
    return [zeros(item) for item in tree] if isinstance(tree, list | tuple) else type(tree)()


@pytest.mark.parametrize("kind", ["with_sync_save", "with_async_save"])
def test_a_payload_comes_back_bit_by_bit_and_loads_into_live_objects(tmp_path, kind):
    path = str(tmp_path / "step-10")
    payload = payload_of(*trained())
    expected = bits(payload)
    manager = CkptfmtCheckpointManager(getattr(Config, kind)())
    manager.prewarm_staging(payload)
    future = manager.save(path, payload)
    assert (future is None) == (kind == "with_sync_save")
    with manager.lock():
        payload["model"]["weight"].add_(1)
    if future is not None:
        future.result(timeout=60)
    into = zeros(payload)
    weight = into["model"]["weight"]
    loaded = manager.load(path, into=into, strict=True)
    assert bits(dict(loaded)) == expected
    assert loaded["model"]["weight"] is weight
    assert manager.load(path, into={"step": 0})["step"] == 10
    manager.close()
    manager.close()
    for method in ("save", "load"):
        with pytest.raises(RuntimeError, match="closed"):
            getattr(manager, method)(path, {"step": 0})

    model, _ = trained()
    torch.nn.init.zeros_(model.weight)
    report = ckptfmt.load(path, ckptfmt.State(weights=model), only="weights:*")
    assert report.step == 10
    assert bits(model.state_dict()) == expected["model"]
    assert not ckptfmt.validate(path).violations


def test_a_failed_save_is_raised_by_the_next_call_and_leaves_the_older_checkpoint(tmp_path):
    path = str(tmp_path / "last")
    manager = CkptfmtCheckpointManager()
    manager.save(path, {"step": 1}).result(timeout=60)
    manager.save(path, {"step": object()})
    with pytest.raises(BaseException, match="no plain value"):
        manager.close()
    assert CkptfmtCheckpointManager().load(path, into={"step": 0})["step"] == 1


def test_missing_entries(tmp_path, caplog):
    path = str(tmp_path / "c")
    manager = CkptfmtCheckpointManager(Config.with_sync_save())
    manager.save(path, {"model": {"a": torch.ones(2)}, "step": 3})
    into = {"model": {"a": torch.zeros(2), "b": torch.full((1,), 7.0)}}
    with caplog.at_level(logging.WARNING):
        loaded = manager.load(path, into=into)
    assert loaded["model"]["a"].tolist() == [1, 1]
    assert loaded["model"]["b"].tolist() == [7]
    assert "model.b" in caplog.text
    with pytest.raises(RuntimeError, match=r"model\.b"):
        manager.load(path, into=into, strict=True)
    with pytest.raises(KeyError, match="optimizer"):
        manager.load(path, into={"optimizer": {"lr": 1}})
    with pytest.raises(ckptfmt.CkptError, match=r"NOT_COMMITTED|STORE_NOT_FOUND"):
        manager.load(str(tmp_path / "nothing"), into={"step": 0})


def test_the_schema_decides_on_the_items(tmp_path):
    path = str(tmp_path / "c")
    strict = CkptfmtCheckpointManager(
        Config(items={"step": ItemSpec(), "note": ItemSpec(required=False)}, default=None)
    )
    with pytest.raises(KeyError, match="strict"):
        strict.save(path, {"step": 1, "model": torch.ones(1)})
    with pytest.raises(KeyError, match="required"):
        strict.save(path, {"note": "a"})
    strict.save(path, {"step": 4, "note": "a"})
    strict.close()
    later = CkptfmtCheckpointManager(Config(items={"step": ItemSpec(), "note": ItemSpec()}))
    assert dict(later.load(path)) == {"step": 4, "note": "a"}
    with pytest.raises(ValueError, match="into="):
        CkptfmtCheckpointManager().load(path)


def test_options_of_other_files_are_refused(tmp_path):
    @dataclasses.dataclass
    class Elsewhere(files.StorageConfig):
        def create_storage(self):
            raise NotImplementedError

    layout = layouts.default_torch_layout_info("model", 0)
    for config, word in (
        (Config(storage_config=Elsewhere()), "Elsewhere"),
        (Config(finalize_callback=print), "finalize_callback"),
        (Config(items={"model": ItemSpec(layout=layout)}), "layout"),
    ):
        with pytest.raises(ValueError, match=word):
            CkptfmtCheckpointManager(config)
    CkptfmtCheckpointManager(Config(storage_config=files.LocalFileSystemStorageConfig()))
    with pytest.raises(ValueError, match="map_location"):
        CkptfmtCheckpointManager().load(tmp_path, into={"step": 0}, map_location="cpu")

    class Geometry(torch.Tensor):
        global_shape = (4,)
        global_offsets = ((0,),)
        local_offsets = ((0,),)
        local_sizes = ((2,),)

    with pytest.raises(ValueError, match="CheckpointableTensor"):
        CkptfmtCheckpointManager().save(
            str(tmp_path / "c"), {"model": {"w": torch.ones(2).as_subclass(Geometry)}}
        )


def test_ranks_share_sharded_items_and_keep_their_own(tmp_path):
    meeting = tmp_path / "meeting"
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(tmp_path), str(meeting)],
            env={"RANK": str(rank), "PYTHONPATH": str(WORKER.parents[2]), "PATH": ""},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], errors
    manager = CkptfmtCheckpointManager()  # one rank reads the two shards
    into = {"model": {"w": torch.zeros(7, 6)}, "loader": {"rank-1": {"position": 0}}}
    loaded = manager.load(tmp_path / "both", into=into, strict=True)
    assert loaded["model"]["w"].tolist() == torch.arange(42.0).reshape(7, 6).tolist()
    assert loaded["loader"] == {"rank-1": {"position": 11}}
