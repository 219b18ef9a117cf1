"""Contestants that load into the same tensors: ckptfmt and peers, each with its own files."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol
from unittest import mock

import safetensors
import safetensors.torch
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

import ckptfmt
from benchmarks.peers import Dcp, Safetensors, TorchSave
from benchmarks.raw import RawReader, RawSetting, RawWriter
from benchmarks.state import Trainer
from ckptfmt.loading.load_report import LoadReport
from ckptfmt.read.files import StoredBox
from ckptfmt.read.streaming import ReadReport

Tensors = Mapping[str, torch.Tensor]


class Loader(Protocol):
    """A contestant of the rounds.

    Attributes:
        name: the name in the record.
        kind: the kind of files; contestants of the same kind may load the same files.
        fills: whether a load fills the tensors.
    """

    name: str
    kind: str
    fills: bool

    def describe(self) -> dict[str, object]:
        """Return the settings."""
        ...

    def write(self, path: Path) -> Path:
        """Write files for `load` under a fresh name, and return the path."""
        ...

    def load(self, path: Path) -> object:
        """Fill the tensors, and return objects to release outside of the timing."""
        ...


class OursLoad:
    """`ckptfmt.load` into a model and its optimizer, in place.

    Args:
        verify: whether blocks are verified; if not, the reader is patched, see `without_verifying`.
    """

    kind = "ckptfmt"
    fills = True

    def __init__(self, name: str, trainer: Trainer, *, verify: bool = True) -> None:
        self.name = name
        self._trainer = trainer
        self._verify = verify
        self._saves = 0
        self.reads: dict[str, int] = {}

    def describe(self) -> dict[str, object]:
        """Return the settings, and the counters of the last load."""
        return {
            "call": "ckptfmt.load(path, State(weights=model, optimizer=optimizer))",
            "verified": "every block" if self._verify else "no block",
            "reads": self.reads,
        }

    def write(self, path: Path) -> Path:
        """Save a checkpoint."""
        self._saves += 1
        ckptfmt.save(path, self._trainer.state, step=self._saves)
        return path

    def load(self, path: Path) -> None:
        """Load the checkpoint."""
        with contextlib.nullcontext() if self._verify else without_verifying():
            report = ckptfmt.load(path, self._trainer.state)
        assert isinstance(report, LoadReport)  # a state was given
        self.reads = describe_reads(report.reads)


class RawLoad:
    """Raw direct reads of equally many bytes into reused buffers.

    Args:
        touches: see `RawReader`.
    """

    kind = "raw"
    fills = False

    def __init__(
        self, name: str, writer: RawWriter, setting: RawSetting, *, touches: bool = False
    ) -> None:
        self.name = name
        self._writer = writer
        self._reader = RawReader(setting, touches=touches)

    def describe(self) -> dict[str, object]:
        """Return the settings."""
        return self._reader.describe()

    def write(self, path: Path) -> Path:
        """Write the file with direct writes."""
        return self._writer.save(path)

    def load(self, path: Path) -> None:
        """Read the file; the tensors stay unchanged."""
        self._reader.load(path)


class DcpLoad:
    """`torch.distributed.checkpoint.load` into the tensors, without verification."""

    name = "dcp"
    fills = True

    def __init__(self, tensors: Tensors, *, thread_count: int, copy_threads: int) -> None:
        self.kind = f"dcp-{thread_count}"
        self._tensors = tensors
        self._thread_count = thread_count
        self._copy_threads = copy_threads
        self._writer = Dcp(lambda: tensors, thread_count=thread_count)

    def describe(self) -> dict[str, object]:
        """Return the settings."""
        return {
            "call": "dcp.load",
            "files": self._thread_count,
            "copy_threads": self._copy_threads,
            "verified": "nothing",
        }

    def write(self, path: Path) -> Path:
        """Save with as many threads; each thread writes a file."""
        return self._writer.save(path)

    def load(self, path: Path) -> None:
        """Load in place."""
        before = torch.get_num_threads()
        torch.set_num_threads(self._copy_threads)
        try:
            load(dict(self._tensors), storage_reader=FileSystemReader(path))
        finally:
            torch.set_num_threads(before)


class TorchLoad:
    """`torch.load`, then a copy into the tensors."""

    kind = "torch"
    fills = True

    def __init__(self, name: str, tensors: Tensors, *, mmap: bool) -> None:
        self.name = name
        self._tensors = tensors
        self._mmap = mmap

    def describe(self) -> dict[str, object]:
        """Return the settings."""
        call = f"torch.load(path, mmap={self._mmap}, weights_only=True), then copy_"
        return {"call": call, "verified": "nothing"}

    def write(self, path: Path) -> Path:
        """Save."""
        return TorchSave(lambda: self._tensors).save(path)

    def load(self, path: Path) -> object:
        """Load, and copy."""
        return _copy_into(self._tensors, torch.load(path, mmap=self._mmap, weights_only=True))


class SafetensorsLoad:
    """`safetensors.torch.load_file`, or tensors from `safetensors.safe_open`; then a copy."""

    kind = "safetensors"
    name = "safetensors"
    fills = True

    def __init__(self, tensors: Tensors, *, one_by_one: bool) -> None:
        self._tensors = tensors
        self._one_by_one = one_by_one

    def describe(self) -> dict[str, object]:
        """Return the settings."""
        call = (
            "safe_open, then get_tensor and copy_ for each"
            if self._one_by_one
            else "load_file, then copy_"
        )
        return {"call": call, "verified": "nothing"}

    def write(self, path: Path) -> Path:
        """Save."""
        return Safetensors(lambda: dict(self._tensors)).save(path)

    def load(self, path: Path) -> object:
        """Load, and copy."""
        if not self._one_by_one:
            return _copy_into(self._tensors, safetensors.torch.load_file(path))
        with safetensors.safe_open(path, framework="pt") as file, torch.no_grad():
            for name, tensor in self._tensors.items():
                tensor.copy_(file.get_tensor(name))
        return None


def _copy_into(tensors: Tensors, loaded: Tensors) -> Tensors:
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(loaded[name])
    return loaded


# --- the reader, with a part of it taken out ------------------------------------------------------


@contextlib.contextmanager
def without_verifying() -> Iterator[None]:
    """Patch the reader to skip the comparison of blocks with digests; no option skips it."""
    with mock.patch.object(StoredBox, "iter_damages", return_value=iter(())):
        yield


def describe_reads(reads: ReadReport) -> dict[str, int]:
    """Return the counters of a load."""
    return dataclasses.asdict(reads)
