"""One rank with FSDP2: load a plain checkpoint through DCP, and save it in each form.

Usage: dcp_moving.py FOLDER
"""

import sys
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import hf_storage
from torch.distributed.checkpoint import state_dict_loader as dcp_load
from torch.distributed.checkpoint import state_dict_saver as dcp_save
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.fsdp import fully_shard

from ckptfmt.plugins.dcp import CkptfmtReader, CkptfmtWriter
from tests.plugins.test_dcp_optimizers import FLAT, AppState, made, optimizer_of


def save_stages(folder: str) -> None:
    """Save a part of a model and its optimizer on each rank, as stages of a pipeline do."""
    model, optimizer = made(1, 3)
    names = {name for name in model.state_dict() if (name[0] == "0") == (dist.get_rank() == 0)}
    weights = {name: value for name, value in model.state_dict().items() if name in names}
    flat = AppState(model, optimizer, options=FLAT).state_dict()["optim"]
    flat = {
        key: value
        for key, value in flat.items()
        if key.split(".", 1)[1].rpartition(".")[0] in names
    }
    nested = AppState(model, optimizer).state_dict()["optim"]
    nested["state"] = {name: one for name, one in nested["state"].items() if name in names}
    for group in nested["param_groups"]:
        group["params"] = [name for name in group["params"] if name in names]
    for name, optim in (("stages-3", flat), ("nested-stages-3", nested)):
        writer = CkptfmtWriter(f"{folder}/{name}")
        dcp_save.save({"app": {"model": weights, "optim": optim}}, storage_writer=writer)


def main(folder: str) -> None:
    """Load, save, and try the reader of safetensors files."""
    dist.init_process_group("gloo")
    model, _ = made(5, 0)
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    optimizer = optimizer_of(model)
    app = AppState(model, optimizer)
    dcp_load.load({"app": app}, storage_reader=CkptfmtReader(f"{folder}/own"))
    dcp_save.save({"app": app}, storage_writer=CkptfmtWriter(f"{folder}/nested-3"))
    flat: dict[str, Any] = {"app": AppState(model, optimizer, options=FLAT)}
    dcp_save.save(flat, storage_writer=CkptfmtWriter(f"{folder}/flat-3"))
    for name in ("first-3", "cached-3"):
        planner = DefaultSavePlanner(enable_plan_caching=True)
        writer = CkptfmtWriter(f"{folder}/{name}")
        dcp_save.save({"app": app}, storage_writer=writer, planner=planner)
    dcp_save.save(model.state_dict(), storage_writer=CkptfmtWriter(f"{folder}/weights-3"))
    reader_of: Any = getattr(hf_storage, "HuggingFaceStorageReader", None)
    try:
        dcp_load.load(model.state_dict(), storage_reader=reader_of(f"{folder}/weights-3"))
    except CheckpointException as error:
        sys.stdout.write(f"HuggingFaceStorageReader: {error.failures[dist.get_rank()][0]}\n")
    save_stages(folder)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
