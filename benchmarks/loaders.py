"""Who loads: ckptfmt and its peers, each from files of its own kind, into the same tensors."""

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
from ckptfmt.loading.restore import LoadReport
from ckptfmt.read.files import StoredBox
from ckptfmt.read.streaming import ReadReport

Tensors = Mapping[str, torch.Tensor]


class Loader(Protocol):
    """What the rounds know of a contestant.

    Attributes:
        name: in the record.
        kind: of files that it loads; who has the same kind may load the same files.
        fills: whether it fills the tensors.
    """

    name: str
    kind: str
    fills: bool

    def describe(self) -> dict[str, object]:
        """Return the settings."""
        ...

    def write(self, path: Path) -> Path:
        """Write under a fresh name what `load` loads; return the path."""
        ...

    def load(self, path: Path) -> object:
        """Fill the tensors; return what is to be let go of off the clock."""
        ...


class OursLoad:
    """`ckptfmt.load` into a model and its optimizer, in place.

    Args:
        verify: whether blocks are verified; else the reader is patched, see `without_verifying`.
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
        """Return the settings, and what the last load counted."""
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
        """Load it."""
        with contextlib.nullcontext() if self._verify else without_verifying():
            report = ckptfmt.load(path, self._trainer.state)
        assert isinstance(report, LoadReport)  # a state was given
        self.reads = describe_reads(report.reads)


class RawLoad:
    """Raw direct reads of as many bytes, into buffers that are used again and again.

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
        """Read it; the tensors stay as they are."""
        self._reader.load(path)


class DcpLoad:
    """`torch.distributed.checkpoint.load` into the tensors, which verifies nothing."""

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
        """Save with as many threads: each writes a file."""
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
    """`safetensors.torch.load_file`, or tensors one by one from `safetensors.safe_open`; then a copy."""

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
    """Patch the reader so that it compares no stored block with its digest; it has no switch for that."""
    with mock.patch.object(StoredBox, "iter_damages", return_value=iter(())):
        yield


def describe_reads(reads: ReadReport) -> dict[str, int]:
    """Return the counters of a load."""
    return dataclasses.asdict(reads)
