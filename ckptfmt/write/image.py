"""Where the bytes of one writer go: its files as one image, laid out before a byte is copied.

An image is what a snapshot looks like in memory: each shard as it will be on disk, header and all, and behind them what
is only digested. Names of tensors and boxes are in it, tensors aren't, so that it is kept from save to save.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Final

from ckptfmt import limits
from ckptfmt.digest import DIGEST_NBYTES, digest_bytes
from ckptfmt.documents.extents import Extent
from ckptfmt.documents.holdings import Holdings, PartBox, PartTensor
from ckptfmt.documents.manifest import Origin, shard_name
from ckptfmt.documents.part import Leaf, Part, PartFile, Stream
from ckptfmt.documents.shard import ShardEntry, most_entry_nbytes, plan_shard
from ckptfmt.documents.tables import TensorKey, block_count, sort_key
from ckptfmt.dtypes import DTYPES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ckptfmt.box import Box
    from ckptfmt.documents.extents import Extents
    from ckptfmt.write.snapshot import Snapshot, TensorSource

#: Each shard begins at a multiple of this, in bytes: what direct I/O asks of memory and file.
ALIGN_NBYTES: Final = 4096
#: What the entries of one header may take, so that the rest of it has room.
_ENTRIES_NBYTES: Final = limits.SHARD_HEADER_NBYTES - 4096
_LETTERS: Final = "abcdefghijklmnopqrstuvwxyz"
#: A part that describes an image belongs to no attempt yet.
_NOWHERE: Final = Origin(run_id=None, launch=None, nonce="0" * 32, step=0, attempt="0" * 16, writer_count=1)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ImageShard:
    """A file of the image.

    Attributes:
        stem: what its name begins with.
        header: its first bytes.
        begin: where it begins in the image, in bytes.
        nbytes: its size.
    """

    stem: str
    header: bytes
    begin: int
    nbytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A box of a tensor in the image: bytes ``[begin, end)`` of it, in C order, little-endian.

    Attributes:
        shard: number of the file that it belongs to; None for what is only digested.
    """

    key: TensorKey
    box: Box
    begin: int
    end: int
    shard: int | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """The layout of what one writer writes and digests.

    Attributes:
        block_nbytes: size of a block in bytes.
        shards: the files, one behind the other.
        tensors: everything that is held, as the part will say it; digests that are still to come are zeros.
        pieces: what is copied into the image, by first byte.
        rows: of each piece, its number among all boxes of the part.
        nbytes: size of the image.
    """

    block_nbytes: int
    shards: tuple[ImageShard, ...]
    tensors: Holdings
    pieces: tuple[Piece, ...] = dataclasses.field(init=False)
    rows: tuple[int, ...] = dataclasses.field(init=False)
    nbytes: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        rows, pieces = _list_pieces(self.shards, self.tensors)
        end = max((shard.begin + shard.nbytes for shard in self.shards), default=0)
        object.__setattr__(self, "pieces", pieces)
        object.__setattr__(self, "rows", rows)
        object.__setattr__(self, "nbytes", max([end, *(piece.end for piece in pieces[-1:])]))

    def span(self, number: int, block: int) -> tuple[int, int]:
        """Return where a block of a piece begins and ends in the image, in bytes."""
        piece = self.pieces[number]
        begin = piece.begin + block * self.block_nbytes
        return begin, min(piece.end, begin + self.block_nbytes)

    def part(
        self,
        origin: Origin,
        digests: Sequence[bytes],
        *,
        writer: int,
        saved_unix_s: int,
        streams: Iterable[Stream],
        leaves: Iterable[Leaf],
        absent: dict[str, str],
        extents: Extents | None = None,
    ) -> Part:
        """Return the part of a save of this image.

        Args:
            digests: of the blocks of each piece, in the order of `pieces`.
            extents: where boxes are, if that isn't in the image's shards.
        """
        of_boxes = [b""] * len(self.tensors.replica)
        for row, found in zip(self.rows, digests, strict=True):
            of_boxes[row] = found
        return Part(
            origin=origin,
            writer=writer,
            saved_unix_s=saved_unix_s,
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
            tensors=self.tensors.refilled(b"".join(of_boxes), extents),
            streams=tuple(sorted(streams, key=lambda stream: (stream.name.encode(), stream.scope.encode()))),
            leaves=tuple(sorted(leaves, key=lambda leaf: sort_key((leaf.field, leaf.name, leaf.scope)))),
            absent=absent,
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the image as bytes, strings and lists: a part that was never saved, and the headers of its files."""
        zeros = [bytes(_digests_nbytes(piece.end - piece.begin, self.block_nbytes)) for piece in self.pieces]
        origin = dataclasses.replace(_NOWHERE, block_nbytes=self.block_nbytes)
        part = self.part(origin, zeros, writer=0, saved_unix_s=0, streams=(), leaves=(), absent={})
        return {
            "part": part.dump()[0],
            "stems": [shard.stem for shard in self.shards],
            "headers": [shard.header for shard in self.shards],
        }

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> Image:
        """Return the image that `as_dict` was asked of."""
        part, _ = Part.parse(value["part"], where="image")
        nbytes = [file.nbytes for file in part.files]
        return cls(
            block_nbytes=part.origin.block_nbytes,
            shards=_place_shards(value["stems"], value["headers"], nbytes),
            tensors=part.holdings,
        )


def plan_image(
    snapshot: Snapshot,
    *,
    written: frozenset[tuple[TensorKey, Box]] | None = None,
    block_nbytes: int,
    check_replicas: bool = False,
) -> Image:
    """Return where everything goes that one writer gives to a save.

    Args:
        snapshot: what it holds.
        written: which of the pieces it writes; all of them if None.
        block_nbytes: size of a block in bytes.
        check_replicas: whether declared replicas that others write are digested here as well.

    Spec: REQ-TEN-004, REQ-TEN-005, REQ-SHD-009, REQ-CMT-012.
    """
    sources = sorted(snapshot.tensors, key=lambda source: sort_key(key_of(source)))
    stems, headers, nbytes = [], [], []
    places: dict[tuple[TensorKey, Box], tuple[int, ShardEntry]] = {}
    for number, (stem, pieces) in enumerate(_divide(sources, written)):
        keys = _shard_keys([source.name for source, _ in pieces])
        rows = [(key, *_shard_type(source, box)) for key, (source, box) in zip(keys, pieces, strict=True)]
        header, entries = plan_shard(rows)
        stems.append(stem)
        headers.append(header)
        nbytes.append(max(entry.byte_end for entry in entries))
        for (source, box), entry in zip(pieces, entries, strict=True):
            places[key_of(source), box] = (number, entry)
    return Image(
        block_nbytes=block_nbytes,
        shards=_place_shards(stems, headers, nbytes),
        tensors=Holdings.of([_describe_tensor(source, places, block_nbytes, check_replicas) for source in sources]),
    )


def key_of(source: TensorSource) -> TensorKey:
    """Return what identifies a tensor among all."""
    return source.field, source.name, source.scope


def _place_shards(stems: list[str], headers: list[bytes], nbytes: list[int]) -> tuple[ImageShard, ...]:
    shards, begin = [], 0
    for stem, header, length in zip(stems, headers, nbytes, strict=True):
        shards.append(ImageShard(stem=stem, header=header, begin=begin, nbytes=length))
        begin += length + -length % ALIGN_NBYTES
    return tuple(shards)


def _list_pieces(
    shards: tuple[ImageShard, ...], tensors: Iterable[PartTensor]
) -> tuple[tuple[int, ...], tuple[Piece, ...]]:
    """Return the pieces by first byte, and which boxes they are; those that no file has lie behind the files."""
    found: list[tuple[int, Piece]] = []
    behind = sum(shard.nbytes + -shard.nbytes % ALIGN_NBYTES for shard in shards)
    for row, (tensor, box) in enumerate((one, held) for one in tensors for held in one.boxes):
        nbytes = box.box.element_count * DTYPES[tensor.dtype].nbytes
        shard = None
        if box.extents:
            extent = box.extents[0]
            assert extent.file is not None  # noqa: S101 - an image has nothing that a base has
            shard, begin = extent.file, shards[extent.file].begin + extent.byte_begin
        elif box.digests:
            begin, behind = behind, behind + nbytes + -nbytes % 64
        else:
            continue
        found.append((row, Piece(key=tensor.key, box=box.box, begin=begin, end=begin + nbytes, shard=shard)))
    found.sort(key=lambda one: (one[1].begin, one[1].end))
    rows, pieces = zip(*found, strict=True) if found else ((), ())
    return rows, pieces


def _divide(
    sources: Iterable[TensorSource], written: frozenset[tuple[TensorKey, Box]] | None
) -> list[tuple[str, list[tuple[TensorSource, Box]]]]:
    """Return the pieces of each file, with the stem of its name, by stem.

    What is too much for one header goes into further files, `weights_aa` and so on beside `weights`.

    Spec: REQ-SHD-001, REQ-TEN-007.
    """
    by_stem: dict[str, list[tuple[TensorSource, Box]]] = {}
    open_stems: dict[str, tuple[str, int, int]] = {}
    for source in sources:
        first = _stem(source)
        for box in sorted(source.boxes):
            if written is not None and (key_of(source), box) not in written:
                continue
            stem, header_nbytes, more = open_stems.get(first, (first, 0, 0))
            entry_nbytes = most_entry_nbytes(source.name, len(box.shape))
            if header_nbytes + entry_nbytes > _ENTRIES_NBYTES:
                stem, header_nbytes, more = f"{first}_{_LETTERS[more // 26]}{_LETTERS[more % 26]}", 0, more + 1
            open_stems[first] = stem, header_nbytes + entry_nbytes, more
            by_stem.setdefault(stem, []).append((source, box))
    return sorted(by_stem.items())


def _stem(source: TensorSource) -> str:
    """Return in which file a tensor goes: tools that load weights by name find nothing else among them."""
    if DTYPES[source.dtype].safetensors is None:
        return f"{source.field}_opaque"
    return f"{source.field}_buffers" if source.storage == "non-persistent" else source.field


def _shard_type(source: TensorSource, box: Box) -> tuple[str, tuple[int, ...]]:
    """Return tag and shape of a piece in a shard's header. Spec: REQ-TEN-004."""
    dtype = DTYPES[source.dtype]
    if dtype.safetensors is None:
        return "U8", (box.element_count * dtype.nbytes,)
    return dtype.safetensors, box.shape


def _shard_keys(names: list[str]) -> list[str]:
    """Return a key of its own for each name: the name where it is free, else with a number behind. Spec: REQ-SHD-009.

    >>> _shard_keys(["w", "w", "__metadata__", "w#1"])
    ['w', 'w#1', '__metadata__#1', 'w#1#1']
    """
    taken = {"__metadata__"}
    reached: dict[str, int] = {}  # What was taken stays taken: no need to try it again for the next of this name.
    keys = []
    for name in names:
        key, number = name, reached.get(name, 0)
        while key in taken:
            number += 1
            key = f"{name}#{number}"
        reached[name] = number
        taken.add(key)
        keys.append(key)
    return keys


def _describe_tensor(
    source: TensorSource,
    places: dict[tuple[TensorKey, Box], tuple[int, ShardEntry]],
    block_nbytes: int,
    check_replicas: bool,  # noqa: FBT001 - private
) -> PartTensor:
    key = key_of(source)
    boxes = []
    for box in sorted(source.boxes):
        place = places.get((key, box))
        nbytes = box.element_count * DTYPES[source.dtype].nbytes
        # Somebody else writes it? Whether it is the same must be proved, unless mesh or caller vouch for it.
        digested = place is not None or check_replicas or not source.replica
        digests = bytes(_digests_nbytes(nbytes, block_nbytes)) if digested else b""
        extents: tuple[Extent, ...] = ()
        if place is not None:
            file, entry = place
            blocks = block_count(nbytes, block_nbytes)
            extents = (
                Extent(block_begin=0, block_count=blocks, file=file, byte_begin=entry.byte_begin, key=entry.key),
            )
        boxes.append(PartBox(box=box, replica=source.replica, digests=digests, extents=extents))
    return PartTensor(
        field=source.field,
        name=source.name,
        scope=source.scope,
        dtype=source.dtype,
        global_shape=source.global_shape,
        storage=source.storage,
        aliases=tuple(sorted(source.aliases, key=str.encode)),
        boxes=tuple(boxes),
    )


def _digests_nbytes(nbytes: int, block_nbytes: int) -> int:
    return DIGEST_NBYTES * block_count(nbytes, block_nbytes)
