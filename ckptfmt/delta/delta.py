"""The writing of a delta: unchanged blocks by reference, changed blocks encoded, in packs.

The snapshot is in a slot, and the base usually in the other slot. A few threads digest, compare and
encode blocks, in the order of their packs, while the slot is being filled. Encoded bytes are
decoded and compared before they are written.

Spec: REQ-DEL-001 to REQ-DEL-012, REQ-CMT-035, REQ-CMT-031.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Generator, Iterator, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ckptfmt.commit.decision import create_once
from ckptfmt.delta.base import Base, BaseContents, BaseFiles
from ckptfmt.delta.block_coder import (
    UNDECIDED,
    VERDICT,
    BlockCoder,
    Verdict,
    dump_rules,
    find_groups,
)
from ckptfmt.delta.coders import Coders, coder_count
from ckptfmt.digest import digest_at, digest_bytes
from ckptfmt.documents.extents import (
    RAW,
    SAME,
    Extents,
    PredictionGroup,
    StoredBlocks,
    count_stored,
)
from ckptfmt.documents.manifest import Origin, Reference, pack_name
from ckptfmt.documents.packed import Strings, join_integers
from ckptfmt.documents.part import PACK_HEADER, Part, PartFile
from ckptfmt.documents.tables import block_count
from ckptfmt.errors import Code, err
from ckptfmt.features import ENCODINGS, NEEDS_BASE, PLAIN
from ckptfmt.read.streaming import WAITING, iter_ahead, iter_batches
from ckptfmt.store.direct import in_pages
from ckptfmt.store.protocol import Buffer, SizedChunks, Store
from ckptfmt.write.image import Image
from ckptfmt.write.slot_contents import Snapped
from ckptfmt.write.writer import removed_after_error

#: Size of the batch of blocks that a thread takes at once, in bytes and in blocks, at most.
_BATCH_NBYTES: Final = 4 << 20
_BATCH_COUNT: Final = 256
#: Where no field is encoded, a block that the base had unchanged counts for this fraction of its
#: size: most such blocks are still unchanged, and cost little. With encoding, larger batches would
#: take too much memory, since encoded bytes are held until the store has them.
_SAME_SHARE: Final = 4
#: Least number of batches in progress or waiting for the store: the batches behind a slow one
#: proceed meanwhile.
_AHEAD_COUNT: Final = 24


class Delta:
    """The contents of a delta's packs, computed from a slot.

    Args:
        store: store of the checkpoint's directory; the base is in the same parent directory.
        snapped: snapshot with the base's image, in a slot that is being filled.
        base: base of the delta.
        references: references to list in the part.
        fields: fields in which changed blocks are encoded; elsewhere they are stored raw.
        among: candidate encodings.
        coders: coder processes, if there are any.
        held: digests of the slot's previous contents, for the blocks of each piece, if known.
    """

    def __init__(
        self,
        store: Store,
        snapped: Snapped,
        *,
        base: Base,
        references: Sequence[Reference],
        fields: frozenset[str],
        among: Sequence[str],
        coders: Coders | None,
        held: Sequence[bytes] | None,
    ) -> None:
        self.snapped = snapped
        self._held = held
        self._image = image = snapped.image
        self._view = snapped.view
        self._wait = snapped.progress.wait
        self._references = tuple(references)
        self._base_number = self._references.index(base.reference)
        self._files = BaseFiles(store, image, base)
        contents = BaseContents(image, base.digests, base.view, otherwise=self._files.content)
        groups = find_groups(snapped, base.part.leaves, contents) if fields else ()
        self._groups = {number: group for group in groups for number in group.pieces}
        counts = [
            block_count(piece.end - piece.begin, image.block_nbytes) for piece in image.pieces
        ]
        #: The row of each piece's first block; the last entry is the number of blocks.
        self._first = [0, *itertools.accumulate(counts)]
        #: The verdict on each block, piece after piece.
        self.verdicts = np.zeros(self._first[-1], VERDICT)
        self.verdicts["encoding"] = UNDECIDED
        self._holders = _find_holders(image, base, self._references, self._first)
        self._coder = BlockCoder(
            image, self._view, contents=contents, groups=groups, fields=fields, among=among
        )
        self._encodes = bool(fields)
        self._coders: Coders | None = None
        if coders is not None and fields and base.slot is not None:
            self._coders = coders
            coders.begin(snapped, base, base.slot, groups=groups, fields=fields, among=among)

    @property
    def decode_s(self) -> float:
        """The time to decode all encoded blocks, in seconds, by as many threads as encode."""
        return float(self.verdicts["decode_s"].sum()) / coder_count()

    def close(self) -> None:
        """Close the base's files."""
        self._files.close()

    def write(self, store: Store, origin: Origin, writer: int) -> Part:
        """Write the packs of all shards with stored bytes, and return the part, not yet written.

        An error removes the packs.

        Raises: StoreError; errors of waiting for the slot and of reading the base's files.
        """
        files: list[PartFile] = []
        blocks = [self._blocks_of(number) for number in range(len(self._image.shards))]
        names = [pack_name(shard.stem, origin.attempt, writer) for shard in self._image.shards]
        with removed_after_error(store, names):
            # One stream through all packs: the next pack is coded while the previous one is
            # written.
            with contextlib.closing(
                self._code_all([at for of_shard in blocks for at in of_shard])
            ) as stream:
                for name, of_shard in zip(names, blocks, strict=True):
                    files.extend(
                        self._write_pack(
                            store, name, of_shard, itertools.islice(stream, len(of_shard))
                        )
                    )
            self._digest_rest()
            part = self._image.part(
                origin,
                self.digests,
                self.snapped.context,
                writer=writer,
                extents=self._extents(files),
            )
            groups = self._part_groups()
            return dataclasses.replace(
                part, files=tuple(files), references=self._references, groups=groups
            )

    def _part_groups(self) -> tuple[PredictionGroup, ...]:
        """Return the groups with a predicted block, in the order and form of the part."""
        rows = self._image.rows
        predicted = set(self._piece_of[self.verdicts["predicted"]].tolist())
        rules = dump_rules(self._groups.values())
        found = [
            PredictionGroup(
                kind=group.rule.kind,
                rule=rules[id(group.rule)],
                reference=self._base_number if group.needs_base else None,
                boxes=tuple(rows[number] for number in group.pieces),
            )
            for group in dict.fromkeys(self._groups.values())
            if predicted & set(group.pieces)
        ]
        return tuple(sorted(found, key=lambda group: group.boxes))

    def _write_pack(
        self,
        store: Store,
        name: str,
        blocks: Sequence[tuple[int, int]],
        stream: Iterator[bytes | memoryview],
    ) -> list[PartFile]:
        """Write a pack of the stored bytes from `stream`; write no file if there are none."""
        # Only coding shows whether there are bytes to store. The file isn't begun before.
        first = next(filter(None, stream), None)
        if first is None:
            return []
        drawn = [itertools.chain([first], stream)]

        def pieces() -> Iterator[Buffer]:
            yield PACK_HEADER
            if drawn:
                yield from filter(None, drawn.pop())
                return
            # A retry, since the store didn't answer. First each block is coded once: two threads
            # that code one block may choose different encodings, and the verdict that is kept
            # might not match the bytes that are written.
            nbytes()
            yield from filter(None, self._code_all(blocks))

        def nbytes() -> int:
            collections.deque(stream, maxlen=0)
            return self._pack_nbytes(blocks)

        most_nbytes = len(PACK_HEADER) + sum(map(self._nbytes_of, blocks))

        def chunks() -> SizedChunks:
            return SizedChunks(in_pages(pieces()), None, most_nbytes=most_nbytes)

        create_once(store, name, chunks, nbytes=nbytes)
        return [
            PartFile(
                name=name,
                kind="pack",
                nbytes=self._pack_nbytes(blocks),
                header_nbytes=len(PACK_HEADER),
                header_digest=digest_bytes(PACK_HEADER),
            )
        ]

    def _pack_nbytes(self, blocks: Sequence[tuple[int, int]]) -> int:
        rows = [self._row(*at) for at in blocks]
        return len(PACK_HEADER) + int(self.verdicts["nbytes"][rows].sum())

    def _blocks_of(self, shard: int | None) -> list[tuple[int, int]]:
        """Return the numbers of piece and block for all blocks of a shard.

        For None: for all blocks that are digested and not stored.
        """
        return [
            (number, block)
            for number, piece in enumerate(self._image.pieces)
            if piece.shard == shard
            for block in self._range_of(number)
        ]

    def _code_all(self, blocks: Sequence[tuple[int, int]]) -> Generator[bytes | memoryview]:
        """Yield the stored bytes of each block and keep the verdict; a few threads work ahead."""
        count = coder_count()
        if self._coders is not None:
            count *= 2  # while a thread handles an answer, the next batch is coded
        elif not self._encodes:
            count = max(1, count // 2)  # copying and writing need processors, too
        ahead_count = max(_AHEAD_COUNT, WAITING * count)
        batches = iter_batches(blocks, self._work_of, nbytes=_BATCH_NBYTES, count=_BATCH_COUNT)
        for stored in iter_ahead(self._code_some, batches, count=count, ahead_count=ahead_count):
            yield from stored

    def _work_of(self, at: tuple[int, int]) -> int:
        """Return about how many bytes of a block must be digested or encoded."""
        was_same = not self._encodes and self._holders[self._row(*at)] != self._base_number
        return self._nbytes_of(at) // (_SAME_SHARE if was_same else 1)

    def _nbytes_of(self, at: tuple[int, int]) -> int:
        begin, end = self._image.span(*at)
        return end - begin

    def _code_some(self, blocks: Sequence[tuple[int, int]]) -> list[bytes | memoryview]:
        """Return the stored bytes of blocks and keep the verdicts.

        Coder processes, where available, code the blocks with unknown digests.
        """
        self._wait(max(self._coder.end_of(*at) for at in blocks))
        digests = {at: self._known_digest(*at) for at in blocks}
        coded: dict[tuple[int, int], tuple[Any, bytes]] = {}
        if self._coders is not None:
            news = [at for at in blocks if not self._is_decided(*at) and digests[at] is None]
            if news:
                coded = self._coders.code(news, sum(map(self._nbytes_of, news)))
        return [
            self._code_again(*at)
            if self._is_decided(*at)
            else self._note(*at, *(coded.get(at) or self._coder.code(*at, digest=digests[at])))
            for at in blocks
        ]

    def _row(self, number: int, block: int) -> int:
        return self._first[number] + block

    def _is_decided(self, number: int, block: int) -> bool:
        return bool(self.verdicts["encoding"][self._row(number, block)] != UNDECIDED)

    def _note(self, number: int, block: int, verdict: Any, stored: bytes) -> bytes | memoryview:
        """Keep the verdict on a block, and return the block's stored bytes."""
        row = self._row(number, block)
        self.verdicts[row] = verdict
        return self._content(number, block) if self.verdicts["encoding"][row] == RAW else stored

    def _content(self, number: int, block: int) -> memoryview:
        begin, end = self._image.span(number, block)
        return self._view[begin:end]

    def _known_digest(self, number: int, block: int) -> bytes | None:
        """Return the digest of a block that the slot kept from its previous contents, or None."""
        if self._held is None:
            return None
        seen = self.snapped.progress.seen(self._image.pieces[number].begin)
        return (
            digest_at(self._held[number], block) if seen is not None and seen.kept[block] else None
        )

    def _code_again(self, number: int, block: int) -> bytes | memoryview:
        """Return the stored bytes of a block again, for a retry after the store didn't answer.

        The first try may have written its bytes, and the retry must write the same.

        Raises: StoreError(STORE_NO_ANSWER) if the bytes differ: the file's content is then unknown.
        """
        known = self.verdicts[self._row(number, block)]
        encoding = ENCODINGS[known["encoding"]]
        if encoding in PLAIN:
            return self._content(number, block) if encoding == "raw" else b""
        stored = self._coder.code_as(encoding, number, block, predicted=bool(known["predicted"]))
        if digest_bytes(stored) != known["stored_digest"].tobytes():
            raise err(
                Code.STORE_NO_ANSWER,
                "a block encoded twice isn't the same, and the first may be there",
            )
        return stored

    def _digest_rest(self) -> None:
        """Digest the pieces that this writer holds and another writer stores."""
        for number, block in self._blocks_of(None):
            self._wait(self._image.span(number, block)[1])
            digest = self._known_digest(number, block) or digest_bytes(self._content(number, block))
            self.verdicts[self._row(number, block)] = Verdict(
                RAW, predicted=False, nbytes=0, digest=digest
            )

    @functools.cached_property
    def digests(self) -> list[bytes]:
        """The digests of the blocks of each piece of the image, after `write`."""
        column = self.verdicts["digest"]
        return [column[first:last].tobytes() for first, last in itertools.pairwise(self._first)]

    @functools.cached_property
    def _piece_of(self) -> NDArray[np.int64]:
        """The number of each block's piece."""
        return np.repeat(np.arange(len(self._image.pieces)), np.diff(self._first))

    def _extents(self, files: Sequence[PartFile]) -> Extents:
        """Return the location of each box's blocks, given the written packs.

        An extent covers a run of blocks that are stored alike. An extent without a file, which
        names the base, stands for a box without blocks.
        """
        numbers = {
            file.name.rpartition("-")[0].rpartition("-")[0]: number
            for number, file in enumerate(files)
        }
        file_of = np.array([*(numbers.get(shard.stem, -1) for shard in self._image.shards), -1])
        shard_of = np.array(
            [-1 if piece.shard is None else piece.shard for piece in self._image.pieces], np.int64
        )
        written = np.flatnonzero(shard_of[self._piece_of] >= 0)
        blocks = self.verdicts[written]
        piece = self._piece_of[written]
        encoding = blocks["encoding"].astype(np.int64)
        predicted = blocks["predicted"]
        has_base = (
            np.isin(encoding, [ENCODINGS.index(name) for name in sorted(NEEDS_BASE)]) & ~predicted
        )
        reference = np.where(
            encoding == SAME, self._holders[written] + 1, has_base * (self._base_number + 1)
        )
        is_new = np.ones(len(written), np.bool_)
        is_new[1:] = np.any(
            [np.diff(column) != 0 for column in (piece, encoding, reference, predicted)], axis=0
        )
        first = np.flatnonzero(is_new)
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(blocks["nbytes"])])[first]
        shard = shard_of[piece[first]]  # pieces are sorted by shard
        place = ends - ends[np.searchsorted(shard, shard)] + len(PACK_HEADER)
        file = np.where(encoding[first] == SAME, -1, file_of[shard])
        empty = np.flatnonzero((np.diff(self._first) == 0) & (shard_of >= 0))
        none = np.zeros_like(empty)
        of_base = np.full_like(empty, self._base_number + 1)
        block_count = np.concatenate([np.diff(first, append=len(written)), none])
        of_encoded = count_stored(np.concatenate([encoding[first], none + SAME]), block_count)
        found = Extents(
            box=np.array(self._image.rows, np.int64)[np.concatenate([piece[first], empty])],
            block_begin=np.concatenate(
                [written[first] - np.array(self._first)[piece[first]], none]
            ),
            block_count=block_count,
            file=np.concatenate([file, none - 1]),
            byte_begin=np.concatenate([np.where(file < 0, 0, place), none]),
            key=Strings.of([""] * (len(first) + len(empty))),
            encoding=np.concatenate([encoding[first], none + SAME]),
            reference=np.concatenate([reference[first], of_base]),
            predicted=np.concatenate([predicted[first], none > 0]),
            stored_row=np.cumsum(of_encoded) - of_encoded,
            stored=_stored_of(blocks),
        )
        return found.take(found.order())

    def _range_of(self, number: int) -> range:
        return range(self._first[number + 1] - self._first[number])


