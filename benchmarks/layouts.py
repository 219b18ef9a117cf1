"""Matrices cut in rows or columns, as by FSDP and tensor parallelism, without process groups."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import torch

from ckptfmt.adapters.torch.tensors import TorchSink
from ckptfmt.box import Box
from ckptfmt.commit.decision import commit
from ckptfmt.documents.manifest import Origin
from ckptfmt.layout.placements import LocalPiece
from ckptfmt.store import open_store
from ckptfmt.write.snapshot import Snapshot
from ckptfmt.write.writer import write_part

_FLOAT_NBYTES: Final = 4
#: The default size of a block.
BLOCK_NBYTES: Final = Origin(
    run_id=None, launch=None, nonce="0" * 32, step=0, attempt="0" * 16, writer_count=1
).block_nbytes
_ALIGN: Final = 16  # elements: where a local tensor begins


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A division of every matrix among ranks: along a dimension, by the rule of `torch.chunk`."""

    name: str
    dim: int
    ranks: int

    def box(self, shape: tuple[int, int], rank: int) -> Box:
        """Return a rank's box of a matrix."""
        extent = shape[self.dim]
        chunk = -(-extent // self.ranks)
        begin = min(extent, rank * chunk)
        count = min(extent, begin + chunk) - begin
        return (
            Box((begin, 0), (count, shape[1]))
            if self.dim == 0
            else Box((0, begin), (shape[0], count))
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """A writer's box of a matrix."""

    name: str
    tensor: torch.Tensor
    boxes: tuple[Box, ...]
    global_shape: tuple[int, ...]
    field: str = "weights"
    dtype: str = "float32"
    scope: str = "global"
    replica: bool = False
    storage: str = "persistent"
    aliases: tuple[str, ...] = ()

    def copy_into(self, box: Box, out: memoryview) -> None:
        """Copy a box."""
        piece = self.tensor[box.relative_to(Box.whole(self.global_shape))]
        torch.frombuffer(out, dtype=torch.float32).view(box.shape).copy_(piece)


class Matrices:
    """Matrices of equal shape with random contents, and memory for loading a rank's share.

    Args:
        count: the number of matrices.
        width: the number of rows and columns of each matrix.
        most: the largest share of any loading rank, as a fraction.
    """

    def __init__(self, count: int, width: int, *, most: float) -> None:
        torch.manual_seed(0)
        self.shape = (width, width)
        self.whole = {f"matrix.{number:03d}": torch.rand(self.shape) for number in range(count)}
        self.nbytes = sum(tensor.nbytes for tensor in self.whole.values())
        share = int(width * width * most) + width
        self._memory = torch.zeros(count * (share + _ALIGN)).fill_(0)

    def sources(self, cut: Cut, rank: int) -> list[_Source]:
        """Return a rank's sources for a save."""
        box = cut.box(self.shape, rank)
        return [
            _Source(name=name, tensor=tensor, boxes=(box,), global_shape=self.shape)
            for name, tensor in self.whole.items()
        ]

    def locals(self, cut: Cut, rank: int) -> dict[str, torch.Tensor]:
        """Return the local tensors of a rank: the same touched memory for all ranks and cuts."""
        shape = cut.box(self.shape, rank).shape
        elements = shape[0] * shape[1]
        stride = -(-elements // _ALIGN) * _ALIGN
        return {
            name: self._memory[number * stride : number * stride + elements].view(shape)
            for number, name in enumerate(self.whole)
        }

    def sinks(self, cut: Cut, rank: int) -> list[TorchSink]:
        """Return a rank's sinks for a load."""
        box = cut.box(self.shape, rank)
        return [
            TorchSink(
                field="weights",
                name=name,
                dtype="float32",
                global_shape=self.shape,
                scope="global",
                tensor=local,
                local=local,
                pieces=(LocalPiece(box=box, local_box=Box.whole(box.shape)),),
            )
            for name, local in self.locals(cut, rank).items()
        ]

    def spoil(self, cut: Cut, rank: int) -> None:
        """Fill the local tensors with a value that every load must overwrite."""
        for local in self.locals(cut, rank).values():
            local.fill_(-1.0)

    def check(self, cut: Cut, rank: int) -> None:
        """Raise RuntimeError unless the local tensors hold a rank's share."""
        at = cut.box(self.shape, rank).relative_to(Box.whole(self.shape))
        for name, local in self.locals(cut, rank).items():
            if not torch.equal(local.view(torch.int32), self.whole[name][at].view(torch.int32)):
                raise RuntimeError(
                    f"{cut.name}: rank {rank} got other bytes of {name} than were saved"
                )


def save_in_rows(path: Path, matrices: Matrices, cut: Cut) -> Path:
    """Save a checkpoint as several writers, one after another, each with its share."""
    store = open_store(path, writable=True)
    origin = Origin(
        run_id=None, launch=None, nonce="5" * 32, step=1, attempt="a" * 16, writer_count=cut.ranks
    )
    for writer in range(cut.ranks):
        sources = tuple(matrices.sources(cut, writer))
        write_part(
            store,
            Snapshot(tensors=sources, streams=(), leaves=(), absent={}),
            origin,
            writer=writer,
        )
    commit(store, origin, deadline_s=1)
    return path


def count_edge_nbytes(shape: tuple[int, int], stored: Cut, wanted: Cut) -> Mapping[str, int]:
    """Return the bytes of a matrix needed by all ranks, and the excess of whole blocks.

    The numbers are computed from the boxes alone, independently of the reader: a box of rows is a
    single run of stored bytes, and every touched block is read whole.

    >>> same, twice = Cut(name="a", dim=0, ranks=2), Cut(name="b", dim=0, ranks=4) >>>
    dict(count_edge_nbytes((8, 2**16), same, same)) {'needed': 2097152, 'edges': 0} >>>
    dict(count_edge_nbytes((4, 2**17), same, twice)) {'needed': 2097152, 'edges': 0}
    """
    needed = edges = 0
    for begin, end, stored_nbytes in _iter_runs(shape, stored, wanted):
        covered = (
            min(stored_nbytes, -(-end // BLOCK_NBYTES) * BLOCK_NBYTES)
            - begin // BLOCK_NBYTES * BLOCK_NBYTES
        )
        needed += end - begin
        edges += covered - (end - begin)
    return {"needed": needed, "edges": edges}


def _iter_runs(shape: tuple[int, int], stored: Cut, wanted: Cut) -> Iterator[tuple[int, int, int]]:
    """Yield the first and last byte of each needed run of rows, and the size of the stored box."""
    for rank in range(wanted.ranks):
        for writer in range(stored.ranks):
            held = stored.box(shape, writer)
            common = held.intersect(wanted.box(shape, rank))
            if common is not None and common.shape[1] == shape[1]:
                row_nbytes = shape[1] * _FLOAT_NBYTES
                begin = (common.begin[0] - held.begin[0]) * row_nbytes
                yield begin, begin + common.shape[0] * row_nbytes, held.shape[0] * row_nbytes
