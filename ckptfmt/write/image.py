"""Who writes what, and where it goes: the files of one writer as one image, laid out before a byte is copied.

An image is what a snapshot looks like in memory: each shard as it will be on disk, header and all, and behind them what
is only digested. Names of tensors and boxes are in it, tensors aren't, so that it is kept from save to save.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeVar

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
from ckptfmt.documents.packed import Columns, Integers, Strings, dump_packed, dump_strings, make_integers
from ckptfmt.documents.part import Leaf, Part, PartFile, RngStream
from ckptfmt.documents.shard import most_entry_nbytes, plan_shard
from ckptfmt.documents.tables import TensorKey, TensorTable, parse_counter, sort_key
from ckptfmt.dtypes import DTYPES
from ckptfmt.errors import Code, err
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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What a writer gives to a save beside its tensors.

    Attributes:
        saved_unix_s: when it took the state, by its own clock; 0 if that is before 1970.
        durability: where its files will be at least when its part is at home.
    """

    saved_unix_s: int
    streams: tuple[RngStream, ...]
    leaves: tuple[Leaf, ...]
    absent: dict[str, str]
    labels: Labels = NO_LABELS
    durability: str = HOME

    @classmethod
    def of(cls, snapshot: Snapshot) -> Context:
        """Return what a snapshot taken now gives."""
        return cls(
            # Information only: a clock that is wrong by decades is no reason not to save.
            saved_unix_s=min(max(int(time.time()), 0), limits.JSON_INTEGER),
            streams=snapshot.streams,
            leaves=snapshot.leaves,
            absent=dict(snapshot.absent),
            labels=snapshot.labels,
        )


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
        context: Context,
        *,
        writer: int,
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
            streams=tuple(sorted(context.streams, key=lambda stream: (stream.name.encode(), stream.scope.encode()))),
            leaves=tuple(sorted(context.leaves, key=lambda leaf: sort_key((leaf.field, leaf.name, leaf.scope)))),
            absent=context.absent,
            labels=context.labels,
            durability=context.durability,
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
    boxes = gather_boxes(sources)
    pieces = ((key_of(source), box) for source in sources for box in sorted(source.boxes))
    is_written = np.array([written is None or piece in written for piece in pieces], np.bool_)
    replica = np.repeat(np.array([source.replica for source in sources], np.bool_), boxes.box_count)
    # Somebody else writes it? Whether it is the same must be proved, unless mesh or caller vouch for it.
    digested = is_written | ~replica | check_replicas
    return lay_out(boxes, block_nbytes=block_nbytes, written=is_written, replica=replica, digested=digested)


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
        written: of each box, whether a file of the image has it.
        replica: of each box, whether it is declared a replica.
        digested: of each box, whether its blocks are digested.

    Spec: REQ-TEN-004, REQ-TEN-005, REQ-SHD-009.
    """
    tensors, extents = boxes.table, iter(boxes.box_shape.tolist())
    owners = boxes.owner.tolist()
    shapes = [tuple(itertools.islice(extents, len(tensors.global_shapes[owner]))) for owner in owners]
    file, byte_begin = np.full(len(owners), -1), np.zeros(len(owners), np.int64)
    keys = [""] * len(owners)
    stems, headers, nbytes = [], [], []
    for number, (stem, rows) in enumerate(_divide(tensors, owners, np.flatnonzero(written).tolist())):
        names = [tensors.keys[owners[row]][1] for row in rows]
        types = (_shard_type(tensors.dtypes[owners[row]], shapes[row]) for row in rows)
        header, entries = plan_shard([(key, *of) for key, of in zip(_shard_keys(names), types, strict=True)])
        stems.append(stem)
        headers.append(header)
        nbytes.append(max(entry.byte_end for entry in entries))
        file[rows], byte_begin[rows] = number, [entry.byte_begin for entry in entries]
        for row, name, entry in zip(rows, names, entries, strict=True):
            keys[row] = "" if entry.key == name else entry.key
    key = Strings.of(list(itertools.compress(keys, written)))
    held = _hold(boxes, block_nbytes, replica=replica, digested=digested, file=file, byte_begin=byte_begin, key=key)
    return Image(block_nbytes=block_nbytes, shards=_place_shards(stems, headers, nbytes), holdings=held)


def sort_sources(snapshot: Snapshot) -> list[TensorSource]:
    """Return the tensors of a snapshot in the order in which documents list them."""
    return sorted(snapshot.tensors, key=lambda source: sort_key(key_of(source)))


def gather_boxes(sources: Sequence[TensorSource]) -> Boxes:
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


def _divide(tensors: TensorTable, owners: Sequence[int], written: Iterable[int]) -> list[tuple[str, list[int]]]:
    """Return the boxes of each file, with the stem of its name, by stem.

    What is too much for one header goes into further files, `weights_aa` and so on beside `weights`.

    Args:
        owners: of each box, the number of its tensor.
        written: the boxes that go into files.

    Spec: REQ-SHD-001, REQ-TEN-007.
    """
    by_stem: dict[str, list[int]] = {}
    open_stems: dict[str, tuple[str, int, int]] = {}
    for row in written:
        first = _stem(tensors, owners[row])
        stem, header_nbytes, more = open_stems.get(first, (first, 0, 0))
        entry_nbytes = most_entry_nbytes(tensors.keys[owners[row]][1], len(tensors.global_shapes[owners[row]]))
        if header_nbytes + entry_nbytes > _ENTRIES_NBYTES:
            stem, header_nbytes, more = f"{first}_{_LETTERS[more // 26]}{_LETTERS[more % 26]}", 0, more + 1
        open_stems[first] = stem, header_nbytes + entry_nbytes, more
        by_stem.setdefault(stem, []).append(row)
    return sorted(by_stem.items())


def _stem(tensors: TensorTable, tensor: int) -> str:
    """Return in which file a tensor goes: tools that load weights by name find nothing else among them."""
    field = tensors.keys[tensor][0]
    if DTYPES[tensors.dtypes[tensor]].safetensors is None:
        return f"{field}_opaque"
    return f"{field}_buffers" if tensors.storages[tensor] == "non-persistent" else field


def _shard_type(dtype: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """Return tag and shape of a piece in a shard's header. Spec: REQ-TEN-004."""
    tag = DTYPES[dtype].safetensors
    return ("U8", (math.prod(shape) * DTYPES[dtype].nbytes,)) if tag is None else (tag, shape)


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