def _stored_of(blocks: NDArray[Any]) -> StoredBlocks:
    """Return sizes and digests of the encoded blocks."""
    encoded = blocks[~np.isin(blocks["encoding"], (RAW, SAME))]
    return StoredBlocks(nbytes=encoded["nbytes"], digests=encoded["stored_digest"].tobytes())


def _find_holders(
    image: Image, base: Base, references: Sequence[Reference], first: Sequence[int]
) -> NDArray[np.int64]:
    """Return, for each block, the number of the reference that has the block in its own file.

    Args:
        first: row of each piece's first block, then the number of blocks.
    """
    numbers = {reference: number for number, reference in enumerate(references)}
    holders = np.array([numbers[one] for one in (base.reference, *base.part.references)], np.int64)
    extents = base.part.holdings.extents
    of_extents = holders[np.where(extents.encoding == SAME, extents.reference, 0)]
    block_counts = np.bincount(
        extents.box, extents.block_count, minlength=len(base.part.holdings.replica)
    )
    of_boxes = np.split(
        np.repeat(of_extents, extents.block_count), np.cumsum(block_counts.astype(np.int64))
    )
    # A box that another writer stores has no extents, and its holder is never used.
    rows = zip(image.rows, np.diff(first).tolist(), strict=True)
    return join_integers(
        [of_boxes[row] if len(of_boxes[row]) else np.zeros(count, np.int64) for row, count in rows]
    )
