"""DCP as several ranks without processes: DCP's own planners with boxes instead of DTensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load

from benchmarks.layouts import Cut, Matrices
from benchmarks.peers import DurableWriter
from ckptfmt.box import Box


def write_item(name: str, box: Box, global_shape: tuple[int, ...]) -> WriteItem:
    """Return DCP's write item for a rank's box of a float32 tensor."""
    return WriteItem(
        index=MetadataIndex(name, torch.Size(box.begin)),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=_chunk_of(box),
            properties=TensorProperties(dtype=torch.float32),
            size=torch.Size(global_shape),
        ),
    )


def save_as_ranks(path: Path, matrices: Matrices, cut: Cut) -> Path:
    """Save the share of each rank in turn, as DCP's ranks do: plan, agree, write, finish."""
    planners, writers, plans = [], [], []
    for rank in range(cut.ranks):
        planner, writer = (
            _BoxSavePlanner(matrices, cut, rank),
            DurableWriter(path, thread_count=1, checksums=True),
        )
        writer.set_up_storage_writer(is_coordinator=rank == 0)
        plans.append(writer.prepare_local_plan(planner.create_local_plan()))
        planners.append(planner)
        writers.append(writer)
    plans, metadata = planners[0].create_global_plan(plans)
    plans = writers[0].prepare_global_plan(plans)
    results = [
        writer.write_data(planner.finish_plan(plan), planner).wait()
        for writer, planner, plan in zip(writers, planners, plans, strict=True)
    ]
    writers[0].finish(metadata, results)
    return path


def load_as_rank(path: Path, matrices: Matrices, cut: Cut, rank: int) -> None:
    """Load a rank's share into the local tensors."""
    planner = _BoxLoadPlanner(matrices.locals(cut, rank), cut.box(matrices.shape, rank))
    load(dict(matrices.whole), storage_reader=FileSystemReader(path), planner=planner)


class _BoxSavePlanner(DefaultSavePlanner):
    """Plan the boxes of a rank."""

    def __init__(self, matrices: Matrices, cut: Cut, rank: int) -> None:
        super().__init__(flatten_state_dict=False, enable_plan_caching=False)
        self._box = cut.box(matrices.shape, rank)
        self._whole = matrices.whole
        self._shape = matrices.shape
        self.is_coordinator = rank == 0

    def create_local_plan(self) -> SavePlan:
        """Return this rank's writes."""
        self.plan = SavePlan([write_item(name, self._box, self._shape) for name in self._whole])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        """Return this rank's box of a tensor."""
        return self._whole[index.fqn][self._box.relative_to(Box.whole(self._shape))]


class _BoxLoadPlanner(DefaultLoadPlanner):
    """Plan to fill a box of each tensor."""

    def __init__(self, locals_: Mapping[str, torch.Tensor], box: Box) -> None:
        super().__init__(flatten_state_dict=False)
        self._locals = locals_
        self._box = box

    def create_local_plan(self) -> LoadPlan:
        """Return this rank's reads."""
        assert self.metadata is not None
        chunks = [_chunk_of(self._box)]
        stored = self.metadata.state_dict_metadata
        items = [
            create_read_items_for_chunk_list(name, stored[name], chunks) for name in self._locals
        ]  # type: ignore[arg-type]
        return LoadPlan([item for of_tensor in items for item in of_tensor])

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """Return the local tensor that holds the box."""
        return self._locals[index.fqn]


def _chunk_of(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(box.begin), sizes=torch.Size(box.shape))