# --- who writes what --------------------------------------------------------------------------------------------------

#: Whatever can be put into a set and into order.
K = TypeVar("K", bound=Any)


def assign_writers(holdings: Sequence[Sequence[tuple[K, int]]]) -> tuple[frozenset[K], ...]:
    """Return for each writer the keys that it writes: each key exactly once, by one of its holders.

    What has one holder is given to it first. The rest goes, largest first, to the holder with the fewest bytes so far;
    ties go to the lower key, then to the lower writer. The result depends on nothing else, not even on the order
    within a writer's list.

    Args:
        holdings: for each writer, what it holds: key and number of bytes.

    Units: bytes.
    Raises: ARGUMENT when a writer lists a key twice; TENSOR_DIVERGED when two writers give a key different sizes.
    Source: LPT scheduling, R. L. Graham, SIAM J. Appl. Math. 17 (1969), with restricted machines.

    >>> [sorted(keys) for keys in assign_writers([[("a", 5), ("b", 3), ("c", 3)], [("a", 5), ("b", 3)]])]
    [['b', 'c'], ['a']]
    """
    holders, nbytes = _invert(holdings)
    load = [0] * len(holdings)
    written: list[list[K]] = [[] for _ in holdings]
    # The only holder has no choice; the others are balanced around it.
    order = sorted(holders, key=lambda key: (len(holders[key]) > 1, -nbytes[key], key))
    for key in order:
        writer = min(holders[key], key=lambda holder: (load[holder], holder))
        load[writer] += nbytes[key]
        written[writer].append(key)
    return tuple(frozenset(keys) for keys in written)


def _invert(holdings: Sequence[Sequence[tuple[K, int]]]) -> tuple[dict[K, list[int]], dict[K, int]]:
    """Return the writers that hold each key, ascending, and each key's bytes."""
    holders: dict[K, list[int]] = {}
    nbytes: dict[K, int] = {}
    for writer, held in enumerate(holdings):
        for key, key_nbytes in held:
            of_key = holders.setdefault(key, [])
            if of_key and of_key[-1] == writer:
                raise err(Code.ARGUMENT, f"writer {writer} lists {key} twice")
            of_key.append(writer)
            if nbytes.setdefault(key, key_nbytes) != key_nbytes:
                detail = f"{key} has {nbytes[key]} bytes on writer {of_key[0]} and {key_nbytes} on writer {writer}"
                raise err(Code.TENSOR_DIVERGED, detail)
    return holders, nbytes
