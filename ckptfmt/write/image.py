"""The layout of a writer's files as one image, planned before a byte is copied.

An image is the layout of a snapshot in memory: the shards as they will be on disk, with their
headers, followed by boxes that are only digested. An image refers to tensors by name and box and
holds no tensor, so that it can be reused for later saves.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import time
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ckptfmt import limits
from ckptfmt.box import Box
from ckptfmt.digest import digest_bytes
from ckptfmt.documents.durability import HOME
from ckptfmt.documents.extents import Extents
from ckptfmt.documents.holdings import BOXES_KEYS, Boxes, Holdings, parse_boxes
from ckptfmt.documents.labels import NO_LABELS, Labels
from ckptfmt.documents.manifest import Origin, shard_name
from ckptfmt.documents.packed import (
    Columns,
    Integers,
    Strings,
    dump_packed,
    dump_strings,
    make_integers,
)
from ckptfmt.documents.part import Leaf, Part, PartFile, RngStream
from ckptfmt.documents.shard import plan_shard
from ckptfmt.documents.tables import TensorKey, TensorTable, key_of, parse_counter, sort_rows
from ckptfmt.dtypes import DTYPES
from ckptfmt.write.snapshot import Snapshot, TensorSource

#: Alignment of each shard's begin, in bytes, as direct I/O requires for memory and file.
ALIGN_NBYTES: Final = 4096
#: Largest total size of a header's tensor entries in bytes; the rest of the header needs room, too.
_ENTRIES_NBYTES: Final = limits.SHARD_HEADER_NBYTES - 4096
#: Largest size of an entry in bytes, without key and shape: two offsets of 20 digits, a dtype, a
#: suffix of the key.
_ENTRY_NBYTES: Final = 128
#: Largest size of an extent of a shape in bytes: the digits of 2^60, and a comma.
_EXTENT_NBYTES: Final = 20
_LETTERS: Final = "abcdefghijklmnopqrstuvwxyz"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ImageShard:
    """A file of the image.

    Attributes:
        stem: the first part of the file's name.
        header: the file's first bytes.
        begin: offset of the file in the image, in bytes.
        nbytes: the file's size.
    """

    stem: str
    header: bytes
    begin: int
    nbytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A tensor's box in the image: bytes ``[begin, end)``, in C order, little-endian.

    Attributes:
        shard: number of the piece's file; None for a box that is only digested.
    """

    key: TensorKey
    box: Box
    begin: int
    end: int
    shard: int | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Contents of a part except tensors.

    Attributes:
        saved_unix_s: time of the snapshot by the writer's clock; 0 for a clock before 1970.
        durability: weakest durability of the files once the part is at home.
    """

    saved_unix_s: int
    streams: tuple[RngStream, ...]
    leaves: tuple[Leaf, ...]
    absent: dict[str, str]
    labels: Labels = NO_LABELS
    durability: str = HOME

    @classmethod
    def of(cls, snapshot: Snapshot) -> Context:
        """Return the context of a snapshot taken now."""
        return cls(
            # The time is information only: a clock that is wrong by decades doesn't prevent a save.
            saved_unix_s=min(max(int(time.time()), 0), limits.JSON_INTEGER),
            streams=snapshot.streams,
            leaves=snapshot.leaves,
            absent=dict(snapshot.absent),
            labels=snapshot.labels,
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Image:
    """The layout of a writer's bytes, both written and only digested.

    Attributes:
        block_nbytes: size of a block in bytes.
        shards: the files, in the order of the image.
        holdings: all boxes of the writer as the part will list them, without digests.
        pieces: the boxes that are copied into the image, by first byte.
        rows: for each piece, the box's number among all boxes of the part.
        nbytes: size of the image.
    """

    block_nbytes: int
    shards: tuple[ImageShard, ...]
    holdings: Holdings
    pieces: tuple[Piece, ...] = dataclasses.field(init=False)
    rows: tuple[int, ...] = dataclasses.field(init=False)
    nbytes: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        rows, pieces = _list_pieces(self.shards, self.holdings)
        end = max((shard.begin + shard.nbytes for shard in self.shards), default=0)
        object.__setattr__(self, "pieces", pieces)
        object.__setattr__(self, "rows", rows)
        object.__setattr__(self, "nbytes", max([end, *(piece.end for piece in pieces[-1:])]))

    def span(self, number: int, block: int) -> tuple[int, int]:
        """Return begin and end of a piece's block in the image, in bytes."""
        piece = self.pieces[number]
        begin = piece.begin + block * self.block_nbytes
        return begin, min(piece.end, begin + self.block_nbytes)

    def part(
        self,
        origin: Origin,
        digests: Sequence[bytes],
        context: Context,
        *,
        writer: int,
        extents: Extents | None = None,
    ) -> Part:
        """Return the part of a save of this image.

        Args:
            digests: for each of `pieces`, the concatenated digests of its blocks.
            extents: the places of the boxes, if not in the image's shards.
        """
        held = self.holdings
        of_boxes = [b""] * len(self.holdings.replica)
        for row, found in zip(self.rows, digests, strict=True):
            of_boxes[row] = found
        extents = held.extents if extents is None else extents
        return Part(
            origin=origin,
            writer=writer,
            saved_unix_s=context.saved_unix_s,
            files=tuple(
                PartFile(
                    name=shard_name(shard.stem, origin.attempt, writer),
                    kind="safetensors",
                    nbytes=shard.nbytes,
                    header_nbytes=len(shard.header),
                    header_digest=digest_bytes(shard.header),
                )
                for shard in self.shards
            ),
            holdings=dataclasses.replace(held, digests=b"".join(of_boxes), extents=extents),
            streams=tuple(
                sorted(
                    context.streams,
                    key=lambda stream: (stream.name.encode(), stream.scope.encode()),
                )
            ),
            leaves=sort_rows(context.leaves),
            absent=context.absent,
            labels=context.labels,
            durability=context.durability,
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the image's columns as bytes, strings and lists, for `from_dict`."""
        held = self.holdings
        extents = self.holdings.extents
        file, byte_begin = np.zeros((2, len(held.replica)), np.int64)
        file[extents.box], byte_begin[extents.box] = extents.file + 1, extents.byte_begin
        return {
            **held.as_dict(),
            "block_nbytes": self.block_nbytes,
            "shards": {
                "stem": dump_strings([shard.stem for shard in self.shards]),
                "header": [shard.header for shard in self.shards],
                "nbytes": dump_packed([shard.nbytes for shard in self.shards]),
            },
            "places": {
                "replica": dump_packed(held.replica),
                "digested": dump_packed(held.digest_count > 0),
                "file": dump_packed(file),
                "byte_begin": dump_packed(byte_begin),
                "key": dump_strings(extents.key.tolist()),
            },
        }

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> Image:
        """Return the image from the columns of `as_dict`. Raises: FormatError."""
        columns = Columns(value, (*BOXES_KEYS, "block_nbytes", "shards", "places"), "image")
        boxes, _ = parse_boxes(columns)
        block_nbytes = parse_counter(columns, "block_nbytes", below=limits.BLOCK_NBYTES_MAX + 1)
        if block_nbytes < limits.BLOCK_NBYTES_MIN:
            raise columns.broken("block_nbytes", f"blocks of {block_nbytes} bytes")
        table = columns.columns("shards", ("stem", "header", "nbytes"))
        stems = table.strings("stem").tolist()
        headers = table.blobs("header", count=len(stems))
        shards = _place_shards(stems, headers, table.packed("nbytes", count=len(stems)).tolist())
        places = columns.columns("places", _PLACE_KEYS)
        count = int(boxes.box_count.sum())
        file = places.packed("file", count=count, below=len(shards) + 1) - 1
        byte_begin = places.packed("byte_begin", count=count)
        ends = np.array([shard.nbytes for shard in shards] + [np.iinfo(np.int64).max])[file]
        if (byte_begin + boxes.box_nbytes() > ends).any():
            raise places.broken("byte_begin", "a box that leaves its shard")
        held = _hold(
            boxes,
            block_nbytes,
            replica=places.packed("replica", count=count, below=2) > 0,
            digested=places.packed("digested", count=count, below=2) > 0,
            file=file,
            byte_begin=byte_begin,
            key=places.strings("key", count=int((file >= 0).sum()), limit_nbytes=limits.KEY_NBYTES),
        )
        return cls(block_nbytes=block_nbytes, shards=shards, holdings=held)


_PLACE_KEYS: Final = ("replica", "digested", "file", "byte_begin", "key")


def plan_image(
    snapshot: Snapshot,
    *,
    written: frozenset[tuple[TensorKey, Box]] | None = None,
    block_nbytes: int,
    check_replicas: bool = False,
) -> Image:
    """Return the layout of all bytes that a writer contributes to a save.

    Args:
        snapshot: the writer's state.
        written: tensor and box of the pieces that this writer writes; None for all.
        block_nbytes: size of a block in bytes.
        check_replicas: whether to digest declared replicas written by another writer.

    Spec: REQ-TEN-004, REQ-TEN-005, REQ-SHD-009, REQ-CMT-012.
    """
    sources = sort_sources(snapshot)
    boxes = gather_boxes(sources)
    pieces = ((key_of(source), box) for source in sources for box in sorted(source.boxes))
    is_written = np.array([written is None or piece in written for piece in pieces], np.bool_)
    replica = np.repeat(np.array([source.replica for source in sources], np.bool_), boxes.box_count)
    # A box written by another writer is digested here to prove that both copies are equal, unless
    # the mesh or the caller declares the box a replica.
    digested = is_written | ~replica | check_replicas
    return lay_out(
        boxes, block_nbytes=block_nbytes, written=is_written, replica=replica, digested=digested
    )


def lay_out(
    boxes: Boxes,
    *,
    block_nbytes: int,
    written: NDArray[np.bool_],
    replica: NDArray[np.bool_],
    digested: NDArray[np.bool_],
) -> Image:
    """Return the image of some boxes.

    Args:
        written: for each box, whether a file of the image contains it.
        replica: for each box, whether the box is declared a replica.
        digested: for each box, whether its blocks are digested.

    Spec: REQ-TEN-004, REQ-TEN-005, REQ-SHD-009.
    """
    tensors = boxes.table
    extents = iter(boxes.box_shape.tolist())
    owners = boxes.owner.tolist()
    shapes = [
        tuple(itertools.islice(extents, len(tensors.global_shapes[owner]))) for owner in owners
    ]
    file = np.full(len(owners), -1)
    byte_begin = np.zeros(len(owners), np.int64)
    keys = [""] * len(owners)
    stems = []
    headers = []
    nbytes = []
    for number, (stem, rows) in enumerate(
        _divide(tensors, owners, np.flatnonzero(written).tolist())
    ):
        names = [tensors.keys[owners[row]][1] for row in rows]
        types = (_shard_type(tensors.dtypes[owners[row]], shapes[row]) for row in rows)
        header, entries = plan_shard(
            [(key, *of) for key, of in zip(_shard_keys(names), types, strict=True)]
        )
        stems.append(stem)
        headers.append(header)
        nbytes.append(max(entry.byte_end for entry in entries))
        file[rows], byte_begin[rows] = number, [entry.byte_begin for entry in entries]
        for row, name, entry in zip(rows, names, entries, strict=True):
            keys[row] = "" if entry.key == name else entry.key
    key = Strings.of(list(itertools.compress(keys, written)))
    held = _hold(
        boxes,
        block_nbytes,
        replica=replica,
        digested=digested,
        file=file,
        byte_begin=byte_begin,
        key=key,
    )
    return Image(
        block_nbytes=block_nbytes, shards=_place_shards(stems, headers, nbytes), holdings=held
    )


def sort_sources(snapshot: Snapshot) -> tuple[TensorSource, ...]:
    """Return the tensors of a snapshot in the order in which documents list them."""
    return sort_rows(snapshot.tensors)


def gather_boxes(sources: Sequence[TensorSource]) -> Boxes:
    """Return the boxes of some tensors, with the boxes of each tensor sorted."""
    boxes = [box for source in sources for box in sorted(source.boxes)]
    return Boxes(
        table=TensorTable.of(sources),
        box_count=make_integers(len(source.boxes) for source in sources),
        begin=make_integers(first for box in boxes for first in box.begin),
        box_shape=make_integers(extent for box in boxes for extent in box.shape),
    )


def _hold(
    boxes: Boxes,
    block_nbytes: int,
    *,
    replica: NDArray[np.bool_],
    digested: NDArray[np.bool_],
    file: Integers,
    byte_begin: Integers,
    key: Strings,
) -> Holdings:
    """Return holdings in which each box of a file has one extent, and all other boxes have none.

    Args:
        file: for each box, the number of its shard; -1 for a box without a file.
        key: for each box with a file, its key in the shard's header; an empty string stands for the
            tensor's name.
    """
    block_count = -(-boxes.box_nbytes() // block_nbytes)
    rows = np.flatnonzero(file >= 0)
    return Holdings(
        **boxes.members(),
        replica=replica,
        digest_count=np.where(digested, block_count, 0),
        digests=b"",
        extents=Extents.of_raw(
            box=rows,
            block_count=block_count[rows],
            file=file[rows],
            byte_begin=byte_begin[rows],
            key=key,
        ),
    )


def _place_shards(
    stems: list[str], headers: list[bytes], nbytes: list[int]
) -> tuple[ImageShard, ...]:
    shards = []
    begin = 0
    for stem, header, length in zip(stems, headers, nbytes, strict=True):
        shards.append(ImageShard(stem=stem, header=header, begin=begin, nbytes=length))
        begin += length + -length % ALIGN_NBYTES
    return tuple(shards)


def _list_pieces(
    shards: tuple[ImageShard, ...], held: Holdings
) -> tuple[tuple[int, ...], tuple[Piece, ...]]:
    """Return the numbers of the copied boxes, and the pieces, both by first byte.

    Boxes without a file follow the files.
    """
    nbytes = held.box_nbytes()
    extents = held.extents
    begin = np.zeros_like(nbytes)
    shard = np.full_like(nbytes, -1)
    shard[extents.box] = extents.file
    begin[extents.box] = (
        np.array([one.begin for one in shards], np.int64)[extents.file] + extents.byte_begin
    )
    behind = np.flatnonzero(~held.written & (held.digest_count > 0))
    padded = nbytes[behind] + -nbytes[behind] % 64
    end_of_files = sum(one.nbytes + -one.nbytes % ALIGN_NBYTES for one in shards)
    begin[behind] = end_of_files + np.cumsum(padded) - padded
    rows = np.concatenate([extents.box, behind])
    rows = rows[np.lexsort((rows, nbytes[rows], begin[rows]))]
    boxes = held.list_boxes()
    keys = held.table.keys
    columns = (column[rows].tolist() for column in (held.owner, begin, begin + nbytes, shard))
    pieces = tuple(
        Piece(
            key=keys[owner],
            box=boxes[row],
            begin=first,
            end=end,
            shard=None if number < 0 else number,
        )
        for row, owner, first, end, number in zip(rows.tolist(), *columns, strict=True)
    )
    return tuple(rows.tolist()), pieces


def _divide(
    tensors: TensorTable, owners: Sequence[int], written: Iterable[int]
) -> list[tuple[str, list[int]]]:
    """Return stem and boxes of each file, by stem.

    Boxes that exceed the size of one header go into further files, `weights_aa` and so on after
    `weights`.

    Args:
        owners: for each box, the number of its tensor.
        written: the boxes that go into files.

    Spec: REQ-SHD-001, REQ-TEN-007.
    """
    by_stem: dict[str, list[int]] = {}
    open_stems: dict[str, tuple[str, int, int]] = {}
    for row in written:
        first = _stem(tensors, owners[row])
        stem, header_nbytes, more = open_stems.get(first, (first, 0, 0))
        entry_nbytes = most_entry_nbytes(
            tensors.keys[owners[row]][1], len(tensors.global_shapes[owners[row]])
        )
        if header_nbytes + entry_nbytes > _ENTRIES_NBYTES:
            stem = f"{first}_{_LETTERS[more // 26]}{_LETTERS[more % 26]}"
            header_nbytes = 0
            more = more + 1
        open_stems[first] = stem, header_nbytes + entry_nbytes, more
        by_stem.setdefault(stem, []).append(row)
    return sorted(by_stem.items())


def most_entry_nbytes(name: str, ndim: int) -> int:
    """Return the largest size of a box's entry in a header, in bytes.

    Args:
        name: name of the tensor; the key may add a number.
        ndim: number of dimensions of the box.
    """
    return (
        len(json.dumps(name, ensure_ascii=False).encode())
        + _ENTRY_NBYTES
        + _EXTENT_NBYTES * max(1, ndim)
    )


def _stem(tensors: TensorTable, tensor: int) -> str:
    """Return the stem of a tensor's file name: the field, with a suffix if opaque or a buffer.

    Tools for loading weights by name then find no other tensors in the file of weights.
    """
    field = tensors.keys[tensor][0]
    if DTYPES[tensors.dtypes[tensor]].safetensors is None:
        return f"{field}_opaque"
    return f"{field}_buffers" if tensors.storages[tensor] == "non-persistent" else field


def _shard_type(dtype: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """Return dtype tag and shape of a piece in a shard's header. Spec: REQ-TEN-004."""
    tag = DTYPES[dtype].safetensors
    return ("U8", (math.prod(shape) * DTYPES[dtype].nbytes,)) if tag is None else (tag, shape)


def _shard_keys(names: list[str]) -> list[str]:
    """Return a unique key for each name: the name, or the name and a number if the name is taken.

    Spec: REQ-SHD-009.

    >>> _shard_keys(["w", "w", "__metadata__", "w#1"])
    ['w', 'w#1', '__metadata__#1', 'w#1#1']
    """
    taken = {"__metadata__"}
    reached: dict[str, int] = {}  # last number tried for each name
    keys = []
    for name in names:
        key = name
        number = reached.get(name, 0)
        while key in taken:
            number += 1
            key = f"{name}#{number}"
        reached[name] = number
        taken.add(key)
        keys.append(key)
    return keys
