"""One read of many elements: from the ranges of blocks that have them to whoever wants them, alone or with others.

What lies in a file as it is comes through `ckptfmt.read.streaming`, whichever checkpoint's file it is. What is
encoded is decoded in units: blocks of the same elements of all boxes of a group, so that what one of them needs of
another is decoded once. What is stored of a few batches of units is in memory at a time.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Final, TypeAlias

from ckptfmt.layout.read_plan import BlockRange
from ckptfmt.read.ahead import WAITING, iter_ahead, iter_batches
from ckptfmt.read.closure import Library
from ckptfmt.read.decoding import Decoder, iter_runs, iter_stored
from ckptfmt.read.sharing import Peers, Rounds, Take, share_ranges
from ckptfmt.read.streaming import Borrow, ReadReport, stream_requests, thread_count

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckptfmt.layout.read_plan import Request
    from ckptfmt.read.decoding import Run
    from ckptfmt.read.reader import Checkpoint
    from ckptfmt.read.stored import StoredPiece

#: How many threads read what is decoded for each processor, where reading waits.
_WHILE_WAITING: Final = 3
#: How much content is read for ahead of what is decoded, in bytes, where a batch isn't larger.
_AHEAD_NBYTES: Final = 64 << 20
#: How much content is read for at once, in bytes.
_BATCH_NBYTES: Final = 2 << 20
#: Of how many units at most: planning for them and decoding them takes as long as for a few large ones.
_BATCH_COUNT: Final = 16

#: Blocks that are decoded together: the number of a piece, and that of a block of it.
Unit: TypeAlias = "list[tuple[int, int]]"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Fetched:
    """Units, and what is stored of all that they are decoded from, verified.

    Attributes:
        stored: by `StoredBlock.key`.
        read_nbytes: how many bytes were read for it.
        request_count: in how many ranges.
    """

    units: list[Unit]
    stored: Mapping[tuple[int, int, int], memoryview]
    read_nbytes: int
    request_count: int


class Reading:
    """Elements on their way from stored pieces to those who want them; see `Checkpoint.plan_reading`.

    Attributes:
        pieces: what is read, each piece once.
        ranges: which raw blocks of them this process reads for itself alone.
        files: what they are in.
        units: what is decoded: lists of blocks, each a piece's number and the block's.
    """

    def __init__(self, checkpoint: Checkpoint, pieces: list[StoredPiece], borrow: Borrow | None) -> None:
        self.pieces = pieces
        self.files = Library(checkpoint)
        self.ranges, self.units = _sort_blocks(pieces, self.files)
        self._checkpoint = checkpoint
        self._borrow = borrow
        self._rounds: Rounds | None = None
        self._read_nbytes = self._verified_nbytes = self._request_count = self._buffer_nbytes = 0
        self._decoded_nbytes = 0

    def share(self, peers: Peers) -> None:
        """Let each block that several processes want be read by one, who sends it to the others. All of them call it.

        Raises: what the gather raises.
        """
        block_nbytes = self._checkpoint.manifest.origin.block_nbytes
        self.ranges, self._rounds = share_ranges(self.ranges, peers, block_nbytes=block_nbytes)

    def run(self) -> ReadReport:
        """Read, verify and hand on everything; if that is shared, every process calls it.

        Raises: IntegrityError; what the sinks raise; StateError(PEER_FAILED).
        """
        for piece in self.pieces:
            piece.open_sinks()
        failed: Exception | None = None
        try:
            self._read(self.ranges)
            if self.units:
                self._decode()
        except Exception as error:
            if self._rounds is None:
                raise
            failed = error  # the others wait for what this process reads for them
        if self._rounds is not None:
            self._rounds.run(self._read, self._take)
        if failed is not None:
            raise failed
        return self._report()

    def _read(self, ranges: list[BlockRange], then: Take | None = None) -> None:
        """Read and take ranges; `then` is given each of them, too."""
        requests = self._checkpoint.plan_requests(self.files, ranges)

        def take(request: Request, content: memoryview) -> None:
            for blocks in request.ranges:
                at = blocks.byte_begin - request.byte_begin
                found = content[at : at + blocks.nbytes]
                self._take(blocks, found)
                if then is not None:
                    then(blocks, found)

        self._request_count += len(requests)
        self._read_nbytes += sum(request.nbytes for request in requests)
        self._verified_nbytes += sum(blocks.nbytes for blocks in ranges)
        buffer_nbytes = stream_requests(self.files, requests, take, borrow=self._borrow)
        self._buffer_nbytes = max(self._buffer_nbytes, buffer_nbytes)

    def _decode(self) -> None:
        """Decode and hand on all units. Where reading waits, a few threads read ahead.

        One thread decodes. Measured, on two cores: two took from the same time to twice as long, since the calls are
        short and each hands on the interpreter's lock.
        """
        batches = self._list_batches()
        room = _AHEAD_NBYTES // max(sum(map(self._nbytes_of, batch)) for batch in batches)
        count = max(1, min(thread_count() * _WHILE_WAITING, room // (WAITING + 1))) if self._waits() else 0
        ahead = iter_ahead(self._fetch, batches, count=count) if count else map(self._fetch, batches)
        for fetched in ahead:
            stored_nbytes = sum(map(len, fetched.stored.values()))
            self._read_nbytes += fetched.read_nbytes
            self._request_count += fetched.request_count
            self._verified_nbytes += stored_nbytes
            self._buffer_nbytes = max(self._buffer_nbytes, stored_nbytes * (WAITING * count + 1))
            for unit in fetched.units:
                self._decode_unit(unit, fetched.stored)

    def _waits(self) -> bool:
        """Return whether reading what is decoded waits for a device or a network."""
        number, block = self.units[0][0]
        piece = self.pieces[number]
        (run,) = iter_runs(piece.opened, piece.stored, block, block + 1)
        assert run.extent.file is not None  # noqa: S101 - what is decoded is stored
        return run.opened.checkpoint.store.waits(run.opened.part.files[run.extent.file].name)

    def _list_batches(self) -> list[list[Unit]]:
        """Return units in batches whose stored bytes are read at once: a small one by itself would take many requests.

        Batches of small units, which take long to decode for their bytes, are spread among the others, so that neither
        reading nor decoding waits for long.
        """
        sorts: tuple[list[Unit], list[Unit]] = [], []
        for unit in self.units:
            sorts[self._nbytes_of(unit) * _BATCH_COUNT < _BATCH_NBYTES].append(unit)
        placed: list[tuple[float, list[Unit]]] = []
        for units in sorts:
            batches = list(iter_batches(units, self._nbytes_of, nbytes=_BATCH_NBYTES, count=_BATCH_COUNT))
            placed += [((at + 0.5) / len(batches), batch) for at, batch in enumerate(batches)]
        return [batch for _, batch in sorted(placed, key=lambda row: row[0])]

    def _nbytes_of(self, unit: Unit) -> int:
        return sum(min(self.pieces[number].block_nbytes, self.pieces[number].stored.nbytes) for number, _ in unit)

    def _fetch(self, units: list[Unit]) -> _Fetched:
        """Read and verify what is stored of units, and of all that they are decoded from."""
        pieces = ((self.pieces[number], block) for unit in units for number, block in unit)
        wanted = list(iter_stored((piece.opened, piece.stored, block) for piece, block in pieces))
        library = Library(self._checkpoint)
        ranges = [library.range_of_block(stored, number) for number, stored in enumerate(wanted)]
        requests = self._checkpoint.plan_requests(library, ranges)
        found: dict[tuple[int, int, int], memoryview] = {}
        for request in requests:
            content = library.read(request)
            for blocks in request.ranges:
                at = blocks.byte_begin - request.byte_begin
                stored = wanted[blocks.piece]
                found[stored.key] = content[at : at + blocks.nbytes]
                stored.check(found[stored.key])
        return _Fetched(
            units=units,
            stored=found,
            read_nbytes=sum(request.nbytes for request in requests),
            request_count=len(requests),
        )

    def _decode_unit(self, unit: Unit, stored: Mapping[tuple[int, int, int], memoryview]) -> None:
        decoder = Decoder(stored)
        for number, block in unit:
            piece = self.pieces[number]
            content = decoder.content(piece.opened, piece.stored, block)
            begin = block * piece.block_nbytes
            piece.place(BlockRange("", 0, content.nbytes, number, begin), content)
        self._decoded_nbytes += decoder.decoded_nbytes
        self._verified_nbytes += decoder.verified_nbytes

    def _take(self, blocks: BlockRange, content: memoryview) -> None:
        """Check a range, then hand on what is wanted of it."""
        if self._checkpoint.is_verifying:
            self.pieces[blocks.piece].check(blocks, content)
        self.pieces[blocks.piece].place(blocks, content)

    def _report(self) -> ReadReport:
        received_nbytes = 0 if self._rounds is None else self._rounds.received_nbytes
        verified_nbytes = self._verified_nbytes + received_nbytes
        return ReadReport(
            needed_nbytes=sum(piece.wanted_nbytes for piece in self.pieces),
            read_nbytes=self._read_nbytes,
            verified_nbytes=verified_nbytes if self._checkpoint.is_verifying else 0,
            request_count=self._request_count,
            received_nbytes=received_nbytes,
            decoded_nbytes=self._decoded_nbytes,
            buffer_nbytes=self._buffer_nbytes + (0 if self._rounds is None else self._rounds.buffer_nbytes),
            metadata_nbytes=self._checkpoint.metadata_nbytes,
        )


def _sort_blocks(pieces: Sequence[StoredPiece], library: Library) -> tuple[list[BlockRange], list[Unit]]:
    """Return the wanted blocks that are read as they are, and those that are decoded."""
    ranges: list[BlockRange] = []
    units: dict[tuple[int, int, int], Unit] = {}
    for number, piece in enumerate(pieces):
        for first, last in piece.iter_blocks():
            for run in iter_runs(piece.opened, piece.stored, first, last):
                if run.extent.encoding == "raw":
                    ranges.append(library.range_of(run, number))
                    continue
                for block in range(run.first, run.last):
                    units.setdefault(unit_of(run, block), []).append((number, block))
    return ranges, list(units.values())


def unit_of(run: Run, block: int) -> tuple[int, int, int]:
    """Return what is the same for all blocks that are decoded together."""
    group = run.box.group
    rows = (run.box.row,) if group is None else group.boxes
    narrowest = min(run.opened.box(row).element_nbytes for row in rows)
    # Wider elements have more blocks for as many of them.
    return id(run.opened), rows[0], block * narrowest // run.box.element_nbytes
