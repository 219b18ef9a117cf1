"""Durable peers at their best settings: torch.save, safetensors, DCP sync and async."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import safetensors.torch
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import _async_process_executor as process_executor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import (
    AsyncCheckpointerType,
    AsyncSaveResponse,
    async_save,
    save,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from benchmarks.cold import sync_directory, sync_file


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """A save in progress.

    Attributes:
        path: the path of the result.
        is_done: return whether the save is durable or has failed.
        wait: wait for the end, and raise the save's error.
        blocked_s: the caller's blocking time as reported by the library; None without a report.
    """

    path: Path
    is_done: Callable[[], bool]
    wait: Callable[[], object]
    blocked_s: Callable[[], float | None] = lambda: None


class DurableWriter(FileSystemWriter):
    """DCP's writer, which makes files durable, extended to directories.

    Args:
        checksums: whether the CRC-32 of each tensor is computed, torch's default. Without
            checksums, other tools report the archives as damaged.
    """

    def __init__(self, path: Path, *, thread_count: int, checksums: bool) -> None:
        super().__init__(path, thread_count=thread_count)
        self._checksums = checksums

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write all tensors, in any process."""
        before = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(self._checksums)
        try:
            return super().write_data(plan, planner)
        finally:
            torch.serialization.set_crc32_options(before)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Finish the checkpoint; every name is durable afterwards."""
        super().finish(metadata, results)
        sync_directory(Path(self.path))
        sync_directory(Path(self.path).parent)


class TorchSave:
    """`torch.save`, then fsync."""

    name = "torch_save"
    is_buffered = True

    def __init__(self, state_dict: Callable[[], Mapping[str, object]]) -> None:
        self._state_dict = state_dict

    def describe(self) -> dict[str, object]:
        """Return the settings."""
        return {"call": "torch.save(state_dict, path)", "durable": "fsync of file and directory"}

    def save(self, path: Path) -> Path:
        """Save durably; return the file."""
        torch.save(self._state_dict(), path)
        sync_file(path)
        return path


class Safetensors:
    """`safetensors.torch.save_file`, then fsync."""

    name = "safetensors"
    is_buffered = True

    def __init__(self, tensors: Callable[[], dict[str, torch.Tensor]]) -> None:
        self._tensors = tensors

    def describe(self) -> dict[str, object]:
        """Return the settings."""
        return {
            "call": "safetensors.torch.save_file(tensors, path)",
            "durable": "fsync of file and directory",
        }

    def save(self, path: Path) -> Path:
        """Save durably; return the file."""
        safetensors.torch.save_file(self._tensors(), path)
        sync_file(path)
        return path


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WriterOptions:
    """DCP's options for writing."""

    thread_count: int
    checksums: bool

    def make_writer(self, path: Path) -> DurableWriter:
        """Return a save's writer."""
        return DurableWriter(path, thread_count=self.thread_count, checksums=self.checksums)

    def describe(self) -> dict[str, object]:
        """Return the settings."""
        return {
            "single_file_per_rank": True,
            "sync_files": True,
            **dataclasses.asdict(self),
            "durable": "fsync of files by DCP, of directories added",
        }


class Dcp:
    """`torch.distributed.checkpoint.save`, with default or other options."""

    is_buffered = True

    def __init__(
        self,
        state_dict: Callable[[], Mapping[str, object]],
        *,
        name: str = "dcp",
        thread_count: int = 1,
        checksums: bool = True,
    ) -> None:
        self.name = name
        self._state_dict = state_dict
        self._options = WriterOptions(thread_count=thread_count, checksums=checksums)

    def describe(self) -> dict[str, object]:
        """Return the settings."""
        return {"call": "dcp.save", **self._options.describe()}

    def save(self, path: Path) -> Path:
        """Save durably; return the directory."""
        save(dict(self._state_dict()), storage_writer=self._options.make_writer(path))
        return path


class DcpAsync:
    """`torch.distributed.checkpoint.async_save` with a stager that reuses its shared memory.

    Args:
        kind: the writer's kind: "thread" or "process".
        stager: the stager shared by all saves, so that its pages are touched once and stay hot.
    """

    is_buffered = True

    def __init__(
        self,
        kind: str,
        state_dict: Callable[[], Mapping[str, object]],
        stager: DefaultStager,
        *,
        thread_count: int,
        checksums: bool = True,
    ) -> None:
        self.name = f"dcp_{kind}"
        self.options = WriterOptions(thread_count=thread_count, checksums=checksums)
        self._kind = AsyncCheckpointerType(kind)
        self._state_dict = state_dict
        self._stager = stager

    def describe(self) -> dict[str, object]:
        """Return the settings."""
        return {
            "call": "dcp.async_save",
            "async_checkpointer_type": self._kind.value,
            "stager": "DefaultStager: shared memory, reused",
            **self.options.describe(),
        }

    def warm_up(self, path: Path) -> Path:
        """Save once, which allocates staging memory and starts the writer; return the path."""
        with _silent_standard_error():  # DCP's process inherits stderr, and logs each step there
            pending = self.start(path)
            pending.wait()
        return pending.path

    def start(self, path: Path) -> Pending:
        """Stage, and start the writer."""
        future = async_save(
            dict(self._state_dict()),
            storage_writer=self.options.make_writer(path),
            async_checkpointer_type=self._kind,
            async_stager=self._stager,
        )
        assert not isinstance(future, AsyncSaveResponse)  # the stager isn't asynchronous
        return Pending(path=path, is_done=future.done, wait=future.result)


def make_stager(device: torch.device) -> DefaultStager:
    """Return DCP's best stager: into reused shared memory, pinned for copies from a GPU."""
    is_far = device.type == "cuda"
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=is_far,
            use_shared_memory=True,
            use_async_staging=False,
            use_non_blocking_copy=is_far,
        )
    )


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    """Give DCP the required process group: this process alone, on this machine alone."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")  # for DCP's saver process
    store = dist.HashStore()  # type: ignore[attr-defined]  # public, though not said to be
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        # DCP keeps the saver process in a global, and would stop the process only at the
        # interpreter's exit.
        process_executor._CHECKPOINT_PROCESS = None  # noqa: SLF001
        dist.destroy_process_group()


@contextlib.contextmanager
def _silent_standard_error() -> Iterator[None]:
    """Discard standard error of this process and of processes started meanwhile."""
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(nowhere)
        os.close(kept)
