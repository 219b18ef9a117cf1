"""Where the bytes of one writer go: its files as one image, laid out before a byte is copied.

An image is what a snapshot looks like in memory: each shard as it will be on disk, header and all, and behind them what
is only digested. Names of tensors and boxes are in it, tensors aren't, so that it is kept from save to save.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ckptfmt import limits
from ckptfmt.digest import digest_bytes
from ckptfmt.documents.extents import Extents
from ckptfmt.documents.holdings import BOXES_KEYS, Boxes, Holdings, parse_boxes
from ckptfmt.documents.manifest import shard_name
from ckptfmt.documents.packed import Columns, Strings, dump_packed, dump_strings, make_integers
from ckptfmt.documents.part import Part, PartFile
from ckptfmt.documents.shard import most_entry_nbytes, plan_shard
from ckptfmt.documents.tables import TensorTable, parse_counter, sort_key
from ckptfmt.dtypes import DTYPES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from ckptfmt.box import Box
    from ckptfmt.documents.manifest import Origin
    from ckptfmt.documents.packed import Integers
    from ckptfmt.documents.part import Leaf, RngStream
    from ckptfmt.documents.tables import TensorKey
    from ckptfmt.write.snapshot import Snapshot, TensorSource

#: Each shard begins at a multiple of this, in bytes: what direct I/O asks of memory and file.
ALIGN_NBYTES: Final = 4096
#: What the entries of one header may take, so that the rest of it has room.
_ENTRIES_NBYTES: Final = limits.SHARD_HEADER_NBYTES - 4096
_LETTERS: Final = "abcdefghijklmnopqrstuvwxyz"


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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Image:
    """The layout of what one writer writes and digests.

    Attributes:
        block_nbytes: size of a block in bytes.
        shards: the files, one behind the other.
        holdings: everything that is held, as the part will say it, without the digests that are still to come.
        pieces: what is copied into the image, by first byte.
        rows: of each piece, its number among all boxes of the part.
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
        streams: Iterable[RngStream],
        leaves: Iterable[Leaf],
        absent: dict[str, str],
        extents: Extents | None = None,
    ) -> Part:
        """Return the part of a save of this image.

        Args:
            digests: of the blocks of each piece, in the order of `pieces`.
            extents: where boxes are, if that isn't in the image's shards.
        """
        held, of_boxes = self.holdings, [b""] * len(self.holdings.replica)
        for row, found in zip(self.rows, digests, strict=True):
            of_boxes[row] = found
        extents = held.extents if extents is None else extents
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
            holdings=dataclasses.replace(held, digests=b"".join(of_boxes), extents=extents),
            streams=tuple(sorted(streams, key=lambda stream: (stream.name.encode(), stream.scope.encode()))),
            leaves=tuple(sorted(leaves, key=lambda leaf: sort_key((leaf.field, leaf.name, leaf.scope)))),
            absent=absent,
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the image as bytes, strings and lists: its columns."""
        held, extents = self.holdings, self.holdings.extents
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
        """Return the image that `as_dict` was asked of. Raises: FormatError."""
        columns = Columns(value, (*BOXES_KEYS, "block_nbytes", "shards", "places"), "image")
        boxes, _ = parse_boxes(columns)
        block_nbytes = parse_counter(columns, "block_nbytes", below=limits.BLOCK_NBYTES_MAX + 1)
        if block_nbytes < limits.BLOCK_NBYTES_MIN:
            raise columns.broken("block_nbytes", f"blocks of {block_nbytes} bytes")
        table = columns.columns("shards", ("stem", "header", "nbytes"))
        stems = table.strings("stem").tolist()
        headers = table.blobs("header", count=len(stems))
        shards = _place_shards(stems, headers, table.packed("nbytes", count=len(stems)).tolist())
        places, count = columns.columns("places", _PLACE_KEYS), int(boxes.box_count.sum())
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
    """Return where everything goes that one writer gives to a save.

    Args:
        snapshot: what it holds.
        written: which of the pieces it writes; all of them if None.
        block_nbytes: size of a block in bytes.
        check_replicas: whether declared replicas that others write are digested here as well.

    Spec: REQ-TEN-004, REQ-TEN-005, REQ-SHD-009, REQ-CMT-012.
    """
    sources = sort_sources(snapshot)
    stems, headers, nbytes = [], [], []
    places: dict[tuple[TensorKey, Box], tuple[int, int, str]] = {}
    for number, (stem, pieces) in enumerate(_divide(sources, written)):
        keys = _shard_keys([source.name for source, _ in pieces])
        rows = [(key, *_shard_type(source, box)) for key, (source, box) in zip(keys, pieces, strict=True)]
        header, entries = plan_shard(rows)
        stems.append(stem)
        headers.append(header)
        nbytes.append(max(entry.byte_end for entry in entries))
        for (source, box), entry in zip(pieces, entries, strict=True):
            key = "" if entry.key == source.name else entry.key
            places[key_of(source), box] = (number, entry.byte_begin, key)
    found = [places.get((key_of(source), box)) for source in sources for box in sorted(source.boxes)]
    boxes, file = boxes_of(sources), make_integers(-1 if place is None else place[0] for place in found)
    replica = np.repeat(np.array([source.replica for source in sources], np.bool_), boxes.box_count)
    held = _hold(
        boxes,
        block_nbytes,
        replica=replica,
        # Somebody else writes it? Whether it is the same must be proved, unless mesh or caller vouch for it.
        digested=(file >= 0) | ~replica | check_replicas,
        file=file,
        byte_begin=make_integers(0 if place is None else place[1] for place in found),
        key=Strings.of([place[2] for place in found if place is not None]),
    )
    return Image(block_nbytes=block_nbytes, shards=_place_shards(stems, headers, nbytes), holdings=held)


def sort_sources(snapshot: Snapshot) -> list[TensorSource]:
    """Return the tensors of a snapshot in the order in which documents list them."""
    return sorted(snapshot.tensors, key=lambda source: sort_key(key_of(source)))


def boxes_of(sources: Sequence[TensorSource]) -> Boxes:
    """Return the boxes of tensors, those of each sorted."""
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
    """Return boxes with their places: each in one extent, or in none.

    Args:
        file: number of the shard of each; -1 for what another writer writes.
        key: of each box that has a file, in its header; the empty string for the tensor's name.
    """
    block_count = -(-boxes.box_nbytes() // block_nbytes)
    rows = np.flatnonzero(file >= 0)
    return Holdings(
        **boxes.members(),
        replica=replica,
        digest_count=np.where(digested, block_count, 0),
        digests=b"",
        extents=Extents.of_raw(
            box=rows, block_count=block_count[rows], file=file[rows], byte_begin=byte_begin[rows], key=key
        ),
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


def _list_pieces(shards: tuple[ImageShard, ...], held: Holdings) -> tuple[tuple[int, ...], tuple[Piece, ...]]:
    """Return the pieces by first byte, and which boxes they are; those that no file has lie behind the files."""
    nbytes, extents = held.box_nbytes(), held.extents
    begin, shard = np.zeros_like(nbytes), np.full_like(nbytes, -1)
    shard[extents.box] = extents.file
    begin[extents.box] = np.array([one.begin for one in shards], np.int64)[extents.file] + extents.byte_begin
    behind = np.flatnonzero(~held.written & (held.digest_count > 0))
    padded = nbytes[behind] + -nbytes[behind] % 64
    end_of_files = sum(one.nbytes + -one.nbytes % ALIGN_NBYTES for one in shards)
    begin[behind] = end_of_files + np.cumsum(padded) - padded
    rows = np.concatenate([extents.box, behind])
    rows = rows[np.lexsort((rows, nbytes[rows], begin[rows]))]
    boxes, keys = held.list_boxes(), held.table.keys
    columns = (column[rows].tolist() for column in (held.owner, begin, begin + nbytes, shard))
    pieces = tuple(
        Piece(key=keys[owner], box=boxes[row], begin=first, end=end, shard=None if number < 0 else number)
        for row, owner, first, end, number in zip(rows.tolist(), *columns, strict=True)
    )
    return tuple(rows.tolist()), pieces


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
