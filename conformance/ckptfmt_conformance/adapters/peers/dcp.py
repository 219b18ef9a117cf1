"""The peer for `torch.distributed.checkpoint`, used as the documentation recommends."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save, save

from ckptfmt_conformance.neutral.peer import Description, Loaded

__all__ = ["Dcp"]

_NO_CRC = (
    "The files hold archives of torch.save; torch.load doesn't compare the archives' sums: "
    "https://github.com/pytorch/pytorch/pull/28858"
)
_NO_DIGEST = (
    "The .metadata file names the bytes of a file for each tensor, without a digest: "
    "torch/distributed/checkpoint/filesystem.py, _StorageInfo"
)
_TRUSTED = (
    "The documentation asks for trusted environments, checkpoints among them: SECURITY.md, "
    "'Using distributed features', and https://github.com/pytorch/pytorch/pull/195600"
)


@dataclasses.dataclass(frozen=True, slots=True)
class _Waiting:
    future: Future[object]

    def wait(self) -> None:
        """Wait until the checkpoint is written."""
        self.future.result()


class Dcp:
    """The peer for `torch.distributed.checkpoint`: a directory, with loads in place."""

    def describe(self) -> Description:
        """Return the peer's description."""
        return Description(
            name="torch.distributed.checkpoint",
            version=torch.__version__,
            settings="dcp.save and dcp.load with FileSystemWriter(sync_files=True); "
            "async_save with a DefaultStager, by thread",
            remarks={"damage/flipped-bit": _NO_CRC, "damage/swapped-file": _NO_DIGEST},
            disclaims={"damage/nothing-executed": _TRUSTED},
        )

    def save(self, path: Path, state: Mapping[str, object], step: int) -> None:
        """Save a directory."""
        save({**state, "step": step}, storage_writer=FileSystemWriter(path, sync_files=True))

    def load(self, path: Path, state: Mapping[str, object]) -> Loaded:
        """Load in place. Values other than tensors are set in the mapping."""
        live: dict[str, Any] = {**state, "step": -1}
        load(live, storage_reader=FileSystemReader(path))
        step = live.pop("step")
        return Loaded(live, step)

    def save_async(self, path: Path, state: Mapping[str, object], step: int) -> _Waiting:
        """Copy the state, and write in a thread."""
        _meet_alone()
        stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=True,
                use_async_staging=False,
                use_non_blocking_copy=False,
            )
        )
        future = async_save(
            {**state, "step": step},
            storage_writer=FileSystemWriter(path, sync_files=True),
            async_checkpointer_type=AsyncCheckpointerType.THREAD,
            async_stager=stager,
        )
        return _Waiting(cast("Future[object]", future))

    save_distributed = save
    load_distributed = load


def _meet_alone() -> None:
    """Initialize the process group for async_save, with only this process."""
    if not dist.is_initialized():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = dist.HashStore()  # type: ignore[attr-defined]  # public, but missing in the stubs
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
