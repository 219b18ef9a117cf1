"""One read of many elements: from the ranges of blocks that have them to whoever wants them, alone or with others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptfmt.engines.sharing import Peers, Rounds, Take, share_ranges
from ckptfmt.engines.streaming import Borrow, ReadReport, stream_requests

if TYPE_CHECKING:
    from ckptfmt.arithmetic.plan import BlockRange, Request
    from ckptfmt.engines.reader import Checkpoint
    from ckptfmt.engines.stored import StoredPiece

__all__ = ["Reading"]


class Reading:
    """Elements on their way from stored pieces to those who want them; see `Checkpoint.plan_reading`.

    Attributes:
        pieces: what is read, each piece once.
        ranges: which blocks of them this process reads for itself alone.
    """

    def __init__(self, checkpoint: Checkpoint, pieces: list[StoredPiece], borrow: Borrow | None) -> None:
        self.pieces = pieces
        self.ranges = [blocks for number, piece in enumerate(pieces) for blocks in piece.iter_ranges(number)]
        self._checkpoint = checkpoint
        self._borrow = borrow
        self._rounds: Rounds | None = None
        self._read_nbytes = self._verified_nbytes = self._request_count = self._buffer_nbytes = 0

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
        requests = self._checkpoint.plan_requests(self.pieces, ranges)

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
        buffer_nbytes = stream_requests(self._checkpoint.store, requests, take, borrow=self._borrow)
        self._buffer_nbytes = max(self._buffer_nbytes, buffer_nbytes)

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
            buffer_nbytes=self._buffer_nbytes + (0 if self._rounds is None else self._rounds.buffer_nbytes),
            metadata_nbytes=self._checkpoint.metadata_nbytes,
        )
