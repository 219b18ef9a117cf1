"""An attempt of a thousand writers with real parts, and shards that are holes of the right size."""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from benchmarks.mixture import CutTensor
from ckptfmt.box import Box
from ckptfmt.digest import DIGEST_NBYTES
from ckptfmt.documents.manifest import Origin, part_path, shard_name
from ckptfmt.documents.part import Part
from ckptfmt.store.memory import MemoryStore
from ckptfmt.write.image import Context, plan_image
from ckptfmt.write.snapshot import Snapshot

_SAVED_UNIX_S: Final = 1_790_000_000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A rank's boxes of a tensor, to save or to load, without elements."""

    name: str
    global_shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    field: str = "weights"
    dtype: str = "float32"
    scope: str = "global"
    replica: bool = False
    storage: str = "persistent"
    aliases: tuple[str, ...] = ()

    @classmethod
    def of(cls, tensor: CutTensor, *boxes: Box) -> Wanted:
        """Return some boxes of a tensor."""
        return cls(name=tensor.name, global_shape=tensor.global_shape, boxes=boxes)

    def copy_into(self, box: Box, out: memoryview) -> None:
        """Raise an error, since no element exists."""
        raise NotImplementedError

    def copy_from(self, box: Box, content: memoryview) -> None:
        """Raise an error, since no element exists."""
        raise NotImplementedError


def make_origin(ranks: int) -> Origin:
    """Return the members common to all documents of an attempt of `ranks` writers."""
    return Origin(
        run_id=None, launch=None, nonce="5" * 32, step=1, attempt="a" * 16, writer_count=ranks
    )


def write_fleet(
    directory: Path, mixture: Sequence[CutTensor], ranks: int, on_rank: Callable[[int], None]
) -> int:
    """Write the parts of all writers, and holes in place of shards; return the number of digests.

    Each shard has a header, followed by a hole. The digests are random, without repetition.
    """
    origin = make_origin(ranks)
    (directory / "parts").mkdir(parents=True)
    digests = 0
    for rank in range(ranks):
        on_rank(rank)
        part, headers = _make_part(
            origin, [Wanted.of(tensor, tensor.boxes[rank]) for tensor in mixture], rank
        )
        (directory / part_path(origin.attempt, rank)).write_bytes(part.dump()[0])
        for stem, header, nbytes in headers:
            with (directory / shard_name(stem, origin.attempt, rank)).open("wb") as file:
                file.write(header)
                file.truncate(nbytes)
        digests += int(part.holdings.digest_count.sum())
    os.sync()
    return digests


def fill_memory(tensor: CutTensor, boxes: Sequence[Box]) -> MemoryStore:
    """Return a store with the parts of an attempt with one tensor, each writer with a box."""
    store = MemoryStore()
    origin = make_origin(len(boxes))
    for rank, box in enumerate(boxes):
        part, _ = _make_part(origin, [Wanted.of(tensor, box)], rank)
        store.create(part_path(origin.attempt, rank), [part.dump()[0]])
    return store


def _make_part(
    origin: Origin, held: Sequence[Wanted], rank: int
) -> tuple[Part, list[tuple[str, bytes, int]]]:
    """Return a writer's part, and stem, header and size of each of its shards."""
    snapshot = Snapshot(tensors=tuple(held), streams=(), leaves=(), absent={})
    image = plan_image(snapshot, block_nbytes=origin.block_nbytes)
    chance = random.Random(rank)
    blocks = (-(-(piece.end - piece.begin) // origin.block_nbytes) for piece in image.pieces)
    digests = [chance.randbytes(DIGEST_NBYTES * count) for count in blocks]
    context = Context(saved_unix_s=_SAVED_UNIX_S, streams=(), leaves=(), absent={})
    part = image.part(origin, digests, context, writer=rank)
    return part, [(shard.stem, shard.header, shard.nbytes) for shard in image.shards]


def iter_bad(boxes: Sequence[Box], shape: tuple[int, int]) -> Iterator[tuple[str, list[Box]]]:
    """Yield tilings with a wrong box, each with a description of the fault.

    A shifted box leaves a gap and overlaps by the same volume.
    """
    middle = len(boxes) // 2
    changes = (
        ("gap", _shorten),
        ("overlap", _lengthen),
        ("shifted", _shift),
        ("out of bounds", _push_out),
    )
    for name, change in changes:
        # The changed box must have room for the change.
        for at in itertools.chain(range(middle, len(boxes)), range(middle)):
            changed = change(boxes[at], shape)
            if changed is not None:
                yield name, [*boxes[:at], changed, *boxes[at + 1 :]]
                break


def _shorten(box: Box, _shape: tuple[int, int]) -> Box | None:
    return Box(box.begin, (box.shape[0] - 1, box.shape[1])) if box.shape[0] > 1 else None


def _lengthen(box: Box, shape: tuple[int, int]) -> Box | None:
    return Box(box.begin, (box.shape[0] + 1, box.shape[1])) if box.end[0] < shape[0] else None


def _shift(box: Box, shape: tuple[int, int]) -> Box | None:
    return Box((box.begin[0] + 1, box.begin[1]), box.shape) if box.end[0] < shape[0] else None


def _push_out(box: Box, shape: tuple[int, int]) -> Box | None:
    return Box((box.begin[0] + 1, box.begin[1]), box.shape) if box.end[0] == shape[0] else None
